//! The hosts that a job may use, in the order in which they were found, and banned hosts.
//!
//! - HSL-1: a host that remains keeps its place in the order, so the first places always belong to the oldest host.
//! - HSL-2: a host where a worker failed is banned for a while, or forever if no time is given. When the ban ends, it
//!   is the youngest host.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A place for one worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot {
    /// The host's name, as discovered.
    pub host: String,
    /// The slot of the host.
    pub slot: usize,
}

/// The duration of a ban after the n-th failure: `low` doubled n times, at most `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cooldown {
    /// Shortest duration.
    pub low: Duration,
    /// Longest duration.
    pub high: Duration,
}

impl Cooldown {
    fn after(self, failures: u32, jitter: f64) -> Duration {
        let doubled = self.low.saturating_mul(1u32.checked_shl(failures.min(16)).unwrap_or(u32::MAX));
        (doubled + self.low.mul_f64(jitter)).clamp(self.low, self.high)
    }
}

/// Spreads the ends of bans: 0 to 1.
pub fn jitter() -> f64 {
    getrandom::u32().map_or(0.5, |number| f64::from(number) / f64::from(u32::MAX))
}

#[derive(Clone, Debug)]
struct Ban {
    failures: u32,
    /// When the ban ends; none if it never does.
    until: Option<Instant>,
}

/// The hosts of an elastic job with their slots, and the banned hosts.
#[derive(Clone, Debug)]
pub struct HostPool {
    cooldown: Option<Cooldown>,
    /// Hosts with their slots, oldest first.
    order: Vec<(String, usize)>,
    bans: HashMap<String, Ban>,
    discovered: Vec<(String, usize)>,
}

impl HostPool {
    /// Creates an empty list. Without `cooldown`, bans never end.
    pub fn new(cooldown: Option<Cooldown>) -> Self {
        Self { cooldown, order: Vec::new(), bans: HashMap::new(), discovered: Vec::new() }
    }

    /// Updates the list with the discovered hosts. A host that is listed twice has the slots of both lines.
    pub fn discover(&mut self, found: Vec<(String, usize)>, now: Instant) {
        let mut merged: Vec<(String, usize)> = Vec::new();
        for (host, slots) in found {
            match merged.iter_mut().find(|(known, _)| *known == host) {
                Some((_, known)) => *known += slots,
                None => merged.push((host, slots)),
            }
        }
        self.discovered = merged;
        self.refresh(now);
    }

    /// Ends bans whose time is over.
    pub fn refresh(&mut self, now: Instant) {
        let usable = |(host, slots): &&(String, usize)| *slots > 0 && !self.is_banned(host, now);
        let found: Vec<(String, usize)> = self.discovered.iter().filter(usable).cloned().collect();
        let mut order: Vec<(String, usize)> = Vec::new();
        for (host, _) in &self.order {
            order.extend(found.iter().find(|(name, _)| name == host).cloned());
        }
        let new = found.into_iter().filter(|(host, _)| !self.order.iter().any(|(known, _)| known == host));
        order.extend(new);
        self.order = order;
    }

    /// Bans the host of a failed worker (HSL-2). `jitter` is 0 to 1.
    pub fn ban(&mut self, host: &str, now: Instant, jitter: f64) {
        let failures = self.bans.get(host).map_or(0, |ban| ban.failures);
        let until = self.cooldown.map(|cooldown| now + cooldown.after(failures, jitter));
        self.bans.insert(host.to_owned(), Ban { failures: failures + 1, until });
        self.refresh(now);
    }

    /// The time at which the next ban of a discovered host ends.
    pub fn next_end(&self, now: Instant) -> Option<Instant> {
        let bans = self.discovered.iter().filter_map(|(host, _)| self.bans.get(host)?.until);
        bans.filter(|until| *until > now).min()
    }

    /// Whether every discovered host is banned forever.
    pub fn all_lost(&self) -> bool {
        let lost = |host: &str| self.bans.get(host).is_some_and(|ban| ban.until.is_none());
        !self.discovered.is_empty() && self.discovered.iter().all(|(host, _)| lost(host))
    }

    /// Whether the host is banned.
    pub fn is_banned(&self, host: &str, now: Instant) -> bool {
        self.bans.get(host).is_some_and(|ban| ban.until.is_none_or(|until| until > now))
    }

    /// Names and slots of the hosts that may be used, oldest first.
    pub fn usable(&self) -> &[(String, usize)] {
        &self.order
    }

    /// The first `most` places, host by host.
    pub fn places(&self, most: usize) -> Vec<WorkerSlot> {
        let places =
            self.order.iter().flat_map(|(host, slots)| (0..*slots).map(|slot| WorkerSlot { host: host.clone(), slot }));
        places.take(most).collect()
    }
}

/// Parses the discovery's output: each line is `host:slots`, or `host` if there is a default number of slots.
pub(super) fn parse(text: &str, slots_per_host: Option<usize>) -> Result<Vec<(String, usize)>, String> {
    let mut hosts = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (host, slots) = match line.rsplit_once(':') {
            Some((host, slots)) => (host, slots.trim().parse().ok()),
            None => (line, slots_per_host),
        };
        match slots {
            Some(slots) if !host.trim().is_empty() => hosts.push((host.trim().to_owned(), slots)),
            _ => return Err(format!("expected lines `host:slots`, or `host` with `--slots-per-host`, not `{line}`")),
        }
    }
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(hosts: &HostPool, most: usize) -> Vec<String> {
        hosts.places(most).iter().map(|place| format!("{}/{}", place.host, place.slot)).collect()
    }

    fn found(text: &str) -> Vec<(String, usize)> {
        parse(text, None).unwrap()
    }

    #[test]
    fn old_hosts_come_first() {
        let now = Instant::now();
        let mut hosts = HostPool::new(None);
        hosts.discover(found("b:1\nc:2"), now);
        hosts.discover(found("a:1\nc:2\nb:2"), now);
        assert_eq!(names(&hosts, 9), ["b/0", "b/1", "c/0", "c/1", "a/0"]);
        assert_eq!(names(&hosts, 3), ["b/0", "b/1", "c/0"]);
        hosts.discover(found("a:1\nb:1"), now);
        hosts.discover(found("a:1\nb:1\nc:1\nc:1"), now);
        assert_eq!(names(&hosts, 9), ["b/0", "a/0", "c/0", "c/1"]);
    }

    #[test]
    fn a_ban_without_a_time_is_for_ever() {
        let now = Instant::now();
        let mut hosts = HostPool::new(None);
        hosts.discover(found("a:1\nb:1"), now);
        hosts.ban("a", now, 0.0);
        assert!(!hosts.all_lost());
        assert!(hosts.is_banned("a", now) && !hosts.is_banned("b", now));
        assert_eq!(names(&hosts, 9), ["b/0"]);
        hosts.discover(found("a:1\nb:1"), now + Duration::from_secs(10_000));
        assert_eq!(names(&hosts, 9), ["b/0"]);
        hosts.ban("b", now, 0.0);
        assert!(hosts.all_lost());
    }

    #[test]
    fn a_ban_with_a_time_ends_and_the_next_is_longer() {
        let seconds = Duration::from_secs;
        let start = Instant::now();
        let mut hosts = HostPool::new(Some(Cooldown { low: seconds(2), high: seconds(9) }));
        hosts.discover(found("a:1\nb:1"), start);
        hosts.ban("a", start, 0.5);
        assert_eq!(hosts.next_end(start), Some(start + seconds(3)));
        hosts.refresh(start + seconds(3));
        assert_eq!(names(&hosts, 9), ["b/0", "a/0"], "it has become the youngest");
        for expected in [4, 8, 9, 9] {
            hosts.ban("a", start, 0.0);
            assert_eq!(hosts.next_end(start), Some(start + seconds(expected)));
        }
    }

    #[test]
    fn lines_of_the_discovery() {
        assert_eq!(parse("a:2\n\n b : 1 \n", None).unwrap(), [("a".to_owned(), 2), ("b".to_owned(), 1)]);
        assert_eq!(parse("a\nb:3", Some(4)).unwrap(), [("a".to_owned(), 4), ("b".to_owned(), 3)]);
        for text in ["a", "a:x", ":2", "a:-1"] {
            assert!(parse(text, None).is_err(), "{text}");
        }
    }
}
