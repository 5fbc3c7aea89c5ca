//! The messages of an agreement between hosts: nodes tell each other the calls of the members that they represent.

use super::Group;
use super::call::{Call, CallAgreement, compare};
use super::scratch::ScratchMemory;
use crate::error::{Error, Result};
use crate::transport::{Message, Tag, Transport, wait_all};

/// Tags of the messages inside collectives. Tags of [`super::Request::Send`] have 32 bits, so the two ranges are
/// disjoint.
const TAG_CALL: Tag = 1 << 40;
/// Up to this many nodes, each sends to each other, so all know all calls after the time of one message. In a tree, they
/// do after that of two for each level, but no node sends more than a few.
const MAX_DIRECT_NODES: usize = 8;
/// What exceeds this length follows in a second message, so that the receive of the first one can be posted before the
/// length is known. Enough for the values that are sent inline.
const FIRST_BYTES: usize = (128 << 10) + (4 << 10);
/// Each message begins with its length.
const LENGTH_BYTES: usize = 8;
/// The longest values that [`exchange`] takes, with the gaps between them.
pub(super) const MAX_VALUES: usize = 1 << 18;

/// Whether nodes may send values with their calls ([`exchange`]).
pub(super) fn is_direct(nodes: usize) -> bool {
    nodes <= MAX_DIRECT_NODES
}

/// Compares the calls of all members. This member is the node at `me`; `calls` are those of the members that it
/// represents.
pub(super) fn agree(nodes: &[usize], me: usize, calls: Vec<(usize, Call)>, group: &Group<'_>) -> Result<CallAgreement> {
    if is_direct(nodes.len()) {
        let values = vec![ValueSpan::EMPTY; calls.len()];
        // SAFETY: no values.
        return Ok(unsafe { exchange(nodes, me, &calls, &values, group)? }.0);
    }
    agree_in_tree(nodes, me, calls, group)
}

/// Values of a member: their address, aligned for the elements of its call, and how many bytes there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueSpan {
    pub(crate) start: *const u8,
    pub(crate) bytes: usize,
}

impl ValueSpan {
    pub(super) const EMPTY: Self = Self { start: std::ptr::null(), bytes: 0 };
}

/// The values of all members, in their order.
pub(super) struct ExchangedValues<'a> {
    pub(super) spans: Vec<ValueSpan>,
    /// The memory of those that other nodes have sent.
    _received: Vec<ReceivedMessage<'a>>,
}

/// Values begin at multiples of this in a message, as the memory of received ones does, so these are aligned for every
/// type.
const VALUES_ALIGN: usize = 16;

/// Compares the calls of all members, and returns the values of each of them. `calls` and `values` are those of the
/// members that this node represents. Only for few nodes ([`is_direct`]).
///
/// # Safety
/// The values are valid and no other code changes them during the call.
pub(super) unsafe fn exchange<'a>(
    nodes: &[usize],
    me: usize,
    calls: &[(usize, Call)],
    values: &[ValueSpan],
    group: &Group<'a>,
) -> Result<(CallAgreement, ExchangedValues<'a>)> {
    let lengths: Vec<usize> = values.iter().map(|values| values.bytes).collect();
    // SAFETY: the caller's promise.
    let own = unsafe { compose(&encode(&(calls, lengths))?, values) };
    let others: Vec<usize> = nodes.iter().copied().filter(|node| *node != nodes[me]).collect();
    let sends: Vec<(usize, &[u8])> = others.iter().map(|node| (*node, &own[..])).collect();
    let received = transfer(&sends, &others, group)?;
    let mut members: Vec<(usize, Call, ValueSpan)> = Vec::with_capacity(group.members.size());
    members.extend(calls.iter().zip(values).map(|((member, call), values)| (*member, call.clone(), *values)));
    for (node, message) in others.iter().zip(&received) {
        members.extend(parse(message.as_slice(), group.members.ranks[*node])?);
    }
    members.sort_by_key(|(member, ..)| *member);
    let (calls, spans) = members.into_iter().map(|(member, call, values)| ((member, call), values)).unzip();
    Ok((result(calls, group)?, ExchangedValues { spans, _received: received }))
}

/// Makes the message of a description and values.
///
/// # Safety
/// The values are valid.
unsafe fn compose(described: &[u8], values: &[ValueSpan]) -> Vec<u8> {
    let room = |bytes: usize| bytes + VALUES_ALIGN;
    let described_room = room(LENGTH_BYTES + 8 + described.len());
    let mut message = Vec::with_capacity(values.iter().fold(described_room, |all, each| all + room(each.bytes)));
    message.extend_from_slice(&[0; LENGTH_BYTES]);
    message.extend_from_slice(&(described.len() as u64).to_le_bytes());
    message.extend_from_slice(described);
    for values in values.iter().filter(|values| values.bytes > 0) {
        message.resize(message.len().next_multiple_of(VALUES_ALIGN), 0);
        let end = message.len() + values.bytes;
        assert!(end <= message.capacity(), "the capacity has room for all values and the gaps between them");
        // SAFETY: the caller's promise, and there is room for the bytes, which was checked. No slice of them is made, because
        // they may lie in memory that other processes share.
        unsafe {
            std::ptr::copy_nonoverlapping(values.start, message.as_mut_ptr().add(message.len()), values.bytes);
            message.set_len(end);
        }
    }
    set_length(&mut message);
    message
}

/// A message of a description alone.
fn message_of(described: &[u8]) -> Vec<u8> {
    let mut message = [&[0; LENGTH_BYTES], described].concat();
    set_length(&mut message);
    message
}

fn set_length(message: &mut [u8]) {
    let bytes = message.len() as u64;
    message[..LENGTH_BYTES].copy_from_slice(&bytes.to_le_bytes());
}

/// The calls and values in a message from `rank`.
fn parse(message: &[u8], rank: usize) -> Result<Vec<(usize, Call, ValueSpan)>> {
    let broken = || Error::Internal(format!("rank {rank} sent values of another length than it said"));
    let content = message.get(LENGTH_BYTES..).ok_or_else(broken)?;
    let (length, rest) = content.split_first_chunk::<8>().ok_or_else(broken)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let (described, mut rest) = rest.split_at_checked(length).ok_or_else(broken)?;
    let (calls, lengths): (Vec<(usize, Call)>, Vec<usize>) = decode(described, rank)?;
    if calls.len() != lengths.len() {
        return Err(broken());
    }
    let mut members = Vec::with_capacity(calls.len());
    for ((member, call), length) in calls.into_iter().zip(lengths) {
        let mut values = ValueSpan::EMPTY;
        if length > 0 {
            let at = message.len() - rest.len();
            let gap = at.next_multiple_of(VALUES_ALIGN) - at;
            let (found, behind) = rest.get(gap..).and_then(|rest| rest.split_at_checked(length)).ok_or_else(broken)?;
            values = ValueSpan { start: found.as_ptr(), bytes: length };
            rest = behind;
        }
        members.push((member, call, values));
    }
    Ok(members)
}

/// Compares by messages: calls go up a binomial tree of `nodes` to the first one, and the result comes back down.
/// Each node receives from and sends to at most log2(n) others.
fn agree_in_tree(
    nodes: &[usize],
    me: usize,
    mut calls: Vec<(usize, Call)>,
    group: &Group<'_>,
) -> Result<CallAgreement> {
    let size = nodes.len();
    // The subtree of `me` is `me .. me + lowest set bit`; the children are at the powers of two below that bit.
    let reach = if me == 0 { size.next_power_of_two() } else { 1 << me.trailing_zeros() };
    let children = || (0..).map(|bit| 1 << bit).take_while(move |step| *step < reach && me + *step < size);
    for step in children() {
        let child = nodes[me + step];
        let below: Vec<(usize, Call)> = decode(receive(child, group)?.content(), group.members.ranks[child])?;
        calls.extend(below);
    }
    let result = if me == 0 {
        calls.sort_by_key(|(member, _)| *member);
        result(calls, group)?
    } else {
        let parent = nodes[me - reach];
        transfer(&[(parent, &message_of(&encode(&calls)?))], &[], group)?;
        decode(receive(parent, group)?.content(), group.members.ranks[parent])?
    };
    let message = message_of(&encode(&result)?);
    for step in children() {
        transfer(&[(nodes[me + step], &message)], &[], group)?;
    }
    Ok(result)
}

/// Compares the calls of all members, in their order.
fn result(calls: Vec<(usize, Call)>, group: &Group<'_>) -> Result<CallAgreement> {
    let calls: Vec<Call> = calls.into_iter().map(|(_, call)| call).collect();
    if calls.len() != group.members.size() {
        return Err(Error::Internal(format!("got {} calls of {} members", calls.len(), group.members.size())));
    }
    Ok(compare(&calls, &group.members.ranks))
}

pub(super) fn encode<T: serde::Serialize + ?Sized>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::Internal(format!("a call cannot be serialized: {error}")))
}

/// Reads what `rank` has sent.
pub(super) fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8], rank: usize) -> Result<T> {
    postcard::from_bytes(bytes)
        .map_err(|error| Error::Internal(format!("rank {rank} sent a call that cannot be read: {error}")))
}

fn receive<'a>(from: usize, group: &Group<'a>) -> Result<ReceivedMessage<'a>> {
    Ok(transfer(&[], &[from], group)?.remove(0))
}

/// A message from another node, aligned for values of every type.
struct ReceivedMessage<'a> {
    memory: Vec<u128>,
    bytes: usize,
    scratch: &'a ScratchMemory,
}

impl<'a> ReceivedMessage<'a> {
    fn new(bytes: usize, scratch: &'a ScratchMemory) -> Self {
        Self { memory: scratch.take(bytes), bytes, scratch }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory has at least that many bytes, and any bits are bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.bytes) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above; any bytes are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), self.bytes) }
    }

    /// The length that it states, if the first `received` bytes, which have arrived, are as many as they should be.
    fn stated_bytes(&self, received: usize) -> Option<usize> {
        let (length, _) = self.as_slice().get(..received)?.split_first_chunk::<LENGTH_BYTES>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        (length.min(FIRST_BYTES) == received).then_some(length)
    }

    /// What follows the length.
    fn content(&self) -> &[u8] {
        &self.as_slice()[LENGTH_BYTES..]
    }
}

impl Drop for ReceivedMessage<'_> {
    fn drop(&mut self) {
        self.scratch.put(std::mem::take(&mut self.memory));
    }
}

/// Messages that are cancelled when this is dropped, so that none accesses its memory afterwards.
struct Pending<'a> {
    transport: &'a dyn Transport,
    messages: Vec<Message>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.messages.iter().for_each(|message| self.transport.cancel(message));
    }
}

/// Sends messages to some members and receives messages from others, all at the same time. Returns the received ones in
/// the order of `receives`.
fn transfer<'a>(sends: &[(usize, &[u8])], receives: &[usize], group: &Group<'a>) -> Result<Vec<ReceivedMessage<'a>>> {
    let transport = group.transport;
    let mut found: Vec<ReceivedMessage<'a>> =
        receives.iter().map(|_| ReceivedMessage::new(FIRST_BYTES, group.scratch)).collect();
    // Declared after the memory of its messages, so that it is dropped first.
    let mut pending = Pending { transport, messages: Vec::new() };
    for (to, message) in sends {
        let (first, rest) = message.split_at(message.len().min(FIRST_BYTES));
        for part in [first, rest].into_iter().filter(|part| !part.is_empty()) {
            // SAFETY: the caller's message outlives `pending`, which ends the messages when it is dropped.
            pending.messages.push(unsafe { transport.post_send(*to, TAG_CALL, part.as_ptr(), part.len()) });
        }
    }
    let first = pending.messages.len();
    for (from, message) in receives.iter().zip(&mut found) {
        let start = message.as_mut_slice().as_mut_ptr();
        // SAFETY: the memory lives until `pending` is dropped, and no other code accesses it before the wait has ended.
        pending.messages.push(unsafe { transport.post_recv_up_to(*from, TAG_CALL, start, FIRST_BYTES) });
    }
    wait_all(transport, &pending.messages[first..], &group.wait)?;
    // A call has a few words for each member, and is sent together with those of its subtree.
    let limit = (1 << 16) + 64 * (group.members.size() * group.members.size()) + MAX_VALUES;
    let received: Vec<usize> = pending.messages[first..].iter().map(Message::received_bytes).collect();
    for ((from, message), received) in receives.iter().zip(&mut found).zip(received) {
        let stated = message.stated_bytes(received).filter(|bytes| *bytes <= limit);
        let bytes = stated.ok_or_else(|| {
            let rank = group.members.ranks[*from];
            Error::Internal(format!("rank {rank} sent a call in another length than it stated, or above {limit} bytes"))
        })?;
        if bytes > FIRST_BYTES {
            let mut whole = ReceivedMessage::new(bytes, group.scratch);
            let (first, rest) = whole.as_mut_slice().split_at_mut(FIRST_BYTES);
            first.copy_from_slice(message.as_slice());
            // SAFETY: only the handle of the memory moves to `found`, which outlives `pending`.
            pending.messages.push(unsafe { transport.post_recv(Some(*from), TAG_CALL, rest.as_mut_ptr(), rest.len()) });
            *message = whole;
        }
        message.bytes = bytes;
    }
    wait_all(transport, &pending.messages, &group.wait)?;
    // All are complete.
    pending.messages.clear();
    drop(pending);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::collectives::Kind;

    /// The message of members 5, 6, ... with these values.
    fn message(values: &[Vec<u8>]) -> Vec<u8> {
        let call = |member: usize| (member, Call::new(Kind::Barrier));
        let calls: Vec<(usize, Call)> = (0..values.len()).map(|at| call(5 + at)).collect();
        let lengths: Vec<usize> = values.iter().map(Vec::len).collect();
        let spans: Vec<ValueSpan> =
            values.iter().map(|values| ValueSpan { start: values.as_ptr(), bytes: values.len() }).collect();
        // SAFETY: the values live until the end of this function.
        unsafe { compose(&encode(&(calls, lengths)).unwrap(), &spans) }
    }

    proptest! {
        #[test]
        fn values_come_out_as_they_went_in(
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..70), 0..4), cut in any::<prop::sample::Index>(),
        ) {
            let message = message(&values);
            let members = parse(&message, 0).unwrap();
            prop_assert_eq!(members.len(), values.len());
            for (at, (member, _, span)) in members.iter().enumerate() {
                let offset = span.start.addr().wrapping_sub(message.as_ptr().addr());
                prop_assert!(*member == 5 + at && span.bytes == values[at].len());
                if span.bytes > 0 {
                    prop_assert!(offset.is_multiple_of(VALUES_ALIGN) && message[offset..offset + span.bytes] == values[at]);
                }
            }
            // Values that are cut off are an error.
            if values.last().is_some_and(|values| !values.is_empty()) {
                prop_assert!(parse(&message[..cut.index(message.len())], 0).is_err());
            }
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100), length in 0u64..60) {
            let _ = parse(&bytes, 0);
            let _ = parse(&[&[0; LENGTH_BYTES], &length.to_le_bytes()[..], &bytes[..]].concat(), 0);
        }
    }
}
