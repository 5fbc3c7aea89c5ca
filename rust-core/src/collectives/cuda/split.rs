//! Splits a group's NCCL communicator from another group's, which takes less time than creating one.
//!
//! - SPL-1: all members of the parent take part, at the same place of the order of its operations, also members that
//!   are in no new group. So the caller must know that all of them call
//!   ([`split_group`](crate::session::Session::split_group)).
//! - SPL-2: all members know whether the parent was used on devices. If it was not, no message is exchanged. If it
//!   was, the members agree on their CPUs before they call NCCL, and again on the result: all members of the new
//!   groups have a split communicator, or none has. If one fails while others are inside of NCCL, the parent's
//!   operations on devices are aborted.
//! - SPL-3: a split communicator becomes the communicator of the new group's first device if all its members use the
//!   devices that they used in the parent. Otherwise it is destroyed, and the members create a new one.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::{Cuda, DeviceCommunicator};
use crate::device::driver::relaxed;
use crate::device::nccl::Parent;
use crate::error::{Error, Result};

/// Polling interval while NCCL splits.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long members may stay inside of NCCL after one of them has failed there.
const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// A member's argument of a split, as the color and the key of `ncclCommSplit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SplitColor {
    /// The member joins the new group with this color.
    Color {
        /// Equal on all members of the new group.
        color: usize,
        /// The member's position in the new group.
        key: usize,
    },
    /// The member joins no new group.
    NoColor,
    /// The member cannot take part, so no communicator is split.
    Refuse,
}

impl Cuda {
    /// Splits this group's NCCL communicator. `agree` returns whether all members of the parent pass the same,
    /// non-negative number.
    ///
    /// # Errors
    /// Any error of `agree`. If NCCL cannot split, that is not an error: the result has no communicator.
    pub(in crate::collectives) fn split(
        self: &Arc<Self>,
        color: SplitColor,
        agree: impl Fn(i64) -> Result<bool>,
    ) -> Result<Option<Parent>> {
        let device_comm = match &self.device_comms.read()[..] {
            [device_comm] if color != SplitColor::Refuse => Some(device_comm.clone()),
            // With several devices, it would not be clear which communicator to split.
            _ => None,
        };
        let agreed = agree(device_comm.as_ref().map_or(-1, |device_comm| device_comm.number as i64))?;
        let Some(device_comm) = device_comm.filter(|_| agreed) else { return Ok(None) };
        let start = Instant::now();
        let outcome = self.split_device_comm(device_comm, color, start);
        let all_split = match &outcome {
            Ok(_) => agree(0),
            Err(error) => self.agree_or_abort(error, || agree(-1)),
        };
        match outcome {
            Ok(split_comm) if matches!(all_split, Ok(true)) => {
                tracing::debug!("group {} was split on devices after {:.1?}", self.id, start.elapsed());
                Ok(split_comm)
            }
            Ok(split_comm) => {
                split_comm.iter().for_each(Parent::abort);
                all_split.map(|_| None)
            }
            Err(error) => {
                tracing::debug!("group {} was not split on devices: {error}", self.id);
                all_split.map(|_| None)
            }
        }
    }

    /// Returns the result of `agree`. Members that wait inside of NCCL for this member, which
    /// failed with `error`, would wait forever. So the group's operations are aborted.
    fn agree_or_abort<T>(self: &Arc<Self>, error: &Error, agree: impl FnOnce() -> T) -> T {
        let (agreed, over) = mpsc::channel::<()>();
        let (own, error) = (self.clone(), error.clone());
        let watch = move || {
            if over.recv_timeout(GRACE_PERIOD) == Err(mpsc::RecvTimeoutError::Timeout) {
                own.end(error);
            }
        };
        // If the thread cannot be started, they wait until the timeout of an operation.
        let _watch = std::thread::Builder::new().name("smd-cuda-split".into()).spawn(watch);
        let outcome = agree();
        drop(agreed);
        outcome
    }

    fn split_device_comm(
        self: &Arc<Self>,
        device_comm: Arc<DeviceCommunicator>,
        color: SplitColor,
        start: Instant,
    ) -> Result<Option<Parent>> {
        let during = || format!("splitting group {} on CUDA devices", self.id);
        let wait = self.wait(&during, start);
        // Creating the communicator allocates device memory, which may wait for the device, and its kernels may wait
        // for other members.
        while !relaxed(|| device_comm.completed()) {
            self.check(during)?;
            wait.check(|| self.others())?;
            std::thread::sleep(POLL_INTERVAL);
        }
        let place = match color {
            SplitColor::Color { color, key } => Some((color, key)),
            SplitColor::NoColor | SplitColor::Refuse => None,
        };
        let joined = device_comm.split(place, || {
            self.check(during)?;
            wait.check(|| self.others())
        });
        let joined = joined.map_err(|error| self.explain(error, &during));
        if let Err(error) = &joined
            && !matches!(error, Error::Device { .. })
        {
            // A member may still be inside of NCCL, and the next operation would wait for it.
            self.end(error.clone());
        }
        joined
    }

    /// The split communicator for the first device (SPL-3).
    pub(in crate::collectives) fn adopt(&self, split_comm: Parent) {
        let mut adopted = self.split_comm.lock();
        adopted.replace(split_comm).iter().for_each(Parent::abort);
        if self.closed.get().is_some() {
            // Removed, because no other caller uses it.
            adopted.take().iter().for_each(Parent::abort);
        }
    }
}
