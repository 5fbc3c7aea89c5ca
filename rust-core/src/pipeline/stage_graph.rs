//! Groups the tasks of a microbatch into stages, which a rank computes without waiting for another rank.
//!
//! ```text
//!   tasks ── extend ──> stages ── finish ──> memory and outputs ── graph ──> schedules
//!   (rank, level, values,             (backward roots,
//!    costs)                            returned values)
//! ```
//!
//! - STAGE-1: a stage holds the tasks of one rank that have the same level, which is the number of changes of rank
//!   before them. So every edge leads to a later stage, and stages can be ordered.
//! - STAGE-2: a stage whose values only one other stage of its rank uses is merged into that stage, because it need not
//!   run earlier.
//! - STAGE-4: a value gets a gradient only if a backward root depends on it through values that require gradients. So a
//!   parameter that no loss depends on has no gradient, as in one process.
//! - STAGE-5: a stage comes after the stages with tasks that its tasks must follow on their rank, because they read and
//!   change the same state. STAGE-2 counts them like users of a value.
//! - STAGE-3: the stages depend on the tasks and their order only, so every rank computes the same ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Costs, Edge, Graph, LinkCost, Stage};
use crate::error::{Error, Result};

/// A tensor that a task computes. Values are numbered in the order in which they are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducedTensor {
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it requires a gradient.
    pub requires_grad: bool,
}

/// A unit of computation for one microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// The rank that runs it.
    pub rank: usize,
    /// The level (STAGE-1).
    pub level: usize,
    /// Numbers of its inputs.
    pub inputs: Vec<usize>,
    /// Numbers of earlier tasks of its rank after which it must run, though it takes no value of them (STAGE-5).
    pub follows: Vec<usize>,
    /// The values that it computes.
    pub outputs: Vec<ProducedTensor>,
    /// Costs.
    pub costs: Costs,
    /// Bytes that it saves for its backward, in addition to its inputs and outputs.
    pub kept_bytes: u64,
    /// Bytes that the second part of its backward needs.
    pub waiting_bytes: u64,
}

/// Tasks of one rank that run together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// The rank.
    pub rank: usize,
    /// Numbers of the tasks, in order.
    pub tasks: Vec<usize>,
    /// Inputs from other stages, by producer; none for a stage that must only come before (STAGE-5).
    pub inputs: BTreeMap<usize, Vec<usize>>,
    /// Outputs to other stages, by consumer; none for a stage that must only come after.
    pub outputs: BTreeMap<usize, Vec<usize>>,
    /// Values that are needed after its forward: first its outputs and the backward roots, in order; then values that
    /// are only returned to the caller.
    pub exports: Vec<usize>,
    /// Backward roots: values at which a backward begins.
    pub backward_roots: Vec<usize>,
    /// Whether it runs while tasks are still being recorded.
    pub early: bool,
    /// Whether it has a backward.
    pub has_backward: bool,
}

/// The tasks of one microbatch, grouped into stages, with the values that pass between stages.
#[derive(Clone, Debug, Default)]
pub struct StageGraph {
    tasks: Vec<Task>,
    stages: Vec<Section>,
    values: Vec<ProducedTensor>,
    /// For each value, its producer's stage.
    producers: Vec<usize>,
    /// For each value, its producer's task.
    sources: Vec<usize>,
    /// For each value, whether it gets a gradient (STAGE-4).
    reached: Vec<bool>,
}

impl StageGraph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// The stages, in a topological order.
    pub fn stages(&self) -> &[Section] {
        &self.stages
    }

    /// The stage that computes a value.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no task computes it.
    pub fn stage_of(&self, value: usize) -> Result<usize> {
        self.producers.get(value).copied().ok_or_else(|| unknown(value, self.values.len()))
    }

    /// Adds tasks after the existing ones; `early` ones run while later tasks are still being recorded. Returns their
    /// stages.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a task uses a value that no earlier task computes, its level is not after that of
    /// an input from another rank, or it follows a task that is not before it on its rank.
    pub fn extend(&mut self, tasks: Vec<Task>, early: bool) -> Result<Range<usize>> {
        let (first_task, first_value, first_stage) = (self.tasks.len(), self.values.len(), self.stages.len());
        let mut groups: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        // The producer of each new value.
        let mut produced_by = Vec::new();
        for (number, task) in (first_task..).zip(&tasks) {
            for &value in &task.inputs {
                let Some(&producer) = produced_by.get(value.wrapping_sub(first_value)) else {
                    if value < first_value {
                        continue;
                    }
                    return Err(Error::InvalidArgument(format!(
                        "task {number} has input {value}, which no earlier task produces"
                    )));
                };
                let producer: &Task = &tasks[producer - first_task];
                if task.level < producer.level + usize::from(producer.rank != task.rank) {
                    return Err(Error::InvalidArgument(format!(
                        "task {number} on rank {} has level {}, and has an input of level {} on rank {}",
                        task.rank, task.level, producer.level, producer.rank
                    )));
                }
            }
            for &earlier in &task.follows {
                let known =
                    if earlier < first_task { self.tasks.get(earlier) } else { tasks.get(earlier - first_task) };
                if earlier >= number || known.is_none_or(|other| other.rank != task.rank || other.level > task.level) {
                    return Err(Error::InvalidArgument(format!(
                        "task {number} on rank {} follows task {earlier}, which does not come before it there",
                        task.rank
                    )));
                }
            }
            produced_by.extend(task.outputs.iter().map(|_| number));
            groups.entry((task.level, task.rank)).or_default().push(number);
        }
        self.tasks.extend(tasks);
        let sections =
            groups.into_iter().map(|((_, rank), tasks)| Section { rank, tasks, early, ..Section::default() });
        let sections = self.merged(sections.collect(), first_value, &produced_by);
        self.stages.extend(sections);
        let mut stage_of_task = vec![0; self.tasks.len() - first_task];
        for (number, stage) in self.stages.iter().enumerate().skip(first_stage) {
            stage.tasks.iter().for_each(|task| stage_of_task[task - first_task] = number);
        }
        for ((number, task), stage) in self.tasks.iter().enumerate().skip(first_task).zip(&stage_of_task) {
            self.values.extend(&task.outputs);
            self.producers.extend(task.outputs.iter().map(|_| stage));
            self.sources.extend(task.outputs.iter().map(|_| number));
        }
        for number in first_stage..self.stages.len() {
            let inputs = self.inputs(&self.stages[number]);
            for value in inputs {
                let producer = self.producers[value];
                if producer != number {
                    self.stages[number].inputs.entry(producer).or_default().push(value);
                    self.stages[producer].outputs.entry(number).or_default().push(value);
                }
            }
            for earlier in self.followed(&self.stages[number]) {
                let before = match earlier.checked_sub(first_task) {
                    Some(place) => stage_of_task[place],
                    None => continue,
                };
                if before != number {
                    self.stages[number].inputs.entry(before).or_default();
                    self.stages[before].outputs.entry(number).or_default();
                }
            }
        }
        Ok(first_stage..self.stages.len())
    }

    /// Sets the outputs of a task that was added before they were known; returns its stage.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the task does not exist.
    pub fn set_outputs(&mut self, task: usize, outputs: Vec<ProducedTensor>) -> Result<usize> {
        let stage = self.stages.iter().position(|stage| stage.tasks.binary_search(&task).is_ok());
        let stage = stage.ok_or_else(|| Error::InvalidArgument(format!("there is no task {task}")))?;
        self.values.extend(&outputs);
        self.producers.extend(outputs.iter().map(|_| stage));
        self.sources.extend(outputs.iter().map(|_| task));
        self.tasks[task].outputs.extend(outputs);
        Ok(stage)
    }

    /// Sets the values that are needed after the forwards: backward roots, and values that are returned to the
    /// caller.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no task computes one of them.
    pub fn finish(&mut self, backward_roots: &[usize], returned: &[usize]) -> Result<()> {
        for &value in backward_roots {
            let stage = self.stage_of(value)?;
            self.stages[stage].backward_roots.push(value);
        }
        self.reached = self.reached_from(backward_roots);
        for stage in &mut self.stages {
            let needed: BTreeSet<usize> =
                stage.outputs.values().flatten().chain(&stage.backward_roots).copied().collect();
            stage.exports = needed.into_iter().collect();
        }
        for &value in BTreeSet::from_iter(returned) {
            let stage = self.stage_of(value)?;
            let exports = &mut self.stages[stage].exports;
            if !exports.contains(&value) {
                exports.push(value);
            }
        }
        for number in (0..self.stages.len()).rev() {
            let stage = &self.stages[number];
            let reached = stage.outputs.keys().any(|&consumer| !self.gradients(number, consumer).is_empty());
            self.stages[number].has_backward = reached || !self.stages[number].backward_roots.is_empty();
        }
        Ok(())
    }

    /// Values from stage `producer` to stage `consumer` that get gradients.
    pub fn gradients(&self, producer: usize, consumer: usize) -> Vec<usize> {
        if !self.stages[consumer].has_backward {
            return Vec::new();
        }
        let values = self.stages[producer].outputs.get(&consumer).into_iter().flatten();
        values.copied().filter(|&value| self.reached.get(value).copied().unwrap_or(false)).collect()
    }

    /// Marks the values that get gradients, given the backward roots (STAGE-4).
    fn reached_from(&self, backward_roots: &[usize]) -> Vec<bool> {
        let mut reached = vec![false; self.values.len()];
        let mut open: Vec<usize> = backward_roots.to_vec();
        while let Some(value) = open.pop() {
            if self.values[value].requires_grad && !std::mem::replace(&mut reached[value], true) {
                open.extend(&self.tasks[self.sources[value]].inputs);
            }
        }
        reached
    }

    /// The graph for the schedule.
    ///
    /// # Errors
    /// As [`Graph::new`].
    pub fn graph(&self, ranks: usize, microbatches: usize, link: LinkCost) -> Result<Graph> {
        let mut stages: Vec<Stage> = Vec::with_capacity(self.stages.len());
        for section in &self.stages {
            let size = |values: &[usize]| values.iter().map(|&value| self.values[value].bytes).sum();
            let inputs: Vec<Edge> =
                section.inputs.iter().map(|(&from, values)| Edge { from, bytes: size(values) }).collect();
            // In a schedule, a stage after one with a backward has a backward, too, which may be empty.
            let backward = section.has_backward || inputs.iter().any(|edge| stages[edge.from].backward);
            let mut costs = Costs { forward: 0, input: 0, weight: 0 };
            let mut values: BTreeSet<usize> = BTreeSet::new();
            let (mut activation_bytes, mut waiting_bytes) = (0, 0);
            for &number in &section.tasks {
                let task = &self.tasks[number];
                costs.forward += task.costs.forward;
                if section.has_backward {
                    costs.input += task.costs.input;
                    costs.weight += task.costs.weight;
                    activation_bytes += task.kept_bytes;
                    waiting_bytes += task.waiting_bytes;
                }
                values.extend(&task.inputs);
            }
            // A value is kept once, however many users it has: tasks that use it, or a send that is not complete.
            values.extend(&section.exports);
            activation_bytes += values.iter().map(|&value| self.values[value].bytes).sum::<u64>();
            stages.push(Stage { rank: section.rank, costs, activation_bytes, waiting_bytes, inputs, backward });
        }
        Graph::new(ranks, microbatches, stages, link)
    }

    /// Inputs of a stage's tasks, each once, in order.
    fn inputs(&self, stage: &Section) -> BTreeSet<usize> {
        stage.tasks.iter().flat_map(|&task| &self.tasks[task].inputs).copied().collect()
    }

    /// Tasks that a stage's tasks must follow (STAGE-5), each once, in order.
    fn followed(&self, stage: &Section) -> BTreeSet<usize> {
        stage.tasks.iter().flat_map(|&task| &self.tasks[task].follows).copied().collect()
    }

    /// Merges stages (STAGE-2) before they are numbered. `made_by` are the producers of the values from `first_value`
    /// on.
    fn merged(&self, mut sections: Vec<Section>, first_value: usize, produced_by: &[usize]) -> Vec<Section> {
        let mut home = BTreeMap::new();
        for (place, section) in sections.iter().enumerate() {
            home.extend(section.tasks.iter().map(|&task| (task, place)));
        }
        let mut consumers = vec![BTreeSet::new(); sections.len()];
        for (place, section) in sections.iter().enumerate() {
            let made_here = self.inputs(section).into_iter().filter(|&value| value >= first_value);
            for producer in
                made_here.map(|value| home[&produced_by[value - first_value]]).filter(|&producer| producer != place)
            {
                consumers[producer].insert(place);
            }
            for earlier in self.followed(section) {
                if let Some(&before) = home.get(&earlier)
                    && before != place
                {
                    consumers[before].insert(place);
                }
            }
        }
        // From the last stage backwards, so that a whole chain becomes one stage. `into` is the stage into which each
        // stage is merged.
        let mut into: Vec<usize> = (0..sections.len()).collect();
        for place in (0..sections.len()).rev() {
            let goals: BTreeSet<usize> = consumers[place].iter().map(|&consumer| into[consumer]).collect();
            if let (Some(&goal), 1) = (goals.first(), goals.len())
                && sections[goal].rank == sections[place].rank
            {
                into[place] = goal;
                let tasks = std::mem::take(&mut sections[place].tasks);
                sections[goal].tasks.extend(tasks);
                sections[goal].tasks.sort_unstable();
            }
        }
        sections.retain(|section| !section.tasks.is_empty());
        sections
    }
}

fn unknown(value: usize, count: usize) -> Error {
    Error::InvalidArgument(format!("there is no value {value} among {count}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pipeline::schedule::{Bounds, Schedule, plan};

    /// A task that makes `count` values of 8 bytes, all of which want gradients.
    fn task(rank: usize, level: usize, inputs: &[usize], count: usize) -> Task {
        let outputs = vec![ProducedTensor { bytes: 8, requires_grad: true }; count];
        Task {
            rank,
            level,
            inputs: inputs.to_vec(),
            follows: Vec::new(),
            outputs,
            costs: Costs { forward: 10, input: 20, weight: 5 },
            kept_bytes: 100,
            waiting_bytes: 30,
        }
    }

    fn laid_out(tasks: Vec<Task>, backward_roots: &[usize], returned: &[usize]) -> StageGraph {
        let mut layout = StageGraph::new();
        layout.extend(tasks, false).unwrap();
        layout.finish(backward_roots, returned).unwrap();
        layout
    }

    fn tasks_of(layout: &StageGraph) -> Vec<(usize, Vec<usize>)> {
        layout.stages().iter().map(|stage| (stage.rank, stage.tasks.clone())).collect()
    }

    #[test]
    fn a_rank_that_is_passed_twice_has_two_stages() {
        let tasks = vec![task(0, 0, &[], 1), task(0, 0, &[0], 1), task(1, 1, &[1], 1), task(0, 2, &[2], 1)];
        let layout = laid_out(tasks, &[3], &[2, 3]);
        assert_eq!(tasks_of(&layout), [(0, vec![0, 1]), (1, vec![2]), (0, vec![3])]);
        let [first, second, third] = layout.stages() else { panic!("three stages") };
        assert_eq!((&first.exports, &second.exports, &third.exports), (&vec![1], &vec![2], &vec![3]));
        assert_eq!(second.inputs, [(0, vec![1])].into());
        assert_eq!(second.outputs, [(2, vec![2])].into());
        assert_eq!(third.backward_roots, [3]);
        assert!(layout.stages().iter().all(|stage| stage.has_backward && !stage.early));
        assert_eq!(layout.stage_of(1).unwrap(), 0);
        assert_eq!(layout.stage_of(4).unwrap_err().to_string(), "there is no value 4 among 4");
    }

    /// Rank 0's first value is used by its last stage only, so it is computed there.
    #[test]
    fn a_stage_that_only_its_own_rank_waits_for_is_no_stage() {
        let tasks = vec![task(0, 0, &[], 1), task(1, 0, &[], 1), task(0, 1, &[1, 0], 1)];
        assert_eq!(tasks_of(&laid_out(tasks.clone(), &[2], &[])), [(1, vec![1]), (0, vec![0, 2])]);
        let mut taken_twice = tasks;
        taken_twice.push(task(1, 1, &[0], 1));
        let layout = laid_out(taken_twice, &[2], &[3]);
        assert_eq!(tasks_of(&layout), [(0, vec![0]), (1, vec![1]), (0, vec![2]), (1, vec![3])]);
        // A value that is only returned has no part in the backward.
        assert_eq!(
            layout.stages().iter().map(|stage| stage.has_backward).collect::<Vec<_>>(),
            [true, true, true, false]
        );
        assert_eq!(layout.gradients(0, 2), [0]);
        assert!(layout.gradients(0, 3).is_empty());
    }

    /// Rank 0 reads state in its first stage, and changes it in the second, so the first is not moved behind the
    /// second.
    #[test]
    fn a_stage_stays_before_one_that_must_follow_it() {
        let mut tasks = vec![
            task(0, 0, &[], 1),
            task(1, 0, &[], 1),
            task(0, 1, &[1], 1),
            task(1, 2, &[2], 1),
            task(0, 3, &[0, 3], 1),
        ];
        assert_eq!(tasks_of(&laid_out(tasks.clone(), &[4], &[]))[1..], [(0, vec![2]), (1, vec![3]), (0, vec![0, 4])]);
        tasks[2].follows = vec![0];
        let layout = laid_out(tasks.clone(), &[4], &[]);
        assert_eq!(tasks_of(&layout), [(0, vec![0]), (1, vec![1]), (0, vec![2]), (1, vec![3]), (0, vec![4])]);
        assert_eq!(layout.stages()[2].inputs, [(0, vec![]), (1, vec![1])].into());
        assert_eq!(layout.stages()[0].outputs, [(2, vec![]), (4, vec![0])].into());
        for schedule in Schedule::ALL {
            let graph = layout.graph(2, 3, LinkCost::default()).unwrap();
            let program = plan(&graph, schedule, Bounds::default()).unwrap();
            let place = |stage| {
                let is_it = |action: &crate::pipeline::Action| {
                    action.kind == crate::pipeline::ActionKind::Forward
                        && action.stage == stage
                        && action.microbatch == 0
                };
                program.ranks()[0].iter().position(is_it).unwrap()
            };
            assert!(place(0) < place(2) && place(2) < place(4));
        }
        tasks[2].follows = vec![1];
        assert_eq!(
            StageGraph::new().extend(tasks, false).unwrap_err().to_string(),
            "task 2 on rank 0 follows task 1, which does not come before it there"
        );
    }

    #[test]
    fn later_stages_use_results_of_early_stages() {
        let mut layout = StageGraph::new();
        assert_eq!(layout.extend(vec![task(0, 0, &[], 1), task(1, 1, &[0], 0)], true).unwrap(), 0..2);
        assert_eq!(layout.set_outputs(1, vec![ProducedTensor { bytes: 4, requires_grad: true }]).unwrap(), 1);
        assert_eq!(layout.extend(vec![task(0, 3, &[0, 1], 1)], false).unwrap(), 2..3);
        layout.finish(&[2], &[]).unwrap();
        assert!(layout.stages()[1].early && !layout.stages()[2].early);
        assert_eq!(layout.stages()[2].inputs, [(0, vec![0]), (1, vec![1])].into());
        assert_eq!(layout.set_outputs(7, Vec::new()).unwrap_err().to_string(), "there is no task 7");
    }

    #[test]
    fn prices_are_those_of_the_tasks_and_each_value_is_kept_once() {
        let tasks = vec![task(0, 0, &[], 2), task(0, 0, &[0, 1], 1), task(1, 1, &[0, 2], 1)];
        let graph = laid_out(tasks, &[3], &[]).graph(2, 4, LinkCost::default()).unwrap();
        let first = graph.stage(0);
        assert_eq!(first.costs, Costs { forward: 20, input: 40, weight: 10 });
        assert_eq!((first.activation_bytes, first.waiting_bytes), (2 * 100 + 3 * 8, 2 * 30));
        assert_eq!(graph.stage(1).inputs, [Edge { from: 0, bytes: 16 }]);
        assert_eq!(graph.stage(1).activation_bytes, 100 + 3 * 8);
    }

    #[test]
    fn tasks_that_cannot_be_ordered_are_refused() {
        let refused = |tasks| StageGraph::new().extend(tasks, false).unwrap_err().to_string();
        assert_eq!(refused(vec![task(0, 0, &[0], 1)]), "task 0 has input 0, which no earlier task produces");
        assert_eq!(
            refused(vec![task(0, 1, &[], 1), task(1, 1, &[0], 1)]),
            "task 1 on rank 1 has level 1, and has an input of level 1 on rank 0"
        );
    }

    /// Random tasks on three ranks, in two parts, with levels as a recording assigns them.
    fn recordings() -> impl Strategy<Value = (Vec<Task>, usize, Vec<usize>)> {
        let index = any::<prop::sample::Index>;
        let one = (0_usize..3, prop::collection::vec(index(), 0..3), 1_usize..3, any::<bool>());
        (prop::collection::vec(one, 1..24), index(), prop::collection::vec(index(), 1..3)).prop_map(
            |(rows, cut, backward_roots)| {
                let cut = cut.index(rows.len());
                let (mut tasks, mut levels): (Vec<Task>, Vec<(usize, usize)>) = Default::default();
                let mut base = 0;
                for (number, (rank, inputs, count, requires_grad)) in rows.into_iter().enumerate() {
                    if number == cut {
                        base = levels.iter().map(|(_, level)| level + 1).max().unwrap_or(0);
                    }
                    let inputs: Vec<usize> = if levels.is_empty() {
                        Vec::new()
                    } else {
                        inputs.iter().map(|take| take.index(levels.len())).collect()
                    };
                    let behind = |&value: &usize| levels[value].1 + usize::from(levels[value].0 != rank);
                    let level = inputs.iter().map(behind).max().unwrap_or(0).max(base);
                    levels.extend((0..count).map(|_| (rank, level)));
                    let mut task = task(rank, level, &inputs, count);
                    task.outputs.iter_mut().for_each(|made| made.requires_grad = requires_grad);
                    tasks.push(task);
                }
                let backward_roots = backward_roots.iter().map(|root| root.index(levels.len())).collect();
                (tasks, cut, backward_roots)
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn random_tasks_become_stages_that_can_be_scheduled((tasks, cut, backward_roots) in recordings()) {
            let mut layout = StageGraph::new();
            layout.extend(tasks[..cut].to_vec(), true).unwrap();
            layout.extend(tasks[cut..].to_vec(), false).unwrap();
            layout.finish(&backward_roots, &[0]).unwrap();
            let mut seen: Vec<usize> = layout.stages().iter().flat_map(|stage| stage.tasks.clone()).collect();
            seen.sort_unstable();
            prop_assert!(seen.into_iter().eq(0..tasks.len()), "each task is in one stage");
            for (number, stage) in layout.stages().iter().enumerate() {
                prop_assert!(stage.tasks.is_sorted());
                prop_assert!(stage.tasks.iter().all(|&task| tasks[task].rank == stage.rank));
                // Every input of a task is computed earlier in its stage, or arrives from an earlier stage.
                for value in stage.tasks.iter().flat_map(|&task| &tasks[task].inputs) {
                    let producer = layout.stage_of(*value).unwrap();
                    let arrives = stage.inputs.get(&producer).is_some_and(|values| values.contains(value));
                    prop_assert_eq!(arrives, producer != number);
                    prop_assert!(producer <= number);
                    prop_assert!(producer == number || layout.stages()[producer].exports.contains(value));
                }
            }
            for schedule in Schedule::ALL {
                let graph = layout.graph(3, 4, LinkCost { latency: 3, bytes_per_tick: 1 }).unwrap();
                prop_assert!(plan(&graph, schedule, Bounds::default()).is_ok());
            }
        }
    }
}
