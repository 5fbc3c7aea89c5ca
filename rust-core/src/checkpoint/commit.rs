//! Gives a checkpoint its name, in one step, and takes old ones away.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{RenameFlags, renameat_with};

use super::claim;
use super::manifest::Manifest;
use super::write::Note;
use super::{MANIFEST, damaged, failed};
use crate::error::{Error, Result};

/// The file that names the newest checkpoint.
pub(super) const NEWEST: &str = "newest";

/// The folder in which an attempt writes (CKPT-2).
pub(super) fn hidden(directory: &Path, tag: &str, attempt: u64) -> PathBuf {
    directory.join(format!(".{tag}.{attempt:016x}"))
}

/// Whether `tag` can be a folder's name. Hidden names are ours.
pub(super) fn check_tag(tag: &str) -> Result<()> {
    if tag.is_empty() || tag.starts_with('.') || tag.contains(['/', '\0']) || tag == NEWEST || tag.len() > 200 {
        return Err(Error::InvalidArgument(format!("`{tag}` is no name for a checkpoint")));
    }
    Ok(())
}

/// Writes a file that is there completely or not at all.
pub(super) fn put(path: &Path, text: &[u8], durable: bool) -> Result<()> {
    let name = path.file_name().expect("it is a file's path").to_string_lossy();
    let beside = path.with_file_name(format!(".{name}.new"));
    let mut file = File::create(&beside).map_err(failed("creating", &beside))?;
    file.write_all(text).map_err(failed("writing", &beside))?;
    if durable {
        file.sync_all().map_err(failed("syncing", &beside))?;
    }
    fs::rename(&beside, path).map_err(failed("renaming", &beside))
}

fn sync_folder(path: &Path) -> Result<()> {
    File::open(path).and_then(|folder| folder.sync_all()).map_err(failed("syncing", path))
}

/// The name of a rank's note.
pub(super) fn note_name(rank: usize) -> String {
    format!("rank-{rank:05}.json")
}

/// Puts the notes of all ranks together and gives the folder its name (CKPT-1). Returns what was committed.
pub(super) fn commit(
    directory: &Path,
    tag: &str,
    durable: bool,
    mut manifest: Manifest,
    notes: Vec<Note>,
) -> Result<()> {
    let folder = hidden(directory, tag, manifest.attempt);
    for note in notes {
        let first = manifest.files.len();
        manifest.files.extend(note.files);
        for mut tensor in note.tensors {
            tensor.pieces.iter_mut().for_each(|piece| piece.file += first);
            manifest.tensors.push(tensor);
        }
    }
    // Slices of one tensor come from several ranks.
    manifest.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut tensors: Vec<super::TensorEntry> = Vec::with_capacity(manifest.tensors.len());
    for tensor in manifest.tensors {
        match tensors.last_mut().filter(|last| last.name == tensor.name) {
            Some(last) if (last.dtype, &last.shape) != (tensor.dtype, &tensor.shape) => {
                return Err(Error::Mismatch {
                    during: format!("saving checkpoint `{tag}`"),
                    detail: format!(
                        "tensor `{}` is {} {:?} on one and {} {:?} on another",
                        tensor.name, last.dtype, last.shape, tensor.dtype, tensor.shape
                    ),
                });
            }
            Some(last) => last.pieces.extend(tensor.pieces),
            None => tensors.push(tensor),
        }
    }
    manifest.tensors = tensors;
    manifest.check()?;
    for rank in 0..manifest.world {
        let note = folder.join(note_name(rank));
        fs::remove_file(&note).map_err(failed("removing", &note))?;
    }
    put(&folder.join(MANIFEST), manifest.to_text().as_bytes(), durable)?;
    if durable {
        sync_folder(&folder)?;
    }
    let place = directory.join(tag);
    if place.exists() {
        // The old one stays in its place until the new one is there.
        renameat_with(rustix::fs::CWD, &folder, rustix::fs::CWD, &place, RenameFlags::EXCHANGE)
            .map_err(|error| Error::io(format!("exchanging `{}`", place.display()), error))?;
    } else {
        fs::rename(&folder, &place).map_err(failed("renaming", &folder))?;
    }
    if durable {
        sync_folder(directory)?;
    }
    put(&directory.join(NEWEST), tag.as_bytes(), durable)?;
    if durable {
        sync_folder(directory)?;
    }
    // After an exchange, the old one.
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(failed("removing", &folder))?;
    }
    Ok(())
}

/// Complete checkpoints in `directory` with their steps, the newest step last.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<(u64, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed("reading", directory))? {
        let entry = entry.map_err(failed("reading", directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if check_tag(&name).is_ok()
            && let Ok(bytes) = fs::read(entry.path().join(MANIFEST))
            && let Ok(manifest) = Manifest::parse(&bytes)
        {
            found.push((manifest.step, name));
        }
    }
    found.sort();
    Ok(found)
}

/// The name of the newest complete checkpoint: what `newest` says, or if that is lost, the one of the highest step.
///
/// # Errors
/// If there is none.
pub fn newest(directory: &Path) -> Result<String> {
    let note = directory.join(NEWEST);
    if let Ok(text) = fs::read_to_string(&note) {
        let tag = text.trim();
        if check_tag(tag).is_ok() && directory.join(tag).join(MANIFEST).exists() {
            return Ok(tag.to_owned());
        }
    }
    match list(directory)?.pop() {
        Some((_, tag)) => Ok(tag),
        None => Err(damaged(directory, "there is no complete checkpoint in it")),
    }
}

/// Removes what broken attempts have left; not what somebody holds who is saving, where the file system has locks.
///
/// # Errors
/// If the directory exists and cannot be read, or something cannot be removed.
pub fn clean(directory: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    for entry in entries {
        let entry = entry.map_err(failed("reading", directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        // Ours are `.tag.attempt`; other hidden folders are none of our business.
        let attempt = name.rsplit('.').next().unwrap_or_default();
        let ours = name.starts_with('.') && attempt.len() == 16 && attempt.bytes().all(|byte| byte.is_ascii_hexdigit());
        if ours && entry.path().is_dir() && claim::is_free(&entry.path()) {
            fs::remove_dir_all(entry.path()).map_err(failed("removing", &entry.path()))?;
        }
    }
    Ok(())
}

/// Removes the checkpoints of the lowest steps but `keep`, never the one named `newest`.
pub(super) fn retain(directory: &Path, keep: usize, newest: &str, attempt: u64) -> Result<()> {
    let mut others: Vec<(u64, String)> = list(directory)?.into_iter().filter(|(_, tag)| tag != newest).collect();
    others.truncate((others.len() + 1).saturating_sub(keep.max(1)));
    for (_, tag) in others {
        // Hidden first: half of a checkpoint must not be taken for one.
        let (place, away) = (directory.join(&tag), hidden(directory, &tag, attempt));
        fs::rename(&place, &away).map_err(failed("renaming", &place))?;
        fs::remove_dir_all(&away).map_err(failed("removing", &away))?;
    }
    Ok(())
}
