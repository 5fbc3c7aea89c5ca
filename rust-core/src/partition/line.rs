//! Orders modules in a line, so that a partition is a contiguous piece of it.
//!
//! Modules that share a parameter share one position. An embedding that is also the output layer may lie at either end,
//! so the possible positions are tried: each choice is a variant of the line.

use std::collections::BTreeMap;

use super::CostTree;
use super::cost::StageCost;
use crate::pipeline::LinkCost;

/// Maximum number of positions. In a longer line, modules that lie deep in the tree are merged, the deepest first.
const MAX_POSITIONS: usize = 1024;
/// Maximum number of variants. Models with more ties keep the later ones at their first position.
const MAX_VARIANTS: usize = 64;

/// The modules at each position, and the transfers between a piece of the line and the rest.
#[derive(Clone, Debug)]
pub(super) struct Line {
    /// The position of each module of the tree, if it has one.
    positions: Vec<Option<usize>>,
    /// Prefix sums: the costs of all earlier positions.
    sums: Vec<StageCost>,
    /// Transfer costs of the piece `start..end`, at index `start * (length + 1) + end`.
    transfers: Vec<u64>,
    /// Number of tasks of modules that the piece `start..end` contains only partly, at the same index.
    tasks: Vec<u64>,
    /// For each position but the first: how many modules a cut before it splits.
    num_split: Vec<u64>,
}

impl Line {
    /// Number of positions.
    pub(super) fn len(&self) -> usize {
        self.sums.len() - 1
    }

    /// The position of a module.
    pub(super) fn position(&self, module: usize) -> Option<usize> {
        self.positions[module]
    }

    /// How many modules a cut before `position` splits.
    pub(super) fn num_split(&self, position: usize) -> u64 {
        self.num_split[position]
    }

    /// Sums over a piece, without its transfer cost.
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

    /// Builds the line of the modules in `order`. `anchors` names for each tie the member whose position the tie gets.
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
        // From here on, a unit stands for the position that begins with it.
        units.dedup_by_key(|unit| position_of[unit]);
        let num_split = (0..length)
            .map(|position| {
                let Some(before) = position.checked_sub(1) else { return 0 };
                let (left, right) = (tree.above(units[before]), tree.above(units[position]));
                // Every cut splits the root, so it does not count.
                left.iter().zip(&right).take_while(|(a, b)| a == b).count() as u64 - 1
            })
            .collect();
        let transfers = transfers(tree, link, &positions, length);
        let tasks = tasks(tree, &positions, length);
        Self { positions, sums, transfers, tasks, num_split }
    }
}

/// Returns a key per unit; neighbours with the same key share a position. All keys differ if the line is short enough.
/// Otherwise the parts of deep modules are merged, then such modules in equal numbers.
fn unit_keys(tree: &CostTree, units: &[usize]) -> Vec<usize> {
    let paths: Vec<Vec<usize>> = units.iter().map(|&unit| tree.above(unit)).collect();
    let deepest = paths.iter().map(Vec::len).max().unwrap_or(0);
    let mut keys = Vec::new();
    for depth in 1..=deepest {
        // Lengths of runs of units below one module of this depth.
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

/// All variants of the line.
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

/// Computes the transfers to and from every piece. Each value contributes a few rectangles in the plane of starts and
/// ends. They are noted at their corners, and prefix sums over the plane do the rest.
fn transfers(tree: &CostTree, link: LinkCost, positions: &[Option<usize>], length: usize) -> Vec<u64> {
    let mut plane = Plane::new(length);
    let side = length + 1;
    let place = |module: &usize| positions[tree.assigned_module(*module)];
    for value in tree.values() {
        let Some(home) = place(&value.from) else { continue };
        let time = link.time(value.bytes) as i64;
        let mut consumers: Vec<usize> =
            value.to.iter().filter_map(place).filter(|&consumer| consumer != home).collect();
        consumers.sort_unstable();
        consumers.dedup();
        let (Some(&first), Some(&last)) = (consumers.first(), consumers.last()) else { continue };
        // Pieces that contain the producer but not all consumers send the value.
        plane.add((0, home + 1), (home + 1, side), time);
        plane.add((0, home.min(first) + 1), (home.max(last) + 1, side), -time);
        // Pieces after the producer that contain a consumer, by their first consumer.
        let mut previous = home;
        for &consumer in consumers.iter().filter(|&&consumer| consumer > home) {
            plane.add((previous + 1, consumer + 1), (consumer + 1, side), time);
            previous = consumer;
        }
        // Pieces before the producer that contain a consumer, by their last consumer.
        let mut next = home;
        for &consumer in consumers.iter().rev().filter(|&&consumer| consumer < home) {
            plane.add((0, consumer + 1), (consumer + 1, next + 1), time);
            next = consumer;
        }
    }
    plane.sums()
}

/// Counts the tasks in every piece: a task counts in pieces that contain its position but not its whole module.
fn tasks(tree: &CostTree, positions: &[Option<usize>], length: usize) -> Vec<u64> {
    let mut plane = Plane::new(length);
    let side = length + 1;
    let extents = tree.extents(|module| positions[module]);
    for tasks in tree.tasks() {
        let (Some(at), Some((first, last))) = (positions[tree.assigned_module(tasks.at)], extents[tasks.module]) else {
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

    /// Adds `time` to all pieces with these half-open ranges of starts and ends.
    fn add(&mut self, starts: (usize, usize), ends: (usize, usize), time: i64) {
        if starts.0 < starts.1 && ends.0 < ends.1 {
            let mut corner = |start: usize, end: usize, time: i64| self.cells[start * (self.side + 1) + end] += time;
            corner(starts.0, ends.0, time);
            corner(starts.1, ends.0, -time);
            corner(starts.0, ends.1, -time);
            corner(starts.1, ends.1, time);
        }
    }

    /// The sums for the pieces `start..end`, at index `start * (length + 1) + end`.
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
