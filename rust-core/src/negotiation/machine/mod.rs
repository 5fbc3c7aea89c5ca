//! The state machine of one member's negotiation, without threads, clocks or a transport: events are passed in, and
//! actions are returned. So the thread of a [`super::Negotiator`] and a simulation of thousands of ranks run the same
//! code.

mod answers;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::WaitEnd;
use super::bits::{BitSet, RankSet};
use super::cache::{Cache, Evicted};
use super::description::Description;
use super::message::{Announcement, Down, MAX_VARIANTS, NegotiationLimits, NegotiationMessage, Up, Variant};
use super::stall::{Stall, StallTimeouts, Waits};
use super::tree::Tree;
use super::tune::{Trial, Tuner};
use crate::error::{Error, Result};

/// The id of a submission of this member, assigned by the caller.
pub(super) type SubmissionId = u64;

/// Calls of this member that are answered, in the order in which they run.
type Offers = Vec<(Arc<str>, Arc<Description>)>;

/// An action for the caller, to be performed in order.
#[derive(Debug)]
pub(super) enum NegotiationAction {
    /// Sends a message to the parent.
    Up(Up),
    /// Sends a message to every child.
    Down(Down),
    /// Runs these calls as one operation, after all earlier ones.
    Run(Vec<Operand>),
    /// Fails a submission with an error.
    Fail(SubmissionId, Error),
    /// Ends a wait that is not for a name ([`super::OtherWaits::end`]).
    EndSteps(WaitEnd),
    /// Completes `join`: all ranks have joined, this global rank last.
    Joined(usize),
    /// Logs a warning.
    Warn(String),
    /// Logs which other waits are ended.
    Blame(String),
    /// Logs a fusion size that autotuning tried.
    Tried(Trial),
}

/// This member's part in one collective of an operation.
#[derive(Debug)]
pub(super) enum Operand {
    /// The call that it submitted.
    Own(SubmissionId),
    /// The member has joined, so it contributes a neutral element and ignores the result.
    Neutral(Arc<Description>),
}

/// A call of this member that has no answer yet.
#[derive(Debug)]
pub(super) struct Submission {
    ticket: SubmissionId,
    description: Arc<Description>,
    pub(super) blocking: bool,
    pub(super) since: Duration,
}

/// The calls of one name: the first is being negotiated, the others wait for it (NEG-3).
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) first: Submission,
    behind: VecDeque<Submission>,
}

/// The source of an announcement: this member itself, or a child, which reports for several ranks.
#[derive(Debug)]
struct ReportSource {
    ranks: Range<usize>,
    /// Cache positions that it announced and that have no answer.
    ready: BitSet,
    with_neutral: BitSet,
    /// Whether all its ranks have joined.
    joined: bool,
    /// Number of answers that it has received.
    num_received: u64,
}

/// A name that some source announced with a description.
#[derive(Debug, Default)]
struct NamedCall {
    variants: Vec<Variant>,
    /// Sources that announced it, as bits.
    from: u32,
    with_neutral: bool,
    /// Whether it was announced to the parent.
    sent: bool,
}

impl NamedCall {
    fn add(&mut self, description: &Description, ranks: &RankSet) {
        let known = self.variants.iter().position(|variant| variant.description == *description);
        match known {
            Some(at) => self.variants[at].ranks.merge(ranks),
            None if self.variants.len() < MAX_VARIANTS => {
                self.variants.push(Variant { description: description.clone(), ranks: ranks.clone() });
            }
            None => {}
        }
    }
}

/// The state machine of one member's negotiation.
pub(super) struct Machine {
    tree: Tree,
    /// Global ranks of the members.
    ranks: Arc<[usize]>,
    limits: NegotiationLimits,
    cache: Cache,
    pending: HashMap<Arc<str>, Queue>,
    /// Sources: this member first, then its children.
    sources: Vec<ReportSource>,
    named: HashMap<Arc<str>, NamedCall>,
    /// Names in `named` that got an announcement since the last look.
    fresh: Vec<Arc<str>>,
    /// Positions that were announced to the parent.
    sent: BitSet,
    /// Evictions that a child may not have seen (NEG-4), with the number of the answer.
    evictions: Vec<(u64, Evicted)>,
    /// Number of answers so far.
    number: u64,
    /// Announcements from before the answer with this number were ended by a failure (NEG-5).
    void_before: u64,
    /// `join` was called and has not completed; it takes effect once no call is pending.
    joining: bool,
    /// The rank of this subtree that joined last, and whether the parent knows it.
    last_joined: usize,
    told_joined: bool,
    /// Whether this member can take part in operations on devices after it has joined.
    has_device: bool,
    /// A rank of this subtree that has joined and cannot, and whether the parent knows it.
    unable: Option<u32>,
    told_unable: bool,
    stall: Stall,
    /// The root's autotuning, if enabled, and the fusion size for its next answer.
    tuner: Option<Tuner>,
    next_fusion: Option<u64>,
    /// For the timeline: names that children announced, and the members for which they did.
    log: Option<Vec<(Arc<str>, Range<usize>)>>,
}

impl Machine {
    /// Creates the state of the member at `tree`. `limits` are those of the root.
    pub(super) fn new(
        tree: Tree,
        ranks: Arc<[usize]>,
        limits: NegotiationLimits,
        stall_timeouts: StallTimeouts,
    ) -> Self {
        let source = |ranks| ReportSource {
            ranks,
            ready: BitSet::default(),
            with_neutral: BitSet::default(),
            joined: false,
            num_received: 0,
        };
        let sources: Vec<ReportSource> =
            std::iter::once(tree.me..tree.me + 1).chain(tree.children.iter().cloned()).map(source).collect();
        let stall = Stall::new(tree.children.len(), stall_timeouts);
        Self {
            tree,
            ranks,
            limits,
            cache: Cache::default(),
            pending: HashMap::new(),
            sources,
            named: HashMap::new(),
            fresh: Vec::new(),
            sent: BitSet::default(),
            evictions: Vec::new(),
            number: 0,
            void_before: 0,
            joining: false,
            last_joined: 0,
            told_joined: false,
            has_device: false,
            unable: None,
            told_unable: false,
            stall,
            tuner: None,
            next_fusion: None,
            log: None,
        }
    }

    /// Enables autotuning of the fusion size; only on the root.
    pub(super) fn tune(&mut self, tuner: Tuner) {
        self.limits.fusion_bytes = tuner.first();
        self.tuner = Some(tuner);
    }

    /// Sets whether to record what [`Machine::take_log`] returns.
    pub(super) fn log_ready(&mut self, on: bool) {
        self.log = on.then(Vec::new);
    }

    /// Names that children announced, and the members for which they did.
    pub(super) fn take_log(&mut self) -> Vec<(Arc<str>, Range<usize>)> {
        self.log.take().unwrap_or_default()
    }

    /// Submits a call of this member under `name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] between `join` and its completion.
    pub(super) fn submit(
        &mut self,
        ticket: SubmissionId,
        name: &str,
        description: Description,
        blocking: bool,
        now: Duration,
    ) -> Result<()> {
        if self.joining {
            return Err(Error::InvalidArgument(format!(
                "`{name}`: this rank has called `join()` and cannot take part before all ranks have"
            )));
        }
        self.stall.changed(now);
        self.stall.pending(blocking, 1);
        if let Some(queue) = self.pending.get_mut(name) {
            let description = Arc::new(description);
            queue.behind.push_back(Submission { ticket, description, blocking, since: now });
            return Ok(());
        }
        // A description that the cache contains is not stored twice.
        let slot = self.cache.position(name).and_then(|position| self.cache.slot(position));
        let (name, description) = match slot {
            Some(slot) if *slot.description == description => (slot.name.clone(), slot.description.clone()),
            _ => (Arc::from(name), Arc::new(description)),
        };
        self.offer(&name, &description);
        let first = Submission { ticket, description, blocking, since: now };
        self.pending.insert(name, Queue { first, behind: VecDeque::new() });
        Ok(())
    }

    fn announce_own(&mut self, name: &Arc<str>, description: &Description) {
        let me = RankSet::of(self.sources[0].ranks.clone());
        let named = self.named.entry(name.clone()).or_default();
        named.add(description, &me);
        named.from |= 1;
        self.fresh.push(name.clone());
    }

    /// Marks this member as ready for a name.
    fn offer(&mut self, name: &Arc<str>, description: &Arc<Description>) {
        match self.cache.position(name) {
            Some(position) if self.cache.slot(position).is_some_and(|slot| slot.description == *description) => {
                self.sources[0].ready.set(position);
                if self.named.contains_key(name) {
                    // Some rank of this subtree has announced the name with another description.
                    self.fresh.push(name.clone());
                }
            }
            _ => self.announce_own(name, description),
        }
    }

    /// This member has no further calls: [`NegotiationAction::Joined`] follows when all members have joined.
    /// `has_device` says whether it can take part in the others' operations on devices.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has joined already.
    pub(super) fn join(&mut self, has_device: bool, now: Duration) -> Result<()> {
        if self.joining {
            return Err(Error::InvalidArgument("`join()` was called while another one waits".into()));
        }
        self.joining = true;
        self.has_device = has_device;
        self.stall.changed(now);
        Ok(())
    }

    /// Whether any call of this member waits.
    pub(super) fn is_waiting(&self) -> bool {
        !self.pending.is_empty() || self.joining
    }

    /// Whether `tick` must be called: this member is the root of a wait, or has a report that is due.
    pub(super) fn must_tick(&self) -> bool {
        self.stall.has_reports()
    }

    /// Processes a message of a neighbour in the tree.
    ///
    /// # Errors
    /// [`Error::Internal`] if the message is invalid.
    pub(super) fn receive(
        &mut self,
        from: usize,
        message: NegotiationMessage,
        now: Duration,
        actions: &mut Vec<NegotiationAction>,
    ) -> Result<()> {
        let invalid = |what: &str| Err(Error::Internal(format!("rank {} sent {what}", self.ranks[from])));
        match message {
            NegotiationMessage::Up(up) => {
                let child = self.tree.children.iter().position(|child| child.start == from);
                let Some(child) = child else {
                    return invalid("a readiness report, but it is not a child of this rank");
                };
                let known = |position: usize| self.cache.slot(position).is_some();
                if up.num_received > self.number || !up.ready.iter().all(known) {
                    return invalid("an unknown cache position");
                }
                self.receive_up(child, up, now);
                Ok(())
            }
            NegotiationMessage::Down(down) if self.tree.parent == Some(from) => {
                if down.number != self.number {
                    return invalid("an answer out of order");
                }
                self.apply(down, now, actions);
                Ok(())
            }
            NegotiationMessage::Down(_) => invalid("an answer, but it is not the parent of this rank"),
        }
    }

    fn receive_up(&mut self, child: usize, up: Up, now: Duration) {
        let at = child + 1;
        self.sources[at].num_received = up.num_received;
        if let Some(last) = up.joined {
            self.sources[at].joined = true;
            self.last_joined = last as usize;
            // Names that were waiting only for the ranks that have joined.
            self.fresh.extend(self.named.keys().cloned());
        }
        self.unable = self.unable.or(up.unable);
        if up.num_received >= self.void_before {
            let is_progress = !up.ready.is_empty() || !up.named.is_empty();
            self.stall.receive_report(child, up.report, is_progress, up.num_received == self.number, now);
            if let Some(log) = &mut self.log {
                let members = &self.sources[at].ranks;
                let known = up.ready.iter().filter_map(|position| self.cache.slot(position));
                log.extend(known.map(|slot| (slot.name.clone(), members.clone())));
                log.extend(up.named.iter().map(|named| (Arc::from(named.name.as_str()), members.clone())));
            }
            self.receive_ready(at, &up.ready, &up.with_neutral);
            for Announcement { name, variants, with_neutral } in up.named {
                let name = self.known_name(name);
                let named = self.named.entry(name.clone()).or_default();
                variants.iter().for_each(|variant| named.add(&variant.description, &variant.ranks));
                named.from |= 1 << at;
                named.with_neutral |= with_neutral;
                self.fresh.push(name);
            }
        }
        let seen = self.sources[1..].iter().map(|source| source.num_received).min().unwrap_or(self.number);
        self.evictions.retain(|(number, _)| *number >= seen);
    }

    fn receive_ready(&mut self, at: usize, ready: &BitSet, with_neutral: &BitSet) {
        let num_received = self.sources[at].num_received;
        if self.evictions.iter().any(|(number, _)| *number >= num_received) {
            // The sender may have used a position before it learned that the position was given to another name
            // (NEG-4).
            for position in ready.iter() {
                let then = |(number, old): &&(u64, Evicted)| *number >= num_received && old.position == position;
                match self.evictions.iter().find(then) {
                    Some((_, old)) => {
                        let (name, description) = (old.name.clone(), old.description.clone());
                        self.put_in_words(at, &name, &description, with_neutral.get(position));
                    }
                    None => {
                        self.sources[at].ready.set(position);
                        if with_neutral.get(position) {
                            self.sources[at].with_neutral.set(position);
                        }
                    }
                }
            }
        } else {
            self.sources[at].ready.add(ready);
            self.sources[at].with_neutral.add(with_neutral);
        }
        // Other sources may have announced the name with another description.
        let mixed = |name: &&Arc<str>| self.cache.position(name).is_some_and(|position| ready.get(position));
        self.fresh.extend(self.named.keys().filter(mixed).cloned());
    }

    /// A source announced a name by position.
    fn put_in_words(&mut self, at: usize, name: &Arc<str>, description: &Description, with_neutral: bool) {
        let ranks = RankSet::of(self.sources[at].ranks.clone());
        let named = self.named.entry(name.clone()).or_default();
        named.add(description, &ranks);
        named.from |= 1 << at;
        named.with_neutral |= with_neutral;
        self.fresh.push(name.clone());
    }

    fn known_name(&self, name: String) -> Arc<str> {
        match self.named.get_key_value(name.as_str()) {
            Some((known, _)) => known.clone(),
            None => name.into(),
        }
    }

    /// Announces names that have become ready; on the root, answers them.
    pub(super) fn flush(&mut self, now: Duration, actions: &mut Vec<NegotiationAction>) {
        self.note_join();
        if self.tree.parent.is_some() {
            return self.tell_parent(actions);
        }
        // In a group of one, the next call of a name may be ready right after an answer.
        while let Some(down) = self.decide() {
            self.apply(down, now, actions);
            self.note_join();
        }
    }

    /// Lets a pending `join` take effect once no call of this member waits (NEG-6).
    fn note_join(&mut self) {
        if self.joining && self.pending.is_empty() && !self.sources[0].joined {
            self.sources[0].joined = true;
            self.last_joined = self.tree.me;
            if !self.has_device {
                self.unable.get_or_insert(self.tree.me as u32);
            }
            self.fresh.extend(self.named.keys().cloned());
        }
    }

    /// Cache positions for which all ranks of this subtree are ready, and those of them to which joined ranks
    /// contribute.
    fn complete(&mut self) -> (BitSet, BitSet) {
        let (mut complete, mut with_neutral) = Default::default();
        let words = self.sources.iter().map(|source| source.ready.num_words()).max().unwrap_or(0);
        for index in 0..words {
            let (mut all, mut any, mut any_neutral) = (!self.sent.word(index), 0, 0);
            for source in &self.sources {
                let ready = source.ready.word(index);
                any |= ready;
                any_neutral |= source.with_neutral.word(index);
                if source.joined {
                    any_neutral |= !ready;
                } else {
                    all &= ready;
                }
            }
            BitSet::set_word(&mut complete, index, all & any);
            BitSet::set_word(&mut with_neutral, index, all & any & any_neutral);
        }
        (complete, with_neutral)
    }

    /// A name with a description for which all ranks of this subtree are ready.
    fn announcement(&mut self, name: &Arc<str>) -> Option<Announcement> {
        let named = self.named.get(name).filter(|named| !named.sent)?;
        let position = self.cache.position(name);
        let (mut spoken, mut with_neutral) = (Vec::new(), named.with_neutral);
        for (at, source) in self.sources.iter().enumerate() {
            if named.from >> at & 1 == 1 {
                continue;
            }
            match position.filter(|position| source.ready.get(*position)) {
                Some(position) => {
                    with_neutral |= source.with_neutral.get(position);
                    spoken.push((position, RankSet::of(source.ranks.clone())));
                }
                None if source.joined => with_neutral = true,
                None => return None,
            }
        }
        let named = self.named.get_mut(name)?;
        for (position, ranks) in spoken {
            if let Some(slot) = self.cache.slot(position) {
                named.add(&slot.description, &ranks);
            }
        }
        named.sent = true;
        named.variants.sort_by_key(|variant| variant.ranks.first());
        Some(Announcement { name: name.to_string(), variants: named.variants.clone(), with_neutral })
    }

    fn announcements(&mut self) -> Vec<Announcement> {
        let fresh = std::mem::take(&mut self.fresh);
        fresh.iter().filter_map(|name| self.announcement(name)).collect()
    }

    fn all_joined(&self) -> Option<u32> {
        self.sources.iter().all(|source| source.joined).then_some(self.last_joined as u32)
    }

    fn tell_parent(&mut self, actions: &mut Vec<NegotiationAction>) {
        let (ready, with_neutral) = self.complete();
        self.sent.add(&ready);
        let named = self.announcements();
        let joined = self.all_joined().filter(|_| !self.told_joined);
        self.told_joined |= joined.is_some();
        let unable = self.unable.filter(|_| !self.told_unable);
        self.told_unable |= unable.is_some();
        if !ready.is_empty() || !named.is_empty() || joined.is_some() || unable.is_some() {
            actions.push(NegotiationAction::Up(Up {
                num_received: self.number,
                ready,
                with_neutral,
                named,
                joined,
                unable,
                report: None,
            }));
        }
    }

    /// Removes all calls of this member that have no answer.
    pub(super) fn drain(&mut self) -> Vec<(Arc<str>, SubmissionId)> {
        let mut all: Vec<(Arc<str>, SubmissionId)> = Vec::new();
        for (name, queue) in self.pending.drain() {
            for submission in std::iter::once(queue.first).chain(queue.behind) {
                self.stall.pending(submission.blocking, -1);
                all.push((name.clone(), submission.ticket));
            }
        }
        // In the order of the calls.
        all.sort_by_key(|(_, ticket)| *ticket);
        all
    }

    /// Checks how long names have waited. Called a few times a second.
    pub(super) fn tick(&mut self, now: Duration, waits: Waits, actions: &mut Vec<NegotiationAction>) {
        let joined = self.sources[0].joined;
        let report = self.stall.report(&self.tree, &self.pending, joined, waits, now);
        if self.tree.parent.is_some() {
            if let Some(report) = self.stall.changed_report(report) {
                actions.push(NegotiationAction::Up(Up {
                    num_received: self.number,
                    report: Some(report),
                    ..Up::default()
                }));
            }
            return;
        }
        let (warning, failure) = self.stall.decide(report, self.tree.size, &self.ranks, now);
        let tell = if failure.is_some() { NegotiationAction::Blame } else { NegotiationAction::Warn };
        actions.extend(warning.map(tell));
        if let Some(failure) = failure {
            let down = Down { failure: Some(failure), ..self.next() };
            self.apply(down, now, actions);
            self.flush(now, actions);
        }
    }

    /// The longest wait of this member's calls.
    pub(super) fn longest_wait(&self, now: Duration) -> Option<(Arc<str>, Duration)> {
        let oldest = self.pending.iter().min_by_key(|(_, queue)| queue.first.since)?;
        Some((oldest.0.clone(), now.saturating_sub(oldest.1.first.since)))
    }
}
