//! Modules in a line, so that a partition is a piece of it.
//!
//! Modules that share a parameter have one position in common. Which of their positions that is, is tried out: an
//! embedding that is also the head may lie at either end. Each choice is a variant of the line.

use std::collections::BTreeMap;

use super::CostTree;
use super::cost::StageCost;
use crate::pipeline::LinkCost;

/// Positions at most: a longer line takes the modules of a deep tree together, the deepest ones first.
const MAX_POSITIONS: usize = 1024;
/// Variants that are tried at most. Models with more groups than that keep the later ones at their first position.
const MAX_VARIANTS: usize = 64;

/// What stands at each position, and what crosses from one piece of the line to the rest.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// For each module of the tree its position, if it has one.
    positions: Vec<Option<usize>>,
    /// Sums over positions before this one.
    sums: Vec<StageCost>,
    /// Transfers to and from the piece from `start` to before `end`, at `start * (length + 1) + end`.
    transfers: Vec<u64>,
    /// Tasks of modules that such a piece does not have as a whole, in the same way.
    tasks: Vec<u64>,
    /// Before each position but the first: how many modules a cut there takes apart.
    taken_apart: Vec<u64>,
}

impl Line {
    /// Positions.
    pub(super) fn len(&self) -> usize {
        self.sums.len() - 1
    }

    /// Where a module stands.
    pub(super) fn position(&self, module: usize) -> Option<usize> {
        self.positions[module]
    }

    /// How many modules a cut before `position` takes apart.
    pub(super) fn taken_apart(&self, position: usize) -> u64 {
        self.taken_apart[position]
    }

    /// Sums over a piece; its cost is not filled in.
    pub(super) fn piece(&self, start: usize, end: usize) -> StageCost {
        let (before, after) = (&self.sums[start], &self.sums[end]);
        let cell = start * (self.len() + 1) + end;
        StageCost {
            cost: 0.0,
            parameter_bytes: after.parameter_bytes - before.parameter_bytes,
            state_bytes: after.state_bytes - before.state_bytes,
            activation_bytes: after.activation_bytes - before.activation_bytes,
            time: after.time - before.time,
            transfer: self.transfers[cell],
            tasks: self.tasks[cell],
        }
    }

    /// Of modules in `order`, where groups stand at the position of the member that `anchors` names.
    fn new(tree: &CostTree, link: LinkCost, order: &[usize], anchors: &BTreeMap<usize, usize>) -> Self {
        let home = |module: usize| anchors.get(&tree.tied_to(module)).copied().unwrap_or(module);
        let mut units: Vec<usize> = order.iter().copied().filter(|&module| home(module) == module).collect();
        let keys = unit_keys(tree, &units);
        let mut position_of = BTreeMap::new();
        let mut length: usize = 0;
        for (index, &unit) in units.iter().enumerate() {
            if index == 0 || keys[index] != keys[index - 1] {
                length += 1;
            }
            position_of.insert(unit, length - 1);
        }
        let mut positions = vec![None; tree.modules().len()];
        let mut at = vec![StageCost::default(); length];
        for &module in order {
            let position = position_of[&home(module)];
            positions[module] = Some(position);
            at[position].add(&tree.modules()[module]);
        }
        let mut sums = vec![StageCost::default()];
        for here in at {
            let mut sum = *sums.last().expect("it begins with one");
            sum.parameter_bytes += here.parameter_bytes;
            sum.state_bytes += here.state_bytes;
            sum.activation_bytes += here.activation_bytes;
            sum.time += here.time;
            sums.push(sum);
        }
        // From here on, units are those at which a position begins.
        units.dedup_by_key(|unit| position_of[unit]);
        let taken_apart = (0..length)
            .map(|position| {
                let Some(before) = position.checked_sub(1) else { return 0 };
                let (left, right) = (tree.above(units[before]), tree.above(units[position]));
                // The root is taken apart by every cut.
                left.iter().zip(&right).take_while(|(a, b)| a == b).count() as u64 - 1
            })
            .collect();
        let transfers = transfers(tree, link, &positions, length);
        let tasks = tasks(tree, &positions, length);
        Self { positions, sums, transfers, tasks, taken_apart }
    }
}

/// Neighbours with the same key share a position: none do if all have room, otherwise the parts of modules that lie
/// deep, and such modules in equal numbers.
fn unit_keys(tree: &CostTree, units: &[usize]) -> Vec<usize> {
    let paths: Vec<Vec<usize>> = units.iter().map(|&unit| tree.above(unit)).collect();
    let deepest = paths.iter().map(Vec::len).max().unwrap_or(0);
    let mut keys = Vec::new();
    for depth in 1..=deepest {
        // Runs of units below one module of this depth, counted.
        let module = |index: usize| paths[index][depth.min(paths[index].len()) - 1];
        keys = vec![0; units.len()];
        for index in 1..units.len() {
            keys[index] = keys[index - 1] + usize::from(module(index) != module(index - 1));
        }
        let runs = keys.last().map_or(0, |last| last + 1);
        if runs > MAX_POSITIONS {
            let together = runs.div_ceil(MAX_POSITIONS);
            keys.iter_mut().for_each(|key| *key /= together);
            break;
        }
    }
    keys
}

/// Every line that comes into question.
pub(super) fn variants(tree: &CostTree, link: LinkCost) -> impl Iterator<Item = Line> {
    let order = tree.line();
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for &module in &order {
        groups.entry(tree.tied_to(module)).or_default().push(module);
    }
    groups.retain(|_, members| members.len() > 1);
    let mut choices = vec![BTreeMap::new()];
    for (first, members) in groups {
        let fits = choices.len() * members.len() <= MAX_VARIANTS;
        let members = if fits { &members[..] } else { &members[..1] };
        choices = members
            .iter()
            .flat_map(|&member| {
                choices.iter().map(move |choice| {
                    let mut choice = choice.clone();
                    choice.insert(first, member);
                    choice
                })
            })
            .collect();
    }
    let tree = tree.clone();
    choices.into_iter().map(move |anchors| Line::new(&tree, link, &order, &anchors))
}

/// Transfers to and from every piece. Each value is a few rectangles in the plane of starts and ends, so it is
/// noted at their corners, and sums over the plane do the rest.
fn transfers(tree: &CostTree, link: LinkCost, positions: &[Option<usize>], length: usize) -> Vec<u64> {
    let mut plane = Plane::new(length);
    let side = length + 1;
    let place = |module: &usize| positions[tree.stands_at(*module)];
    for value in tree.values() {
        let Some(home) = place(&value.from) else { continue };
        let time = link.time(value.bytes) as i64;
        let mut takers: Vec<usize> = value.to.iter().filter_map(place).filter(|&taker| taker != home).collect();
        takers.sort_unstable();
        takers.dedup();
        let (Some(&first), Some(&last)) = (takers.first(), takers.last()) else { continue };
        // Pieces with the maker, but not with all takers, give it away.
        plane.add((0, home + 1), (home + 1, side), time);
        plane.add((0, home.min(first) + 1), (home.max(last) + 1, side), -time);
        // Pieces behind the maker with a taker: by the first taker that they have.
        let mut previous = home;
        for &taker in takers.iter().filter(|&&taker| taker > home) {
            plane.add((previous + 1, taker + 1), (taker + 1, side), time);
            previous = taker;
        }
        // Pieces before the maker: by the last taker that they have.
        let mut next = home;
        for &taker in takers.iter().rev().filter(|&&taker| taker < home) {
            plane.add((0, taker + 1), (taker + 1, next + 1), time);
            next = taker;
        }
    }
    plane.sums()
}

/// Tasks in every piece: each is in the pieces that have its position, but not its whole module.
fn tasks(tree: &CostTree, positions: &[Option<usize>], length: usize) -> Vec<u64> {
    let mut plane = Plane::new(length);
    let side = length + 1;
    let extents = tree.extents(|module| positions[module]);
    for tasks in tree.tasks() {
        let (Some(at), Some((first, last))) = (positions[tree.stands_at(tasks.at)], extents[tasks.module]) else {
            continue;
        };
        plane.add((0, at + 1), (at + 1, side), tasks.time as i64);
        plane.add((0, first + 1), (last + 1, side), -(tasks.time as i64));
    }
    plane.sums()
}

/// A number for every piece of a line.
struct Plane {
    cells: Vec<i64>,
    side: usize,
}

impl Plane {
    fn new(length: usize) -> Self {
        let side = length + 1;
        Self { cells: vec![0; (side + 1) * (side + 1)], side }
    }

    /// Adds to all pieces with `starts` and `ends` (both from, to before).
    fn add(&mut self, starts: (usize, usize), ends: (usize, usize), time: i64) {
        if starts.0 < starts.1 && ends.0 < ends.1 {
            let mut corner = |start: usize, end: usize, time: i64| self.cells[start * (self.side + 1) + end] += time;
            corner(starts.0, ends.0, time);
            corner(starts.1, ends.0, -time);
            corner(starts.0, ends.1, -time);
            corner(starts.1, ends.1, time);
        }
    }

    /// For pieces from `start` to before `end`, at `start * (length + 1) + end`.
    fn sums(&self) -> Vec<u64> {
        let side = self.side;
        let mut all = vec![0_u64; side * side];
        let mut column = vec![0_i64; side];
        for start in 0..side {
            let mut row = 0;
            for end in 0..side {
                row += self.cells[start * (side + 1) + end];
                column[end] += row;
                all[start * side + end] = column[end] as u64;
            }
        }
        all
    }
}
