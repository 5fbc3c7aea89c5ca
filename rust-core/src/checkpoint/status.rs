//! The status of a rank in an attempt, in a file whose disk space is allocated at the start, so that a rank with a
//! full disk can still report. The rank's process holds a lock on the file, which the system releases when the
//! process ends.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::failed;
use crate::error::Result;

/// Size of the file: one block of common file systems.
const BYTES: usize = 4096;
/// Longest text, which leaves space for the state and the checksum before it.
const TEXT_BYTES: usize = BYTES - 64;
/// The suffix of status files.
const ENDING: &str = ".status";

/// The status that a rank reports to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// The rank is still writing.
    Writing,
    /// The rank's files and its report are complete.
    Written,
    /// From rank 0: the checkpoint is complete under its name.
    Committed,
    /// The rank failed, for this reason.
    Failed(String),
}

impl Status {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?.trim_end_matches('\0');
        let (sum, rest) = text.split_once(' ')?;
        if u32::from_str_radix(sum, 16).ok()? != crc32fast::hash(rest.as_bytes()) {
            return None;
        }
        let (word, text) = rest.split_once('\n')?;
        match word {
            "writing" => Some(Self::Writing),
            "written" => Some(Self::Written),
            "committed" => Some(Self::Committed),
            "failed" => Some(Self::Failed(text.to_owned())),
            _ => None,
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let (word, text) = match self {
            Self::Writing => ("writing", ""),
            Self::Written => ("written", ""),
            Self::Committed => ("committed", ""),
            Self::Failed(text) => ("failed", text.as_str()),
        };
        let end = (0..=text.len().min(TEXT_BYTES)).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        let rest = format!("{word}\n{}", &text[..end]);
        let mut bytes = format!("{:08x} {rest}", crc32fast::hash(rest.as_bytes())).into_bytes();
        bytes.resize(BYTES, 0);
        bytes
    }
}

/// The name of a rank's status file.
fn name(rank: usize) -> String {
    format!("rank-{rank:05}{ENDING}")
}

/// The status file of this rank.
#[derive(Debug)]
pub(super) struct StatusFile {
    file: File,
    path: PathBuf,
}

impl StatusFile {
    /// Creates the file in an attempt's folder.
    pub(super) fn create(folder: &Path, rank: usize) -> Result<Self> {
        let path = folder.join(name(rank));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(failed("creating", &path))?;
        // On a file system without locks, the only protection is the rule that one job at a time saves into a
        // directory.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        file.write_all_at(&Status::Writing.to_bytes(), 0).map_err(failed("writing", &path))?;
        Ok(Self { file, path })
    }

    /// Writes the status for the other ranks.
    pub(super) fn set(&self, status: &Status) -> Result<()> {
        self.file.write_all_at(&status.to_bytes(), 0).map_err(failed("writing", &self.path))
    }

    /// Removes the file, which tells other ranks that this one has finished.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        // A child that was forked meanwhile inherited the descriptor and would keep the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// Returns the status of `rank`; `None` if it has no file, or is writing it at this moment.
pub(super) fn read(folder: &Path, rank: usize) -> Option<Status> {
    Status::parse(&fs::read(folder.join(name(rank))).ok()?)
}

/// Whether `rank` has a status file.
pub(super) fn exists(folder: &Path, rank: usize) -> bool {
    folder.join(name(rank)).exists()
}

/// The status files in an attempt's folder.
pub(super) fn all(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().ends_with(ENDING)).collect()
}

/// Whether no running process holds a lock on these files.
pub(super) fn are_free(files: &[PathBuf]) -> bool {
    files.iter().all(|path| {
        let Ok(file) = OpenOptions::new().read(true).write(true).open(path) else { return true };
        flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_as_it_was_written_or_not_at_all() {
        let long = format!("ä{}", "ü".repeat(BYTES));
        for status in [Status::Writing, Status::Committed, Status::Failed("no\nspace".into()), Status::Failed(long)] {
            let bytes = status.to_bytes();
            assert_eq!(bytes.len(), BYTES);
            let found = Status::parse(&bytes).unwrap();
            match (&found, &status) {
                (Status::Failed(found), Status::Failed(text)) => assert!(text.starts_with(found) && !found.is_empty()),
                _ => assert_eq!(found, status),
            }
            let mut torn = bytes.clone();
            torn[10] ^= 1;
            assert_eq!(Status::parse(&torn), None);
        }
        assert_eq!(Status::parse(b""), None);
    }
}
