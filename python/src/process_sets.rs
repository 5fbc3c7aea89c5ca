//! The world and the process sets of Horovod's API.

use pyo3::prelude::*;

use crate::session::{query_place, with};
use smd_core::session::place::World;

/// Creates the world from these ranks of the job, or from all; does nothing if there is one.
#[pyfunction]
#[pyo3(signature = (ranks=None))]
fn start_world(py: Python<'_>, ranks: Option<Vec<usize>>) -> PyResult<()> {
    with(py, "init", |session| session.start_world(ranks.as_deref()))
}

/// A rank and a size.
type RankAndSize = (usize, usize);

/// Rank and size in the world, among its ranks on this host, and among those with this local rank; and whether all
/// hosts have equally many ranks.
#[pyfunction]
fn ranks_and_sizes(py: Python<'_>) -> PyResult<(RankAndSize, RankAndSize, RankAndSize, bool)> {
    query_place(py, "rank", |place| {
        let place = World::of(place, "rank")?.place;
        Ok((place.world, place.local, place.cross, place.is_homogeneous))
    })
}

/// The ranks of the world, as ranks of the job.
#[pyfunction]
fn world_ranks(py: Python<'_>) -> PyResult<Vec<usize>> {
    query_place(py, "size", |place| Ok(World::of(place, "size")?.ranks))
}

/// Creates or finds a process set for each list; returns their ids. Collective.
#[pyfunction]
fn register_process_sets(py: Python<'_>, lists: Vec<Vec<usize>>) -> PyResult<Vec<u32>> {
    with(py, "init", |session| session.register_process_sets(&lists))
}

/// Creates a process set and returns its id. Collective.
#[pyfunction]
fn add_process_set(py: Python<'_>, ranks: Vec<usize>) -> PyResult<u32> {
    with(py, "add_process_set", |session| session.add_process_set(&ranks))
}

/// Removes a process set; false if there was none. Collective.
#[pyfunction]
fn remove_process_set(py: Python<'_>, id: u32) -> PyResult<bool> {
    with(py, "remove_process_set", |session| session.remove_process_set(id))
}

/// Ids of all process sets, and their ranks.
#[pyfunction]
fn process_sets(py: Python<'_>) -> PyResult<Vec<(u32, Vec<usize>)>> {
    query_place(py, "process_sets", |place| Ok(World::of(place, "process_sets")?.sets))
}

/// Adds this file's functions.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(start_world, module)?)?;
    module.add_function(wrap_pyfunction!(ranks_and_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(world_ranks, module)?)?;
    module.add_function(wrap_pyfunction!(register_process_sets, module)?)?;
    module.add_function(wrap_pyfunction!(add_process_set, module)?)?;
    module.add_function(wrap_pyfunction!(remove_process_set, module)?)?;
    module.add_function(wrap_pyfunction!(process_sets, module)?)
}
