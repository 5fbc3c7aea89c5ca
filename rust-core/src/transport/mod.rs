//! Transports: they move bytes between the members of one group, and know neither reductions nor tensors.
//!
//! A transport has two services: point-to-point messages, and for some transports shared memory, which the fast
//! algorithms of [`crate::collectives`] use: with `shm` all members share it, with [`hosts`] those of one host.
//!
//! - TRA-1: any number of messages may be in flight, and none waits for another one with a different tag or peer. A
//!   message that arrives before its receive is buffered (small) or held back at the sender (large).
//! - TRA-2: data from a peer is not trusted. Lengths, offsets and ids from a peer are validated before they are used,
//!   so a corrupt peer can corrupt values but not memory safety.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Limit, Result};
use crate::metrics::Sleeps;
use crate::world::{Departure, Monitor};

mod backoff;
mod callers;
pub mod hosts;
mod mailbox;
pub mod mock;
pub mod mpi;
pub(crate) mod ports;
pub mod shm;
pub(crate) mod tcp;
mod wake_up;
mod zero_copy;

pub(crate) use backoff::Backoff;
pub use hosts::HostsTransport;
pub use mailbox::{Message, Messages};
pub use ports::Receiver;
pub use shm::ShmTransport;

/// The tag of a message; messages of one pair with equal tags arrive in the order in which they were sent.
pub type Tag = u64;

/// The longest sleep between two calls of [`Wait::check`], and thus the delay with which departures and interruptions
/// are noticed.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The members of a group: their global ranks, indexed by the rank inside the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Global ranks, in group order.
    pub ranks: Arc<[usize]>,
    /// This process's rank inside the group.
    pub me: usize,
}

impl Members {
    /// Number of members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
}

/// The conditions that end a wait: a deadline, and the departure of members it waits for.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// The operation, for messages, such as `all_reduce of 1024 float32`.
    pub during: &'a dyn Fn() -> String,
    /// When the operation began.
    pub start: Instant,
    /// When to give up.
    pub deadline: Instant,
    /// The departures of ranks.
    pub monitor: &'a Monitor,
    /// Global ranks whose departure ends the wait.
    pub members: &'a [usize],
    /// See [`Transport::drain_timeout`].
    pub drain_timeout: Duration,
    /// Set to the reason if the communicator is closed during the wait.
    pub closed: &'a OnceLock<String>,
}

impl Wait<'_> {
    /// Returns an error if the wait must end although its condition does not hold. Called after the condition was
    /// checked and before the next sleep. After an error, the caller checks the condition once more, because a peer
    /// may have done its part and then left.
    ///
    /// If a member died or failed, the wait ends at once, because other members will stop as well. If a member left
    /// in good order, the wait ends only if the member is `missing`, because it may have done its part before it
    /// left, and only when messages that it sent before must have arrived.
    ///
    /// # Errors
    /// [`Error::PeerFailed`], [`Error::Closed`], [`Error::Interrupted`], or [`Error::Timeout`] naming `missing`
    /// (global ranks).
    pub fn check(&self, missing: impl FnOnce() -> Vec<usize>) -> Result<()> {
        let now = Instant::now();
        let gone = self.monitor.generation() != 0;
        if gone || now >= self.deadline {
            let missing = missing();
            if gone {
                let stopped: Vec<usize> = (self.members.iter().copied())
                    .filter(|rank| match self.monitor.departure(*rank) {
                        None => false,
                        Some(Departure::Left) => {
                            let reported_at = self.monitor.departure_time(*rank).unwrap_or(now);
                            missing.contains(rank) && now.saturating_duration_since(reported_at) >= self.drain_timeout
                        }
                        Some(_) => true,
                    })
                    .collect();
                self.monitor.check(&stopped, &(self.during)())?;
            }
            if now >= self.deadline {
                let (during, waited) = ((self.during)(), now - self.start);
                return Err(Error::Timeout { during, waited, missing, limit: Limit::Collective });
            }
        }
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if self.monitor.interrupted() {
            return Err(Error::Interrupted { during: (self.during)() });
        }
        Ok(())
    }
}

/// Moves bytes between the members of one group.
pub trait Transport: Send + Sync {
    /// The transport's name, for messages.
    fn name(&self) -> &'static str;
    /// The members of the group.
    fn members(&self) -> &Members;
    /// The transport's implementation of messages.
    fn messages(&self) -> &dyn Messages;
    /// Starts sending `bytes` bytes at `data` to member `to`. Never waits.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until [`Message::poll`] is `Some` or [`Transport::cancel`] has returned.
    unsafe fn post_send(&self, to: usize, tag: Tag, data: *const u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.messages().post_send(to, tag, data, bytes) }
    }
    /// Starts receiving exactly `bytes` bytes from member `from`, or from the first member that sends with this tag.
    /// Never waits. A message of another length fails the receive (and the send, if it is still in flight) with
    /// [`Error::Mismatch`].
    ///
    /// # Safety
    /// The memory stays valid, and no other code accesses it, until [`Message::poll`] is `Some` or
    /// [`Transport::cancel`] has returned.
    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.messages().post_recv(from, tag, data, bytes) }
    }
    /// As [`Transport::post_recv`], for a message of at most `limit` bytes ([`Message::received_bytes`]).
    ///
    /// # Safety
    /// As there.
    unsafe fn post_recv_up_to(&self, from: usize, tag: Tag, data: *mut u8, limit: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.messages().post_recv_up_to(from, tag, data, limit) }
    }
    /// Makes progress without waiting. Messages complete in this function, in the `post` functions and in
    /// [`Transport::cancel`]; between hosts also on the carrier's thread or on another caller that receives.
    fn progress(&self) {
        self.messages().progress();
    }
    /// Cancels a message: its memory is not accessed after this returns.
    fn cancel(&self, message: &Message) {
        self.messages().cancel(message);
    }
    /// A counter that changes whenever a peer has enabled progress, for example by sending a frame.
    fn doorbell(&self) -> u32 {
        self.messages().doorbell()
    }
    /// Sleeps until the doorbell differs from `seen`, for at most `limit`: up to [`POLL_INTERVAL`], or longer if the caller
    /// awaits nothing in particular.
    fn wait_doorbell(&self, seen: u32, limit: Duration) {
        self.messages().wait_doorbell(seen, limit);
    }
    /// Changes this member's doorbell, so that sleeping threads of this process check again.
    fn ring(&self) {
        self.messages().ring();
    }
    /// The memory that all members share, if there is any.
    fn shared(&self) -> Option<&shm::SharedMemory>;
    /// The placement of members on hosts, and this host's shared memory, if there are several hosts.
    fn hosts(&self) -> Option<&hosts::Hosts> {
        None
    }
    /// Receives what arrives from other hosts, if there are any, while the caller waits awake.
    fn receiver(&self) -> Option<Receiver<'_>> {
        None
    }
    /// Whether long messages between hosts are moved without copies ([`zero_copy`]).
    fn is_zero_copy(&self) -> bool {
        false
    }
    /// Global ranks on which all communication depends, if there are more than the members of an operation.
    fn depends_on(&self) -> Option<&[usize]> {
        None
    }
    /// How long messages from a member may still arrive after the notice that it has left in good order, because they
    /// take different paths.
    fn drain_timeout(&self) -> Duration {
        Duration::ZERO
    }
}

/// Global ranks that the incomplete ones of `messages` wait for.
pub(crate) fn awaited_ranks<'a>(messages: impl Iterator<Item = &'a Message>, members: &Members) -> Vec<usize> {
    let unfinished = messages.filter(|message| message.poll().is_none());
    let mut ranks: Vec<usize> = unfinished.flat_map(|message| message.partners(members)).collect();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

/// Waits for all `messages`. `missing` are the global ranks of their peers, for errors. After an error, none of the
/// messages accesses its memory any more.
///
/// # Errors
/// A message's own error, or the one of [`Wait::check`].
pub fn wait_all(transport: &dyn Transport, messages: &[Message], wait: &Wait<'_>) -> Result<()> {
    let mut pause = MessagePause::new(transport);
    let mut first = 0;
    let mut sleeps = Sleeps::default();
    let outcome = loop {
        let seen = transport.doorbell();
        transport.progress();
        while let Some(result) = messages.get(first).and_then(Message::poll) {
            match result {
                Ok(_) => first += 1,
                Err(error) => {
                    messages.iter().for_each(|message| transport.cancel(message));
                    return Err(error);
                }
            }
        }
        if first == messages.len() {
            return Ok(());
        }
        if pause.pause() {
            continue;
        }
        let missing = || awaited_ranks(messages.iter(), transport.members());
        match wait.check(missing) {
            Ok(()) => sleeps.sleep(missing, || transport.wait_doorbell(seen, POLL_INTERVAL)),
            Err(error) => break error,
        }
    };
    // A message may have completed between the last check and the error.
    transport.progress();
    if messages.iter().all(|message| matches!(message.poll(), Some(Ok(_)))) {
        return Ok(());
    }
    messages.iter().for_each(|message| transport.cancel(message));
    // A transfer goes on while it is cancelled ([`zero_copy`]).
    match messages.iter().all(|message| matches!(message.poll(), Some(Ok(_)))) {
        true => Ok(()),
        false => Err(outcome),
    }
}

/// How a wait for messages spends its time before it sleeps. If messages come from other hosts, the waiting caller
/// reads the connections, or lets the carrier's thread poll, and yields in between. It does not spin: a message between
/// hosts takes longer than a yield, and the sender may share this core, which the members of this host do not show.
pub(crate) struct MessagePause<'a> {
    transport: &'a dyn Transport,
    backoff: Backoff,
    receiver: Option<Receiver<'a>>,
}

impl<'a> MessagePause<'a> {
    pub(crate) fn new(transport: &'a dyn Transport) -> Self {
        Self { transport, backoff: Self::backoff(transport), receiver: None }
    }

    /// Begins the wait for the next message after one has arrived. The caller goes on reading the connections: the
    /// carrier's thread would have to be woken to read them in between.
    pub(crate) fn restart(&mut self) {
        self.backoff = Self::backoff(self.transport);
    }

    /// Receives what has arrived, between two parts of the caller's own work: otherwise senders would wait for room.
    pub(crate) fn receive(&mut self) {
        if self.receiver.is_none() {
            self.receiver = self.transport.receiver();
        }
        if let Some(receiver) = &self.receiver {
            receiver.receive();
        }
    }

    /// The caller does something else than to wait, in which it may sleep. A thread that receives for it goes on.
    pub(crate) fn stop_receiving(&mut self) {
        self.receiver.take_if(|receiver| !receiver.is_by_thread());
    }

    fn backoff(transport: &dyn Transport) -> Backoff {
        // The peers' cores are not known, so spin only if every process has a core of its own.
        let members = transport.members().size();
        match transport.hosts() {
            // How many members are on this host does not show how many of the awaited ones are.
            Some(_) => Backoff::new(1, false),
            None => Backoff::new(members, members <= cores()),
        }
    }

    /// Waits briefly without sleeping; returns false when it is time to sleep.
    pub(crate) fn pause(&mut self) -> bool {
        if self.receiver.is_none() {
            self.receiver = self.transport.receiver();
        }
        // Messages of other groups may arrive all the time, but the wait must be checked.
        if self.receiver.as_ref().is_some_and(Receiver::receive) && self.backoff.has_time() {
            return true;
        }
        let again = self.backoff.pause(|| false);
        if !again {
            // While it sleeps, the carrier's thread receives.
            self.receiver = None;
        }
        again
    }
}

/// The processors that this process may use.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
