//! The collectives that move values without combining them: broadcast, all-gather, gather, scatter, all-to-all; and
//! the barrier, which moves nothing. Sending members publish their blocks chunk by chunk in their shared memory, and
//! receiving members copy them from there.

use super::{Algorithm, SyncSteps};
use crate::buffer::TensorView;
use crate::collectives::call::{Call, Kind};
use crate::collectives::stores::Purpose;
use crate::collectives::{Group, Request};
use crate::error::Result;

/// Collectives over shared memory that move values without combining them, and the barrier.
pub(super) struct Exchange;

/// Bytes that a member publishes in one step.
const CHUNK_BYTES: usize = 256 << 10;

/// The blocks that one member sends and receives.
struct ExchangePlan<'a> {
    /// The blocks that it sends: one for all members, or one for each.
    sends: ExchangeInput<'a>,
    /// Own block: source and destination.
    own: Option<(TensorView, TensorView)>,
    /// The destination of the block from each member, which has the size of the sender's block.
    receives: Vec<Option<TensorView>>,
}

enum ExchangeInput<'a> {
    Nothing,
    All(TensorView),
    Each(&'a [TensorView]),
}

impl Algorithm for Exchange {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.memory.is_some() && !call.reduces()
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        let memory = group.shared();
        let (me, size) = (memory.me(), memory.size());
        let plan = plan(request, me, size);
        // If the sender has one channel for each member, each reads its own.
        let each = matches!(call.kind, Kind::Scatter | Kind::AllToAll);
        let chunk = CHUNK_BYTES.min(memory.region_limit());
        let channel = if each { (chunk / size) & !63 } else { chunk };
        let received: usize = plan.receives.iter().flatten().map(TensorView::bytes).sum();
        let results = group.results.begin(Some(call.kind), received);
        // Bytes of the blocks, as far as all members know them before the first arrival.
        let known = match call.kind {
            Kind::Broadcast => call.bytes(),
            Kind::AllGather => longest_block(call, &[]),
            Kind::Barrier => 0,
            _ => chunk,
        };
        let mut steps = SyncSteps::with_chunks(memory, call, group, Purpose::Move, known);
        let mut longest = 1;
        let mut start = 0;
        while start < longest {
            let region = memory.reserve(if each { size * channel } else { channel });
            let arena = memory.arena(me, region);
            let stores = steps.chunk(channel);
            let publish = |to: usize, block: &TensorView| {
                let length = block.bytes().saturating_sub(start).min(channel);
                // SAFETY: the range lies inside the block; the channels fit the region, which is this member's to write
                // until the synchronisation (SHM-2).
                unsafe { stores.publish(block.ptr().wrapping_add(start), arena.add(to * channel), length) };
            };
            match plan.sends {
                ExchangeInput::Nothing => {}
                ExchangeInput::All(block) => publish(0, &block),
                ExchangeInput::Each(blocks) => {
                    for (to, block) in blocks.iter().enumerate().filter(|(to, _)| *to != me) {
                        publish(to, block);
                    }
                }
            }
            results.wait(|| steps.sync())?;
            if start == 0 {
                longest = longest_block(call, steps.calls.as_deref().unwrap_or_default());
            }
            if let Some((from, to)) = plan.own {
                let length = from.bytes().saturating_sub(start).min(channel);
                let (from, to) = (from.ptr().wrapping_add(start), to.ptr().wrapping_add(start));
                // SAFETY: validation ensured equal lengths; they are the same memory or do not overlap.
                unsafe { results.copy(from, to, length) };
            }
            for from in (1..size).map(|distance| (me + distance) % size) {
                let Some(block) = &plan.receives[from] else { continue };
                let length = block.bytes().saturating_sub(start).min(channel);
                let lane_start = if each { me * channel } else { 0 };
                let channel_of = memory.arena(from, region).wrapping_add(lane_start);
                stores.in_parts(length, |part, _| {
                    let to = block.ptr().wrapping_add(start + part.start);
                    // SAFETY: the range lies inside the own block; the channel lies inside the region and holds the
                    // sender's part of this phase (SHM-1).
                    unsafe { results.copy(channel_of.add(part.start), to, part.len()) };
                });
            }
            stores.finish();
            start += channel;
        }
        results.finish(plan.receives.iter().flatten());
        Ok(())
    }
}

/// Bytes of the longest block that any member sends, because all members must make the same number of steps. `calls`
/// is empty if all calls are equal.
fn longest_block(call: &Call, calls: &[Call]) -> usize {
    let elems = match call.kind {
        Kind::Barrier | Kind::Window => 0,
        Kind::AllGather => call.received.iter().copied().max().unwrap_or(0),
        _ if calls.is_empty() => call.elems,
        _ => {
            let all = calls.iter().flat_map(|call| call.sent.iter().chain(&call.received).chain([&call.elems]));
            all.copied().max().unwrap_or(0)
        }
    };
    elems.saturating_mul(call.dtype.size())
}

/// The blocks that this member sends and receives.
fn plan(request: &Request, me: usize, size: usize) -> ExchangePlan<'_> {
    let takes_all = |outputs: &[TensorView]| outputs.iter().copied().map(Some).collect();
    let takes_one = |root: usize, output| (0..size).map(|rank| (rank == root).then_some(output)).collect();
    let none = || vec![None; size];
    let (sends, own, receives) = match request {
        Request::Broadcast { data, root } if *root == me => (ExchangeInput::All(*data), None, none()),
        Request::Broadcast { data, root } => (ExchangeInput::Nothing, None, takes_one(*root, *data)),
        Request::AllGather { input, outputs } => {
            (ExchangeInput::All(*input), Some((*input, outputs[me])), takes_all(outputs))
        }
        Request::Gather { input, outputs, root } if *root == me => {
            (ExchangeInput::Nothing, Some((*input, outputs[me])), takes_all(outputs))
        }
        Request::Gather { input, .. } => (ExchangeInput::All(*input), None, none()),
        Request::Scatter { inputs, output, root } if *root == me => {
            (ExchangeInput::Each(inputs), Some((inputs[me], *output)), none())
        }
        Request::Scatter { output, root, .. } => (ExchangeInput::Nothing, None, takes_one(*root, *output)),
        Request::AllToAll { inputs, outputs } => {
            (ExchangeInput::Each(inputs), Some((inputs[me], outputs[me])), takes_all(outputs))
        }
        _ => (ExchangeInput::Nothing, None, none()),
    };
    ExchangePlan { sends, own, receives }
}
