//! A framework's process groups. The first one starts the session if `init` was not called; such a session ends with
//! the last group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::store_rendezvous::StoreRendezvous;
use super::{InitOptions, STATE, Session, SessionState};
use crate::collectives::Communicator;
use crate::error::{Error, Result};

/// One process group with a communicator of its own, which is closed when the group is dropped.
pub struct Membership {
    session: Arc<Session>,
    communicator: Arc<Communicator>,
    open: AtomicBool,
}

impl Membership {
    /// Creates the group of all ranks. Joins the job first if this process has no session, or has one from an earlier
    /// rendezvous on a store, whose groups must have ended if the framework creates a new world. Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the session that `init()` started has another rank for this process; the errors
    /// of [`super::init`] and [`Session::new_group`].
    pub fn of_all(store_rendezvous: StoreRendezvous) -> Result<Self> {
        let (rank, size, timeout) = (store_rendezvous.rank, store_rendezvous.size, store_rendezvous.timeout);
        super::refuse_child()?;
        let running = match &*STATE.lock() {
            SessionState::Running(session) => Some(session.clone()),
            SessionState::Idle | SessionState::Starting => None,
        };
        let session = match running {
            Some(session) if !session.uses_store_rendezvous => {
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
                super::init(InitOptions { store_rendezvous: Some(store_rendezvous), ..InitOptions::default() })?
            }
        };
        let ranks: Vec<usize> = (0..size).collect();
        Self::new(session, &ranks, timeout)
    }

    /// Creates a group of `ranks`, in this order; see [`Session::new_group`].
    ///
    /// # Errors
    /// As [`Session::new_group`].
    pub fn of(ranks: &[usize], timeout: Duration) -> Result<Self> {
        Self::new(super::current("new_group")?, ranks, timeout)
    }

    /// Splits a group of `ranks` from this one. All members call it at the same place in the order of the group's
    /// operations, with the ranks of their new group or with `None`. See [`Session::split_group`].
    ///
    /// # Errors
    /// As [`Session::new_group`]; the errors of this group's operations.
    pub fn split(&self, ranks: Option<&[usize]>, timeout: Duration) -> Result<Option<Self>> {
        let made = self.session.split_group(&self.communicator, ranks, timeout)?;
        Ok(made.map(|made| Self::with(self.session.clone(), made)))
    }

    fn new(session: Arc<Session>, ranks: &[usize], timeout: Duration) -> Result<Self> {
        let communicator = session.new_group_within(ranks, timeout).inspect_err(|_| session.end_if_unused())?;
        Ok(Self::with(session, communicator))
    }

    fn with(session: Arc<Session>, communicator: Arc<Communicator>) -> Self {
        session.memberships.fetch_add(1, Ordering::Relaxed);
        Self { session, communicator, open: AtomicBool::new(true) }
    }

    /// The group's communicator.
    pub fn communicator(&self) -> &Arc<Communicator> {
        &self.communicator
    }

    /// Closes the group in this process; running operations fail. Does nothing on a second call.
    pub fn close(&self) {
        if !self.open.swap(false, Ordering::Relaxed) {
            return;
        }
        // After `shutdown()` the group is gone already.
        let _ = self.session.remove_group(self.communicator.id());
        self.session.memberships.fetch_sub(1, Ordering::Relaxed);
        self.session.end_if_unused();
    }
}

impl Session {
    /// Ends the session if process groups started it and the last one is closed.
    fn end_if_unused(&self) {
        if !self.uses_store_rendezvous || self.memberships.load(Ordering::Relaxed) > 0 {
            return;
        }
        let is_current = match &*STATE.lock() {
            SessionState::Running(session) => std::ptr::eq(&**session, self),
            SessionState::Idle | SessionState::Starting => false,
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
