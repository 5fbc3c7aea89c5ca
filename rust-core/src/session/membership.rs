//! A framework's process groups over the session: the first one makes the session if nobody else has, and then the end
//! of the last one ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::store_rendezvous::StoreRendezvous;
use super::{InitOptions, STATE, Session, SessionState};
use crate::collectives::Communicator;
use crate::error::{Error, Result};

/// One process group, with a communicator of its own. Dropping it closes it.
pub struct Membership {
    session: Arc<Session>,
    communicator: Arc<Communicator>,
    open: AtomicBool,
}

impl Membership {
    /// The group of all ranks. Joins the job first if this process is in none, or in one that a rendezvous on a store made: that
    /// one has ended, or a framework would not begin anew. Collective.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the session that `init()` made knows this process as another rank; what
    /// [`super::init`] and [`Session::new_group`] say.
    pub fn of_all(store_rendezvous: StoreRendezvous) -> Result<Self> {
        let (rank, size, timeout) = (store_rendezvous.rank, store_rendezvous.size, store_rendezvous.timeout);
        super::refuse_child()?;
        let running = match &*STATE.lock() {
            SessionState::Running(session) => Some(session.clone()),
            SessionState::Idle | SessionState::Starting => None,
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
                super::init(InitOptions { store_rendezvous: Some(store_rendezvous), ..InitOptions::default() })?
            }
        };
        let ranks: Vec<usize> = (0..size).collect();
        Self::new(session, &ranks, timeout)
    }

    /// A group of `ranks`, in this order; see [`Session::new_group`].
    ///
    /// # Errors
    /// As [`Session::new_group`].
    pub fn of(ranks: &[usize], timeout: Duration) -> Result<Self> {
        Self::new(super::current("new_group")?, ranks, timeout)
    }

    /// A group of `ranks` out of this one, all of whose members call it at the same place of the order of its operations: with
    /// the ranks of the new group that they are in, or with `None`. See [`Session::split_group`].
    ///
    /// # Errors
    /// As [`Session::new_group`]; of this group's operations.
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

    /// Ends the group in this process: operations under way fail. Does nothing the second time.
    pub fn close(&self) {
        if !self.open.swap(false, Ordering::Relaxed) {
            return;
        }
        // It is gone already after `shutdown()`.
        let _ = self.session.remove_group(self.communicator.id());
        self.session.memberships.fetch_sub(1, Ordering::Relaxed);
        self.session.end_if_unused();
    }
}

impl Session {
    /// Ends the session if groups made it and the last one is gone.
    fn end_if_unused(&self) {
        if !self.met || self.memberships.load(Ordering::Relaxed) > 0 {
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
