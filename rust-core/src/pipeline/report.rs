//! `smdrun report`: shows a pipeline as it ran, and as a simulation of the same programs in which each task takes its
//! mean time and transfers take none.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::PathBuf;

use clap::Parser;
use serde::Deserialize;

use crate::error::{Error, Result};
use crate::pipeline::{
    Action, ActionKind, Costs, Edge, Graph, LinkCost, Program, Stage, TaskSpan, Timeline, grid, simulate, svg,
};
use crate::trace::{INPUT_STAGE, STAGE_INPUT, SYNCHRONOUS};

/// Shows a step of a pipeline from a timeline that was written with `SMD_TIMELINE`, beside its simulation.
#[derive(Debug, Parser)]
#[command(name = "smdrun report")]
pub(crate) struct ReportArgs {
    /// The file that `SMD_TIMELINE` named
    trace: PathBuf,

    /// Number of the step, from 0; default: the last training step
    #[arg(long, value_name = "N")]
    step: Option<usize>,

    /// Columns of the picture
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u16).range(1..))]
    width: u16,

    /// Also writes both as an SVG picture
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// An event of the trace, with the fields that are used here.
#[derive(Deserialize)]
struct TraceLine {
    name: String,
    ph: String,
    pid: usize,
    #[serde(default)]
    tid: u64,
    /// In microseconds.
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    args: HashMap<String, serde_json::Value>,
}

/// A computation of one rank, in nanoseconds.
#[derive(Clone, Copy)]
struct RecordedTask {
    kind: ActionKind,
    stage: u64,
    microbatch: u64,
    start: u64,
    end: u64,
}

/// The computations of one rank in one step.
#[derive(Default)]
struct RecordedStep {
    tasks: Vec<RecordedTask>,
    /// Edges between stages.
    edges: BTreeSet<(u64, u64)>,
}

/// Arguments of an event about a stage.
enum StageRecord {
    Task(RecordedTask),
    /// The stage starts to use the output of stage `from`.
    Input {
        from: u64,
        at: u64,
    },
}

impl StageRecord {
    fn start(&self) -> u64 {
        match self {
            StageRecord::Task(task) => task.start,
            StageRecord::Input { at, .. } => *at,
        }
    }
}

/// The output of `smdrun report`.
pub(crate) fn show(args: &ReportArgs) -> Result<String> {
    let text_of_trace = std::fs::read_to_string(&args.trace)
        .map_err(|error| Error::io(format!("reading `{}`", args.trace.display()), error))?;
    let all = steps(&text_of_trace);
    if all.values().all(|steps| steps.iter().all(|step| step.tasks.is_empty())) {
        return Err(Error::InvalidArgument(format!("`{}` has no stages of a pipeline", args.trace.display())));
    }
    let whole = whole_steps(&all);
    let count = whole.values().copied().max().unwrap_or(0);
    let trains = |step: usize| {
        one_pipeline(&all, &whole, step)
            .values()
            .any(|own| own.tasks.iter().any(|task| task.kind != ActionKind::Forward))
    };
    let step = args.step.or_else(|| (0..count).rev().find(|&step| trains(step))).unwrap_or(count.saturating_sub(1));
    if step >= count {
        return Err(Error::InvalidArgument(format!(
            "`{}` has {count} steps, and no step {step}",
            args.trace.display()
        )));
    }
    let ranks = one_pipeline(&all, &whole, step);
    let step_of: Vec<&RecordedStep> = ranks.values().copied().collect();
    let measured = measured(&step_of);
    let simulated = simulated(&step_of)?;
    let mut text = format!("step {step} of {count}, ranks {:?}\n", ranks.keys().collect::<Vec<_>>());
    for (what, timeline) in [("measured", &measured), ("simulated from mean times", &simulated)] {
        let milliseconds = timeline.step_time as f64 / 1e6;
        text += &format!("{what}: {milliseconds:.3} ms, bubble {:.1} %\n", 100.0 * timeline.bubble());
        text += &grid(timeline, args.width.into());
    }
    if let Some(calls) = calls_that_left(&text_of_trace) {
        text += &format!("{calls} calls of all steps were synchronous: all ranks waited for each\n");
    }
    if let Some(path) = &args.svg {
        let both = [("measured, in nanoseconds", &measured), ("simulated from mean times, in nanoseconds", &simulated)];
        std::fs::write(path, svg(&both, 1200))
            .map_err(|error| Error::io(format!("writing `{}`", path.display()), error))?;
    }
    Ok(text)
}

/// A text with the number of synchronous calls, if there were any. Every rank of a pipeline has an event
/// for each.
fn calls_that_left(text: &str) -> Option<usize> {
    let mut ranks: HashMap<usize, usize> = HashMap::new();
    for line in text.lines() {
        let Ok(line) = serde_json::from_str::<TraceLine>(line.trim().trim_end_matches(',')) else { continue };
        if line.name == SYNCHRONOUS && line.ph == "X" {
            *ranks.entry(line.pid).or_default() += 1;
        }
    }
    ranks.into_values().max()
}

/// The steps of each rank. A new step begins where a rank repeats a task.
fn steps(text: &str) -> BTreeMap<usize, Vec<RecordedStep>> {
    let mut stages: HashMap<(usize, u64), u64> = HashMap::new();
    let mut records: BTreeMap<usize, Vec<(u64, StageRecord)>> = BTreeMap::new();
    for line in text.lines() {
        // The file of a killed rank may end with an invalid line; the first line is `[`.
        let Ok(line) = serde_json::from_str::<TraceLine>(line.trim().trim_end_matches(',')) else { continue };
        if line.name == "thread_name" {
            let name = line.args.get("name").and_then(serde_json::Value::as_str).unwrap_or_default();
            let stage = name.strip_prefix("stage ").and_then(|rest| rest.strip_suffix(" of the pipeline"));
            if let Some(stage) = stage.and_then(|stage| stage.parse().ok()) {
                stages.insert((line.pid, line.tid), stage);
            }
        }
        let number = |key| line.args.get(key).and_then(serde_json::Value::as_u64);
        let (start, end) = ((line.ts * 1e3) as u64, ((line.ts + line.dur) * 1e3) as u64);
        if let (STAGE_INPUT, Some(from)) = (line.name.as_str(), number(INPUT_STAGE)) {
            records.entry(line.pid).or_default().push((line.tid, StageRecord::Input { from, at: start }));
        }
        let kind = match line.name.as_str() {
            "forward" => ActionKind::Forward,
            "backward" => ActionKind::Backward,
            "input" => ActionKind::Input,
            "weight" => ActionKind::Weight,
            _ => continue,
        };
        if let ("X", Some(microbatch)) = (line.ph.as_str(), number("microbatch")) {
            let task = RecordedTask { kind, stage: 0, microbatch, start, end };
            records.entry(line.pid).or_default().push((line.tid, StageRecord::Task(task)));
        }
    }
    let mut ranks = BTreeMap::new();
    for (rank, mut list) in records {
        // An event with the inputs of a forward follows it and has the same start.
        list.sort_by_key(|(_, records)| records.start());
        let mut steps = vec![RecordedStep::default()];
        let mut seen = HashSet::new();
        for (track, records) in list {
            let Some(&stage) = stages.get(&(rank, track)) else { continue };
            match records {
                StageRecord::Task(task) => {
                    if !seen.insert((task.kind, stage, task.microbatch)) {
                        steps.push(RecordedStep::default());
                        seen = HashSet::from([(task.kind, stage, task.microbatch)]);
                    }
                    steps.last_mut().expect("it begins with one").tasks.push(RecordedTask { stage, ..task });
                }
                StageRecord::Input { from, .. } => {
                    steps.last_mut().expect("it begins with one").edges.insert((from, stage));
                }
            }
        }
        ranks.insert(rank, steps);
    }
    ranks
}

/// For each rank, the number of steps that all ranks of its pipeline have. The first step shows which ranks are
/// replicas; these may have different numbers of steps.
fn whole_steps(all: &BTreeMap<usize, Vec<RecordedStep>>) -> BTreeMap<usize, usize> {
    let mut pipelines: Vec<(HashSet<u64>, Vec<usize>)> = Vec::new();
    for (&rank, steps) in all {
        let stages = stages_of(&steps[0]);
        match pipelines.iter_mut().find(|(taken, _)| taken.is_disjoint(&stages)) {
            Some((taken, ranks)) => {
                taken.extend(stages);
                ranks.push(rank);
            }
            None => pipelines.push((stages, vec![rank])),
        }
    }
    let count = |ranks: &[usize]| ranks.iter().map(|rank| all[rank].len()).min().unwrap_or(0);
    pipelines.iter().flat_map(|(_, ranks)| ranks.iter().map(|&rank| (rank, count(ranks)))).collect()
}

fn stages_of(step: &RecordedStep) -> HashSet<u64> {
    step.tasks.iter().map(|task| task.stage).collect()
}

/// One pipeline of a step: of replicas that ran the same stages completely, the one with the lowest ranks. In another
/// step, a stage may be on another rank.
fn one_pipeline<'a>(
    all: &'a BTreeMap<usize, Vec<RecordedStep>>,
    whole: &BTreeMap<usize, usize>,
    step: usize,
) -> BTreeMap<usize, &'a RecordedStep> {
    let mut taken: HashSet<u64> = HashSet::new();
    let mut chosen = BTreeMap::new();
    for (&rank, steps) in all.iter().filter(|(rank, _)| whole[*rank] > step) {
        let stages = stages_of(&steps[step]);
        if !stages.is_empty() && stages.is_disjoint(&taken) {
            taken.extend(stages);
            chosen.insert(rank, &steps[step]);
        }
    }
    chosen
}

fn tasks<'a>(ranks: &'a [&RecordedStep]) -> impl Iterator<Item = &'a RecordedTask> {
    ranks.iter().flat_map(|step| &step.tasks)
}

fn measured(ranks: &[&RecordedStep]) -> Timeline {
    let all = || tasks(ranks);
    let (start, end) = (all().map(|task| task.start).min().unwrap_or(0), all().map(|task| task.end).max().unwrap_or(0));
    let span =
        |task: &RecordedTask| TaskSpan { action: action(task), start: task.start - start, end: task.end - start };
    Timeline {
        spans: ranks.iter().map(|step| step.tasks.iter().map(span).collect()).collect(),
        step_time: end - start,
        busy: ranks.iter().map(|step| step.tasks.iter().map(|task| task.end - task.start).sum()).collect(),
        peak_bytes: vec![0; ranks.len()],
        active_microbatches: vec![0; ranks.len()],
    }
}

fn action(task: &RecordedTask) -> Action {
    Action::compute(task.kind, task.stage as usize, task.microbatch as usize)
}

/// Programs with the same tasks, each with the mean time of its stage. If the trace does not contain the edges
/// between stages, the stages form a chain.
fn simulated(ranks: &[&RecordedStep]) -> Result<Timeline> {
    let count = tasks(ranks).map(|task| task.stage as usize + 1).max().unwrap_or(0);
    let microbatches = tasks(ranks).map(|task| task.microbatch as usize + 1).max().unwrap_or(0);
    let mut edges: BTreeSet<(u64, u64)> = ranks.iter().flat_map(|step| step.edges.iter().copied()).collect();
    if edges.is_empty() {
        edges = (1..count as u64).map(|stage| (stage - 1, stage)).collect();
    }
    let mut stages: Vec<Stage> = Vec::with_capacity(count);
    for stage in 0..count {
        let of = |kinds: &'static [ActionKind]| {
            let times: Vec<u64> = tasks(ranks)
                .filter(|task| task.stage as usize == stage && kinds.contains(&task.kind))
                .map(|task| task.end - task.start)
                .collect();
            times.iter().sum::<u64>().checked_div(times.len() as u64)
        };
        let Some(rank) = ranks.iter().position(|step| step.tasks.iter().any(|task| task.stage as usize == stage))
        else {
            return Err(Error::InvalidArgument(format!("no rank ran stage {stage} in this step")));
        };
        let back = of(&[ActionKind::Backward, ActionKind::Input]);
        // A stage without a backward passes no gradient on, so a stage with a backward cannot depend on it through
        // this edge.
        let hands_on = |from: &usize| *from < stage && (back.is_some() || !stages[*from].backward);
        let inputs = edges.iter().filter(|edge| edge.1 == stage as u64).map(|edge| edge.0 as usize).filter(hands_on);
        let inputs = inputs.map(|from| Edge { from, bytes: 0 }).collect();
        stages.push(Stage {
            rank,
            costs: Costs {
                forward: of(&[ActionKind::Forward]).unwrap_or(0),
                input: back.unwrap_or(0),
                weight: of(&[ActionKind::Weight]).unwrap_or(0),
            },
            activation_bytes: 0,
            waiting_bytes: 0,
            inputs,
            backward: back.is_some(),
        });
    }
    let graph = Graph::new(ranks.len(), microbatches, stages, LinkCost::default())?;
    simulate(&graph, &Program::new(ranks.iter().map(|step| step.tasks.iter().map(action).collect()).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, name: &str, words: &[&str]) -> Result<String> {
        let path = std::env::temp_dir().join(format!("smd-report-{}-{name}.json", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let args = ReportArgs::try_parse_from(["report", path.to_str().unwrap()].iter().chain(words));
        let result = show(&args.expect("the line is valid"));
        std::fs::remove_file(&path).unwrap();
        result
    }

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
        let text = shown(&trace(), "chain", &["--width", "9"]).unwrap();
        let missing = shown(&trace(), "missing", &["--step", "2"]).unwrap_err().to_string();
        let expected = "step 1 of 2, ranks [0, 1]\n\
                        measured: 0.090 ms, bubble 33.3 %\n0 01...AABB\n1 .01AABB..\n\
                        simulated from mean times: 0.090 ms, bubble 33.3 %\n0 01...AABB\n1 .01AABB..\n";
        assert_eq!(text, expected);
        let picture = std::env::temp_dir().join(format!("smd-report-{}.svg", std::process::id()));
        shown(&trace(), "drawn", &["--svg", picture.to_str().unwrap()]).unwrap();
        let drawing = std::fs::read_to_string(&picture).unwrap();
        std::fs::remove_file(&picture).unwrap();
        assert_eq!(drawing.matches("<title>").count(), 2 * 2 * 4, "two ranks, measured and simulated");
        assert!(missing.ends_with("has 2 steps, and no step 2"), "{missing}");
    }

    /// Every rank of a pipeline waits, and has a line for it.
    #[test]
    fn calls_that_left_the_pipeline_are_counted() {
        let mut text = trace();
        text.truncate(text.rfind('{').unwrap());
        for rank in 0..2 {
            for at in [3, 5] {
                text += &format!(
                    "{{\"name\":\"synchronous\",\"ph\":\"X\",\"pid\":{rank},\"tid\":{},\"ts\":{at},\"dur\":1,\"args\":{{\"microbatch\":0}}}},\n",
                    1000 + rank
                );
            }
        }
        let shown = shown(&text, "left", &["--width", "9"]).unwrap();
        assert!(shown.ends_with("\n2 calls of all steps were synchronous: all ranks waited for each\n"), "{shown}");
    }

    /// A replica with fewer batches, or one of whose ranks died, does not limit the steps of the others.
    #[test]
    fn a_replica_may_be_shorter() {
        let without = |rank: usize| -> String {
            let time = |line: &str| line.split_once("\"ts\":")?.1.split_once(',')?.0.parse::<f64>().ok();
            let early = |line: &&str| !line.contains(&format!("\"pid\":{rank},")) || time(line) < Some(100.0);
            trace().lines().filter(early).map(|line| format!("{line}\n")).collect()
        };
        let first = |rank: usize| {
            let text = shown(&without(rank), &format!("shorter-{rank}"), &["--width", "9"]).unwrap();
            text.lines().next().unwrap().to_owned()
        };
        assert_eq!((first(1), first(2)), ("step 1 of 2, ranks [2, 3]".into(), "step 1 of 2, ranks [0, 1]".into()));
    }

    /// A stage may change its rank between steps; the two ranks are not replicas.
    #[test]
    fn replicas_are_told_apart_step_by_step() {
        let mut text = String::from("[\n");
        for rank in 0..2 {
            for stage in 0..2 {
                text += &format!(
                    "{{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":{rank},\"tid\":{stage},\"args\":{{\"name\":\"stage {stage} of the pipeline\"}}}},\n"
                );
            }
            // In the first step, rank 0 runs stages 0, 1 and then the next one.
            for (step, stage) in [rank, 1 - rank, 1 - rank].into_iter().enumerate() {
                for (name, start) in [("forward", 0), ("backward", 30)] {
                    let ts = 100 * step + start + 10 * usize::from(stage == 1 && start == 0);
                    text += &format!(
                        "{{\"name\":\"{name}\",\"ph\":\"X\",\"pid\":{rank},\"tid\":{stage},\"ts\":{ts},\"dur\":10,\"args\":{{\"microbatch\":0}}}},\n"
                    );
                }
            }
        }
        let text = shown(&text, "steps", &["--width", "4"]).unwrap();
        assert!(text.contains(", ranks [0, 1]\n"), "{text}");
    }

    /// Three ranks with one stage each and one microbatch: 1 and 2 both use the value of 0, and run in parallel.
    #[test]
    fn stages_wait_for_those_whose_values_they_take() {
        let mut text = String::from("[\n");
        let mut line = |rank: usize, rest: &str| text += &format!("{{\"pid\":{rank},\"tid\":{rank},{rest}}},\n");
        for rank in 0..3 {
            let name = format!("\"args\":{{\"name\":\"stage {rank} of the pipeline\"}}");
            line(rank, &format!("\"name\":\"thread_name\",\"ph\":\"M\",{name}"));
            for step in 0..2 {
                let start = step * 100 + if rank == 0 { 0 } else { 10 };
                let span = |name: &str, duration: u32, args: &str| {
                    format!("\"name\":\"{name}\",\"ph\":\"X\",\"ts\":{start},\"dur\":{duration},\"args\":{{{args}}}")
                };
                line(rank, &span("forward", 10, "\"microbatch\":0"));
                if rank > 0 {
                    line(rank, &span(STAGE_INPUT, 0, &format!("\"{INPUT_STAGE}\":0")));
                }
            }
        }
        let beside = shown(&text, "beside", &["--width", "2"]).unwrap();
        assert!(beside.ends_with("simulated from mean times: 0.020 ms, bubble 50.0 %\n0 0.\n1 .0\n2 .0\n"), "{beside}");
        let chain: String =
            text.lines().filter(|line| !line.contains(STAGE_INPUT)).map(|line| format!("{line}\n")).collect();
        let chain = shown(&chain, "unsaid", &["--width", "3"]).unwrap();
        assert!(chain.contains("simulated from mean times: 0.030 ms"), "{chain}");
    }
}
