//! Messages between pairs: blocking ones on the caller's thread, asynchronous ones on a thread of their own, which
//! the first of them starts. All are under way at once (TRA-1).

use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Request;
use super::communicator::Done;
use crate::buffer::{Device, TensorView};
use crate::error::{Error, Result};
use crate::transport::{Message, NAP, Tag, Transport, Wait, wait_all};
use crate::world::Monitor;

/// See the module's text.
pub(super) struct Courier {
    shared: Arc<Shared>,
}

struct Shared {
    id: u64,
    transport: Arc<dyn Transport>,
    monitor: Arc<Monitor>,
    timeout: Duration,
    closed: Arc<OnceLock<String>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Submitted since the thread last looked.
    submitted: Vec<Pending>,
    thread: Option<ThreadId>,
}

struct Pending {
    message: Message,
    text: String,
    partners: Vec<usize>,
    start: Instant,
    done: Done,
}

impl Courier {
    pub(super) fn new(
        id: u64,
        transport: Arc<dyn Transport>,
        monitor: Arc<Monitor>,
        timeout: Duration,
        closed: Arc<OnceLock<String>>,
    ) -> Self {
        let (state, changed) = Default::default();
        Self { shared: Arc::new(Shared { id, transport, monitor, timeout, closed, state, changed }) }
    }

    /// Runs a message to its end on this thread.
    pub(super) fn run(&self, request: &Request) -> Result<()> {
        let start = Instant::now();
        let message = self.shared.post(request)?;
        let partners = message.partners(self.shared.transport.members());
        let during = || describe(request);
        wait_all(&*self.shared.transport, &[message], &self.shared.wait(&during, start, &partners))
    }

    /// Starts a message; the thread calls `done`.
    pub(super) fn submit(&self, request: Request, done: Done) {
        let shared = &self.shared;
        let start = Instant::now();
        let message = match shared.post(&request) {
            Ok(message) => message,
            Err(error) => return done(Err(error)),
        };
        let partners = message.partners(shared.transport.members());
        let pending = Pending { message, text: describe(&request), partners, start, done };
        let mut state = shared.state.lock();
        if state.thread.is_none() {
            let own = shared.clone();
            let thread = std::thread::Builder::new().name(format!("smd-courier-{}", shared.id));
            match thread.spawn(move || own.work()) {
                Ok(handle) => state.thread = Some(handle.thread().id()),
                Err(error) => {
                    drop(state);
                    shared.transport.cancel(&pending.message);
                    return (pending.done)(Err(Error::io("starting a thread for messages", error)));
                }
            }
        }
        state.submitted.push(pending);
        shared.changed.notify_all();
        drop(state);
        // The thread may doze over others' messages.
        shared.transport.ring();
    }

    pub(super) fn wake(&self) {
        let _state = self.shared.state.lock();
        self.shared.changed.notify_all();
        self.shared.transport.ring();
    }

    /// Waits for the thread's end after the communicator was closed.
    pub(super) fn wait_ended(&self, deadline: Instant) {
        let mut state = self.shared.state.lock();
        let me = std::thread::current().id();
        while state.thread.is_some_and(|thread| thread != me) {
            if self.shared.changed.wait_until(&mut state, deadline).timed_out() {
                return;
            }
        }
    }
}

impl Shared {
    fn wait<'a>(&'a self, during: &'a dyn Fn() -> String, start: Instant, partners: &'a [usize]) -> Wait<'a> {
        let (monitor, closed, members) = (&*self.monitor, &*self.closed, partners);
        Wait { during, start, deadline: start + self.timeout, monitor, members, closed }
    }

    fn post(&self, request: &Request) -> Result<Message> {
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        let size = self.transport.members().size();
        let check = |peer: Option<usize>, data: &TensorView| match (peer, data.device()) {
            (Some(peer), _) if peer >= size => Err(Error::InvalidArgument(format!(
                "{}: rank {peer} is no rank of a group of {size}",
                describe(request)
            ))),
            (_, Device::Cuda(_)) => {
                Err(Error::Unsupported(format!("{}: the tensor is not in CPU memory", describe(request))))
            }
            _ => Ok(()),
        };
        match request {
            Request::Send { data, to, tag } => {
                check(Some(*to), data)?;
                // SAFETY: the view's promise holds until the operation completes, and both ways of running it end the
                // message before they report that.
                Ok(unsafe { self.transport.post_send(*to, Tag::from(*tag), data.ptr(), data.bytes()) })
            }
            Request::Recv { data, from, tag } => {
                check(*from, data)?;
                // SAFETY: as above.
                Ok(unsafe { self.transport.post_recv(*from, Tag::from(*tag), data.ptr(), data.bytes()) })
            }
            _ => Err(Error::Internal("a collective was passed as a message".into())),
        }
    }

    /// The thread.
    fn work(&self) {
        let mut pending: Vec<Pending> = Vec::new();
        loop {
            let mut state = self.state.lock();
            while pending.is_empty() && state.submitted.is_empty() && self.closed.get().is_none() {
                self.changed.wait(&mut state);
            }
            pending.append(&mut state.submitted);
            if pending.is_empty() {
                state.thread = None;
                self.changed.notify_all();
                return;
            }
            drop(state);
            let seen = self.transport.doorbell();
            self.transport.progress();
            let before = pending.len();
            let mut waiting = Vec::with_capacity(before);
            for one in pending {
                match self.outcome(&one) {
                    None => waiting.push(one),
                    Some(result) => (one.done)(result),
                }
            }
            pending = waiting;
            if pending.len() == before && self.state.lock().submitted.is_empty() {
                self.transport.doze(seen, NAP);
            }
        }
    }

    fn outcome(&self, one: &Pending) -> Option<Result<()>> {
        let finished = |result: Result<usize>| result.map(drop);
        if let Some(result) = one.message.poll() {
            return Some(finished(result));
        }
        let during = || one.text.clone();
        let error = self.wait(&during, one.start, &one.partners).check(|| one.partners.clone()).err()?;
        self.transport.progress();
        self.transport.cancel(&one.message);
        Some(one.message.poll().map_or(Err(error), finished))
    }
}

fn describe(request: &Request) -> String {
    match request {
        Request::Send { data, to, tag } => {
            format!("send of {} {} to rank {to} of the group (tag {tag})", data.elems(), data.dtype())
        }
        Request::Recv { data, from, tag } => {
            let from = from.map_or("any rank".into(), |from| format!("rank {from}"));
            format!("recv of {} {} from {from} of the group (tag {tag})", data.elems(), data.dtype())
        }
        _ => "a collective".into(),
    }
}
