//! The world and the process sets of Horovod's API: groups of ranks with ids.
//!
//! - PST-1: all ranks of the world, also ranks that are not members, create and remove sets by the same calls. The
//!   calls are compared first, so all ranks get the same result, and no rank waits for a rank with another call.
//! - PST-2: the world has id 0. Other sets get the id that was freed first, or else the next number.
//! - PST-3: the world may have fewer ranks than the job. Ranks of the world and of its sets are positions in the
//!   world; only this file and [`Session::process_set`] convert them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;

use parking_lot::Mutex;

use super::{Session, groups};
use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, Request};
use crate::config;
use crate::error::{Error, Result};

/// The process sets of this session; none before Horovod's world is started.
#[derive(Default)]
pub(super) struct ProcessSets(Mutex<Option<ProcessSetTable>>);

struct ProcessSetTable {
    /// The ranks of the world, as ranks of the job.
    world: Vec<usize>,
    sets: BTreeMap<u32, ProcessSet>,
    /// Freed ids, the first one first.
    free: VecDeque<u32>,
}

#[derive(Clone, Debug)]
struct ProcessSet {
    /// Ranks of the set, in order.
    ranks: Vec<usize>,
    /// The communicator, if this rank is a member.
    group: Option<u64>,
}

/// This rank's position in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RanksAndSizes {
    /// Rank and size in the world.
    pub world: (usize, usize),
    /// Rank and size among the ranks of this host.
    pub local: (usize, usize),
    /// Rank and size among the ranks with this local rank, on all hosts.
    pub cross: (usize, usize),
    /// Whether all hosts have equally many ranks.
    pub is_homogeneous: bool,
}

/// The call of a rank, which is compared with the others'.
#[derive(Clone, Copy)]
enum ProcessSetChange {
    Register,
    Add,
    Remove,
}

impl ProcessSetTable {
    fn find(&self, ranks: &[usize]) -> Option<u32> {
        self.sets.iter().find(|(_, set)| set.ranks == ranks).map(|(id, _)| *id)
    }

    fn next(&mut self) -> u32 {
        self.free.pop_front().unwrap_or_else(|| self.sets.keys().last().map_or(0, |last| last + 1))
    }
}

impl Session {
    /// Creates the world of Horovod's API: these ranks of the job, in this order, or all. A rank that is not listed
    /// gets a world of its own. Does nothing if there is a world.
    ///
    /// # Errors
    /// As [`Session::new_group`].
    pub fn start_world(&self, ranks: Option<&[usize]>) -> Result<()> {
        if self.process_sets.0.lock().is_some() {
            return Ok(());
        }
        let all: Vec<usize> = (0..self.size()).collect();
        let world = match ranks {
            None => all.clone(),
            Some(ranks) if ranks.contains(&self.rank()) => ranks.to_vec(),
            Some(_) => vec![self.rank()],
        };
        let group = if world == all { groups::WORLD } else { self.new_group(&world)?.id() };
        let set = ProcessSet { ranks: (0..world.len()).collect(), group: Some(group) };
        *self.process_sets.0.lock() = Some(ProcessSetTable { world, sets: [(0, set)].into(), free: VecDeque::new() });
        Ok(())
    }

    /// The ranks of the world, as ranks of the job.
    ///
    /// # Errors
    /// [`Error::NotInitialized`] naming `call`.
    pub fn world_ranks(&self, call: &'static str) -> Result<Vec<usize>> {
        self.with_sets(call, |table| Ok(table.world.clone()))
    }

    /// This rank's position in the world.
    ///
    /// # Errors
    /// [`Error::NotInitialized`] naming `call`.
    pub fn ranks_and_sizes(&self, call: &'static str) -> Result<RanksAndSizes> {
        let world = self.world_ranks(call)?;
        let host = |rank: &usize| self.places[*rank].host;
        let among = |ranks: &[usize]| {
            let me = ranks.iter().position(|rank| *rank == self.rank()).unwrap_or(0);
            (me, ranks.len())
        };
        let mut hosts: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for rank in &world {
            hosts.entry(host(rank)).or_default().push(*rank);
        }
        let local = among(&hosts[&host(&self.rank())]);
        let cross: Vec<usize> = hosts.values().filter_map(|ranks| ranks.get(local.0).copied()).collect();
        let is_homogeneous = hosts.values().all(|ranks| ranks.len() == local.1);
        Ok(RanksAndSizes { world: among(&world), local, cross: among(&cross), is_homogeneous })
    }

    /// Creates a set for each list, unless there is one, and returns the ids. All ranks call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], on all ranks, if their calls differ, or a list is empty or contains a rank that
    /// does not exist or one twice.
    pub fn register_process_sets(&self, lists: &[Vec<usize>]) -> Result<Vec<u32>> {
        let lists = self.agree_on_sets("init", ProcessSetChange::Register, lists)?;
        lists.iter().map(|ranks| self.find_or_make(ranks)).collect()
    }

    /// Creates a set. All ranks call it.
    ///
    /// # Errors
    /// As [`Session::register_process_sets`]; also if a set of these ranks exists, or sets may not be added.
    pub fn add_process_set(&self, ranks: &[usize]) -> Result<u32> {
        self.may_change("adding")?;
        let lists = self.agree_on_sets("add_process_set", ProcessSetChange::Add, &[ranks.to_vec()])?;
        match self.with_sets("add_process_set", |table| Ok(table.find(&lists[0])))? {
            None => self.find_or_make(&lists[0]),
            Some(id) => Err(Error::InvalidArgument(format!(
                "Attempted to add a duplicate process set: ranks {:?} are process set {id}",
                lists[0]
            ))),
        }
    }

    /// Removes a set; returns false if there is none, or if it is the world. All ranks call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if ranks disagree, or sets may not be removed.
    pub fn remove_process_set(&self, id: u32) -> Result<bool> {
        self.may_change("removing")?;
        self.agree_on_sets("remove_process_set", ProcessSetChange::Remove, &[vec![id as usize]])?;
        if id == 0 {
            return Ok(false);
        }
        let removed = self.with_sets("remove_process_set", |table| {
            let removed = table.sets.remove(&id);
            if removed.is_some() {
                table.free.push_back(id);
            }
            Ok(removed)
        })?;
        if let Some(group) = removed.as_ref().and_then(|set| set.group) {
            self.remove_group(group)?;
        }
        Ok(removed.is_some())
    }

    /// Returns the communicator of a set.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such set, or this rank is not a member; [`Error::NotInitialized`].
    pub fn process_set(&self, id: u32, call: &'static str) -> Result<u64> {
        self.with_sets(call, |table| {
            let Some(set) = table.sets.get(&id) else {
                return Err(Error::InvalidArgument(format!(
                    "`{call}`: process set {id} does not exist, or has not been registered"
                )));
            };
            set.group.ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "`{call}`: rank {} is not a member of the provided process set {id} of ranks {:?}: Invalid process set \
                     id for this rank",
                    table.world.iter().position(|rank| *rank == self.rank()).unwrap_or(0),
                    set.ranks
                ))
            })
        })
    }

    /// The position in a set of a rank of the world.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the rank is not in the set.
    pub fn position_in_process_set(&self, id: u32, rank: i64, call: &'static str) -> Result<usize> {
        self.with_sets(call, |table| {
            let ranks = table.sets.get(&id).map_or(&[][..], |set| &set.ranks);
            ranks.iter().position(|member| i64::try_from(*member) == Ok(rank)).ok_or_else(|| {
                Error::InvalidArgument(format!(
                    "{call} received invalid root rank {rank}: process set {id} has the ranks {ranks:?}"
                ))
            })
        })
    }

    /// Ids and ranks of all sets.
    ///
    /// # Errors
    /// [`Error::NotInitialized`].
    pub fn process_sets(&self) -> Result<Vec<(u32, Vec<usize>)>> {
        self.with_sets("process_sets", |table| {
            Ok(table.sets.iter().map(|(id, set)| (*id, set.ranks.clone())).collect())
        })
    }

    fn with_sets<T>(&self, call: &'static str, body: impl FnOnce(&mut ProcessSetTable) -> Result<T>) -> Result<T> {
        body(self.process_sets.0.lock().as_mut().ok_or(Error::NotInitialized { call })?)
    }

    fn may_change(&self, what: &str) -> Result<()> {
        if config::DYNAMIC_PROCESS_SETS.flag()? {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} process sets after initialization"
        )))
    }

    fn find_or_make(&self, ranks: &[usize]) -> Result<u32> {
        let call = "add_process_set";
        if let Some(id) = self.with_sets(call, |table| Ok(table.find(ranks)))? {
            return Ok(id);
        }
        let members: Vec<usize> =
            self.with_sets(call, |table| Ok(ranks.iter().map(|rank| table.world[*rank]).collect()))?;
        let group = match members.contains(&self.rank()) {
            true => Some(self.new_group(&members)?.id()),
            false => None,
        };
        self.with_sets(call, |table| {
            let id = table.next();
            table.sets.insert(id, ProcessSet { ranks: ranks.to_vec(), group });
            Ok(id)
        })
    }

    /// Compares the calls of all ranks of the world (PST-1); returns the lists of the call, if it is valid.
    fn agree_on_sets(
        &self,
        call: &'static str,
        change: ProcessSetChange,
        lists: &[Vec<usize>],
    ) -> Result<Vec<Vec<usize>>> {
        let sorted = |list: &Vec<usize>| {
            let mut list = list.clone();
            list.sort_unstable();
            list
        };
        let lists: Vec<Vec<usize>> = lists.iter().map(sorted).collect();
        let mut words = vec![change as u64];
        for list in &lists {
            words.push(list.len() as u64);
            words.extend(list.iter().map(|rank| *rank as u64));
        }
        let communicator = self.communicator(self.process_set(0, call)?)?;
        let all = exchange(&communicator, &mut words)?;
        if all.iter().any(|other| *other != words) {
            let mut text = format!("`{call}`: ranks ask for different process sets: ");
            for (rank, words) in all.iter().enumerate() {
                let _ = write!(text, "{}rank {rank} {}", if rank == 0 { "" } else { ", " }, describe(words));
            }
            return Err(Error::InvalidArgument(text));
        }
        if !matches!(change, ProcessSetChange::Remove) {
            for list in &lists {
                check(list, all.len())?;
            }
        }
        Ok(lists)
    }
}

fn check(list: &[usize], size: usize) -> Result<()> {
    let refuse = |why: String| Err(Error::InvalidArgument(format!("a process set of ranks {list:?}: {why}")));
    if list.is_empty() {
        return refuse("it has no rank".into());
    }
    if let Some(rank) = list.iter().find(|rank| **rank >= size) {
        return refuse(format!("there is no rank {rank} in a world of {size}"));
    }
    match list.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => refuse(format!("rank {} is listed twice", pair[0])),
        None => Ok(()),
    }
}

/// Formats a rank's call.
fn describe(words: &[u64]) -> String {
    let [change, rest @ ..] = words else { return "nothing".into() };
    let mut lists = Vec::new();
    let mut rest = rest;
    while let [length, after @ ..] = rest {
        let (list, after) = after.split_at((*length as usize).min(after.len()));
        lists.push(format!("{list:?}"));
        rest = after;
    }
    let verb =
        ["registers", "adds", "removes number"].get(*change as usize).unwrap_or(&"requests an unknown change of");
    format!("{verb} {}", lists.join(", "))
}

/// Gathers the encoded calls of all ranks.
fn exchange(communicator: &Communicator, own: &mut [u64]) -> Result<Vec<Vec<u64>>> {
    let size = communicator.members().size();
    let mut lengths = gather(communicator, &mut [own.len() as u64], &vec![1; size])?;
    let lengths: Vec<usize> = lengths.iter_mut().map(|length| length[0] as usize).collect();
    gather(communicator, own, &lengths)
}

fn gather(communicator: &Communicator, own: &mut [u64], lengths: &[usize]) -> Result<Vec<Vec<u64>>> {
    let mut all: Vec<Vec<u64>> = lengths.iter().map(|length| vec![0; *length]).collect();
    let view = |words: &mut [u64]| {
        // SAFETY: the words live until the operation below has ended, and no other code accesses them.
        unsafe { TensorView::new(words.as_mut_ptr().cast(), words.len(), DType::Int64, Device::Cpu, 0) }
    };
    let input = view(own)?;
    let outputs = all.iter_mut().map(|words| view(words)).collect::<Result<Vec<_>>>()?;
    communicator.run(&Request::AllGather { input, outputs })?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_numbers_come_first() {
        let set = |ranks: &[usize]| ProcessSet { ranks: ranks.to_vec(), group: None };
        let mut table = ProcessSetTable { world: vec![0, 1], sets: [(0, set(&[0, 1]))].into(), free: VecDeque::new() };
        assert_eq!(table.next(), 1);
        table.sets.extend([(1, set(&[0])), (2, set(&[1]))]);
        table.sets.remove(&2);
        table.sets.remove(&1);
        table.free.extend([2, 1]);
        assert_eq!((table.next(), table.next()), (2, 1));
        table.sets.extend([(1, set(&[0])), (2, set(&[1]))]);
        assert_eq!(table.next(), 3);
        assert_eq!(table.find(&[1]), Some(2));
    }

    #[test]
    fn requests_are_described_in_text() {
        assert_eq!(describe(&[0, 2, 0, 1, 1, 3]), "registers [0, 1], [3]");
        assert_eq!(describe(&[2, 1, 4]), "removes number [4]");
        assert!(check(&[0, 0], 2).is_err_and(|error| error.text().contains("rank 0 is listed twice")));
        assert!(check(&[0, 2], 2).is_err_and(|error| error.text().contains("there is no rank 2 in a world of 2")));
    }
}
