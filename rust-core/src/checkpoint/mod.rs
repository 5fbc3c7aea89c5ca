//! Checkpoints: tensors of all ranks in a folder that exists completely or not at all.
//!
//! ```text
//!   DIR/newest                        the name of the newest complete checkpoint
//!   DIR/step-100/manifest.json        tensors (type, shape, slices, checksums), layout, content
//!   DIR/step-100/rank-00003-0.safetensors
//!   DIR/.step-110.91c0....smd-attempt a checkpoint that is being written
//! ```
//!
//! - CKPT-1: each rank writes its files and then a report of them into a hidden folder. When all ranks have reported,
//!   rank 0 writes the manifest, renames the folder, and then replaces `newest`. With `durable`, all of it is synced
//!   to the disk before the rename. So `newest` names a complete checkpoint, whenever a process is killed.
//! - CKPT-2: the name of the hidden folder holds the attempt's id, which no two saves share, so old reports are never
//!   taken for new ones.
//! - CKPT-3: every [`CHUNK_BYTES`] of a tensor have a checksum. It is computed while the file is written and verified
//!   whenever any part of the chunk is read. The manifest has a checksum of itself.
//! - CKPT-4: a tensor is read by name and slice, independent of which ranks wrote it in which slices.
//! - CKPT-5: reading executes no code: the formats are safetensors and JSON, and a manifest can name files of its own
//!   folder only.
//! - CKPT-6: a save replaces and removes only checkpoints of its own kind that carry this library's manifest or mark.
//!   In a folder, only files that the manifest lists, or that have names of saved files, are removed. This is checked
//!   before any file is written, and again before any rename.
//! - CKPT-7: a checkpoint that is being replaced is in the attempt's folder until the new one has its name. If the
//!   attempt is interrupted before, readers find it there, and the next save moves it back.

mod attempt;
mod commit;
mod files;
mod manifest;
mod mark;
mod merge;
mod place;
mod read;
mod recover;
mod replicas;
mod save;
mod slices;
mod staging;
mod status;
#[cfg(test)]
mod tests;
mod write;

pub use attempt::{SaveAttempt, SaveSpec};
pub use manifest::{CheckpointKind, FileEntry, Manifest, Piece, StoredDType, TensorEntry};
pub use merge::{describe, merge};
pub use place::{check_tag, content_of, list, locate, newest};
pub use read::{Checkpoint, Target, verify_file};
pub use recover::{clean, prepare};
pub use replicas::{HeldTensor, ReplicaShare, shares_of_replica};
pub use save::{SaveOptions, Saver};
pub use slices::Slice;
pub use write::{RankSave, SourceSlice};

/// Bytes of a tensor that one checksum covers; the last chunk of a slice may be shorter.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// The file name of the manifest.
pub const MANIFEST: &str = "manifest.json";

use std::path::Path;

use crate::error::Error;

/// The error of data that does not match its checksum.
fn damaged(path: &Path, what: impl Into<String>) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, what.into());
    Error::io(format!("`{}` is damaged", path.display()), source)
}

/// An error of the operating system, with the operation and the file.
fn failed(doing: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let context = format!("{doing} `{}`", path.display());
    move |error| Error::io(context, error)
}
