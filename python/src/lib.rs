//! The Python module over the core, in the one shared library that contains the core. Python, the PyTorch ops and the
//! TensorFlow ops of a process share the session in it.
//!
//! Tensors are passed to the core by ops or, for checkpoints, by address; everything else goes through this module.
//! Every function enters the core through [`enter`], and errors are converted in [`error`].

use pyo3::prelude::*;

mod buckets;
mod checkpoint;
mod config;
mod containers;
mod elastic;
mod enter;
mod error;
mod gradients;
mod launch;
mod loss_scale;
mod metrics;
mod operations;
mod partition;
mod pipeline;
mod process_sets;
mod session;
mod sharding;
mod shims;
mod topology;

/// `smdistributed._core`
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    smd_bridge::link();
    enter::install();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    error::register(module)?;
    checkpoint::register(module)?;
    partition::register(module)?;
    session::register(module)?;
    process_sets::register(module)?;
    module.add_function(wrap_pyfunction!(gradients::plan_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::bucket_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(buckets::bucket_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(config::setting, module)?)?;
    module.add_function(wrap_pyfunction!(containers::are_unchanged, module)?)?;
    module.add_function(wrap_pyfunction!(config::cache_folder, module)?)?;
    module.add_function(wrap_pyfunction!(config::untrusted, module)?)?;
    module.add_function(wrap_pyfunction!(launch::smdrun, module)?)?;
    module.add_class::<elastic::ElasticHosts>()?;
    module.add_class::<elastic::ElasticDriver>()?;
    module.add_class::<operations::StepOperations>()?;
    module.add_class::<operations::StepPlacement>()?;
    module.add_class::<pipeline::StageGraph>()?;
    module.add_class::<topology::ParallelTopology>()?;
    module.add_class::<loss_scale::LossScale>()?;
    module.add_function(wrap_pyfunction!(sharding::shard_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(sharding::shard_elems, module)?)?;
    module.add_function(wrap_pyfunction!(sharding::sharding_groups, module)?)?;
    module.add_function(wrap_pyfunction!(launch::is_this_host, module)?)?;
    module.add_function(wrap_pyfunction!(launch::parameter_defaults, module)?)?;
    module.add_function(wrap_pyfunction!(launch::check_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(launch::check_parameter_rules, module)?)?;
    module.add_function(wrap_pyfunction!(pipeline::timeline_now, module)?)?;
    module.add_function(wrap_pyfunction!(pipeline::timeline_stage, module)?)?;
    module.add_function(wrap_pyfunction!(metrics::note_fallback, module)?)?;
    module.add_function(wrap_pyfunction!(metrics::running_fallbacks, module)?)?;
    module.add_function(wrap_pyfunction!(shims::shim_sources, module)?)?;
    Ok(())
}
