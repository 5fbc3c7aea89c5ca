//! The state of a reducer's steps. [`super::runner`] changes it under a lock and performs the resulting actions without
//! the lock.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ballot::Vote;
use super::copy::{self, Move};
use super::device_queue::DeviceJob;
use super::gradient_placement::GradientPlacement;
use super::history::History;
use super::vote_gate::VoteGate;
use super::{Arena, Bucket, BucketPlan, BucketReduction, ParamSpec, ReducerOptions, Slot, Step};
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Communicator;
use crate::error::{Error, Result};
use crate::metrics;
use crate::trace;

/// The parts of the state that a new bucket plan replaces.
#[derive(Clone)]
pub(super) struct PlannedBuckets {
    pub(super) plan: Arc<BucketPlan>,
    /// The memory of the slots; none for gradients on a device.
    pub(super) arena: Option<Arc<Arena>>,
    /// Unique for each plan of this process.
    pub(super) number: u64,
}

/// The state of a reducer, in and between steps.
pub(super) struct StepState {
    pub(super) options: ReducerOptions,
    /// Whether the communicator has more than one member.
    has_others: bool,
    pub(super) layout: PlannedBuckets,
    pub(super) active: Option<ActiveStep>,
    /// The number of steps so far. It tells a late completion of an earlier step apart.
    pub(super) steps: u64,
    /// Backwards since the last reduced one.
    pub(super) accumulated: u32,
    /// For each parameter: 1 if it got a gradient since the last reduced step. Kept only where parameters may be
    /// unused.
    pub(super) used: Vec<u8>,
    /// Set for a static graph.
    pub(super) history: Option<History>,
    /// For a static graph, once known: which parameters any rank uses.
    pub(super) used_always: Option<Vec<bool>>,
    pub(super) placement: GradientPlacement,
    pub(super) rebuilt: bool,
    pub(super) record: Record,
    /// An error that was not reported to the others when a step was abandoned, because they waited for nothing more of
    /// it.
    pub(super) unreported: Option<(u64, String)>,
}

/// Statistics of the last reduced step.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// Parameters in the order in which their gradients arrived.
    pub order: Vec<usize>,
    /// When the first bucket was full, on [`trace::now`]'s clock.
    pub communication_start: u64,
    /// When the last bucket was reduced.
    pub communication_end: u64,
    /// Whether the plan follows an observed order (RED-5).
    pub rebuilt: bool,
    /// Bytes of parameters that no rank used.
    pub unused_bytes: usize,
}

/// The state of the current step.
pub(super) struct ActiveStep {
    pub(super) id: u64,
    pub(super) step: Step,
    /// Addresses of gradients that are not in their slots, by parameter.
    pub(super) elsewhere: HashMap<usize, *mut u8>,
    /// For each parameter: in which of its slots the gradient lies, if it is in one.
    pub(super) copies: Vec<usize>,
    /// Full buckets that are not yet submitted to the communicator.
    pub(super) queue: VecDeque<usize>,
    /// Whether an operation of this step is in flight.
    pub(super) in_flight: bool,
    /// Whether the bucket in flight lies in the spare range.
    pub(super) bounced: bool,
    pub(super) reduced: usize,
    pub(super) error: Option<Error>,
    /// Set when this rank cannot continue: the message for the other ranks, if they still wait for something.
    pub(super) giving_up: Option<String>,
    /// Whether the other ranks run more operations in this step after its buckets.
    pub(super) more_follows: bool,
    /// Whether the step is only kept until the operation in flight completes.
    pub(super) abandoned: bool,
    /// Nothing is submitted to the communicator before it opens. If it refuses the round, gradients may still arrive,
    /// and are ignored.
    pub(super) gate: VoteGate<DeviceJob>,
    /// Whether this is a round that began with a vote.
    pub(super) is_round: bool,
    /// In a round that began with a vote: used to request its end.
    pub(super) vote: Option<Vote>,
    /// The error that ends the wait for the step's end, even if an operation is in flight.
    pub(super) called_off: Option<Error>,
    /// The time from the first full bucket to the last reduced one.
    pub(super) communication: Range<u64>,
    pub(super) times: Vec<BucketTimes>,
}

// SAFETY: the pointers in `elsewhere` are gradients whose owner keeps them alive and untouched from `mark_ready` until
// the step has ended (the contract of `mark_ready`); any thread may read and write them in between.
unsafe impl Send for ActiveStep {}

/// The times of a bucket's phases, in the timeline's nanoseconds; zero while the timeline is off.
#[derive(Clone, Copy, Default)]
pub(super) struct BucketTimes {
    pub(super) first_ready: u64,
    pub(super) full: u64,
    pub(super) submitted: u64,
}

/// The next action of the reducer: decided under the lock, performed without it.
pub(super) enum ReducerAction {
    Nothing,
    /// All-reduces a bucket: the step, the bucket, the plan, the offset in the window, the element type and the
    /// reduction.
    Reduce(u64, usize, PlannedBuckets, usize, (DType, ReduceOp)),
    GiveUp(u64, String),
}

impl StepState {
    /// The state before the first step.
    pub(super) fn new(params: &[ParamSpec], options: ReducerOptions, layout: PlannedBuckets, has_others: bool) -> Self {
        Self {
            layout,
            active: None,
            steps: 0,
            accumulated: 0,
            used: vec![0; params.len()],
            history: options.static_graph.then(|| History::new(params.len())),
            used_always: None,
            options,
            has_others,
            placement: GradientPlacement::new(params.iter().map(ParamSpec::bytes)),
            rebuilt: false,
            unreported: None,
            record: Record::default(),
        }
    }

    /// Changes the options and discards what earlier steps have taught.
    pub(super) fn configure(&mut self, options: ReducerOptions, layout: PlannedBuckets) {
        self.layout = layout;
        self.history = options.static_graph.then(|| History::new(self.used.len()));
        self.used_always = None;
        self.used.fill(0);
        self.rebuilt = false;
        self.options = options;
    }

    /// Begins a step; with `held`, a round whose vote is open.
    pub(super) fn open(&mut self, held: bool, vote: Option<Vote>) {
        self.steps += 1;
        metrics::note_reducer_step();
        self.unreported = None;
        if let Some(history) = &mut self.history {
            history.start();
        }
        let plan = &self.layout.plan;
        self.active = Some(ActiveStep {
            id: self.steps,
            step: Step::new(plan),
            elsewhere: HashMap::new(),
            copies: vec![0; plan.num_params()],
            queue: VecDeque::new(),
            in_flight: false,
            bounced: false,
            reduced: 0,
            error: None,
            giving_up: None,
            more_follows: !self.rebuilt || (self.options.may_leave_unused() && self.used_always.is_none()),
            abandoned: false,
            gate: VoteGate::new(held),
            is_round: held,
            vote,
            called_off: None,
            communication: 0..0,
            times: vec![BucketTimes::default(); plan.buckets().len()],
        });
    }

    /// Closes the vote of a round. Returns none if the round is over or its vote was closed before. Otherwise also
    /// returns the reductions on a device that waited: to carry out, or to drop after `cancel`.
    pub(super) fn close_vote(&mut self, round: u64, cancel: bool) -> Option<(ReducerAction, Vec<DeviceJob>)> {
        let active = self.active.as_mut().filter(|active| active.id == round && active.gate.is_held())?;
        let (action, jobs) = match cancel {
            true => (ReducerAction::Nothing, active.gate.refuse()),
            false => {
                let jobs = active.gate.open();
                (self.next(), jobs)
            }
        };
        self.end_if_over(&action);
        Some((action, jobs))
    }

    /// Notes the gradient of a parameter at `ptr`. Returns the buckets that it completes.
    pub(super) fn mark_ready(
        &mut self,
        spec: &ParamSpec,
        param: usize,
        ptr: *mut u8,
        used: bool,
    ) -> Result<Range<usize>> {
        let Some(active) = self.active.as_mut().filter(|active| !active.abandoned) else {
            return Err(Error::Internal(format!("`{}` got a gradient outside backward", spec.name)));
        };
        if let Some(error) = &active.error {
            return Err(error.clone());
        }
        let PlannedBuckets { plan, arena, .. } = &self.layout;
        let Some(launch) = active.step.mark_ready(plan, param) else {
            return Err(Error::InvalidArgument(format!(
                "parameter `{}` got a second gradient in one backward, when its bucket may be reduced already: \
                 re-entrant checkpointing does this to a parameter that several checkpoints use; pass \
                 `use_reentrant=False` to `checkpoint`, or `static_graph=True` to DistributedDataParallel",
                spec.name
            )));
        };
        let used = self.history.as_ref().map_or(used, |history| history.has_gradient(param));
        if used && self.options.may_leave_unused() {
            self.used[param] = 1;
        }
        if let Some(arena) = arena
            && spec.bytes() > 0
        {
            match arena.copy_at(param, ptr) {
                Some(copy) => active.copies[param] = copy,
                None => drop(active.elsewhere.insert(param, ptr)),
            }
        }
        let now = if trace::enabled() || !launch.is_empty() { trace::now() } else { 0 };
        if active.communication.start == 0 && !launch.is_empty() {
            active.communication.start = now;
        }
        if trace::enabled() {
            let times = &mut active.times[plan.bucket_of(param)];
            if times.first_ready == 0 {
                times.first_ready = now;
            }
            for bucket in launch.clone() {
                active.times[bucket].full = now;
            }
        }
        Ok(launch)
    }

    /// Queues buckets for reduction.
    pub(super) fn queue(&mut self, buckets: Range<usize>) {
        if let Some(active) = &mut self.active {
            active.queue.extend(buckets);
        }
    }

    /// The next action (RED-2: one operation at a time, and none after an error).
    pub(super) fn next(&mut self) -> ReducerAction {
        let Self { active: Some(active), layout, options, unreported, has_others, .. } = self else {
            return ReducerAction::Nothing;
        };
        if active.in_flight || !active.gate.is_open() || active.error.is_some() {
            return ReducerAction::Nothing;
        }
        if let Some(bucket) = active.queue.pop_front() {
            active.in_flight = true;
            if trace::enabled() {
                active.times[bucket].submitted = trace::now();
            }
            let planned = &layout.plan.buckets()[bucket];
            // A bucket travels in the spare range if its gradients are not all in one set of slots, because the
            // caller's tensors refer to some, or if it is compressed. One bucket is in flight at a time, so the range
            // is free. The copy is made under the lock, because gradients may be gone after `abandon`.
            let wire = options.wire_dtype(planned.dtype);
            let copy = active.copy_of(planned).filter(|_| wire == planned.dtype);
            active.bounced = *has_others && copy.is_none();
            let offset_bytes = match copy {
                Some(copy) => planned.offset_bytes + copy * layout.plan.copy_bytes(),
                None => layout.plan.spare_offset_bytes(),
            };
            if active.bounced {
                // SAFETY: gradients are valid until the step has ended (contract of `mark_ready`) or lie in slots; the
                // spare range is as long as the largest bucket, and overlaps neither.
                unsafe { copy::copy_all(layout.to_spare(bucket, active, wire)) };
            }
            return ReducerAction::Reduce(active.id, bucket, layout.clone(), offset_bytes, (wire, options.op()));
        }
        // The others may have waited only for the bucket that was in flight when this rank gave up. Then their step has
        // succeeded, and a failure reported now would end their next step.
        let wait_for_buckets =
            active.reduced < layout.plan.buckets().len() && options.reduction != BucketReduction::ByCaller;
        let others_wait = wait_for_buckets || active.more_follows;
        match active.giving_up.take() {
            Some(message) if others_wait => {
                active.in_flight = true;
                ReducerAction::GiveUp(active.id, message)
            }
            Some(message) => {
                *unreported = Some((active.id, message));
                ReducerAction::Nothing
            }
            None => ReducerAction::Nothing,
        }
    }

    /// Takes the completion of `bucket`, or of giving up. Returns whether it belongs to the current step.
    pub(super) fn take_answer(&mut self, id: u64, bucket: Option<usize>, result: Result<()>) -> bool {
        let Some(active) = self.active.as_mut().filter(|active| active.id == id) else { return false };
        active.in_flight = false;
        match result {
            Ok(()) => {
                active.note_reduced();
                if let (Some(bucket), true, false) = (bucket, active.bounced, active.abandoned) {
                    let wire = self.options.wire_dtype(self.layout.plan.buckets()[bucket].dtype);
                    let back = self.layout.to_spare(bucket, active, wire).map(Move::reversed);
                    // SAFETY: as in `next`; the step has not ended and is not abandoned.
                    unsafe { copy::copy_all(back) };
                }
            }
            Err(error) => {
                active.error = Some(error);
                active.queue.clear();
            }
        }
        true
    }

    /// Writes a reduced bucket to the timeline.
    pub(super) fn trace(&self, bucket: usize, reducer: u64) {
        let Some(active) = &self.active else { return };
        let times = active.times[bucket];
        let bytes = self.layout.plan.buckets()[bucket].bytes as u64;
        let track = trace::Track::Bucket { reducer, bucket };
        trace::complete("filling", track, times.first_ready, times.full, None);
        trace::complete("waiting", track, times.full, times.submitted, None);
        trace::complete("reducing", track, times.submitted, trace::now(), Some(("bytes", bytes)));
    }

    /// Ends an abandoned step if nothing of it is in flight or follows. Returns whether it has ended.
    pub(super) fn end_if_over(&mut self, next: &ReducerAction) -> bool {
        let over = |active: &ActiveStep| {
            active.abandoned && !active.in_flight && !active.gate.is_held() && matches!(next, ReducerAction::Nothing)
        };
        self.active.take_if(|active| over(active)).is_some()
    }
}

impl ActiveStep {
    /// Counts a reduced bucket.
    pub(super) fn note_reduced(&mut self) {
        self.reduced += 1;
        self.communication.end = trace::now();
    }

    /// The set of slots in which all gradients of a bucket lie, if it is one set.
    fn copy_of(&self, bucket: &Bucket) -> Option<usize> {
        let mut slots = bucket.slots.iter().filter(|slot| slot.bytes > 0).map(|slot| slot.param);
        let copy = self.copies[slots.next()?];
        let is_elsewhere = |slot: &Slot| self.copies[slot.param] != copy || self.elsewhere.contains_key(&slot.param);
        (!bucket.slots.iter().any(|slot| slot.bytes > 0 && is_elsewhere(slot))).then_some(copy)
    }
}

impl PlannedBuckets {
    pub(super) fn new(communicator: &Communicator, plan: BucketPlan, on_device: bool) -> Result<Self> {
        let arena = match on_device {
            true => None,
            false => Some(Arena::new(communicator.window(plan.window_bytes())?, &plan)),
        };
        static MADE: AtomicU64 = AtomicU64::new(0);
        Ok(Self { plan: Arc::new(plan), arena, number: MADE.fetch_add(1, Ordering::Relaxed) })
    }

    /// The slots' memory. Only for gradients in host memory.
    pub(super) fn arena(&self) -> &Arc<Arena> {
        self.arena.as_ref().expect("gradients in host memory have an arena")
    }

    /// The copies that bring a bucket's gradients to the spare range, where elements have type `wire`.
    fn to_spare(&self, bucket: usize, active: &ActiveStep, wire: DType) -> impl Iterator<Item = Move> {
        let bucket = &self.plan.buckets()[bucket];
        bucket.slots.iter().map(move |slot| {
            let in_slot = || self.arena().slot_ptr(slot.param, active.copies[slot.param]);
            let from = active.elsewhere.get(&slot.param).copied().unwrap_or_else(in_slot);
            let before = (slot.offset_bytes - bucket.offset_bytes) / bucket.dtype.size() * wire.size();
            let to = self.arena().at(self.plan.spare_offset_bytes() + before);
            Move { from, from_dtype: bucket.dtype, to, to_dtype: wire, elems: slot.bytes / bucket.dtype.size() }
        })
    }
}
