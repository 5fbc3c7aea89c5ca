//! The published algorithm. It walks the tree of costs from the root. The children of a module are cut into as many
//! pieces as the module has partitions, with the smallest possible largest piece. D'Hondt's method distributes the
//! partitions over the pieces. A piece with several partitions is divided further in the same way.
//!
//! A piece without a partition gets the first partition of the module above it, wherever the piece is in the line.
//! The result may thus differ from every cut of the line, and is sometimes better.

use std::collections::HashSet;
use std::ops::Range;

use super::{CostTree, Objective};

struct Walk {
    children: Vec<Vec<usize>>,
    /// The cost of a module and all modules below it.
    costs: Vec<f64>,
    assignment: Vec<u32>,
}

/// Returns the partition of every module of the tree.
pub(super) fn partition(tree: &CostTree, partitions: usize, objective: &Objective) -> Vec<u32> {
    let modules = tree.modules();
    let weight = objective.memory_weight;
    let memory = |index: usize| {
        let module = &modules[index];
        (module.parameter_bytes + module.state_bytes + module.activation_bytes) as f64
    };
    let whole_memory: f64 = (0..modules.len()).map(memory).sum::<f64>().max(1.0);
    let whole_time = modules.iter().map(|module| module.time).sum::<u64>().max(1) as f64;
    let mut costs: Vec<f64> = (0..modules.len())
        .map(|index| weight * memory(index) / whole_memory + (1.0 - weight) * modules[index].time as f64 / whole_time)
        .collect();
    let mut children = vec![Vec::new(); modules.len()];
    for index in (1..modules.len()).rev() {
        let parent = modules[index].parent.expect("only the root has none");
        costs[parent] += costs[index];
        children[parent].push(index);
    }
    children.iter_mut().for_each(|below| below.reverse());
    let mut walk = Walk { children, costs, assignment: vec![0; modules.len()] };
    walk.module(0, 0..partitions as u32);
    // Modules that share a parameter count as one node, at the position of the first module.
    let placed: HashSet<usize> = tree.line().into_iter().collect();
    tree.spread(|module| placed.contains(&module).then(|| walk.assignment[tree.tied_to(module)]))
}

impl Walk {
    fn module(&mut self, index: usize, partitions: Range<u32>) {
        self.assignment[index] = partitions.start;
        let children = self.children[index].clone();
        self.row(&children, partitions);
    }

    fn row(&mut self, row: &[usize], partitions: Range<u32>) {
        match row {
            [] => {}
            _ if partitions.len() == 1 => row.iter().for_each(|&child| self.module(child, partitions.clone())),
            [only] => self.module(*only, partitions),
            _ => {
                let pieces = self.pieces(row, partitions.len().min(row.len()));
                let mut next = partitions.start;
                for (piece, num_partitions) in pieces.iter().zip(self.partitions_for(&pieces, partitions.len())) {
                    // A piece without a partition stays with the module above.
                    let own = if num_partitions == 0 {
                        partitions.start..partitions.start + 1
                    } else {
                        next..next + num_partitions
                    };
                    next += num_partitions;
                    self.row(piece, own);
                }
            }
        }
    }

    /// Returns contiguous pieces with the smallest possible largest cost.
    fn pieces<'a>(&self, row: &'a [usize], count: usize) -> Vec<&'a [usize]> {
        let length = row.len();
        let mut sums = vec![0.0];
        for (at, &child) in row.iter().enumerate() {
            sums.push(sums[at] + self.costs[child]);
        }
        let mut best = vec![vec![(f64::INFINITY, 0); length + 1]; count + 1];
        best[0][0].0 = 0.0;
        for pieces in 1..=count {
            for end in pieces..=length {
                let mut least = (f64::INFINITY, 0);
                for start in (pieces - 1..end).rev() {
                    let piece = sums[end] - sums[start];
                    // Longer pieces cost more.
                    if piece > least.0 {
                        break;
                    }
                    let largest = best[pieces - 1][start].0.max(piece);
                    if largest <= least.0 {
                        least = (largest, start);
                    }
                }
                best[pieces][end] = least;
            }
        }
        let (mut pieces, mut end) = (Vec::with_capacity(count), length);
        for count in (1..=count).rev() {
            let start = best[count][end].1;
            pieces.push(&row[start..end]);
            end = start;
        }
        pieces.reverse();
        pieces
    }

    /// D'Hondt's method: the next partition goes to the piece with the highest cost per partition.
    fn partitions_for(&self, pieces: &[&[usize]], num_partitions: usize) -> Vec<u32> {
        let costs: Vec<f64> = pieces.iter().map(|piece| piece.iter().map(|&child| self.costs[child]).sum()).collect();
        let mut given = vec![0; pieces.len()];
        for _ in 0..num_partitions {
            let quotient = |index: usize| costs[index] / f64::from(given[index] + 1);
            let next = (0..pieces.len()).max_by(|&a, &b| quotient(a).total_cmp(&quotient(b)).then(b.cmp(&a)));
            given[next.expect("there are pieces")] += 1;
        }
        given
    }
}
