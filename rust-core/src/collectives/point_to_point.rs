//! Point-to-point messages and the monitored barrier. Blocking messages run on the caller's thread. Asynchronous
//! messages run on one thread, which the first of them starts. All messages are in flight at once (TRA-1).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::Request;
use super::communicator::{Done, note_panic};
use crate::buffer::{Device, TensorView};
use crate::error::{Error, Limit, Result};
use crate::metrics;
use crate::transport::{Message, POLL_INTERVAL, Tag, Transport, Wait, wait_all};
use crate::world::Monitor;

/// Tags of monitored barriers: of the question, and of answers and results. The number of the barrier is added to the
/// latter two, so that a late member's answer does not count for the next barrier.
const TAG_QUESTION: Tag = 3 << 40;
const TAG_BARRIER: Tag = 4 << 40;

/// How long the first member tries to tell the other members that a monitored barrier failed.
const FAILURE_NOTICE: Duration = Duration::from_millis(200);

/// The point-to-point operations of one communicator.
pub(super) struct PointToPoint {
    shared: Arc<PointToPointShared>,
}

struct PointToPointShared {
    id: u64,
    transport: Arc<dyn Transport>,
    monitor: Arc<Monitor>,
    timeout: Duration,
    closed: Arc<OnceLock<String>>,
    /// The error of a stopped group (COM-7).
    panicked: Arc<OnceLock<Error>>,
    state: Mutex<PointToPointQueue>,
    changed: Condvar,
    barriers: AtomicU32,
    /// A question that arrived for the next monitored barrier while the previous one ended here.
    next_question: Mutex<Option<u32>>,
}

#[derive(Default)]
struct PointToPointQueue {
    /// Messages that the thread has not taken yet.
    submitted: Vec<PendingMessage>,
    thread: Option<ThreadId>,
}

struct PendingMessage {
    message: Message,
    text: String,
    partners: Vec<usize>,
    start: Instant,
    timeout: Option<Duration>,
    done: Done,
}

impl PointToPoint {
    pub(super) fn new(
        id: u64,
        transport: Arc<dyn Transport>,
        monitor: Arc<Monitor>,
        timeout: Duration,
        closed: Arc<OnceLock<String>>,
        panicked: Arc<OnceLock<Error>>,
    ) -> Self {
        let (state, changed, barriers, next_question) = Default::default();
        let shared = PointToPointShared {
            id,
            transport,
            monitor,
            timeout,
            closed,
            panicked,
            state,
            changed,
            barriers,
            next_question,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Runs a message to its end on this thread.
    pub(super) fn run(&self, request: &Request, timeout: Option<Duration>) -> Result<()> {
        let start = Instant::now();
        let message = self.shared.start(request)?;
        let partners = message.partners(self.shared.transport.members());
        let during = || describe(request);
        wait_all(&*self.shared.transport, &[message], &self.shared.wait(&during, start, timeout, &partners))
    }

    /// Starts a message; the thread completes it and calls `done`.
    pub(super) fn submit(&self, request: Request, timeout: Option<Duration>, done: Done) {
        let shared = &self.shared;
        let start = Instant::now();
        let message = match shared.start(&request) {
            Ok(message) => message,
            Err(error) => return done(Err(error)),
        };
        let partners = message.partners(shared.transport.members());
        let pending = PendingMessage { message, text: describe(&request), partners, start, timeout, done };
        let mut state = shared.state.lock();
        if state.thread.is_none() {
            let own = shared.clone();
            let thread = std::thread::Builder::new().name(format!("smd-p2p-{}", shared.id));
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
        // Wakes the thread, which may sleep until one of its other messages makes progress.
        shared.transport.ring();
    }

    /// See [`super::Communicator::monitored_barrier`].
    pub(super) fn monitored_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        match self.shared.transport.members().me {
            0 => self.shared.lead_barrier(timeout, all),
            _ => self.shared.follow_barrier(timeout),
        }
    }

    pub(super) fn wake(&self) {
        let _state = self.shared.state.lock();
        self.shared.changed.notify_all();
        self.shared.transport.ring();
    }

    /// Waits until the thread has ended, after the communicator was closed.
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

impl PointToPointShared {
    fn wait<'a>(
        &'a self,
        during: &'a dyn Fn() -> String,
        start: Instant,
        timeout: Option<Duration>,
        partners: &'a [usize],
    ) -> Wait<'a> {
        let (monitor, closed) = (&*self.monitor, &*self.closed);
        let members = self.transport.depends_on().unwrap_or(partners);
        let deadline = start + timeout.unwrap_or(self.timeout);
        let drain_timeout = self.transport.drain_timeout();
        Wait { during, start, deadline, monitor, members, drain_timeout, closed }
    }

    fn start(&self, request: &Request) -> Result<Message> {
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        if let Some(error) = self.panicked.get() {
            return Err(error.clone());
        }
        let size = self.transport.members().size();
        let check = |peer: Option<usize>, data: &TensorView| match (peer, data.device()) {
            (Some(peer), _) if peer >= size => Err(Error::InvalidArgument(format!(
                "{}: rank {peer} is not a rank of a group of {size}",
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
                metrics::note_message(true, data.bytes());
                // SAFETY: the view's promise holds until the operation completes, and both ways of running it end the
                // message before they report that.
                Ok(unsafe { self.transport.post_send(*to, Tag::from(*tag), data.ptr(), data.bytes()) })
            }
            Request::Recv { data, from, tag } => {
                check(*from, data)?;
                metrics::note_message(false, data.bytes());
                // SAFETY: as above.
                Ok(unsafe { self.transport.post_recv(*from, Tag::from(*tag), data.ptr(), data.bytes()) })
            }
            _ => Err(Error::Internal("a collective was passed as a message".into())),
        }
    }

    /// The first member's part: sends the number of the call to every member, waits for their answers, and sends the
    /// result to those that answered.
    fn lead_barrier(&self, timeout: Option<Duration>, all: bool) -> Result<()> {
        let transport = &*self.transport;
        let members = transport.members();
        let others = &members.ranks[1..];
        let (start, during) = (Instant::now(), || "monitored_barrier".to_owned());
        let wait = self.wait(&during, start, timeout, others);
        let call = self.barriers.fetch_add(1, Ordering::Relaxed);
        let tag = TAG_BARRIER + Tag::from(call);
        let question = call.to_le_bytes();
        let mut here = vec![0u8; members.size()];
        let (questions, answers): (Vec<Message>, Vec<Message>) = (here.iter_mut().enumerate().skip(1))
            // SAFETY: `question` and `here` live, untouched, until `wait_all` or `cancel` has ended the messages.
            .map(|(peer, word)| unsafe {
                let question = transport.post_send(peer, TAG_QUESTION, question.as_ptr(), question.len());
                (question, transport.post_recv(Some(peer), tag, word, 1))
            })
            .unzip();
        let outcome = wait_all(transport, &answers, &wait);
        // Cancels the receives. The questions themselves are small and were sent eagerly.
        questions.iter().for_each(|message| transport.cancel(message));
        let outcome_byte = [u8::from(outcome.is_err())];
        let came = (1..members.size()).filter(|&peer| matches!(answers[peer - 1].poll(), Some(Ok(_))));
        // SAFETY: `outcome_byte` lives until `wait_all` or `cancel` has ended the messages.
        let notices: Vec<Message> =
            came.map(|peer| unsafe { transport.post_send(peer, tag, outcome_byte.as_ptr(), 1) }).collect();
        match outcome {
            Ok(()) => wait_all(transport, &notices, &wait),
            Err(Error::Timeout { waited, mut missing, limit, .. }) => {
                // The first error is reported; an error while telling the others is ignored.
                let _ = wait_all(transport, &notices, &self.wait(&during, Instant::now(), Some(FAILURE_NOTICE), &[]));
                missing.truncate(if all { missing.len() } else { 1 });
                let names = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                let ranks = if missing.len() == 1 { "Rank" } else { "Ranks" };
                let during = format!(
                    "Rank {} timed out in monitoredBarrier: {ranks} {names} failed to pass monitoredBarrier: it",
                    members.ranks[0]
                );
                Err(Error::Timeout { during, waited, missing, limit })
            }
            Err(other) => {
                notices.iter().for_each(|message| transport.cancel(message));
                Err(other)
            }
        }
    }

    /// The other members' part: answers every question until a call is decided. The first questions may belong to calls
    /// that failed without this member.
    fn follow_barrier(&self, timeout: Option<Duration>) -> Result<()> {
        let transport = &*self.transport;
        let members = transport.members();
        let first = [members.ranks[0]];
        let (start, during) = (Instant::now(), || "monitored_barrier".to_owned());
        let wait = self.wait(&during, start, timeout, &first);
        let (mut question, mut outcome_byte, word) = ([0u8; 4], [0u8], [1u8]);
        let (question_at, outcome_at) = (question.as_mut_ptr(), outcome_byte.as_mut_ptr());
        // SAFETY: the buffers live until the messages have ended: every way out of the loop cancels them.
        let post_question = || unsafe { transport.post_recv(Some(0), TAG_QUESTION, question_at, 4) };
        // SAFETY: called after the receive that filled it has ended.
        let read_question = || u32::from_le_bytes(unsafe { question_at.cast::<[u8; 4]>().read() });
        let mut question = post_question();
        let mut unanswered = self.next_question.lock().take();
        let mut answered: Vec<Message> = Vec::new();
        let outcome = loop {
            let seen = transport.doorbell();
            transport.progress();
            // Before the next question, which the first member may have sent already.
            if let Some(result) = answered.last().and_then(Message::poll) {
                // SAFETY: the receive that filled it has ended.
                break result.map(|_| unsafe { outcome_at.read() });
            }
            if unanswered.is_none()
                && let Some(result) = question.poll()
            {
                if let Err(error) = result {
                    break Err(error);
                }
                unanswered = Some(read_question());
                question = post_question();
            }
            if let Some(call) = unanswered.take() {
                answered.iter().for_each(|message| transport.cancel(message));
                let tag = TAG_BARRIER + Tag::from(call);
                // SAFETY: as above.
                answered = unsafe {
                    vec![
                        transport.post_send(0, tag, word.as_ptr(), 1),
                        transport.post_recv(Some(0), tag, outcome_at, 1),
                    ]
                };
                continue;
            }
            match wait.check(|| first.to_vec()) {
                Ok(()) => transport.wait_doorbell(seen, POLL_INTERVAL),
                Err(error) => break Err(error),
            }
        };
        answered.iter().chain([&question]).for_each(|message| transport.cancel(message));
        if let Some(Ok(_)) = question.poll() {
            *self.next_question.lock() = Some(read_question());
        }
        let reached = |what: &str| {
            let (me, first) = (members.ranks[members.me], first[0]);
            format!(
                "Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv from \
                 rank {first}: {what}"
            )
        };
        let missing = first.to_vec();
        match outcome {
            Ok(0) => Ok(()),
            Ok(_) => {
                let (during, waited) = (reached("its own wait"), start.elapsed());
                Err(Error::Timeout { during, waited, missing, limit: Limit::Collective })
            }
            Err(Error::Timeout { waited, limit, .. }) => {
                Err(Error::Timeout { during: reached("it"), waited, missing, limit })
            }
            Err(other) => Err(other),
        }
    }

    /// The body of the thread.
    fn work(&self) {
        let mut pending: Vec<PendingMessage> = Vec::new();
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
                    Some(result) => {
                        let done = one.done;
                        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| done(result))) {
                            note_panic(&self.panicked, self.id, &*panic);
                        }
                    }
                }
            }
            pending = waiting;
            if pending.len() == before && self.state.lock().submitted.is_empty() {
                self.transport.wait_doorbell(seen, POLL_INTERVAL);
            }
        }
    }

    fn outcome(&self, one: &PendingMessage) -> Option<Result<Option<usize>>> {
        if let Some(result) = one.message.poll() {
            return Some(result.map(Some));
        }
        let during = || one.text.clone();
        let error = match self.panicked.get() {
            Some(error) => error.clone(),
            None => self.wait(&during, one.start, one.timeout, &one.partners).check(|| one.partners.clone()).err()?,
        };
        self.transport.progress();
        self.transport.cancel(&one.message);
        Some(one.message.poll().map_or(Err(error), |result| result.map(Some)))
    }
}

/// Describes a message in errors.
pub(super) fn describe(request: &Request) -> String {
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
