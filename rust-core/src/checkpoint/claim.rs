//! Who writes into a hidden folder holds it, so that nobody takes it for what a killed job has left. A lock on the folder is
//! gone with its process, however that ends.

use std::fs::{self, File};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::failed;
use crate::error::Result;

/// A folder that is being written into.
#[derive(Debug)]
pub(super) struct Claim(File);

impl Claim {
    /// Makes the folder, if it is not there, and holds it together with the other ranks.
    pub(super) fn take(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder).map_err(failed("creating", folder))?;
        let file = File::open(folder).map_err(failed("opening", folder))?;
        // Where a file system has no locks, only the rule that nobody cleans while others save is left.
        let _ = flock(&file, FlockOperation::NonBlockingLockShared);
        Ok(Self(file))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A child that was forked meanwhile has the file as well, and would keep it locked.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

/// Whether nobody is known to hold a folder.
pub(super) fn is_free(folder: &Path) -> bool {
    let Ok(file) = File::open(folder) else { return true };
    flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}
