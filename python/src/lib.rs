//! The Python module over the core, and the one shared library that holds the core: Python, the PyTorch ops and the
//! TensorFlow ops of a process all work on the session in it.

use pyo3::prelude::*;

mod shims;

/// `smdistributed._core`
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    smd_bridge::link();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(shims::shim_sources, module)?)?;
    Ok(())
}
