//! Renames a complete attempt to its checkpoint, in one step, and removes old checkpoints.

use std::fs;
use std::path::Path;

use super::attempt::{OLD, SaveAttempt, SaveSpec, sync_if};
use super::files::{exchange, move_to_free, put};
use super::manifest::Manifest;
use super::mark::{FileRole, Mark};
use super::place::{self, NEWEST, content_name, list, metadata_of};
use super::recover::{is_whole_and_ours, remove_checkpoint};
use super::write::WrittenFiles;
use super::{MANIFEST, failed};
use crate::error::{Error, Result};

/// Merges the reports of all ranks into the manifest and renames the folder (CKPT-1).
pub(super) fn commit(attempt: &SaveAttempt, mut manifest: Manifest, notes: Vec<WrittenFiles>) -> Result<()> {
    let SaveSpec { directory, tag, durable, .. } = attempt.setting();
    for note in notes {
        let first = manifest.files.len();
        manifest.files.extend(note.files);
        for mut tensor in note.tensors {
            tensor.pieces.iter_mut().for_each(|piece| piece.file += first);
            manifest.tensors.push(tensor);
        }
    }
    // Slices of one tensor may come from several ranks.
    manifest.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut tensors: Vec<super::TensorEntry> = Vec::with_capacity(manifest.tensors.len());
    for tensor in manifest.tensors {
        match tensors.last_mut().filter(|last| last.name == tensor.name) {
            Some(last) if (last.dtype, &last.shape) != (tensor.dtype, &tensor.shape) => {
                return Err(Error::Mismatch {
                    during: format!("saving checkpoint `{tag}`"),
                    detail: format!(
                        "tensor `{}` is {} {:?} on one rank and {} {:?} on another",
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
    let data = attempt.data();
    put(attempt.folder(), &data, MANIFEST, manifest.to_text().as_bytes(), *durable)?;
    sync_if(*durable, &data)?;
    // Checked again, because writing may have taken long.
    place::check(directory, tag, manifest.kind)?;
    // Before any rename: the remaining steps need no disk space.
    put(attempt.folder(), attempt.folder(), NEWEST, tag.as_bytes(), *durable)?;
    take_place(attempt, &data, &directory.join(tag))?;
    let newest = attempt.folder().join(NEWEST);
    fs::rename(&newest, directory.join(NEWEST)).map_err(failed("renaming", &newest))?;
    sync_if(*durable, directory)
}

/// Renames the folder `data` to `place`. A previous folder of that name is in the attempt's folder afterwards.
fn take_place(attempt: &SaveAttempt, data: &Path, place: &Path) -> Result<()> {
    let SaveSpec { directory, tag, durable, exchange: may_exchange, .. } = attempt.setting();
    if metadata_of(place)?.is_none() {
        move_to_free(data, place)?;
    } else if !*may_exchange || !exchange(data, place)? {
        // Two renames. A reader between them, or after a kill between them, finds the previous checkpoint (CKPT-7).
        let old = attempt.folder().join(OLD);
        make_old(&old)?;
        fs::rename(place, old.join(tag)).map_err(failed("renaming", place))?;
        if let Err(error) = move_to_free(data, place) {
            let _ = move_to_free(&old.join(tag), place);
            return Err(error);
        }
        sync_if(*durable, &old)?;
    }
    sync_if(*durable, attempt.folder())?;
    sync_if(*durable, directory)
}

fn make_old(old: &Path) -> Result<()> {
    match fs::create_dir(old) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => Err(failed("creating", old)(error)),
        _ => Ok(()),
    }
}

/// Renames the files of a full checkpoint, the content file first and the model file last; the second rename
/// completes the checkpoint. Until then, the old content file is kept. The attempt id that both files carry says
/// which content belongs to which model.
pub(super) fn commit_full(attempt: &SaveAttempt) -> Result<()> {
    let SaveSpec { directory, tag, kind, number, durable, .. } = attempt.setting();
    let (data, old) = (attempt.data(), attempt.folder().join(OLD));
    let (model, content) = (data.join("model"), data.join("user_content"));
    let (model_place, content_place) = (directory.join(tag), directory.join(content_name(tag)));
    let has_model = metadata_of(&model)?.is_some();
    if has_model {
        Mark::put(&model, FileRole::Model, *number, *durable)?;
    }
    if metadata_of(&content)?.is_some() {
        // Without a model file in this attempt, the content belongs to the existing one.
        let belongs = if has_model { None } else { place::attempt_of(&model_place) };
        Mark::put(&content, FileRole::UserContent, belongs.unwrap_or(*number), *durable)?;
    }
    sync_if(*durable, &data)?;
    place::check(directory, tag, *kind)?;
    if has_model && metadata_of(&content_place)?.is_some() {
        make_old(&old)?;
        fs::rename(&content_place, old.join(content_name(tag))).map_err(failed("renaming", &content_place))?;
    }
    for (from, to) in [(&content, &content_place), (&model, &model_place)] {
        if metadata_of(from)?.is_some() {
            fs::rename(from, to).map_err(failed("renaming", from))?;
        }
    }
    sync_if(*durable, directory)
}

/// Removes the checkpoints of the lowest steps except `keep`. Never removes the checkpoint that was just saved, nor
/// one whose folder contains files that no save wrote.
pub(super) fn retain(attempt: &SaveAttempt, keep: usize) -> Result<()> {
    let SaveSpec { directory, tag, kind, .. } = attempt.setting();
    let mut others: Vec<(u64, String)> =
        list(directory, *kind)?.into_iter().filter(|(_, other)| other != tag).collect();
    others.truncate((others.len() + 1).saturating_sub(keep.max(1)));
    let old = attempt.folder().join(OLD);
    for (_, other) in others {
        let place = directory.join(&other);
        if !is_whole_and_ours(&place, *kind)? {
            tracing::warn!("`{}` is kept, because it contains more than its checkpoint", place.display());
            continue;
        }
        // Renamed to a hidden name first, so that a partly removed checkpoint is not taken for a complete one.
        make_old(&old)?;
        fs::rename(&place, old.join(&other)).map_err(failed("renaming", &place))?;
        remove_checkpoint(&old.join(&other))?;
    }
    Ok(())
}
