//! How far a rank has come with its part of a checkpoint, told in a file that has its room on the disk from the beginning: a rank whose disk
//! is full can still say so. Its process holds a lock on the file, which is gone when the process is, however that ends.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::failed;
use crate::error::Result;

/// The file's size: a block of the usual file systems.
const BYTES: usize = 4096;
/// What a text may have, with room for the word and the checksum before it.
const TEXT_BYTES: usize = BYTES - 64;
/// The ending of such files' names.
const ENDING: &str = ".status";

/// What a rank tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It has not come to the end of its part.
    Writing,
    /// Its part and its note are complete.
    Written,
    /// Of rank 0: the checkpoint has its name.
    Committed,
    /// It gave up, for this reason.
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
    /// Makes it, in an attempt's folder.
    pub(super) fn create(folder: &Path, rank: usize) -> Result<Self> {
        let path = folder.join(name(rank));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(failed("creating", &path))?;
        // Where a file system has no locks, only the rule that one job at a time saves into a folder is left.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        file.write_all_at(&Status::Writing.to_bytes(), 0).map_err(failed("writing", &path))?;
        Ok(Self { file, path })
    }

    /// Tells the others.
    pub(super) fn set(&self, status: &Status) -> Result<()> {
        self.file.write_all_at(&status.to_bytes(), 0).map_err(failed("writing", &self.path))
    }

    /// Takes the file away. Others see that the rank has ended.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        // A child that was forked meanwhile has the file as well, and would keep it locked.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// What `rank` tells; `None` if it has no file, or is writing it right now.
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

/// Whether no process is known to hold one of these files.
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
