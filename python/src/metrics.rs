//! Counters that Python adds to or reads.

use pyo3::prelude::*;
use smd_core::{Error, launch, metrics};

use crate::enter::enter;

/// Counts a slower path, by its name in the metrics.
#[pyfunction]
pub fn note_fallback(py: Python<'_>, reason: &str) -> PyResult<()> {
    enter(py, || match metrics::note_fallback_named(reason) {
        true => Ok(()),
        false => Err(Error::InvalidArgument(format!("there is no counter of the fallback `{reason}`"))),
    })
}

/// Slower paths of a rank: its session, the rank, and for each reason how often the path was taken.
type RankFallbacks = (u64, u64, Vec<(&'static str, u64)>);

/// Returns the slower paths of the ranks of this user that run on this host, in their order: the session, the rank, and
/// for each reason how often. With `pid`, only those of the ranks that this process has started or is.
#[pyfunction]
#[pyo3(signature = (pid = None))]
pub fn running_fallbacks(py: Python<'_>, pid: Option<u64>) -> PyResult<Vec<RankFallbacks>> {
    enter(py, || {
        let ranks = launch::running_ranks(pid);
        Ok(ranks.iter().map(|rank| (rank.session, rank.rank, rank.fallback_counts().collect())).collect())
    })
}
