//! Answers: the root's decisions about names that are ready, and their effect, which is equal on all members.

use std::sync::Arc;
use std::time::Duration;

use super::{Machine, NegotiationAction, Offers, Operand, Queue, SubmissionId};
use crate::collectives::Kind;
use crate::error::Error;
use crate::negotiation::WaitEnd;
use crate::negotiation::cache::Evicted;
use crate::negotiation::description::Description;
use crate::negotiation::message::{
    Announcement, Down, NegotiationFailure, NegotiationLimits, Response, ResponseOutcome, Variant,
};
use crate::negotiation::presence;
use crate::negotiation::stall::REPORT_AFTER;

impl Machine {
    /// The root's answer to names that are ready on all members, if there are any.
    pub(super) fn decide(&mut self) -> Option<Down> {
        let (mut ready, mut with_neutral) = self.complete();
        let mut failure = None;
        let mut named: Vec<Response> =
            self.announcements().into_iter().map(|it| self.answer(it, &mut failure)).collect();
        for position in with_neutral.clone().iter() {
            let Some(slot) = self.cache.slot(position) else { continue };
            if let Some(reason) = self.refuse_neutral(&slot.description) {
                ready.take(position);
                with_neutral.take(position);
                named.push(Response { name: slot.name.to_string(), outcome: ResponseOutcome::Refused(reason) });
            }
        }
        let joined = self.all_joined();
        if ready.is_empty() && named.is_empty() && joined.is_none() && failure.is_none() {
            return None;
        }
        let joined = joined.map(|rank| self.ranks[rank as usize] as u32);
        Some(Down { ready, with_neutral, named, joined, failure, ..self.next() })
    }

    pub(super) fn next(&mut self) -> Down {
        let fusion = self.next_fusion.take();
        let fusion_bytes = fusion.unwrap_or(self.limits.fusion_bytes);
        let limits =
            (self.number == 0 || fusion.is_some()).then_some(NegotiationLimits { fusion_bytes, ..self.limits });
        Down { number: self.number, limits, ..Down::default() }
    }

    /// Decides the result of a name; sets `failure` if everything that waits must end.
    fn answer(&self, announcement: Announcement, failure: &mut Option<NegotiationFailure>) -> Response {
        let Announcement { name, mut variants, with_neutral } = announcement;
        let first = &variants[0].description;
        let refusal = match variants.len() {
            1 if first.kind == Kind::Poison => Some(format!("every rank asks for {first}")),
            1 if with_neutral => self.refuse_neutral(first),
            1 => None,
            _ => Some(self.disagreement(&variants, failure)),
        };
        let outcome = match refusal {
            Some(reason) => ResponseOutcome::Refused(reason),
            None => ResponseOutcome::Agreed { description: variants.swap_remove(0).description, with_neutral },
        };
        Response { name, outcome }
    }

    fn disagreement(&self, variants: &[Variant], failure: &mut Option<NegotiationFailure>) -> String {
        let first = &variants[0].description;
        if let Some(detail) = presence::difference(variants, &self.ranks) {
            if first.is_last {
                *failure = Some(NegotiationFailure::GradientsDiffer { detail: detail.clone() });
            }
            return detail;
        }
        let says = |variant: &Variant| {
            let plural = if variant.ranks.is_one() { "asks" } else { "ask" };
            format!("{} {plural} for {}", variant.ranks.text(&self.ranks), variant.description)
        };
        let all: Vec<String> = variants.iter().map(says).collect();
        format!("{}: {}", first.difference(&variants[1].description), all.join(", "))
    }

    /// Applies an answer; has the same effect on all members.
    pub(super) fn apply(&mut self, down: Down, now: Duration, actions: &mut Vec<NegotiationAction>) {
        if let Some(limits) = down.limits {
            self.limits = limits;
            self.cache.set_capacity(limits.cache as usize);
        }
        actions.push(NegotiationAction::Down(down.clone()));
        let mut parts: Vec<(u64, u64, Operand)> = Vec::new();
        let mut next = Offers::new();
        for source in &mut self.sources {
            source.ready.remove(&down.ready);
            source.with_neutral.remove(&down.ready);
        }
        self.sent.remove(&down.ready);
        for position in down.ready.iter() {
            let Some(slot) = self.cache.slot(position) else { continue };
            let (name, description) = (slot.name.clone(), slot.description.clone());
            self.note_run(&name, &description, now, actions);
            self.take_part(&name, description, &mut parts, &mut next);
        }
        self.cache.touch(&down.ready);
        for Response { name, outcome } in down.named {
            let name = self.known_name(name);
            self.named.remove(&name);
            if let Some(position) = self.cache.position(&name) {
                self.sent.take(position);
                for source in &mut self.sources {
                    source.ready.take(position);
                    source.with_neutral.take(position);
                }
            }
            match outcome {
                ResponseOutcome::Agreed { description, with_neutral: _ } => {
                    let description = Arc::new(description);
                    self.note_run(&name, &description, now, actions);
                    self.take_part(&name, description.clone(), &mut parts, &mut next);
                    if let Some(old) = self.cache.insert(&name, description) {
                        self.evict(old);
                    }
                }
                ResponseOutcome::Refused(detail) => {
                    let error = Error::Mismatch { during: format!("`{name}`"), detail };
                    if let Some(ticket) = self.pop(&name, &mut next) {
                        actions.push(NegotiationAction::Fail(ticket, error));
                    }
                }
            }
        }
        self.number += 1;
        self.run(parts, actions);
        if let Some(last) = down.joined {
            self.sources.iter_mut().for_each(|source| source.joined = false);
            (self.told_joined, self.told_unable) = (false, false);
            self.unable = None;
            if std::mem::take(&mut self.joining) {
                actions.push(NegotiationAction::Joined(last as usize));
            }
        }
        if let Some(failure) = down.failure {
            next = self.void(&failure, now, actions);
        }
        self.stall.answered(now);
        next.into_iter().for_each(|(name, description)| self.offer(&name, &description));
    }

    fn note_run(
        &mut self,
        name: &Arc<str>,
        description: &Description,
        now: Duration,
        actions: &mut Vec<NegotiationAction>,
    ) {
        let Some(tuner) = &mut self.tuner else { return };
        if let Some((trials, fusion_bytes)) = tuner.ran(name, description.all_bytes(), now) {
            self.next_fusion = Some(fusion_bytes);
            if trials.iter().any(|trial| trial.is_last) {
                self.tuner = None;
            }
            actions.extend(trials.into_iter().map(NegotiationAction::Tried));
        }
    }

    fn take_part(
        &mut self,
        name: &Arc<str>,
        description: Arc<Description>,
        parts: &mut Vec<(u64, u64, Operand)>,
        next: &mut Offers,
    ) {
        let (class, bytes) = (description.class(), description.all_bytes());
        let part = match self.pop(name, next) {
            Some(ticket) => Operand::Own(ticket),
            None => Operand::Neutral(description),
        };
        parts.push((class, bytes, part));
    }

    /// The current call of this name is answered; the next one is negotiated from now on.
    fn pop(&mut self, name: &Arc<str>, next: &mut Offers) -> Option<SubmissionId> {
        let queue = self.pending.get_mut(name)?;
        self.stall.pending(queue.first.blocking, -1);
        let ticket = queue.first.ticket;
        match queue.behind.pop_front() {
            Some(first) => {
                next.push((name.clone(), first.description.clone()));
                queue.first = first;
            }
            None => {
                self.pending.remove(name);
            }
        }
        Some(ticket)
    }

    /// Turns the agreed names into operations, equally on all members.
    fn run(&self, parts: Vec<(u64, u64, Operand)>, actions: &mut Vec<NegotiationAction>) {
        actions.extend(batches(parts, self.limits.fusion_bytes).into_iter().map(NegotiationAction::Run));
    }

    /// A name was evicted from the cache: ranks that announced it by position count as having announced it by its
    /// description.
    fn evict(&mut self, old: Evicted) {
        for at in 0..self.sources.len() {
            if self.sources[at].ready.take(old.position) {
                let with_neutral = self.sources[at].with_neutral.take(old.position);
                self.put_in_words(at, &old.name, &old.description, with_neutral);
            }
        }
        if self.sent.take(old.position)
            && let Some(named) = self.named.get_mut(&old.name)
        {
            named.sent = true;
        }
        if self.sources.len() > 1 {
            self.evictions.push((self.number, old));
        }
    }

    /// Fails everything that waits (NEG-5), and returns the calls to announce again: those that are so young that the
    /// failure cannot refer to them. A rank may be late for one call and then submit the next one with the others.
    fn void(&mut self, failure: &NegotiationFailure, now: Duration, actions: &mut Vec<NegotiationAction>) -> Offers {
        self.void_before = self.number;
        self.named.clear();
        self.fresh.clear();
        self.sent.clear();
        for source in &mut self.sources {
            source.ready.clear();
            source.with_neutral.clear();
        }
        self.stall.forget();
        let is_young = |queue: &Queue| {
            matches!(failure, NegotiationFailure::Stalled { .. })
                && now.saturating_sub(queue.first.since) < REPORT_AFTER
        };
        let (young, old) = std::mem::take(&mut self.pending).into_iter().partition(|(_, queue)| is_young(queue));
        self.pending = old;
        if let NegotiationFailure::Stuck { detail, steps } = &failure
            && !steps.is_empty()
        {
            // Before calls fail: their callbacks may begin the next step at once.
            let detail = format!("every rank waits, and not all for the same: {detail}");
            actions.push(NegotiationAction::EndSteps(WaitEnd { number: self.number, ranks: steps.clone(), detail }));
        }
        for (name, ticket) in self.drain() {
            actions.push(NegotiationAction::Fail(ticket, failure.error(&name)));
        }
        self.pending = young;
        let again = |(name, queue): (&Arc<str>, &Queue)| (name.clone(), queue.first.description.clone());
        self.pending.iter().map(again).collect()
    }

    /// Why the operation cannot run without the ranks that have joined, if it cannot.
    fn refuse_neutral(&self, description: &Description) -> Option<String> {
        let is_supported = |one: &&Description| matches!(one.kind, Kind::AllReduce | Kind::Adasum | Kind::Presence);
        if let Some(one) = description.each().find(|one| !is_supported(one)) {
            let (name, title) = (one.kind.name(), one.kind.title());
            return Some(format!(
                "{title} is not supported with Join: some ranks have called `join()`, and `{name}` needs every rank"
            ));
        }
        // A rank without a device has joined, so it would have to contribute a neutral element on a device.
        let rank = self.ranks[self.unable.filter(|_| description.on_device)? as usize];
        let title = description.kind.title();
        Some(format!(
            "{title} on devices is not supported with Join: rank {rank} has called `join()` and has no CUDA device"
        ))
    }
}

/// Divides operations, each with its class and its bytes, into batches of up to `fusion_bytes`. Those of one class are
/// adjacent. On CPUs, a batch may have several classes, because it runs step by step. On devices, it has one: a batch is
/// one operation there, so a call that only the peers' kernels can run must not be in a batch that NCCL runs, and
/// all-reduces must not wait for an exchange of numbers of rows.
fn batches<T>(mut parts: Vec<(u64, u64, T)>, fusion_bytes: u64) -> Vec<Vec<T>> {
    parts.sort_by_key(|(class, ..)| *class);
    let mut found: Vec<Vec<T>> = Vec::new();
    let (mut bytes, mut previous) = (0, None);
    for (class, more, part) in parts {
        let on_device = class >> 56 != 0;
        let fits = previous.is_some_and(|previous| match on_device {
            true => previous == class,
            false => true,
        });
        match found.last_mut().filter(|_| fits && bytes + more <= fusion_bytes) {
            Some(batch) => {
                batch.push(part);
                bytes += more;
            }
            None => {
                found.push(vec![part]);
                bytes = more;
            }
        }
        previous = Some(class);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::DType;

    #[test]
    fn batches_on_devices_have_one_class() {
        let class = |kind, dtype, on_device| {
            let sum = Description::poison(String::new());
            Description { kind, dtype, on_device, ..sum }.class()
        };
        for (on_device, expected) in [(false, vec!["eacbd", "f"]), (true, vec!["e", "ac", "bd", "f"])] {
            let parts = vec![
                (class(Kind::AllReduce, DType::Float32, on_device), 8, 'a'),
                (class(Kind::AllGatherRows, DType::Float32, on_device), 0, 'b'),
                (class(Kind::AllReduce, DType::Float32, on_device), 8, 'c'),
                (class(Kind::AllGatherRows, DType::Float32, on_device), 0, 'd'),
                (class(Kind::AllReduce, DType::Int16, on_device), 4, 'e'),
                (class(Kind::AllToAllRows, DType::Float32, on_device), 8, 'f'),
            ];
            let found: Vec<String> = batches(parts, 20).into_iter().map(String::from_iter).collect();
            assert_eq!(found, expected);
        }
        let parts =
            vec![(class(Kind::AllReduce, DType::Float32, true), 8, 'a'), (0, 8, 'b'), (0, 30, 'c'), (0, 30, 'd')];
        let found: Vec<String> = batches(parts, 20).into_iter().map(String::from_iter).collect();
        assert_eq!(found, ["b", "c", "d", "a"]);
    }
}
