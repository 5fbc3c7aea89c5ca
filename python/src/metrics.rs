//! Counters that Python adds to.

use pyo3::prelude::*;
use smd_core::{Error, metrics};

use crate::enter::enter;

/// Counts a slower path, by its name in the metrics.
#[pyfunction]
pub fn note_fallback(py: Python<'_>, reason: &str) -> PyResult<()> {
    enter(py, || match metrics::note_fallback_named(reason) {
        true => Ok(()),
        false => Err(Error::InvalidArgument(format!("there is no counter of the fallback `{reason}`"))),
    })
}
