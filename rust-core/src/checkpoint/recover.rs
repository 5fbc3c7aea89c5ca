//! Takes away what broken attempts have left, and brings back what they had moved (CKPT-7).
//!
//! Only names that saves give are removed, one by one: what else lies in such a folder stays, and the folder with it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::attempt::{self, DATA, OLD};
use super::files::{make_folders, move_to_free};
use super::manifest::CheckpointKind;
use super::place::{attempt_of, content_name, foreign_file, look, manifest_of};
use super::{MANIFEST, failed, status};
use crate::error::{Error, Result};

/// A folder without a status file is left alone for so long: rank 0 may be about to write its own.
const YOUNG: Duration = Duration::from_secs(60);

/// Whether a save gives files such a name.
fn is_known(name: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new")).unwrap_or(name);
    let is_part =
        |start: &str, endings: &[&str]| name.starts_with(start) && endings.iter().any(|end| name.ends_with(end));
    matches!(name, MANIFEST | "newest" | "model" | "user_content" | "partition.pt" | "user_content.pt")
        || is_part("rank-", &[".safetensors", ".json", ".status"])
        || is_part("model_", &[".pt"])
        || is_part("optimizer_", &[".pt"])
        // TensorFlow adds endings of its own, also while it writes.
        || ["part-", "merged."].iter().any(|start| name.starts_with(start))
}

/// Makes a folder of checkpoints and its parents, as far as they are not there, and removes what broken attempts have left in it.
///
/// # Errors
/// If it cannot be made, or something cannot be moved or removed.
pub fn prepare(directory: &Path, durable: bool) -> Result<()> {
    make_folders(directory, durable)?;
    clean(directory)
}

/// Removes what broken attempts have left in `directory`; not what another process holds that is saving, where the file system has locks.
///
/// # Errors
/// If something cannot be moved or removed.
pub fn clean(directory: &Path) -> Result<()> {
    for found in attempt::folders(directory) {
        let holders = status::all(&found.folder);
        let is_young = || {
            let made = found.folder.metadata().and_then(|folder| folder.modified());
            made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age < YOUNG))
        };
        let is_free = if holders.is_empty() { !is_young() } else { status::are_free(&holders) };
        if is_free {
            settle_and_remove(directory, &found.tag, found.number, &found.folder)?;
        }
    }
    Ok(())
}

/// Ends an attempt: brings back what it had moved if it did not come to its end, and removes its folder.
///
/// # Errors
/// If something cannot be moved or removed.
pub(super) fn settle_and_remove(directory: &Path, tag: &str, number: u64, folder: &Path) -> Result<()> {
    let is_complete = attempt_of(&directory.join(tag)) == Some(number);
    if !is_complete {
        bring_back(directory, tag, number, folder)?;
    }
    for entry in fs::read_dir(folder.join(OLD)).into_iter().flatten().flatten() {
        // What could not come back, since something else has its name now, stays where it is.
        if is_complete || attempt_of(&directory.join(entry.file_name())).is_some() {
            remove_checkpoint(&entry.path())?;
        }
    }
    for name in [OLD, DATA] {
        remove_checkpoint(&folder.join(name))?;
    }
    remove_checkpoint(folder)
}

/// The attempt did not come to its end: what it had moved out of the way gets its name again.
fn bring_back(directory: &Path, tag: &str, number: u64, folder: &Path) -> Result<()> {
    // The content of a full checkpoint comes before the model's file, whose rename is the end.
    let content = directory.join(content_name(tag));
    let is_unfinished = content.is_file() && attempt_of(&content) == Some(number);
    let kept = folder.join(OLD).join(content_name(tag));
    if is_unfinished && kept.exists() {
        fs::rename(&kept, &content).map_err(failed("renaming", &kept))?;
    } else if is_unfinished && folder.join(DATA).join("model").exists() {
        fs::remove_file(&content).map_err(failed("removing", &content))?;
    }
    for entry in fs::read_dir(folder.join(OLD)).into_iter().flatten().flatten() {
        let place = directory.join(entry.file_name());
        if look(&place)?.is_none() {
            move_to_free(&entry.path(), &place)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint's file, or of its folder what a save has written, and then the folder if nothing else is in it. Another
/// rank may do so at once.
pub(super) fn remove_checkpoint(place: &Path) -> Result<()> {
    let gone = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    let Some(found) = look(place)? else { return Ok(()) };
    if !found.is_dir() {
        return match fs::remove_file(place) {
            Err(error) if !gone(&error) => Err(failed("removing", place)(error)),
            _ => Ok(()),
        };
    }
    let listed: Vec<String> = manifest_of(place)
        .map(|manifest| manifest.files.into_iter().map(|file| file.name).collect())
        .unwrap_or_default();
    let entries = match fs::read_dir(place) {
        Err(error) if gone(&error) => return Ok(()),
        entries => entries.map_err(failed("reading", place))?,
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if is_file && (is_known(&name) || listed.contains(&name)) {
            match fs::remove_file(entry.path()) {
                Err(error) if !gone(&error) => return Err(failed("removing", &entry.path())(error)),
                _ => {}
            }
        }
    }
    match fs::remove_dir(place) {
        Err(error) if !gone(&error) && error.kind() != std::io::ErrorKind::DirectoryNotEmpty => {
            Err(failed("removing", place)(error))
        }
        _ => Ok(()),
    }
}

/// Whether the folder at `place` may be retired: a checkpoint of this kind, with nothing else in it.
pub(super) fn is_whole_and_ours(place: &Path, kind: CheckpointKind) -> Result<bool, Error> {
    match manifest_of(place).filter(|manifest| manifest.kind == kind) {
        Some(manifest) => Ok(foreign_file(place, &manifest)?.is_none()),
        None => Ok(false),
    }
}
