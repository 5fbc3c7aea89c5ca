//! Reads slices of tensors, independent of which ranks wrote them in which slices (CKPT-4).

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::manifest::{CheckpointKind, Manifest, Piece, TensorEntry};
use super::mark::{Mark, sum};
use super::place::{check_tag, locate, required_newest};
use super::slices::{ContiguousBytes, Slice};
use super::{CHUNK_BYTES, MANIFEST, damaged, failed};
use crate::error::{Error, Result};

/// A complete checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    tag: String,
    manifest: Manifest,
}

/// Memory for a slice of a tensor, dense, in row-major order.
#[derive(Clone, Debug)]
pub struct Target {
    /// The tensor's name.
    pub name: String,
    /// The slice to read.
    pub slice: Slice,
    /// Address of the memory.
    pub address: *mut u8,
    /// Bytes of the memory.
    pub bytes: u64,
}

// SAFETY: a target is a description. The caller of `read` promises that the memory is valid and not used meanwhile.
unsafe impl Send for Target {}
// SAFETY: as above; parts that are written at the same time do not overlap.
unsafe impl Sync for Target {}

/// One chunk of a stored slice, and the parts of it that are needed.
struct Read<'a> {
    tensor: &'a TensorEntry,
    piece: &'a Piece,
    chunk: u64,
    /// Offsets in the stored slice; none if the chunk is only verified.
    runs: &'a [ContiguousBytes],
    address: usize,
}

impl Checkpoint {
    /// Opens the checkpoint `tag` in `directory`, or the newest sharded one.
    ///
    /// # Errors
    /// If it does not exist, or its manifest is damaged.
    pub fn open(directory: &Path, tag: Option<&str>) -> Result<Self> {
        let tag = match tag {
            Some(tag) => tag.to_owned(),
            None => required_newest(directory)?,
        };
        check_tag(&tag)?;
        Self::open_folder(&locate(directory, &tag), tag)
    }

    /// Opens the checkpoint in this folder.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_folder(folder: &Path, tag: String) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let bytes = fs::read(&path).map_err(failed("reading", &path))?;
        let manifest = Manifest::parse(&bytes).map_err(|error| damaged(&path, error.text()))?;
        Ok(Self { folder: folder.to_owned(), tag, manifest })
    }

    /// Name.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Fills all targets with `threads` threads. Reads only chunks that a target needs.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such tensor or slice; [`Error::Io`] if a file is damaged or cannot be
    /// read. Targets then have unspecified contents.
    ///
    /// # Safety
    /// Each target's memory is writable, and no other code uses it meanwhile; no two targets overlap.
    pub unsafe fn read(&self, targets: &[Target], threads: usize) -> Result<()> {
        let mut wanted = Vec::new();
        for target in targets {
            let Some(tensor) = self.manifest.tensor(&target.name) else {
                return Err(Error::InvalidArgument(format!(
                    "checkpoint `{}` has no tensor `{}`",
                    self.tag, target.name
                )));
            };
            let bytes = target.slice.elems().and_then(|elems| elems.checked_mul(tensor.dtype.bytes()));
            if !target.slice.lies_in(&tensor.shape) || bytes != Some(target.bytes) {
                return Err(Error::InvalidArgument(format!(
                    "tensor `{}` is {} {:?} in checkpoint `{}`; {:?} in {} bytes is not a slice of it",
                    target.name, tensor.dtype, tensor.shape, self.tag, target.slice, target.bytes
                )));
            }
            for piece in &tensor.pieces {
                let runs = piece.slice.runs(&target.slice, tensor.dtype.bytes());
                if !runs.is_empty() && runs[0].bytes > 0 {
                    wanted.push((tensor, piece, runs, target.address as usize));
                }
            }
        }
        let mut reads = Vec::new();
        for (tensor, piece, runs, address) in &wanted {
            let (mut first, mut chunk) = (0, runs[0].from / CHUNK_BYTES);
            loop {
                let (begin, end) = (chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES);
                first += runs[first..].iter().take_while(|run| run.from + run.bytes <= begin).count();
                let Some(run) = runs.get(first) else { break };
                if run.from >= end {
                    chunk = run.from / CHUNK_BYTES;
                    continue;
                }
                let after = first + runs[first..].partition_point(|run| run.from < end);
                reads.push(Read { tensor, piece, chunk, runs: &runs[first..after], address: *address });
                chunk += 1;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.perform(&reads, threads) }
    }

    /// Verifies the checksums of files without tensors, such as those of a partial checkpoint.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such file, and [`Error::Io`] if it is damaged.
    pub fn check_files(&self, names: &[String]) -> Result<()> {
        for name in names {
            let Some(index) = self.manifest.files.iter().position(|file| file.name == *name) else {
                let text = format!("checkpoint `{}` has no file `{name}`", self.tag);
                return Err(Error::InvalidArgument(text));
            };
            self.check_header(index)?;
        }
        Ok(())
    }

    /// Kind.
    pub fn kind(&self) -> CheckpointKind {
        self.manifest.kind
    }

    /// Folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads all files and verifies all checksums.
    ///
    /// # Errors
    /// [`Error::Io`] naming the first damaged file and tensor.
    pub fn verify(&self, threads: usize) -> Result<()> {
        for index in 0..self.manifest.files.len() {
            self.check_header(index)?;
        }
        let mut reads = Vec::new();
        for tensor in &self.manifest.tensors {
            for piece in &tensor.pieces {
                reads.extend((0..piece.crc.len() as u64).map(|chunk| Read {
                    tensor,
                    piece,
                    chunk,
                    runs: &[],
                    address: 0,
                }));
            }
        }
        // SAFETY: reads without parts to copy write to no target.
        unsafe { self.perform(&reads, threads) }
    }

    fn path(&self, file: usize) -> PathBuf {
        self.folder.join(&self.manifest.files[file].name)
    }

    fn open_file(&self, index: usize) -> Result<File> {
        let (path, entry) = (self.path(index), &self.manifest.files[index]);
        let file = File::open(&path).map_err(failed("opening", &path))?;
        let bytes = file.metadata().map_err(failed("reading", &path))?.len();
        if bytes != entry.bytes {
            return Err(damaged(&path, format!("it has {bytes} bytes, expected {}", entry.bytes)));
        }
        Ok(file)
    }

    fn check_header(&self, index: usize) -> Result<()> {
        let (file, entry) = (self.open_file(index)?, &self.manifest.files[index]);
        let path = self.path(index);
        let found = sum(&file, entry.header_bytes).map_err(failed("reading", &path))?;
        if found != entry.header_crc {
            let what = if entry.header_bytes == entry.bytes { "it" } else { "its header" };
            return Err(damaged(&path, format!("{what} was altered")));
        }
        Ok(())
    }

    /// # Safety
    /// Where reads have parts to copy, the caller's promise of [`Checkpoint::read`].
    unsafe fn perform(&self, reads: &[Read<'_>], threads: usize) -> Result<()> {
        let files: Vec<Mutex<Option<std::sync::Arc<File>>>> =
            self.manifest.files.iter().map(|_| Mutex::default()).collect();
        let file = |index: usize| -> Result<std::sync::Arc<File>> {
            let mut known = files[index].lock();
            if known.is_none() {
                *known = Some(std::sync::Arc::new(self.open_file(index)?));
            }
            Ok(std::sync::Arc::clone(known.as_ref().expect("it was opened")))
        };
        let next = AtomicUsize::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        let work = || {
            let mut scratch = Vec::new();
            while let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
                // SAFETY: the caller's promise; different reads write different bytes.
                let result =
                    file(read.piece.file).and_then(|file| unsafe { self.perform_one(read, &file, &mut scratch) });
                if let Err(error) = result {
                    failure.lock().get_or_insert(error);
                    next.store(reads.len(), Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            (1..threads.min(reads.len())).for_each(|_| drop(scope.spawn(work)));
            work();
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    /// # Safety
    /// As [`Checkpoint::perform`].
    unsafe fn perform_one(&self, read: &Read<'_>, file: &File, scratch: &mut Vec<u8>) -> Result<()> {
        let begin = read.chunk * CHUNK_BYTES;
        let end = read.tensor.piece_bytes(read.piece).min(begin + CHUNK_BYTES);
        let bytes = (end - begin) as usize;
        let whole = read.runs.first().filter(|run| run.from <= begin && run.from + run.bytes >= end);
        let path = || self.path(read.piece.file);
        let buffer: &mut [u8] = match whole {
            Some(run) => {
                let to = read.address + (run.to + (begin - run.from)) as usize;
                // SAFETY: the run's place lies inside the target's memory, as `runs` computes it from the target's
                // slice.
                unsafe { std::slice::from_raw_parts_mut(to as *mut u8, bytes) }
            }
            None => {
                scratch.resize(CHUNK_BYTES as usize, 0);
                &mut scratch[..bytes]
            }
        };
        file.read_exact_at(buffer, read.piece.offset + begin).map_err(|error| failed("reading", &path())(error))?;
        let (found, written) = (crc32fast::hash(buffer), read.piece.crc[read.chunk as usize]);
        if found != written {
            return Err(damaged(
                &path(),
                format!(
                    "bytes {} to {} of it, in tensor `{}`, have the checksum {found:08x}, expected {written:08x}",
                    read.piece.offset + begin,
                    read.piece.offset + end,
                    read.tensor.name
                ),
            ));
        }
        if whole.is_none() {
            for run in read.runs {
                let (from, to) = (run.from.max(begin), (run.from + run.bytes).min(end));
                if from < to {
                    let source = &buffer[(from - begin) as usize..(to - begin) as usize];
                    let place = (read.address + (run.to + (from - run.from)) as usize) as *mut u8;
                    // SAFETY: as above, for a part of the run.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), place, source.len()) };
                }
            }
        }
        Ok(())
    }
}

/// Verifies a file of a full checkpoint against the checksum of its mark. A file without a mark, which another
/// program wrote, is not checked.
///
/// # Errors
/// [`Error::Io`] if it is damaged or cannot be read.
pub fn verify_file(path: &Path) -> Result<()> {
    Mark::verify(path)
}
