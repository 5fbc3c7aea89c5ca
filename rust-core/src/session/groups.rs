//! The communicators of a session and the negotiators of its groups.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::Session;
use super::graph_reducers::PendingSteps;
use crate::collectives::{Communicator, SplitColor};
use crate::config;
use crate::error::{Code, Error, Result};
use crate::negotiation::{self, Negotiator};
use crate::transport::{Members, ShmTransport, Transport};

/// The id of the group of all ranks.
pub const WORLD: u64 = 0;

/// How long the report of a rank's death may take to arrive.
const DEATH_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// The purpose of a group. Groups of each purpose are counted separately, because they may be created concurrently.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum GroupPurpose {
    Caller,
    Plan,
    Round,
}

/// The groups of a session by id, and counts of the groups created so far.
pub struct Groups {
    timeout: Duration,
    open: Mutex<HashMap<u64, Arc<Communicator>>>,
    /// By the group whose collectives they negotiate.
    negotiators: Mutex<HashMap<u64, Arc<Negotiator>>>,
    made: Mutex<HashMap<(GroupPurpose, Vec<usize>), u64>>,
    /// The first number for groups of graph reducers ([`Groups::restart_graph_groups`]).
    plans_from: AtomicU64,
}

impl Groups {
    /// An empty set. `timeout` is the default of groups that are added.
    pub fn new(timeout: Duration) -> Self {
        let (open, negotiators, made, plans_from) = Default::default();
        Self { timeout, open, negotiators, made, plans_from }
    }

    pub fn get(&self, id: u64) -> Option<Arc<Communicator>> {
        self.open.lock().get(&id).cloned()
    }

    pub fn insert(&self, id: u64, communicator: Arc<Communicator>) {
        self.open.lock().insert(id, communicator);
    }

    pub fn close(&self, reason: &str) {
        let negotiators: Vec<_> = self.negotiators.lock().values().cloned().collect();
        for negotiator in negotiators {
            negotiator.close(reason);
        }
        let open: Vec<_> = self.open.lock().values().cloned().collect();
        for communicator in open {
            communicator.close(reason);
        }
    }

    /// The id of the next group of `ranks` (SES-3). It fits a signed 64-bit integer, the widest that op arguments
    /// have.
    fn next_id(&self, made_for: GroupPurpose, ranks: &[usize]) -> u64 {
        let mut made = self.made.lock();
        let count = made.entry((made_for, ranks.to_vec())).or_default();
        *count += 1;
        let from = if made_for == GroupPurpose::Plan { self.plans_from.load(Ordering::Relaxed) } else { 0 };
        group_id(made_for, ranks, from + *count)
    }

    /// Restarts the count of groups of graph reducers at `number`, which is new and equal on all ranks. Ranks may have
    /// created different numbers of such groups before.
    pub fn restart_graph_groups(&self, number: u64) {
        let mut made = self.made.lock();
        made.retain(|(made_for, _), _| *made_for != GroupPurpose::Plan);
        self.plans_from.store((number + 1) << 32, Ordering::Relaxed);
    }
}

fn group_id(made_for: GroupPurpose, ranks: &[usize], count: u64) -> u64 {
    let mut hash = Sha256::new();
    hash.update([made_for as u8]);
    for &rank in ranks {
        hash.update((rank as u64).to_le_bytes());
    }
    hash.update(count.to_le_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    let id = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes")) >> 1;
    if id == WORLD { 1 } else { id }
}

/// The id of the communicator that a negotiation uses for itself. It is derived from the group's id, because members
/// create negotiations in any order.
fn negotiation_id(group: u64) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"negotiation");
    hash.update(group.to_le_bytes());
    let digest: [u8; 32] = hash.finalize().into();
    u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes")) >> 1 | 2
}

/// The settings of fusion autotuning, if it is on.
fn tuning() -> Result<Option<negotiation::FusionTuning>> {
    if !config::AUTOTUNE.flag()? {
        return Ok(None);
    }
    Ok(Some(negotiation::FusionTuning {
        warmup_samples: config::AUTOTUNE_WARMUP_SAMPLES.count()?,
        steps_per_sample: config::AUTOTUNE_STEPS_PER_SAMPLE.count()?,
        max_samples: config::AUTOTUNE_MAX_SAMPLES.count()?,
        noise: config::AUTOTUNE_NOISE.share()?,
        fixed: config::FUSION_BYTES.text().is_some() || config::DISABLE_GROUP_FUSION.flag()?,
        log: config::AUTOTUNE_LOG.text().map(Into::into),
    }))
}

/// The time after which everything that waits for a member fails; none means the group's timeout. As in Horovod, it
/// is at least the time until the warning.
fn stall_limit() -> Result<Option<Duration>> {
    let (setting, warning) = (&config::STALL_SHUTDOWN_SECONDS, &config::STALL_WARNING_SECONDS);
    let Some(limit) = setting.seconds_or_never()? else { return Ok(None) };
    if config::STALL_CHECK_DISABLE.flag()? || limit >= warning.seconds()? {
        return Ok(Some(limit));
    }
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        let (name, seconds) = (setting.name, limit.as_secs_f64());
        tracing::warn!("`{name}` is {seconds}, less than `{}`: it has no effect", warning.name);
    });
    Ok(None)
}

impl Session {
    /// The negotiator of the group with this id. The first call starts it and does not wait for other members;
    /// submitted operations wait until all members have called this.
    ///
    /// # Errors
    /// As [`Session::communicator`]; [`Error::Config`] for an invalid setting; [`Error::Io`] if no thread can be
    /// started.
    pub fn negotiator(self: &Arc<Self>, group: u64) -> Result<Arc<Negotiator>> {
        let mut negotiators = self.groups.negotiators.lock();
        if let Some(negotiator) = negotiators.get(&group) {
            return Ok(negotiator.clone());
        }
        let communicator = self.communicator(group)?;
        let limit = stall_limit()?.unwrap_or(self.groups.timeout);
        let options = negotiation::NegotiatorOptions {
            cache_capacity: config::CACHE_CAPACITY.count()?,
            // Even then, the tensors of one grouped call run as one operation.
            fusion_bytes: match config::DISABLE_GROUP_FUSION.flag()? {
                true => 0,
                false => config::FUSION_BYTES.most_bytes()? as u64,
            },
            core: negotiation::affinity::core(self.local_rank(), self.local_size()),
            local_rank: self.local_rank(),
            stall_warning: match config::STALL_CHECK_DISABLE.flag()? {
                true => self.groups.timeout,
                false => config::STALL_WARNING_SECONDS.seconds()?,
            },
            stall_limit: limit.min(self.groups.timeout),
            tuning: if group == WORLD { tuning()? } else { None },
        };
        let id = negotiation_id(group);
        let (session, ranks) = (self.clone(), communicator.members().ranks.clone());
        let stall_limit = options.stall_limit;
        let connect = Box::new(move || session.connect(id, &ranks, stall_limit));
        let elsewhere = (group == WORLD).then(|| Box::new(PendingSteps::of(self)) as Box<dyn negotiation::OtherWaits>);
        let negotiator = Negotiator::start(id, communicator, self.monitor.clone(), options, connect, elsewhere)?;
        negotiators.insert(group, negotiator.clone());
        Ok(negotiator)
    }

    /// The communicator with this id; 0 is the world.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this process is not a member of such a group.
    pub fn communicator(&self, id: u64) -> Result<Arc<Communicator>> {
        self.groups
            .get(id)
            .ok_or_else(|| Error::InvalidArgument(format!("rank {} is not a member of a group {id}", self.rank())))
    }

    /// Makes a group of `ranks` (global ranks, in the order they get inside the group). Its members call it, in the
    /// same order where they are members of several new groups; others need not.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list, a rank that does not exist or is listed twice, or a list without
    /// this rank; [`Error::PeerFailed`] or [`Error::Timeout`] if a member does not call.
    pub fn new_group(&self, ranks: &[usize]) -> Result<Arc<Communicator>> {
        self.new_group_within(ranks, self.groups.timeout)
    }

    /// As [`Session::new_group`]; waits for the other members for `timeout`.
    pub(super) fn new_group_within(&self, ranks: &[usize], timeout: Duration) -> Result<Arc<Communicator>> {
        self.check_members(ranks)?;
        self.make_group(self.groups.next_id(GroupPurpose::Caller, ranks), ranks, timeout)
    }

    /// As [`Session::new_group_within`], split from the group `parent`. All members of the parent call it, at the same
    /// place in the order of its operations, with the ranks of their new group or with `None`. If the parent was used
    /// on CUDA devices, the new groups' NCCL communicators are split from the parent's. Otherwise members wait only for
    /// the members of their own new group.
    ///
    /// # Errors
    /// As [`Session::new_group`]; those of the parent's operations.
    pub(super) fn split_group(
        &self,
        parent: &Communicator,
        ranks: Option<&[usize]>,
        timeout: Duration,
    ) -> Result<Option<Arc<Communicator>>> {
        let made = ranks.map(|ranks| self.new_group_within(ranks, timeout)).transpose();
        let color = match (&made, ranks) {
            // The new groups are disjoint, so the first rank identifies one.
            (Ok(Some(made)), Some(ranks)) => SplitColor::Color { color: ranks[0], key: made.members().me },
            (Ok(_), _) => SplitColor::NoColor,
            (Err(_), _) => SplitColor::Refuse,
        };
        let split_comm = parent.split_devices(color);
        let made = made?;
        match (&made, split_comm) {
            (Some(made), Ok(Some(split_comm))) => made.adopt(split_comm),
            (_, Ok(_)) => {}
            (made, Err(error)) => {
                // The first error is reported; an error of the clean-up is ignored.
                made.iter().for_each(|made| drop(self.remove_group(made.id())));
                return Err(error);
            }
        }
        Ok(made)
    }

    /// The id of the next group for a reducer that is created in the background.
    pub(super) fn next_graph_group(&self, ranks: &[usize]) -> u64 {
        self.groups.next_id(GroupPurpose::Plan, ranks)
    }

    /// Creates the group with an id from [`Session::next_graph_group`].
    pub(super) fn make_graph_group(&self, id: u64, ranks: &[usize]) -> Result<Arc<Communicator>> {
        self.make_group(id, ranks, self.groups.timeout)
    }

    /// Creates a group whose id is derived from `token`, which all `ranks` share and no other group has.
    pub(super) fn make_round_group(&self, token: u64, ranks: &[usize]) -> Result<Arc<Communicator>> {
        self.make_group(group_id(GroupPurpose::Round, ranks, token), ranks, self.groups.timeout)
    }

    fn make_group(&self, id: u64, ranks: &[usize], timeout: Duration) -> Result<Arc<Communicator>> {
        let communicator = self.connect(id, ranks, timeout)?;
        self.groups.insert(id, communicator.clone());
        Ok(communicator)
    }

    /// Closes and removes a group. Its running and queued operations fail. Each member calls this for itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the world or an unknown group.
    pub fn remove_group(&self, id: u64) -> Result<()> {
        if id == WORLD {
            return Err(Error::InvalidArgument("the group of all ranks lives as long as the session".to_owned()));
        }
        let communicator = self.communicator(id)?;
        let negotiator = self.groups.negotiators.lock().remove(&id);
        if let Some(negotiator) = negotiator {
            negotiator.close("the group was removed");
        }
        self.groups.open.lock().remove(&id);
        communicator.close("the group was removed");
        Ok(())
    }

    /// Creates the communicator of `ranks`, over shared memory or between hosts.
    pub(super) fn connect(&self, id: u64, ranks: &[usize], timeout: Duration) -> Result<Arc<Communicator>> {
        let me = ranks.iter().position(|&rank| rank == self.rank()).expect("callers check that this rank is a member");
        let members = Members { ranks: ranks.into(), me };
        let name = format!("{id:x}");
        let host = |rank: usize| self.places[rank].host;
        let joined = if ranks.iter().all(|rank| host(*rank) == host(ranks[0])) {
            ShmTransport::join(&name, members, &*self.store(), &self.monitor, timeout)
                .map(|transport| transport as Arc<dyn Transport>)
        } else {
            self.reach_hosts(id, &name, members, timeout)
        };
        let transport = joined.map_err(|error| self.explain(error, ranks))?;
        let communicator = Communicator::new(id, transport, self.monitor.clone(), self.groups.timeout);
        communicator.set_store(self.store());
        Ok(communicator)
    }

    /// A system error during the creation of a group may be the first sign of a member's death, such as memory that
    /// disappeared with it. Waits briefly for the rendezvous to report a death, and returns that instead.
    fn explain(&self, error: Error, ranks: &[usize]) -> Error {
        if error.code() != Code::Io {
            return error;
        }
        let deadline = Instant::now() + DEATH_REPORT_TIMEOUT;
        loop {
            let seen = self.monitor.generation();
            if let Err(departed) = self.monitor.check(ranks, "making a group") {
                return departed;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return error;
            }
            self.monitor.wait_change(seen, remaining);
        }
    }

    fn check_members(&self, ranks: &[usize]) -> Result<()> {
        let size = self.size();
        let refuse = |why: String| Err(Error::InvalidArgument(format!("a group of ranks {ranks:?}: {why}")));
        if let Some(rank) = ranks.iter().find(|rank| **rank >= size) {
            return refuse(format!("there is no rank {rank} in a job of {size}"));
        }
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return refuse(format!("rank {} is listed twice", pair[0]));
        }
        if !ranks.contains(&self.rank()) {
            return refuse(format!("rank {} creates it but is not a member", self.rank()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_depend_on_the_members_their_order_and_the_count_only() {
        let groups = Groups::new(Duration::from_secs(1));
        let others = Groups::new(Duration::from_secs(1));
        let first = groups.next_id(GroupPurpose::Caller, &[0, 1]);
        assert_eq!(first, {
            others.next_id(GroupPurpose::Caller, &[1, 2]);
            others.next_id(GroupPurpose::Caller, &[0, 1])
        });
        let second = groups.next_id(GroupPurpose::Caller, &[0, 1]);
        let ids = [
            WORLD,
            first,
            second,
            groups.next_id(GroupPurpose::Plan, &[0, 1]),
            group_id(GroupPurpose::Caller, &[1, 0], 1),
            group_id(GroupPurpose::Caller, &[0, 1, 2], 1),
        ];
        for (at, id) in ids.iter().enumerate() {
            assert!(i64::try_from(*id).is_ok());
            assert!(!ids[..at].contains(id));
        }
    }
}
