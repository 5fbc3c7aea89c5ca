//! A framework's process groups over the session: the first one makes the session if nobody else has, and its end ends
//! the session again.

use std::sync::Arc;
use std::time::Duration;

use super::meeting::Meeting;
use super::{InitOptions, STATE, Session, State};
use crate::collectives::Communicator;
use crate::error::{Error, Result};

/// One process group, with a communicator of its own. Dropping it closes it.
pub struct Membership {
    session: Arc<Session>,
    communicator: Arc<Communicator>,
    owns_session: bool,
}

impl Membership {
    /// The group of all ranks. Joins the job first if this process is in none, or in one that a meeting made: that
    /// one has ended, or a framework would not begin anew. Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the session that `init()` made knows this process as another rank; what
    /// [`super::init`] and [`Session::new_group`] say.
    pub fn of_all(meeting: Meeting) -> Result<Self> {
        let (rank, size, timeout) = (meeting.rank, meeting.size, meeting.timeout);
        super::refuse_child()?;
        let running = match &*STATE.lock() {
            State::Running(session) => Some(session.clone()),
            State::Idle | State::Starting => None,
        };
        let session = match running {
            Some(session) if !session.met => {
                let (known, of) = (session.rank(), session.size());
                if (known, of) != (rank, size) {
                    return Err(Error::InvalidArgument(format!(
                        "the process group makes this process rank {rank} of {size}, but `init()` has made it rank \
                         {known} of {of}"
                    )));
                }
                session
            }
            ended => {
                if ended.is_some() {
                    super::shutdown();
                }
                super::init(InitOptions { meeting: Some(meeting), ..InitOptions::default() })?
            }
        };
        let ranks: Vec<usize> = (0..size).collect();
        let communicator = session.new_group_within(&ranks, timeout)?;
        Ok(Self { owns_session: session.met, session, communicator })
    }

    /// A group of `ranks`, in this order; see [`Session::new_group`].
    ///
    /// # Errors
    /// As [`Session::new_group`].
    pub fn of(ranks: &[usize], timeout: Duration) -> Result<Self> {
        let session = super::current("new_group")?;
        let communicator = session.new_group_within(ranks, timeout)?;
        Ok(Self { session, communicator, owns_session: false })
    }

    /// The group's communicator.
    pub fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// Ends the group in this process: operations under way fail. The group that made the session ends it, and with it
    /// every group of this process. Does nothing the second time.
    pub fn close(&self) {
        if !self.owns_session {
            // It is gone already after `shutdown()`.
            let _ = self.session.remove_group(self.communicator.id());
            return;
        }
        let is_current = match &*STATE.lock() {
            State::Running(session) => Arc::ptr_eq(session, &self.session),
            State::Idle | State::Starting => false,
        };
        if is_current {
            super::shutdown();
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.close();
    }
}
