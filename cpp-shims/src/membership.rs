//! Implements the bridge's functions for process groups.

use std::sync::Arc;
use std::time::Duration;

use cxx::UniquePtr;
use smd_core::session::membership;
use smd_core::session::store_rendezvous::{self, StoreRendezvous};
use smd_core::{Error, Result};

use crate::bridge as ffi;
use crate::guard::{Report, guard, guard_or};

/// A process group of a framework.
pub struct Membership(membership::Membership);

/// A framework's key-value store.
struct BootstrapStore(UniquePtr<ffi::BootstrapStore>);

// SAFETY: bootstrap_store.h requires that the store may be used and destroyed on any thread, also concurrently.
unsafe impl Send for BootstrapStore {}
// SAFETY: as above.
unsafe impl Sync for BootstrapStore {}

impl store_rendezvous::BootstrapStore for BootstrapStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value).map_err(|error| broken(key, &error))
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut value = Vec::new();
        let found = self.0.get(key, &mut value).map_err(|error| broken(key, &error))?;
        Ok(found.then_some(value))
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.0.remove(key).map_err(|error| broken(key, &error))
    }
}

fn broken(key: &str, error: &cxx::Exception) -> Error {
    Error::Rendezvous(format!("the given store cannot be used (key `{key}`): {error}"))
}

pub fn join_all(
    rank: usize,
    size: usize,
    timeout_ms: u64,
    store: UniquePtr<ffi::BootstrapStore>,
) -> Result<Box<Membership>, Report> {
    guard(|| {
        let timeout = Duration::from_millis(timeout_ms);
        let store_rendezvous = StoreRendezvous { rank, size, store: Arc::new(BootstrapStore(store)), timeout };
        Ok(Box::new(Membership(membership::Membership::of_all(store_rendezvous)?)))
    })
}

pub fn join_some(ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>, Report> {
    guard(|| Ok(Box::new(Membership(membership::Membership::of(ranks, Duration::from_millis(timeout_ms))?))))
}

impl Membership {
    pub fn split(&self, ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>, Report> {
        guard(|| match self.0.split(Some(ranks), Duration::from_millis(timeout_ms))? {
            Some(made) => Ok(Box::new(Membership(made))),
            None => Err(Error::Internal("a new group is missing".to_owned())),
        })
    }

    pub fn split_nocolor(&self, timeout_ms: u64) -> Result<(), Report> {
        guard(|| self.0.split(None, Duration::from_millis(timeout_ms)).map(drop))
    }

    pub fn connect_device(&self, device: u16) -> Result<(), Report> {
        guard(|| self.0.communicator().connect_device(device))
    }

    pub fn group(&self) -> Result<u64, Report> {
        guard(|| Ok(self.0.communicator().id()))
    }

    pub fn ranks(&self) -> Result<Vec<usize>, Report> {
        guard(|| Ok(self.0.communicator().members().ranks.to_vec()))
    }

    pub fn close(&self) {
        guard_or((), || self.0.close());
    }
}
