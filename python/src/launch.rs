//! `smdrun`.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;

/// Whether a name is this host's, or one of its addresses.
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
