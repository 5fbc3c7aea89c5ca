//! A group's communicator of NCCL out of another group's, which takes less time than to make one anew.
//!
//! - SPL-1: all members of the parent take part, at the same place of the order of its operations, also those that get no
//!   group. So this happens only where the caller knows that all of them call
//!   ([`split_group`](crate::session::Session::split_group)).
//! - SPL-2: whether the parent was used on devices is known on every member alike, and if it was not, nobody says anything.
//!   If it was, the members agree between their CPUs before they call NCCL, and then on how it went: all members of the new
//!   groups have a split communicator, or none has. If one fails while others stay inside of NCCL, the parent's operations on devices end.
//! - SPL-3: a split communicator becomes the communicator of the new group's first part if all its members use the devices that they used in
//!   the parent. Otherwise it ends, and they make one anew.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::{Cuda, DeviceCommunicator};
use crate::device::driver::relaxed;
use crate::device::nccl::Parent;
use crate::error::{Error, Result};

/// How often a look is taken at what is under way.
const LOOK: Duration = Duration::from_millis(1);
/// How long members may stay inside of NCCL after one of them has failed there.
const GRACE: Duration = Duration::from_secs(5);

/// What a member of the parent does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// It is number `key` of the group that `color` tells from the others.
    In {
        /// The same on all members of the new group.
        color: usize,
        /// Its place there.
        key: usize,
    },
    /// It gets no group.
    Out,
    /// It cannot take part, so nobody does.
    Refuses,
}

impl Cuda {
    /// Splits this group's NCCL communicator. `agree` tells whether all members of the parent say the same number, and none of them a
    /// negative one.
    ///
    /// # Errors
    /// Those of `agree`. What NCCL refuses is none: there is no split communicator then.
    pub(in crate::collectives) fn split(
        self: &Arc<Self>,
        side: Side,
        agree: impl Fn(i64) -> Result<bool>,
    ) -> Result<Option<Parent>> {
        let part = match &self.parts.read()[..] {
            [part] if side != Side::Refuses => Some(part.clone()),
            // A member with parts on several devices would have several communicators to divide.
            _ => None,
        };
        let agreed = agree(part.as_ref().map_or(-1, |part| part.number as i64))?;
        let Some(part) = part.filter(|_| agreed) else { return Ok(None) };
        let start = Instant::now();
        let outcome = self.split_part(part, side, start);
        let all_well = match &outcome {
            Ok(_) => agree(0),
            Err(error) => self.or_end(error, || agree(-1)),
        };
        match outcome {
            Ok(split_comm) if matches!(all_well, Ok(true)) => {
                tracing::debug!("group {} was divided on devices after {:.1?}", self.id, start.elapsed());
                Ok(split_comm)
            }
            Ok(split_comm) => {
                split_comm.iter().for_each(Parent::abort);
                all_well.map(|_| None)
            }
            Err(error) => {
                tracing::debug!("group {} was not divided on devices: {error}", self.id);
                all_well.map(|_| None)
            }
        }
    }

    /// What `agree` gives. Members that wait inside of NCCL for this one, which failed with `error`, would never come: they end.
    fn or_end<T>(self: &Arc<Self>, error: &Error, agree: impl FnOnce() -> T) -> T {
        let (agreed, over) = mpsc::channel::<()>();
        let (own, error) = (self.clone(), error.clone());
        let watch = move || {
            if over.recv_timeout(GRACE) == Err(mpsc::RecvTimeoutError::Timeout) {
                own.end(error);
            }
        };
        // Without the thread, they wait for as long as an operation may take.
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
        let during = || format!("making groups out of group {} on CUDA devices", self.id);
        let wait = self.wait(&during, start);
        // Members that allocate memory for the new communicator may wait for their devices, and those for other members.
        while !relaxed(|| part.completed()) {
            self.check(during)?;
            wait.check(|| self.others())?;
            std::thread::sleep(LOOK);
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
            // Somebody may be inside of NCCL still, with whom the next operation would wait.
            self.end(error.clone());
        }
        joined
    }

    /// What the first part is to begin with (SPL-3).
    pub(in crate::collectives) fn adopt(&self, split_comm: Parent) {
        let mut adopted = self.split_comm.lock();
        adopted.replace(split_comm).iter().for_each(Parent::abort);
        if self.closed.get().is_some() {
            // Nobody looks for it any more.
            adopted.take().iter().for_each(Parent::abort);
        }
    }
}
