//! The coordinates of each rank when pipeline, tensor and data parallelism are combined. Pure functions.
//!
//! A rank is a point in a three-dimensional grid, and the placement strategy is the order in which the grid is
//! numbered: the rightmost letter varies fastest. For `pp = 2`, `tp = 2`, `rdp = 2`:
//!
//! ```text
//!   DPT (cluster)                          TPD (spread)
//!           tp 0  tp 1                             rdp 0  rdp 1
//!   rdp 0   pp 0:  0     1                 tp 0    pp 0:  0      1
//!           pp 1:  2     3                         pp 1:  2      3
//!   rdp 1   pp 0:  4     5                 tp 1    pp 0:  4      5
//!           pp 1:  6     7                         pp 1:  6      7
//! ```
//!
//! - TOPO-1: a group consists of all ranks with equal coordinates in the dimensions that the group does not span, in
//!   ascending order; the rank inside a group is the position in it.
//! - TOPO-2: `size = pp * tp * rdp`, `dp = tp * rdp`, `mp = pp * tp`.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A dimension of the grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// `D`: replicas of the model, reduced.
    ReducedData,
    /// `P`: pipeline stages.
    Pipeline,
    /// `T`: parts of a tensor.
    Tensor,
}

impl Axis {
    fn letter(self) -> char {
        match self {
            Axis::ReducedData => 'D',
            Axis::Pipeline => 'P',
            Axis::Tensor => 'T',
        }
    }
}

/// The order in which ranks fill the grid: the last dimension varies fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement([Axis; 3]);

impl Placement {
    /// `cluster`, or `DPT`: the ranks of a model are adjacent.
    pub const CLUSTER: Placement = Placement([Axis::ReducedData, Axis::Pipeline, Axis::Tensor]);
    /// `spread`, or `TPD`: the replicas of a part are adjacent.
    pub const SPREAD: Placement = Placement([Axis::Tensor, Axis::Pipeline, Axis::ReducedData]);

    /// All six orders.
    pub const ALL: [Placement; 6] = {
        use Axis::{Pipeline as P, ReducedData as D, Tensor as T};
        [
            Placement([D, P, T]),
            Placement([D, T, P]),
            Placement([P, D, T]),
            Placement([P, T, D]),
            Placement([T, D, P]),
            Placement([T, P, D]),
        ]
    };
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|axis| write!(f, "{}", axis.letter()))
    }
}

impl FromStr for Placement {
    type Err = Error;

    /// Parses `cluster`, `spread`, or the three letters in any order; case does not matter.
    fn from_str(text: &str) -> Result<Self> {
        let upper = text.to_ascii_uppercase();
        match upper.as_str() {
            "CLUSTER" => Ok(Self::CLUSTER),
            "SPREAD" => Ok(Self::SPREAD),
            letters => Self::ALL.into_iter().find(|placement| placement.to_string() == letters).ok_or_else(|| {
                Error::Config(format!(
                    "`placement_strategy` is `{text}`: expected `cluster`, `spread`, or the letters `D`, `P`, `T` in \
                     some order"
                ))
            }),
        }
    }
}

/// A kind of group, by the dimensions that it spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// The stages of one pipeline.
    Pipeline,
    /// The parts of one tensor.
    Tensor,
    /// The replicas of one part of the model.
    ReducedData,
    /// The ranks of one model: pipeline and tensor.
    Model,
    /// The ranks with different data for one pipeline stage: tensor and replicas.
    Data,
}

impl GroupKind {
    /// All kinds.
    pub const ALL: [GroupKind; 5] =
        [GroupKind::Pipeline, GroupKind::Tensor, GroupKind::ReducedData, GroupKind::Model, GroupKind::Data];

    fn spans(self, axis: Axis) -> bool {
        match self {
            GroupKind::Pipeline => axis == Axis::Pipeline,
            GroupKind::Tensor => axis == Axis::Tensor,
            GroupKind::ReducedData => axis == Axis::ReducedData,
            GroupKind::Model => axis != Axis::ReducedData,
            GroupKind::Data => axis != Axis::Pipeline,
        }
    }
}

/// The coordinates of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates {
    /// Pipeline stage.
    pub pp: usize,
    /// Part of each tensor.
    pub tp: usize,
    /// Replica.
    pub rdp: usize,
}

/// The sizes of the grid, and the order in which ranks fill it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelTopology {
    placement: Placement,
    pp: usize,
    tp: usize,
    rdp: usize,
}

impl ParallelTopology {
    /// Creates the topology of `size` ranks with `pp` pipeline stages and `tp` tensor parts; the remaining dimension
    /// is replicas.
    ///
    /// # Errors
    /// [`Error::Config`] if a degree is 0 or `size` is not a multiple of `pp * tp`.
    pub fn new(placement: Placement, size: usize, pp: usize, tp: usize) -> Result<Self> {
        match pp.checked_mul(tp) {
            Some(mp) if mp > 0 && size > 0 && size.is_multiple_of(mp) => Ok(Self { placement, pp, tp, rdp: size / mp }),
            _ => Err(Error::Config(format!(
                "{size} processes cannot be divided into models of {pp} pipeline stages times {tp} tensor parts"
            ))),
        }
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.pp * self.tp * self.rdp
    }

    /// Number of members of each group of a kind.
    pub fn group_size(&self, kind: GroupKind) -> usize {
        self.placement.0.iter().filter(|axis| kind.spans(**axis)).map(|axis| self.side(*axis)).product()
    }

    fn side(&self, axis: Axis) -> usize {
        match axis {
            Axis::ReducedData => self.rdp,
            Axis::Pipeline => self.pp,
            Axis::Tensor => self.tp,
        }
    }

    /// The coordinates of `rank`.
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn coordinates(&self, rank: usize) -> Coordinates {
        assert!(rank < self.size(), "rank {rank} is below the size {}", self.size());
        let mut found = Coordinates { pp: 0, tp: 0, rdp: 0 };
        let mut rest = rank;
        for &axis in self.placement.0.iter().rev() {
            let coordinate = match axis {
                Axis::ReducedData => &mut found.rdp,
                Axis::Pipeline => &mut found.pp,
                Axis::Tensor => &mut found.tp,
            };
            *coordinate = rest % self.side(axis);
            rest /= self.side(axis);
        }
        found
    }

    /// The members of the group of `kind` that `rank` is in, ascending (TOPO-1).
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn group(&self, kind: GroupKind, rank: usize) -> Vec<usize> {
        let mut members = vec![0];
        let mut stride = self.size();
        let mut rest = rank;
        assert!(rank < stride, "rank {rank} is below the size {stride}");
        // From the slowest dimension to the fastest, so that members are in ascending order.
        for &axis in &self.placement.0 {
            stride /= self.side(axis);
            let mine = rest / stride;
            rest %= stride;
            let along: Vec<usize> = if kind.spans(axis) { (0..self.side(axis)).collect() } else { vec![mine] };
            members = members.iter().flat_map(|start| along.iter().map(move |at| start + at * stride)).collect();
        }
        members
    }

    /// The rank of `rank` inside its group of `kind`.
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn group_rank(&self, kind: GroupKind, rank: usize) -> usize {
        self.group(kind, rank).iter().position(|member| *member == rank).expect("a rank is in its own groups")
    }
}

#[cfg(test)]
#[path = "topology_tests.rs"]
mod tests;
