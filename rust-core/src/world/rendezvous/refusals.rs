//! Who was turned away at a port of the job's, for the log.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Logs who was turned away, but never more than a few lines at a time: a flood must not fill the log.
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

    /// When to [`Refusals::summarize`].
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
