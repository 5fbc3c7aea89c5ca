//! Registration of reducer specifications.

use pyo3::prelude::*;
use smd_core::Error;
use smd_core::buffer::DType;
use smd_core::reducer::fingerprint::ReducerDescription;
use smd_core::reducer::spec::{self, ReducerSpec};
use smd_core::reducer::{BucketReduction, ParamSpec, ReducerOptions, bucket_sizes};
use smd_core::session;

use crate::enter::enter;

/// Registers a reducer specification for a graph's next gradients and returns its number: name, shape and type of
/// each gradient, and the names of variables without a gradient. `graph` is the caller's number of the graph, 0
/// outside of graphs; `wire` the type to which wider floats are cast for the reduction; `on_device` says that
/// gradients are on a CUDA device; `group` is the id of the group that reduces them, 0 for all ranks.
#[pyfunction]
#[pyo3(signature = (graph, gradients, absent, bucket_bytes, wire=None, sum=false, on_device=false, group=0))]
#[expect(clippy::too_many_arguments, reason = "Python names them")]
pub fn plan_gradients(
    py: Python<'_>,
    graph: u64,
    gradients: Vec<(String, Vec<u64>, String)>,
    absent: Vec<String>,
    bucket_bytes: usize,
    wire: Option<String>,
    sum: bool,
    on_device: bool,
    group: u64,
) -> PyResult<usize> {
    enter(py, || {
        let params = gradients
            .into_iter()
            .map(|(name, shape, dtype)| Ok(ParamSpec::dense(name, shape, parse(&dtype)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        let reduction = match wire {
            Some(wire) => BucketReduction::Compressed(parse(&wire)?),
            None => BucketReduction::Average,
        };
        let bucket_bytes = bucket_sizes(bucket_bytes);
        let options = ReducerOptions { bucket_bytes, reduction, sum, absent, on_device, ..ReducerOptions::default() };
        let ranks = match group {
            // Resolved when gradients arrive.
            0 => None,
            _ => {
                let session = session::current("the reduction of gradients")?;
                let ranks = session.communicator(group)?.members().ranks.to_vec();
                (!ranks.iter().copied().eq(0..session.size())).then_some(ranks)
            }
        };
        spec::register(graph, ReducerSpec { description: ReducerDescription { params, options }, ranks })
    })
}

fn parse(dtype: &str) -> Result<DType, Error> {
    DType::ALL
        .into_iter()
        .find(|candidate| candidate.name() == dtype)
        .ok_or_else(|| Error::InvalidArgument(format!("gradients of type {dtype} cannot be reduced")))
}
