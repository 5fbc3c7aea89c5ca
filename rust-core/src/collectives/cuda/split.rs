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

/// A member's part in a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It becomes a member of the new group with this color, at the position of its `key`.
    In {
        /// The color, equal on all members of the new group.
        color: usize,
        /// Its position in the new group.
        key: usize,
    },
    /// It is in no new group.
    Out,
    /// It cannot take part, so the communicator is not split.
    Refuses,
}

impl Cuda {
    /// Splits this group's NCCL communicator. `agree` returns whether all members of the parent pass the same,
    /// non-negative number.
    ///
    /// # Errors
    /// Those of `agree`. If NCCL cannot split, that is not an error: the result has no communicator.
    pub(in crate::collectives) fn split(
        self: &Arc<Self>,
        side: Side,
        agree: impl Fn(i64) -> Result<bool>,
    ) -> Result<Option<Parent>> {
        let part = match &self.parts.read()[..] {
            [part] if side != Side::Refuses => Some(part.clone()),
            // With several devices, it would not be clear which communicator to split.
            _ => None,
        };
        let agreed = agree(part.as_ref().map_or(-1, |part| part.number as i64))?;
        let Some(part) = part.filter(|_| agreed) else { return Ok(None) };
        let start = Instant::now();
        let outcome = self.split_part(part, side, start);
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

    /// Returns the result of `agree`. Members that wait inside of NCCL for this one, which failed with `error`, would
    /// wait forever; they are aborted.
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

    fn split_part(
        self: &Arc<Self>,
        part: Arc<DeviceCommunicator>,
        side: Side,
        start: Instant,
    ) -> Result<Option<Parent>> {
        let during = || format!("splitting group {} on CUDA devices", self.id);
        let wait = self.wait(&during, start);
        // Creating the communicator allocates device memory, which may wait for the device, and its kernels may wait
        // for other members.
        while !relaxed(|| part.completed()) {
            self.check(during)?;
            wait.check(|| self.others())?;
            std::thread::sleep(POLL_INTERVAL);
        }
        let place = match side {
            Side::In { color, key } => Some((color, key)),
            Side::Out | Side::Refuses => None,
        };
        let joined = part.split(place, || {
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
