//! Decides which thread reads the connections: `smd-tcp`, or a caller that waits for frames.
//!
//! ```text
//!   epoll of the thread --+-- doorbell: commands, timers that changed
//!                         +-- epoll of the connections; not while a caller receives
//! ```
//!
//! - GATE-1: while callers receive (CAL-1), arriving data does not wake the thread, once the thread has seen that
//!   they receive.
//! - GATE-2: when the last caller has stopped, data that arrived before or arrives later wakes the thread. The epoll of
//!   the connections is watched for its level, so nothing is missed in between. What a caller took from the epoll and
//!   left undone is announced by the doorbell, unless the thread will look at one of the next two ticks.
//! - GATE-3: callers that begin and stop make no system call. To switch the epoll twice for each wait took a quarter of a
//!   small all-reduce, and to set a timer more than that.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{self, Errno};

use crate::transport::callers::ReceivingCallers;

pub(super) struct ReceiveGate {
    epoll: OwnedFd,
    /// The epoll of the connections; a descriptor of its own, so that it outlives the service.
    connections: OwnedFd,
    doorbell: OwnedFd,
    /// How often callers have looked for frames.
    looks: AtomicU64,
    state: Mutex<GateState>,
}

struct GateState {
    callers: ReceivingCallers,
    /// Whether arriving data wakes the thread.
    is_watched: bool,
}

const CONNECTIONS: EventData = EventData::new_u64(0);
const DOORBELL: EventData = EventData::new_u64(1);

impl ReceiveGate {
    /// Watches `connections`, an epoll.
    pub(super) fn new(connections: impl AsFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let connections = io::fcntl_dupfd_cloexec(connections, 0)?;
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &connections, CONNECTIONS, EventFlags::IN)?;
        epoll::add(&epoll, &doorbell, DOORBELL, EventFlags::IN)?;
        let state = GateState { callers: ReceivingCallers::default(), is_watched: true };
        Ok(Self { epoll, connections, doorbell, looks: AtomicU64::new(0), state: Mutex::new(state) })
    }

    /// Waits until the thread has something to do, and at most until the limit, which is a tick while callers receive.
    /// Returns whether there is something.
    pub(super) fn wait(&self, limit: Option<Duration>) -> io::Result<bool> {
        // A limit that has no such form is longer than any process lives.
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut events = [const { epoll::Event { flags: EventFlags::empty(), data: DOORBELL } }; 2];
        let is_doorbell = |event: &epoll::Event| {
            // The structure is packed.
            let data = event.data;
            data == DOORBELL
        };
        match epoll::wait(&self.epoll, &mut events[..], limit.as_ref()) {
            Ok(count) if events[..count].iter().any(is_doorbell) => match io::read(&self.doorbell, &mut [0; 8]) {
                Ok(_) | Err(Errno::AGAIN) => Ok(true),
                Err(error) => Err(error),
            },
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the thread leaves the connections to callers; then data does not wake it.
    pub(super) fn callers_receive(&self) -> bool {
        let mut state = self.state.lock();
        let receive = state.callers.receive(self.looks.load(Ordering::Relaxed));
        self.watch(&mut state, !receive);
        receive
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        match io::write(&self.doorbell, &1u64.to_ne_bytes()) {
            // A counter at its maximum wakes, too.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!("waking the thread that serves other hosts: {error}"),
        }
    }

    /// A caller begins to receive.
    pub(super) fn enter(&self) {
        self.state.lock().callers.enter();
    }

    /// A caller looks for frames.
    pub(super) fn look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether arriving data wakes the thread, which then does not look for anything by itself.
    pub(super) fn is_watched(&self) -> bool {
        self.state.lock().is_watched
    }

    /// A caller stops receiving. Returns whether the thread will read the frames that the caller has left unread at its
    /// next tick or the one after it, without being woken.
    pub(super) fn leave(&self) -> bool {
        let mut state = self.state.lock();
        state.callers.leave();
        self.watch_for_sleepers(&mut state);
        !state.is_watched
    }

    /// A caller begins or ends to wait for what the thread receives.
    pub(super) fn await_thread(&self, waits: bool) {
        let mut state = self.state.lock();
        state.callers.await_thread(waits);
        self.watch_for_sleepers(&mut state);
    }

    fn watch_for_sleepers(&self, state: &mut GateState) {
        if state.callers.need_thread() {
            self.watch(state, true);
        }
    }

    fn watch(&self, state: &mut GateState, is_watched: bool) {
        if std::mem::replace(&mut state.is_watched, is_watched) == is_watched {
            return;
        }
        let events = if is_watched { EventFlags::IN } else { EventFlags::empty() };
        if let Err(error) = epoll::modify(&self.epoll, &self.connections, CONNECTIONS, events) {
            tracing::error!("watching the connections to other hosts: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::transport::callers::TICK;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    /// A gate, and an event in the epoll that it watches.
    fn gate() -> (ReceiveGate, OwnedFd, OwnedFd) {
        let connections = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let data = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        epoll::add(&connections, &data, DOORBELL, EventFlags::IN).unwrap();
        (ReceiveGate::new(&connections).unwrap(), connections, data)
    }

    /// Whether the gate finds nothing until the limit, while callers look or do not.
    fn waits(gate: &ReceiveGate, callers_look: bool, limit: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < limit {
            if callers_look {
                gate.look();
            }
            let limit = if gate.callers_receive() { TICK } else { limit };
            if gate.wait(Some(limit)).unwrap() {
                return false;
            }
        }
        true
    }

    #[test]
    fn data_wakes_the_thread_unless_a_caller_receives() {
        let (gate, _connections, data) = gate();
        assert!(waits(&gate, false, SHORT_TIMEOUT));
        gate.enter();
        gate.enter();
        io::write(&data, &1u64.to_ne_bytes()).unwrap();
        assert!(waits(&gate, true, SHORT_TIMEOUT));
        assert!(!waits(&gate, false, LONG), "callers do not look");
        gate.leave();
        assert!(waits(&gate, true, SHORT_TIMEOUT), "another caller still receives");
        gate.leave();
        assert!(!waits(&gate, false, LONG));
        io::read(&data, &mut [0; 8]).unwrap();
        assert!(waits(&gate, false, SHORT_TIMEOUT));
    }

    #[test]
    fn the_thread_takes_over_from_a_caller_that_sleeps_at_once() {
        let (gate, _connections, data) = gate();
        io::write(&data, &1u64.to_ne_bytes()).unwrap();
        let is_woken = || {
            gate.look();
            gate.callers_receive();
            gate.wait(Some(Duration::ZERO)).unwrap()
        };
        gate.enter();
        assert!(!is_woken());
        gate.leave();
        gate.await_thread(true);
        assert!(is_woken());
        gate.enter();
        assert!(!is_woken(), "another caller receives for both");
        gate.leave();
        assert!(is_woken());
    }

    #[test]
    fn the_doorbell_rings_while_a_caller_receives() {
        let (gate, _connections, _data) = gate();
        gate.enter();
        gate.ring();
        assert!(!waits(&gate, true, LONG));
    }
}
