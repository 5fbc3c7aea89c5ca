//! Cuts a line into pieces by dynamic programming.

use super::cost::{Objective, Price};
use super::line::Line;
use super::{CostTree, ROUNDING};

/// Where pieces begin, and how good that is.
#[derive(Clone, Debug)]
pub(super) struct Cuts {
    /// The first position of each piece; pieces without a position are left out at the end.
    pub(super) starts: Vec<usize>,
    /// The largest cost of a piece, in the best cut of the line.
    least: f64,
    /// What the chosen cuts cost beside that: transfers, and modules that are taken apart.
    side_cost: (u64, u64),
}

impl Cuts {
    /// Whether these are better.
    pub(super) fn before(&self, other: &Self) -> bool {
        let equal = (self.least - other.least).abs() <= ROUNDING * self.least.max(other.least);
        if equal { self.side_cost < other.side_cost } else { self.least < other.least }
    }
}

/// A number for each piece count and position, in one vector.
struct Grid<T> {
    cells: Vec<T>,
    width: usize,
}

impl<T: Copy> Grid<T> {
    fn new(height: usize, width: usize, fill: T) -> Self {
        Self { cells: vec![fill; height * width], width }
    }

    fn at(&mut self, row: usize, column: usize) -> &mut T {
        &mut self.cells[row * self.width + column]
    }
}

/// The cuts of PART-3.
pub(super) fn cut(line: &Line, partitions: usize, objective: &Objective, tree: &CostTree) -> Cuts {
    let length = line.len();
    let pieces = partitions.min(length);
    if pieces == 0 {
        return Cuts { starts: vec![0], least: 0.0, side_cost: (0, 0) };
    }
    let price = Price::new(tree, objective);
    let cost = |index: usize, start: usize, end: usize| price.of(index, &line.piece(start, end));

    // The least possible largest cost of `count` pieces before `end`.
    let mut largest = Grid::new(pieces + 1, length + 1, f64::INFINITY);
    *largest.at(0, 0) = 0.0;
    for count in 1..=pieces {
        for end in count..=length - (pieces - count) {
            let mut best = f64::INFINITY;
            for start in (count - 1..end).rev() {
                let before = *largest.at(count - 1, start);
                if before < best {
                    best = best.min(before.max(cost(count - 1, start, end)));
                }
            }
            *largest.at(count, end) = best;
        }
    }
    let least = *largest.at(pieces, length);

    // Among cuts with that cost, those at which least crosses.
    let bound = least * (1.0 + ROUNDING);
    let worst = (u64::MAX, u64::MAX);
    let mut side = Grid::new(pieces + 1, length + 1, worst);
    let mut from = Grid::new(pieces + 1, length + 1, 0);
    *side.at(0, 0) = (0, 0);
    for count in 1..=pieces {
        for end in count..=length - (pieces - count) {
            let (mut best, mut best_start) = (worst, 0);
            for start in count - 1..end {
                let before = *side.at(count - 1, start);
                if before == worst || before >= best || cost(count - 1, start, end) > bound {
                    continue;
                }
                let here = line.piece(start, end).transfer;
                let sum = (before.0 + here, before.1 + line.taken_apart(start));
                if sum < best {
                    (best, best_start) = (sum, start);
                }
            }
            *side.at(count, end) = best;
            *from.at(count, end) = best_start;
        }
    }
    let mut starts = Vec::with_capacity(pieces);
    let mut end = length;
    for count in (1..=pieces).rev() {
        end = *from.at(count, end);
        starts.push(end);
    }
    starts.reverse();
    Cuts { starts, least, side_cost: *side.at(pieces, length) }
}
