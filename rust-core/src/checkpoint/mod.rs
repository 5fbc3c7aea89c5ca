//! Checkpoints: tensors of all ranks in a folder that is either complete or not there.
//!
//! ```text
//!   DIR/newest                        the name of the newest complete checkpoint
//!   DIR/step-100/manifest.json        every tensor: type, shape, which slice is where, checksums; layout; content
//!   DIR/step-100/rank-00003-0.safetensors
//!   DIR/.step-110.91c0....smd-attempt one that is being written
//! ```
//!
//! - CKPT-1: ranks write into a hidden folder, each its own files and then a note of what they hold. When all have said that theirs is
//!   complete, rank 0 writes the manifest and renames the folder, then replaces `newest`. With `durable`,
//!   everything is on the disk before it gets its name. So whenever a process is killed, what `newest` names is complete.
//! - CKPT-2: the folder's name holds the attempt's number, which no two saves share: nobody takes old notes for new ones.
//! - CKPT-3: every [`CHUNK_BYTES`] of a tensor have a checksum, which is computed on the way to the file and compared on the way back,
//!   also where only a part of the tensor is read. The manifest has one of itself.
//! - CKPT-4: a tensor is read by name and slice; who wrote it, and in which pieces, does not matter.
//! - CKPT-5: nothing that is read is executed: safetensors and JSON only, and a manifest names files of its own folder.
//! - CKPT-6: a save replaces and removes checkpoints of its own kind that carry this library's manifest or mark, and nothing else. Of a folder, only
//!   files that the manifest lists or that saves give such names are removed. It looks before anything is written, and again before anything moves.
//! - CKPT-7: whatever an attempt has moved away is in its folder until the new checkpoint has its name. If the attempt is broken off before, readers find
//!   it there, and the next save brings it back.

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

/// A checksum is of this many bytes of a tensor, the last one of a piece of fewer.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// The manifest's name in its folder.
pub const MANIFEST: &str = "manifest.json";

use std::path::Path;

use crate::error::Error;

/// What was read is not what was written.
fn damaged(path: &Path, what: impl Into<String>) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, what.into());
    Error::io(format!("`{}` is damaged", path.display()), source)
}

/// An error of the operating system, with what was being done to which file.
fn failed(doing: &str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let context = format!("{doing} `{}`", path.display());
    move |error| Error::io(context, error)
}
