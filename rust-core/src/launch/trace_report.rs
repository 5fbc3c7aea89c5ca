//! `smdrun report`: a pipeline as it ran, beside what the same programs would have taken if each task always took its mean
//! time and transfers none.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

use clap::Parser;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::pipeline::{Action, Costs, Edge, Graph, Kind, Link, Program, Span, Stage, Timeline, grid, simulate, svg};

/// Shows a step of a pipeline from a timeline that was written with `SMD_TIMELINE`, beside its simulation.
#[derive(Debug, Parser)]
#[command(name = "smdrun report")]
pub(super) struct Args {
    /// The file that `SMD_TIMELINE` named
    trace: PathBuf,

    /// Which step, from 0 on; by default the last one that trains
    #[arg(long, value_name = "N")]
    step: Option<usize>,

    /// Columns of the picture
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u16).range(1..))]
    width: u16,

    /// Writes the measured step as an SVG picture as well
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A line of the trace, as far as it matters here.
#[derive(Deserialize)]
struct Line {
    name: String,
    ph: String,
    pid: usize,
    #[serde(default)]
    tid: u64,
    /// Microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: HashMap<String, serde_json::Value>,
}

/// A computation of one rank, in nanoseconds.
#[derive(Clone, Copy)]
struct Task {
    kind: Kind,
    stage: u64,
    microbatch: u64,
    start: u64,
    end: u64,
}

/// What one rank computed in one step.
type Step = Vec<Task>;

/// What `smdrun report` prints.
pub(super) fn show(args: &Args) -> Result<String> {
    let text = std::fs::read_to_string(&args.trace)
        .map_err(|error| Error::io(format!("reading `{}`", args.trace.display()), error))?;
    let ranks = one_pipeline(steps(&text), &args.trace)?;
    let count = ranks.values().map(Vec::len).min().unwrap_or(0);
    let trains = |step: usize| ranks.values().any(|steps| steps[step].iter().any(|task| task.kind != Kind::Forward));
    let step = args.step.or_else(|| (0..count).rev().find(|&step| trains(step))).unwrap_or(count.saturating_sub(1));
    if step >= count {
        return Err(Error::InvalidArgument(format!(
            "`{}` has {count} steps, and no step {step}",
            args.trace.display()
        )));
    }
    let tasks: Vec<&Step> = ranks.values().map(|steps| &steps[step]).collect();
    let measured = measured(&tasks);
    let simulated = simulated(&tasks)?;
    let mut text = format!("step {step} of {count}, ranks {:?}\n", ranks.keys().collect::<Vec<_>>());
    for (what, timeline) in [("measured", &measured), ("simulated from mean times", &simulated)] {
        let milliseconds = timeline.step_time as f64 / 1e6;
        text += &format!("{what}: {milliseconds:.3} ms, bubble {:.1} %\n", 100.0 * timeline.bubble());
        text += &grid(timeline, args.width.into());
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, svg(&measured, "measured, in nanoseconds", 1200))
            .map_err(|error| Error::io(format!("writing `{}`", path.display()), error))?;
    }
    Ok(text)
}

/// For each rank its steps. A step ends where a rank does the same again.
fn steps(text: &str) -> BTreeMap<usize, Vec<Step>> {
    let mut stages: HashMap<(usize, u64), u64> = HashMap::new();
    let mut tasks: BTreeMap<usize, Vec<(u64, Task)>> = BTreeMap::new();
    for line in text.lines() {
        // Lines of a rank that was killed may be anything; the first is `[`.
        let Ok(line) = serde_json::from_str::<Line>(line.trim().trim_end_matches(',')) else { continue };
        if line.name == "thread_name" {
            let name = line.args.get("name").and_then(serde_json::Value::as_str).unwrap_or_default();
            let stage = name.strip_prefix("stage ").and_then(|rest| rest.strip_suffix(" of the pipeline"));
            if let Some(stage) = stage.and_then(|stage| stage.parse().ok()) {
                stages.insert((line.pid, line.tid), stage);
            }
        }
        let kind = match line.name.as_str() {
            "forward" => Kind::Forward,
            "backward" => Kind::Backward,
            "input" => Kind::Input,
            "weight" => Kind::Weight,
            _ => continue,
        };
        let Some(microbatch) = line.args.get("microbatch").and_then(serde_json::Value::as_u64) else { continue };
        if line.ph == "X" {
            let (start, end) = ((line.ts * 1e3) as u64, ((line.ts + line.dur) * 1e3) as u64);
            tasks.entry(line.pid).or_default().push((line.tid, Task { kind, stage: 0, microbatch, start, end }));
        }
    }
    let mut ranks = BTreeMap::new();
    for (rank, mut list) in tasks {
        list.sort_by_key(|(_, task)| task.start);
        let mut steps: Vec<Step> = vec![Vec::new()];
        let mut seen = HashSet::new();
        for (track, mut task) in list {
            let Some(&stage) = stages.get(&(rank, track)) else { continue };
            task.stage = stage;
            if !seen.insert((task.kind, stage, task.microbatch)) {
                steps.push(Vec::new());
                seen = HashSet::from([(task.kind, stage, task.microbatch)]);
            }
            steps.last_mut().expect("it begins with one").push(task);
        }
        ranks.insert(rank, steps);
    }
    ranks
}

/// Of replicas that run the same stages, the one of the lowest ranks.
fn one_pipeline(ranks: BTreeMap<usize, Vec<Step>>, path: &Path) -> Result<BTreeMap<usize, Vec<Step>>> {
    let mut taken: HashSet<u64> = HashSet::new();
    let mut chosen = BTreeMap::new();
    for (rank, steps) in ranks {
        let stages: HashSet<u64> = steps.iter().flatten().map(|task| task.stage).collect();
        if !stages.is_empty() && stages.is_disjoint(&taken) {
            taken.extend(stages);
            chosen.insert(rank, steps);
        }
    }
    if chosen.is_empty() {
        return Err(Error::InvalidArgument(format!("`{}` has no stages of a pipeline", path.display())));
    }
    Ok(chosen)
}

fn measured(ranks: &[&Step]) -> Timeline {
    let all = || ranks.iter().copied().flatten();
    let (start, end) = (all().map(|task| task.start).min().unwrap_or(0), all().map(|task| task.end).max().unwrap_or(0));
    let span = |task: &Task| Span { action: action(task), start: task.start - start, end: task.end - start };
    Timeline {
        spans: ranks.iter().map(|step| step.iter().map(span).collect()).collect(),
        step_time: end - start,
        busy: ranks.iter().map(|step| step.iter().map(|task| task.end - task.start).sum()).collect(),
        peak_bytes: vec![0; ranks.len()],
        active_microbatches: vec![0; ranks.len()],
    }
}

fn action(task: &Task) -> Action {
    Action::compute(task.kind, task.stage as usize, task.microbatch as usize)
}

/// The same lists, each task at the mean time of its stage; stages follow one another.
fn simulated(ranks: &[&Step]) -> Result<Timeline> {
    let count = ranks.iter().copied().flatten().map(|task| task.stage as usize + 1).max().unwrap_or(0);
    let microbatches = ranks.iter().copied().flatten().map(|task| task.microbatch as usize + 1).max().unwrap_or(0);
    let mut stages: Vec<Stage> = Vec::with_capacity(count);
    for stage in 0..count {
        let of = |kinds: &'static [Kind]| {
            let tasks = ranks.iter().copied().flatten().filter(move |task| task.stage as usize == stage);
            let times: Vec<u64> =
                tasks.filter(|task| kinds.contains(&task.kind)).map(|task| task.end - task.start).collect();
            times.iter().sum::<u64>().checked_div(times.len() as u64)
        };
        let Some(rank) = ranks.iter().position(|step| step.iter().any(|task| task.stage as usize == stage)) else {
            return Err(Error::InvalidArgument(format!("nobody ran stage {stage} in this step")));
        };
        let back = of(&[Kind::Backward, Kind::Input]);
        // A stage whose values want no gradient hands on none: an edge from one with a backward would ask for it.
        let from = stage.checked_sub(1).filter(|&from| back.is_some() || !stages[from].backward);
        stages.push(Stage {
            rank,
            costs: Costs {
                forward: of(&[Kind::Forward]).unwrap_or(0),
                input: back.unwrap_or(0),
                weight: of(&[Kind::Weight]).unwrap_or(0),
            },
            activation_bytes: 0,
            inputs: from.map(|from| Edge { from, bytes: 0 }).into_iter().collect(),
            backward: back.is_some(),
        });
    }
    let graph = Graph::new(ranks.len(), microbatches, stages, Link::default())?;
    simulate(&graph, &Program::new(ranks.iter().map(|step| step.iter().map(action).collect()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks of a pipeline, and their replicas, through two steps of GPipe with two microbatches.
    fn trace() -> String {
        let mut text = String::from("[\n");
        for rank in 0..4 {
            let (stage, tid) = (rank % 2, 1000 + rank % 2);
            text += &format!(
                "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":{tid},\"args\":{{\"name\":\"stage {stage} of the pipeline\"}}}},\n"
            );
            for step in 0..2 {
                let base = f64::from(step) * 100.0;
                // A forward takes 10 us and a backward 20.
                let times = if stage == 0 { [0.0, 10.0, 50.0, 70.0] } else { [10.0, 20.0, 30.0, 50.0] };
                for (index, (name, microbatch)) in
                    [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)].into_iter().enumerate()
                {
                    let duration = if name == "forward" { 10.0 } else { 20.0 };
                    text += &format!(
                        "{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":{rank},\"tid\":{tid},\"ts\":{},\"dur\":{duration},\"args\":{{\"microbatch\":{microbatch}}}}},\n",
                        base + times[index]
                    );
                }
            }
        }
        text + "{\"name\":\"rece"
    }

    #[test]
    fn a_step_is_shown_beside_its_simulation() {
        let path = std::env::temp_dir().join(format!("smd-report-{}.json", std::process::id()));
        std::fs::write(&path, trace()).unwrap();
        let args = |words: &[&str]| {
            Args::try_parse_from(["report", path.to_str().unwrap()].iter().chain(words)).expect("the line is valid")
        };
        let text = show(&args(&["--width", "9"])).unwrap();
        let missing = show(&args(&["--step", "2"])).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        let expected = "step 1 of 2, ranks [0, 1]\n\
                        measured: 0.090 ms, bubble 33.3 %\n0 01...AABB\n1 .01AABB..\n\
                        simulated from mean times: 0.090 ms, bubble 33.3 %\n0 01...AABB\n1 .01AABB..\n";
        assert_eq!(text, expected);
        assert!(missing.ends_with("has 2 steps, and no step 2"), "{missing}");
    }
}
