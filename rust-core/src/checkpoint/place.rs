//! Finds checkpoints in a directory, and decides whether a save may replace an existing path (CKPT-6).

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::manifest::{CheckpointKind, Manifest};
use super::mark::{FileRole, Mark};
use super::{MANIFEST, attempt, damaged, failed};
use crate::error::{Error, Result};

/// The file that names the newest checkpoint.
pub(super) const NEWEST: &str = "newest";
/// The longest tag. With the prefixes and suffixes of file names, it stays below the 255 bytes that file systems
/// allow.
const TAG_BYTES: usize = 200;

/// Checks that `tag` is a valid checkpoint name: a single path component, so that it stays inside the directory, and
/// not a hidden name, because those are reserved.
///
/// # Errors
/// [`Error::InvalidArgument`] if it is not.
pub fn check_tag(tag: &str) -> Result<()> {
    let why = if tag.is_empty() {
        "it is empty"
    } else if tag.contains('/') {
        "it has a `/`, but a checkpoint must lie directly in its folder"
    } else if tag.starts_with('.') {
        "it begins with a dot"
    } else if tag.contains('\0') {
        "it has a zero byte"
    } else if tag == NEWEST {
        "it is the name of the file that records the newest checkpoint"
    } else if tag.len() > TAG_BYTES {
        "it has more than 200 bytes"
    } else {
        return Ok(());
    };
    Err(Error::InvalidArgument(format!("{tag:?} is not a valid name for a checkpoint: {why}")))
}

/// The name of the file with the user content of a full checkpoint.
pub(super) fn content_name(tag: &str) -> String {
    format!("user_content_{tag}")
}

/// Checks whether a save of this kind may write `directory/tag`: the path is free, or holds a checkpoint of the same
/// kind that this library wrote and no other files (CKPT-6).
///
/// # Errors
/// [`Error::InvalidArgument`] naming the path in the way, and [`Error::Io`] if it cannot be read.
pub(super) fn check(directory: &Path, tag: &str, kind: CheckpointKind) -> Result<()> {
    check_tag(tag)?;
    if let Some(found) = metadata_of(directory)?.filter(|found| !found.is_dir() && !found.is_symlink()) {
        let what = if found.is_file() { "a file" } else { "no folder" };
        return Err(Error::InvalidArgument(format!("`{}` is {what}: expected a folder", directory.display())));
    }
    let place = directory.join(tag);
    if kind == CheckpointKind::Tensorflow {
        return Ok(());
    }
    if kind == CheckpointKind::Full {
        check_file(&place, FileRole::Model)?;
        return check_file(&directory.join(content_name(tag)), FileRole::UserContent);
    }
    check_newest(&directory.join(NEWEST))?;
    let Some(found) = metadata_of(&place)? else { return Ok(()) };
    if !found.is_dir() {
        return Err(foreign(&place, if found.is_symlink() { "is a symbolic link" } else { "is a file" }));
    }
    let manifest = own_manifest(&place)?;
    if manifest.kind != kind {
        return Err(foreign(&place, &format!("is a {} checkpoint", manifest.kind)));
    }
    match foreign_file(&place, &manifest)? {
        Some(name) => Err(foreign(&place, &format!("holds `{name}`, which is not part of the checkpoint"))),
        None => Ok(()),
    }
}

fn check_file(path: &Path, role: FileRole) -> Result<()> {
    match metadata_of(path)? {
        None => Ok(()),
        Some(found) if found.is_symlink() => Err(foreign(path, "is a symbolic link")),
        Some(found) if found.is_dir() => Err(foreign(path, "is a folder")),
        Some(_) => match Mark::read(path) {
            Some(mark) if mark.role == role => Ok(()),
            Some(_) => Err(foreign(path, "is a file of another checkpoint")),
            None => Err(foreign(path, "is a file without the mark of this library")),
        },
    }
}

/// Reads the tag in the file `newest`. The file is empty if the power failed while it was written without `durable`.
fn check_newest(path: &Path) -> Result<()> {
    let Some(found) = metadata_of(path)? else { return Ok(()) };
    let is_ours = found.is_file()
        && found.len() <= TAG_BYTES as u64 + 1
        && fs::read_to_string(path).is_ok_and(|text| text.trim().is_empty() || check_tag(text.trim()).is_ok());
    if is_ours { Ok(()) } else { Err(foreign(path, "does not hold the name of a checkpoint")) }
}

fn foreign(path: &Path, what: &str) -> Error {
    Error::InvalidArgument(format!(
        "`{}` {what}: a save replaces only what it wrote; move it away, or save under another name",
        path.display()
    ))
}

/// The file type at a path, without following links.
pub(super) fn metadata_of(path: &Path) -> Result<Option<Metadata>> {
    match path.symlink_metadata() {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound) => Ok(None),
        Err(error) => Err(failed("reading", path)(error)),
    }
}

fn own_manifest(place: &Path) -> Result<Manifest> {
    let path = place.join(MANIFEST);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(foreign(place, &format!("is a folder without a `{MANIFEST}`")));
        }
        Err(error) => return Err(failed("reading", &path)(error)),
    };
    Manifest::parse(&bytes).map_err(|error| foreign(place, &format!("has a damaged `{MANIFEST}` ({})", error.text())))
}

/// Returns a name in a checkpoint's folder that its manifest does not list.
pub(super) fn foreign_file(place: &Path, manifest: &Manifest) -> Result<Option<String>> {
    let known: HashSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).chain([MANIFEST]).collect();
    for entry in fs::read_dir(place).map_err(failed("reading", place))? {
        let name = entry.map_err(failed("reading", place))?.file_name().to_string_lossy().into_owned();
        if !known.contains(name.as_str()) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// Returns the manifest of a folder, if this library wrote it.
pub(super) fn manifest_of(place: &Path) -> Option<Manifest> {
    Manifest::parse(&fs::read(place.join(MANIFEST)).ok()?).ok()
}

/// Returns the id of the attempt that wrote the checkpoint at `place`, if this library did.
pub(super) fn attempt_of(place: &Path) -> Option<u64> {
    if place.is_dir() {
        return manifest_of(place).map(|manifest| manifest.attempt);
    }
    Mark::read(place).map(|mark| mark.attempt)
}

/// Returns the folder of the checkpoint `tag`: `directory/tag`, or the attempt's folder to which an interrupted save
/// moved the previous checkpoint.
pub fn locate(directory: &Path, tag: &str) -> PathBuf {
    let place = directory.join(tag);
    if place.join(MANIFEST).exists() {
        return place;
    }
    let before = attempt::folders(directory).into_iter().filter(|found| found.tag == tag);
    before
        .map(|found| found.folder.join(attempt::OLD).join(tag))
        .find(|old| old.join(MANIFEST).exists())
        .unwrap_or(place)
}

/// Returns the user content that was saved with the full checkpoint `tag`, if there was any.
pub fn content_of(directory: &Path, tag: &str) -> Option<PathBuf> {
    let (place, name) = (directory.join(tag), content_name(tag));
    let Some(model) = Mark::read(&place) else {
        // A model file that this library did not write: any content file of that name belongs to it.
        return Some(directory.join(name)).filter(|path| path.is_file());
    };
    let belongs = |path: &PathBuf| path.is_file() && Mark::read(path).is_none_or(|mark| mark.attempt == model.attempt);
    let left = attempt::folders(directory).into_iter().filter(|found| found.tag == tag);
    let olds = left.map(|found| found.folder.join(attempt::OLD).join(&name));
    [directory.join(&name)].into_iter().chain(olds).find(belongs)
}

/// Lists complete checkpoints of a kind in `directory` with their steps, in ascending order of steps.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(directory: &Path, kind: CheckpointKind) -> Result<Vec<(u64, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed("reading", directory))? {
        let entry = entry.map_err(failed("reading", directory))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if check_tag(&name).is_ok()
            && let Some(manifest) = manifest_of(&entry.path())
            && manifest.kind == kind
        {
            found.push((manifest.step, name));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the tag of the newest complete sharded checkpoint: the one in `newest`, or if that file is missing or
/// names another kind, the one of the highest step. `None` if there is none.
///
/// # Errors
/// If the directory cannot be read.
pub fn newest(directory: &Path) -> Result<Option<String>> {
    if let Ok(text) = fs::read_to_string(directory.join(NEWEST)) {
        let tag = text.trim();
        // A damaged checkpoint still counts as the newest, so that loading it reports the damage.
        let is_other =
            || manifest_of(&locate(directory, tag)).is_some_and(|manifest| manifest.kind != CheckpointKind::Sharded);
        if check_tag(tag).is_ok() && locate(directory, tag).join(MANIFEST).exists() && !is_other() {
            return Ok(Some(tag.to_owned()));
        }
    }
    if metadata_of(directory)?.is_none() {
        return Ok(None);
    }
    Ok(list(directory, CheckpointKind::Sharded)?.pop().map(|(_, tag)| tag))
}

/// As [`newest`], with an error if there is no checkpoint.
///
/// # Errors
/// As [`newest`]; also if there is no checkpoint.
pub(super) fn required_newest(directory: &Path) -> Result<String> {
    newest(directory)?.ok_or_else(|| damaged(directory, "there is no complete checkpoint in it"))
}
