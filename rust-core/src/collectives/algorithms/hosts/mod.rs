//! Collectives of groups on several hosts, with the smallest number of bytes between hosts. Inside a host, members read
//! and write each other's shared memory. Gather, scatter and all-to-all, where each byte has one destination, use
//! point-to-point messages.
//!
//! In these groups, only this folder uses the arenas. A member uses them between two arrivals of one operation, or
//! until the first arrival of the next operation.

use super::{Algorithm, copy};
use crate::buffer::{ReduceOp, TensorView};
use crate::collectives::call::{Call, Kind};
use crate::collectives::{Group, Request, agreement};
use crate::error::Result;
use crate::transport::hosts::Hosts;
use crate::transport::shm::layout::ARENA_BYTES;

mod chain;
mod spread;

pub(super) use spread::Spread;

use chain::{Chain, ChainPiece, ResultRanks};

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
        agreement::agree_without_memory(call, group)?;
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
                let (bytes, arrived) = (call.bytes(), memory.phase().wrapping_sub(1));
                let mut parts = Vec::with_capacity(memory.size());
                for (position, member) in map.members_of(map.host_of(group.members.me)).iter().enumerate() {
                    let offset = agreement::offset_bytes(memory, position, arrived, window, bytes)?;
                    let start = window.peer(*member).expect("a window is visible to the members of one host");
                    parts.push(start.wrapping_add(offset));
                }
                let pieces = chain::pieces(0..bytes, ResultRanks::All, map.channels());
                // SAFETY: the offsets were checked against the window, whose parts are mapped with that size. All members
                // of this host are between the arrival that compared their calls and the one below.
                unsafe { Chain { dtype: call.dtype, op: *op, parts: &parts, pieces: &pieces }.run(group)? };
                memory.sync(&group.wait)
            }
            _ => unreachable!("`accepts` takes reductions only"),
        }
    }
}

/// Reduces adjacent blocks through the arenas. The result of block i goes to the ranks that `to` names; `output` is
/// this member's result, if it gets one.
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
    let total: usize = blocks.iter().map(TensorView::bytes).sum();
    for start in (0..total).step_by(ARENA_BYTES) {
        let end = (start + ARENA_BYTES).min(total);
        let mut pieces: Vec<ChainPiece> = Vec::new();
        // The range of this member's result in the arena, and its start in the output.
        let mut mine = None;
        let mut block_start = 0;
        for (index, block) in blocks.iter().enumerate() {
            let (from, until) = (block_start.max(start), (block_start + block.bytes()).min(end));
            if from < until {
                // SAFETY: the range lies inside the block, and in the arena, which is this member's until the next arrival.
                unsafe { copy(block.ptr().add(from - block_start), parts[me].add(from - start), until - from) };
                let to = to(index);
                pieces.extend(chain::pieces(from - start..until - start, to, map.channels()));
                if to.is_for(group.members.me) {
                    mine = Some((from - start, from - block_start, until - from));
                }
            }
            block_start += block.bytes();
        }
        memory.sync(&group.wait)?;
        // SAFETY: arenas are longer than a section; their owners are between the arrival above and the one below.
        unsafe { Chain { dtype, op, parts: &parts, pieces: &pieces }.run(group)? };
        memory.sync(&group.wait)?;
        if let (Some(output), Some((from, to, bytes))) = (output, mine) {
            // SAFETY: the range lies inside this member's arena, which is not written now, and inside the output.
            unsafe { copy(parts[me].add(from), output.ptr().add(to), bytes) };
        }
    }
    Ok(())
}

/// Whether [`Spread`] runs `call`.
fn spreads(call: &Call) -> bool {
    matches!(call.kind, Kind::Broadcast | Kind::AllGather)
}
