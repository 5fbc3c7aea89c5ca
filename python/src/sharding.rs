//! Assignment of sharded parameters to ranks (`smd_core::sharding`).

use pyo3::prelude::*;
use smd_core::sharding::{self, ShardingGroups, Shards};

use crate::enter::enter;

/// For each rank, its pieces: parameter, first element, one past the last, offset in the shard.
type Pieces = Vec<Vec<(usize, usize, usize, usize)>>;

/// Concatenates parameters of these sizes and divides them evenly: returns the elements of a shard, and the pieces of
/// each rank.
#[pyfunction]
pub fn shard_parameters(
    py: Python<'_>,
    sizes: Vec<usize>,
    ranks: usize,
    alignment: usize,
) -> PyResult<(usize, Pieces)> {
    enter(py, || {
        let shards = Shards::new(&sizes, ranks, alignment)?;
        let pieces = shards.pieces().iter();
        let rows = pieces.map(|row| row.iter().map(|p| (p.parameter, p.start, p.end, p.offset)).collect()).collect();
        Ok((shards.elems(), rows))
    })
}

/// Number of elements of each rank's shard of a parameter of this size, with padding.
#[pyfunction]
pub fn shard_elems(size: usize, ranks: usize) -> usize {
    sharding::shard_elems(size, ranks)
}

/// Ranks of several groups.
type Groups = Vec<Vec<usize>>;

/// Divides a data-parallel group: returns the ranks that together hold one model, and the ranks that hold the same
/// shard.
#[pyfunction]
pub fn sharding_groups(py: Python<'_>, members: Vec<usize>, degree: usize) -> PyResult<(Groups, Groups)> {
    enter(py, || {
        let groups = ShardingGroups::new(&members, degree)?;
        Ok((groups.sharding, groups.replication))
    })
}
