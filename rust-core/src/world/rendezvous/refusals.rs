//! Logs rejected connections at a port of the job.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Logs rejected connections, a few lines at a time at most, so that a flood does not fill the log.
#[derive(Default)]
pub(crate) struct Refusals {
    window: Option<Instant>,
    logged: usize,
    hidden: usize,
}

impl Refusals {
    const LINES: usize = 5;
    const WINDOW: Duration = Duration::from_secs(10);

    pub(crate) fn note(&mut self, peer: Option<SocketAddr>, why: &str) {
        self.window.get_or_insert_with(Instant::now);
        if self.logged == Self::LINES {
            self.hidden += 1;
            return;
        }
        self.logged += 1;
        match peer {
            Some(peer) => tracing::warn!("refused a connection from {peer}: it {why}"),
            None => tracing::warn!("{why}"),
        }
    }

    /// When to call [`Refusals::summarize`] next.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.window.map(|start| start + Self::WINDOW)
    }

    pub(crate) fn summarize(&mut self, now: Instant) {
        if self.due().is_some_and(|due| due <= now) {
            if self.hidden > 0 {
                tracing::warn!("refused {} more connections in {:?}", self.hidden, Self::WINDOW);
            }
            *self = Self::default();
        }
    }
}
