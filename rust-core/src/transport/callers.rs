//! Which callers receive frames from other hosts by themselves, so that the carrier's thread leaves that to them.
//!
//! - CAL-1: while a caller receives, the thread leaves arriving frames to it. A hand-over to the caller would cost more
//!   than what there is to do, and with fewer cores than threads, each would wait for the other's core.
//! - CAL-2: a caller that stops because its message has come will soon wait for another one, in the same operation or
//!   the next. So the thread takes over when no caller has looked for frames between two of its checks, which are
//!   one [`TICK`] apart. A caller that sleeps needs the thread at once, unless another one receives.

use std::time::Duration;

/// Interval at which the thread checks whether callers have stopped; long enough to cost them hardly any time.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The callers of one carrier.
#[derive(Debug, Default)]
pub(super) struct ReceivingCallers {
    /// Number of callers that receive.
    receivers: usize,
    /// How often they had looked for frames when the thread last asked.
    looks: u64,
    /// Number of callers that sleep until the thread has received something.
    sleepers: usize,
}

impl ReceivingCallers {
    /// A caller begins to receive.
    pub(super) fn enter(&mut self) {
        self.receivers += 1;
    }

    /// A caller stops receiving.
    pub(super) fn leave(&mut self) {
        self.receivers -= 1;
    }

    /// A caller begins or ends to wait for what the thread receives.
    pub(super) fn await_thread(&mut self, waits: bool) {
        match waits {
            true => self.sleepers += 1,
            false => self.sleepers -= 1,
        }
    }

    /// Whether a caller sleeps until the thread has received something.
    pub(super) fn sleep(&self) -> bool {
        self.sleepers > 0
    }

    /// Whether a caller needs the thread now: it sleeps, and no other one receives.
    pub(super) fn need_thread(&self) -> bool {
        self.receivers == 0 && self.sleepers > 0
    }

    /// Whether a caller receives, or will soon. Callers have looked for frames `looks` times. A receiver that has not looked
    /// since the thread last asked has lost its core or does something else, and does not count.
    pub(super) fn receive_soon(&self, looks: u64) -> bool {
        self.looks != looks && !self.need_thread()
    }

    /// The thread asks whether it may leave frames to callers until it asks again.
    pub(super) fn receive(&mut self, looks: u64) -> bool {
        let soon = self.receive_soon(looks);
        self.looks = looks;
        soon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_leaves_frames_to_callers_while_they_look() {
        let mut callers = ReceivingCallers::default();
        assert!(!callers.receive(0), "nobody has looked");
        callers.enter();
        assert!(callers.receive(1));
        assert!(!callers.receive(1), "it has lost its core");
        assert!(callers.receive(2));
        callers.leave();
        assert!(callers.receive_soon(3) && callers.receive(3), "it has looked since");
        assert!(!callers.receive_soon(3) && !callers.receive(3));
    }

    #[test]
    fn a_caller_that_sleeps_needs_the_thread_unless_another_one_receives() {
        let mut callers = ReceivingCallers::default();
        callers.enter();
        callers.leave();
        callers.await_thread(true);
        assert!(callers.sleep() && callers.need_thread() && !callers.receive(1));
        callers.enter();
        assert!(callers.sleep() && !callers.need_thread() && callers.receive(2));
        callers.await_thread(false);
        assert!(!callers.sleep());
    }
}
