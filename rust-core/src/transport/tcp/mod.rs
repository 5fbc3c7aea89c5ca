//! TCP between hosts, for jobs that no MPI launcher started. Each process listens on one port ([`listen`]), and the ranks
//! tell each other where when they meet. One thread ([`service`]) takes what comes, for all groups of the process.
//!
//! ```text
//!   rank 0                                       rank 1
//!   send --> queue to 1 ==== connection ======> inbound --take--> port
//!   port <--take-- inbound <=== connection ====== queue to 0 <-- send
//! ```
//!
//! - TCP-1: a connection carries frames in one direction only, from whom it was made by to whom it was made to, and is
//!   made when the first frame is to be sent. So two processes never have to agree on which of two connections stays.
//! - TCP-2: both ends prove the job's secret to each other before anything else, and each frame is authentic and in its place
//!   (RDV-2). A connection of which that is not so is ended; nothing that came on it counts.
//! - TCP-3: nobody waits for the network. What finds no room is kept by its sender, the mailbox; at most
//!   [`send_queue::FRAMES`] frames for a process wait here. Of what comes, at most one incomplete frame a connection is held.
//! - TCP-4: a lost connection is no verdict. If its process has departed, the rendezvous says so, and knows why; if nobody
//!   says so in time, the network between two living processes is broken, which ends the session.
//! - TCP-5: locks are taken in the order mailbox, send queue. The thread holds neither when it brings a mailbox on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::{Poll, Waker};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::ports::{Carrier, Pool, PortKey, Ports};
use crate::error::{Error, Result};
use crate::world::rendezvous::JobKey;
use crate::world::rendezvous::frame::HEADER_BYTES;
use crate::world::{Monitor, fork};

mod dial;
mod inbound;
pub(crate) mod interface;
mod send_queue;
mod service;
#[cfg(test)]
mod tests;

use send_queue::{SendQueue, Sent};
#[cfg(test)]
pub(crate) use tests::networks;

/// What this protocol's keys are made of, besides the job's key.
const PROTOCOL: &[u8] = b"frames between ranks";

/// A pause between two looks at whether everything was sent.
const FLUSH_PAUSE: Duration = Duration::from_millis(1);

/// Where a process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    /// `None` stands for the host of the rendezvous, of which a process on that very host may only know a name that others
    /// do not.
    host: Option<IpAddr>,
    port: u16,
}

impl TcpAddress {
    /// The address for a process that sees the rendezvous at `rendezvous`.
    pub(crate) fn seen_from(self, rendezvous: IpAddr) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(rendezvous).to_canonical(), self.port)
    }
}

/// Binds the port of this process: at the address `chosen`, or on the interface that reaches the rendezvous, where `local` is this end
/// of the connection to it.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub(crate) fn listen(local: IpAddr, chosen: Option<IpAddr>) -> Result<(TcpListener, TcpAddress)> {
    let local = local.to_canonical();
    let everywhere = || {
        // Serves IPv4 as well, where there is IPv6 at all.
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
    };
    let host = chosen.or((!local.is_loopback()).then_some(local));
    // The address may be one that a network translates into ours.
    let bound = host.map_or_else(everywhere, |local| TcpListener::bind((local, 0)).or_else(|_| everywhere()));
    let io = |error| Error::io("listening for other hosts", error);
    let listener = bound.map_err(io)?;
    let port = listener.local_addr().map_err(io)?.port();
    Ok((listener, TcpAddress { host, port }))
}

/// Who this process is, and where the others are.
pub(crate) struct TcpOptions {
    pub(crate) rank: usize,
    /// Tells this session from others of the same job.
    pub(crate) session: u64,
    /// The job's key.
    pub(crate) key: JobKey,
    /// Where the process of each rank listens.
    pub(crate) book: Vec<SocketAddr>,
    pub(crate) monitor: Arc<Monitor>,
    /// Silence after which a host counts as vanished; as long do news of a departure take at most.
    pub(crate) peer_timeout: Duration,
}

/// What the thread is told.
enum TcpCommand {
    /// Make the connection to this rank.
    Dial(usize),
    /// The connection to this rank is lost.
    Lost(usize, String),
    Stop,
}

struct TcpState {
    rank: usize,
    ports: Ports,
    /// By rank.
    send_queues: Vec<Mutex<SendQueue>>,
    /// What frames leave in.
    buffers: Pool,
    calls: Mutex<Vec<TcpCommand>>,
    waker: Waker,
}

impl TcpState {
    fn call(&self, call: TcpCommand) {
        self.calls.lock().push(call);
        if let Err(error) = self.waker.wake() {
            tracing::error!("waking the thread that serves other hosts: {error}");
        }
    }
}

/// All TCP connections of this process to other ranks, and the thread that serves them.
pub(crate) struct Network {
    shared: Arc<TcpState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Network {
    /// Serves at `listener`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses the thread's resources.
    pub(crate) fn start(listener: TcpListener, options: TcpOptions) -> Result<Arc<Self>> {
        let io = |error| Error::io("serving other hosts", error);
        let poll = Poll::new().map_err(io)?;
        let shared = Arc::new(TcpState {
            rank: options.rank,
            ports: Ports::new(inbound::BUFFER_BYTES),
            send_queues: options.book.iter().map(|_| Mutex::default()).collect(),
            buffers: Pool::new(0),
            calls: Mutex::default(),
            waker: Waker::new(poll.registry(), service::WAKER).map_err(io)?,
        });
        let service = service::Service::new(poll, listener, options, shared.clone())?;
        let own = shared.clone();
        let work = move || own.ports.serve("smd-tcp", move || service.run());
        let thread = std::thread::Builder::new().name("smd-tcp".into()).spawn(work).map_err(io)?;
        Ok(Arc::new(Self { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Ends all connections; what the system has taken still reaches its receivers. Frames for others are dropped from now
    /// on.
    pub(crate) fn close(&self) {
        // A forked child has no such thread.
        if fork::is_child() {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        self.shared.call(TcpCommand::Stop);
        // The last user of a group may be the thread itself.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.close();
    }
}

impl Carrier for Network {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn ports(&self) -> &Ports {
        &self.shared.ports
    }

    fn send(&self, from: PortKey, to: usize, write: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        let shared = &self.shared;
        let mut queue = shared.send_queues[to].lock();
        let sent = queue.send(from, &shared.buffers, |buffer| {
            buffer.resize(HEADER_BYTES, 0);
            write(buffer);
        });
        drop(queue);
        match sent {
            Sent::Taken => true,
            Sent::Full => false,
            Sent::First => {
                shared.call(TcpCommand::Dial(to));
                true
            }
            Sent::Lost(error) => {
                shared.call(TcpCommand::Lost(to, error.to_string()));
                true
            }
        }
    }

    /// The system wakes the thread when something comes.
    fn busy_poll(&self, _waits: bool) {}

    fn flush(&self, deadline: Instant) {
        let others = || self.shared.send_queues.iter().enumerate().filter(|(rank, _)| *rank != self.shared.rank);
        while others().any(|(_, queue)| queue.lock().is_sending()) && Instant::now() < deadline {
            std::thread::sleep(FLUSH_PAUSE);
        }
    }

    fn needs_everybody(&self) -> bool {
        false
    }
}
