//! Cuts a line into pieces by dynamic programming.

use std::cmp::Ordering;

use super::cost::{CostModel, Objective, StageCost};
use super::line::Line;
use super::{CostTree, ROUNDING};

/// Number of bisection steps in the search for the smallest largest cost.
const HALVINGS: u32 = 10;

/// The starts of pieces, and the quality of the cut.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// The first position of each piece; empty pieces at the end are left out.
    pub(super) starts: Vec<usize>,
    /// Number of split modules.
    pub(super) num_split: u64,
    /// The largest cost of a piece.
    pub(super) largest: f64,
    /// Transfer cost of all pieces, and the sum of the squares of their costs, which measures inequality.
    rest: (u64, f64),
}

impl Cuts {
    /// Whether this cut is better than another one; both have acceptable largest costs.
    pub(super) fn before(&self, other: &Self) -> bool {
        let equal = (self.largest - other.largest).abs() <= ROUNDING * self.largest.max(other.largest);
        match self.num_split.cmp(&other.num_split) {
            Ordering::Equal if equal => self.rest < other.rest,
            Ordering::Equal => self.largest < other.largest,
            order => order.is_lt(),
        }
    }
}

/// A value for each number of pieces and each position, in one vector.
struct CutTable<T> {
    cells: Vec<T>,
    width: usize,
}

impl<T: Copy> CutTable<T> {
    fn new(height: usize, width: usize, fill: T) -> Self {
        Self { cells: vec![fill; height * width], width }
    }

    fn at(&mut self, row: usize, column: usize) -> &mut T {
        &mut self.cells[row * self.width + column]
    }
}

/// A line to cut.
pub(super) struct CutSearch<'a> {
    line: &'a Line,
    pieces: usize,
    cost_model: CostModel<'a>,
}

impl<'a> CutSearch<'a> {
    pub(super) fn new(line: &'a Line, partitions: usize, objective: &'a Objective, tree: &CostTree) -> Self {
        Self { line, pieces: partitions.min(line.len()), cost_model: CostModel::new(tree, objective) }
    }

    fn cost(&self, index: usize, start: usize, end: usize) -> f64 {
        self.cost_model.of(index, &self.line.piece(start, end))
    }

    /// Returns the smallest possible largest cost of a piece.
    pub(super) fn least(&self) -> f64 {
        let (pieces, length) = (self.pieces, self.line.len());
        let mut largest = CutTable::new(pieces + 1, length + 1, f64::INFINITY);
        *largest.at(0, 0) = 0.0;
        for count in 1..=pieces {
            for end in count..=length - (pieces - count) {
                let mut best = f64::INFINITY;
                for start in (count - 1..end).rev() {
                    let before = *largest.at(count - 1, start);
                    if before < best {
                        best = best.min(before.max(self.cost(count - 1, start, end)));
                    }
                }
                *largest.at(count, end) = best;
            }
        }
        *largest.at(pieces, length)
    }

    /// Returns the best of all cuts whose pieces cost at most `bound`: those with the fewest split modules, and among
    /// them those with the lowest largest cost. `least` is the lowest largest cost of all cuts.
    pub(super) fn best(&self, least: f64, bound: f64) -> Cuts {
        let mut best = self.fewest_apart(bound).expect("that bound is possible");
        // Bisects between an impossible and a possible bound.
        let mut impossible = least * (1.0 - 2.0 * ROUNDING);
        for _ in 0..HALVINGS {
            if best.largest <= least * (1.0 + ROUNDING) {
                break;
            }
            let bound = f64::midpoint(impossible, best.largest);
            match self.fewest_apart(bound) {
                Some(found) if found.num_split == best.num_split => best = found,
                _ => impossible = bound,
            }
        }
        self.fewest_apart(best.largest).expect("that was found")
    }

    /// Returns the best of all cuts whose pieces cost at most `bound`: by the number of split modules, then by
    /// transfers, then by the equality of costs.
    fn fewest_apart(&self, bound: f64) -> Option<Cuts> {
        let (pieces, length) = (self.pieces, self.line.len());
        let bound = bound * (1.0 + ROUNDING);
        let worst = (u64::MAX, (u64::MAX, f64::INFINITY));
        let mut side = CutTable::new(pieces + 1, length + 1, worst);
        let mut from = CutTable::new(pieces + 1, length + 1, 0);
        *side.at(0, 0) = (0, (0, 0.0));
        for count in 1..=pieces {
            for end in count..=length - (pieces - count) {
                let (mut best, mut best_start) = (worst, 0);
                for start in (count - 1..end).rev() {
                    let before = *side.at(count - 1, start);
                    if before == worst || before.0 + self.line.num_split(start) > best.0 {
                        continue;
                    }
                    let piece = self.line.piece(start, end);
                    if self.cost_model.of(count - 1, &StageCost { transfer: 0, tasks: 0, ..piece }) > bound {
                        // A longer piece costs more.
                        break;
                    }
                    let cost = self.cost_model.of(count - 1, &piece);
                    if cost > bound {
                        continue;
                    }
                    let sum = (
                        before.0 + self.line.num_split(start),
                        (before.1.0 + piece.transfer, before.1.1 + cost * cost),
                    );
                    if sum <= best {
                        (best, best_start) = (sum, start);
                    }
                }
                *side.at(count, end) = best;
                *from.at(count, end) = best_start;
            }
        }
        let (num_split, rest) = *side.at(pieces, length);
        if num_split == u64::MAX {
            return None;
        }
        let mut starts = Vec::with_capacity(pieces);
        let (mut end, mut largest) = (length, 0.0_f64);
        for count in (1..=pieces).rev() {
            let start = *from.at(count, end);
            largest = largest.max(self.cost(count - 1, start, end));
            starts.push(start);
            end = start;
        }
        starts.reverse();
        Some(Cuts { starts, num_split, largest, rest })
    }
}
