//! Sizes of gradient buckets.

use pyo3::prelude::*;
use smd_core::reducer;

use crate::enter::enter;

/// The size in bytes of a bucket of `bucket_cap_mb` MiB, or the default for gradients on a device or in CPU memory.
#[pyfunction]
#[pyo3(signature = (bucket_cap_mb=None, on_device=false))]
pub fn bucket_bytes(py: Python<'_>, bucket_cap_mb: Option<f64>, on_device: bool) -> PyResult<usize> {
    enter(py, || reducer::bucket_bytes(bucket_cap_mb, on_device))
}

/// The sizes in bytes of the first bucket and of all others, if none may exceed this size.
#[pyfunction]
pub fn bucket_sizes(cap_bytes: usize) -> Vec<usize> {
    reducer::bucket_sizes(cap_bytes)
}
