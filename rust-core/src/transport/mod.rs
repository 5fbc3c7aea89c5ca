//! How bytes move between the members of one group. A transport knows no reduction and no tensor.
//!
//! Two services: messages between pairs, which every transport has, and memory that all members see, which only
//! `shm` has and on which the fast algorithms of [`crate::collectives`] rest.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::world::Monitor;

/// Tells messages of one pair apart; messages with equal tags arrive in the order they were sent.
pub type Tag = u64;

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
    /// Global ranks of the group.
    pub members: &'a [usize],
}

impl Wait<'_> {
    /// Whether the wait must end although what it waits for has not happened. Call it after a look at the
    /// condition and before the next sleep; a caller that gets an error looks at the condition once more, since a
    /// peer may have done its part and then left.
    ///
    /// # Errors
    /// [`Error::PeerFailed`], [`Error::Interrupted`], or [`Error::Timeout`] naming `missing` (global ranks).
    pub fn check(&self, missing: impl FnOnce() -> Vec<usize>) -> Result<()> {
        if self.monitor.generation() != 0 {
            self.monitor.check(self.members, &(self.during)())?;
        }
        if self.monitor.interrupted() {
            return Err(Error::Interrupted { during: (self.during)() });
        }
        let now = Instant::now();
        if now >= self.deadline {
            return Err(Error::Timeout { during: (self.during)(), waited: now - self.start, missing: missing() });
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
    /// Sends `bytes` to member `to`; returns when `bytes` may be reused. May wait until the receiver takes them.
    fn send(&self, to: usize, tag: Tag, bytes: &[u8], wait: &Wait<'_>) -> Result<()>;
    /// Receives exactly `bytes.len()` bytes from member `from`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the message has another length.
    fn recv(&self, from: usize, tag: Tag, bytes: &mut [u8], wait: &Wait<'_>) -> Result<()>;
}
