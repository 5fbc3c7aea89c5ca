//! Writes the tensors of one rank into safetensors files.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::manifest::{FileEntry, Piece, StoredDType, TensorEntry};
use super::slices::Slice;
use super::{CHUNK_BYTES, failed};
use crate::error::{Error, Result};

/// Bytes that are added to the checksum and then written, so that they are still in the processor's cache when they
/// are written.
const BLOCK_BYTES: u64 = 256 << 10;
/// Alignment of tensors in a file: a page, so that the file can be mapped.
const ALIGN: usize = 4096;

/// A slice of a tensor in memory, dense, in row-major order.
#[derive(Clone, Debug)]
pub struct SourceSlice {
    /// The tensor's name.
    pub name: String,
    /// Element type.
    pub dtype: StoredDType,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// The slice that is in this memory.
    pub slice: Slice,
    /// Address.
    pub address: *const u8,
    /// Whether the job's owner keeps the memory unchanged until the checkpoint is complete, so that it need not be
    /// copied.
    pub held: bool,
}

// SAFETY: a source is a description; the creator of a job promises that the memory is readable until the job is done.
unsafe impl Send for SourceSlice {}
// SAFETY: as above; the memory is only read.
unsafe impl Sync for SourceSlice {}

impl SourceSlice {
    /// Bytes of the slice.
    pub fn bytes(&self) -> u64 {
        self.slice.shape.iter().product::<u64>() * self.dtype.bytes()
    }

    fn check(&self) -> Result<()> {
        let size = Slice::whole(&self.shape).elems().and_then(|elems| elems.checked_mul(self.dtype.bytes()));
        if size.is_none() || !self.slice.lies_in(&self.shape) {
            return Err(Error::InvalidArgument(format!(
                "tensor `{}`: {:?} is not a slice of {:?}",
                self.name, self.slice, self.shape
            )));
        }
        Ok(())
    }

    fn at(&self, offset: u64, bytes: u64) -> &[u8] {
        debug_assert!(offset + bytes <= self.bytes());
        // SAFETY: the range lies inside the memory, which is readable while the job is (see `Send` above).
        unsafe { std::slice::from_raw_parts(self.address.add(offset as usize), bytes as usize) }
    }
}

/// The data that one rank saves.
#[derive(Default)]
pub struct RankSave {
    /// Tensors.
    pub sources: Vec<SourceSlice>,
    /// Keeps the memory of held sources alive; dropped when the save has completed or failed.
    pub owner: Option<Box<dyn Send>>,
}

/// The entries of the manifest for a rank's files, which are numbered from 0.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct WrittenFiles {
    pub(super) files: Vec<FileEntry>,
    pub(super) tensors: Vec<TensorEntry>,
}

/// Writes `sources` into `count` files in `folder`, one thread for each file.
pub(super) fn write(
    folder: &Path,
    rank: usize,
    sources: &[SourceSlice],
    count: usize,
    durable: bool,
) -> Result<WrittenFiles> {
    sources.iter().try_for_each(SourceSlice::check)?;
    let mut names = HashSet::new();
    if let Some(source) = sources.iter().find(|source| !names.insert(&source.name)) {
        return Err(Error::InvalidArgument(format!("tensor `{}` is saved twice by one rank", source.name)));
    }
    // The largest first, each to the file with the fewest bytes. Inside a file, ordering by element size keeps all
    // tensors aligned.
    let mut order: Vec<usize> = (0..sources.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(sources[at].bytes()));
    let count = count.clamp(1, sources.len().max(1));
    let mut shares: Vec<(u64, Vec<&SourceSlice>)> = vec![(0, Vec::new()); count];
    for at in order {
        let share = shares.iter_mut().min_by_key(|(bytes, _)| *bytes).expect("there is a file");
        share.0 += sources[at].bytes();
        share.1.push(&sources[at]);
    }
    for (_, share) in &mut shares {
        share.sort_by(|a, b| b.dtype.bytes().cmp(&a.dtype.bytes()).then_with(|| a.name.cmp(&b.name)));
    }
    let written: Vec<Result<WrittenFiles>> = std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .iter()
            .enumerate()
            .map(|(index, (_, share))| {
                let name = format!("rank-{rank:05}-{index}.safetensors");
                scope.spawn(move || write_file(folder, name, share, durable))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| Err(Error::from_panic(&*panic))))
            .collect()
    });
    let mut all = WrittenFiles::default();
    for (index, note) in written.into_iter().enumerate() {
        let mut note = note?;
        note.tensors.iter_mut().flat_map(|tensor| &mut tensor.pieces).for_each(|piece| piece.file = index);
        all.files.append(&mut note.files);
        all.tensors.append(&mut note.tensors);
    }
    Ok(all)
}

fn write_file(folder: &Path, name: String, sources: &[&SourceSlice], durable: bool) -> Result<WrittenFiles> {
    let path = folder.join(&name);
    let header = header(sources);
    let file = File::create(&path).map_err(failed("creating", &path))?;
    file.write_all_at(&header, 0).map_err(failed("writing", &path))?;
    let mut end = header.len() as u64;
    let mut tensors = Vec::with_capacity(sources.len());
    for source in sources {
        let crc = write_tensor(&file, end, source).map_err(failed("writing", &path))?;
        let piece = Piece { file: 0, offset: end, slice: source.slice.clone(), crc };
        end += source.bytes();
        tensors.push(TensorEntry {
            name: source.name.clone(),
            dtype: source.dtype,
            shape: source.shape.clone(),
            pieces: vec![piece],
        });
    }
    if durable {
        file.sync_all().map_err(failed("syncing", &path))?;
    }
    let entry = FileEntry { name, bytes: end, header_bytes: header.len() as u64, header_crc: crc32fast::hash(&header) };
    Ok(WrittenFiles { files: vec![entry], tensors })
}

/// Writes a source and returns the checksums of its chunks (CKPT-3).
fn write_tensor(file: &File, offset: u64, source: &SourceSlice) -> std::io::Result<Vec<u32>> {
    let bytes = source.bytes();
    let mut sums = Vec::with_capacity(bytes.div_ceil(CHUNK_BYTES) as usize);
    let mut done = 0;
    while done < bytes {
        let chunk_end = bytes.min(done + CHUNK_BYTES);
        let mut sum = crc32fast::Hasher::new();
        while done < chunk_end {
            let block = source.at(done, BLOCK_BYTES.min(chunk_end - done));
            sum.update(block);
            file.write_all_at(block, offset + done)?;
            done += block.len() as u64;
        }
        sums.push(sum.finalize());
    }
    Ok(sums)
}

/// A safetensors header for tensors that follow one another in the file.
fn header(sources: &[&SourceSlice]) -> Vec<u8> {
    let mut table = serde_json::Map::new();
    let mut at = 0;
    for source in sources {
        let end = at + source.bytes();
        let entry = serde_json::json!({
            "dtype": source.dtype.name(), "shape": source.slice.shape, "data_offsets": [at, end],
        });
        table.insert(source.name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::to_vec(&table).expect("names and numbers are JSON");
    text.resize((8 + text.len()).next_multiple_of(ALIGN) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&text);
    header
}

/// Writes whole tensors to one file, in parts as they arrive; used by [`super::merge`].
pub(super) struct FileWriter {
    file: File,
    header_bytes: u64,
}

impl FileWriter {
    /// Creates a file for these tensors; their addresses are not used.
    pub(super) fn create(path: &Path, sources: &[SourceSlice]) -> Result<(Self, Vec<u64>)> {
        let header = header(&sources.iter().collect::<Vec<_>>());
        let file = File::create(path).map_err(failed("creating", path))?;
        file.write_all_at(&header, 0).map_err(failed("writing", path))?;
        let mut offsets = Vec::with_capacity(sources.len());
        let mut at = header.len() as u64;
        for source in sources {
            offsets.push(at);
            at += source.bytes();
        }
        Ok((Self { file, header_bytes: header.len() as u64 }, offsets))
    }

    /// Writes bytes at an offset of the file.
    pub(super) fn put(&self, path: &Path, bytes: &[u8], offset: u64) -> Result<()> {
        debug_assert!(offset >= self.header_bytes);
        self.file.write_all_at(bytes, offset).map_err(failed("writing", path))
    }

    /// Syncs the file to the disk.
    pub(super) fn sync(&self, path: &Path) -> Result<()> {
        self.file.sync_all().map_err(failed("syncing", path))
    }
}
