//! The manifest of a checkpoint. It is read from a disk, so every number is validated before it is used.

use std::collections::HashSet;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_json::value::RawValue;

use super::CHUNK_BYTES;
use super::slices::Slice;
use crate::error::{Error, Result};

/// An element type, as safetensors names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredDType {
    name: &'static str,
    bytes: u64,
}

impl StoredDType {
    const ALL: [StoredDType; 16] = [
        StoredDType { name: "BOOL", bytes: 1 },
        StoredDType { name: "U8", bytes: 1 },
        StoredDType { name: "I8", bytes: 1 },
        StoredDType { name: "F8_E5M2", bytes: 1 },
        StoredDType { name: "F8_E4M3", bytes: 1 },
        StoredDType { name: "I16", bytes: 2 },
        StoredDType { name: "U16", bytes: 2 },
        StoredDType { name: "F16", bytes: 2 },
        StoredDType { name: "BF16", bytes: 2 },
        StoredDType { name: "I32", bytes: 4 },
        StoredDType { name: "U32", bytes: 4 },
        StoredDType { name: "F32", bytes: 4 },
        StoredDType { name: "F64", bytes: 8 },
        StoredDType { name: "I64", bytes: 8 },
        StoredDType { name: "U64", bytes: 8 },
        StoredDType { name: "C64", bytes: 8 },
    ];

    /// The type with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.name == name)
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// Name in safetensors.
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl Serialize for StoredDType {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for StoredDType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::named(&name).ok_or_else(|| de::Error::custom(format!("`{name}` is not an element type")))
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The kinds of checkpoints. A save replaces and removes checkpoints of its own kind only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointKind {
    /// A folder of safetensors shards.
    #[default]
    Sharded,
    /// A folder with the files of `torch.save` of each rank.
    Partial,
    /// One `torch.save` file with the whole model, and one with the user content. Marks in the files replace the
    /// manifest.
    Full,
    /// Files of TensorFlow's checkpoint format, which TensorFlow names and replaces. They are written into the
    /// attempt's folder.
    Tensorflow,
}

impl CheckpointKind {
    /// The kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Sharded, Self::Partial, Self::Full, Self::Tensorflow].into_iter().find(|kind| kind.name() == name)
    }

    /// Name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sharded => "sharded",
            Self::Partial => "partial",
            Self::Full => "full",
            Self::Tensorflow => "tensorflow",
        }
    }
}

impl fmt::Display for CheckpointKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// File name, relative to the checkpoint's folder.
    pub name: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Bytes of the header before the tensors; for a `torch.save` file, the size of the whole file.
    pub header_bytes: u64,
    /// Checksum of those bytes.
    pub header_crc: u32,
}

/// A slice of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Index of the file.
    pub file: usize,
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// The slice of the tensor that it holds.
    #[serde(flatten)]
    pub slice: Slice,
    /// Checksums of its chunks.
    pub crc: Vec<u32>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name, unique in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: StoredDType,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// Slices that together make up the tensor.
    pub pieces: Vec<Piece>,
}

impl TensorEntry {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    /// Bytes of one slice.
    pub fn piece_bytes(&self, piece: &Piece) -> u64 {
        piece.slice.shape.iter().product::<u64>() * self.dtype.bytes()
    }
}

/// The manifest of a checkpoint: its kind, its files, and the slices of tensors in them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the format: [`Manifest::FORMAT`].
    pub format: String,
    /// Kind of the checkpoint.
    #[serde(default)]
    pub kind: CheckpointKind,
    /// Number of the training step.
    pub step: u64,
    /// Id of the attempt that wrote it.
    pub attempt: u64,
    /// Number of ranks that wrote it.
    pub world: usize,
    /// Description of the ranks' layout, as JSON that the core does not interpret.
    pub layout: serde_json::Value,
    /// User content that the script saved beside the tensors; the core does not interpret it.
    pub content: serde_json::Value,
    /// All files.
    pub files: Vec<FileEntry>,
    /// All tensors, by name.
    pub tensors: Vec<TensorEntry>,
}

#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    crc: u32,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

impl Manifest {
    /// The version of the format that this code writes.
    pub const FORMAT: &'static str = "smd-checkpoint 1";

    /// Serializes the manifest, with its checksum.
    pub fn to_text(&self) -> String {
        let manifest = serde_json::value::to_raw_value(self).expect("names and numbers are JSON");
        let envelope = Envelope { crc: crc32fast::hash(manifest.get().as_bytes()), manifest: &manifest };
        serde_json::to_string(&envelope).expect("names and numbers are JSON")
    }

    /// Parses a manifest.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the checksum does not match, or a value is out of range.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let no_manifest =
            |error: serde_json::Error| Error::InvalidArgument(format!("not the manifest of a checkpoint: {error}"));
        let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(no_manifest)?;
        let found = crc32fast::hash(envelope.manifest.get().as_bytes());
        if found != envelope.crc {
            return Err(Error::InvalidArgument(format!(
                "the manifest has the checksum {found:08x}, expected {:08x}",
                envelope.crc
            )));
        }
        let manifest: Self = serde_json::from_str(envelope.manifest.get()).map_err(no_manifest)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// Returns the tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        let at = self.tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[at])
    }

    /// Checks that all numbers are consistent.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first inconsistency.
    pub fn check(&self) -> Result<()> {
        let bad = |text: String| Err(Error::InvalidArgument(text));
        if self.format != Self::FORMAT {
            return bad(format!("the checkpoint's format is `{}`, expected `{}`", self.format, Self::FORMAT));
        }
        let mut names = HashSet::new();
        for file in &self.files {
            let plain = !file.name.is_empty() && !file.name.starts_with('.') && !file.name.contains(['/', '\\', '\0']);
            if !plain || !names.insert(&file.name) {
                return bad(format!(
                    "`{}` is not a valid name for a file of a checkpoint, or is listed twice",
                    file.name
                ));
            }
            if file.header_bytes > file.bytes {
                return bad(format!(
                    "`{}` has {} bytes, {} of them a header",
                    file.name, file.bytes, file.header_bytes
                ));
            }
        }
        if !self.tensors.is_sorted_by(|a, b| a.name < b.name) {
            return bad("tensors are not sorted by name, or one is listed twice".into());
        }
        self.tensors.iter().try_for_each(|tensor| self.check_tensor(tensor))
    }

    fn check_tensor(&self, tensor: &TensorEntry) -> Result<()> {
        let name = &tensor.name;
        let bad = |text: String| Err(Error::InvalidArgument(format!("tensor `{name}`: {text}")));
        let elems = |slice: &Slice| slice.elems().filter(|elems| elems.checked_mul(tensor.dtype.bytes()).is_some());
        let Some(whole) = elems(&Slice::whole(&tensor.shape)) else {
            return bad(format!("shape {:?} is too large for any memory", tensor.shape));
        };
        let mut covered = 0_u64;
        for piece in &tensor.pieces {
            if !piece.slice.lies_in(&tensor.shape) {
                return bad(format!("slice {:?} is not inside of shape {:?}", piece.slice, tensor.shape));
            }
            // The slice lies inside the tensor, whose size does not overflow.
            let elems = elems(&piece.slice).expect("a part is no larger than the whole");
            let bytes = elems * tensor.dtype.bytes();
            covered = covered.saturating_add(elems);
            let Some(file) = self.files.get(piece.file) else { return bad(format!("there is no file {}", piece.file)) };
            if piece.offset < file.header_bytes || piece.offset.checked_add(bytes).is_none_or(|end| end > file.bytes) {
                return bad(format!("{bytes} bytes at {} are not inside `{}`", piece.offset, file.name));
            }
            if piece.crc.len() as u64 != bytes.div_ceil(CHUNK_BYTES) {
                return bad(format!("{} checksums for {bytes} bytes", piece.crc.len()));
            }
        }
        if covered != whole {
            return bad(format!("its pieces have {covered} elements, expected {whole}"));
        }
        // The slices have as many elements as the tensor and none twice, so they cover it.
        let mut pieces: Vec<&Slice> =
            tensor.pieces.iter().map(|piece| &piece.slice).filter(|s| s.elems() != Some(0)).collect();
        pieces.sort_unstable_by(|a, b| a.start.cmp(&b.start));
        for (at, piece) in pieces.iter().enumerate() {
            let end = piece.start.first().zip(piece.shape.first()).map(|(start, length)| start + length);
            let near = pieces[at + 1..].iter().take_while(|other| other.start.first().copied() < end || end.is_none());
            if let Some(other) = near.into_iter().find(|other| piece.intersection(other).is_some()) {
                return bad(format!("two pieces have the same elements: {piece:?} and {other:?}"));
            }
        }
        Ok(())
    }
}
