//! The published algorithm that partitions are compared with in tests: a tree of costs is walked from the root; the
//! children of a module are cut into as many pieces as the module has partitions, so that the largest piece is as small as
//! can be, and the partitions are given to the pieces by D'Hondt's method. A piece with several partitions goes on with its children.

use super::{CostTree, Objective};

struct Walk {
    children: Vec<Vec<usize>>,
    /// Of a module and all below it.
    costs: Vec<f64>,
    assignment: Vec<u32>,
}

/// A module's partition, for every module of the tree.
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
        children[parent].insert(0, index);
    }
    let mut walk = Walk { children, costs, assignment: vec![0; modules.len()] };
    walk.module(0, (0..partitions as u32).collect());
    // Modules that share a parameter count as one node, which lies where its first module does.
    for index in 0..modules.len() {
        walk.assignment[index] = walk.assignment[tree.tied_to(index)];
    }
    walk.assignment
}

impl Walk {
    fn module(&mut self, index: usize, partitions: Vec<u32>) {
        self.assignment[index] = partitions[0];
        let children = self.children[index].clone();
        self.row(&children, &partitions);
    }

    fn row(&mut self, row: &[usize], partitions: &[u32]) {
        match (row, partitions) {
            ([], _) => {}
            (_, [one]) => row.iter().for_each(|&child| self.module(child, vec![*one])),
            ([only], _) => self.module(*only, partitions.to_vec()),
            _ => {
                let pieces = self.pieces(row, partitions.len().min(row.len()));
                let mut next = 0;
                for (piece, count) in pieces.iter().zip(self.seats(&pieces, partitions.len())) {
                    // Who gets no seat stays with the module above.
                    let own = if count == 0 { &partitions[..1] } else { &partitions[next..next + count] };
                    next += count;
                    self.row(piece, own);
                }
            }
        }
    }

    /// Contiguous pieces with the least largest cost.
    fn pieces(&self, row: &[usize], count: usize) -> Vec<Vec<usize>> {
        let length = row.len();
        let sum = |from: usize, to: usize| row[from..to].iter().map(|&child| self.costs[child]).sum::<f64>();
        let mut best = vec![vec![(f64::INFINITY, 0); length + 1]; count + 1];
        best[0][0].0 = 0.0;
        for pieces in 1..=count {
            for end in pieces..=length {
                for start in pieces - 1..end {
                    let largest = best[pieces - 1][start].0.max(sum(start, end));
                    if largest < best[pieces][end].0 {
                        best[pieces][end] = (largest, start);
                    }
                }
            }
        }
        let (mut pieces, mut end) = (Vec::new(), length);
        for count in (1..=count).rev() {
            let start = best[count][end].1;
            pieces.insert(0, row[start..end].to_vec());
            end = start;
        }
        pieces
    }

    /// D'Hondt: the next seat goes to the highest cost per seat.
    fn seats(&self, pieces: &[Vec<usize>], seats: usize) -> Vec<usize> {
        let costs: Vec<f64> = pieces.iter().map(|piece| piece.iter().map(|&child| self.costs[child]).sum()).collect();
        let mut given = vec![0; pieces.len()];
        for _ in 0..seats {
            let quotient = |index: usize| costs[index] / (given[index] + 1) as f64;
            let next = (0..pieces.len()).max_by(|&a, &b| quotient(a).total_cmp(&quotient(b)).then(b.cmp(&a)));
            given[next.expect("there are pieces")] += 1;
        }
        given
    }
}
