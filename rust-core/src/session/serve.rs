//! Where the rendezvous of this job is: at the launcher's, or in rank 0's process.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config;
use crate::error::{Error, Result};
use crate::world::env::Launch;
use crate::world::monitor;
use crate::world::rendezvous::{JobKey, server};

/// How long a process that failed waits for the others to hear of it before it ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// The rendezvous that this process serves. It outlives sessions (RDV-4).
struct Served {
    job: String,
    size: usize,
    secret: Vec<u8>,
    server: server::Server,
}

static SERVED: Mutex<Option<Served>> = Mutex::new(None);
static FAILED: AtomicBool = AtomicBool::new(false);

/// The key, the addresses at which the rendezvous may be, and whether rank 0 serves it.
pub type Rendezvous = (JobKey, Vec<String>, bool);

/// The secret that the launcher's variables stand for.
pub fn secret(launch: &Launch) -> Vec<u8> {
    config::SECRET.text().map_or_else(|| launch.derived_secret().to_vec(), String::into_bytes)
}

/// Where the launcher's variables say that the rendezvous is. In rank 0's process this starts the server if nobody
/// else serves.
pub fn find(launch: &Launch) -> Result<Rendezvous> {
    let secret = secret(launch);
    let key = JobKey::new(&secret);
    if let Some(address) = config::RENDEZVOUS.text() {
        return Ok((key, vec![address], false));
    }
    let Some(master) = launch.master_addr.clone() else {
        return Err(Error::Config(
            "the host of rank 0 is not known: set `MASTER_ADDR`, the same on all ranks".to_owned(),
        ));
    };
    // One host needs no door to the network.
    let master = if launch.on_one_host() { "127.0.0.1".to_owned() } else { master };
    if launch.rank == 0 {
        let address = serve(launch, secret, &key, &master)?;
        return Ok((key, vec![address.to_string()], true));
    }
    let bracketed = if master.contains(':') && !master.starts_with('[') { format!("[{master}]") } else { master };
    Ok((key, launch.rendezvous_ports().iter().map(|port| format!("{bracketed}:{port}")).collect(), true))
}

/// Starts the server, or keeps the one that served the job's last session, and says where this process reaches it.
fn serve(launch: &Launch, secret: Vec<u8>, key: &JobKey, master: &str) -> Result<SocketAddr> {
    let mut served = SERVED.lock();
    let same = |served: &Served| served.job == launch.job && served.size == launch.size && served.secret == secret;
    if !served.as_ref().is_some_and(same) {
        *served = None; // frees its port before another is bound
        let server = start(bind(launch, master)?, key.clone(), launch.size)?;
        *served = Some(Served { job: launch.job.clone(), size: launch.size, secret, server });
    }
    let mut address = served.as_ref().expect("it is there or was made above").server.address();
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    Ok(address)
}

fn start(listener: TcpListener, key: JobKey, size: usize) -> Result<server::Server> {
    // Nobody else watches the processes, so a lost connection is all that there is to know.
    let patience = Duration::ZERO;
    let peer_timeout = config::PEER_TIMEOUT_SECONDS.seconds()?;
    server::Server::serve(listener, server::Options { key, size: Some(size), patience, peer_timeout })
}

/// Starts a server with a secret of its own, or keeps the last one that served `reach` and `size`; its port and secret.
pub fn serve_anywhere(reach: &str, size: usize, bind: impl FnOnce() -> Result<TcpListener>) -> Result<(u16, Vec<u8>)> {
    let job = format!("met by a store, for the {reach}");
    let mut served = SERVED.lock();
    if !served.as_ref().is_some_and(|served| served.job == job && served.size == size) {
        *served = None;
        let mut secret = vec![0; 32];
        getrandom::fill(&mut secret).map_err(|error| Error::Internal(format!("no random numbers: {error}")))?;
        let server = start(bind()?, JobKey::new(&secret), size)?;
        *served = Some(Served { job, size, secret, server });
    }
    let served = served.as_ref().expect("it is there or was made above");
    Ok((served.server.address().port(), served.secret.clone()))
}

/// Binds the first free one of the job's ports.
fn bind(launch: &Launch, master: &str) -> Result<TcpListener> {
    let everywhere: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
    let named: Option<IpAddr> =
        if master == "localhost" { Some(Ipv4Addr::LOCALHOST.into()) } else { master.parse().ok() };
    let hosts: Vec<IpAddr> = match named {
        Some(address) if address.is_loopback() => vec![address],
        // The address may be one that a network translates into ours.
        Some(address) => [address].into_iter().chain(everywhere).collect(),
        // A host's own name often stands for a loopback address on the host itself, where others cannot reach it.
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

/// Remembers that this process ends because of a failure.
pub fn note_failure() {
    FAILED.store(true, Ordering::Relaxed);
}

/// See [`note_failure`].
pub fn has_failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

/// See [`super::finish`].
pub fn linger() {
    let Some(served) = SERVED.lock().take() else { return };
    let patience =
        if FAILED.load(Ordering::Relaxed) { FAREWELL } else { config::TIMEOUT_SECONDS.seconds().unwrap_or(FAREWELL) };
    let deadline = Instant::now() + patience;
    let start = Instant::now();
    let told = std::cell::Cell::new(false);
    let empty = served.server.wait_until_empty(deadline, || {
        if start.elapsed() > FAREWELL && !told.replace(true) {
            tracing::info!("this rank is done, and serves the rendezvous until the others are");
        }
        monitor::interrupt_pending()
    });
    if !empty && !FAILED.load(Ordering::Relaxed) {
        tracing::warn!("this process ends while other ranks still run: they lose the rendezvous that it served");
    }
}
