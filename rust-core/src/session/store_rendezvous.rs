//! Rendezvous through a framework's key-value store, for processes that know their rank and size but were started
//! without a launcher's variables. Rank 0 writes the address of the rendezvous server to the store.
//!
//! - STORE-1: only rank 0 decides where the rendezvous is, and writes it to the store, so ranks cannot decide
//!   differently. If `smdrun` serves a rendezvous for exactly these ranks, that one is used, because `smdrun` notices
//!   deaths first.
//! - STORE-2: rank 0 listens on the loopback interface if all ranks are on its host. The secret is that of the
//!   launcher or the user. Without one, rank 0 creates one. On one host, this user's processes get it through the
//!   owner socket. On several hosts, rank 0 writes it to the framework's store for each rank, as a [`sealed_secret`].
//!   Other readers of the store do not learn it, but who writes to the store while the job starts can; so rank 0 logs a
//!   warning.
//! - STORE-3: the keys are deleted before `init` returns on any rank, so that the store can be used for another
//!   session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::sealed_secret::{self, KeyPair};
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

/// The key of a rank's [`RankReport`].
fn report_key(rank: usize) -> String {
    format!("smd/report/{rank}")
}

/// The key of the secret that rank 0 sealed for a rank.
fn secret_key(rank: usize) -> String {
    format!("smd/secret/{rank}")
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
    /// From the store, where it is sealed for each rank with rank 0's key pair, of which this is the public key.
    Sealed { public_key: [u8; sealed_secret::BYTES] },
}

/// What each other rank writes to the store for rank 0.
#[derive(Serialize, Deserialize)]
struct RankReport {
    /// [`host::identity`].
    host: String,
    /// With which rank 0 seals the secret for it.
    public_key: [u8; sealed_secret::BYTES],
}

fn to_bytes(value: &impl Serialize) -> Result<Vec<u8>> {
    postcard::to_stdvec(value).map_err(|error| Error::Internal(format!("no bytes of a value for the store: {error}")))
}

fn from_bytes<T: serde::de::DeserializeOwned>(bytes: &[u8], from: usize) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        Error::Rendezvous(format!(
            "what rank {from} wrote to the store cannot be read: {error}; do all ranks use the same version?"
        ))
    })
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
            self.store.set(ENDPOINT_KEY, &to_bytes(&endpoint)?)?;
            return Ok(rendezvous);
        }
        let own = KeyPair::random()?;
        let report = RankReport { host: host::identity(), public_key: own.public };
        self.store.set(&report_key(self.rank), &to_bytes(&report)?)?;
        match from_bytes(&self.read(ENDPOINT_KEY, 0, monitor, deadline)?, 0)? {
            RendezvousEndpoint::Launcher => served_by_launcher().ok_or_else(|| {
                Error::Config(format!(
                    "rank 0 was started by `smdrun` as rank 0 of {}, but the variables of this process do not say \
                     that it is rank {} of the same job",
                    self.size, self.rank
                ))
            }),
            RendezvousEndpoint::RankZero { addresses, secret } => {
                let open_sealed = |public_key| {
                    let sealed = from_bytes(&self.read(&secret_key(self.rank), 0, monitor, deadline)?, 0)?;
                    own.open(sealed, public_key)
                };
                self.follow(addresses, secret, open_sealed)
            }
        }
    }

    /// On the other ranks: reads where rank 0 serves. A secret from the launcher or the user is never replaced by one
    /// from the store. `open_sealed` opens the secret in the store, given rank 0's public key.
    fn follow(
        &self,
        addresses: Vec<String>,
        secret: Secret,
        open_sealed: impl FnOnce([u8; sealed_secret::BYTES]) -> Result<[u8; sealed_secret::BYTES]>,
    ) -> Result<Rendezvous> {
        let open = matches!(secret, Secret::Sealed { .. });
        let location = match (secret, serve::given_secret()) {
            (Secret::Given, Some(secret)) => RendezvousLocation::At { addresses, key: JobKey::new(&secret) },
            (Secret::OnThisHost(job), None) => RendezvousLocation::OnThisHost { job },
            (Secret::Sealed { public_key }, None) => {
                RendezvousLocation::At { addresses, key: JobKey::new(&open_sealed(public_key)?) }
            }
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
        // The launcher's variables take precedence over the store, to which other processes may write.
        let reports: Vec<RankReport> = (1..self.size)
            .take_while(|_| !launch.on_one_host())
            .map(|rank| from_bytes(&self.read(&report_key(rank), rank, monitor, deadline)?, rank))
            .collect::<Result<_>>()?;
        let own_host = host::identity();
        let one_host = reports.iter().all(|report| report.host == own_host);
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
            (None, None) => self.seal(&reached.secret, &reports)?,
        };
        let open = matches!(secret, Secret::Sealed { .. });
        let addresses: Vec<String> = names.iter().map(|name| format!("{name}:{}", reached.port)).collect();
        let location = RendezvousLocation::At { addresses: addresses.clone(), key };
        Ok((Rendezvous { location, served_by_rank_0: true, open }, RendezvousEndpoint::RankZero { addresses, secret }))
    }

    /// On rank 0: writes the secret for each rank that has written a report.
    fn seal(&self, secret: &[u8], reports: &[RankReport]) -> Result<Secret> {
        let secret = secret.try_into().map_err(|_| Error::Internal(format!("a secret of {} bytes", secret.len())))?;
        let own = KeyPair::random()?;
        for (report, rank) in reports.iter().zip(1..) {
            self.store.set(&secret_key(rank), &to_bytes(&own.seal(secret, report.public_key)?)?)?;
        }
        Ok(Secret::Sealed { public_key: own.public })
    }

    /// Deletes the keys when all ranks have joined (STORE-3); the next job often uses the same store.
    pub(super) fn clear(&self) {
        if self.rank != 0 {
            return;
        }
        // A store that cannot delete keys serves one session only.
        let _ = self.store.remove(ENDPOINT_KEY);
        for rank in 1..self.size {
            let _ = self.store.remove(&report_key(rank));
            let _ = self.store.remove(&secret_key(rank));
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
    fn readers_of_the_store_do_not_learn_the_secret() {
        let store: Arc<Local> = Arc::default();
        let key_pairs = [KeyPair::random().unwrap(), KeyPair::random().unwrap()];
        let reports = key_pairs.each_ref().map(|own| RankReport { host: "other".into(), public_key: own.public });
        let secret = [9; sealed_secret::BYTES];
        let rank_0 = StoreRendezvous { size: 3, ..store_rendezvous(0, &store) };
        let Secret::Sealed { public_key } = rank_0.seal(&secret, &reports).unwrap() else { panic!("not sealed") };
        for (rank, own) in (1..).zip(&key_pairs) {
            let sealed = from_bytes(&store.get(&secret_key(rank)).unwrap().unwrap(), 0).unwrap();
            let follower = StoreRendezvous { rank, ..rank_0.clone() };
            let found = follower
                .follow(vec!["a:1".into()], Secret::Sealed { public_key }, |public_key| own.open(sealed, public_key))
                .unwrap();
            assert!(found.open);
            let RendezvousLocation::At { key, .. } = found.location else { panic!("not at an address") };
            assert_eq!(key, JobKey::new(&secret));
        }
        assert!(store.0.lock().values().all(|value| !value.windows(8).any(|part| part == &secret[..8])));
        rank_0.clear();
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
