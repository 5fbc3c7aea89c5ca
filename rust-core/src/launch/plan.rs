//! `smdrun plan`: shows a pipeline's schedule before training.

use std::path::PathBuf;

use clap::Parser;

use crate::error::{Error, Result};
use crate::pipeline::schedule::{Bounds, Schedule, plan};
use crate::pipeline::{Costs, Graph, LinkCost, StagePlacement, Timeline, grid, simulate, svg};

/// Largest sum of costs, far below an overflow.
const MAX_COST: u64 = 1_000_000_000;
/// Largest number of forwards of a step in a plan; more would need much memory and could not be drawn.
const MAX_FORWARDS: usize = 1 << 22;

/// Shows the schedule of a pipeline with equal stages: step time, bubble, kept activations of each rank, and a picture.
#[derive(Debug, Parser)]
#[command(
    name = "smdrun plan",
    after_help = "In the picture a row is a rank and a column a unit of time: a digit is the forward of a microbatch, a letter its\n\
                  backward, `w` a delayed weight gradient (zero_bubble), `.` waiting."
)]
pub(super) struct PlanArgs {
    /// Ranks of the pipeline
    #[arg(short, long, visible_alias = "pipeline-parallel-degree", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    partitions: u32,

    /// Microbatches of a batch
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=65536))]
    microbatches: u32,

    /// `interleaved` (1F1B), `simple` (GPipe) or `zero_bubble`
    #[arg(long, value_name = "NAME", default_value = "interleaved")]
    pipeline: String,

    /// Stages of each rank; with zero_bubble, every second pass over the ranks is in reverse order
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    stages_per_rank: u32,

    /// Microbatches that a rank may have in flight
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    active_microbatches: Option<u32>,

    /// Activations that a rank may keep, counted per stage and microbatch
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    kept_activations: Option<u64>,

    /// Costs of a stage for one microbatch: forward, gradients of inputs, gradients of weights
    #[arg(long, value_name = "F,I,W", default_value = "1,1,1", value_parser = costs)]
    costs: Costs,

    /// Cost of a transfer between two ranks, in the same unit
    #[arg(long, value_name = "T", default_value = "0", value_parser = clap::value_parser!(u64).range(..=MAX_COST))]
    transfer: u64,

    /// Prints the actions of each rank, with its transfers, one line per rank
    #[arg(long)]
    actions: bool,

    /// Draws the schedule to this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Columns of the picture
    #[arg(long, value_name = "N", default_value = "120")]
    width: u32,
}

/// The output of `smdrun plan`.
pub(super) fn show(args: &PlanArgs) -> Result<String> {
    let schedule: Schedule = args.pipeline.parse()?;
    let (ranks, stages) = (args.partitions as usize, args.stages_per_rank as usize);
    let forwards = ranks * stages * args.microbatches as usize;
    if forwards > MAX_FORWARDS {
        return Err(Error::InvalidArgument(format!(
            "{ranks} partitions of {stages} stages and {} microbatches are {forwards} forwards: at most {MAX_FORWARDS} are \
             planned; ask for fewer microbatches",
            args.microbatches
        )));
    }
    let is_v_shaped = schedule == Schedule::ZeroBubble && stages > 1;
    let placement = if is_v_shaped { StagePlacement::VShaped } else { StagePlacement::Looped };
    let graph = Graph::chain(ranks, stages, placement, args.microbatches as usize, args.costs)?
        .with_link(LinkCost { latency: args.transfer, bytes_per_tick: 0 });
    let bounds = Bounds {
        active_microbatches: args.active_microbatches.map(|n| n as usize),
        // In a chain, each stage keeps one byte.
        memory_bytes: args.kept_activations,
    };
    let program = plan(&graph, schedule, bounds)?;
    let timeline = simulate(&graph, &program)?;
    let title = format!(
        "{schedule}, {ranks} rank{}, {stages} stage{} each, {} microbatch{}",
        if ranks == 1 { "" } else { "s" },
        if stages == 1 { "" } else { "s" },
        args.microbatches,
        if args.microbatches == 1 { "" } else { "es" },
    );
    if let Some(path) = &args.svg {
        let drawing = svg(&[(&title, &timeline)], 1200);
        std::fs::write(path, drawing).map_err(|error| Error::io(format!("writing `{}`", path.display()), error))?;
    }
    let mut text = summary(&title, &timeline);
    text += &grid(&timeline, args.width as usize);
    if args.actions {
        text += &program.to_string();
    }
    Ok(text)
}

fn summary(title: &str, timeline: &Timeline) -> String {
    let mut text = format!("{title}: {} units, bubble {:.1} %\n", timeline.step_time, 100.0 * timeline.bubble());
    let range = |values: &mut dyn Iterator<Item = u64>| {
        let (least, most) = values.fold((u64::MAX, 0), |(least, most), value| (least.min(value), most.max(value)));
        if least == most { most.to_string() } else { format!("{least} to {most}") }
    };
    text += &format!(
        "a rank computes for {} units, keeps the activations of {} stages at most and has {} microbatches under way at most\n",
        range(&mut timeline.busy.iter().copied()),
        range(&mut timeline.peak_bytes.iter().copied()),
        range(&mut timeline.active_microbatches.iter().map(|&count| count as u64)),
    );
    text
}

fn costs(text: &str) -> std::result::Result<Costs, String> {
    let numbers: Option<Vec<u64>> = text.split(',').map(|number| number.trim().parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[forward, input, weight]) if [forward, input, weight].iter().all(|&cost| cost <= MAX_COST) => {
            Ok(Costs { forward, input, weight })
        }
        _ => Err(format!("expected three numbers from 0 to {MAX_COST}, such as 1,1,1")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(line: &str) -> Result<String> {
        show(&PlanArgs::try_parse_from(line.split(' ')).expect("the line is valid"))
    }

    #[test]
    fn a_schedule_is_shown() {
        let text = shown("plan -p 3 -m 4 --pipeline simple --actions").unwrap();
        let expected = "simple, 3 ranks, 1 stage each, 4 microbatches: 18 units, bubble 33.3 %\n\
                        a rank computes for 12 units, keeps the activations of 4 stages at most and has 4 microbatches under way at most\n\
                        0 0123......AABBCCDD\n1 .0123...AABBCCDD..\n2 ..0123AABBCCDD....\n\
                        0: 0F0 0SF0>1 0F1 0SF1>1";
        assert!(text.starts_with(expected), "{text}");
        let text = shown("plan -p 3 -m 4 --pipeline simple --kept-activations 2").unwrap();
        assert!(text.contains("keeps the activations of 2 stages at most"), "{text}");
    }

    #[test]
    fn zero_bubble_goes_there_and_back() {
        let text = shown("plan --partitions 2 --microbatches 4 --pipeline zero_bubble --stages-per-rank 2").unwrap();
        assert!(
            text.starts_with("zero_bubble, 2 ranks, 2 stages each, 4 microbatches: 25 units, bubble 4.0 %"),
            "{text}"
        );
    }

    #[test]
    fn a_picture_is_drawn() {
        let folder = std::env::temp_dir().join(format!("smd-plan-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("plan.svg");
        shown(&format!("plan -p 2 -m 3 --svg {}", path.display())).unwrap();
        let drawing = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(drawing.starts_with("<svg ") && drawing.trim_end().ends_with("</svg>"));
        assert_eq!(drawing.matches("<title>").count(), 2 * 2 * 3, "a box for each forward and backward");
    }

    #[test]
    fn bad_lines_are_refused() {
        for line in ["plan", "plan -p 0", "plan -p 2 -m 0", "plan -p 2 --costs 1,1", "plan -p 2 --costs 1,1,-1"] {
            assert!(PlanArgs::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
        assert!(PlanArgs::try_parse_from("plan -p 2 --transfer 18446744073709551615".split(' ')).is_err());
        let error = shown("plan -p 4096 -m 65536").unwrap_err().to_string();
        assert!(error.contains("268435456 forwards: at most 4194304 are planned"), "{error}");
        let error = shown("plan -p 2 --pipeline 1f1b").unwrap_err().to_string();
        assert_eq!(error, "`pipeline` is one of `simple`, `interleaved`, `zero_bubble`, not `1f1b`");
    }
}
