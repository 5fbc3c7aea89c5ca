//! Groups whose members are on several hosts: shared memory among the members of a host, messages between hosts.
//!
//! ```text
//!   member   0   1   2   3   4   5        places: 0 0 0 1 1 1      two spans, three channels
//!   host     a   a   a   b   b   b
//!   channel     0   1   2   0   1   2        member 1 and member 4 own channel 1: they talk to each other,
//!                                         for their hosts
//! ```
//!
//! - HST-1: a *span* is a maximal run of consecutive members, in the group's order, on one host. A reduction that goes
//!   from span to span folds in rank order (COL-1), whatever the placement of ranks.
//! - HST-2: there are as many *channels* as the smallest host has members, and each host has one owner for each
//!   channel. Every pair of hosts therefore has that many pairs of members that transfer at the same time.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::mailbox::{Header, Link, Mailbox, Messages};
use super::ports::{Carrier, MailboxProgress, PAYLOAD_BYTES, Port, Receiver};
use super::shm::{Rings, SharedMemory};
use super::{Members, POLL_INTERVAL, Transport};
use crate::error::Result;
use crate::world::{Monitor, Store};

/// Consecutive members of a group that run on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankSpan {
    pub(crate) host: usize,
    /// The first member. `end` is one past the last.
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The placement of members on hosts. It holds no connections and is the same on all members.
#[derive(Clone, Debug)]
pub(crate) struct HostMap {
    /// Host of each member; hosts are numbered in the order of their first members.
    host_of: Vec<usize>,
    /// Members of each host, in the group's order.
    members_of: Vec<Vec<usize>>,
    /// Position of each member among the members of its host.
    position_of: Vec<usize>,
    spans: Vec<RankSpan>,
    channels: usize,
}

impl HostMap {
    /// Builds the map from the host of each member, under any numbering of hosts.
    pub(crate) fn new(hosts: &[usize]) -> Self {
        let mut names: Vec<usize> = Vec::new();
        let mut map = Self {
            host_of: Vec::new(),
            members_of: Vec::new(),
            position_of: Vec::new(),
            spans: Vec::new(),
            channels: 0,
        };
        for (member, name) in hosts.iter().enumerate() {
            let host = names.iter().position(|known| known == name).unwrap_or_else(|| {
                names.push(*name);
                map.members_of.push(Vec::new());
                names.len() - 1
            });
            map.host_of.push(host);
            map.position_of.push(map.members_of[host].len());
            map.members_of[host].push(member);
            match map.spans.last_mut() {
                Some(span) if span.host == host => span.end = member + 1,
                _ => map.spans.push(RankSpan { host, start: member, end: member + 1 }),
            }
        }
        map.channels = map.members_of.iter().map(Vec::len).min().unwrap_or(0);
        map
    }

    pub(crate) fn num_hosts(&self) -> usize {
        self.members_of.len()
    }

    pub(crate) fn host_of(&self, member: usize) -> usize {
        self.host_of[member]
    }

    pub(crate) fn members_of(&self, host: usize) -> &[usize] {
        &self.members_of[host]
    }

    /// Returns the position of `member` among the members of its host: its place in their shared memory.
    pub(crate) fn position_of(&self, member: usize) -> usize {
        self.position_of[member]
    }

    /// Returns the spans of the group, in rank order (HST-1).
    pub(crate) fn spans(&self) -> &[RankSpan] {
        &self.spans
    }

    /// Returns the number of channels between each pair of hosts (HST-2).
    pub(crate) fn channels(&self) -> usize {
        self.channels
    }

    /// Returns the member of `host` that owns `channel`.
    pub(crate) fn owner(&self, host: usize, channel: usize) -> usize {
        self.members_of[host][channel]
    }

    /// Returns the member of `host` that receives what `member`, on another host, sends to all of `host`.
    pub(crate) fn counterpart(&self, member: usize, host: usize) -> usize {
        let there = &self.members_of[host];
        there[self.position_of[member] % there.len()]
    }

    /// Returns for each member which member of `host` publishes its values in shared memory there: itself or its
    /// counterpart. Gives that member's position, and a number that distinguishes the values it publishes.
    pub(crate) fn shown_on(&self, host: usize) -> Vec<(usize, usize)> {
        let mut shown = vec![1; self.members_of[host].len()];
        let mut show = |member: usize| {
            if self.host_of[member] == host {
                return (self.position_of[member], 0);
            }
            let position = self.position_of[self.counterpart(member, host)];
            shown[position] += 1;
            (position, shown[position] - 1)
        };
        (0..self.host_of.len()).map(&mut show).collect()
    }
}

/// A group on several hosts, as collective algorithms see it.
pub struct Hosts {
    pub(crate) map: HostMap,
    /// The shared memory of this host's members.
    pub(crate) memory: Arc<SharedMemory>,
}

/// How long members wait, after the notice that a member has left, for frames that it sent before. The leaving member
/// first waits until the network has accepted all of its frames ([`Carrier::flush`]).
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The transport of a group whose members are on several hosts.
pub struct HostsTransport {
    members: Members,
    hosts: Hosts,
    carrier: Arc<dyn Carrier>,
    /// Every rank of the job, if the carrier needs them all.
    all_members: Option<Vec<usize>>,
    mailbox: Arc<Mailbox<HostsLink>>,
}

/// Frames go through shared memory within the host, and through a carrier to other hosts. The only doorbell is in
/// shared memory: the thread that receives a frame from the carrier rings it.
struct HostsLink {
    rings: Rings,
    /// By member: its position in the shared memory, if it runs on this host.
    local: Vec<Option<usize>>,
    remote: Port,
    is_zero_copy: bool,
}

/// Describes a group on several hosts, for joining it.
pub(crate) struct HostsGroup<'a> {
    /// The group's name, used once in the lifetime of `store`.
    pub(crate) name: &'a str,
    pub(crate) members: Members,
    /// The host of each member, under any numbering.
    pub(crate) hosts: &'a [usize],
    /// Identifies the group on the wire, among all groups of the job's lifetime.
    pub(crate) key: u64,
    /// Moves frames between hosts.
    pub(crate) carrier: Arc<dyn Carrier>,
    /// The process number of each member in the carrier.
    pub(crate) processes: Arc<[usize]>,
    /// Number of processes of the job.
    pub(crate) size: usize,
    pub(crate) monitor: &'a Arc<Monitor>,
}

impl HostsTransport {
    /// Joins the group that `plan` describes; every member calls it.
    ///
    /// # Errors
    /// As [`super::ShmTransport::join`], for the members of this host. Members of other hosts are not waited for:
    /// frames that reach a member before it joins are kept for it.
    pub(crate) fn join(plan: HostsGroup<'_>, store: &dyn Store, timeout: Duration) -> Result<Arc<Self>> {
        let HostsGroup { name, members, hosts, key, carrier, processes, size, monitor } = plan;
        let map = HostMap::new(hosts);
        let host = map.host_of(members.me);
        let here: Arc<[usize]> = map.members_of(host).iter().map(|member| members.ranks[*member]).collect();
        let local = Members { ranks: here, me: map.position_of(members.me) };
        let memory = SharedMemory::join(&format!("{name}-{host}"), &local, store, monitor, timeout)?;
        let position = |member: usize| (map.host_of(member) == host).then(|| map.position_of(member));
        let is_zero_copy = carrier.is_zero_copy();
        let link = HostsLink {
            rings: Rings::new(memory.clone()),
            local: (0..members.size()).map(position).collect(),
            remote: Port::open(&carrier, key, &members, processes, monitor.clone()),
            is_zero_copy,
        };
        let mailbox = Arc::new(Mailbox::new(link, members.clone()));
        let mailbox_progress: Weak<dyn MailboxProgress> =
            Arc::downgrade(&(mailbox.clone() as Arc<dyn MailboxProgress>));
        carrier.ports().attach(key, members.me, mailbox_progress);
        let all_members = carrier.needs_all_members().then(|| (0..size).collect());
        Ok(Arc::new(Self { members, hosts: Hosts { map, memory }, carrier, all_members, mailbox }))
    }
}

impl MailboxProgress for Mailbox<HostsLink> {
    fn arrived(&self) {
        self.progress();
    }

    fn begin_direct_receive(&self, from: usize, header: Header) -> Option<u64> {
        Mailbox::begin_direct_receive(self, from, header)
    }

    fn fill(&self, from: usize, ticket: u64, read: &mut dyn FnMut(*mut u8)) {
        Mailbox::fill(self, from, ticket, read);
    }

    fn end_direct_receive(&self, from: usize, ticket: u64, is_whole: bool) {
        Mailbox::end_direct_receive(self, from, ticket, is_whole);
    }

    fn end_transfer(&self, message: u64, bytes: usize) {
        Mailbox::end_transfer(self, message, bytes);
    }
}

impl Link for HostsLink {
    fn payload_bytes(&self, peer: usize) -> usize {
        match self.local[peer] {
            Some(position) => self.rings.payload_bytes(position),
            None => PAYLOAD_BYTES,
        }
    }

    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool {
        // SAFETY: the caller's promise; the payload limit is that of the link that is used.
        unsafe {
            match self.local[to] {
                Some(position) => self.rings.push(position, header, payload),
                None => self.remote.push(to, header, payload),
            }
        }
    }

    fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
        match self.local[from] {
            Some(position) => self.rings.pop(position, take),
            None => self.remote.pop(from, take),
        }
    }

    fn is_zero_copy(&self, peer: usize) -> bool {
        self.local[peer].is_none() && self.is_zero_copy
    }

    unsafe fn start_receive(&self, from: usize, message: u64, data: *mut u8, bytes: usize) -> Option<u64> {
        // SAFETY: the caller's promise.
        unsafe { self.remote.start_receive(from, message, data, bytes) }
    }

    unsafe fn start_send(&self, to: usize, key: u64, message: u64, data: *const u8, bytes: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.remote.start_send(to, key, message, data, bytes) }
    }

    fn has_transfers(&self, gives_up: bool) -> bool {
        self.remote.carrier().has_transfers(gives_up)
    }

    fn doorbell(&self) -> u32 {
        self.rings.doorbell()
    }

    fn wait_doorbell(&self, seen: u32, limit: Duration) {
        let _awaits_thread = (limit <= POLL_INTERVAL).then(|| self.remote.await_thread());
        self.rings.wait_doorbell(seen, limit);
    }

    fn ring_own(&self) {
        self.rings.ring_own();
    }
}

impl Transport for HostsTransport {
    fn name(&self) -> &'static str {
        self.carrier.name()
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn messages(&self) -> &dyn Messages {
        &*self.mailbox
    }

    fn shared(&self) -> Option<&SharedMemory> {
        None
    }

    fn hosts(&self) -> Option<&Hosts> {
        Some(&self.hosts)
    }

    fn depends_on(&self) -> Option<&[usize]> {
        self.all_members.as_deref()
    }

    fn drain_timeout(&self) -> Duration {
        DRAIN_TIMEOUT
    }

    fn receiver(&self) -> Option<Receiver<'_>> {
        Some(Receiver::begin(&*self.carrier))
    }

    fn is_zero_copy(&self) -> bool {
        self.mailbox.link.is_zero_copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_lanes_and_owners() {
        let map = HostMap::new(&[7, 7, 7, 2, 2, 7]);
        let span = |host, start, end| RankSpan { host, start, end };
        assert_eq!(map.spans(), [span(0, 0, 3), span(1, 3, 5), span(0, 5, 6)]);
        assert_eq!((map.num_hosts(), map.channels()), (2, 2));
        assert_eq!((map.owner(0, 1), map.owner(1, 1)), (1, 4));
        assert_eq!(map.position_of(5), 3);
        // The members of the second host that receive from members 0 to 3 of the first one.
        assert_eq!([0, 1, 2, 5].map(|member| map.counterpart(member, 1)), [3, 4, 3, 4]);
        assert_eq!(map.shown_on(1), [(0, 1), (1, 1), (0, 2), (0, 0), (1, 0), (1, 2)]);
        let one = HostMap::new(&[0]);
        assert_eq!((one.spans(), one.channels()), (&[span(0, 0, 1)][..], 1));
    }
}
