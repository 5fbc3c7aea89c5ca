//! The end of a step: all buckets are reduced, or the step is abandoned (RED-4). After the first step, the plan is
//! rebuilt.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::Reducer;
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::Request;
use crate::error::{Error, Result};
use crate::metrics;
use crate::reducer::fingerprint::view;
use crate::reducer::state::{PlannedBuckets, ReducerAction};
use crate::reducer::{BucketPlan, ReducerEvent};
use crate::world::monitor::interrupt_pending;

/// The interval at which waits of a step look for signals.
pub(super) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl Reducer {
    /// At the end of a backward: the parameters without a gradient, in the order in which the caller must mark them
    /// ready, with an earlier gradient or with zeros. `frozen` are parameters that require no gradient any more.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], on every member, naming the parameters that should have a gradient.
    pub fn unused_parameters(self: &Arc<Self>, frozen: &[usize]) -> Result<Vec<usize>> {
        let (without, order) = {
            let state = self.state.lock();
            let Some(active) = &state.active else { return Ok(Vec::new()) };
            let missing = active.step.missing();
            match &state.history {
                Some(history) if !history.is_learned() => (Vec::new(), history.order()),
                Some(history) => (history.incomplete(&missing), missing),
                None if state.options.find_unused_parameters => (Vec::new(), missing),
                None => {
                    let without = missing.iter().copied().filter(|&param| !self.params[param].delayed).collect();
                    (without, missing)
                }
            }
        };
        if without.is_empty() { Ok(order) } else { Err(self.give_up(self.unused_message(&without, frozen))) }
    }

    /// Ends a backward: waits until every bucket is reduced. If parameters may be unused, returns for each whether any
    /// rank computed its gradient; otherwise none.
    ///
    /// # Errors
    /// Any error of the communicator. In a round that began with a vote, also an error if the other members do not end
    /// the round.
    /// [`Reducer::abandon`] must follow.
    pub fn finish(self: &Arc<Self>) -> Result<Option<Vec<bool>>> {
        let missing = self.missing();
        if !missing.is_empty() {
            // The caller has not marked unused parameters ready, so the wait would never end.
            return Err(self.give_up(self.unused_message(&missing, &[])));
        }
        self.request_end();
        let _exposed = metrics::exposed();
        let state = &mut self.state.lock();
        let mut interrupted = false;
        let (result, layout, order) = loop {
            let Some(active) = state.active.as_ref().filter(|active| !active.abandoned) else {
                return Err(Error::Internal("a backward ended that had not begun".to_owned()));
            };
            let ended = active.error.clone().map_or_else(
                || (active.reduced == state.layout.plan.buckets().len()).then_some(Ok(())),
                |error| Some(Err(error)),
            );
            if let Some(result) = ended {
                break (result, state.layout.clone(), active.step.observed_order());
            }
            if let Some(error) = &active.called_off {
                // `abandon` waits for the operation in flight.
                return Err(error.clone());
            }
            // Without the lock, because looking for signals may take an interpreter's lock while other threads need
            // this one.
            if self.changed.wait_for(state, SIGNAL_CHECK_INTERVAL).timed_out()
                && MutexGuard::unlocked(state, interrupt_pending)
            {
                interrupted = true;
                break (Ok(()), state.layout.clone(), Vec::new());
            }
        };
        if interrupted {
            MutexGuard::unlocked(state, || self.abandon("it was interrupted", false));
            return Err(Error::Interrupted { during: "the reduction of gradients".to_owned() });
        }
        let communication = state.active.take().map_or(0..0, |active| active.communication);
        result?;
        state.record.order.clone_from(&order);
        state.record.communication_start = communication.start;
        state.record.communication_end = communication.end;
        if let Some(history) = &mut state.history
            && !history.is_learned()
            && history.is_begun()
        {
            history.learn();
        }
        let used_always = state.used_always.clone();
        let compares_usage = state.options.may_leave_unused() && used_always.is_none();
        let mine = compares_usage.then(|| {
            let unknown = vec![0; self.params.len()];
            std::mem::replace(&mut state.used, unknown)
        });
        let (rebuild, is_static) = (!state.rebuilt, state.options.static_graph);
        let used = MutexGuard::unlocked(state, || {
            let used = mine.map(|mine| self.used_anywhere(mine)).transpose()?;
            if rebuild {
                self.rebuild(&layout, order)?;
            }
            Ok::<_, Error>(used.or(used_always))
        })?;
        if is_static {
            state.used_always.clone_from(&used);
        }
        state.record.rebuilt = state.rebuilt;
        state.record.unused_bytes = used
            .iter()
            .flatten()
            .zip(&self.params[..])
            .filter(|(used, _)| !**used)
            .map(|(_, param)| param.bytes())
            .sum();
        Ok(used)
    }

    /// Rebuilds the plan in the first member's `order` now, instead of after the first step. Parameters missing from
    /// `order` come last. Call it between steps. Collective.
    ///
    /// # Errors
    /// Any error of the communicator.
    pub fn follow_order(&self, mut order: Vec<usize>) -> Result<()> {
        let layout = self.settle()?.layout.clone();
        let mut rest: Vec<bool> = vec![true; self.params.len()];
        order.retain(|&param| rest.get_mut(param).is_some_and(std::mem::take));
        order.extend((0..rest.len()).filter(|&param| rest[param]));
        self.rebuild(&layout, order)
    }

    fn used_anywhere(&self, mut used: Vec<u8>) -> Result<Vec<bool>> {
        let data = view(&mut used)?;
        self.communicator.run(&Request::AllReduce { input: data, output: data, op: ReduceOp::BitOr })?;
        Ok(used.into_iter().map(|used| used != 0).collect())
    }

    /// Rebuilds the plan in the order that rank 0 observed (RED-5). Gradients in slots of the old window stay valid,
    /// because their leases keep it; they move when they next become ready.
    fn rebuild(&self, layout: &PlannedBuckets, order: Vec<usize>) -> Result<()> {
        let mut order: Vec<u64> = order.into_iter().map(|param| param as u64).collect();
        // SAFETY: `order` lives, untouched, until `run`, which blocks, has returned.
        let data = unsafe { TensorView::new(order.as_mut_ptr().cast(), order.len(), DType::Int64, Device::Cpu, 0) }?;
        self.communicator.run(&Request::Broadcast { data, root: 0 })?;
        let order: Vec<usize> = order.into_iter().map(|param| param as usize).collect();
        let plan = BucketPlan::new(&self.params, &order, &self.options());
        let layout = if plan == *layout.plan {
            layout.clone()
        } else {
            tracing::debug!(
                "gradient plan in observed order:\n{}",
                crate::reducer::plan::describe(&plan, &self.params)
            );
            PlannedBuckets::new(&self.communicator, plan, self.options().on_device)?
        };
        let state = &mut *self.state.lock();
        state.layout = layout;
        state.rebuilt = true;
        Ok(())
    }

    /// Ends the group's reductions on devices, because this member has not queued all of a step (RED-7).
    pub(super) fn end_devices(&self, message: &str, is_round: bool) {
        let message = self.communicator.with_cause(message);
        // The caller of rounds drops this reducer by itself.
        let (step, remedy) = match is_round {
            true => ("round of gradients", ""),
            false => (
                "backward",
                ": wrap the model in a new DistributedDataParallel on all of them, or, with TensorFlow, start the job \
                 again",
            ),
        };
        self.communicator.end_devices(Error::InvalidArgument(format!(
            "an earlier {step} of rank {} ended before its gradients were reduced ({message}), so the ranks' \
             reductions no longer fit together{remedy}",
            self.my_rank()
        )));
    }

    fn unused_message(&self, missing: &[usize], frozen: &[usize]) -> String {
        const NAMED: usize = 20;
        let mut names: Vec<String> =
            missing.iter().take(NAMED).map(|&param| format!("`{}`", self.params[param].name)).collect();
        if missing.len() > NAMED {
            names.push(format!("{} more", missing.len() - NAMED));
        }
        let cause = if missing.iter().all(|param| frozen.contains(param)) {
            "they were frozen (`requires_grad_(False)`) after DistributedDataParallel wrapped them: freeze before \
             wrapping, wrap again, or pass `find_unused_parameters=True`"
        } else if self.options().static_graph {
            "the first backward gave them one, so the graph is not static: pass `static_graph=False` and, if the loss \
             does not always depend on them, `find_unused_parameters=True` to DistributedDataParallel"
        } else {
            "if the loss does not depend on them, pass `find_unused_parameters=True` to DistributedDataParallel or \
             freeze them with `requires_grad_(False)` before wrapping"
        };
        format!(
            "{} of {} parameters got no gradient in this backward on rank {}: {}; {cause}",
            missing.len(),
            self.params.len(),
            self.my_rank(),
            names.join(", ")
        )
    }

    /// Ends the step with an error on all members, and waits until the others have received it. Returns the error.
    fn give_up(self: &Arc<Self>, message: String) -> Error {
        let error = Error::InvalidArgument(message.clone());
        self.abandon(&message, false);
        let mut state = self.state.lock();
        while state.active.as_ref().is_some_and(|active| active.abandoned) {
            self.changed.wait(&mut state);
        }
        error
    }

    /// Abandons a backward without waiting. The other members' step ends with an error that carries `message`.
    /// `more_follows` says whether the caller would have run more operations on the communicator after
    /// [`Reducer::finish`], as the other members will. With it, this has an effect also after a `finish` that has
    /// abandoned the backward itself. Otherwise this does nothing if no backward is under way.
    pub fn abandon(self: &Arc<Self>, message: &str, more_follows: bool) {
        // The other members request the end of the round, too.
        self.request_end();
        if let Some(device_queue) = self.device_queue.get() {
            // Waits for queued packing, because the caller may free the buckets after this returns. What a vote still
            // holds is dropped, and so is not waited for.
            let held = self.state.lock().active.as_mut().map(|active| active.gate.withdraw());
            held.into_iter().flatten().for_each(|job| device_queue.drop_job(job));
            device_queue.settle();
        }
        let mut settled = false;
        let action = 'decided: {
            let state = &mut *self.state.lock();
            let Some(active) = state.active.as_mut() else {
                let unreported = state.unreported.take().filter(|_| more_follows);
                break 'decided unreported
                    .map_or(ReducerAction::Nothing, |(id, message)| ReducerAction::GiveUp(id, message));
            };
            if active.abandoned {
                active.more_follows |= more_follows;
                return;
            }
            if active.gate.is_refused() {
                state.active = None;
                self.changed.notify_all();
                settled = true;
                break 'decided ReducerAction::Nothing;
            }
            active.abandoned = true;
            // Discards queued buckets, because the caller may free their gradients after this returns.
            active.queue.clear();
            active.more_follows |= more_follows;
            let own = state.options.reduces_on_device();
            let incomplete = active.reduced < state.layout.plan.buckets().len();
            // While a vote is open, `release` does this if the others carry out the round.
            if own && incomplete && active.gate.is_open() && self.communicator.members().size() > 1 {
                // The other members' reductions would wait for this rank's (RED-7).
                self.end_devices(message, active.is_round);
            }
            // After an error the others' steps have ended, and `next` sends them nothing.
            if self.communicator.members().size() > 1 {
                active.giving_up = Some(message.to_owned());
            }
            let action = state.next();
            settled = state.end_if_over(&action);
            self.changed.notify_all();
            action
        };
        if let (true, Some(listener)) = (settled, self.listener.get()) {
            listener.note(ReducerEvent::Settled);
        }
        self.perform(action);
    }
}
