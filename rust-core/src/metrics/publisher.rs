//! Publishes the counters of a host's ranks where `SMD_METRICS` says: in a file that is replaced from time to time, or
//! by HTTP. The first rank of each host does so for all ranks of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::exposition;
use super::ranks::RankCounters;
use crate::config;
use crate::error::{Error, Result};

/// Longest time that a client may take for its request, and to take the answer.
const CLIENT_TIME: Duration = Duration::from_secs(2);
/// Longest request that is read.
const REQUEST_BYTES: usize = 4096;

/// The destination that `SMD_METRICS` names.
#[derive(Debug, PartialEq, Eq)]
enum Destination {
    File(PathBuf),
    Address(String),
}

impl Destination {
    /// `host:port` is an address; whatever else is a path.
    fn parse(text: &str) -> Self {
        match text.rsplit_once(':') {
            Some((host, port)) if !host.contains('/') && port.parse::<u16>().is_ok() => Self::Address(text.to_owned()),
            _ => Self::File(text.into()),
        }
    }
}

struct MetricsPublisher {
    stop: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

static PUBLISHER: Mutex<Option<MetricsPublisher>> = Mutex::new(None);

/// Starts to publish the counters of the processes `pids`, if `SMD_METRICS` is set. Called on the first rank of each
/// host, after all of its ranks share their counters.
///
/// # Errors
/// [`Error::Config`] or [`Error::Io`] if nothing can be published there.
pub fn start(pids: &[u32]) -> Result<()> {
    let Some(text) = config::METRICS.text() else { return Ok(()) };
    let interval = config::METRICS_SECONDS.seconds()?;
    stop();
    let ranks: Vec<RankCounters> = pids.iter().filter_map(|pid| RankCounters::of(u64::from(*pid))).collect();
    let io = |error| Error::io(format!("cannot publish metrics at `{text}` ({})", config::METRICS.name), error);
    let ended = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| io(error.into()))?);
    let ended_here = ended.clone();
    let named = std::thread::Builder::new().name("smd-metrics".into());
    let thread = match Destination::parse(&text) {
        Destination::File(path) => {
            write(&path, &ranks).map_err(io)?;
            named.spawn(move || keep_current(&path, &ranks, interval, &ended_here))
        }
        Destination::Address(address) => {
            let addresses = address.to_socket_addrs().map_err(io)?.collect::<Vec<_>>();
            let listener = TcpListener::bind(&addresses[..]).map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            named.spawn(move || serve(&listener, &ranks, &ended_here))
        }
    };
    *PUBLISHER.lock() = Some(MetricsPublisher { stop: ended, thread: thread.map_err(io)? });
    Ok(())
}

/// Ends publishing. A file has the last numbers when this returns, and stays.
pub fn stop() {
    let Some(MetricsPublisher { stop, thread }) = PUBLISHER.lock().take() else { return };
    // An event counter takes one more event.
    let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
    // A thread that panicked publishes nothing any more, but the job continues.
    let _ = thread.join();
}

fn text(ranks: &[RankCounters]) -> String {
    exposition::text(&ranks.iter().filter_map(RankCounters::read).collect::<Vec<_>>())
}

/// Replaces the file by rename, so that no reader sees a part of it.
fn write(path: &Path, ranks: &[RankCounters]) -> std::io::Result<()> {
    // A name that the textfile collector does not read.
    let name = path.file_name().ok_or_else(|| std::io::Error::other("the path names no file"))?;
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let outcome = std::fs::write(&temporary, text(ranks)).and_then(|()| std::fs::rename(&temporary, path));
    if outcome.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&temporary);
    }
    outcome
}

/// Waits until publishing ends, `socket` has a connection or the time is over; returns whether publishing ends.
fn wait(ended: &OwnedFd, socket: Option<&TcpListener>, limit: Option<Duration>) -> bool {
    let mut sources = vec![PollFd::new(ended, PollFlags::IN)];
    sources.extend(socket.map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
    let limit = limit.map(|limit| Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() });
    match poll(&mut sources, limit.as_ref()) {
        Ok(_) => sources[0].revents().contains(PollFlags::IN),
        Err(error) => error != rustix::io::Errno::INTR,
    }
}

fn keep_current(path: &Path, ranks: &[RankCounters], interval: Duration, ended: &OwnedFd) {
    let mut was_refused = false;
    loop {
        let last = wait(ended, None, Some(interval));
        match write(path, ranks) {
            Ok(()) => was_refused = false,
            // Training continues, and the next attempt may succeed.
            Err(error) if !std::mem::replace(&mut was_refused, true) => {
                tracing::warn!("the metrics in `{}` are not current: {error}", path.display());
            }
            Err(_) => {}
        }
        if last {
            return;
        }
    }
}

fn serve(listener: &TcpListener, ranks: &[RankCounters], ended: &OwnedFd) {
    while !wait(ended, Some(listener), None) {
        // A client that fails has only itself to tell.
        if let Ok((client, _)) = listener.accept() {
            let _ = answer(client, ranks);
        }
    }
}

fn answer(mut client: TcpStream, ranks: &[RankCounters]) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    client.set_read_timeout(Some(CLIENT_TIME))?;
    client.set_write_timeout(Some(CLIENT_TIME))?;
    let mut request = [0; REQUEST_BYTES];
    let mut length = 0;
    let start = Instant::now();
    while start.elapsed() < CLIENT_TIME
        && length < request.len()
        && !request[..length].windows(4).any(|end| end == b"\r\n\r\n")
    {
        match client.read(&mut request[length..])? {
            0 => return Ok(()),
            more => length += more,
        }
    }
    let line = request[..length].split(|byte| *byte == b'\r').next().unwrap_or_default();
    let is_ours = [&b"GET /metrics"[..], b"GET / "].iter().any(|start| line.starts_with(start));
    let (status, body) = match is_ours {
        true => ("200 OK", text(ranks)),
        false => ("404 Not Found", "this is /metrics\n".to_owned()),
    };
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_paths() {
        for (text, expected) in [
            ("localhost:9100", Destination::Address("localhost:9100".into())),
            (":9100", Destination::Address(":9100".into())),
            ("/var/lib/node_exporter/smd.prom", Destination::File("/var/lib/node_exporter/smd.prom".into())),
            ("./odd:80", Destination::File("./odd:80".into())),
            ("smd.prom", Destination::File("smd.prom".into())),
            ("host:no-port", Destination::File("host:no-port".into())),
        ] {
            assert_eq!(Destination::parse(text), expected, "{text}");
        }
    }
}
