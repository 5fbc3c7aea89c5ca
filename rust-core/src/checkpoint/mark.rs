//! Marks of `torch.save` files that have no manifest. A mark is the comment at the end of the zip archive, which zip
//! readers ignore. It records that this library wrote the file, in which attempt, and the checksum of all bytes
//! before the mark.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{damaged, failed};
use crate::error::{Error, Result};

/// Signature of the end record of a zip archive, whose last field is the length of the comment.
const SIGNATURE: &[u8] = b"PK\x05\x06";
/// Size of the end record without the comment.
const RECORD_BYTES: usize = 22;
/// Largest size of a mark in bytes.
const MARK_BYTES: usize = 512;
/// Bytes that are read and added to the checksum at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// The content of a marked file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum FileRole {
    /// The state of a whole model.
    Model,
    /// The user content that the script saved beside the model.
    UserContent,
}

/// The mark of a `torch.save` file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Mark {
    /// Version of the format: [`Mark::FORMAT`].
    format: String,
    /// Content of the file.
    pub(super) role: FileRole,
    /// Id of the attempt that wrote the model file. The content file carries the same id.
    pub(super) attempt: u64,
    /// Number of bytes before the mark, and their checksum.
    bytes: u64,
    crc: u32,
}

impl Mark {
    const FORMAT: &'static str = "smd-checkpoint-file 1";

    /// Adds a mark to a `torch.save` file.
    ///
    /// # Errors
    /// If the file is not a zip archive, has a comment already, or cannot be written.
    pub(super) fn put(path: &Path, role: FileRole, attempt: u64, durable: bool) -> Result<()> {
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed("opening", path))?;
        let bytes = file.metadata().map_err(failed("reading", path))?.len();
        let mut record = [0; RECORD_BYTES];
        let begin = bytes.checked_sub(RECORD_BYTES as u64);
        let found = begin.map(|begin| file.read_exact_at(&mut record, begin)).transpose();
        found.map_err(failed("reading", path))?;
        if !record.starts_with(SIGNATURE) || record[RECORD_BYTES - 2..] != [0, 0] {
            return Err(Error::InvalidArgument(format!("`{}` is not a file of `torch.save`", path.display())));
        }
        // Excluding the length of the comment, which is about to change.
        let crc = sum(&file, bytes - 2).map_err(failed("reading", path))?;
        let mark = Self { format: Self::FORMAT.into(), role, attempt, bytes: bytes - 2, crc };
        let text = serde_json::to_vec(&mark).expect("names and numbers are JSON");
        let length = u16::try_from(text.len()).expect("it is short");
        let end: Vec<u8> = length.to_le_bytes().into_iter().chain(text).collect();
        file.write_all_at(&end, bytes - 2).map_err(failed("writing", path))?;
        if durable { file.sync_all().map_err(failed("syncing", path)) } else { Ok(()) }
    }

    /// Returns the mark of a file, if it has one.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let file = File::open(path).ok()?;
        let bytes = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
        let begin = bytes.saturating_sub((MARK_BYTES + RECORD_BYTES) as u64);
        let mut end = vec![0; (bytes - begin) as usize];
        file.read_exact_at(&mut end, begin).ok()?;
        let at = end.windows(SIGNATURE.len()).rposition(|window| window == SIGNATURE)? + RECORD_BYTES;
        let length = u16::from_le_bytes(end.get(at - 2..at)?.try_into().ok()?);
        let text = end.get(at..).filter(|text| text.len() == usize::from(length))?;
        let mark: Self = serde_json::from_slice(text).ok()?;
        let fits = mark.format == Self::FORMAT && mark.bytes + 2 + u64::from(length) == bytes;
        fits.then_some(mark)
    }

    /// Verifies the checksum of a marked file. A file without a mark is not checked.
    ///
    /// # Errors
    /// [`Error::Io`] if the checksum does not match, or the file cannot be read.
    pub(super) fn verify(path: &Path) -> Result<()> {
        let Some(mark) = Self::read(path) else { return Ok(()) };
        let file = File::open(path).map_err(failed("opening", path))?;
        let found = sum(&file, mark.bytes).map_err(failed("reading", path))?;
        if found != mark.crc {
            return Err(damaged(path, format!("it has the checksum {found:08x}, expected {:08x}", mark.crc)));
        }
        Ok(())
    }
}

/// The checksum of the first `bytes` of a file.
pub(super) fn sum(file: &File, bytes: u64) -> std::io::Result<u32> {
    let mut sum = crc32fast::Hasher::new();
    let mut block = vec![0; BLOCK_BYTES.min(bytes as usize)];
    let mut at = 0;
    while at < bytes {
        let length = (bytes - at).min(block.len() as u64) as usize;
        file.read_exact_at(&mut block[..length], at)?;
        sum.update(&block[..length]);
        at += length as u64;
    }
    Ok(sum.finalize())
}
