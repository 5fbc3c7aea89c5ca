//! Checks that the ranks train from equal values. If a script does not broadcast its variables, each rank trains a
//! different model, and no collective fails, because gradients have equal shapes.
//!
//! - REP-1: ranks write a checksum to the job's store and wait for no other rank. A rank that takes no part in the
//!   step writes none, and then nothing is compared. Tensors and collectives are not used.
//! - REP-2: the first rank of a group reads the checksums in a thread. It warns once the second step has begun, or
//!   the session ends, because published scripts broadcast after the first step, when the optimizer has created its
//!   variables.
//! - REP-3: a broadcast of variables in the meantime, by any caller, makes the check unnecessary.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::Session;
use crate::error::{Error, Result};
use crate::reducer::arrival::Execution;
use crate::world::Store;

/// How long to wait for checksums of other ranks, which may begin their first step later.
const GATHER_TIME: Duration = Duration::from_secs(24 * 3600);

/// Compares checksums of the replicas' variables in the first steps, and warns once if they differ.
#[derive(Default)]
pub struct Replicas {
    shared: Arc<ReplicasState>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// By key, the number of checksums that this rank has written.
    num_written: Mutex<HashMap<String, usize>>,
}

#[derive(Default)]
struct ReplicasState {
    progress: Mutex<ReplicasProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct ReplicasProgress {
    /// Largest number of steps of any reduction.
    steps: u64,
    by_name: HashMap<String, u64>,
    by_plan: HashMap<usize, (Execution, u64)>,
    /// Whether variables were broadcast.
    broadcast: bool,
    closed: bool,
    /// Threads that wait for a step.
    waiting: usize,
}

/// Variables that a rank is about to train.
pub struct ReplicaChecksum<'a> {
    /// Identifies the same variables on all ranks: derived from their shapes.
    pub variables: &'a str,
    /// Checksum of their values.
    pub checksum: u64,
    /// Ranks that reduce the gradients together.
    pub ranks: &'a [usize],
    /// The call that makes replicas equal, for the warning.
    pub remedy: &'a str,
    /// No broadcast can follow, so the warning need not wait for the second step.
    pub is_final: bool,
}

impl Replicas {
    /// Counts a step of the reduction `name`.
    pub fn begin_step(&self, name: &str) {
        let mut progress = self.shared.progress.lock();
        if progress.waiting > 0 {
            let count = progress.by_name.entry(name.to_owned()).or_default();
            *count += 1;
            let count = *count;
            self.shared.stepped(&mut progress, count);
        }
    }

    /// Counts a step if this gradient is the first one of an execution.
    pub fn begin_step_of_plan(&self, plan: usize, execution: Execution) {
        let mut progress = self.shared.progress.lock();
        if progress.waiting > 0 {
            let (last, count) = progress.by_plan.entry(plan).or_insert((execution, 1));
            if *last != execution {
                (*last, *count) = (execution, *count + 1);
            }
            let count = *count;
            self.shared.stepped(&mut progress, count);
        }
    }

    /// Notes that variables are, or will be, broadcast.
    pub fn note_broadcast(&self) {
        self.shared.progress.lock().broadcast = true;
    }

    /// Ends the threads; differences that they have found are logged.
    pub fn close(&self) {
        self.shared.progress.lock().closed = true;
        self.shared.changed.notify_all();
    }

    /// Waits for the end of the threads, whose waits for the store have ended.
    pub fn join(&self) {
        for thread in self.threads.lock().drain(..) {
            // A panic of the thread has been logged.
            let _ = thread.join();
        }
    }
}

impl ReplicasState {
    fn stepped(&self, progress: &mut ReplicasProgress, count: u64) {
        if count > progress.steps {
            progress.steps = count;
            self.changed.notify_all();
        }
    }

    /// Waits for the second step or the end of the session; returns whether variables were broadcast by then.
    fn await_second_step(&self) -> bool {
        let mut progress = self.progress.lock();
        while progress.steps < 2 && !progress.closed && !progress.broadcast {
            self.changed.wait(&mut progress);
        }
        progress.broadcast
    }
}

fn key(variables: &str, ranks: &[usize], occurrence: usize) -> String {
    let members: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("replicas/{variables}/{}/{occurrence}", members.join(","))
}

/// Returns the ranks whose checksum differs from that of the first rank.
fn differing(store: &dyn Store, prefix: &str, own: u64, ranks: &[usize]) -> Result<Vec<usize>> {
    let mut found = Vec::new();
    for &rank in &ranks[1..] {
        let value = store.get(&format!("{prefix}/{rank}"), &[rank], GATHER_TIME)?;
        let theirs = value.try_into().map(u64::from_le_bytes);
        let theirs = theirs.map_err(|_| Error::Internal(format!("the checksum of rank {rank} has another length")))?;
        if theirs != own {
            found.push(rank);
        }
    }
    Ok(found)
}

fn warning(differing: &[usize], ranks: &[usize], remedy: &str) -> String {
    let listed: Vec<String> = differing.iter().map(usize::to_string).collect();
    let (noun, verb) = if differing.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
    format!(
        "{noun} {} {verb} other values of the variables than rank {} in the first step, and nothing was broadcast: every rank trains \
         a model of its own. Call {remedy}",
        listed.join(", "),
        ranks[0]
    )
}

impl Session {
    /// The checks of this session.
    pub fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// Writes a checksum of the variables that this rank is about to train; the first rank warns if other ranks have
    /// different ones. Does not wait.
    ///
    /// # Errors
    /// As for the job's store.
    pub fn report_replica_checksum(&self, replica: &ReplicaChecksum<'_>) -> Result<()> {
        let ReplicaChecksum { variables, checksum, ranks, remedy, is_final } = *replica;
        if ranks.len() < 2 || !ranks.contains(&self.rank()) {
            return Ok(());
        }
        let occurrence = {
            let mut counts = self.replicas.num_written.lock();
            let count = counts.entry(key(variables, ranks, 0)).or_default();
            *count += 1;
            *count
        };
        let prefix = key(variables, ranks, occurrence);
        let store = self.store();
        if self.rank() != ranks[0] {
            return store.set(&format!("{prefix}/{}", self.rank()), &checksum.to_le_bytes());
        }
        let (ranks, remedy) = (ranks.to_vec(), remedy.to_owned());
        let shared = self.replicas.shared.clone();
        shared.progress.lock().waiting += 1;
        let work = move || {
            // If checksums are missing, nothing can be compared: a rank takes no part, or is gone.
            let outcome = differing(&*store, &prefix, checksum, &ranks);
            if let Ok(others) = outcome
                && !others.is_empty()
                && (is_final || !shared.await_second_step())
            {
                tracing::warn!("{}", warning(&others, &ranks, &remedy));
            }
            shared.progress.lock().waiting -= 1;
        };
        let thread = std::thread::Builder::new().name("smd-replicas".into());
        let thread =
            thread.spawn(work).map_err(|error| Error::io("starting a thread that compares replicas", error))?;
        self.replicas.threads.lock().push(thread);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::LocalStore;

    #[test]
    fn ranks_with_another_checksum_are_found() {
        let store = LocalStore::default();
        for (rank, checksum) in [(2_usize, 7_u64), (5, 8), (6, 9)] {
            store.set(&format!("p/{rank}"), &checksum.to_le_bytes()).expect("a local store takes it");
        }
        assert_eq!(differing(&store, "p", 7, &[0, 2, 5, 6]).expect("all are there"), [5, 6]);
        assert_eq!(differing(&store, "p", 7, &[0, 2]).expect("all are there"), [0_usize; 0]);
        store.set("p/2", b"abc").expect("a local store takes it");
        assert!(differing(&store, "p", 7, &[0, 2]).is_err());
    }

    #[test]
    fn the_answer_waits_for_the_second_step_the_end_or_a_broadcast() {
        let execution = |step| Execution { step, frame: 0, iteration: 0 };
        type WaitEnd<'a> = (&'a dyn Fn(&Replicas), bool);
        let ends: [WaitEnd<'_>; 4] = [
            (&|replicas| (0..2).for_each(|_| replicas.begin_step("a")), false),
            (&|replicas| [4, 4, 5].into_iter().for_each(|step| replicas.begin_step_of_plan(3, execution(step))), false),
            (&|replicas| replicas.close(), false),
            (&|replicas| (replicas.note_broadcast(), replicas.close()).1, true),
        ];
        for (end, broadcast) in ends {
            let replicas = Replicas::default();
            replicas.shared.progress.lock().waiting = 1;
            replicas.begin_step("a");
            replicas.begin_step("b");
            replicas.begin_step_of_plan(1, execution(1));
            replicas.begin_step_of_plan(1, execution(1));
            assert_eq!(replicas.shared.progress.lock().steps, 1, "several reductions of one step");
            let shared = replicas.shared.clone();
            let thread = std::thread::spawn(move || shared.await_second_step());
            end(&replicas);
            assert_eq!(thread.join().expect("it does not panic"), broadcast);
        }
    }

    #[test]
    fn a_warning_names_ranks_and_remedy() {
        let text = warning(&[3], &[1, 3], "`b(v)`");
        assert!(text.starts_with("rank 3 has other values of the variables than rank 1"), "{text}");
        assert!(text.ends_with("Call `b(v)`"), "{text}");
        assert!(warning(&[1, 2], &[0, 1, 2], "").starts_with("ranks 1, 2 have"));
    }
}
