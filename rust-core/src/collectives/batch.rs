//! Several collectives in one batch. The cost of a small collective is the synchronisation of the members, not its
//! bytes, so adjacent small collectives of one kind are packed into one:
//!
//! ```text
//! all_reduce a  -+
//! all_reduce b  -+-> all_reduce [a|b|c] -> a, b, c
//! all_reduce c  -+
//! ```
//!
//! - BAT-1: the packing depends only on values that all members compare, so all members pack alike. If their calls
//!   differ, the packed calls differ too, and the error reports that difference.
//! - BAT-2: each element is reduced as it would be alone (COL-1), so packing does not change any bit of the result.

use std::ops::Range;

use super::Request;
use super::call::Call;
use crate::buffer::{Device, TensorView};
use crate::error::Error;

/// Collectives of at most this many bytes are packed: copying them twice costs less than a synchronisation.
const SMALL_BYTES: usize = 32 << 10;
/// Largest number of bytes of a pack.
const MAX_PACK_BYTES: usize = 1 << 20;

/// The phases of the collectives of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchPhase {
    /// Inputs are copied into the pack.
    CopyIn,
    /// The members run the packed collective.
    Run,
    /// Results are copied out of the pack.
    CopyOut,
    /// The collectives are complete, or have failed.
    Over,
}

/// Gets called when a phase of a batch begins.
pub trait PhaseListener: Send + Sync {
    /// A phase begins for the collectives at these positions of the batch.
    fn enters(&self, phase: BatchPhase, places: &Range<usize>);
}

/// A step of the batch, with positions in the batch.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BatchStep {
    One(usize),
    Together(Range<usize>),
}

/// The steps in which member `me` of `size` runs a batch.
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
                if !alike || together + bytes > MAX_PACK_BYTES {
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

/// The call, and its size in bytes as all members count it, if it may be packed. An invalid call runs alone, so that
/// only it fails.
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

/// The input and output of a packed collective.
fn places(request: &Request) -> (Vec<TensorView>, Vec<TensorView>) {
    match request {
        Request::AllReduce { input, output, .. } => (vec![*input], vec![*output]),
        Request::Broadcast { data, .. } => (vec![*data], vec![*data]),
        Request::AllGather { input, outputs } => (vec![*input], outputs.clone()),
        Request::ReduceScatter { inputs, output, .. } => (inputs.clone(), vec![*output]),
        _ => Default::default(),
    }
}

/// Several collectives of one kind, packed into one.
pub(super) struct PackedCollective {
    request: Request,
    /// Number of packed collectives.
    packed: usize,
    /// The output of each collective, and its offset in the pack.
    results: Vec<(TensorView, TensorView)>,
    /// Memory of the pack, which `request` reads and writes. Words, so that every element type is aligned.
    _memory: Vec<u64>,
}

impl PackedCollective {
    /// Packs `requests`, which [`plan`] has found to be of one kind.
    pub(super) fn new(requests: &[Request]) -> Self {
        let places: Vec<_> = requests.iter().map(places).collect();
        let in_place = matches!(requests[0], Request::AllReduce { .. } | Request::Broadcast { .. });
        let bytes = |views: &[TensorView]| views.iter().map(TensorView::bytes).sum::<usize>();
        let all: usize =
            places.iter().map(|(inputs, outputs)| bytes(inputs) + if in_place { 0 } else { bytes(outputs) }).sum();
        let mut memory = vec![0u64; all.div_ceil(8)];
        let mut free: *mut u8 = memory.as_mut_ptr().cast();
        // A block of the pack, and the part of it for each view.
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
                // SAFETY: the view's promise for one side; on the other, memory of this pack that no other code uses.
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

    /// The packed request.
    pub(super) fn request(&self) -> &Request {
        &self.request
    }

    /// The error of the packed operation as the error of one of its collectives. A mismatch shows the sizes of the
    /// packs.
    pub(super) fn explain(&self, error: Error) -> Error {
        match error {
            Error::Mismatch { during, detail } => {
                Error::Mismatch { during: format!("{during} ({} packed into one)", self.packed), detail }
            }
            other => other,
        }
    }

    /// Copies the results to the outputs.
    pub(super) fn copy_results(&self) {
        for (result, part) in &self.results {
            // SAFETY: the view's promise for one side; on the other, memory of this pack that is not used any more.
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
            // SAFETY: the array of words is longer than any view here.
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
