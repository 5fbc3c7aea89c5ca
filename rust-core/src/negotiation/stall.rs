//! Detects stalls: how long names have waited and for which ranks; warnings, time limits, and deadlocks.
//!
//! A member whose calls have waited for some time sends a report to its parent. So the root knows the waits of all
//! ranks, from at most one message for each child and tick. As long as names become ready soon, no report is sent.
//!
//! Note "stuck". A rank is stuck if it waits and nothing else can happen on it: its caller said that it does nothing
//! else meanwhile (`blocking`), or its process has used no CPU time for a while. The latter covers a graph whose
//! remaining operations all wait for a collective, and a call of a collective without a name. If all ranks are stuck
//! and no name became ready for a while, none ever will. A rank that is merely slow is not stuck: it computes, or it
//! waits for nothing.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::bits::RankSet;
use super::machine::Queue;
use super::message::{MAX_WAITING, NegotiationFailure, Report, Waiting};
use super::tree::Tree;
use crate::error::{Error, Limit};

/// Time limits of waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct StallTimeouts {
    /// Time until the first warning, and between warnings.
    pub(super) warning: Duration,
    /// Time until everything that waits fails.
    pub(super) limit: Duration,
}

/// Waits of at least this length are reported to the parent.
pub(super) const REPORT_AFTER: Duration = Duration::from_millis(500);
/// A rank that can do nothing else is stuck after this time without an answer.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(1);
/// How long a deadlock must last before the root ends it, because reports or announcements may be in flight.
const DEADLOCK_CONFIRM_TIME: Duration = Duration::from_millis(200);
/// Number of names for each rank, and of ranks, in a warning.
const MAX_LISTED: usize = 6;
const MAX_LISTED_RANKS: usize = 64;

/// The activity of a member besides negotiating.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// Whether the member's process has used no CPU time for a while.
    pub(super) idle: bool,
    /// Whether the member has been in a collective without a name for a while.
    pub(super) elsewhere: bool,
    /// Waits that are not for a name ([`super::OtherWaits`]).
    pub(super) steps: Vec<String>,
}

/// Detects stalls: names that some ranks have waited for too long.
pub(super) struct Stall {
    timeouts: StallTimeouts,
    /// The children's last reports, and when they arrived.
    reports: Vec<(Report, Duration)>,
    /// The last report to the parent.
    last_sent: Report,
    /// When this member last submitted a call or got an answer.
    last_change: Duration,
    /// Number of unanswered calls of this member, and of those that block their callers.
    num_pending: usize,
    num_blocking: usize,
    all_stuck_since: Option<Duration>,
    late_since: Option<Duration>,
    last_warning: Option<Duration>,
}

impl Stall {
    pub(super) fn new(children: usize, timeouts: StallTimeouts) -> Self {
        Self {
            timeouts,
            reports: vec![Default::default(); children],
            last_sent: Report::default(),
            last_change: Duration::ZERO,
            num_pending: 0,
            num_blocking: 0,
            all_stuck_since: None,
            late_since: None,
            last_warning: None,
        }
    }

    /// Whether a rank of this subtree waits, or the last report to the parent says so.
    pub(super) fn has_reports(&self) -> bool {
        let says = |report: &Report| {
            report.stuck
                || report.held
                || !report.waiting.is_empty()
                || !report.joined.is_empty()
                || !report.steps.is_empty()
        };
        says(&self.last_sent) || self.reports.iter().any(|(report, _)| says(report))
    }

    pub(super) fn changed(&mut self, now: Duration) {
        self.last_change = now;
    }

    /// Counts a call of this member, or the end of one.
    pub(super) fn pending(&mut self, blocking: bool, change: isize) {
        self.num_pending = self.num_pending.saturating_add_signed(change);
        if blocking {
            self.num_blocking = self.num_blocking.saturating_add_signed(change);
        }
    }

    /// A message of a child arrived. `is_progress` says that one of its ranks has become ready for a name, `current`
    /// that the child had received all answers when it sent the message.
    pub(super) fn receive_report(
        &mut self,
        child: usize,
        report: Option<Report>,
        is_progress: bool,
        current: bool,
        now: Duration,
    ) {
        if let Some(report) = report {
            self.reports[child] = (report, now);
        }
        if is_progress || !current {
            self.reports[child].0.clear_stuck();
        }
    }

    /// Notes that collectives were answered, so that no rank is stuck now. Children report anew the collectives for
    /// which they wait.
    pub(super) fn answered(&mut self, now: Duration) {
        self.last_change = now;
        self.all_stuck_since = None;
        self.reports.iter_mut().for_each(|(report, _)| report.clear_stuck());
        self.last_sent.clear_stuck();
    }

    /// Nothing waits any more.
    pub(super) fn forget(&mut self) {
        self.late_since = None;
        for report in self.reports.iter_mut().map(|(report, _)| report).chain([&mut self.last_sent]) {
            report.waiting.clear();
            report.steps.clear();
        }
    }

    /// The current waits of this subtree.
    pub(super) fn report(
        &mut self,
        tree: &Tree,
        pending: &HashMap<Arc<str>, Queue>,
        joined: bool,
        Waits { idle, elsewhere, steps }: Waits,
        now: Duration,
    ) -> Report {
        let quiet = now.saturating_sub(self.last_change) >= STUCK_AFTER;
        let waits = joined || self.num_blocking > 0 || ((self.num_pending > 0 || elsewhere) && idle);
        let held = waits || (!steps.is_empty() && idle);
        let mut report = Report { stuck: quiet && waits, held: quiet && held, ..Report::default() };
        if elsewhere && idle {
            report.elsewhere.add(tree.me..tree.me + 1);
        }
        if joined {
            report.joined.add(tree.me..tree.me + 1);
        }
        let age = |since: Duration| now.saturating_sub(since);
        let mut others: HashMap<&str, RankSet> = HashMap::new();
        for step in &steps {
            others.entry(step).or_default().add(tree.me..tree.me + 1);
        }
        let mut names: HashMap<&str, (RankSet, Duration)> = HashMap::new();
        for (name, queue) in pending.iter().filter(|(_, queue)| age(queue.first.since) >= REPORT_AFTER) {
            names.insert(name, (RankSet::of(tree.me..tree.me + 1), age(queue.first.since)));
        }
        for (child, came) in &self.reports {
            report.stuck &= child.stuck;
            report.held &= child.held;
            report.joined.merge(&child.joined);
            report.elsewhere.merge(&child.elsewhere);
            for step in &child.steps {
                others.entry(&step.name).or_default().merge(&step.ranks);
            }
            for waiting in &child.waiting {
                let age = Duration::from_millis(waiting.age_ms).saturating_add(age(*came));
                let known = names.entry(&waiting.name).or_default();
                known.0.merge(&waiting.ranks);
                known.1 = known.1.max(age);
            }
        }
        let waiting = |(name, (ranks, age)): (&str, (RankSet, Duration))| Waiting {
            name: name.to_owned(),
            ranks,
            age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        };
        report.waiting = names.into_iter().map(waiting).collect();
        let step = |(name, ranks): (&str, RankSet)| Waiting { name: name.to_owned(), ranks, age_ms: 0 };
        report.steps = others.into_iter().map(step).collect();
        report.steps.sort_by(|a, b| (a.ranks.first(), &a.name).cmp(&(b.ranks.first(), &b.name)));
        report.steps.truncate(MAX_WAITING);
        // The ranks' clocks tick at different times, so waits of about the same length are sorted by name.
        report.waiting.sort_by(|a, b| (b.age_ms / 250, &a.name).cmp(&(a.age_ms / 250, &b.name)));
        report.waiting.truncate(MAX_WAITING);
        report
    }

    /// The message for the parent: `report`, if it differs from the last one.
    pub(super) fn changed_report(&mut self, report: Report) -> Option<Report> {
        let names = |report: &Report| -> Vec<(String, RankSet)> {
            let mut names: Vec<_> =
                report.waiting.iter().map(|waiting| (waiting.name.clone(), waiting.ranks.clone())).collect();
            names.sort_by(|a, b| a.0.cmp(&b.0));
            names
        };
        let same = report.stuck == self.last_sent.stuck
            && report.held == self.last_sent.held
            && report.joined == self.last_sent.joined
            && report.elsewhere == self.last_sent.elsewhere
            && report.steps == self.last_sent.steps
            && names(&report) == names(&self.last_sent);
        (!same).then(|| {
            self.last_sent = report.clone();
            report
        })
    }

    /// The root's decision: which warnings to log, and which waits to end.
    pub(super) fn decide(
        &mut self,
        report: Report,
        size: usize,
        ranks: &[usize],
        now: Duration,
    ) -> (Option<String>, Option<NegotiationFailure>) {
        // A name that all ranks wait for is merely slow: one of them may need further names first.
        let differ = !report.steps.is_empty() && report.steps.iter().all(|step| !step.ranks.missing(size).is_empty());
        if report.waiting.is_empty() {
            self.late_since = None;
        }
        if !(report.stuck && !report.waiting.is_empty() || report.held && differ) {
            self.all_stuck_since = None;
        } else if now.saturating_sub(*self.all_stuck_since.get_or_insert(now)) >= DEADLOCK_CONFIRM_TIME {
            let waits = |waiting: &Waiting| {
                let plural = if waiting.ranks.is_one() { "waits" } else { "wait" };
                format!("{} {plural} for `{}`", waiting.ranks.text(ranks), waiting.name)
            };
            let mut names: Vec<&Waiting> = report.waiting.iter().collect();
            names.sort_by_key(|waiting| (waiting.ranks.first(), &waiting.name));
            let mut all: Vec<String> = names.into_iter().take(2 * MAX_LISTED).map(waits).collect();
            all.extend(report.steps.iter().take(MAX_LISTED).map(|step| {
                let plural = if step.ranks.is_one() { "waits" } else { "wait" };
                format!("{} {plural} for {}", step.ranks.text(ranks), step.name)
            }));
            if !report.joined.is_empty() {
                all.push(format!("{} joined", report.joined.text(ranks)));
            }
            if !report.elsewhere.is_empty() {
                let plural = if report.elsewhere.is_one() { "waits" } else { "wait" };
                all.push(format!("{} {plural} in a collective without a name", report.elsewhere.text(ranks)));
            }
            let steps =
                report.steps.iter().filter_map(|step| ranks.get(step.ranks.first()? as usize).copied()).collect();
            return (None, Some(NegotiationFailure::Stuck { detail: all.join(", "), steps }));
        }
        if report.waiting.is_empty() {
            return (None, None);
        }
        let missing = |waiting: &Waiting| {
            let mut here = waiting.ranks.clone();
            here.merge(&report.joined);
            here.missing(size).into_iter().map(|rank| ranks[rank]).collect::<Vec<_>>()
        };
        let late = |limit: Duration| {
            let late = move |waiting: &&Waiting| Duration::from_millis(waiting.age_ms) >= limit;
            report.waiting.iter().filter(late)
        };
        let tell = |limit: Duration, ending: &str| {
            let late: Vec<(&Waiting, Vec<usize>)> = late(limit).map(|waiting| (waiting, missing(waiting))).collect();
            let seconds = limit.as_secs_f64();
            format!(
                "collectives have waited for more than {seconds} seconds for ranks that do not call them.{ending}\n\
                 Missing ranks:{}",
                missing_ranks(&late, self.timeouts.limit)
            )
        };
        if late(self.timeouts.limit).next().is_none() {
            self.late_since = None;
        } else if now.saturating_sub(*self.late_since.get_or_insert(now)) >= DEADLOCK_CONFIRM_TIME {
            let waited_ms = report.waiting[0].age_ms;
            let tensors = report.waiting.iter().map(|waiting| (waiting.name.clone(), missing(waiting))).collect();
            let blame = tell(self.timeouts.limit, " Will shutdown.");
            return (Some(blame), Some(NegotiationFailure::Stalled { waited_ms, tensors }));
        }
        let due = self.last_warning.is_none_or(|last| now.saturating_sub(last) >= self.timeouts.warning);
        if !due || late(self.timeouts.warning).next().is_none() {
            return (None, None);
        }
        let text = tell(self.timeouts.warning, "");
        self.last_warning = Some(now);
        (Some(text), None)
    }
}

/// A line for each missing rank with the names that wait for it; `!` marks waits longer than `limit`.
fn missing_ranks(late: &[(&Waiting, Vec<usize>)], limit: Duration) -> String {
    let ranks: BTreeSet<usize> = late.iter().flat_map(|(_, missing)| missing.iter().copied()).collect();
    let line = |rank: &usize| {
        let names: Vec<&Waiting> =
            late.iter().filter(|(_, missing)| missing.contains(rank)).map(|(waiting, _)| *waiting).collect();
        let past = names.iter().any(|waiting| Duration::from_millis(waiting.age_ms) >= limit);
        let shown: Vec<&str> = names.iter().take(MAX_LISTED).map(|waiting| waiting.name.as_str()).collect();
        let more = if names.len() > MAX_LISTED { " ..." } else { "" };
        format!("\n{rank}{}: [{}{more}]", if past { "!" } else { "" }, shown.join(", "))
    };
    let more = if ranks.len() > MAX_LISTED_RANKS {
        format!("\nand {} more", ranks.len() - MAX_LISTED_RANKS)
    } else {
        String::new()
    };
    ranks.iter().take(MAX_LISTED_RANKS).map(line).collect::<String>() + &more
}

impl NegotiationFailure {
    /// The error of a call of `name`.
    pub(super) fn error(&self, name: &str) -> Error {
        match self {
            NegotiationFailure::Stuck { detail, .. } => Error::Mismatch {
                during: "collectives by name".to_owned(),
                detail: format!("every rank waits, and no name is called by all: {detail}"),
            },
            NegotiationFailure::GradientsDiffer { detail } => {
                Error::Mismatch { during: "the gradients of a step".to_owned(), detail: detail.clone() }
            }
            NegotiationFailure::Stalled { waited_ms, tensors } => {
                let own = tensors.iter().find(|(late, _)| late == name).or(tensors.first());
                let (late, missing) =
                    own.map_or((name, Vec::new()), |(late, missing)| (late.as_str(), missing.clone()));
                let during =
                    if late == name { format!("`{name}`") } else { format!("`{name}`, with `{late}` before it,") };
                let waited = Duration::from_millis(*waited_ms);
                Error::Timeout { during, waited, missing, limit: Limit::Stall }
            }
        }
    }
}
