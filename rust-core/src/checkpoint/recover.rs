//! Removes the remains of interrupted attempts, and moves back the checkpoints that they were replacing (CKPT-7).
//!
//! Only files with names that saves write are removed, one by one. If a folder contains any other file, both stay.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::attempt::{self, DATA, OLD};
use super::files::{make_folders, move_to_free};
use super::manifest::CheckpointKind;
use super::place::{attempt_of, content_name, foreign_file, manifest_of, metadata_of};
use super::{MANIFEST, failed, status};
use crate::error::{Error, Result};

/// How long a folder without a status file is left alone: its rank 0 may be about to write one.
const NEW_FOLDER_AGE: Duration = Duration::from_secs(60);

/// Whether a save writes files with this name.
fn is_known(name: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new")).unwrap_or(name);
    let is_part =
        |start: &str, endings: &[&str]| name.starts_with(start) && endings.iter().any(|end| name.ends_with(end));
    matches!(name, MANIFEST | "newest" | "model" | "user_content" | "partition.pt" | "user_content.pt")
        || is_part("rank-", &[".safetensors", ".json", ".status"])
        || is_part("model_", &[".pt"])
        || is_part("optimizer_", &[".pt"])
        // TensorFlow appends its own suffixes, also to temporary names.
        || ["part-", "merged."].iter().any(|start| name.starts_with(start))
}

/// Creates a directory of checkpoints and its parents, if necessary, and removes the remains of interrupted attempts
/// in it.
///
/// # Errors
/// If the directory cannot be created, or a file cannot be moved or removed.
pub fn prepare(directory: &Path, durable: bool) -> Result<()> {
    make_folders(directory, durable)?;
    clean(directory)
}

/// Removes the remains of interrupted attempts in `directory`, except of attempts that a running process holds a lock
/// on (where the file system has locks).
///
/// # Errors
/// If something cannot be moved or removed.
pub fn clean(directory: &Path) -> Result<()> {
    for found in attempt::folders(directory) {
        let holders = status::all(&found.folder);
        let is_young = || {
            let made = found.folder.metadata().and_then(|folder| folder.modified());
            made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age < NEW_FOLDER_AGE))
        };
        let is_free = if holders.is_empty() { !is_young() } else { status::are_free(&holders) };
        if is_free {
            settle_and_remove(directory, &found.tag, found.number, &found.folder)?;
        }
    }
    Ok(())
}

/// Closes an attempt: moves a replaced checkpoint back if the new one is incomplete, and removes the attempt's
/// folder.
///
/// # Errors
/// If something cannot be moved or removed.
pub(super) fn settle_and_remove(directory: &Path, tag: &str, number: u64, folder: &Path) -> Result<()> {
    let is_complete = attempt_of(&directory.join(tag)) == Some(number);
    if !is_complete {
        restore_replaced(directory, tag, number, folder)?;
    }
    for entry in fs::read_dir(folder.join(OLD)).into_iter().flatten().flatten() {
        // A file that could not be moved back, because its name is in use again, stays here.
        if is_complete || attempt_of(&directory.join(entry.file_name())).is_some() {
            remove_checkpoint(&entry.path())?;
        }
    }
    for name in [OLD, DATA] {
        remove_checkpoint(&folder.join(name))?;
    }
    remove_checkpoint(folder)
}

/// Restores the checkpoint that an incomplete attempt had moved into its folder, under its old name.
fn restore_replaced(directory: &Path, tag: &str, number: u64, folder: &Path) -> Result<()> {
    // The content file of a full checkpoint was renamed before the model file, whose rename completes the checkpoint.
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
        if metadata_of(&place)?.is_none() {
            move_to_free(&entry.path(), &place)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint: its file, or the files in its folder that a save wrote, and then the folder if it is empty.
/// Another rank may do the same concurrently.
pub(super) fn remove_checkpoint(place: &Path) -> Result<()> {
    let gone = |error: &std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
    let Some(found) = metadata_of(place)? else { return Ok(()) };
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

/// Whether the folder at `place` may be removed: a checkpoint of this kind without other files.
pub(super) fn is_whole_and_ours(place: &Path, kind: CheckpointKind) -> Result<bool, Error> {
    match manifest_of(place).filter(|manifest| manifest.kind == kind) {
        Some(manifest) => Ok(foreign_file(place, &manifest)?.is_none()),
        None => Ok(false),
    }
}
