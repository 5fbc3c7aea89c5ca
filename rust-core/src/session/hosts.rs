//! Chooses the transport between the hosts of a job: MPI, if an MPI launcher started the job and its plug-in is
//! available on all hosts (MPI-4), otherwise TCP.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Control, STATE, Session, SessionState, serve};
use crate::config;
use crate::error::{Error, Result};
use crate::metrics::{self, Fallback};
use crate::transport::hosts::HostsGroup;
use crate::transport::mpi::{self, Engine, MessageOptions};
use crate::transport::ports::Carrier;
use crate::transport::tcp::{self, Network};
use crate::transport::{HostsTransport, Members, Transport};
use crate::world::rendezvous::Client;
use crate::world::rendezvous::frame_tag::{MacAlgorithm, MacTimes, TagCoverage, TagOptions};
use crate::world::{Monitor, env};

/// The connection between the hosts of a job.
pub(super) enum HostConnection {
    /// All ranks are on one host.
    OneHost,
    Mpi(Arc<Engine>),
    Tcp(Arc<Network>),
}

/// The longest time that a leaving rank waits for its messages to be sent.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// The prefix of the store's keys with the reports of ranks and rank 0's choice.
const PREFIX: &str = "hosts/";
const CHOICE: &str = "hosts/choice";
/// How MPI is used.
const MESSAGE_OPTIONS: &str = "hosts/message_options";

fn answer_key(rank: usize) -> String {
    format!("{PREFIX}{rank}")
}

/// The same for jobs on one host, where only the availability of MPI matters.
const MPI_CHOICE: &str = "mpi/choice";

fn mpi_key(rank: usize) -> String {
    format!("mpi/{rank}")
}

/// A rank's report.
#[derive(Serialize, Deserialize)]
struct HostReport {
    /// The reason why it cannot use MPI, if it cannot.
    without_mpi: Option<String>,
    /// The address at which it listens for TCP.
    address: tcp::TcpAddress,
    trusts_network: bool,
    /// The times of the ways to authenticate frames on its processor.
    mac_times: MacTimes,
}

/// The transport that all ranks use.
#[derive(Serialize, Deserialize)]
enum TransportChoice {
    Mpi,
    Tcp {
        /// The reason for not using MPI.
        why: String,
        /// The address of each rank.
        book: Vec<tcp::TcpAddress>,
        tags: TagOptions,
    },
}

impl Session {
    /// Connects the hosts of the job. Every rank of the job calls it.
    pub(super) fn meet_hosts(&self, variables: &env::Variables, deadline: Instant) -> Result<HostConnection> {
        let client = match &self.control {
            Control::Connected(client) if self.hosts.len() > 1 => client,
            Control::Connected(_) | Control::Alone(_) => return Ok(HostConnection::OneHost),
        };
        let plugin = match env::started_by_mpi(variables) {
            true => mpi::provide(deadline),
            false => Err(Error::Unsupported("no MPI launcher (`mpirun`) started the job".to_owned())),
        };
        let (local, rendezvous) = client.ends();
        let (listener, address) = tcp::listen(local.ip(), tcp::interface::address(&config::INTERFACE)?)?;
        let without_mpi = plugin.as_ref().err().map(Error::text);
        let trusts_network = config::TRUSTED_NETWORK.flag()?;
        let own = HostReport { without_mpi, address, trusts_network, mac_times: MacTimes::measure() };
        match (self.agree(client, own, deadline)?, plugin) {
            (TransportChoice::Mpi, Ok(plugin)) => self.start_engine(&plugin, client, deadline).map(HostConnection::Mpi),
            (TransportChoice::Mpi, Err(error)) => Err(error),
            (TransportChoice::Tcp { why, book, tags }, _) => {
                metrics::note_fallback(Fallback::TcpWithoutMpi);
                let text = format!(
                    "TCP moves CPU tensors between the {} hosts, since {why}; MPI also supports faster networks, such as \
                     InfiniBand",
                    self.hosts.len()
                );
                // Without an MPI launcher, TCP is what the user expects.
                match self.rank() {
                    0 if env::started_by_mpi(variables) => tracing::warn!("{text}"),
                    0 => tracing::info!("{text}"),
                    _ => {}
                }
                let options = tcp::TcpOptions {
                    rank: self.rank(),
                    session: self.id,
                    key: client.key().clone(),
                    book: book.into_iter().map(|address| address.address_for(rendezvous.ip())).collect(),
                    monitor: self.monitor.clone(),
                    tags,
                    congestion_control: tcp::CongestionControl::choose(
                        &config::TCP_CONGESTION_CONTROL,
                        self.rank() == 0,
                    )?,
                    peer_timeout: client.peer_timeout(),
                };
                Network::start(listener, options).map(HostConnection::Tcp)
            }
        }
    }

    /// Starts MPI for the tensors of CPUs. Rank 0 and a rank on another host measure which messages are fastest; all ranks
    /// use these.
    fn start_engine(&self, plugin: &Path, client: &Client, deadline: Instant) -> Result<Arc<Engine>> {
        use crate::world::Store as _;
        let on_another_host = self.places.iter().position(|place| place.host != self.places[0].host);
        let partner = match on_another_host {
            Some(rank) if self.rank() == rank => Some(0),
            partner if self.rank() == 0 => partner,
            _ => None,
        };
        let engine = mpi::start(plugin, self.size(), &self.monitor, deadline)?;
        let measured = engine.measure(partner, &self.monitor, deadline)?;
        let options: Option<MessageOptions> = match self.rank() {
            0 => {
                client.set(MESSAGE_OPTIONS, &encode(&measured)?)?;
                measured
            }
            _ => {
                let remaining = deadline.saturating_duration_since(Instant::now());
                decode(&client.get(MESSAGE_OPTIONS, &[0], remaining)?, 0)?
            }
        };
        if let Some(options) = options {
            engine.set_options(options);
        }
        Ok(engine)
    }

    /// Initialises MPI in all processes of a job that an MPI launcher started, as Horovod's scripts expect. Every rank
    /// of the job calls it. Returns whether any thread may call MPI.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the reason, on every rank, if MPI cannot be used; the errors of a wait for all
    /// ranks.
    pub fn start_mpi(&self, deadline: Instant) -> Result<bool> {
        let provided = || match env::started_by_mpi(&env::variables()) {
            true => mpi::provide(deadline),
            false => Err(Error::Unsupported("no MPI launcher (`mpirun`) started the job".to_owned())),
        };
        match self.host_connection.get() {
            Some(HostConnection::Mpi(engine)) => Ok(engine.world(self.size(), &self.monitor, deadline)?.any_thread),
            Some(HostConnection::Tcp(_)) => match provided() {
                Err(error) => Err(error),
                Ok(_) => Err(Error::Unsupported("another host of the job cannot use MPI".to_owned())),
            },
            Some(HostConnection::OneHost) | None => {
                // All ranks must have the same plug-in (MPI-4).
                let plugin = self.all_have_mpi(provided(), deadline)?;
                mpi::hold(&plugin, self.size(), &self.monitor, deadline)
            }
        }
    }

    /// The path of this rank's plug-in, if all ranks have one.
    fn all_have_mpi(&self, own: Result<PathBuf>, deadline: Instant) -> Result<PathBuf> {
        use crate::world::Store as _;
        let Control::Connected(client) = &self.control else { return own };
        let remaining = || deadline.saturating_duration_since(Instant::now());
        let reason: Option<String> = own.as_ref().err().map(Error::text);
        if self.rank() > 0 {
            client.set(&mpi_key(self.rank()), &encode(&reason)?)?;
            let choice: Option<String> = decode(&client.get(MPI_CHOICE, &[0], remaining())?, 0)?;
            return choice.map_or(own, |why| Err(Error::Unsupported(why)));
        }
        let mut why = reason.map(|reason| format!("rank 0: {reason}"));
        for rank in 1..self.size() {
            let reason: Option<String> = decode(&client.get(&mpi_key(rank), &[rank], remaining())?, rank)?;
            if let (None, Some(reason)) = (&why, reason) {
                why = Some(format!("rank {rank}: {reason}"));
            }
        }
        client.remove_prefix("mpi/")?;
        client.set(MPI_CHOICE, &encode(&why)?)?;
        why.map_or(own, |why| Err(Error::Unsupported(why)))
    }

    /// Agrees on one transport for all ranks: each reports to rank 0, which decides.
    fn agree(&self, client: &Client, own: HostReport, deadline: Instant) -> Result<TransportChoice> {
        use crate::world::Store as _;
        let remaining = || deadline.saturating_duration_since(Instant::now());
        if self.rank() > 0 {
            client.set(&answer_key(self.rank()), &encode(&own)?)?;
            return decode(&client.get(CHOICE, &[0], remaining())?, 0);
        }
        let mut why = own.without_mpi;
        let mut book = vec![own.address];
        // The first rank with each answer.
        let mut trusting = own.trusts_network.then_some(0);
        let mut untrusting = (!own.trusts_network).then_some(0);
        let mut mac_times = vec![own.mac_times];
        for rank in 1..self.size() {
            let answer: HostReport = decode(&client.get(&answer_key(rank), &[rank], remaining())?, rank)?;
            book.push(answer.address);
            mac_times.push(answer.mac_times);
            (if answer.trusts_network { &mut trusting } else { &mut untrusting }).get_or_insert(rank);
            if let (None, Some(reason)) = (&why, answer.without_mpi) {
                let host = &self.hosts[self.places[rank].host as usize];
                why = Some(format!("rank {rank} on host {host}: {reason}"));
            }
        }
        if let (Some(_), Some(rank), Some(_)) = (trusting, untrusting, &why) {
            tracing::warn!(
                "`{}` is set, but not on rank {rank} on host {}: TCP frames stay authenticated",
                config::TRUSTED_NETWORK.name,
                self.hosts[self.places[rank].host as usize]
            );
        }
        let coverage = if untrusting.is_none() { TagCoverage::HeadOnly } else { TagCoverage::WholeFrame };
        let (algorithm, slowest_with_aegis) = MacAlgorithm::common(&mac_times);
        if let (Some(rank), TagCoverage::WholeFrame, Some(_)) = (slowest_with_aegis, coverage, &why) {
            tracing::warn!(
                "BLAKE3 authenticates TCP frames, although AEGIS is faster on some ranks: it is slow on rank {rank} on host \
                 {}, probably for lack of AES instructions",
                self.hosts[self.places[rank].host as usize]
            );
        }
        let tags = TagOptions { algorithm, coverage };
        let choice = why.map_or(TransportChoice::Mpi, |why| TransportChoice::Tcp { why, book, tags });
        client.remove_prefix(PREFIX)?;
        client.set(CHOICE, &encode(&choice)?)?;
        Ok(choice)
    }

    /// Creates the transport of a group on several hosts.
    pub(super) fn reach_hosts(
        &self,
        id: u64,
        name: &str,
        members: Members,
        timeout: Duration,
    ) -> Result<Arc<dyn Transport>> {
        let carrier: Arc<dyn Carrier> = match self.host_connection.get() {
            Some(HostConnection::Mpi(engine)) => engine.clone(),
            Some(HostConnection::Tcp(network)) => network.clone(),
            Some(HostConnection::OneHost) | None => {
                return Err(Error::Internal("a group spans hosts that are not connected".to_owned()));
            }
        };
        // The port's id is unique: group ids are unique in a session, and sessions have ids of their own.
        let mut hash = Sha256::new();
        hash.update(self.id.to_le_bytes());
        hash.update(id.to_le_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let key = u64::from_le_bytes(*digest.first_chunk().expect("a digest has 32 bytes"));
        let hosts: Vec<usize> = members.ranks.iter().map(|rank| self.places[*rank].host as usize).collect();
        let plan = HostsGroup {
            name,
            // `mpi::start` has checked that `MPI_COMM_WORLD` numbers processes as the launcher does. TCP uses ranks.
            processes: members.ranks.clone(),
            members,
            hosts: &hosts,
            key,
            carrier,
            size: self.size(),
            monitor: &self.monitor,
        };
        Ok(HostsTransport::join(plan, &*self.store(), timeout)?)
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|error| Error::Internal(format!("a message between hosts cannot be serialized: {error}")))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8], rank: usize) -> Result<T> {
    postcard::from_bytes(bytes)
        .map_err(|error| Error::Rendezvous(format!("the report of rank {rank} about its host cannot be read: {error}")))
}

impl HostConnection {
    /// Waits until this rank's messages are sent, before the other ranks learn that it leaves.
    pub(super) fn flush(&self) {
        let deadline = Instant::now() + FLUSH_TIME;
        match self {
            Self::OneHost => {}
            Self::Mpi(engine) => engine.flush(deadline),
            Self::Tcp(network) => network.flush(deadline),
        }
    }

    /// Closes what belongs to the session. MPI stays initialised until the process ends.
    pub(super) fn close(&self) {
        if let Self::Tcp(network) = self {
            network.close();
        }
    }
}

/// Finalises MPI, if this process has initialised it. After a failure MPI is not finalised.
pub(super) fn leave_mpi() {
    if serve::has_failed() {
        return;
    }
    let timeout = config::EXIT_TIMEOUT_SECONDS.seconds().unwrap_or_default();
    let monitor = match &*STATE.lock() {
        SessionState::Running(session) => session.monitor.clone(),
        // Without a session departures are not reported; the deadline must suffice.
        SessionState::Idle | SessionState::Starting => Arc::new(Monitor::new(0)),
    };
    mpi::finish(&monitor, Instant::now() + timeout);
}
