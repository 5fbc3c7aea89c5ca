//! Prints a checkpoint's content, and merges it into one file for other tools.

use std::fmt::Write;
use std::path::Path;

use super::manifest::TensorEntry;
use super::read::{Checkpoint, Target};
use super::slices::Slice;
use super::write::{FileWriter, SourceSlice};
use crate::error::{Error, Result};

/// Largest number of bytes of a tensor that are read at a time.
const BUFFER_BYTES: u64 = 256 << 20;

/// Writes the tensors whose names begin with `prefix` to one safetensors file, with the prefix removed. A tensor with
/// `aliases` in the layout is written once under each name. The file exists completely or not at all.
///
/// # Errors
/// If there is no such tensor, the checkpoint is damaged, or the file cannot be written.
pub fn merge(checkpoint: &Checkpoint, prefix: &str, out: &Path, threads: usize) -> Result<usize> {
    let chosen: Vec<_> =
        checkpoint.manifest().tensors.iter().filter(|tensor| tensor.name.starts_with(prefix)).collect();
    if chosen.is_empty() {
        return Err(Error::InvalidArgument(format!(
            "checkpoint `{}` has no tensor whose name begins with `{prefix}`",
            checkpoint.tag()
        )));
    }
    // Other names of a shared parameter, because tools that load the file expect each of them.
    let aliases = checkpoint.manifest().layout.get("aliases").and_then(serde_json::Value::as_object);
    let mut named: Vec<(String, &TensorEntry)> =
        chosen.into_iter().map(|tensor| (tensor.name[prefix.len()..].to_owned(), tensor)).collect();
    for (alias, name) in aliases.into_iter().flatten() {
        if let (Some(alias), Some(tensor)) =
            (alias.strip_prefix(prefix), name.as_str().and_then(|name| checkpoint.manifest().tensor(name)))
        {
            named.push((alias.to_owned(), tensor));
        }
    }
    let sources: Vec<SourceSlice> = named
        .iter()
        .map(|(name, tensor)| SourceSlice {
            name: name.clone(),
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            slice: Slice::whole(&tensor.shape),
            address: std::ptr::null(),
            held: false,
        })
        .collect();
    let name = out.file_name().ok_or_else(|| Error::InvalidArgument(format!("`{}` is not a file", out.display())))?;
    let beside = out.with_file_name(format!(".{}.new", name.to_string_lossy()));
    let (file, offsets) = FileWriter::create(&beside, &sources)?;
    let mut buffer = Vec::new();
    for ((_, tensor), offset) in named.iter().zip(offsets) {
        let rows = tensor.shape.first().copied().unwrap_or(1);
        let row_bytes = tensor.bytes().checked_div(rows).unwrap_or(0);
        let step = (BUFFER_BYTES / row_bytes.max(1)).max(1);
        let mut row = 0;
        while row < rows && row_bytes > 0 {
            let count = step.min(rows - row);
            let mut slice = Slice::whole(&tensor.shape);
            if let (Some(start), Some(length)) = (slice.start.first_mut(), slice.shape.first_mut()) {
                (*start, *length) = (row, count);
            }
            let bytes = count * row_bytes;
            buffer.resize(bytes as usize, 0);
            let target = Target { name: tensor.name.clone(), slice, address: buffer.as_mut_ptr(), bytes };
            // SAFETY: the buffer has that many bytes, and no other code uses it.
            unsafe { checkpoint.read(&[target], threads)? };
            file.put(&beside, &buffer, offset + row * row_bytes)?;
            row += count;
        }
    }
    file.sync(&beside)?;
    std::fs::rename(&beside, out).map_err(super::failed("renaming", &beside))?;
    Ok(named.len())
}

/// A summary, then a line for each tensor.
pub fn describe(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let bytes: u64 = manifest.tensors.iter().map(TensorEntry::bytes).sum();
    let mut text = format!(
        "{}: step {}, {} tensors of {} bytes in {} files, written by {} ranks\nlayout: {}\ncontent: {}\n",
        checkpoint.tag(),
        manifest.step,
        manifest.tensors.len(),
        bytes,
        manifest.files.len(),
        manifest.world,
        manifest.layout,
        manifest.content
    );
    for tensor in &manifest.tensors {
        let mut files: Vec<&str> = tensor.pieces.iter().map(|piece| manifest.files[piece.file].name.as_str()).collect();
        files.dedup();
        let files = if files.len() > 3 { format!("{} files", files.len()) } else { files.join(", ") };
        writeln!(text, "  {}  {} {:?}  {files}", tensor.name, tensor.dtype, tensor.shape)
            .expect("a string takes everything");
    }
    text
}
