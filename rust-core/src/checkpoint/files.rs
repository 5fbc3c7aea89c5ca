//! File system operations that are atomic across a power failure: folders, small files, and the exchange of two
//! names.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::failed;
use crate::error::{Error, Result};

/// Creates `path` and its missing parents. With `durable`, each new folder's name is synced to the disk.
pub(super) fn make_folders(path: &Path, durable: bool) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(parent) = parent {
        make_folders(parent, durable)?;
    }
    match fs::create_dir(path) {
        // Another process created it first.
        Err(_) if path.is_dir() => {}
        made => made.map_err(failed("creating", path))?,
    }
    if durable { sync_folder(parent.unwrap_or(Path::new("."))) } else { Ok(()) }
}

/// Syncs a folder, so that the names in it are on the disk.
pub(super) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("syncing", path))
}

/// The temporary name of a file that [`put`] writes in `folder`.
pub(super) fn temporary_name(name: &str) -> String {
    format!(".{name}.new")
}

/// Writes `folder/name` through a temporary file in `by`, so that the file exists completely or not at all. `by` is
/// on the same file system, and no other process writes this name into it.
pub(super) fn put(by: &Path, folder: &Path, name: &str, text: &[u8], durable: bool) -> Result<()> {
    let (beside, path) = (by.join(temporary_name(name)), folder.join(name));
    let result = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&beside)
        .map_err(failed("creating", &beside))
        .and_then(|mut file| {
            file.write_all(text).map_err(failed("writing", &beside))?;
            if durable { file.sync_all().map_err(failed("syncing", &beside)) } else { Ok(()) }
        })
        .and_then(|()| fs::rename(&beside, &path).map_err(failed("renaming", &beside)));
    if result.is_err() {
        let _ = fs::remove_file(&beside);
    }
    result
}

/// Whether the error means that the file system lacks a flag of `renameat2`, as NFS does.
fn is_unknown(error: Errno) -> bool {
    matches!(error, Errno::INVAL | Errno::NOSYS | Errno::NOTSUP)
}

/// Exchanges two names atomically; returns false if the file system cannot.
pub(super) fn exchange(one: &Path, other: &Path) -> Result<bool> {
    match renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(true),
        Err(error) if is_unknown(error) => Ok(false),
        Err(error) => Err(Error::io(format!("exchanging `{}` and `{}`", one.display(), other.display()), error)),
    }
}

/// Renames `from` to `to`, which must not exist. A plain rename would replace an empty folder.
pub(super) fn move_to_free(from: &Path, to: &Path) -> Result<()> {
    let context = || format!("renaming `{}` to `{}`", from.display(), to.display());
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(error) if is_unknown(error) => {
            if to.symlink_metadata().is_ok() {
                return Err(Error::io(context(), std::io::Error::from(std::io::ErrorKind::AlreadyExists)));
            }
            fs::rename(from, to).map_err(|error| Error::io(context(), error))
        }
        result => result.map_err(|error| Error::io(context(), error)),
    }
}
