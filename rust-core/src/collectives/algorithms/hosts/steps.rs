//! The loop of operations that consist of many messages between hosts.

use crate::collectives::Group;
use crate::error::Result;
use crate::transport::{Message, MessagePause, POLL_INTERVAL, awaited_ranks};

/// An operation whose parts wait for messages from other hosts.
pub(super) trait MessageSteps {
    /// Posts receives.
    fn post(&mut self);
    /// Makes progress without waiting; returns whether there was any.
    fn step(&mut self) -> Result<bool>;
    fn is_complete(&self) -> bool;
    /// The messages that it waits for, and perhaps some that are complete.
    fn awaited(&self) -> impl Iterator<Item = &Message>;
}

/// Runs an operation until it is complete.
pub(super) fn run(operation: &mut impl MessageSteps, group: &Group<'_>) -> Result<()> {
    let transport = group.transport;
    let mut pause = MessagePause::new(transport);
    loop {
        let seen = transport.doorbell();
        operation.post();
        transport.progress();
        let moved = operation.step()?;
        if operation.is_complete() {
            return Ok(());
        }
        if moved {
            pause.restart();
            pause.receive();
            continue;
        }
        if pause.pause() {
            continue;
        }
        if let Err(error) = group.wait.check(|| awaited_ranks(operation.awaited(), group.members)) {
            // The last messages may have arrived since.
            transport.progress();
            while operation.step()? {
                operation.post();
                transport.progress();
            }
            return if operation.is_complete() { Ok(()) } else { Err(error) };
        }
        transport.wait_doorbell(seen, POLL_INTERVAL);
    }
}
