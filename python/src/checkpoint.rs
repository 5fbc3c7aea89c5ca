//! Checkpoints: tensors come as addresses, since only the facade knows the framework that they are of.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use smd_core::checkpoint::{self, Checkpoint, Element, Job, Options, Saver, Slice, Source, Target};
use smd_core::world::monitor;
use smd_core::{Error, Result, session};

use crate::enter::enter;

/// A slice of a tensor in memory: name, element type, shape of the whole, start and shape of the slice, address.
type Place = (String, String, Vec<u64>, Vec<u64>, Vec<u64>, usize);

/// Memory for a slice of a tensor: name, start and shape of the slice, address, bytes.
type Room = (String, Vec<u64>, Vec<u64>, usize, u64);

/// One rank's part in saving checkpoints; one save is under way at a time.
#[pyclass(module = "smdistributed._core", frozen)]
struct CheckpointSaver {
    saver: Saver,
}

#[pymethods]
impl CheckpointSaver {
    #[new]
    #[pyo3(signature = (directory, rank, world, threads, durable, keep, timeout_seconds))]
    fn new(
        directory: PathBuf,
        rank: usize,
        world: usize,
        threads: usize,
        durable: bool,
        keep: Option<usize>,
        timeout_seconds: f64,
    ) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds)
            .map_err(|error| pyo3::exceptions::PyValueError::new_err(format!("the timeout: {error}")))?;
        Ok(Self { saver: Saver::new(Options { directory, rank, world, threads, durable, keep, timeout }) })
    }

    /// Saves; `layout` and `content` are JSON. The memory at the places' addresses stays as it is until the call returns.
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn save(
        &self,
        py: Python<'_>,
        tag: &str,
        step: u64,
        attempt: u64,
        layout: &str,
        content: &str,
        places: Vec<Place>,
        asynchronous: bool,
    ) -> PyResult<()> {
        enter(py, || {
            let (layout, content) = (json("layout", layout)?, json("content", content)?);
            let sources = places.into_iter().map(source).collect::<Result<_>>()?;
            let job = Job { sources };
            // SAFETY: the facade holds the tensors, and trains on only when this returns.
            unsafe { self.saver.save(tag, step, attempt, layout, content, job, asynchronous, &mut look) }
        })
    }

    /// Waits for the save under way.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || self.saver.wait(&mut look))
    }

    /// Whether a save is under way.
    fn is_busy(&self) -> bool {
        self.saver.is_busy()
    }
}

/// A complete checkpoint.
#[pyclass(module = "smdistributed._core", frozen)]
struct CheckpointReader {
    checkpoint: Checkpoint,
}

#[pymethods]
impl CheckpointReader {
    /// The checkpoint `tag`, or the newest.
    #[new]
    #[pyo3(signature = (directory, tag=None))]
    fn new(py: Python<'_>, directory: PathBuf, tag: Option<String>) -> PyResult<Self> {
        enter(py, || Ok(Self { checkpoint: Checkpoint::open(&directory, tag.as_deref())? }))
    }

    /// Its name.
    #[getter]
    fn tag(&self) -> &str {
        self.checkpoint.tag()
    }

    /// The number of its training step.
    #[getter]
    fn step(&self) -> u64 {
        self.checkpoint.manifest().step
    }

    /// How ranks were laid out, as JSON.
    #[getter]
    fn layout(&self) -> String {
        self.checkpoint.manifest().layout.to_string()
    }

    /// What was saved beside tensors, as JSON.
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
    fn read(&self, py: Python<'_>, targets: Vec<Room>, threads: usize) -> PyResult<()> {
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
            // SAFETY: the facade holds the tensors, which are apart, and uses them when this has returned.
            unsafe { self.checkpoint.read(&targets, threads) }
        })
    }

    /// Reads everything and compares all checksums.
    fn verify(&self, py: Python<'_>, threads: usize) -> PyResult<()> {
        enter(py, || self.checkpoint.verify(threads))
    }
}

/// Removes what broken attempts to save have left; not what somebody who is saving holds.
#[pyfunction]
fn checkpoint_clean(py: Python<'_>, directory: PathBuf) -> PyResult<()> {
    enter(py, || checkpoint::clean(&directory))
}

/// Complete checkpoints with their steps, the newest step last.
#[pyfunction]
fn checkpoint_list(py: Python<'_>, directory: PathBuf) -> PyResult<Vec<(u64, String)>> {
    enter(py, || checkpoint::list(&directory))
}

fn json(what: &str, text: &str) -> Result<serde_json::Value> {
    serde_json::from_str(text).map_err(|error| Error::InvalidArgument(format!("the {what} is no JSON: {error}")))
}

fn source((name, dtype, shape, start, lengths, address): Place) -> Result<Source> {
    let Some(dtype) = Element::named(&dtype) else {
        return Err(Error::InvalidArgument(format!("tensor `{name}`: `{dtype}` is no element type of a checkpoint")));
    };
    Ok(Source { name, dtype, shape, slice: Slice { start, shape: lengths }, address: address as *const u8 })
}

/// Ends a wait for other ranks when one of them is gone, or a signal came.
fn look() -> Result<()> {
    let during = "saving a checkpoint";
    if monitor::interrupt_pending() {
        return Err(Error::Interrupted { during: during.to_owned() });
    }
    match session::current("save") {
        Ok(session) => session.monitor().check(&(0..session.size()).collect::<Vec<_>>(), during),
        // Without a job there is nobody who could be gone.
        Err(_) => Ok(()),
    }
}

/// Adds this file's names.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CheckpointSaver>()?;
    module.add_class::<CheckpointReader>()?;
    module.add_function(wrap_pyfunction!(checkpoint_clean, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint_list, module)?)
}
