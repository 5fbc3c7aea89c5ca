//! Checkpoints. Tensors are passed as addresses, because only the Python package knows the framework's tensor types.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use smd_core::checkpoint::{
    self, Checkpoint, CheckpointKind, HeldTensor, RankSave, SaveAttempt, SaveOptions, SaveSpec, Saver, Slice,
    SourceSlice, StoredDType, Target,
};
use smd_core::world::monitor;
use smd_core::{Error, Result, session};

use crate::enter::enter;

/// A slice of a tensor in memory: name, element type, shape of the tensor, start and shape of the slice, address, and
/// whether the owner holds it.
type SourceRow = (String, String, Vec<u64>, Vec<u64>, Vec<u64>, usize, bool);

/// Memory for a slice of a tensor: name, start and shape of the slice, address, bytes.
type TargetRow = (String, Vec<u64>, Vec<u64>, usize, u64);

/// The part of a tensor that a replica writes: the tensor's index and, unless it writes all rows, the first row and the
/// number of rows.
type ShareRow = (usize, Option<(u64, u64)>);

/// One rank's part in saving checkpoints; at most one save is in progress.
#[pyclass(module = "smdistributed._core", frozen)]
struct CheckpointSaver {
    saver: Saver,
}

#[pymethods]
impl CheckpointSaver {
    #[new]
    #[pyo3(signature = (directory, rank, world, threads, durable, keep, timeout_seconds, exchange = true))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        directory: PathBuf,
        rank: usize,
        world: usize,
        threads: usize,
        durable: bool,
        keep: Option<usize>,
        timeout_seconds: f64,
        exchange: bool,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds)
            .map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("the timeout: {error}")))?;
        let watch = departures;
        Ok(Self {
            saver: Saver::new(SaveOptions { directory, rank, world, threads, durable, keep, timeout, exchange, watch }),
        })
    }

    /// Opens a save, so that a rank that cannot save the checkpoint fails here. Rank 0 comes first.
    fn open(&self, py: Python<'_>, tag: &str, attempt: u64) -> PyResult<()> {
        enter(py, || self.saver.open(tag, attempt, &mut check_departures))
    }

    /// Saves; `layout` and `content` are JSON. The memory at the slices' addresses must not change until the call
    /// returns; for slices that `owner` holds, as long as `owner` lives.
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    #[pyo3(signature = (tag, step, attempt, layout, content, slices, asynchronous, owner = None))]
    fn save(
        &self,
        py: Python<'_>,
        tag: &str,
        step: u64,
        attempt: u64,
        layout: &str,
        content: &str,
        slices: Vec<SourceRow>,
        asynchronous: bool,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        enter(py, || {
            let (layout, content) = (json("layout", layout)?, json("content", content)?);
            let sources = slices.into_iter().map(source).collect::<Result<_>>()?;
            let owner = owner.map(|owner| Box::new(owner) as Box<dyn Send>);
            let job = RankSave { sources, owner };
            // SAFETY: the Python package keeps the tensors, and changes them only after this returns.
            unsafe { self.saver.save(tag, step, attempt, layout, content, job, asynchronous, &mut check_departures) }
        })
    }

    /// Waits for the save in progress.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || self.saver.wait(&mut check_departures))
    }

    /// Whether a save is in progress.
    fn is_busy(&self) -> bool {
        self.saver.is_busy()
    }

    /// Removes the files of the attempt that was opened last, if all ranks know that it has failed.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || self.saver.discard())
    }
}

/// One rank's part in an attempt to save a checkpoint whose files the caller writes.
#[pyclass(module = "smdistributed._core", frozen)]
struct CheckpointAttempt {
    attempt: Mutex<Option<SaveAttempt>>,
    folder: PathBuf,
}

impl CheckpointAttempt {
    fn lock(&self) -> MutexGuard<'_, Option<SaveAttempt>> {
        self.attempt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, py: Python<'_>, work: impl FnOnce(&SaveAttempt) -> Result<T> + Send) -> PyResult<T>
    where
        T: Send,
    {
        enter(py, || match &*self.lock() {
            Some(attempt) => work(attempt),
            None => Err(Error::InvalidArgument("the attempt to save a checkpoint has ended".into())),
        })
    }
}

#[pymethods]
impl CheckpointAttempt {
    /// Opens the attempt: rank 0 checks that the checkpoint may be replaced, and creates the attempt's folder; the
    /// others wait for that, and join.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        directory: PathBuf,
        tag: String,
        kind: &str,
        number: u64,
        rank: usize,
        world: usize,
        durable: bool,
        timeout_seconds: f64,
    ) -> PyResult<Self> {
        enter(py, || {
            let timeout = Duration::try_from_secs_f64(timeout_seconds)
                .map_err(|error| Error::InvalidArgument(format!("the timeout: {error}")))?;
            let kind = kind_named(kind)?;
            let setting = SaveSpec { directory, tag, kind, number, rank, world, durable, exchange: true };
            let attempt = SaveAttempt::open(setting, timeout, &mut check_departures)?;
            Ok(Self { folder: attempt.data(), attempt: Mutex::new(Some(attempt)) })
        })
    }

    /// The folder into which files are written.
    #[getter]
    fn folder(&self) -> OsString {
        self.folder.clone().into_os_string()
    }

    /// Reports to rank 0 which files this rank has written.
    fn report(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        self.with(py, |attempt| attempt.report_files(&names))
    }

    /// On rank 0, when all have reported: renames the attempt to the checkpoint, and removes all but `keep` of its
    /// kind.
    #[pyo3(signature = (keep = None))]
    fn commit(&self, py: Python<'_>, keep: Option<usize>) -> PyResult<()> {
        self.with(py, |attempt| attempt.commit(None, keep))
    }

    /// Closes a complete attempt.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            if let Some(attempt) = self.lock().take() {
                attempt.leave();
            }
            Ok(())
        })
    }

    /// Closes an attempt that all ranks know to have failed: rank 0 removes its files.
    fn discard(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || self.lock().take().map_or(Ok(()), SaveAttempt::discard))
    }
}

/// A complete checkpoint.
#[pyclass(module = "smdistributed._core", frozen)]
struct CheckpointReader {
    checkpoint: Checkpoint,
}

#[pymethods]
impl CheckpointReader {
    /// Opens the checkpoint `tag`, or the newest sharded one.
    #[new]
    #[pyo3(signature = (directory, tag=None))]
    fn new(py: Python<'_>, directory: PathBuf, tag: Option<String>) -> PyResult<Self> {
        enter(py, || Ok(Self { checkpoint: Checkpoint::open(&directory, tag.as_deref())? }))
    }

    /// Name.
    #[getter]
    fn tag(&self) -> &str {
        self.checkpoint.tag()
    }

    /// Kind: `sharded` or `partial`.
    #[getter]
    fn kind(&self) -> &str {
        self.checkpoint.kind().name()
    }

    /// Folder.
    #[getter]
    fn folder(&self) -> OsString {
        self.checkpoint.folder().as_os_str().to_owned()
    }

    /// Verifies the checksums of files without tensors.
    fn check_files(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        enter(py, || self.checkpoint.check_files(&names))
    }

    /// Number of its training step.
    #[getter]
    fn step(&self) -> u64 {
        self.checkpoint.manifest().step
    }

    /// Layout of the ranks, as JSON.
    #[getter]
    fn layout(&self) -> String {
        self.checkpoint.manifest().layout.to_string()
    }

    /// User content that was saved beside the tensors, as JSON.
    #[getter]
    fn content(&self) -> String {
        self.checkpoint.manifest().content.to_string()
    }

    /// Name, element type and shape of every tensor.
    fn tensors(&self) -> Vec<(String, String, Vec<u64>)> {
        let tensors = &self.checkpoint.manifest().tensors;
        tensors.iter().map(|t| (t.name.clone(), t.dtype.name().to_owned(), t.shape.clone())).collect()
    }

    /// Fills slices: name, start, shape, address and bytes of each.
    fn read(&self, py: Python<'_>, targets: Vec<TargetRow>, threads: usize) -> PyResult<()> {
        enter(py, || {
            let targets: Vec<Target> = targets
                .into_iter()
                .map(|(name, start, shape, address, bytes)| Target {
                    name,
                    slice: Slice { start, shape },
                    address: address as *mut u8,
                    bytes,
                })
                .collect();
            // SAFETY: the Python package keeps the tensors, which do not overlap, and uses them after this has
            // returned.
            unsafe { self.checkpoint.read(&targets, threads) }
        })
    }

    /// Reads all files and verifies all checksums.
    fn verify(&self, py: Python<'_>, threads: usize) -> PyResult<()> {
        enter(py, || self.checkpoint.verify(threads))
    }
}

/// Creates a directory of checkpoints, if necessary, and removes the remains of interrupted attempts in it.
#[pyfunction]
fn checkpoint_prepare(py: Python<'_>, directory: PathBuf, durable: bool) -> PyResult<()> {
    enter(py, || checkpoint::prepare(&directory, durable))
}

/// Removes the remains of interrupted attempts, except of attempts that a running process holds.
#[pyfunction]
fn checkpoint_clean(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    enter(py, || checkpoint::clean(&directory))
}

/// Complete checkpoints of a kind with their steps, in ascending order of steps.
#[pyfunction]
#[pyo3(signature = (directory, kind = "sharded"))]
fn checkpoint_list(py: Python<'_>, directory: PathBuf, kind: &str) -> PyResult<Vec<(u64, String)>> {
    enter(py, || checkpoint::list(&directory, kind_named(kind)?))
}

/// The name of the newest complete sharded checkpoint, if there is one.
#[pyfunction]
fn checkpoint_newest(py: Python<'_>, directory: PathBuf) -> PyResult<Option<String>> {
    enter(py, || checkpoint::newest(&directory))
}

/// The folder of a sharded or partial checkpoint, whether or not it exists.
#[pyfunction]
fn checkpoint_folder(py: Python<'_>, directory: PathBuf, tag: &str) -> PyResult<OsString> {
    enter(py, || {
        checkpoint::check_tag(tag)?;
        Ok(checkpoint::locate(&directory, tag).into_os_string())
    })
}

/// The file with the user content of a full checkpoint, if it has any.
#[pyfunction]
fn checkpoint_content(py: Python<'_>, directory: PathBuf, tag: &str) -> PyResult<Option<OsString>> {
    enter(py, || {
        checkpoint::check_tag(tag)?;
        Ok(checkpoint::content_of(&directory, tag).map(PathBuf::into_os_string))
    })
}

/// Verifies a file of a full checkpoint against the checksum of its mark, if it has one.
#[pyfunction]
fn checkpoint_verify_file(py: Python<'_>, path: PathBuf) -> PyResult<()> {
    enter(py, || checkpoint::verify_file(&path))
}

/// Returns which parts of the tensors that `replica` holds it writes: the tensor's index and, unless it writes all
/// rows, the first row and the number of rows. Each entry of `tensors` is the length along the first axis (`None` for a
/// scalar), the size in bytes, and whether all replicas hold the tensor.
#[pyfunction]
fn checkpoint_shares(tensors: Vec<(Option<u64>, u64, bool)>, replica: usize, replicas: usize) -> Vec<ShareRow> {
    let tensors: Vec<HeldTensor> =
        tensors.into_iter().map(|(rows, bytes, is_shared)| HeldTensor { rows, bytes, is_shared }).collect();
    let shares = checkpoint::shares_of_replica(&tensors, replica, replicas);
    shares.into_iter().map(|share| (share.tensor, share.rows)).collect()
}

/// Raises if this cannot be a checkpoint's name.
#[pyfunction]
fn checkpoint_check_tag(py: Python<'_>, tag: &str) -> PyResult<()> {
    enter(py, || checkpoint::check_tag(tag))
}

fn kind_named(name: &str) -> Result<CheckpointKind> {
    CheckpointKind::named(name).ok_or_else(|| Error::InvalidArgument(format!("`{name}` is not a kind of checkpoint")))
}

fn json(what: &str, text: &str) -> Result<serde_json::Value> {
    serde_json::from_str(text).map_err(|error| Error::InvalidArgument(format!("the {what} is not valid JSON: {error}")))
}

fn source((name, dtype, shape, start, lengths, address, held): SourceRow) -> Result<SourceSlice> {
    let Some(dtype) = StoredDType::named(&dtype) else {
        return Err(Error::InvalidArgument(format!(
            "tensor `{name}`: `{dtype}` is not an element type of a checkpoint"
        )));
    };
    Ok(SourceSlice { name, dtype, shape, slice: Slice { start, shape: lengths }, address: address as *const u8, held })
}

/// Checks during a wait for other ranks whether one of them has departed, or a signal has arrived.
fn check_departures() -> Result<()> {
    if monitor::interrupt_pending() {
        return Err(Error::Interrupted { during: DURING.to_owned() });
    }
    departures()
}

/// Name of the operation that waits, for errors.
const DURING: &str = "saving a checkpoint";

/// Checks during a wait for other ranks whether one of them has departed.
fn departures() -> Result<()> {
    match session::current("save") {
        Ok(session) => session.monitor().check(&(0..session.size()).collect::<Vec<_>>(), DURING),
        // Without a job, there are no other ranks.
        Err(_) => Ok(()),
    }
}

/// Adds this file's names.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CheckpointSaver>()?;
    module.add_class::<CheckpointReader>()?;
    module.add_class::<CheckpointAttempt>()?;
    module.add_function(wrap_pyfunction!(checkpoint_clean, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_prepare, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_list, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_newest, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_folder, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_content, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_verify_file, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_shares, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_check_tag, module)?)
}
