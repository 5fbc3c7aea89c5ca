//! How bytes move between the members of one group. A transport knows no reduction and no tensor.
//!
//! Two services: messages between pairs, which every transport has, and memory that members see in common, on which the
//! fast algorithms of [`crate::collectives`] rest: with `shm` all members see it, with [`hosts`] those of one host do.
//!
//! - TRA-1: any number of messages may be under way at once, and none waits for another with a different tag or
//!   partner: what arrives before its receive is kept (small) or held back at the sender (large).
//! - TRA-2: what a peer writes is data. Lengths, offsets and identifiers that come from a peer are checked against
//!   this process's own before they are used, so a corrupt peer can spoil values but not memory safety.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Limit, Result};
use crate::world::{Departure, Monitor};

pub mod hosts;
mod mailbox;
pub mod mock;
pub mod mpi;
pub(crate) mod ports;
pub mod shm;
pub(crate) mod tcp;

pub use hosts::HostsTransport;
pub use mailbox::{Message, Messages};
pub use shm::ShmTransport;

/// Tells messages of one pair apart; messages with equal tags arrive in the order they were sent.
pub type Tag = u64;

/// The longest sleep between two looks at [`Wait::check`]: departures and interruptions are seen this late.
pub const NAP: Duration = Duration::from_millis(50);

/// The members of a group: position = rank inside the group, value = global rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Members {
    /// Global ranks, in group order.
    pub ranks: Arc<[usize]>,
    /// This process's position.
    pub me: usize,
}

impl Members {
    /// Number of members.
    pub fn size(&self) -> usize {
        self.ranks.len()
    }
}

/// What a wait needs to end in time: a deadline, the members it waits for, and who has departed.
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    /// The operation, for messages: `all_reduce of 1024 float32`.
    pub during: &'a dyn Fn() -> String,
    /// When the operation began.
    pub start: Instant,
    /// When to give up.
    pub deadline: Instant,
    /// Departures.
    pub monitor: &'a Monitor,
    /// Global ranks whose departure ends the wait.
    pub members: &'a [usize],
    /// See [`Transport::drain_timeout`].
    pub drain_timeout: Duration,
    /// Filled with the reason when the communicator is closed under the wait.
    pub closed: &'a OnceLock<String>,
}

impl Wait<'_> {
    /// Whether the wait must end although what it waits for has not happened. Call it after a look at the
    /// condition and before the next sleep; a caller that gets an error looks at the condition once more, since a
    /// peer may have done its part and then left.
    ///
    /// A member that died or failed ends the wait at once, since others will stop because of it. A member that
    /// left in good order ends it only if it is `missing`, since it may have done its part before, and if what it sent
    /// before must have come.
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
                            let heard = self.monitor.heard(*rank).unwrap_or(now);
                            missing.contains(rank) && now.saturating_duration_since(heard) >= self.drain_timeout
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
    /// Its name in messages and in `smdrun doctor`.
    fn name(&self) -> &'static str;
    /// The group.
    fn members(&self) -> &Members;
    /// What its messages are made with.
    fn messages(&self) -> &dyn Messages;
    /// Starts sending `bytes` bytes at `data` to member `to`. Never waits.
    ///
    /// # Safety
    /// The bytes stay valid and unchanged until [`Message::poll`] is `Some` or [`Transport::cancel`] has returned.
    unsafe fn post_send(&self, to: usize, tag: Tag, data: *const u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.messages().post_send(to, tag, data, bytes) }
    }
    /// Starts receiving exactly `bytes` bytes from member `from`, or from whoever sends first with this tag. Never
    /// waits. A message of another length fails the receive (and the send, if it is still under way) with
    /// [`Error::Mismatch`].
    ///
    /// # Safety
    /// The bytes stay valid, and nobody else touches them, until [`Message::poll`] is `Some` or
    /// [`Transport::cancel`] has returned.
    unsafe fn post_recv(&self, from: Option<usize>, tag: Tag, data: *mut u8, bytes: usize) -> Message {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.messages().post_recv(from, tag, data, bytes) }
    }
    /// Moves what can be moved without waiting; messages complete only in here and in the `post` functions.
    fn progress(&self) {
        self.messages().progress();
    }
    /// Gives up on a message: its memory is not touched after this returns.
    fn cancel(&self, message: &Message) {
        self.messages().cancel(message);
    }
    /// A value that changes whenever a peer did something that lets [`Transport::progress`] move.
    fn doorbell(&self) -> u32 {
        self.messages().doorbell()
    }
    /// Sleeps until the doorbell differs from `seen`, for at most `limit`.
    fn doze(&self, seen: u32, limit: Duration) {
        self.messages().doze(seen, limit);
    }
    /// Changes the own doorbell, so that threads of this process that doze look again.
    fn ring(&self) {
        self.messages().ring();
    }
    /// The memory that all members see, if there is such a thing.
    fn shared(&self) -> Option<&shm::SharedMemory>;
    /// Who is on which host, and the memory that this host's members see, if the members are on several.
    fn hosts(&self) -> Option<&hosts::Hosts> {
        None
    }
    /// Global ranks without whom nothing moves, if they are more than the partners of an operation.
    fn depends_on(&self) -> Option<&[usize]> {
        None
    }
    /// How long after the news that a member left in good order something may come that it sent before: the news and
    /// the messages go different ways.
    fn drain_timeout(&self) -> Duration {
        Duration::ZERO
    }
}

/// Waits for all `messages`. `missing` holds their partners' global ranks, for errors. After an error none of the
/// messages touches its memory any more.
///
/// # Errors
/// A message's own error, or the one of [`Wait::check`].
pub fn wait_all(transport: &dyn Transport, messages: &[Message], wait: &Wait<'_>) -> Result<()> {
    let mut backoff = Backoff::new();
    // Where the partners run is not known, so spin only if there is a core for everybody.
    let crowded = transport.members().size() > cores();
    let mut first = 0;
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
        if backoff.pause(|| crowded) {
            continue;
        }
        let missing = || {
            let unfinished = messages.iter().filter(|message| message.poll().is_none());
            let mut ranks: Vec<usize> = unfinished.flat_map(|message| message.partners(transport.members())).collect();
            ranks.sort_unstable();
            ranks.dedup();
            ranks
        };
        match wait.check(missing) {
            Ok(()) => transport.doze(seen, NAP),
            Err(error) => break error,
        }
    };
    // What was under way may have completed between the last look and the error.
    transport.progress();
    if messages.iter().all(|message| matches!(message.poll(), Some(Ok(_)))) {
        return Ok(());
    }
    messages.iter().for_each(|message| transport.cancel(message));
    Err(outcome)
}

/// How a wait spends its time before it sleeps: a short spin as long as that takes no core from those it waits for,
/// then yielding for a while, so that they get this one.
///
/// Note "sleep is slow". A core that has nothing else to run halts, and waking it takes 20 us or more. One late wake makes
/// the woken member late for the next synchronisation, for which the others then sleep: a rhythm that lasts, and that
/// doubled the time of pipelined operations. So yielding goes on for longer than the steps of a pipeline differ.
pub(crate) struct Backoff {
    spins: u32,
    yields_since: Option<Instant>,
}

/// Some 20 us, which is about what a sleep and a wake cost both sides.
const SPINS: u32 = 1024;
/// Spins between two looks at who shares the core.
const SPINS_A_LOOK: u32 = 64;
/// Many chunks' worth of time: with 4 processes on 2 cores, a tenth of it made all-reduces of 64 KiB to 4 MiB a quarter
/// slower. Whoever has work gets the core at the first yield.
const YIELD_TIME: Duration = Duration::from_millis(2);

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { spins: SPINS, yields_since: None }
    }

    /// Lets a little time pass without sleeping; false when it is time to sleep. `shares_core` tells whether somebody
    /// who is waited for may need the core that this thread runs on.
    pub(crate) fn pause(&mut self, shares_core: impl FnOnce() -> bool) -> bool {
        if self.spins > 0 {
            if self.spins.is_multiple_of(SPINS_A_LOOK) && shares_core() {
                self.spins = 0;
                return true;
            }
            self.spins -= 1;
            std::hint::spin_loop();
            true
        } else if self.yields_since.get_or_insert_with(Instant::now).elapsed() < YIELD_TIME {
            std::thread::yield_now();
            true
        } else {
            false
        }
    }
}

/// The processors that this process may use.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}
