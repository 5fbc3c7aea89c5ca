//! Log lines on standard error, with the rank in front: `[smd 1] WARN text`, or in Horovod's form, with the time.

use std::fmt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::{clock, config};

static STARTED: Once = Once::new();
static RANK: AtomicUsize = AtomicUsize::new(NO_RANK);
const NO_RANK: usize = usize::MAX;
static SHOWS_TIME: AtomicBool = AtomicBool::new(false);

/// Starts logging, once in a process, at the level of [`config::LOG`]. Does nothing if the program has set up
/// `tracing` before. The launcher, and a job of one process, log no rank.
pub fn start(rank: Option<usize>) {
    RANK.store(rank.unwrap_or(NO_RANK), Ordering::Relaxed);
    STARTED.call_once(|| {
        let level = level();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(level.unwrap_or(LevelFilter::WARN))
            .with_writer(std::io::stderr)
            .event_format(LogLine);
        let hides_time = config::LOG_HIDE_TIME.flag();
        SHOWS_TIME.store(hides_time.as_ref().is_ok_and(|hides| !hides), Ordering::Relaxed);
        let _ = tracing::subscriber::set_global_default(subscriber.finish());
        if let Err(error) = hides_time {
            tracing::warn!("{}", error.text());
        }
        if level.is_none() {
            let text = config::LOG.text().unwrap_or_default();
            tracing::warn!("`{}` is `{text}`: expected error, warn, info, debug or trace", config::LOG.name);
        }
    });
}

/// The level that the environment names; `None` if it names no level.
fn level() -> Option<LevelFilter> {
    let text = config::LOG.text().unwrap_or_else(|| config::LOG.default.to_owned());
    // Horovod's names of levels are accepted, too.
    match text.to_ascii_lowercase().as_str() {
        "off" => Some(LevelFilter::OFF),
        "error" | "fatal" => Some(LevelFilter::ERROR),
        "warn" | "warning" => Some(LevelFilter::WARN),
        "info" => Some(LevelFilter::INFO),
        "debug" => Some(LevelFilter::DEBUG),
        "trace" => Some(LevelFilter::TRACE),
        _ => None,
    }
}

/// A level in one letter.
fn letter(level: Level) -> char {
    match level {
        Level::ERROR => 'E',
        Level::WARN => 'W',
        Level::INFO => 'I',
        Level::DEBUG => 'D',
        Level::TRACE => 'T',
    }
}

struct LogLine;

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let rank = RANK.load(Ordering::Relaxed);
        let metadata = event.metadata();
        if SHOWS_TIME.load(Ordering::Relaxed) {
            let file = metadata.file().map_or("", |path| path.rsplit('/').next().unwrap_or(path));
            let line = metadata.line().unwrap_or_default();
            write!(writer, "[{}: {} {file}:{line}] ", clock::to_the_microsecond(), letter(*metadata.level()))?;
            if rank != NO_RANK {
                write!(writer, "[{rank}]: ")?;
            }
            context.field_format().format_fields(writer.by_ref(), event)?;
            return writeln!(writer);
        }
        match rank {
            NO_RANK => write!(writer, "[smd] ")?,
            rank => write!(writer, "[smd {rank}] ")?,
        }
        let level = metadata.level();
        // At these levels, lines name the module that logged them.
        if *level >= Level::DEBUG {
            write!(writer, "{level} {}: ", metadata.target())?;
        } else {
            write!(writer, "{level} ")?;
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
