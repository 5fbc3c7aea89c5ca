//! The key-value store of a job, through which members exchange small values, for example the address of a group's
//! shared memory. It does not carry tensors.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Limit, Result};

/// A store whose keys are written once and read by many members, in any order.
pub trait Store: Send + Sync {
    /// Writes `key`. A second write replaces the first.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns the value of `key`, once it is written; waits at most `timeout`.
    ///
    /// # Errors
    /// [`Error::Timeout`], or [`Error::PeerFailed`] if a member of `waiting_for` (global ranks) departs.
    fn get(&self, key: &str, waiting_for: &[usize], timeout: Duration) -> Result<Vec<u8>>;
    /// Removes every key that starts with `prefix`.
    fn remove_prefix(&self, prefix: &str) -> Result<()>;
    /// Releases the keys that start with `prefix` for this member. They are removed when `members` members have
    /// released them.
    fn release(&self, prefix: &str, members: usize) -> Result<()>;
}

/// A store for ranks that are threads of one process: for tests, and for a job of one process.
#[derive(Debug, Default)]
pub struct LocalStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    /// For each prefix, the number of members that have released it.
    released: Mutex<HashMap<String, usize>>,
    written: Condvar,
}

impl Store for LocalStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.values.lock().insert(key.to_owned(), value.to_vec());
        self.written.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, waiting_for: &[usize], timeout: Duration) -> Result<Vec<u8>> {
        let start = Instant::now();
        let mut values = self.values.lock();
        loop {
            if let Some(value) = values.get(key) {
                return Ok(value.clone());
            }
            if self.written.wait_until(&mut values, start + timeout).timed_out() {
                return Err(Error::Timeout {
                    during: format!("waiting for `{key}`"),
                    waited: start.elapsed(),
                    missing: waiting_for.to_vec(),
                    limit: Limit::default(),
                });
            }
        }
    }

    fn remove_prefix(&self, prefix: &str) -> Result<()> {
        self.values.lock().retain(|key, _| !key.starts_with(prefix));
        Ok(())
    }

    fn release(&self, prefix: &str, members: usize) -> Result<()> {
        let mut released = self.released.lock();
        let count = released.entry(prefix.to_owned()).or_default();
        *count += 1;
        if *count >= members {
            released.remove(prefix);
            self.remove_prefix(prefix)?;
        }
        Ok(())
    }
}
