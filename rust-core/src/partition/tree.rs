//! The costs of a model's modules, and the values that pass between them.

use crate::error::{Error, Result};

/// A module with its own costs, without those of the modules below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModuleCost {
    /// Dotted path; empty for the root.
    pub path: String,
    /// The index of the module above it, which is smaller than its own. The first module is the root.
    pub parent: Option<usize>,
    /// Bytes of its parameters and buffers. Shared ones count in only one of the modules.
    pub parameter_bytes: u64,
    /// Bytes that training keeps in addition: gradients and optimizer state.
    pub state_bytes: u64,
    /// Bytes that a microbatch keeps from its forward to its backward.
    pub activation_bytes: u64,
    /// Time of forward and backward of a microbatch, in nanoseconds.
    pub time: u64,
    /// Time of its first call, in any unit; `None` if it was never called.
    pub first_run: Option<u64>,
    /// The module whose partition it gets: a module without parameters runs where its input is.
    pub follows: Option<usize>,
}

impl ModuleCost {
    fn costs_something(&self) -> bool {
        self.parameter_bytes > 0 || self.state_bytes > 0 || self.activation_bytes > 0 || self.time > 0
    }
}

/// A tensor that one module computes and others use, for one microbatch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The module that computes it.
    pub from: usize,
    /// The modules that use it.
    pub to: Vec<usize>,
    /// Size in bytes.
    pub bytes: u64,
}

/// Host time of a module's own forward if its parts are on several partitions: its operations and calls are then
/// separate tasks, instead of one call of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tasks {
    /// The module that may be split.
    pub module: usize,
    /// The module that the tasks belong to: one below the split module, or that module itself.
    pub at: usize,
    /// Time for one microbatch, in nanoseconds.
    pub time: u64,
}

/// The modules of a model as a tree, with their costs and the values that pass between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostTree {
    modules: Vec<ModuleCost>,
    values: Vec<Value>,
    tasks: Vec<Tasks>,
    /// For each module, the first module that must be on the same partition; itself if there is none.
    tied_to: Vec<usize>,
    /// Whether a module has a position in the line: it has costs or tasks, or it computes or uses a value.
    placed: Vec<bool>,
}

impl CostTree {
    /// Creates a tree of `modules`. Modules in one list of `ties` must be on the same partition, because they share a
    /// parameter.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no module, a parent does not come before its child, only the first module
    /// has none, or a value, a task or a tie names a module that does not exist.
    pub fn new(modules: Vec<ModuleCost>, values: Vec<Value>, tasks: Vec<Tasks>, ties: &[Vec<usize>]) -> Result<Self> {
        let bad = |text: String| Err(Error::InvalidArgument(text));
        if modules.is_empty() {
            return bad("a model has at least one module".into());
        }
        for (index, module) in modules.iter().enumerate() {
            if module.parent.map_or(index != 0, |parent| parent >= index) {
                return bad(format!("the parent module of `{}` does not precede it", module.path));
            }
            if module.follows.is_some_and(|other| other >= modules.len() || modules[other].follows.is_some()) {
                return bad(format!("`{}` follows a module that follows another one itself", module.path));
            }
        }
        let named = values.iter().flat_map(|value| value.to.iter().chain([&value.from]));
        let named = named.chain(tasks.iter().flat_map(|tasks| [&tasks.module, &tasks.at]));
        if let Some(index) = named.chain(ties.iter().flatten()).find(|&&index| index >= modules.len()) {
            return bad(format!("there is no module {index} among {}", modules.len()));
        }
        let mut tied_to: Vec<usize> = (0..modules.len()).collect();
        for tie in ties {
            let mut firsts: Vec<usize> = tie.iter().map(|&index| tied_to[index]).collect();
            firsts.sort_unstable();
            let Some(&first) = firsts.first() else { continue };
            for other in &mut tied_to {
                if firsts.binary_search(other).is_ok() {
                    *other = first;
                }
            }
        }
        let mut placed: Vec<bool> = modules.iter().map(ModuleCost::costs_something).collect();
        for index in values.iter().flat_map(|value| value.to.iter().chain([&value.from])) {
            placed[*index] = true;
        }
        tasks.iter().for_each(|tasks| placed[tasks.at] = true);
        for (index, module) in modules.iter().enumerate() {
            if let Some(other) = module.follows {
                placed[other] |= placed[index];
                placed[index] = false;
            }
        }
        let tree = Self { modules, values, tasks, tied_to, placed };
        if let Some(Tasks { module, at, .. }) =
            tree.tasks.iter().find(|tasks| !tree.above(tasks.at).contains(&tasks.module))
        {
            let [module, at] = [module, at].map(|&index| &tree.modules[index].path);
            return bad(format!("tasks of `{module}` are assigned to `{at}`, which is not part of it"));
        }
        Ok(tree)
    }

    /// All modules, parents first.
    pub fn modules(&self) -> &[ModuleCost] {
        &self.modules
    }

    /// Values between modules.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The costs of modules if they are split.
    pub fn tasks(&self) -> &[Tasks] {
        &self.tasks
    }

    /// The first of the modules that must be on the same partition as this one.
    pub fn tied_to(&self, module: usize) -> usize {
        self.tied_to[module]
    }

    /// Returns modules with a position, in the order of their first calls. A module that is never called comes after
    /// its predecessor in the list.
    pub(super) fn line(&self) -> Vec<usize> {
        let mut last = 0;
        let mut line: Vec<(u64, usize)> = Vec::new();
        for (index, module) in self.modules.iter().enumerate() {
            if self.placed[index] {
                last = module.first_run.unwrap_or(last);
                line.push((last, index));
            }
        }
        line.sort_unstable();
        line.into_iter().map(|(_, index)| index).collect()
    }

    /// The module whose partition this one gets.
    pub(super) fn assigned_module(&self, module: usize) -> usize {
        self.modules[module].follows.unwrap_or(module)
    }

    /// Returns the first and the last position of the modules in each module, given the position of each module in
    /// `place`.
    pub(super) fn extents<T: Ord + Copy>(&self, place: impl Fn(usize) -> Option<T>) -> Vec<Option<(T, T)>> {
        let mut extents: Vec<Option<(T, T)>> = vec![None; self.modules.len()];
        for index in (0..self.modules.len()).rev() {
            let own = place(self.assigned_module(index)).map(|place| (place, place));
            extents[index] = joined(extents[index], own);
            if let Some(parent) = self.modules[index].parent {
                extents[parent] = joined(extents[parent], extents[index]);
            }
        }
        extents
    }

    /// Returns this module and the modules above it, the root first.
    pub(super) fn above(&self, module: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(module), |&index| self.modules[index].parent).collect();
        path.reverse();
        path
    }

    /// Returns a partition for every module, given the partitions of the modules with a position (PART-5).
    pub(super) fn spread(&self, placed: impl Fn(usize) -> Option<u32>) -> Vec<u32> {
        let mut found: Vec<Option<u32>> =
            (0..self.modules.len()).map(|index| placed(self.assigned_module(index))).collect();
        // The first part of a container is the first one along the line, not the first one of the list.
        for module in self.line() {
            let partition = found[module];
            for &above in self.above(module).iter().rev() {
                if found[above].is_some() && above != module {
                    break;
                }
                found[above] = partition;
            }
        }
        let mut all = Vec::with_capacity(found.len());
        for (index, partition) in found.into_iter().enumerate() {
            let above = self.modules[index].parent.map_or(0, |parent| all[parent]);
            all.push(partition.unwrap_or(above));
        }
        all
    }
}

fn joined<T: Ord>(one: Option<(T, T)>, other: Option<(T, T)>) -> Option<(T, T)> {
    match (one, other) {
        (Some(one), Some(other)) => Some((one.0.min(other.0), one.1.max(other.1))),
        (one, other) => one.or(other),
    }
}
