//! The agreement on a call: each member publishes its call, and all members compare the calls before data moves
//! (COL-3).

use super::call::{Call, CallAgreement, Kind, compare};
use super::call_exchange::{ValueSpan, decode, encode};
use super::{Group, Window, call_exchange};
use crate::buffer::DType;
use crate::buffer::ReduceOp;
use crate::error::{Error, Result};
use crate::transport::Tag;
use crate::transport::hosts::Hosts;
use crate::transport::shm::SharedMemory;
use crate::transport::shm::layout::{ARENA_BYTES, CALL_WORDS, MESSAGE_BYTES};

/// Tag of the messages of a collective's data. Tags of [`super::Request::Send`] have 32 bits, so the two ranges are
/// disjoint.
pub(crate) const TAG_DATA: Tag = 2 << 40;

/// Turns a failed agreement into an error.
fn check_agreement(agreement: CallAgreement, call: &Call, group: &Group<'_>) -> Result<()> {
    // Every member reaches the same result, so none continues with this operation.
    let failed = agreement != CallAgreement::Agreed;
    group.in_step.set(failed);
    if let Some(memory) = group.memory.filter(|_| failed) {
        memory.reset_regions();
        group.stores.reset();
        group.paths.reset();
    }
    match agreement {
        CallAgreement::Agreed => Ok(()),
        // The text is the same on every member, so it cannot name the operation that this one called.
        CallAgreement::Mismatch(detail) => Err(Error::Mismatch { during: group.title(), detail }),
        CallAgreement::Poisoned(rank, message) => Err(Error::PeerFailed {
            rank: group.members.ranks[rank],
            how: format!("failed ({message})"),
            me: group.members.ranks[group.members.me],
            during: call.to_string(),
        }),
    }
}

/// Writes the call where the peers read it after the next arrival, with the times of this member's stores or 0.
pub(crate) fn publish(memory: &SharedMemory, call: &Call, store_times: u64) {
    let phase = memory.phase().wrapping_add(1);
    let size = memory.size();
    let message = &call.message.as_bytes()[..call.message.len().min(MESSAGE_BYTES)];
    let words: [u64; CALL_WORDS] = [
        call.kind as u64 | (call.dtype as u64) << 8 | (call.op as u64) << 16,
        call.root as u64,
        call.elems as u64,
        call.window,
        call.offset_bytes as u64,
        call.sent.len() as u64 | (call.received.len() as u64) << 32,
        message.len() as u64,
        store_times,
    ];
    // SAFETY: the places lie in this member's part of the segment, which no member reads before the next arrival
    // (SHM-2); validation made each row empty or `size` long; the message was cut to its place.
    unsafe {
        memory.call(memory.me(), phase).write(words);
        let rows = memory.rows(memory.me(), phase);
        for (row, counts) in [&call.sent, &call.received].into_iter().enumerate() {
            for (at, count) in counts.iter().enumerate().take(size) {
                rows.add(row * size + at).write(*count as u64);
            }
        }
        std::ptr::copy_nonoverlapping(message.as_ptr(), memory.message(memory.me(), phase), message.len());
    }
}

/// Arrives with the call that was [`publish`]ed, waits for all, and compares. Returns all members' calls where they
/// may differ in more than their offsets (blocks of different sizes), and nothing where they are equal.
pub(crate) fn agree(memory: &SharedMemory, call: &Call, group: &Group<'_>) -> Result<Vec<Call>> {
    memory.sync(&group.wait)?;
    if (0..memory.size()).all(|rank| is_equal(memory, rank, call)) {
        return Ok(Vec::new());
    }
    let calls: Vec<Call> = (0..memory.size()).map(|rank| read(memory, rank)).collect();
    check_agreement(compare(&calls, &group.members.ranks), call, group)?;
    Ok(calls)
}

fn words(memory: &SharedMemory, rank: usize) -> [u64; CALL_WORDS] {
    words_at(memory, rank, memory.phase())
}

fn words_at(memory: &SharedMemory, rank: usize, phase: u32) -> [u64; CALL_WORDS] {
    // SAFETY: inside the segment and aligned by its layout; any bits are a value.
    unsafe { memory.call(rank, phase).read_volatile() }
}

/// The times that each member has published with its call, right after the agreement.
pub(crate) fn store_times(memory: &SharedMemory) -> impl Iterator<Item = u64> {
    (0..memory.size()).map(|rank| words(memory, rank)[7])
}

/// The offset of the range of `rank` in its window, for a member that arrived with its call at `phase`. Each member
/// has validated its own offset, but memory is accessed only after a check on this side (TRA-2).
pub(crate) fn offset_bytes(
    memory: &SharedMemory,
    rank: usize,
    phase: u32,
    window: &Window,
    bytes: usize,
) -> Result<usize> {
    let offset = words_at(memory, rank, phase)[4] as usize;
    if !offset.is_multiple_of(64) || offset.checked_add(bytes).is_none_or(|end| end > window.bytes()) {
        return Err(Error::Internal(format!(
            "member {rank} of this host passed offset {offset} for {bytes} bytes in a window of {}",
            window.bytes()
        )));
    }
    Ok(offset)
}

/// The common case, without an allocation: the encoded calls are equal.
fn is_equal(memory: &SharedMemory, rank: usize, call: &Call) -> bool {
    let own = words(memory, memory.me());
    let other = words(memory, rank);
    let same_rows = |row: usize, counts: &[usize]| {
        // SAFETY: the row lies inside the segment by its layout; any bits are a value.
        let at = |at: usize| unsafe { memory.rows(rank, memory.phase()).add(row * memory.size() + at).read_volatile() };
        counts.iter().enumerate().all(|(index, count)| at(index) == *count as u64)
    };
    own[..2] == other[..2]
        && own[3] == other[3]
        && match call.kind {
            Kind::AllReduce
            | Kind::AllReduceWindow
            | Kind::Adasum
            | Kind::Reduce
            | Kind::Broadcast
            | Kind::Barrier
            | Kind::Window
            | Kind::AllGatherRows => own[2] == other[2],
            Kind::AllGather => same_rows(1, &call.received),
            Kind::ReduceScatter | Kind::AllToAllRows => same_rows(0, &call.sent),
            Kind::Gather | Kind::Scatter | Kind::AllToAll | Kind::Poison | Kind::Presence => false,
        }
}

fn read(memory: &SharedMemory, rank: usize) -> Call {
    let [what, root, elems, window, offset_bytes, rows, message, _] = words(memory, rank);
    let size = memory.size();
    let byte = |at: u32| (what >> at & 0xff) as u8;
    let row = |row: usize, count: u64| -> Vec<usize> {
        let count = usize::try_from(count).unwrap_or(usize::MAX).min(size);
        // SAFETY: `count` is at most `size`, so the row lies inside the segment by its layout.
        let at = |at: usize| unsafe { memory.rows(rank, memory.phase()).add(row * size + at).read_volatile() };
        (0..count).map(|index| at(index) as usize).collect()
    };
    let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == byte(0)).unwrap_or(Kind::Poison);
    let text = if kind == Kind::Poison {
        let length = usize::try_from(message).unwrap_or(usize::MAX).min(MESSAGE_BYTES);
        let mut bytes = vec![0; length];
        // SAFETY: the place has MESSAGE_BYTES bytes, and the copy has `length`.
        unsafe { std::ptr::copy_nonoverlapping(memory.message(rank, memory.phase()), bytes.as_mut_ptr(), length) };
        String::from_utf8_lossy(&bytes).into_owned()
    } else {
        String::new()
    };
    Call {
        kind,
        dtype: DType::ALL.into_iter().find(|dtype| *dtype as u8 == byte(8)).unwrap_or(DType::UInt8),
        op: ReduceOp::ALL.into_iter().find(|op| *op as u8 == byte(16)).unwrap_or(ReduceOp::Sum),
        root: root as usize,
        elems: elems as usize,
        window,
        offset_bytes: offset_bytes as usize,
        sent: row(0, rows & u64::from(u32::MAX)),
        received: row(1, rows >> 32),
        message: text,
    }
}

/// As [`agree`], for groups without memory that all members share.
pub(crate) fn agree_without_memory(call: &Call, group: &Group<'_>) -> Result<()> {
    match group.hosts {
        Some(hosts) => agree_on_hosts(hosts, call, group, None).map(drop),
        None => {
            let me = group.members.me;
            let members: Vec<usize> = (0..group.members.size()).collect();
            let result = call_exchange::agree(&members, me, vec![(me, call.clone())], group)?;
            check_agreement(result, call, group)
        }
    }
}

/// Values that are sent inline with the calls of members on several hosts.
pub(crate) struct InlineValues<'a> {
    pub(crate) own: ValueSpan,
    /// Where this member's result goes, with as many bytes; may be the memory of `own`.
    pub(crate) output: *mut u8,
    /// Writes the result of the values of all members to an address, on one member of each host.
    pub(crate) combine: &'a dyn Fn(&[ValueSpan], *mut u8),
}

/// The limit of the values of all members together, in bytes, for sending them inline: what a network moves in the time of
/// the two messages that this saves, some 25 us. Also bounds what each host receives.
const MAX_INLINE_BYTES: usize = 128 << 10;

/// Whether as many bytes of each member may be sent inline with their calls.
pub(crate) fn fits_inline(bytes: usize, hosts: &Hosts, group: &Group<'_>) -> bool {
    call_exchange::is_direct(hosts.map.num_hosts()) && bytes.saturating_mul(group.members.size()) <= MAX_INLINE_BYTES
}

/// As [`agree_without_memory`]; also combines the values of all members.
///
/// # Safety
/// The values are valid, and so is the output for as many bytes, which [`fits_inline`] accepts. No other code accesses
/// them during the call.
pub(crate) unsafe fn agree_and_combine(call: &Call, values: &InlineValues<'_>, group: &Group<'_>) -> Result<()> {
    agree_on_hosts(group.several_hosts(), call, group, Some(values))
}

/// Members of a host compare their calls in shared memory first, and one of them represents the host. The offset of a
/// member's window range stays readable there, at the phase before the current one, until the next arrival. The values
/// are those of [`agree_and_combine`].
fn agree_on_hosts(hosts: &Hosts, call: &Call, group: &Group<'_>, values: Option<&InlineValues<'_>>) -> Result<()> {
    let Hosts { map, memory } = hosts;
    let here = map.members_of(map.host_of(group.members.me));
    let is_alone = here.len() == 1;
    publish(memory, call, 0);
    if !is_alone {
        // The shared memory has rows for the members of this host only.
        let bytes = values.map_or(0, |values| values.own.bytes);
        put(memory, NOTE_CALL, &encode(call)?, bytes);
        if let Some(values) = values {
            // SAFETY: the place has that many bytes, since they fit inline, and the leader reads it only after the arrival
            // below. The caller promises that `own` is valid.
            unsafe { copy(values.own.start, note_values(memory, memory.me(), NOTE_CALL), bytes) };
        }
    }
    memory.sync(&group.wait)?;
    let mut agreement = None;
    if memory.me() == 0 {
        let (mut calls, mut own) = (Vec::with_capacity(here.len()), Vec::with_capacity(here.len()));
        for (position, member) in here.iter().enumerate() {
            if is_alone {
                calls.push((*member, call.clone()));
                own.push(values.map_or(ValueSpan::EMPTY, |values| values.own));
            } else {
                let (described, bytes) = get(memory, position, NOTE_CALL);
                calls.push((*member, decode(&described, group.members.ranks[*member])?));
                own.push(ValueSpan { start: note_values(memory, position, NOTE_CALL), bytes });
            }
        }
        let leaders: Vec<usize> = (0..map.num_hosts()).map(|host| map.owner(host, 0)).collect();
        let host = map.host_of(group.members.me);
        let found = if call_exchange::is_direct(leaders.len()) {
            // SAFETY: the caller promises that its own values are valid. Those of other members lie in their notes, which
            // they do not write to before the arrival below.
            let (found, all) = unsafe { call_exchange::exchange(&leaders, host, &calls, &own, group)? };
            if let Some(values) = values.filter(|_| found == CallAgreement::Agreed) {
                if all.spans.iter().any(|span| span.bytes != values.own.bytes) {
                    return Err(Error::Internal("equal calls came with values of different lengths".to_owned()));
                }
                let output = if is_alone { values.output } else { note_values(memory, 0, NOTE_RESULT) };
                (values.combine)(&all.spans, output);
            }
            found
        } else {
            call_exchange::agree(&leaders, host, calls, group)?
        };
        if !is_alone {
            put(memory, NOTE_RESULT, &encode(&found)?, 0);
        }
        agreement = Some(found);
    }
    memory.sync(&group.wait)?;
    let agreement = match agreement {
        Some(agreement) => agreement,
        None => decode(&get(memory, 0, NOTE_RESULT).0, group.members.ranks[here[0]])?,
    };
    check_agreement(agreement, call, group)?;
    if let Some(values) = values.filter(|_| !is_alone) {
        // SAFETY: the leader has written as many bytes, and writes there again only after this member's next arrival;
        // the output is the caller's.
        unsafe { copy(note_values(memory, 0, NOTE_RESULT), values.output, values.own.bytes) };
    }
    Ok(())
}

/// The calls and results of the comparison lie in the results area, which a group on several hosts does not use
/// otherwise. A member's call is written before the first arrival of an operation and read before the second one. The
/// result is written between these two and read before the first arrival of the next operation.
const NOTE_CALL: usize = 0;
const NOTE_RESULT: usize = NOTE_BYTES;
const NOTE_BYTES: usize = ARENA_BYTES / 2;
/// In a note, values follow the description, which follows the lengths of both.
const NOTE_HEAD: usize = 16;
const NOTE_VALUES: usize = NOTE_BYTES / 2;
// Twice as many, for the gaps between values.
const _: () =
    assert!(MAX_INLINE_BYTES <= NOTE_BYTES - NOTE_VALUES && 2 * MAX_INLINE_BYTES <= call_exchange::MAX_VALUES);

/// Where the values of a note are.
fn note_values(memory: &SharedMemory, rank: usize, note: usize) -> *mut u8 {
    memory.results(rank, note).wrapping_add(NOTE_VALUES)
}

/// Writes a description, and the length of values that the caller writes.
fn put(memory: &SharedMemory, note: usize, described: &[u8], values: usize) {
    let place = memory.results(memory.me(), note);
    let length = described.len().min(NOTE_VALUES - NOTE_HEAD);
    // SAFETY: the place has NOTE_BYTES bytes; no code reads it now.
    unsafe {
        place.cast::<[u64; 2]>().write([length as u64, values as u64]);
        copy(described.as_ptr(), place.add(NOTE_HEAD), length);
    }
}

/// Reads what [`put`] has written.
fn get(memory: &SharedMemory, rank: usize, note: usize) -> (Vec<u8>, usize) {
    let place = memory.results(rank, note);
    // SAFETY: the place has NOTE_BYTES bytes; the lengths are cut to what there is room for.
    unsafe {
        let [length, values] = place.cast::<[u64; 2]>().read_volatile();
        let mut described = vec![0; (length as usize).min(NOTE_VALUES - NOTE_HEAD)];
        copy(place.add(NOTE_HEAD), described.as_mut_ptr(), described.len());
        (described, (values as usize).min(NOTE_BYTES - NOTE_VALUES))
    }
}

/// Copies between memory that does not overlap. The addresses may be null if there are no bytes.
///
/// # Safety
/// Both are valid for `bytes` bytes.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}
