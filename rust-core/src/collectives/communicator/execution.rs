//! Runs one operation of a group when its turn in the group's order has come.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::GroupState;
use crate::collectives::batch::{self, BatchPhase, BatchStep, PhaseListener};
use crate::collectives::call::{Call, Kind};
use crate::collectives::cuda::PendingWork;
use crate::collectives::window::Window;
use crate::collectives::{Group, Request, agreement, algorithms, rows};
use crate::error::{Error, Result};
use crate::metrics;
use crate::transport::Wait;

impl GroupState {
    pub(super) fn collective(&self, request: &Request, timeout: Option<Duration>) -> Result<()> {
        let members = self.transport.members();
        let call = self.check_window(request).and_then(|()| Call::of(request, members.me, members.size()));
        match call {
            Ok(Some(call)) if matches!(call.kind, Kind::AllGatherRows | Kind::AllToAllRows) => {
                self.rows(request, &call, timeout)
            }
            Ok(Some(call)) => self.enter(&call, timeout, |group| algorithms::run(request, &call, group)),
            Ok(None) => Err(Error::Internal("a message between pairs was queued as a collective".into())),
            Err(error) => {
                self.fail(&error.to_string())?;
                Err(error)
            }
        }
    }

    /// Runs an operation on rows: exchanges the numbers of rows, allocates the outputs, then runs it (ROW-1, ROW-2).
    pub(super) fn rows(&self, request: &Request, call: &Call, timeout: Option<Duration>) -> Result<()> {
        let mut rows = Vec::new();
        self.enter(call, timeout, |group| {
            rows = algorithms::sizes::gather_rows(call, group)?;
            Ok(())
        })?;
        match rows::settle(request, &rows) {
            Ok(settled) => self.collective(&settled, timeout),
            Err(error) => {
                self.fail(&error.to_string())?;
                Err(error)
            }
        }
    }

    /// Queues operations on CUDA tensors, which start together. The numbers of rows of operations on rows are exchanged
    /// between the hosts first, one operation after the other (ROW-1).
    pub(super) fn launch_settled(&self, requests: &[Request], timeout: Option<Duration>) -> Result<PendingWork> {
        if !requests.iter().any(rows::are_exchanged) {
            return self.cuda.launch(requests, timeout);
        }
        let settled = requests.iter().map(|request| match rows::are_exchanged(request) {
            true => self.settle_on_device(request, timeout),
            false => Ok(request.clone()),
        });
        let settled = settled.collect::<Result<Vec<_>>>()?;
        // On devices, the other members would not notice that this member's outputs cannot be allocated, so a barrier
        // on the hosts comes first (ROW-2).
        self.collective(&Request::Barrier, timeout)?;
        self.cuda.launch(&settled, timeout)
    }

    /// Exchanges the numbers of rows of an operation on CUDA tensors, and allocates its outputs.
    fn settle_on_device(&self, request: &Request, timeout: Option<Duration>) -> Result<Request> {
        let members = self.transport.members();
        let mut rows = Vec::new();
        let described = Call::describe(request, members.me, members.size())
            .and_then(|call| call.ok_or_else(|| Error::Internal("an operation on rows has no description".into())));
        if let Ok(call) = &described {
            self.enter(call, timeout, |group| {
                rows = algorithms::sizes::gather_rows(call, group)?;
                Ok(())
            })?;
        }
        described.and_then(|_| rows::settle(request, &rows)).or_else(|error| {
            self.fail(&error.to_string())?;
            Err(error)
        })
    }

    pub(super) fn batch(
        &self,
        requests: &[Request],
        timeout: Option<Duration>,
        watch: Option<&dyn PhaseListener>,
    ) -> Result<()> {
        let members = self.transport.members();
        let enter = |phase, places: &Range<usize>| watch.iter().for_each(|watch| watch.enters(phase, places));
        for step in batch::plan(requests, members.me, members.size()) {
            match step {
                BatchStep::One(at) => {
                    let places = at..at + 1;
                    enter(BatchPhase::Run, &places);
                    let outcome = self.collective(&requests[at], timeout);
                    enter(BatchPhase::Over, &places);
                    outcome?;
                }
                BatchStep::Together(places) => {
                    enter(BatchPhase::CopyIn, &places);
                    let together = batch::PackedCollective::new(&requests[places.clone()]);
                    enter(BatchPhase::Run, &places);
                    let outcome = self.collective(together.request(), timeout);
                    if outcome.is_ok() {
                        enter(BatchPhase::CopyOut, &places);
                        together.copy_results();
                    }
                    enter(BatchPhase::Over, &places);
                    outcome.map_err(|error| together.explain(error))?;
                }
            }
        }
        Ok(())
    }

    /// Checks that the window belongs to this group.
    pub(super) fn check_window(&self, request: &Request) -> Result<()> {
        match request {
            Request::AllReduceWindow { window, .. } if window.group() != self.id => Err(Error::InvalidArgument(
                format!("a window of group {} was passed to an operation of group {}", window.group(), self.id),
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn fail(&self, message: &str) -> Result<()> {
        let call = Call { message: message.to_owned(), ..Call::new(Kind::Poison) };
        self.enter(&call, None, |group| match group.memory {
            Some(memory) => {
                agreement::publish(memory, &call, 0);
                memory.arrive();
                memory.reset_regions();
                self.stores.reset();
                self.paths.reset();
                self.unsettled.store(true, Ordering::Relaxed);
                Ok(())
            }
            // The agreement reports this member's own message as a failed peer, which is expected here.
            None => agreement::agree_without_memory(&call, group).or_else(|error| match error {
                Error::PeerFailed { .. } if group.in_step.get() => Ok(()),
                other => Err(other),
            }),
        })
    }

    pub(super) fn window(&self, bytes: usize, made: &OnceLock<Arc<Window>>) -> Result<()> {
        let number = self.windows.fetch_add(1, Ordering::Relaxed);
        let call = Call { elems: bytes, window: number, ..Call::new(Kind::Window) };
        self.enter(&call, None, |group| {
            // This barrier compares the sizes.
            algorithms::run(&Request::Barrier, &call, group)?;
            let window = Window::create(number, bytes, group)?;
            let _ = made.set(Arc::new(window));
            Ok(())
        })
    }

    /// Runs `operation` as the group's next one, unless the group is closed, broken or stopped (COM-5, COM-7).
    pub(super) fn enter(
        &self,
        call: &Call,
        timeout: Option<Duration>,
        operation: impl FnOnce(&Group<'_>) -> Result<()>,
    ) -> Result<()> {
        let members = self.transport.members();
        if let Some(reason) = self.closed.get() {
            return Err(Error::Closed { reason: reason.clone() });
        }
        match self.broken.get() {
            None => {}
            Some(Error::PeerFailed { rank, how, me, .. }) => {
                return Err(Error::PeerFailed { rank: *rank, how: how.clone(), me: *me, during: call.to_string() });
            }
            Some(error) => {
                return Err(Error::Closed { reason: format!("an earlier operation of the group failed: {error}") });
            }
        }
        if let Some(error) = self.panicked.get().filter(|_| !matches!(call.kind, Kind::Poison)) {
            self.fail(&error.to_string())?;
            return Err(error.clone());
        }
        let start = Instant::now();
        let during = || call.to_string();
        let wait = Wait {
            during: &during,
            start,
            deadline: start + timeout.unwrap_or(self.timeout),
            monitor: &self.monitor,
            members: self.transport.depends_on().unwrap_or(&members.ranks),
            drain_timeout: self.transport.drain_timeout(),
            closed: &self.closed,
        };
        let group = Group {
            transport: &*self.transport,
            memory: self.transport.shared(),
            hosts: self.transport.hosts(),
            members,
            paths: &self.paths,
            timed_class: Default::default(),
            waited: Default::default(),
            stores: &self.stores,
            results: &self.results,
            depths: &self.depths,
            scratch: &self.scratch,
            wait,
            id: self.id,
            operation: self.operations.fetch_add(1, Ordering::Relaxed),
            in_step: Default::default(),
        };
        metrics::note_call(call);
        let entered = start.saturating_duration_since(self.made).as_nanos() as u64 + 1;
        self.entered.store(entered, Ordering::Relaxed);
        let outcome = match group.memory.filter(|_| self.unsettled.swap(false, Ordering::Relaxed)) {
            Some(memory) => memory.await_all(&wait).and_then(|()| operation(&group)),
            None => operation(&group),
        };
        self.entered.store(0, Ordering::Relaxed);
        metrics::note_communication(start.elapsed());
        if let Err(Error::Timeout { .. }) = &outcome {
            metrics::note_stall();
        }
        if let Err(error) = &outcome
            && !group.in_step.get()
        {
            let _ = self.broken.set(error.clone());
        }
        outcome
    }
}
