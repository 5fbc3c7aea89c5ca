//! Settings.

use pyo3::prelude::*;
use smd_core::{Error, config};

use crate::enter::enter;

/// The value of a setting of the environment reference, or its default.
#[pyfunction]
pub fn setting(py: Python<'_>, name: &str) -> PyResult<String> {
    enter(py, || {
        let knob = config::ALL.iter().find(|knob| knob.name == name);
        let knob = knob.ok_or_else(|| Error::InvalidArgument(format!("there is no setting `{name}`")))?;
        Ok(knob.text().unwrap_or_else(|| knob.default.to_owned()))
    })
}
