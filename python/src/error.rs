//! The core's errors as Python exceptions: one class for each code, all in `smdistributed._common.errors`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyType;
use smd_core::Error;
use smd_core::error::Code;

use crate::enter;

/// The exception for `error`. Its text is the error's, with its causes; the code is the class.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    match class(py, error.code()) {
        Ok(class) => PyErr::from_type(class, error.text()),
        // The package is incomplete; the core's error is more important.
        Err(_) => PyRuntimeError::new_err(error.report()),
    }
}

fn class(py: Python<'_>, code: Code) -> PyResult<Bound<'_, PyType>> {
    let classes = py.import("smdistributed._common.errors")?.getattr("CLASSES")?;
    Ok(classes.get_item(code.name())?.cast_into::<PyType>()?)
}

/// The stable names of all kinds of errors.
#[pyfunction]
fn error_codes() -> Vec<&'static str> {
    Code::ALL.iter().map(|code| code.name()).collect()
}

/// Raises the exception of a signal handler from the last interrupted wait of this thread, if there is one.
#[pyfunction]
fn raise_interrupt() -> PyResult<()> {
    enter::take_raised().map_or(Ok(()), Err)
}

/// Adds this file's functions.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(error_codes, module)?)?;
    module.add_function(wrap_pyfunction!(raise_interrupt, module)?)
}
