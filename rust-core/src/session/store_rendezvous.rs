//! Rendezvous through a framework's key-value store, for processes that know their rank and size but were started
//! without a launcher's variables. Rank 0 writes the address of the rendezvous server to the store.
//!
//! - STORE-1: only rank 0 decides where the rendezvous is, and writes it to the store, so ranks cannot decide
//!   differently. If `smdrun` serves a rendezvous for exactly these ranks, that one is used, because `smdrun` notices
//!   deaths first.
//! - STORE-2: rank 0 listens on the loopback interface if all ranks are on its host. The secret is that of the
//!   launcher or the user. Without one, rank 0 creates one. On one host, this user's processes get it through the
//!   owner socket. On several hosts, it is written to the framework's store, whose other readers then know it, too,
//!   and rank 0 logs a warning.
//! - STORE-3: the keys are deleted before `init` returns on any rank, so that the store can be used for another
//!   session.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::serve::{self, Rendezvous};
use crate::config;
use crate::error::{Error, Limit, Result};
use crate::world::env::{self, Launch, Launcher};
use crate::world::rendezvous::{JobKey, RendezvousLocation};
use crate::world::{Monitor, host};

/// First and longest interval between polls of the store.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(20);

const ENDPOINT_KEY: &str = "smd/endpoint";

fn host_key(rank: usize) -> String {
    format!("smd/host/{rank}")
}

/// A key-value store that all ranks of a job can access. No function waits for other ranks.
pub trait BootstrapStore: Send + Sync {
    /// Writes a key.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;
    /// Returns the value of a key, if it was written.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>>;
    /// Deletes a key.
    fn remove(&self, key: &str) -> Result<()>;
}

/// The rank, size and store that a framework passes instead of a launcher's environment.
#[derive(Clone)]
pub struct StoreRendezvous {
    /// Global rank.
    pub rank: usize,
    /// Number of processes of the job.
    pub size: usize,
    /// The store through which the ranks find each other.
    pub store: Arc<dyn BootstrapStore>,
    /// Longest wait for the other ranks.
    pub timeout: Duration,
}

impl std::fmt::Debug for StoreRendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

/// Rank 0's decision on where the rendezvous is.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum RendezvousEndpoint {
    /// At the address in the launcher's variables.
    Launcher,
    /// In rank 0's process.
    RankZero { addresses: Vec<String>, secret: Secret },
}

/// How ranks get the secret of a rendezvous in rank 0's process.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Secret {
    /// All of them have it from the launcher or the user.
    Given,
    /// From the owner socket with this name.
    OnThisHost(String),
    /// From this value, which every reader of the store knows.
    Written(Vec<u8>),
}

impl StoreRendezvous {
    /// The environment's variables if they belong to this rank and size; otherwise only the rank and the size.
    pub(super) fn launch(&self, variables: &env::Variables) -> Launch {
        match env::detect(variables) {
            Ok(launch) if launch.launcher != Launcher::Single && self.is(&launch) => launch,
            // The variables belong to a parent that started this process, or there are none.
            _ => Launch {
                launcher: Launcher::Single,
                rank: self.rank,
                size: self.size,
                local: None,
                master_addr: None,
                master_port: 0,
                job: String::new(),
            },
        }
    }

    fn is(&self, launch: &Launch) -> bool {
        (launch.rank, launch.size) == (self.rank, self.size)
    }

    /// Agrees with the other ranks on the rendezvous.
    pub(super) fn find(&self, launch: &Launch, monitor: &Monitor, deadline: Instant) -> Result<Rendezvous> {
        let served_by_launcher = || match launch.launcher {
            Launcher::Single => None,
            _ => serve::launchers(launch),
        };
        if self.rank == 0 {
            let (rendezvous, endpoint) = match served_by_launcher() {
                Some(rendezvous) => (rendezvous, RendezvousEndpoint::Launcher),
                None => self.serve(launch, monitor, deadline)?,
            };
            let text = postcard::to_stdvec(&endpoint)
                .map_err(|error| Error::Internal(format!("the endpoint cannot be serialized: {error}")))?;
            self.store.set(ENDPOINT_KEY, &text)?;
            return Ok(rendezvous);
        }
        self.store.set(&host_key(self.rank), host::identity().as_bytes())?;
        let text = self.read(ENDPOINT_KEY, 0, monitor, deadline)?;
        match postcard::from_bytes(&text) {
            Ok(RendezvousEndpoint::Launcher) => served_by_launcher().ok_or_else(|| {
                Error::Config(format!(
                    "rank 0 was started by `smdrun` as rank 0 of {}, but the variables of this process do not say \
                     that it is rank {} of the same job",
                    self.size, self.rank
                ))
            }),
            Ok(RendezvousEndpoint::RankZero { addresses, secret }) => self.follow(addresses, secret),
            Err(error) => Err(Error::Rendezvous(format!(
                "what rank 0 wrote to the store cannot be read: {error}; do all ranks use the same version?"
            ))),
        }
    }

    /// On the other ranks: reads where rank 0 serves. A secret from the launcher or the user is never replaced by one
    /// from the store.
    fn follow(&self, addresses: Vec<String>, secret: Secret) -> Result<Rendezvous> {
        let open = matches!(secret, Secret::Written(_));
        let location = match (secret, serve::given_secret()) {
            (Secret::Given, Some(secret)) => RendezvousLocation::At { addresses, key: JobKey::new(&secret) },
            (Secret::OnThisHost(job), None) => RendezvousLocation::OnThisHost { job },
            (Secret::Written(secret), None) => RendezvousLocation::At { addresses, key: JobKey::new(&secret) },
            (theirs, ours) => {
                let has = |has| if has { "is set" } else { "is not set" };
                return Err(Error::Config(format!(
                    "`{name}` {} for rank 0 and {} for rank {}: set it for all ranks, to the same text",
                    has(theirs == Secret::Given),
                    has(ours.is_some()),
                    self.rank,
                    name = config::SECRET.name,
                )));
            }
        };
        Ok(Rendezvous { location, served_by_rank_0: true, open })
    }

    /// On rank 0: serves the rendezvous at an address that all others can reach, and writes it to the store.
    fn serve(&self, launch: &Launch, monitor: &Monitor, deadline: Instant) -> Result<(Rendezvous, RendezvousEndpoint)> {
        let mut hosts = BTreeSet::from([host::identity().into_bytes()]);
        // The launcher's variables take precedence over the store, to which other processes may write.
        for rank in (1..self.size).take_while(|_| !launch.on_one_host()) {
            hosts.insert(self.read(&host_key(rank), rank, monitor, deadline)?);
        }
        let one_host = hosts.len() == 1;
        let mut names = vec!["127.0.0.1".to_owned()];
        if !one_host {
            names = vec![host::name()];
            names.extend(launch.master_addr.clone());
        }
        let given = serve::given_secret();
        let reached = serve::serve_anywhere(one_host, self.size, given.clone())?;
        let key = JobKey::new(&reached.secret);
        let secret = match (given, reached.owner) {
            (Some(_), _) => Secret::Given,
            (None, Some(name)) => Secret::OnThisHost(name),
            (None, None) => Secret::Written(reached.secret),
        };
        let open = matches!(secret, Secret::Written(_));
        let addresses: Vec<String> = names.iter().map(|name| format!("{name}:{}", reached.port)).collect();
        let location = RendezvousLocation::At { addresses: addresses.clone(), key };
        Ok((Rendezvous { location, served_by_rank_0: true, open }, RendezvousEndpoint::RankZero { addresses, secret }))
    }

    /// Deletes the keys when all ranks have joined (STORE-3); the next job often uses the same store.
    pub(super) fn clear(&self) {
        if self.rank != 0 {
            return;
        }
        // A store that cannot delete keys serves one session only.
        let _ = self.store.remove(ENDPOINT_KEY);
        for rank in 1..self.size {
            let _ = self.store.remove(&host_key(rank));
        }
    }

    /// Waits for a key that rank `from` writes.
    fn read(&self, key: &str, from: usize, monitor: &Monitor, deadline: Instant) -> Result<Vec<u8>> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(value) = self.store.get(key)? {
                return Ok(value);
            }
            let during = || "joining the job".to_owned();
            let waited = start.elapsed();
            if Instant::now() >= deadline {
                return Err(Error::Timeout { during: during(), waited, missing: vec![from], limit: Limit::Rendezvous });
            }
            if monitor.interrupted() {
                return Err(Error::Interrupted { during: during() });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    use parking_lot::Mutex;

    #[derive(Default)]
    struct Local(Mutex<HashMap<String, Vec<u8>>>);

    impl BootstrapStore for Local {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.lock().insert(key.to_owned(), value.to_owned());
            Ok(())
        }
        fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
            Ok(self.0.lock().get(key).cloned())
        }
        fn remove(&self, key: &str) -> Result<()> {
            self.0.lock().remove(key);
            Ok(())
        }
    }

    fn store_rendezvous(rank: usize, store: &Arc<Local>) -> StoreRendezvous {
        StoreRendezvous { rank, size: 2, store: store.clone(), timeout: Duration::from_secs(5) }
    }

    #[test]
    fn variables_of_another_rank_are_passed_over() {
        let store = Arc::default();
        let mut variables = env::Variables::new();
        variables.insert("RANK".into(), "1".into());
        variables.insert("WORLD_SIZE".into(), "2".into());
        assert_eq!(store_rendezvous(1, &store).launch(&variables).launcher, Launcher::Torch);
        assert_eq!(store_rendezvous(0, &store).launch(&variables).launcher, Launcher::Single);
        variables.insert("RANK".into(), "first".into());
        assert_eq!(store_rendezvous(1, &store).launch(&variables).rank, 1);
    }

    #[test]
    fn ranks_agree_on_one_door_and_leave_nothing_behind() {
        let store = Arc::default();
        let find = |rank: usize| {
            let store_rendezvous = store_rendezvous(rank, &store);
            let launch = store_rendezvous.launch(&env::Variables::new());
            store_rendezvous.find(&launch, &Monitor::new(rank), Instant::now() + store_rendezvous.timeout).unwrap()
        };
        let (first, second) = std::thread::scope(|scope| {
            let second = scope.spawn(|| find(1));
            (find(0), second.join().unwrap())
        });
        assert!(first.location.to_string().starts_with("at 127.0.0.1:"), "{first:?}");
        assert!(
            matches!(second.location, RendezvousLocation::OnThisHost { .. }),
            "the store does not tell the secret: {second:?}"
        );
        assert!(!first.open && !second.open);
        store_rendezvous(0, &store).clear();
        assert!(store.0.lock().is_empty());
    }

    #[test]
    fn a_missing_rank_is_named() {
        let store = Arc::default();
        let store_rendezvous = store_rendezvous(0, &store);
        let launch = store_rendezvous.launch(&env::Variables::new());
        let error =
            store_rendezvous.find(&launch, &Monitor::new(0), Instant::now() + Duration::from_millis(30)).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
    }
}
