//! Broadcast and all-gather: every byte is sent to each host once, and all members of the host copy it from shared
//! memory.
//!
//! Each arena is used as two halves in alternation: a member that has arrived at round k+1 has copied all data of
//! round k, so round k+2 may overwrite it.

use super::super::messages::exchange;
use super::super::{Algorithm, copy};
use super::spreads;
use crate::buffer::TensorView;
use crate::collectives::agreement::agree_without_memory;
use crate::collectives::call::Call;
use crate::collectives::{Group, Request};
use crate::error::Result;
use crate::transport::hosts::Hosts;
use crate::transport::shm::layout::ARENA_BYTES;

/// Broadcast and all-gather in groups on several hosts.
pub(in super::super) struct Spread;

const HALF_BYTES: usize = ARENA_BYTES / 2;

impl Algorithm for Spread {
    fn name(&self) -> &'static str {
        "hosts"
    }

    fn accepts(&self, call: &Call, group: &Group<'_>) -> bool {
        group.hosts.is_some() && spreads(call)
    }

    fn run(&self, request: &Request, call: &Call, group: &Group<'_>) -> Result<()> {
        agree_without_memory(call, group)?;
        match request {
            Request::Broadcast { data, root } => broadcast(data, *root, group),
            Request::AllGather { input, outputs } => all_gather(input, outputs, group),
            _ => unreachable!("`accepts` takes broadcast and all_gather only"),
        }
    }
}

/// Broadcasts along a binomial tree of hosts, in all channels in parallel. In each round, the owner of a channel
/// receives its share, sends it to the hosts below, and all members of the host copy the shares from the owners'
/// arenas.
fn broadcast(data: &TensorView, root: usize, group: &Group<'_>) -> Result<()> {
    let Hosts { map, memory } = group.several_hosts();
    let me = group.members.me;
    let (host, root_host, num_hosts) = (map.host_of(me), map.host_of(root), map.num_hosts());
    // Host numbers are relative to the root's host; the parent of a number lacks its lowest set bit.
    let place = (host + num_hosts - root_host) % num_hosts;
    let reach = if place == 0 { num_hosts.next_power_of_two() } else { 1 << place.trailing_zeros() };
    let at = |place: usize| (place + root_host) % num_hosts;
    let steps = || std::iter::successors(Some(reach / 2), |step| Some(step / 2)).take_while(|step| *step > 0);
    for (round, start) in (0..data.bytes()).step_by(HALF_BYTES).enumerate() {
        let half = round % 2 * HALF_BYTES;
        let bytes = HALF_BYTES.min(data.bytes() - start);
        let share = bytes.div_ceil(map.channels()).next_multiple_of(64);
        let channel_range = |channel: usize| (channel * share).min(bytes)..((channel + 1) * share).min(bytes);
        // Where the values of each channel are on this host.
        let source = |channel: usize| match host == root_host {
            true => memory.arena(map.position_of(root), half).wrapping_add(channel_range(channel).start),
            false => memory.arena(channel, half).wrapping_add(channel_range(channel).start),
        };
        if me == root {
            // SAFETY: the range lies inside the tensor; the half is this member's until the arrival below.
            unsafe { copy(data.ptr().wrapping_add(start), memory.arena(memory.me(), half), bytes) };
        }
        if host == root_host {
            memory.sync(&group.wait)?;
        }
        let channel = memory.me();
        if channel < map.channels() && !channel_range(channel).is_empty() {
            let (from, bytes) = (source(channel), channel_range(channel).len());
            if place != 0 {
                exchange(group, &[], &[(map.owner(at(place - reach), channel), from, bytes)])?;
            }
            let below =
                steps().filter(|step| place + step < num_hosts).map(|step| map.owner(at(place + step), channel));
            let sends: Vec<_> = below.map(|to| (to, from.cast_const(), bytes)).collect();
            exchange(group, &sends, &[])?;
        }
        if host != root_host {
            memory.sync(&group.wait)?;
        }
        if me != root {
            for channel in 0..map.channels() {
                let range = channel_range(channel);
                // SAFETY: the owners wrote their channels of this round before the arrival above, and do not write
                // there again before the next arrival but one; the range lies inside the tensor.
                unsafe { copy(source(channel), data.ptr().wrapping_add(start + range.start), range.len()) };
            }
        }
    }
    Ok(())
}

/// Each member sends its block to one member of every other host, which publishes it to the others there.
fn all_gather(input: &TensorView, outputs: &[TensorView], group: &Group<'_>) -> Result<()> {
    let Hosts { map, memory } = group.several_hosts();
    let (me, size) = (group.members.me, group.members.size());
    let host = map.host_of(me);
    // Which member publishes each block on this host, and in which channel of its arena.
    let shown = map.shown_on(host);
    // All hosts make the same number of rounds.
    let channels = (0..map.num_hosts()).flat_map(|host| map.shown_on(host)).map(|(_, channel)| channel + 1).max();
    let channel_bytes = (HALF_BYTES / channels.unwrap_or(1)) & !63;
    let longest = outputs.iter().map(TensorView::bytes).max().unwrap_or(0);
    for (round, start) in (0..longest).step_by(channel_bytes).enumerate() {
        let half = round % 2 * HALF_BYTES;
        let length = |member: usize| outputs[member].bytes().saturating_sub(start).min(channel_bytes);
        let place = |member: usize| {
            let (position, channel) = shown[member];
            memory.arena(position, half).wrapping_add(channel * channel_bytes)
        };
        // SAFETY: the range lies inside the input; the half is this member's until the arrival below.
        unsafe { copy(input.ptr().wrapping_add(start), place(me), length(me)) };
        let others = (0..map.num_hosts()).filter(|other| *other != host && length(me) > 0);
        let sends: Vec<_> = others
            .map(|other| (map.counterpart(me, other), input.ptr().wrapping_add(start).cast_const(), length(me)))
            .collect();
        let comes = |member: &usize| map.host_of(*member) != host && shown[*member].0 == memory.me();
        let recvs: Vec<_> = (0..size)
            .filter(|member| comes(member) && length(*member) > 0)
            .map(|member| (member, place(member), length(member)))
            .collect();
        exchange(group, &sends, &recvs)?;
        memory.sync(&group.wait)?;
        for (member, output) in outputs.iter().enumerate() {
            let to = output.ptr().wrapping_add(start);
            // The member's own block may be in place already.
            let from = if member == me { input.ptr().wrapping_add(start) } else { place(member) };
            // SAFETY: the published data was written before the arrival above, and stays until the next arrival but
            // one; the range lies inside the output. Input and output are the same memory or do not overlap.
            unsafe { copy(from, to, length(member)) };
        }
    }
    Ok(())
}
