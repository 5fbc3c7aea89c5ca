//! Sends the address and the secret of the rendezvous to the other processes of the same user on the same host.
//!
//! ```text
//!   rank 0: binds an abstract Unix socket whose name follows from the user id and the job
//!   rank n: connects, checks the owner of the socket's process, reads the credentials
//! ```
//!
//! - OWN-1: each side reads the user id of the other from the kernel (`SO_PEERCRED`). Nothing is sent to a process of
//!   another user, and nothing is read from a server of another user. Both sides check, because the name can be
//!   guessed.
//! - OWN-2: an abstract socket ends with its process, so nothing is left behind. It is visible in one network namespace
//!   only; a process in another namespace cannot connect.
//! - OWN-3: rank 0 never reads from a connection, and what it writes fits into the socket's buffer, so no client can
//!   block it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::refusals::Refusals;
use crate::error::{Error, Result};
use crate::world::fork;

/// The number of names to try in order, because another job or user may hold the first ones.
const NUM_NAMES: usize = 8;
/// The longest credentials, in bytes.
const MAX_CREDENTIALS_BYTES: u64 = 1 << 12;
/// The longest wait for credentials after a server has accepted the connection.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after a failed accept, usually because descriptors ran out.
const ACCEPT_RETRY_PAUSE: rustix::event::Timespec = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };

/// The data that a process of the same user receives: where the rendezvous is and its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RendezvousCredentials {
    /// The address of the rendezvous.
    pub address: SocketAddr,
    /// The secret of the rendezvous.
    pub secret: Vec<u8>,
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerProcess {
    user: u32,
    process: i32,
}

impl std::fmt::Display for PeerProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.process {
            // The process is in another PID namespace.
            0 => write!(f, "a process of user {}", self.user),
            process => write!(f, "process {process} of user {}", self.user),
        }
    }
}

/// Serves credentials until it is dropped.
pub struct OwnerSocket {
    /// Becomes readable when the thread must end.
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl OwnerSocket {
    /// Serves `credentials` to every process of this user that connects for `job`.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] naming the process that holds all names of this job; [`Error::Io`].
    pub fn serve(job: &str, credentials: &RendezvousCredentials) -> Result<Self> {
        let io = |error| Error::io("creating the socket that sends the job's secret to this user's ranks", error);
        let listener = bind(job)?;
        listener.set_nonblocking(true).map_err(io)?;
        let bytes =
            postcard::to_stdvec(credentials).map_err(|error| Error::Internal(format!("credentials: {error}")))?;
        let stop = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(|error| io(error.into()))?;
        let stop = Arc::new(stop);
        let (guard, stopped) = (fork::Guard::new(&listener), stop.clone());
        let thread = std::thread::Builder::new()
            .name("smd-owner".into())
            .spawn(move || {
                let _guard = guard;
                serve_credentials(&listener, &stopped, &bytes);
            })
            .map_err(io)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for OwnerSocket {
    fn drop(&mut self) {
        // The thread does not exist in a forked child.
        if fork::is_child() {
            return;
        }
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The user whose processes form the job.
fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn name(job: &str, attempt: usize) -> Vec<u8> {
    let digest = Sha256::digest(job.as_bytes());
    let digest: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("opensmd/{}/{digest}/{attempt}", user()).into_bytes()
}

fn bind(job: &str) -> Result<UnixListener> {
    let mut holder = None;
    for attempt in 0..NUM_NAMES {
        let name = name(job, attempt);
        let bound = UnixAddress::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
        match bound {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                holder = holder.or_else(|| connect(&name).ok().and_then(|stream| owner(&stream).ok()));
            }
            Err(error) => {
                return Err(Error::io("binding the socket that sends the job's secret to this user's ranks", error));
            }
        }
    }
    let holder = holder.map_or_else(|| "other processes".to_owned(), |holder| holder.to_string());
    Err(Error::Rendezvous(format!(
        "{holder} already serves a job of the same name on this host: give this job a `MASTER_PORT` of its own, or set \
         `SMD_SECRET` on all ranks"
    )))
}

fn serve_credentials(listener: &UnixListener, stop: &OwnedFd, credentials: &[u8]) {
    let mut refusals = Refusals::default();
    loop {
        let mut ready = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        if let Err(error) = poll(&mut ready, None)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("the job's secret is not sent to ranks of this user any more: {error}");
            return;
        }
        if !ready[1].revents().is_empty() {
            return;
        }
        match listener.accept() {
            Ok((stream, _)) => send_credentials(stream, credentials, &mut refusals),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => {
                refusals.note(None, &format!("accepting a connection of this host: {error}"));
                let _ = poll(&mut [PollFd::new(stop, PollFlags::IN)], Some(&ACCEPT_RETRY_PAUSE));
            }
        }
        refusals.summarize(Instant::now());
    }
}

fn send_credentials(mut stream: UnixStream, credentials: &[u8], refusals: &mut Refusals) {
    match owner(&stream) {
        Ok(owner) if owner.user == user() => {
            let _ = stream.set_nonblocking(true).and_then(|()| stream.write_all(credentials));
        }
        Ok(owner) => refusals.note(None, &format!("refused {owner}, which requested the secret of this user's job")),
        Err(error) => refusals.note(None, &format!("refused a connection of an unknown user: {error}")),
    }
    // Shuts the connection down, because a forked child may hold a copy of the descriptor and the client must see the
    // end.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Reads the credentials of all servers of `job` by this user on this host.
///
/// # Errors
/// A text about a process of another user that serves under this job's name.
pub fn find_servers(job: &str) -> std::result::Result<Vec<RendezvousCredentials>, String> {
    let mut found = Vec::new();
    let mut first_error = None;
    for attempt in 0..NUM_NAMES {
        match read_credentials(&name(job, attempt)) {
            Ok(credentials) => found.extend(credentials),
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error {
        Some(first_error) if found.is_empty() => Err(first_error),
        _ => Ok(found),
    }
}

/// Reads the credentials of the server at `name`; none if there is no server.
fn read_credentials(name: &[u8]) -> std::result::Result<Option<RendezvousCredentials>, String> {
    let mut stream = match connect(name) {
        Ok(stream) => stream,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(None),
        Err(error) => return Err(format!("the socket of rank 0 cannot be reached: {error}")),
    };
    let owner = owner(&stream).map_err(|error| format!("the socket of rank 0 has no owner: {error}"))?;
    if owner.user != user() {
        return Err(format!(
            "{owner} serves under this job's name, and is not trusted, since this process is user {}'s; if both are \
             yours, set `SMD_SECRET` on all ranks",
            user()
        ));
    }
    let mut bytes = Vec::new();
    stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(READ_TIMEOUT)))
        .and_then(|()| Read::by_ref(&mut stream).take(MAX_CREDENTIALS_BYTES).read_to_end(&mut bytes))
        .map_err(|error| format!("{owner} does not send the job's secret: {error}"))?;
    // A server that is just ending sends nothing.
    Ok(postcard::from_bytes(&bytes).ok())
}

/// Connects without blocking; a full backlog is an error.
fn connect(name: &[u8]) -> std::io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    Ok(socket.into())
}

/// The process that created the other end.
fn owner(stream: &impl AsFd) -> std::io::Result<PeerProcess> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    // `rustix` has this call too, but cannot represent process id 0, which a peer in another PID namespace has.
    // SAFETY: the descriptor is open, and the buffer has as many bytes as announced.
    let outcome = unsafe {
        libc::getsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut found).cast(),
            &mut bytes,
        )
    };
    match outcome {
        0 => Ok(PeerProcess { user: found.uid, process: found.pid }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(port: u16) -> RendezvousCredentials {
        RendezvousCredentials { address: SocketAddr::from(([127, 0, 0, 1], port)), secret: vec![7; 32] }
    }

    fn job(name: &str) -> String {
        format!("{name} of process {}", std::process::id())
    }

    #[test]
    fn processes_of_this_user_get_the_credentials_until_the_server_ends() {
        let job = job("credentials");
        assert_eq!(find_servers(&job), Ok(Vec::new()));
        let first = OwnerSocket::serve(&job, &credentials(1)).unwrap();
        let second = OwnerSocket::serve(&job, &credentials(2)).unwrap();
        assert_eq!(find_servers(&job), Ok(vec![credentials(1), credentials(2)]));
        drop(first);
        assert_eq!(find_servers(&job), Ok(vec![credentials(2)]));
        drop(second);
        assert_eq!(find_servers(&job), Ok(Vec::new()));
    }

    #[test]
    fn the_process_that_holds_all_names_is_named() {
        let job = job("all names in use");
        let held: Vec<_> = (0..NUM_NAMES).map(|_| OwnerSocket::serve(&job, &credentials(1)).unwrap()).collect();
        let error = OwnerSocket::serve(&job, &credentials(2)).err().expect("there is no name left");
        let expected = format!("process {} of user {}", std::process::id(), user());
        assert!(error.to_string().contains(&expected), "{error}");
        drop(held);
    }

    #[test]
    fn a_server_that_sends_nothing_is_skipped() {
        let job = job("silence");
        let address = UnixAddress::from_abstract_name(name(&job, 0)).unwrap();
        let silent = UnixListener::bind_addr(&address).unwrap();
        let _served = OwnerSocket::serve(&job, &credentials(3)).unwrap();
        let start = Instant::now();
        assert_eq!(find_servers(&job), Ok(vec![credentials(3)]));
        assert!(start.elapsed() < 2 * READ_TIMEOUT);
        drop(silent);
    }
}
