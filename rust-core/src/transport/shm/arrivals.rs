//! Phases of a group: each member arrives at each phase, and a phase is complete when all members have arrived.

use super::event::FutexEvent;

/// The number of arrivals of `size` members so far, in a shared counter.
#[derive(Clone, Copy)]
pub(crate) struct Arrivals<'a> {
    pub(crate) event: FutexEvent<'a>,
    pub(crate) size: u32,
}

impl Arrivals<'_> {
    /// Arrives at `phase`. Earlier writes of this member are visible to every member that sees the phase complete.
    pub(crate) fn arrive(&self, phase: u32) {
        // Each arrival is a read-modify-write of the same word, so all arrivals form one release sequence: a member
        // that reads the last value sees what every member wrote before its own arrival.
        if self.event.add() == self.target(phase) {
            self.event.wake();
        }
    }

    /// Returns `Ok` if all members have arrived at `phase`, otherwise the counter's value to sleep on.
    ///
    /// # Errors
    /// The counter's value.
    pub(crate) fn poll(&self, phase: u32) -> Result<(), u32> {
        let seen = self.event.value();
        // A peer can be at most one phase ahead, so the difference is small and its sign is right despite wrapping.
        if seen.wrapping_sub(self.target(phase)) as i32 >= 0 { Ok(()) } else { Err(seen) }
    }

    fn target(&self, phase: u32) -> u32 {
        phase.wrapping_mul(self.size)
    }
}
