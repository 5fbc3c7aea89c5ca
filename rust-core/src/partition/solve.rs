//! Cuts a line into pieces by dynamic programming.

use std::cmp::Ordering;

use super::cost::{Objective, Price, StageCost};
use super::line::Line;
use super::{CostTree, ROUNDING};

/// So often is the interval halved in which a largest cost is looked for.
const HALVINGS: u32 = 10;

/// Where pieces begin, and how good that is.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// The first position of each piece; pieces without a position are left out at the end.
    pub(super) starts: Vec<usize>,
    /// Modules that are taken apart.
    apart: u64,
    /// The largest cost of a piece.
    largest: f64,
    /// Transfers of all pieces, and how unequal their costs are: the sum of the squares.
    rest: (u64, f64),
}

impl Cuts {
    /// Whether these are better, of two that are good enough.
    pub(super) fn before(&self, other: &Self) -> bool {
        let equal = (self.largest - other.largest).abs() <= ROUNDING * self.largest.max(other.largest);
        match self.apart.cmp(&other.apart) {
            Ordering::Equal if equal => self.rest < other.rest,
            Ordering::Equal => self.largest < other.largest,
            order => order.is_lt(),
        }
    }
}

/// A number for each piece count and position, in one vector.
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

/// A line that is to be cut.
pub(super) struct CutSearch<'a> {
    line: &'a Line,
    pieces: usize,
    price: Price<'a>,
}

impl<'a> CutSearch<'a> {
    pub(super) fn new(line: &'a Line, partitions: usize, objective: &'a Objective, tree: &CostTree) -> Self {
        Self { line, pieces: partitions.min(line.len()), price: Price::new(tree, objective) }
    }

    fn cost(&self, index: usize, start: usize, end: usize) -> f64 {
        self.price.of(index, &self.line.piece(start, end))
    }

    /// The least possible largest cost of a piece.
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

    /// Of all cuts whose pieces cost at most `bound`, those that take the fewest modules apart; of these the ones with the least
    /// largest cost. `least` is that of all cuts.
    pub(super) fn best(&self, least: f64, bound: f64) -> Cuts {
        let mut best = self.fewest_apart(bound).expect("that bound is possible");
        // Halving what is between a bound that is possible and one that is not.
        let mut impossible = least * (1.0 - 2.0 * ROUNDING);
        for _ in 0..HALVINGS {
            if best.largest <= least * (1.0 + ROUNDING) {
                break;
            }
            let bound = f64::midpoint(impossible, best.largest);
            match self.fewest_apart(bound) {
                Some(found) if found.apart == best.apart => best = found,
                _ => impossible = bound,
            }
        }
        self.fewest_apart(best.largest).expect("that was found")
    }

    /// Of all cuts whose pieces cost at most `bound`, one that takes the fewest modules apart, of these one in which least crosses, and of
    /// these the most equal one.
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
                    if before == worst || before.0 + self.line.taken_apart(start) > best.0 {
                        continue;
                    }
                    let piece = self.line.piece(start, end);
                    if self.price.of(count - 1, &StageCost { transfer: 0, tasks: 0, ..piece }) > bound {
                        // A longer one costs more.
                        break;
                    }
                    let cost = self.price.of(count - 1, &piece);
                    if cost > bound {
                        continue;
                    }
                    let sum = (
                        before.0 + self.line.taken_apart(start),
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
        let (apart, rest) = *side.at(pieces, length);
        if apart == u64::MAX {
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
        Some(Cuts { starts, apart, largest, rest })
    }
}
