//! Phases of a group: each member arrives at each of them, and a phase is over when all have.

use super::event::FutexEvent;

/// The arrivals of `size` members so far, in a counter that they share.
#[derive(Clone, Copy)]
pub(crate) struct Arrivals<'a> {
    pub(crate) event: FutexEvent<'a>,
    pub(crate) size: u32,
}

impl Arrivals<'_> {
    /// Arrives at `phase`. What this member wrote before is visible to whoever sees the phase over.
    pub(crate) fn arrive(&self, phase: u32) {
        // Each arrival is a read-modify-write of the same word, so they form one release sequence: who reads the
        // last value has everything that any member wrote before its own arrival.
        if self.event.add() == self.target(phase) {
            self.event.wake();
        }
    }

    /// Whether all members have arrived at `phase`. If not, the value to sleep on.
    ///
    /// # Errors
    /// That value.
    pub(crate) fn look(&self, phase: u32) -> Result<(), u32> {
        let seen = self.event.value();
        // A peer can be at most one phase ahead, so the distance is small and the sign survives wrapping.
        if seen.wrapping_sub(self.target(phase)) as i32 >= 0 { Ok(()) } else { Err(seen) }
    }

    fn target(&self, phase: u32) -> u32 {
        phase.wrapping_mul(self.size)
    }
}
