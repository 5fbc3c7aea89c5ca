//! A partition as a table of text.

use std::fmt::Write;

use super::{CostTree, Objective, StageCost, stage_costs};

/// Returns a row for each module with costs that is completely in one partition while the module above it is not, a
/// row for the own costs of each split module, and a row for each partition.
///
/// # Panics
/// If the assignment does not match the tree's modules and the objective's partitions.
pub fn table(tree: &CostTree, assignment: &[u32], objective: &Objective) -> String {
    let modules = tree.modules();
    let mut whole: Vec<bool> = vec![true; modules.len()];
    let mut sums: Vec<StageCost> = vec![StageCost::default(); modules.len()];
    for index in (0..modules.len()).rev() {
        sums[index].add(&modules[index]);
        if let Some(parent) = modules[index].parent {
            whole[parent] &= whole[index] && assignment[index] == assignment[parent];
            let below = sums[index];
            let above = &mut sums[parent];
            above.parameter_bytes += below.parameter_bytes;
            above.state_bytes += below.state_bytes;
            above.activation_bytes += below.activation_bytes;
            above.time += below.time;
        }
    }
    let time: u64 = modules.iter().map(|module| module.time).sum();
    let share = |part: u64| if time > 0 { format!("{:.1} %", 100.0 * part as f64 / time as f64) } else { "-".into() };
    let mut rows = vec![["module", "partition", "parameters", "activations", "time"].map(str::to_owned)];
    let mut row = |name: String, partition: String, cost: &StageCost| {
        let (parameters, activations) = (bytes(cost.parameter_bytes), bytes(cost.activation_bytes));
        rows.push([name, partition, parameters, activations, share(cost.time)]);
    };
    for (index, module) in modules.iter().enumerate() {
        let name = if module.path.is_empty() { "(model)" } else { &module.path };
        let mut own = StageCost::default();
        own.add(module);
        if whole[index] {
            let outermost = module.parent.is_none_or(|parent| !whole[parent]);
            if outermost && sums[index] != StageCost::default() {
                row(name.to_owned(), assignment[index].to_string(), &sums[index]);
            }
        } else if own != StageCost::default() {
            row(format!("{name} itself"), assignment[index].to_string(), &own);
        }
    }
    for (partition, stage) in stage_costs(tree, assignment, objective).iter().enumerate() {
        row(format!("= partition {partition}"), format!("{:.3}", stage.cost), stage);
    }
    let widths: [usize; 5] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut text = String::new();
    for row in &rows {
        let [name, rest @ ..] = row;
        write!(text, "{name:<width$}", width = widths[0]).expect("a string takes everything");
        for (cell, width) in rest.iter().zip(&widths[1..]) {
            write!(text, "  {cell:>width$}").expect("a string takes everything");
        }
        text.push('\n');
    }
    text
}

fn bytes(count: u64) -> String {
    let (mut value, mut unit) = (count as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}
