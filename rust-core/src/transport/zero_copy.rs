//! Long messages that a carrier moves from the sender's memory to the receiver's, without frames and without copies in
//! between. Only MPI does. The mailbox announces them like all long messages:
//!
//! ```text
//! sender    Rts{tag, bytes, id} -->                        the bytes, under the key -->
//! receiver    (starts the transfer) <-- Cts{id, slot, key}
//! ```
//!
//! - ZCP-1: the receiver posts its receive in the carrier before it sends the key. So the receive is always posted when
//!   the message under that key arrives. A transfer ends when both carriers make progress, whatever callers do.
//! - ZCP-2: each key is answered by exactly one message. If the send was cancelled or its group closed before the key
//!   arrived, that message is empty. The receive then waits for the next message with its tag, as after a withdrawal
//!   (MBX-3); until then, no later receive with this tag takes a message.
//! - ZCP-3: a transfer that has started cannot be aborted. So a cancellation waits for its end, at most
//!   [`cancel_timeout`]. After that time, or when a process of the job has died, MPI is not called any more. Over TCP, MPI
//!   copies bytes only during its calls. Over RDMA, network cards may complete transfers without a call, so a
//!   cancellation also waits until [`HARDWARE_TIME`] has passed since the last call. One case is not covered: over RDMA, a
//!   sender that was stopped for longer than both times, and then continues, may still write to the receiver's memory.

use std::time::Duration;

use super::ports::PortKey;

/// Time for network cards to complete transfers after the last call of MPI.
pub(super) const HARDWARE_TIME: Duration = Duration::from_millis(500);

/// How long a cancellation waits for a transfer of `bytes` bytes between processes that seem to be alive: longer than the
/// silence after which a host counts as lost, and as long as a slow network needs.
pub(super) fn cancel_timeout(bytes: usize) -> Duration {
    const BYTES_PER_SECOND: u64 = 50_000_000;
    Duration::from_secs(8 + bytes as u64 / BYTES_PER_SECOND)
}

/// The longest message: MPI counts bytes in 31 bits.
pub(super) const MAX_BYTES: usize = i32::MAX as usize;

/// One end of a transfer.
pub(crate) struct ZeroCopyTransfer {
    /// The port to notify of its end, with the message's number in that mailbox.
    pub(super) port: PortKey,
    pub(super) message: u64,
    /// The process at the other end.
    pub(super) process: usize,
    pub(super) data: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: the memory may be used by any thread until the transfer has ended, as that of all messages.
unsafe impl Send for ZeroCopyTransfer {}
