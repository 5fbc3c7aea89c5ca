//! How CPU tensors get from host to host: over MPI, where the job was started by an MPI launcher (MPI-4).

use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::{STATE, Session, State, serve};
use crate::config;
use crate::error::{Error, Result};
use crate::transport::hosts::Plan;
use crate::transport::mpi::{self, Engine};
use crate::transport::{AbsentTransport, HostsTransport, Members, Transport};
use crate::world::{Monitor, env};

/// What is between the hosts of a job.
pub(super) enum Between {
    /// All ranks are on one host.
    OneHost,
    Mpi(Arc<Engine>),
    /// No way for CPU tensors, for this reason. There may be one for those of other devices.
    Nothing(Error),
}

/// A rank leaves after this time, whatever is still to be sent.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Where the ranks of a job agree on whether MPI can be used.
const PREFIX: &str = "mpi/";
const VERDICT: &str = "mpi/verdict";

fn answer_key(rank: usize) -> String {
    format!("mpi/{rank}")
}

impl Session {
    /// Finds out what is between the hosts; every rank of the job calls it.
    pub(super) fn meet_hosts(&self, variables: &env::Variables, deadline: Instant) -> Result<Between> {
        if self.hosts.len() == 1 {
            return Ok(Between::OneHost);
        }
        let own = match env::started_by_mpi(variables) {
            true => mpi::provide(deadline),
            false => Err(Error::Unsupported(
                "CPU tensors go between hosts over MPI, and no MPI launcher started this job: start it with `mpirun` \
                 (Debian: packages openmpi-bin and libopenmpi-dev); collectives on CUDA tensors go over NCCL, whatever the launcher is"
                    .to_owned(),
            )),
        };
        let refusal = self.first_refusal(own.as_ref().err(), deadline)?;
        match (own, refusal) {
            (Ok(plugin), None) => mpi::start(&plugin, self.size(), &self.monitor, deadline).map(Between::Mpi),
            (_, refusal) => {
                let text = refusal.unwrap_or_default();
                tracing::debug!("nothing moves CPU tensors between hosts: {text}");
                Ok(Between::Nothing(Error::Unsupported(text)))
            }
        }
    }

    /// The answer of the first rank that cannot use MPI, the same on all ranks.
    fn first_refusal(&self, own: Option<&Error>, deadline: Instant) -> Result<Option<String>> {
        let remaining = || deadline.saturating_duration_since(Instant::now());
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let own = own.map(|error| error.text()).unwrap_or_default();
        let verdict = if self.rank() == 0 {
            let mut verdict = own;
            for rank in 1..self.size() {
                let answer = text(self.store().get(&answer_key(rank), &[rank], remaining())?);
                if verdict.is_empty() && !answer.is_empty() {
                    let host = &self.hosts[self.places[rank].host as usize];
                    verdict = format!("rank {rank} on host {host}: {answer}");
                }
            }
            self.store().remove_prefix(PREFIX)?;
            self.store().set(VERDICT, verdict.as_bytes())?;
            verdict
        } else {
            self.store().set(&answer_key(self.rank()), own.as_bytes())?;
            text(self.store().get(VERDICT, &[0], remaining())?)
        };
        Ok((!verdict.is_empty()).then_some(verdict))
    }

    /// The transport of a group on several hosts.
    pub(super) fn reach_hosts(
        &self,
        id: u64,
        name: &str,
        members: Members,
        timeout: Duration,
    ) -> Result<Arc<dyn Transport>> {
        let engine = match self.between.get() {
            Some(Between::Mpi(engine)) => engine,
            Some(Between::Nothing(why)) => return Ok(Arc::new(AbsentTransport::new(members, why.clone()))),
            Some(Between::OneHost) | None => return Err(Error::Internal("a group on hosts that never met".to_owned())),
        };
        // Ids are unique in a session, and sessions have ids of their own.
        let mut hash = Sha256::new();
        hash.update(self.id.to_le_bytes());
        hash.update(id.to_le_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let key = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
        let hosts: Vec<usize> = members.ranks.iter().map(|rank| self.places[*rank].host as usize).collect();
        let plan = Plan {
            name,
            // `MPI_COMM_WORLD` numbers processes as the launcher does: `mpi::start` has checked it.
            engine_ranks: members.ranks.clone(),
            members,
            hosts: &hosts,
            key,
            engine,
            size: self.size(),
            monitor: &self.monitor,
        };
        Ok(HostsTransport::join(plan, &*self.store(), timeout)?)
    }
}

impl Between {
    /// What this rank has sent is on its way when the others hear that it left.
    pub(super) fn flush(&self) {
        if let Self::Mpi(engine) = self {
            engine.flush(Instant::now() + FLUSH_TIME);
        }
    }
}

/// Ends MPI, if this process has started it. After a failure there is nothing to end in good order.
pub(super) fn leave_mpi() {
    if serve::has_failed() {
        return;
    }
    let timeout = config::TIMEOUT_SECONDS.seconds().unwrap_or_default();
    let monitor = match &*STATE.lock() {
        State::Running(session) => session.monitor.clone(),
        // Nobody tells of departures without a session, and the deadline has to do.
        State::Idle | State::Starting => Arc::new(Monitor::new(0)),
    };
    mpi::finish(&monitor, Instant::now() + timeout);
}
