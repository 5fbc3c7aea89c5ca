//! The command `smdrun`, and the parameters of model parallelism.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;
use serde_json::{Map, Value};
use smd_core::Error;
use smd_core::smp_config;

use crate::enter::enter;

/// Whether a name is this host's name, or one of its addresses.
#[pyfunction]
pub fn is_this_host(py: Python<'_>, name: &str) -> bool {
    py.detach(|| smd_core::launch::is_this_host(name))
}

/// Runs `smdrun` with this command line (the program's name first) and returns its exit code. The GIL is released;
/// Ctrl-C goes to the ranks and raises no `KeyboardInterrupt` here.
#[pyfunction]
pub fn smdrun(py: Python<'_>, argv: Vec<OsString>, python: PathBuf) -> i32 {
    py.detach(|| smd_core::launch::main(argv, python))
}

/// Every key of the `modelparallel` parameters with its default, as JSON.
#[pyfunction]
pub fn parameter_defaults() -> String {
    Value::Object(smp_config::defaults()).to_string()
}

/// Returns the known keys of a JSON dictionary with normalised values, and warnings; raises for an invalid value.
#[pyfunction]
pub fn check_parameters(py: Python<'_>, text: &str) -> PyResult<(String, Vec<String>)> {
    enter(py, || {
        let mut warnings = Vec::new();
        let given = smp_config::checked(dictionary(text)?, &mut warnings)?;
        Ok((Value::Object(given).to_string(), warnings))
    })
}

/// Raises if keys of a JSON dictionary contradict each other.
#[pyfunction]
pub fn check_parameter_rules(py: Python<'_>, text: &str) -> PyResult<()> {
    enter(py, || smp_config::check_rules(&dictionary(text)?))
}

fn dictionary(text: &str) -> smd_core::Result<Map<String, Value>> {
    serde_json::from_str(text).map_err(|error| Error::Config(format!("this is not a JSON dictionary: {error}")))
}
