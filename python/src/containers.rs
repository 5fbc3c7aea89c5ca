//! Python containers that are compared often: each call of a module in a pipelined step looks for what the body has
//! changed in the lists, dictionaries and objects that the module's attributes refer to.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use pyo3::{ffi, intern};

/// Returns whether containers are as they were.
///
/// `containers` has one tuple for each of them: the container, a list or dictionary with its earlier content, and
/// whether that content is the container's attributes and not its items. Identical objects in the same order count as
/// unchanged.
#[pyfunction]
pub fn are_unchanged(containers: &Bound<'_, PyList>) -> PyResult<bool> {
    let attributes = intern!(containers.py(), "__dict__");
    for entry in containers {
        let entry = entry.cast::<PyTuple>()?;
        let (container, before) = (entry.get_item(0)?, entry.get_item(1)?);
        let is_object = entry.get_item(2)?.is_truthy()?;
        let same = if is_object {
            same_items(&own_attributes(&container, attributes)?, before.cast::<PyDict>()?)
        } else if let Ok(before) = before.cast::<PyDict>() {
            same_items(container.cast::<PyDict>()?, before)
        } else {
            let (now, before) = (container.cast::<PyList>()?, before.cast::<PyList>()?);
            now.len() == before.len() && now.iter().zip(before.iter()).all(|(one, other)| one.is(&other))
        };
        if !same {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the dictionary of an object's attributes; an overridden `__getattribute__` is not called.
fn own_attributes<'py>(object: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: both pointers are of live objects, the GIL is held, and the result is a new reference or null with an
    // exception set.
    let found = unsafe {
        Bound::from_owned_ptr_or_err(object.py(), ffi::PyObject_GenericGetAttr(object.as_ptr(), name.as_ptr()))
    }?;
    Ok(found.cast_into::<PyDict>()?)
}

/// Whether both have identical values in the same order under equal keys.
fn same_items(now: &Bound<'_, PyDict>, before: &Bound<'_, PyDict>) -> bool {
    now.len() == before.len()
        && now.iter().zip(before.iter()).all(|((key, value), (earlier_key, earlier))| {
            value.is(&earlier) && (key.is(&earlier_key) || key.eq(&earlier_key).unwrap_or(false))
        })
}
