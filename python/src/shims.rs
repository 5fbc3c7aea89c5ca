//! The sources of the shims.

use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Name and text of every source file of the shims, so that an installed package can build them anywhere.
#[pyfunction]
pub fn shim_sources(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let sources = PyDict::new(py);
    for (name, text) in smd_bridge::SOURCES {
        sources.set_item(name, text)?;
    }
    Ok(sources)
}
