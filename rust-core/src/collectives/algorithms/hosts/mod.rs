//! Collectives of groups on several hosts, with the smallest number of bytes between hosts. Inside a host, members read
//! and write each other's shared memory. Gather, scatter and all-to-all, where each byte has one destination, use
//! point-to-point messages.
//!
//! Reductions go from host to host ([`chain`]), as the diagrams here show, unless each host has one member
//! ([`distributed`]) or the tensor is small ([`small`]).
//!
//! In these groups, only this folder uses the arenas. A member uses them between two arrivals of one operation, or
//! until the first arrival of the next operation.

use super::{Algorithm, copy};
use crate::buffer::{ReduceOp, TensorView};
use crate::collectives::call::{Call, Kind};
use crate::collectives::{Group, Request, Window, agreement};
use crate::error::Result;
use crate::transport::hosts::Hosts;
use crate::transport::shm::layout::ARENA_BYTES;

mod chain;
mod distributed;
mod small;
mod spread;
mod steps;

pub(super) use spread::Spread;

use chain::{Chain, ChainPiece, ChannelOwner, ResultRanks};

/// All-reduce, reduce and reduce-scatter in groups on several hosts.
pub(super) struct Reduction;

impl Algorithm for Reduction {
    fn name(&self) -> &'static str {
        "hosts"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.hosts.is_some() && call.reduces()
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        if let Request::AllReduce { input, output, op } = request
            && agreement::fits_inline(input.bytes(), group.several_hosts(), group)
        {
            return small::all_reduce(input, output, *op, call, group);
        }
        agreement::agree_without_memory(call, group)?;
        if distributed::accepts(call, group) {
            return distributed::run(request, call, group);
        }
        match request {
            Request::AllReduce { input, output, op } => {
                reduce(std::slice::from_ref(input), Some(output), |_| ResultRanks::All, *op, group)
            }
            Request::Reduce { input, output, op, root } => {
                let output = (*root == group.members.me).then_some(output);
                reduce(std::slice::from_ref(input), output, |_| ResultRanks::Member(*root), *op, group)
            }
            Request::ReduceScatter { inputs, output, op } => {
                reduce(inputs, Some(output), ResultRanks::Member, *op, group)
            }
            Request::AllReduceWindow { window, op, .. } => {
                let Hosts { map, memory } = group.several_hosts();
                let bytes = call.bytes();
                let parts = window_parts(window, bytes, group)?;
                let own = parts[memory.me()];
                let pieces: Vec<ChainPiece> = chain::pieces(0..bytes, call.dtype, map.channels())
                    .map(|range| ChainPiece {
                        start: range.start,
                        bytes: range.len(),
                        to: ResultRanks::All,
                        input: own.wrapping_add(range.start),
                        output: std::ptr::null_mut(),
                    })
                    .collect();
                let chain = Chain { dtype: call.dtype, op: *op, parts: &parts, pieces: &pieces, to_parts: true };
                // SAFETY: the offsets were checked against the window, whose parts are mapped with that size. All
                // members of this host are between the arrival that compared their calls and the one below.
                if let Some(mut owner) = unsafe { ChannelOwner::new(&chain, group) } {
                    // SAFETY: as above.
                    unsafe { owner.work(pieces.len(), pieces.len())? };
                }
                memory.sync(&group.wait)
            }
            _ => unreachable!("`accepts` takes reductions only"),
        }
    }
}

/// The ranges of the window that members of this host reduce, by position, after they have compared their calls.
fn window_parts(window: &Window, bytes: usize, group: &Group<'_>) -> Result<Vec<*mut u8>> {
    let Hosts { map, memory } = group.several_hosts();
    let arrived = memory.phase().wrapping_sub(1);
    let here = map.members_of(map.host_of(group.members.me)).iter().enumerate();
    here.map(|(position, member)| {
        let offset = agreement::offset_bytes(memory, position, arrived, window, bytes)?;
        let start = window.peer(*member).expect("a window is visible to the members of one host");
        Ok(start.wrapping_add(offset))
    })
    .collect()
}

/// Sections of tensors go through the arenas in turn, each through a slot of this size. While the chain reduces some,
/// the members copy values of later ones into other slots.
const SECTION_BYTES: usize = 512 << 10;
const SLOTS: usize = ARENA_BYTES / SECTION_BYTES;
/// A section's result is copied out this many rounds after its values were copied in. One round later there has been
/// an arrival since the last read of the slot, so the next but one may write to it.
const LAG: usize = SLOTS - 2;

/// Reduces adjacent blocks through the arenas. The result of block i goes to the ranks that `to` names; `output` is
/// this member's result, if it gets one.
///
/// ```text
/// round        r                       r+1                     r+LAG
/// copy in      section r               section r+1
/// owners       fold and send sections, as carries and results arrive
/// arrival      -------- all ---------- all ------------------- all --------
/// copy out                                                     section r
/// ```
///
/// An owner does not copy the values of its own pieces: it folds them where they are.
fn reduce(
    blocks: &[TensorView],
    output: Option<&TensorView>,
    to: impl Fn(usize) -> ResultRanks,
    op: ReduceOp,
    group: &Group<'_>,
) -> Result<()> {
    let Hosts { map, memory } = group.several_hosts();
    let (me, dtype) = (memory.me(), blocks[0].dtype());
    let parts: Vec<*mut u8> = (0..memory.size()).map(|position| memory.arena(position, 0)).collect();
    let mut pieces: Vec<ChainPiece> = Vec::new();
    let mut outputs: Vec<*mut u8> = Vec::new();
    // One past the last piece of each section.
    let mut ends: Vec<usize> = Vec::new();
    let total: usize = blocks.iter().map(TensorView::bytes).sum();
    for (section, start) in (0..total).step_by(SECTION_BYTES).enumerate() {
        let end = (start + SECTION_BYTES).min(total);
        let slot = section % SLOTS * SECTION_BYTES;
        let mut block_start = 0;
        for (index, block) in blocks.iter().enumerate() {
            let (from, until) = (block_start.max(start), (block_start + block.bytes()).min(end));
            let to = to(index);
            let wanted = output.filter(|_| to.is_for(group.members.me));
            for range in chain::pieces(from..until.max(from), dtype, map.channels()) {
                let inside = range.start - block_start;
                let result = wanted.map_or(std::ptr::null_mut(), |output| output.ptr().wrapping_add(inside));
                let is_own = pieces.len() % map.channels() == me;
                outputs.push(result);
                pieces.push(ChainPiece {
                    start: slot + range.start - start,
                    bytes: range.len(),
                    to,
                    input: block.ptr().wrapping_add(inside),
                    output: if is_own { result } else { std::ptr::null_mut() },
                });
            }
            block_start += block.bytes();
        }
        ends.push(pieces.len());
    }
    let of_section = |section: usize| section.checked_sub(1).map_or(0, |before| ends[before])..ends[section];
    let others = |section: usize| of_section(section).filter(|piece| piece % map.channels() != me);
    let chain = Chain { dtype, op, parts: &parts, pieces: &pieces, to_parts: false };
    // SAFETY: slots are as long as sections, and the blocks and the output contain their ranges.
    let mut owner = unsafe { ChannelOwner::new(&chain, group) };
    if memory.size() == 1
        && let Some(owner) = &mut owner
    {
        // No other member reads or writes the slots, and what this one sends and receives lies elsewhere (CHN-4).
        // SAFETY: as above.
        return unsafe { owner.work(pieces.len(), pieces.len()) };
    }
    let lag = LAG.min(ends.len());
    for round in 0..ends.len() + lag {
        if round < ends.len() {
            for piece in others(round).map(|piece| &pieces[piece]) {
                // SAFETY: the range lies inside the block, and in the slot, which is this member's until the arrival
                // below: all have read the slot's previous section before the last arrival ([`LAG`]).
                unsafe { copy(piece.input, parts[me].add(piece.start), piece.bytes) };
            }
        }
        let complete = round.checked_sub(lag);
        if let Some(owner) = &mut owner {
            let released = round.checked_sub(1).map_or(0, |before| ends[before.min(ends.len() - 1)]);
            // SAFETY: the arrival of the previous round followed all writes to the slots of released pieces, and the
            // members read results only after the arrival below.
            unsafe { owner.work(released, complete.map_or(0, |section| ends[section]))? };
        }
        memory.sync(&group.wait)?;
        let Some(section) = complete else { continue };
        for piece in others(section).filter(|piece| !outputs[*piece].is_null()) {
            let ChainPiece { start, bytes, .. } = pieces[piece];
            // SAFETY: the owner wrote the result to its slot before the arrival, and writes there again only after
            // this member's next one; the range lies inside the output.
            unsafe { copy(parts[piece % map.channels()].add(start), outputs[piece], bytes) };
        }
    }
    Ok(())
}

/// Whether [`Spread`] runs `call`.
fn spreads(call: &Call) -> bool {
    matches!(call.kind, Kind::Broadcast | Kind::AllGather)
}
