//! The timeline of collectives by name, in Horovod's format: a trace process for each name, with its negotiation, the
//! moments at which ranks became ready, and its operation.
//!
//! - HTL-1: rank 0 writes the timeline, for all groups that it is a member of.
//! - HTL-2: the file is a valid JSON list after every event: the next event overwrites the closing bracket.
//! - HTL-3: if no timeline is written, a call costs one atomic load.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::description::Description;
use crate::buffer::TensorView;
use crate::collectives::{BatchPhase, MakeOutputs, PhaseListener, Request};
use crate::error::{Error, Result};

static ENABLED: AtomicBool = AtomicBool::new(false);
static CURRENT: Mutex<Option<NegotiationTimeline>> = Mutex::new(None);

struct NegotiationTimeline {
    path: String,
    start: Instant,
    mark_cycles: bool,
    /// The number of each name's trace process.
    names: HashMap<String, usize>,
    events: Option<Sender<Vec<Value>>>,
    writer: Option<JoinHandle<()>>,
}

/// Title of a name's operation, and arguments of its end event.
#[derive(Clone, Debug)]
pub(super) struct TracedName {
    pub(super) name: String,
    operation: String,
    dtype: &'static str,
    /// For rows whose number depends on all ranks: without the number.
    shape: Vec<u64>,
}

impl TracedName {
    /// None while no timeline is written.
    pub(super) fn new(name: &str, description: &Description) -> Option<Self> {
        enabled().then(|| Self {
            name: name.to_owned(),
            operation: description.kind.capitals(),
            dtype: description.dtype.name(),
            shape: description.shape.clone(),
        })
    }
}

/// Whether a timeline is written.
#[inline]
pub(crate) fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Starts a timeline in the file `path`, and ends the current one; does nothing if that is the same file.
/// `mark_cycles` adds an event for each answer, which corresponds to a cycle of Horovod.
///
/// # Errors
/// [`Error::Io`] if the file cannot be written, or the thread cannot be started.
pub fn start(path: &str, mark_cycles: bool) -> Result<()> {
    let mut current = CURRENT.lock();
    if current.as_ref().is_some_and(|timeline| timeline.path == path) {
        return Ok(());
    }
    end(current.take());
    let io = |error| Error::io(format!("cannot write the timeline `{path}`"), error);
    let mut file = File::create(path).map_err(io)?;
    file.write_all(b"[\n\n]").map_err(io)?;
    let (sender, receiver) = channel();
    let writer = std::thread::Builder::new()
        .name("smd-timeline".into())
        .spawn(move || write(&receiver, &mut file))
        .map_err(|error| Error::io("cannot start the timeline's thread", error))?;
    let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
    let first = vec![
        json!({"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": epoch}}),
        json!({"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}}),
    ];
    let timeline = NegotiationTimeline {
        path: path.to_owned(),
        start: Instant::now(),
        mark_cycles,
        names: HashMap::new(),
        events: Some(sender),
        writer: Some(writer),
    };
    timeline.send(first);
    *current = Some(timeline);
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Ends the timeline: when this returns, the file has every event so far. Does nothing if there is none.
pub fn stop() {
    end(CURRENT.lock().take());
}

fn end(timeline: Option<NegotiationTimeline>) {
    ENABLED.store(false, Ordering::Relaxed);
    let Some(mut timeline) = timeline else { return };
    drop(timeline.events.take());
    if let Some(writer) = timeline.writer.take() {
        // A writer that panicked has lost its events, but the job continues.
        let _ = writer.join();
    }
}

fn write(events: &Receiver<Vec<Value>>, file: &mut File) {
    let mut is_first = true;
    while let Ok(batch) = events.recv() {
        let mut text = String::new();
        for event in batch.into_iter().chain(events.try_iter().take(256).flatten()) {
            text.push_str(if std::mem::take(&mut is_first) { "" } else { ",\n" });
            text.push_str(&event.to_string());
        }
        text.push_str("\n]");
        // Overwrites the newline and the bracket (HTL-2).
        let written = file.seek(SeekFrom::End(-2)).and_then(|_| file.write_all(text.as_bytes()));
        if let Err(error) = written {
            tracing::warn!("the timeline ends here: {error}");
            ENABLED.store(false, Ordering::Relaxed);
            return;
        }
    }
}

impl NegotiationTimeline {
    fn send(&self, events: Vec<Value>) {
        if let Some(sender) = &self.events {
            // The writer ends after an error, which it has logged.
            let _ = sender.send(events);
        }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// The trace process of a name, and its metadata event if it is new.
    fn process(&mut self, name: &str) -> (usize, Vec<Value>) {
        if let Some(&pid) = self.names.get(name) {
            return (pid, Vec::new());
        }
        let pid = self.names.len() + 1;
        self.names.insert(name.to_owned(), pid);
        let introduction = vec![
            json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}),
            json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}),
        ];
        (pid, introduction)
    }
}

fn with(name: &str, events: impl FnOnce(&NegotiationTimeline, usize, u64) -> Vec<Value>) {
    if let Some(timeline) = &mut *CURRENT.lock() {
        let (pid, mut all) = timeline.process(name);
        all.extend(events(timeline, pid, timeline.now()));
        timeline.send(all);
    }
}

/// This member submits a name.
pub(super) fn negotiates(traced: &TracedName, rank: usize) {
    let begin = format!("NEGOTIATE_{}", traced.operation);
    with(&traced.name, |_, pid, ts| {
        vec![json!({"ph": "B", "name": begin, "ts": ts, "pid": pid}), ready(pid, ts, rank)]
    });
}

fn ready(pid: usize, ts: u64, rank: usize) -> Value {
    json!({"ph": "X", "name": rank.to_string(), "ts": ts, "pid": pid, "dur": 0})
}

/// Other members, given by their ranks in the group, are ready for a name.
pub(super) fn note_ready(name: &str, members: Range<usize>, ranks: &[usize]) {
    with(name, |_, pid, ts| ranks[members].iter().map(|rank| ready(pid, ts, *rank)).collect());
}

/// The operation of names that all members agreed on, from then to its end.
pub(super) struct Traces {
    /// Name of the transport: `SHM`.
    carrier: &'static str,
    names: Vec<Arc<Trace>>,
}

/// A name, and which collectives of the operation belong to it.
#[derive(Debug)]
struct Trace {
    traced: TracedName,
    places: Range<usize>,
    /// The activity of its collectives.
    runs: String,
    /// An activity has begun and not ended.
    is_active: AtomicBool,
    /// Size of its first output, if it is known only after the exchange of rows.
    rows: OnceLock<u64>,
}

/// Records the sizes of outputs when they are allocated.
#[derive(Debug)]
struct Allocates {
    trace: Arc<Trace>,
    outputs: Arc<dyn MakeOutputs>,
}

impl MakeOutputs for Allocates {
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>> {
        self.trace.switch_activity(Some("ALLOCATE_OUTPUT"));
        let made = self.outputs.make(rows);
        self.trace.rows.get_or_init(|| rows.iter().sum::<usize>() as u64);
        self.trace.switch_activity(Some(&self.trace.runs));
        made
    }
}

impl Traces {
    pub(super) fn new(carrier: &'static str) -> Self {
        Self { carrier, names: Vec::new() }
    }

    /// All members agree on this operation, whose collectives are `requests`. On the CPU, it waits for its turn from
    /// now on; for a device, the start is not known.
    pub(super) fn add(&mut self, traced: TracedName, places: Range<usize>, on_device: bool, requests: &mut [Request]) {
        with(&traced.name, |_, pid, ts| {
            vec![
                json!({"ph": "E", "ts": ts, "pid": pid}),
                json!({"ph": "B", "name": traced.operation, "ts": ts, "pid": pid}),
            ]
        });
        let runs = format!("{}_{}", self.carrier, traced.operation);
        let trace = Arc::new(Trace { traced, places, runs, is_active: false.into(), rows: OnceLock::new() });
        trace.switch_activity(Some(if on_device { &trace.runs } else { "QUEUE" }));
        for request in requests {
            if let Request::AllGatherRows { outputs, .. } | Request::AllToAllRows { outputs, .. } = request {
                *outputs = Arc::new(Allocates { trace: Arc::clone(&trace), outputs: Arc::clone(outputs) });
            }
        }
        self.names.push(trace);
    }

    /// The operation is complete, or has failed.
    pub(super) fn end(&self) {
        for trace in &self.names {
            trace.switch_activity(None);
            let TracedName { name, dtype, shape, .. } = &trace.traced;
            let shape: Vec<String> = trace.rows.get().into_iter().chain(shape).map(u64::to_string).collect();
            let shape = format!("[{}]", shape.join(", "));
            with(name, |_, pid, ts| {
                vec![json!({"ph": "E", "ts": ts, "pid": pid, "args": {"dtype": dtype, "shape": shape}})]
            });
        }
    }
}

impl Trace {
    /// Ends the current activity and begins another one.
    fn switch_activity(&self, activity: Option<&str>) {
        let was_active = self.is_active.swap(activity.is_some(), Ordering::Relaxed);
        with(&self.traced.name, |_, pid, ts| {
            let end = was_active.then(|| json!({"ph": "E", "ts": ts, "pid": pid}));
            let begin = activity.map(|activity| json!({"ph": "B", "name": activity, "ts": ts, "pid": pid}));
            end.into_iter().chain(begin).collect()
        });
    }
}

impl PhaseListener for Traces {
    fn enters(&self, phase: BatchPhase, places: &Range<usize>) {
        let concerned = |trace: &&Arc<Trace>| trace.places.start < places.end && places.start < trace.places.end;
        for trace in self.names.iter().filter(concerned) {
            match phase {
                BatchPhase::CopyIn => trace.switch_activity(Some("MEMCPY_IN_FUSION_BUFFER")),
                BatchPhase::Run => trace.switch_activity(Some(&trace.runs)),
                BatchPhase::CopyOut => trace.switch_activity(Some("MEMCPY_OUT_FUSION_BUFFER")),
                BatchPhase::Over => trace.switch_activity(None),
            }
        }
    }
}

/// A name failed in its negotiation.
pub(super) fn fails(traced: &TracedName) {
    with(&traced.name, |_, pid, ts| vec![json!({"ph": "E", "ts": ts, "pid": pid})]);
}

/// An answer arrived.
pub(super) fn cycle() {
    if let Some(timeline) = &*CURRENT.lock()
        && timeline.mark_cycles
    {
        let ts = timeline.now();
        timeline.send(vec![json!({"ph": "i", "name": "CYCLE_START", "ts": ts, "pid": 0, "s": "g"})]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_file_is_a_list_after_every_event() {
        let folder = std::env::temp_dir().join(format!("smd-timeline-{}", std::process::id()));
        let path = folder.to_str().unwrap().to_owned();
        let read = || serde_json::from_str::<Vec<Value>>(&std::fs::read_to_string(&path).unwrap());
        start(&path, true).unwrap();
        let traced = TracedName {
            name: "allreduce.w".into(),
            operation: "ALLREDUCE".into(),
            dtype: "float32",
            shape: vec![2, 3],
        };
        negotiates(&traced, 0);
        note_ready("allreduce.w", 1..3, &[0, 4, 5]);
        let mut traces = Traces::new("SHM");
        traces.add(traced, 0..2, false, &mut []);
        // The writer may be in the middle of an event: then the file is read again, still before the timeline ends.
        let deadline = Instant::now() + Duration::from_secs(10);
        while let Err(error) = read() {
            assert!(Instant::now() < deadline, "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        for phase in [BatchPhase::CopyIn, BatchPhase::Run, BatchPhase::CopyOut, BatchPhase::Over] {
            traces.enters(phase, &(1..2));
            traces.enters(phase, &(2..3));
        }
        traces.end();
        cycle();
        stop();
        stop();
        cycle();
        let events = read().unwrap();
        std::fs::remove_file(&path).unwrap();
        let names: Vec<&str> = events.iter().filter_map(|event| event["name"].as_str()).collect();
        assert_eq!(
            names,
            [
                "process_name",
                "process_sort_index",
                "process_name",
                "process_sort_index",
                "NEGOTIATE_ALLREDUCE",
                "0",
                "4",
                "5",
                "ALLREDUCE",
                "QUEUE",
                "MEMCPY_IN_FUSION_BUFFER",
                "SHM_ALLREDUCE",
                "MEMCPY_OUT_FUSION_BUFFER",
                "CYCLE_START"
            ]
        );
        let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
        assert_eq!((count("B"), count("E")), (6, 6));
        assert_eq!(events[2]["args"]["name"], "allreduce.w");
        assert_eq!(events.iter().rev().nth(1).unwrap()["args"], json!({"dtype": "float32", "shape": "[2, 3]"}));
    }
}
