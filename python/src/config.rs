//! Settings from the environment.

use std::path::PathBuf;

use pyo3::prelude::*;
use smd_core::{Error, cache, config};

use crate::enter::enter;

/// The folder `name` for compiled libraries, which only this user and root can write to; and a warning if it is not
/// in the configured cache folder.
#[pyfunction]
pub fn cache_folder(py: Python<'_>, name: &str) -> PyResult<(PathBuf, Option<String>)> {
    enter(py, || cache::folder(name).map(|folder| (folder.path, folder.warning)))
}

/// Why a user other than this one and root may have written a file; `None` if no other user can have.
#[pyfunction]
pub fn untrusted(py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
    enter(py, || Ok(cache::untrusted(&path)))
}

/// The value of a setting of the environment reference, or its default.
#[pyfunction]
pub fn setting(py: Python<'_>, name: &str) -> PyResult<String> {
    enter(py, || {
        let setting = config::ALL.iter().find(|setting| setting.name == name);
        let setting = setting.ok_or_else(|| Error::InvalidArgument(format!("there is no setting `{name}`")))?;
        Ok(setting.text().unwrap_or_else(|| setting.default.to_owned()))
    })
}
