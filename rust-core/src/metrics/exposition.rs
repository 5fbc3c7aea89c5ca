//! Snapshots in Prometheus' text format, version 0.0.4.

use std::fmt::Write as _;

use super::Snapshot;

/// One metric of all ranks: samples of `series` with the labels that it adds to rank and size.
fn metric<T: std::fmt::Display>(
    text: &mut String,
    (name, kind, help): (&str, &str, &str),
    snapshots: &[Snapshot],
    series: impl Fn(&Snapshot) -> Vec<(String, T)>,
) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    for snapshot in snapshots {
        for (labels, value) in series(snapshot) {
            let _ = writeln!(text, "{name}{{rank=\"{}\",size=\"{}\"{labels}}} {value}", snapshot.rank, snapshot.size);
        }
    }
}

fn seconds(nanoseconds: u64) -> String {
    format!("{}.{:09}", nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000)
}

/// The text for these ranks.
pub(super) fn text(snapshots: &[Snapshot]) -> String {
    let mut text = String::new();
    let alone = |value: u64| vec![(String::new(), value)];
    let label = |name: &str, value: &dyn std::fmt::Display| format!(",{name}=\"{value}\"");
    let head =
        ("smd_steps_total", "counter", "Training steps: backwards with reduced gradients, and steps of pipelines.");
    metric(&mut text, head, snapshots, |of| {
        vec![(label("of", &"reducer"), of.reducer_steps), (label("of", &"pipeline"), of.pipeline_steps)]
    });
    let head = ("smd_operations_total", "counter", "Collectives and messages that this rank has begun.");
    metric(&mut text, head, snapshots, |of| {
        of.operations().map(|(name, calls, _)| (label("operation", &name), calls)).collect()
    });
    let head = ("smd_bytes_total", "counter", "Bytes that this rank has put into them (for `recv`, has taken).");
    metric(&mut text, head, snapshots, |of| {
        of.operations().map(|(name, _, bytes)| (label("operation", &name), bytes)).collect()
    });
    let head =
        ("smd_communication_seconds_total", "counter", "Time in collectives on CPUs, with their waits, on any thread.");
    metric(&mut text, head, snapshots, |of| vec![(String::new(), seconds(of.communication_ns))]);
    let head =
        ("smd_exposed_seconds_total", "counter", "Time in which threads of the script waited for communication.");
    metric(&mut text, head, snapshots, |of| vec![(String::new(), seconds(of.exposed_ns))]);
    let head = ("smd_waited_seconds_total", "counter", "Time that this rank slept because rank `peer` was missing.");
    metric(&mut text, head, snapshots, |of| {
        of.waited_ns.iter().map(|(peer, time)| (label("peer", peer), seconds(*time))).collect()
    });
    let head =
        ("smd_stalls_total", "counter", "Stalls that this rank has reported, and waits that reached their limit.");
    metric(&mut text, head, snapshots, |of| alone(of.stalls));
    let head = ("smd_fallbacks_total", "counter", "Slower paths that were taken.");
    metric(&mut text, head, snapshots, |of| {
        of.fallback_counts().map(|(reason, times)| (label("reason", &reason), times)).collect()
    });
    let head = ("smd_segment_bytes", "gauge", "Shared memory that this rank has created.");
    metric(&mut text, head, snapshots, |of| alone(of.segment_bytes));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_has_its_samples() {
        let snapshot = Snapshot {
            rank: 1,
            size: 2,
            reducer_steps: 3,
            calls: vec![7],
            bytes: vec![28],
            exposed_ns: 1_500_000_000,
            waited_ns: vec![(0, 20)],
            fallbacks: vec![2],
            ..Snapshot::default()
        };
        let text = text(&[snapshot]);
        for line in [
            "# TYPE smd_steps_total counter",
            "smd_steps_total{rank=\"1\",size=\"2\",of=\"reducer\"} 3",
            "smd_operations_total{rank=\"1\",size=\"2\",operation=\"all_reduce\"} 7",
            "smd_bytes_total{rank=\"1\",size=\"2\",operation=\"all_reduce\"} 28",
            "smd_exposed_seconds_total{rank=\"1\",size=\"2\"} 1.500000000",
            "smd_waited_seconds_total{rank=\"1\",size=\"2\",peer=\"0\"} 0.000000020",
            "smd_fallbacks_total{rank=\"1\",size=\"2\",reason=\"synchronous_call\"} 2",
            "smd_segment_bytes{rank=\"1\",size=\"2\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
