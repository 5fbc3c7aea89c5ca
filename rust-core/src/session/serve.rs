//! Finds or serves the rendezvous of this job: the launcher serves it, or rank 0's process does.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config;
use crate::error::{Error, Result};
use crate::world::env::Launch;
use crate::world::monitor;
use crate::world::rendezvous::owner_socket::{OwnerSocket, RendezvousCredentials};
use crate::world::rendezvous::{JobKey, RendezvousLocation, server};

/// How long a process that failed keeps serving before it ends, so that the other ranks learn of the failure.
const FAILED_SERVE_TIME: Duration = Duration::from_secs(5);

/// The rendezvous server in this process. It outlives sessions (RDV-4).
struct RunningServer {
    job: String,
    size: usize,
    /// The secret from the launcher or the user, if there is one.
    given: Option<Vec<u8>>,
    secret: Vec<u8>,
    server: server::Server,
    /// The socket that gives the secret to this user's ranks on this host, and its name.
    owner: Option<(String, OwnerSocket)>,
}

static SERVED: Mutex<Option<RunningServer>> = Mutex::new(None);
static FAILED: AtomicBool = AtomicBool::new(false);

/// The location of the rendezvous.
#[derive(Debug)]
pub struct Rendezvous {
    pub location: RendezvousLocation,
    pub served_by_rank_0: bool,
    /// Whether processes outside of the job can know the secret.
    pub open: bool,
}

/// The secret from the launcher or the user.
pub fn given_secret() -> Option<Vec<u8>> {
    config::SECRET.text().map(String::into_bytes)
}

/// The rendezvous that the launcher serves, if it serves one.
pub fn launchers(launch: &Launch) -> Option<Rendezvous> {
    let address = config::RENDEZVOUS.text()?;
    let given = given_secret();
    let open = given.is_none();
    let key = JobKey::new(&given.unwrap_or_else(|| launch.derived_secret().to_vec()));
    Some(Rendezvous {
        location: RendezvousLocation::At { addresses: vec![address], key },
        served_by_rank_0: false,
        open,
    })
}

/// Finds the rendezvous by the launcher's variables. In rank 0's process this starts the server, unless the launcher
/// serves.
///
/// The secret is the one from the launcher or the user. Without one, rank 0 makes a random secret if all ranks are on
/// one host, and gives it to this user's processes. On several hosts the secret is derived from the launcher's
/// variables, and rank 0 warns that other processes may know it.
pub fn find(launch: &Launch) -> Result<Rendezvous> {
    if let Some(rendezvous) = launchers(launch) {
        return Ok(rendezvous);
    }
    let Some(master) = launch.master_addr.clone() else {
        return Err(Error::Config(
            "the host of rank 0 is not known: set `MASTER_ADDR`, the same on all ranks".to_owned(),
        ));
    };
    let one_host = launch.on_one_host() || is_loopback(&master);
    // On one host, the server listens on the loopback interface only.
    let master = if one_host { "127.0.0.1".to_owned() } else { master };
    let given = given_secret();
    let open = given.is_none() && !one_host;
    if launch.rank == 0 {
        let location = serve(launch, given, one_host, &master)?;
        return Ok(Rendezvous { location, served_by_rank_0: true, open });
    }
    if given.is_none() && one_host {
        let location = RendezvousLocation::OnThisHost { job: launch.job.clone() };
        return Ok(Rendezvous { location, served_by_rank_0: true, open });
    }
    let bracketed = if master.contains(':') && !master.starts_with('[') { format!("[{master}]") } else { master };
    let addresses = launch.rendezvous_ports().iter().map(|port| format!("{bracketed}:{port}")).collect();
    let key = JobKey::new(&given.unwrap_or_else(|| launch.derived_secret().to_vec()));
    Ok(Rendezvous { location: RendezvousLocation::At { addresses, key }, served_by_rank_0: true, open })
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Starts the server, or keeps the server of the job's previous session. Returns how this process reaches it.
fn serve(launch: &Launch, given: Option<Vec<u8>>, one_host: bool, master: &str) -> Result<RendezvousLocation> {
    let mut served = SERVED.lock();
    let same = |served: &RunningServer| served.job == launch.job && served.size == launch.size && served.given == given;
    if !served.as_ref().is_some_and(same) {
        *served = None; // frees its port before another is bound
        let name = (one_host && given.is_none()).then(|| launch.job.clone());
        let listener = match &name {
            Some(_) => loopback()?,
            None => bind(launch, master)?,
        };
        let secret = match (&given, &name) {
            (Some(secret), _) => secret.clone(),
            (None, Some(_)) => random_secret()?,
            (None, None) => {
                warn_open("its secret comes from its launcher's variables, which others can guess");
                launch.derived_secret().to_vec()
            }
        };
        *served = Some(RunningServer::start(listener, launch.job.clone(), launch.size, given, secret, name)?);
    }
    let served = served.as_ref().expect("it is there or was made above");
    let mut address = served.server.address();
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(RendezvousLocation::At { addresses: vec![address.to_string()], key: JobKey::new(&served.secret) })
}

impl RunningServer {
    /// Starts a server for a job and gives the secret to this user's ranks on this host under `name`.
    fn start(
        listener: TcpListener,
        job: String,
        size: usize,
        given: Option<Vec<u8>>,
        secret: Vec<u8>,
        name: Option<String>,
    ) -> Result<Self> {
        // There is no launcher that could explain a lost connection, so a death is reported at once.
        let death_cause_timeout = Duration::ZERO;
        let peer_timeout = config::PEER_TIMEOUT_SECONDS.seconds()?;
        let key = JobKey::new(&secret);
        let server = server::Server::serve(
            listener,
            server::ServerOptions { key, size: Some(size), death_cause_timeout, peer_timeout },
        )?;
        let credentials = RendezvousCredentials { address: server.address(), secret: secret.clone() };
        let owner = match name {
            Some(name) => Some((name.clone(), OwnerSocket::serve(&name, &credentials)?)),
            None => None,
        };
        Ok(Self { job, size, given, secret, server, owner })
    }
}

/// Warns, once in a job, that processes outside of the job may join it.
fn warn_open(why: &str) {
    tracing::warn!(
        "this job is open to the network: it spans hosts, and {why}. Any process that reaches rank 0 can join it, and read and change what ranks send. Set `SMD_SECRET` to the same random text for all ranks, such as that of `openssl rand -hex 32`, or start the job with `smdrun` (docs/security.md)"
    );
}

fn random_secret() -> Result<Vec<u8>> {
    let mut secret = vec![0; 32];
    getrandom::fill(&mut secret).map_err(|error| Error::Internal(format!("no random numbers: {error}")))?;
    Ok(secret)
}

fn loopback() -> Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| Error::io("binding the rendezvous", error))
}

/// The data with which ranks reach a server that was found through a framework's store.
pub struct ServerContact {
    pub port: u16,
    pub secret: Vec<u8>,
    /// The name under which the owner socket gives the secret, if it does.
    pub owner: Option<String>,
}

/// Starts a server with a random secret, or keeps the last server if it serves as many ranks in the same way. On one
/// host the owner socket gives the secret to this user's processes; on several hosts the caller distributes it.
pub fn serve_anywhere(one_host: bool, size: usize, given: Option<Vec<u8>>) -> Result<ServerContact> {
    let job = format!("a rendezvous through a store, for the {}", if one_host { "host" } else { "hosts" });
    let mut served = SERVED.lock();
    let same = |served: &RunningServer| served.job == job && served.size == size && served.given == given;
    if !served.as_ref().is_some_and(same) {
        *served = None;
        let listener = match one_host {
            true => loopback()?,
            // An IPv6 wildcard socket accepts IPv4 connections, too.
            false => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
                .map_err(|error| Error::io("binding the rendezvous", error))?,
        };
        // A random name, which no other process can hold.
        let name = match one_host && given.is_none() {
            true => Some(random_secret()?.iter().map(|byte| format!("{byte:02x}")).collect()),
            false => None,
        };
        if !one_host && given.is_none() {
            warn_open(
                "a client that writes to the store through which its ranks connect, usually torch's, can get the secret",
            );
        }
        let secret = given.clone().map_or_else(random_secret, Ok)?;
        *served = Some(RunningServer::start(listener, job, size, given, secret, name)?);
    }
    let served = served.as_ref().expect("it is there or was made above");
    Ok(ServerContact {
        port: served.server.address().port(),
        secret: served.secret.clone(),
        owner: served.owner.as_ref().map(|(name, _)| name.clone()),
    })
}

/// Binds the first free port of the job's port list.
fn bind(launch: &Launch, master: &str) -> Result<TcpListener> {
    let everywhere: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    let named: Option<IpAddr> =
        if master == "localhost" { Some(Ipv4Addr::LOCALHOST.into()) } else { master.parse().ok() };
    let hosts: Vec<IpAddr> = match named {
        Some(address) if address.is_loopback() => vec![address],
        // The address may be one that the network translates to ours.
        Some(address) => [address].into_iter().chain(everywhere).collect(),
        // A host's own name often resolves to a loopback address on the host itself, which other hosts cannot reach.
        None => everywhere.to_vec(),
    };
    let ports = launch.rendezvous_ports();
    let mut last = None;
    for &port in &ports {
        for &host in &hosts {
            match TcpListener::bind((host, port)) {
                Ok(listener) => return Ok(listener),
                Err(error) => last = Some(error),
            }
        }
    }
    let error = last.expect("there are ports and hosts to try");
    Err(Error::io(format!("binding the rendezvous to one of the ports {ports:?}"), error))
}

/// Marks this process as ending because of a failure.
pub fn note_failure() {
    FAILED.store(true, Ordering::Relaxed);
}

/// Whether [`note_failure`] was called.
pub fn has_failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

/// Keeps serving for a while at the end of a process; see [`super::finish`].
pub fn linger() {
    let Some(served) = SERVED.lock().take() else { return };
    let serve_time = if has_failed() {
        FAILED_SERVE_TIME
    } else {
        config::EXIT_TIMEOUT_SECONDS.seconds().unwrap_or(FAILED_SERVE_TIME)
    };
    let deadline = Instant::now() + serve_time;
    let start = Instant::now();
    let has_logged = std::cell::Cell::new(false);
    let empty = served.server.wait_until_empty(deadline, || {
        if start.elapsed() > FAILED_SERVE_TIME && !has_logged.replace(true) {
            tracing::info!("this rank has finished, and serves the rendezvous until the other ranks have left");
        }
        monitor::interrupt_pending()
    });
    if !empty && !FAILED.load(Ordering::Relaxed) {
        tracing::warn!(
            "this process ends while other ranks still run, after {:.0?}: they lose the rendezvous that it served; to let it wait \
             longer, set `{}`",
            start.elapsed(),
            config::EXIT_TIMEOUT_SECONDS.name
        );
    }
}
