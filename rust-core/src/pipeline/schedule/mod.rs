//! Schedules: from a graph to a program.
//!
//! | name | in the literature | keeps |
//! | --- | --- | --- |
//! | `simple` | GPipe (Huang et al. 2019) | every microbatch's activations |
//! | `interleaved` | 1F1B (PipeDream-Flush, Narayanan et al. 2021); with several stages a rank, interleaved 1F1B | as many microbatches as there are ranks from this one to the last |
//! | `zero_bubble` | ZB-H1; on a chain that goes there and back, ZB-V (Qi et al. 2023, 2024); where more microbatches may be active, up to ZB-H2 | as 1F1B's first rank, or as many as may be active |
//! | `_only_forward` | - | nothing |
//!
//! All schedules but one are policies of the list scheduler in `list.rs`, which works for any graph: skip
//! connections, ranks with several stages, branches. Chains that loop over the ranks get the order of the literature
//! (`looped.rs`), unless their stages differ so much that the list scheduler's order is clearly faster.

mod list;
mod looped;

use std::fmt;
use std::str::FromStr;

use super::{Graph, Program, Stage, simulate, transfers, validate};
use crate::error::{Error, Result};

/// The schedules that a user may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// All forwards, then all backwards.
    Simple,
    /// Each backward as soon as it can run.
    Interleaved,
    /// Backwards in two parts, of which the second one fills idle time.
    ZeroBubble,
    /// Forwards only, for evaluation.
    ForwardOnly,
}

impl Schedule {
    /// All, in the order of the table.
    pub const ALL: [Self; 4] = [Self::Simple, Self::Interleaved, Self::ZeroBubble, Self::ForwardOnly];

    /// The value of the configuration's key `pipeline`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Interleaved => "interleaved",
            Self::ZeroBubble => "zero_bubble",
            Self::ForwardOnly => "_only_forward",
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Schedule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|schedule| schedule.name() == text).ok_or_else(|| {
            let names: Vec<String> = Self::ALL[..3].iter().map(|schedule| format!("`{schedule}`")).collect();
            Error::Config(format!("`pipeline` is one of {}, not `{text}`", names.join(", ")))
        })
    }
}

/// Work of less than one part in this many hardly delays the rest.
pub(crate) const LIGHT_PART: u64 = 16;
/// How many times as fast the list scheduler's order must be to be used instead of looped 1F1B.
const LISTED_ADVANTAGE: f64 = 1.05;

/// Limits on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Largest number of microbatches in flight: begun and not ended.
    pub active_microbatches: Option<usize>,
    /// Largest number of bytes of activations.
    pub memory_bytes: Option<u64>,
}

impl Bounds {
    /// The number of microbatches that `rank` may have in flight, so that their activations, and the data for
    /// deferred second parts of `schedule`, fit the limit.
    fn active(&self, graph: &Graph, rank: usize, schedule: Schedule) -> Result<usize> {
        let own = graph.stages().iter().filter(|stage| stage.rank == rank && stage.backward);
        let waits = |stage: &Stage| if schedule == Schedule::ZeroBubble { stage.waiting_bytes } else { 0 };
        let bytes: u64 = own.map(|stage| stage.activation_bytes.max(waits(stage))).sum();
        let fitting = match self.memory_bytes {
            Some(bound) if bytes > 0 => usize::try_from(bound / bytes).unwrap_or(usize::MAX),
            _ => usize::MAX,
        };
        if fitting == 0 {
            return Err(Error::InvalidArgument(format!(
                "one microbatch keeps {bytes} bytes of activations on rank {rank}, and the bound is {}",
                self.memory_bytes.unwrap_or(0)
            )));
        }
        match self.active_microbatches {
            Some(0) => Err(Error::InvalidArgument("`active_microbatches` must be at least 1".to_owned())),
            bound => Ok(fitting.min(bound.unwrap_or(usize::MAX))),
        }
    }
}

/// A valid program for `graph`, with its transfers.
///
/// # Errors
/// [`Error::InvalidArgument`] if the bounds do not allow one microbatch.
pub fn plan(graph: &Graph, schedule: Schedule, bounds: Bounds) -> Result<Program> {
    let program = transfers::insert(graph, &computations(graph, schedule, bounds)?);
    match validate(graph, &program, bounds, schedule != Schedule::ForwardOnly) {
        Ok(_) => Ok(program),
        Err(error) => Err(Error::Internal(format!("the schedule `{schedule}` made a wrong program: {error}"))),
    }
}

/// The same without transfers and validation, for simulations of large pipelines.
///
/// # Errors
/// As [`plan`].
pub fn computations(graph: &Graph, schedule: Schedule, bounds: Bounds) -> Result<Program> {
    let active = (0..graph.ranks()).map(|rank| bounds.active(graph, rank, schedule)).collect::<Result<Vec<_>>>()?;
    // The list scheduler handles any graph, and bounds that are too tight for the order of the literature.
    let list = || list::order(graph, schedule, &active, bounds.active_microbatches);
    let looped = (schedule == Schedule::Interleaved).then(|| looped::order(graph)).flatten();
    let Some((looped, timeline)) =
        looped.and_then(|program| validate(graph, &program, bounds, true).ok().map(|timeline| (program, timeline)))
    else {
        return list();
    };
    // The looped order is for stages of about equal costs. The list scheduler may keep more activations, so it has to
    // be clearly faster.
    let listed = list()?;
    let step_time = simulate(graph, &listed)?.step_time as f64;
    Ok(if step_time * LISTED_ADVANTAGE < timeline.step_time as f64 { listed } else { looped })
}
