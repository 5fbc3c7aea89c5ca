//! Joins an elastic job, whose launcher assigns new ranks for each session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Control, Session, join_request};
use crate::buffer::ReduceOp;
use crate::config;
use crate::error::{Code, Error, Result};
use crate::negotiation::{Name, Numbers};
use crate::world::Monitor;
use crate::world::env::{self, Launch};
use crate::world::rendezvous::client::{self, Client};
use crate::world::rendezvous::message::HostsUpdated;
use crate::world::rendezvous::{JobKey, RendezvousLocation};

/// Whether this process has reached the launcher before. The launcher listens as long as the job runs, so silence then
/// means that it has ended, or that it has given this host up for the same silence.
static HAS_REACHED_LAUNCHER: AtomicBool = AtomicBool::new(false);

impl Session {
    /// Joins the job as `worker` and becomes a member of its next session. If a session fails before all its members
    /// are connected, the worker joins the following one, until the launcher removes it or sessions have failed for
    /// too long.
    pub(super) fn start_as_worker(worker: &str, variables: &env::Variables) -> Result<Arc<Self>> {
        let start = Instant::now();
        config::check_unread()?;
        let enter_timeout = config::ELASTIC_TIMEOUT_SECONDS.seconds()?;
        let mut failing_since = None;
        loop {
            match Self::enter(worker, variables) {
                Ok(session) => {
                    session.log_joined(start);
                    return Ok(Arc::new(session));
                }
                Err(error)
                    if may_pass(&error) && failing_since.get_or_insert_with(Instant::now).elapsed() < enter_timeout =>
                {
                    tracing::info!("worker `{worker}` could not start a session: {error}");
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn enter(worker: &str, variables: &env::Variables) -> Result<Self> {
        let (Some(address), Some(secret)) = (config::RENDEZVOUS.text(), config::SECRET.text()) else {
            return Err(Error::Config(format!(
                "`{}` is set, but not both of `{}` and `{}`: all three come from `smdrun elastic`",
                config::WORKER.name,
                config::RENDEZVOUS.name,
                config::SECRET.name
            )));
        };
        let init_timeout = config::INIT_TIMEOUT_SECONDS.seconds()?;
        let peer_timeout = config::PEER_TIMEOUT_SECONDS.seconds()?;
        let timeout = if HAS_REACHED_LAUNCHER.load(Ordering::Relaxed) { peer_timeout } else { init_timeout };
        let options = client::ClientOptions {
            location: RendezvousLocation::At { addresses: vec![address.clone()], key: JobKey::new(secret.as_bytes()) },
            served_by_rank_0: false,
            deadline: Instant::now() + timeout,
            peer_timeout,
        };
        let monitor = Arc::new(Monitor::new(0));
        let client = Client::reach_launcher(&options, monitor.clone())?;
        HAS_REACHED_LAUNCHER.store(true, Ordering::Relaxed);
        let assignment = client.wait_for_rank(worker)?;
        let (rank, size) = (assignment.rank as usize, assignment.size as usize);
        monitor.set_me(rank);
        crate::log::start((size > 1).then_some(rank));
        let launch = Launch::assigned(rank, size, assignment.generation, &address);
        let start = Instant::now();
        let deadline = start + init_timeout;
        let welcome = client.take_place(join_request(&launch), start, deadline)?;
        let master =
            if welcome.hosts.len() == 1 { "127.0.0.1" } else { &welcome.hosts[welcome.places[0].host as usize] };
        let launch = Launch { master_addr: Some(master.to_owned()), ..launch };
        let timeout = config::TIMEOUT_SECONDS.seconds()?;
        let session = Self::connected(launch, monitor, timeout, client, welcome, false);
        if let Err(error) = session.make_world(variables, deadline) {
            session.report_failure(&error.text());
            session.close();
            return Err(error);
        }
        Ok(session)
    }

    /// Returns the oldest notification of changed hosts that was not returned yet; waits at most `timeout` for one.
    /// Only the launcher of an elastic job sends notifications.
    pub fn next_hosts_updated(&self, timeout: Duration) -> Option<HostsUpdated> {
        match &self.control {
            Control::Connected(client) => client.next_hosts_updated(timeout),
            Control::Alone(_) => {
                std::thread::sleep(timeout);
                None
            }
        }
    }

    /// Combines the ranks' knowledge of changed hosts: the latest change that was handled and the latest one that is
    /// known, in microseconds since 1970, and the kinds of unhandled changes, as bits. Every rank of the world calls
    /// it with its own values, because notifications reach ranks at different times.
    ///
    /// # Errors
    /// As [`Numbers::wait`].
    pub fn combine_host_updates(self: &Arc<Self>, handled: u64, latest: u64, kinds: u8) -> Result<(u64, u64, u8)> {
        let call = "check_host_updates";
        let negotiator = self.negotiator(self.process_set(0, call)?)?;
        let mut own = vec![handled, latest];
        own.extend((0..u8::BITS).map(|bit| u64::from(kinds >> bit & 1)));
        let all = Numbers::submit(&negotiator, Name::Given("hosts_update".into()), own, ReduceOp::Max, |_| (), |_| ())?
            .wait(call)?;
        let kinds = all[2..].iter().enumerate().fold(0, |kinds, (bit, any)| kinds | (*any as u8) << bit);
        Ok((all[0], all[1], kinds))
    }
}

/// Whether the session failed because of another process, so that the next one may succeed.
fn may_pass(error: &Error) -> bool {
    matches!(error.code(), Code::PeerFailed | Code::Closed | Code::Timeout | Code::Io)
}
