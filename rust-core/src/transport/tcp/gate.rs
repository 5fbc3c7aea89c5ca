//! Decides which thread reads the connections: `smd-tcp`, or a caller that waits for frames.
//!
//! ```text
//!   epoll of the thread --+-- bell: commands, timers that changed
//!                         +-- epoll of the connections; not while a caller receives
//! ```
//!
//! - GATE-1: while a caller receives, arriving data does not wake the thread. A hand-over to the caller would cost more
//!   than what there is to do, and with fewer cores than threads, each would wait for the other's core.
//! - GATE-2: when the last caller has stopped, data that arrived before or arrives later wakes the thread. The epoll of
//!   the connections is watched for its level, so nothing is missed in between; what a caller took from it and left
//!   undone is announced by the bell ([`ReceiveGate::leave`]).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{self, Errno};

pub(super) struct ReceiveGate {
    epoll: OwnedFd,
    /// The epoll of the connections; a descriptor of its own, so that it outlives the service.
    connections: OwnedFd,
    bell: OwnedFd,
    /// Number of callers that receive.
    receivers: Mutex<usize>,
}

const CONNECTIONS: EventData = EventData::new_u64(0);
const DOORBELL: EventData = EventData::new_u64(1);

impl ReceiveGate {
    /// Watches `connections`, an epoll.
    pub(super) fn new(connections: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let connections = io::fcntl_dupfd_cloexec(connections, 0)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &connections, CONNECTIONS, EventFlags::IN)?;
        epoll::add(&epoll, &bell, DOORBELL, EventFlags::IN)?;
        Ok(Self { epoll, connections, bell, receivers: Mutex::default() })
    }

    /// Waits until the thread has something to do.
    pub(super) fn wait(&self, limit: Option<Duration>) -> io::Result<()> {
        // A limit that has no such form is longer than any process lives.
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut events = [const { epoll::Event { flags: EventFlags::empty(), data: DOORBELL } }; 2];
        let is_bell = |event: &epoll::Event| {
            // The structure is packed.
            let data = event.data;
            data == DOORBELL
        };
        match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
            Ok(count) if events[..count].iter().any(is_bell) => match io::read(&self.bell, &mut [0; 8]) {
                Ok(_) | Err(Errno::AGAIN) => Ok(()),
                Err(error) => Err(error),
            },
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        match io::write(&self.bell, &1u64.to_ne_bytes()) {
            // A counter at its maximum wakes, too.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!("waking the thread that serves other hosts: {error}"),
        }
    }

    /// A caller begins to receive.
    pub(super) fn enter(&self) {
        let mut receivers = self.receivers.lock();
        *receivers += 1;
        if *receivers == 1 {
            self.watch(EventFlags::empty());
        }
    }

    /// A caller stops; `is_done` tells whether all that was taken from the connections' epoll is done.
    pub(super) fn leave(&self, is_done: impl FnOnce() -> bool) {
        let mut receivers = self.receivers.lock();
        *receivers -= 1;
        if *receivers > 0 {
            return;
        }
        self.watch(EventFlags::IN);
        drop(receivers);
        if !is_done() {
            self.ring();
        }
    }

    pub(super) fn has_receivers(&self) -> bool {
        *self.receivers.lock() > 0
    }

    fn watch(&self, events: EventFlags) {
        if let Err(error) = epoll::modify(&self.epoll, &self.connections, CONNECTIONS, events) {
            tracing::error!("watching the connections to other hosts: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    /// A gate, and an event in the epoll that it watches.
    fn gate() -> (ReceiveGate, OwnedFd, OwnedFd) {
        let connections = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let data = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        epoll::add(&connections, &data, DOORBELL, EventFlags::IN).unwrap();
        (ReceiveGate::new(&connections).unwrap(), connections, data)
    }

    fn waits(gate: &ReceiveGate, limit: Duration) -> bool {
        let start = Instant::now();
        gate.wait(Some(limit)).unwrap();
        start.elapsed() >= limit
    }

    #[test]
    fn data_wakes_the_thread_unless_a_caller_receives() {
        let (gate, _connections, data) = gate();
        assert!(waits(&gate, SHORT_TIMEOUT));
        gate.enter();
        gate.enter();
        io::write(&data, &1u64.to_ne_bytes()).unwrap();
        assert!(waits(&gate, SHORT_TIMEOUT) && gate.has_receivers());
        gate.leave(|| true);
        assert!(waits(&gate, SHORT_TIMEOUT), "another caller still receives");
        gate.leave(|| true);
        assert!(!waits(&gate, LONG) && !gate.has_receivers());
        io::read(&data, &mut [0; 8]).unwrap();
        assert!(waits(&gate, SHORT_TIMEOUT));
    }

    #[test]
    fn a_caller_that_leaves_unfinished_work_wakes_the_thread() {
        let (gate, _connections, _data) = gate();
        gate.enter();
        gate.leave(|| false);
        assert!(!waits(&gate, LONG));
        assert!(waits(&gate, SHORT_TIMEOUT));
    }

    #[test]
    fn the_bell_rings_while_a_caller_receives() {
        let (gate, _connections, _data) = gate();
        gate.enter();
        gate.ring();
        assert!(!waits(&gate, LONG));
    }
}
