//! The timeline: what each rank does over time, as a Chrome trace for Perfetto (`SMD_TIMELINE`).
//!
//! ```text
//! [
//! {"name":"process_name","ph":"M","pid":1,...},
//! {"name":"reducing","ph":"X","pid":1,"tid":2000,"ts":123.456,"dur":7.890,"args":{"bytes":1048576}},
//! ```
//!
//! - TRC-1: all ranks of a host append to one file, in one write for each complete line, so that lines never mix. The
//!   format allows a missing end of the list, so the file of a killed rank is readable.
//! - TRC-2: times are CLOCK_MONOTONIC, which all processes of a host share; each rank is a process of the trace.
//! - TRC-3: without a timeline, a span costs one atomic load. With one, it costs two clock readings and a message to
//!   the writer thread. If that thread falls behind, events are dropped and counted; no caller waits.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam::channel::{Receiver, Sender, bounded};
use parking_lot::{Mutex, RwLock};

use crate::config;
use crate::error::{Error, Result};

/// Number of events that may wait for the writer.
const QUEUE: usize = 1 << 14;

static ENABLED: AtomicBool = AtomicBool::new(false);
static DROPPED: AtomicU64 = AtomicU64::new(0);
static SENDER: RwLock<Option<Sender<WriterMessage>>> = RwLock::new(None);
static WRITER: Mutex<Option<JoinHandle<()>>> = Mutex::new(None);

/// The track of an event in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Track {
    /// Operations of a communicator, by its id.
    Group(u64),
    /// A bucket of a reducer.
    Bucket {
        /// The id of the reducer's communicator.
        reducer: u64,
        /// Position in the plan.
        bucket: usize,
    },
    /// A stage of a pipeline, by its index in the graph.
    Stage(u64),
}

impl Track {
    /// A number for the order of tracks; unique in the process for groups and buckets of ordinary sizes.
    fn id(self) -> u64 {
        match self {
            Track::Group(id) => (id % 1_000_000) * 1000,
            Track::Bucket { reducer, bucket } => (reducer % 1_000_000) * 1000 + 1 + bucket as u64,
            // After all groups.
            Track::Stage(stage) => 1_000_000_000 + stage,
        }
    }

    fn name(self) -> String {
        match self {
            Track::Group(0) => "collectives of the world".to_owned(),
            Track::Group(id) => format!("collectives of group {id:x}"),
            Track::Bucket { reducer, bucket } => format!("bucket {bucket} of group {reducer:x}"),
            Track::Stage(stage) => format!("stage {stage} of the pipeline"),
        }
    }
}

/// Name of the event that shows which stages a stage gets values from, and of its argument.
pub const STAGE_INPUT: &str = "stage input";
/// Name of the event of a synchronous call in a pipeline step: all ranks waited for the rank that ran it.
pub const SYNCHRONOUS: &str = "synchronous";
/// See [`STAGE_INPUT`].
pub const INPUT_STAGE: &str = "stage";

/// An argument of an event, such as `("bytes", 1024)`.
pub type Arg = Option<(&'static str, u64)>;

struct TraceEvent {
    name: &'static str,
    track: Track,
    start: u64,
    end: u64,
    arg: Arg,
}

enum WriterMessage {
    Event(TraceEvent),
    Stop,
}

/// Whether a timeline is being written.
#[inline]
pub fn enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Nanoseconds on the timeline's clock.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Records that `name` lasted from `start` to `end` (of [`now`]). Does nothing without a timeline, or if `start` is
/// zero, because the timeline was started in between.
pub fn complete(name: &'static str, track: Track, start: u64, end: u64, arg: Arg) {
    if !enabled() || start == 0 {
        return;
    }
    if let Some(sender) = &*SENDER.read()
        && sender.try_send(WriterMessage::Event(TraceEvent { name, track, start, end, arg })).is_err()
    {
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Records an event that lasts as long as this value.
#[derive(Debug)]
#[must_use = "the span ends when the value is dropped"]
pub struct Span {
    name: &'static str,
    track: Track,
    start: u64,
    arg: Arg,
}

/// Begins a span.
#[inline]
pub fn span(name: &'static str, track: Track, arg: Arg) -> Span {
    Span { name, track, start: if enabled() { now() } else { 0 }, arg }
}

impl Drop for Span {
    #[inline]
    fn drop(&mut self) {
        if self.start != 0 {
            complete(self.name, self.track, self.start, now(), self.arg);
        }
    }
}

/// Starts the timeline if `SMD_TIMELINE` is set. The first rank of each host (`first`) empties the file, so it calls
/// this before the others can know that it runs; the others call it after they have joined the job.
///
/// # Errors
/// [`Error::Io`] if the file cannot be opened for writing.
pub fn start(rank: usize, first: bool) -> Result<()> {
    let Some(path) = config::TIMELINE.text() else { return Ok(()) };
    let open = |truncate: bool| {
        // In append mode, concurrent writes of several processes do not overwrite each other (TRC-1); it excludes
        // `truncate`.
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        if truncate {
            file.set_len(0)?;
            (&file).write_all(b"[\n")?;
        }
        Ok(file)
    };
    let file: File = open(first).map_err(|error: std::io::Error| {
        Error::io(format!("cannot write the timeline `{path}` ({})", config::TIMELINE.name), error)
    })?;
    stop();
    let (sender, receiver) = bounded(QUEUE);
    let writer = std::thread::Builder::new()
        .name("smd-timeline".into())
        .spawn(move || write(&receiver, &file, rank))
        .map_err(|error| Error::io("cannot start the timeline's thread", error))?;
    *WRITER.lock() = Some(writer);
    *SENDER.write() = Some(sender);
    ENABLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Ends the timeline; every event so far is in the file when this returns.
pub fn stop() {
    ENABLED.store(false, Ordering::Relaxed);
    let sender = SENDER.write().take();
    if let Some(sender) = sender {
        // The writer may be gone after a write error; then there is nothing to end.
        let _ = sender.send(WriterMessage::Stop);
    }
    if let Some(writer) = WRITER.lock().take() {
        // A writer that panicked has lost its events, but the job continues.
        let _ = writer.join();
    }
    let dropped = DROPPED.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        tracing::warn!("the timeline lacks {dropped} events: its writer could not keep up");
    }
}

fn write(receiver: &Receiver<WriterMessage>, mut file: &File, rank: usize) {
    let mut named = HashSet::new();
    let mut lines = String::new();
    let _ = writeln!(
        lines,
        r#"{{"name":"process_name","ph":"M","pid":{rank},"args":{{"name":"rank {rank}"}}}},
{{"name":"process_sort_index","ph":"M","pid":{rank},"args":{{"sort_index":{rank}}}}},"#
    );
    // Waits for the first message of a batch, adds all further ones that are there, and writes them together.
    let mut running = true;
    while running {
        if !lines.is_empty() {
            if let Err(error) = file.write_all(lines.as_bytes()) {
                tracing::warn!("the timeline ends here: {error}");
                ENABLED.store(false, Ordering::Relaxed);
                return;
            }
            lines.clear();
        }
        let Ok(first) = receiver.recv() else { return };
        for message in std::iter::once(first).chain(receiver.try_iter().take(256)) {
            match message {
                WriterMessage::Event(event) => line(&mut lines, &event, rank, &mut named),
                WriterMessage::Stop => running = false,
            }
        }
    }
    let _ = file.write_all(lines.as_bytes());
}

fn line(lines: &mut String, event: &TraceEvent, rank: usize, named: &mut HashSet<Track>) {
    let &TraceEvent { name, track, start, end, arg } = event;
    let tid = track.id();
    if named.insert(track) {
        let _ = writeln!(
            lines,
            r#"{{"name":"thread_name","ph":"M","pid":{rank},"tid":{tid},"args":{{"name":"{}"}}}},"#,
            track.name()
        );
    }
    let duration = end.saturating_sub(start);
    let _ = write!(
        lines,
        r#"{{"name":"{name}","ph":"X","pid":{rank},"tid":{tid},"ts":{}.{:03},"dur":{}.{:03}"#,
        start / 1000,
        start % 1000,
        duration / 1000,
        duration % 1000
    );
    if let Some((key, value)) = arg {
        let _ = write!(lines, r#","args":{{"{key}":{value}}}"#);
    }
    lines.push_str("},\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_events_of_a_chrome_trace() {
        let mut lines = String::from("[\n");
        let mut named = HashSet::new();
        let track = Track::Bucket { reducer: 7, bucket: 1 };
        let event = TraceEvent { name: "reducing", track, start: 1_234_567, end: 2_000_000, arg: Some(("bytes", 64)) };
        line(&mut lines, &event, 3, &mut named);
        line(&mut lines, &event, 3, &mut named);
        let complete = lines.trim_end().trim_end_matches(',').to_owned() + "]";
        let events: Vec<serde_json::Value> = serde_json::from_str(&complete).unwrap();
        assert_eq!(events.len(), 3, "the track is named once");
        assert_eq!(events[0]["args"]["name"], "bucket 1 of group 7");
        assert_eq!(events[1]["pid"], 3);
        assert_eq!(events[1]["ts"], 1234.567);
        assert_eq!(events[1]["dur"], 765.433);
        assert_eq!(events[1]["args"]["bytes"], 64);
    }

    #[test]
    fn a_span_while_the_timeline_is_off_records_nothing() {
        let span = span("all_reduce", Track::Group(0), None);
        assert_eq!(span.start, 0);
    }
}
