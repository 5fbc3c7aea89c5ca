//! The coordinates of ranks in a model-parallel job (`smd_core::world::topology`).

use pyo3::prelude::*;
use smd_core::world::topology::{self, GroupKind};
use smd_core::{Error, Result};

use crate::enter::enter;

/// Kinds of groups by the names of the `smp` API.
const KINDS: [(&str, GroupKind); 5] = [
    ("pp", GroupKind::Pipeline),
    ("tp", GroupKind::Tensor),
    ("rdp", GroupKind::ReducedData),
    ("mp", GroupKind::Model),
    ("dp", GroupKind::Data),
];

fn kind_named(name: &str) -> Result<GroupKind> {
    let found = KINDS.iter().find(|(known, _)| *known == name);
    found.map(|(_, kind)| *kind).ok_or_else(|| Error::InvalidArgument(format!("`{name}` is not a kind of group")))
}

/// The pipeline, tensor and data parallel coordinates of all ranks.
#[pyclass(module = "smdistributed._core", frozen)]
pub struct ParallelTopology(topology::ParallelTopology);

impl ParallelTopology {
    fn check_rank(&self, rank: usize) -> Result<()> {
        let size = self.0.size();
        if rank < size { Ok(()) } else { Err(Error::InvalidArgument(format!("rank {rank} is not below {size}"))) }
    }
}

#[pymethods]
impl ParallelTopology {
    #[new]
    fn new(py: Python<'_>, size: usize, pp: usize, tp: usize, placement: &str) -> PyResult<Self> {
        enter(py, || Ok(Self(topology::ParallelTopology::new(placement.parse()?, size, pp, tp)?)))
    }

    /// Ranks of the job.
    #[getter]
    fn size(&self) -> usize {
        self.0.size()
    }

    /// Coordinates of a rank: pipeline stage, tensor part, replica.
    fn coordinates(&self, py: Python<'_>, rank: usize) -> PyResult<(usize, usize, usize)> {
        enter(py, || {
            self.check_rank(rank)?;
            let found = self.0.coordinates(rank);
            Ok((found.pp, found.tp, found.rdp))
        })
    }

    /// Global ranks, ascending, of the group of this kind that a rank is in.
    fn group(&self, py: Python<'_>, kind: &str, rank: usize) -> PyResult<Vec<usize>> {
        enter(py, || {
            self.check_rank(rank)?;
            Ok(self.0.group(kind_named(kind)?, rank))
        })
    }

    /// All groups of this kind, by their first ranks.
    fn groups(&self, py: Python<'_>, kind: &str) -> PyResult<Vec<Vec<usize>>> {
        enter(py, || {
            let kind = kind_named(kind)?;
            let mut seen = vec![false; self.0.size()];
            let mut groups = Vec::new();
            for rank in 0..seen.len() {
                if !seen[rank] {
                    let group = self.0.group(kind, rank);
                    group.iter().for_each(|&member| seen[member] = true);
                    groups.push(group);
                }
            }
            Ok(groups)
        })
    }
}
