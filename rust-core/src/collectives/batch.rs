//! Several collectives in one go. What a small one costs is the meeting of the members, not its bytes, so small
//! neighbours of one kind are packed into one:
//!
//! ```text
//! all_reduce a  -+
//! all_reduce b  -+-> all_reduce [a|b|c] -> a, b, c
//! all_reduce c  -+
//! ```
//!
//! - BAT-1: what is packed follows from what members that agree know of each other's calls, so they pack alike.
//!   Members that disagree meet with different calls, and that is what the error says.
//! - BAT-2: each element is reduced as it would be alone (COL-1), so packing does not change a bit of the result.

use std::ops::Range;

use super::Request;
use super::call::Call;
use crate::buffer::{Device, TensorView};
use crate::error::Error;

/// Collectives of at most this many bytes are packed: twice the copy costs less than a meeting.
const SMALL_BYTES: usize = 32 << 10;
/// Bytes that travel together at most.
const TOGETHER_BYTES: usize = 1 << 20;

/// What becomes of collectives of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchPhase {
    /// They are copied to where they lie side by side.
    CopyIn,
    /// The members meet.
    Run,
    /// Results are copied to where they belong.
    CopyOut,
    /// They are complete, or have failed.
    Over,
}

/// Hears of the phases of a batch when they begin.
pub trait PhaseListener: Send + Sync {
    /// This one begins, of the collectives at these places.
    fn enters(&self, phase: BatchPhase, places: &Range<usize>);
}

/// What to run next, as places in the batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BatchStep {
    One(usize),
    Together(Range<usize>),
}

/// How member `me` of `size` runs a batch.
pub(super) fn plan(requests: &[Request], me: usize, size: usize) -> Vec<BatchStep> {
    let calls: Vec<Option<(Call, usize)>> = requests.iter().map(|request| small(request, me, size)).collect();
    let mut steps = Vec::new();
    let mut start = 0;
    while start < requests.len() {
        let mut end = start + 1;
        if let Some((first, bytes)) = &calls[start] {
            let mut together = *bytes;
            while let Some(Some((next, bytes))) = calls.get(end) {
                let alike =
                    (next.kind, next.dtype, next.op, next.root) == (first.kind, first.dtype, first.op, first.root);
                if !alike || together + bytes > TOGETHER_BYTES {
                    break;
                }
                together += bytes;
                end += 1;
            }
        }
        steps.push(if end == start + 1 { BatchStep::One(start) } else { BatchStep::Together(start..end) });
        start = end;
    }
    steps
}

/// The call, and the bytes that all members count for it, if it may be packed. One that is not acceptable goes alone,
/// so that its error is its own.
fn small(request: &Request, me: usize, size: usize) -> Option<(Call, usize)> {
    let bytes = match request {
        Request::AllReduce { input, .. } => input.bytes(),
        Request::Broadcast { data, .. } => data.bytes(),
        Request::AllGather { outputs, .. } => outputs.iter().map(TensorView::bytes).sum(),
        Request::ReduceScatter { inputs, .. } => inputs.iter().map(TensorView::bytes).sum(),
        _ => return None,
    };
    let on_cpu = |views: &[TensorView]| views.iter().all(|view| view.device() == Device::Cpu);
    let (inputs, outputs) = places(request);
    if bytes > SMALL_BYTES || !on_cpu(&inputs) || !on_cpu(&outputs) {
        return None;
    }
    Call::of(request, me, size).ok().flatten().map(|call| (call, bytes))
}

/// What a packed collective reads and writes.
fn places(request: &Request) -> (Vec<TensorView>, Vec<TensorView>) {
    match request {
        Request::AllReduce { input, output, .. } => (vec![*input], vec![*output]),
        Request::Broadcast { data, .. } => (vec![*data], vec![*data]),
        Request::AllGather { input, outputs } => (vec![*input], outputs.clone()),
        Request::ReduceScatter { inputs, output, .. } => (inputs.clone(), vec![*output]),
        _ => Default::default(),
    }
}

/// Collectives of one kind, packed.
pub(super) struct PackedCollective {
    request: Request,
    /// How many it stands for.
    packed: usize,
    /// What each one writes, and where it lies in the pack.
    results: Vec<(TensorView, TensorView)>,
    /// What `request` works on. Words, so that every element type is aligned.
    _memory: Vec<u64>,
}

impl PackedCollective {
    /// Packs `requests`, which [`plan`] has found to be alike.
    pub(super) fn new(requests: &[Request]) -> Self {
        let places: Vec<_> = requests.iter().map(places).collect();
        let in_place = matches!(requests[0], Request::AllReduce { .. } | Request::Broadcast { .. });
        let bytes = |views: &[TensorView]| views.iter().map(TensorView::bytes).sum::<usize>();
        let all: usize =
            places.iter().map(|(inputs, outputs)| bytes(inputs) + if in_place { 0 } else { bytes(outputs) }).sum();
        let mut memory = vec![0u64; all.div_ceil(8)];
        let mut free: *mut u8 = memory.as_mut_ptr().cast();
        // One block of the pack, and the part of it that stands for each view.
        let mut pack = |views: &[TensorView]| -> (TensorView, Vec<TensorView>) {
            let elems = views.iter().map(TensorView::elems).sum();
            // SAFETY: all blocks together have `all` bytes, and each starts behind the one before it, at a multiple of
            // the element; the memory lives as long as the pack.
            let block = unsafe { TensorView::new(free, elems, views[0].dtype(), Device::Cpu, 0) };
            let block = block.expect("words are aligned for every element");
            // SAFETY: as above.
            free = unsafe { free.add(block.bytes()) };
            let mut start = 0;
            let mut next = |view: &TensorView| {
                start += view.elems();
                block.slice(start - view.elems(), view.elems())
            };
            (block, views.iter().map(&mut next).collect())
        };
        let (mut inputs, mut outputs, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for block in 0..places[0].0.len() {
            let views: Vec<_> = places.iter().map(|(inputs, _)| inputs[block]).collect();
            let (packed, parts) = pack(&views);
            for (view, part) in views.iter().zip(&parts) {
                // SAFETY: the view's promise for the one, memory of this pack that nobody else uses for the other.
                unsafe { part.as_bytes_mut().copy_from_slice(view.as_bytes()) };
            }
            if in_place {
                results.extend(places.iter().map(|(_, outputs)| outputs[block]).zip(parts));
            }
            inputs.push(packed);
        }
        if !in_place {
            for block in 0..places[0].1.len() {
                let views: Vec<_> = places.iter().map(|(_, outputs)| outputs[block]).collect();
                let (packed, parts) = pack(&views);
                results.extend(views.into_iter().zip(parts));
                outputs.push(packed);
            }
        }
        let request = match &requests[0] {
            Request::AllReduce { op, .. } => Request::AllReduce { input: inputs[0], output: inputs[0], op: *op },
            Request::Broadcast { root, .. } => Request::Broadcast { data: inputs[0], root: *root },
            Request::AllGather { .. } => Request::AllGather { input: inputs[0], outputs },
            Request::ReduceScatter { op, .. } => Request::ReduceScatter { inputs, output: outputs[0], op: *op },
            other => unreachable!("`plan` packs no {other:?}"),
        };
        Self { request, packed: requests.len(), results, _memory: memory }
    }

    /// The one that stands for all.
    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    /// A mismatch shows the sizes of the packs.
    pub(super) fn explain(&self, error: Error) -> Error {
        match error {
            Error::Mismatch { during, detail } => {
                Error::Mismatch { during: format!("{during} ({} packed into one)", self.packed), detail }
            }
            other => other,
        }
    }

    /// Copies the results to where they belong.
    pub(super) fn hand_out(&self) {
        for (result, part) in &self.results {
            // SAFETY: the view's promise for the one, memory of this pack that nobody else uses any more for the other.
            unsafe { result.as_bytes_mut().copy_from_slice(part.as_bytes()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{DType, ReduceOp};

    #[test]
    fn small_neighbours_of_one_kind_go_together() {
        let mut words = vec![0u64; SMALL_BYTES];
        let mut view = |elems, dtype| {
            // SAFETY: the words are longer than any view here.
            unsafe { TensorView::new(words.as_mut_ptr().cast(), elems, dtype, Device::Cpu, 0) }.expect("it is aligned")
        };
        let mut sum = |elems, dtype| {
            let data = view(elems, dtype);
            Request::AllReduce { input: data, output: data, op: ReduceOp::Sum }
        };
        let (small, large) = (sum(3, DType::Float32), sum(SMALL_BYTES / 4 + 1, DType::Float32));
        let other = sum(3, DType::Float64);
        let Request::AllReduce { input, .. } = small else { unreachable!() };
        let max = Request::AllReduce { input, output: input, op: ReduceOp::Max };
        let wrong = Request::AllReduce { input, output: input.slice(0, 2), op: ReduceOp::Sum };
        let requests =
            [&small, &small, &large, &small, &other, &other, &max, &small, &wrong, &small, &Request::Barrier];
        let requests: Vec<Request> = requests.into_iter().cloned().collect();
        let steps = plan(&requests, 0, 2);
        assert_eq!(
            steps,
            [
                BatchStep::Together(0..2),
                BatchStep::One(2),
                BatchStep::One(3),
                BatchStep::Together(4..6),
                BatchStep::One(6),
                BatchStep::One(7),
                BatchStep::One(8),
                BatchStep::One(9),
                BatchStep::One(10)
            ]
        );
        let many = vec![sum(SMALL_BYTES / 4, DType::Float32); 40];
        assert_eq!(plan(&many, 0, 2), [BatchStep::Together(0..32), BatchStep::Together(32..40)]);
    }
}
