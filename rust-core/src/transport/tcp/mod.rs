//! TCP between hosts, for jobs that do not use MPI (`session/hosts.rs`). Each process listens on one port
//! ([`listen`]), and the ranks exchange their addresses at the rendezvous. One thread ([`service`]) receives for all
//! groups of the process, unless a caller that waits for frames does so itself.
//!
//! ```text
//!   rank 0                                       rank 1
//!   send --> queue to 1 ==== connection ======> inbound --take--> port
//!   port <--take-- inbound <=== connection ====== queue to 0 <-- send
//! ```
//!
//! - TCP-1: a connection carries frames in one direction only, from the process that opened it. It is opened for the
//!   first frame. Two processes therefore never have to agree on which of two connections to keep.
//! - TCP-2: both ends first prove the job's secret to each other, and each frame is authenticated with its sequence
//!   number (RDV-2), without its body if all ranks trust the network. A connection that fails this is closed, and its
//!   frames are dropped.
//! - TCP-3: no thread blocks on the network. Frames that find no room stay with their sender, the mailbox; for each
//!   process, one frame is held here that the system has accepted in part, and at most [`send_queue::FRAMES`] until
//!   the connection is established. Of incoming data, at most one incomplete frame per connection is held.
//! - TCP-4: a lost connection does not mean a dead process. If the process has departed, the rendezvous reports it with
//!   the cause. If no report arrives in time, the network between two living processes is broken, which ends the
//!   session.
//! - TCP-5: locks are taken in the order service, mailbox, send queue. A thread that serves the connections holds no
//!   send queue's lock while it advances a mailbox.
//! - TCP-6: a large payload is read directly to the memory of its receive, if that is posted
//!   ([`super::ports::DirectReceiveHandle`]). What is there counts only when the frame has been authenticated, because
//!   the receive completes only then.
//! - TCP-7: a caller that receives serves established connections only. Handshakes, commands and timers are always
//!   handled by the thread. While no caller receives ([`gate`]), the thread serves everything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mio::Poll;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::callers::TICK;
use super::ports::{Carrier, PREFIX_BYTES, PortKey, Ports};
use crate::error::{Error, Result};
use crate::world::rendezvous::JobKey;
use crate::world::rendezvous::frame_tag::TagOptions;
use crate::world::{Monitor, fork};

mod congestion;
mod dial;
mod gate;
mod inbound;
pub(crate) mod interface;
mod send_queue;
mod service;
#[cfg(test)]
mod tests;

pub(crate) use congestion::CongestionControl;
use send_queue::{SendQueue, Sent};
#[cfg(test)]
pub(crate) use tests::networks;

/// Input of this protocol's key derivation, besides the job's key.
const PROTOCOL: &[u8] = b"frames between ranks";

/// Polling interval while waiting for queued frames to be sent.
const FLUSH_PAUSE: Duration = Duration::from_millis(1);

/// The address at which a process listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TcpAddress {
    /// `None` stands for the host of the rendezvous. A process on that host may only know a name of it that other hosts
    /// cannot resolve.
    host: Option<IpAddr>,
    port: u16,
}

impl TcpAddress {
    /// Returns the address for a process that reaches the rendezvous at `rendezvous`.
    pub(crate) fn address_for(self, rendezvous: IpAddr) -> SocketAddr {
        SocketAddr::new(self.host.unwrap_or(rendezvous).to_canonical(), self.port)
    }
}

/// Binds the port of this process, at the address `chosen` or on the interface that reaches the rendezvous. `local` is
/// this end of the connection to the rendezvous.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub(crate) fn listen(local: IpAddr, chosen: Option<IpAddr>) -> Result<(TcpListener, TcpAddress)> {
    let local = local.to_canonical();
    let everywhere = || {
        // Also accepts IPv4, where the host has IPv6 at all.
        TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
    };
    let host = chosen.or((!local.is_loopback()).then_some(local));
    // The address may belong to a gateway that translates it to this host's.
    let bound = host.map_or_else(everywhere, |local| TcpListener::bind((local, 0)).or_else(|_| everywhere()));
    let io = |error| Error::io("listening for other hosts", error);
    let listener = bound.map_err(io)?;
    let port = listener.local_addr().map_err(io)?.port();
    Ok((listener, TcpAddress { host, port }))
}

/// The identity of this process, and the addresses of the others.
pub(crate) struct TcpOptions {
    pub(crate) rank: usize,
    /// Distinguishes this session from others of the same job.
    pub(crate) session: u64,
    /// The job's key.
    pub(crate) key: JobKey,
    /// The address of each rank's process.
    pub(crate) book: Vec<SocketAddr>,
    pub(crate) monitor: Arc<Monitor>,
    /// How frames are authenticated; equal on all ranks.
    pub(crate) tags: TagOptions,
    pub(crate) congestion_control: CongestionControl,
    /// A host that is silent for this long counts as lost. The report of a departure may also take this long.
    pub(crate) peer_timeout: Duration,
}

/// Commands to the thread.
enum TcpCommand {
    /// Open the connection to this rank.
    Dial(usize),
    /// The connection to this rank was lost.
    Lost(usize, String),
    Stop,
}

struct TcpState {
    rank: usize,
    ports: Ports,
    /// Outgoing frames, by rank.
    send_queues: Vec<Mutex<SendQueue>>,
    calls: Mutex<Vec<TcpCommand>>,
    gate: gate::ReceiveGate,
    /// None once it has ended.
    service: Mutex<Option<service::Service>>,
    /// Whether the service has taken events from the system that it has not handled.
    has_more: AtomicBool,
}

impl TcpState {
    /// Wakes the thread if a caller has taken events from the system and not handled them: the system does not tell of
    /// them again.
    fn announce_rest(&self) {
        if self.has_more.load(Ordering::SeqCst) {
            self.gate.ring();
        }
    }

    fn call(&self, call: TcpCommand) {
        self.calls.lock().push(call);
        self.gate.ring();
    }

    /// The body of the thread.
    fn serve(&self, monitor: &Monitor) {
        // Also if it panics.
        let _end = ServiceEnd(self);
        loop {
            let callers_receive = self.gate.callers_receive();
            let limit = {
                let mut service = self.service.lock();
                let Some(service) = service.as_mut() else { return };
                if !service.serve_all(callers_receive, self) {
                    return;
                }
                let has_more = service.has_more();
                self.has_more.store(has_more, Ordering::SeqCst);
                match service.limit() {
                    // Callers read the remaining frames, or wake this thread by the doorbell.
                    limit if callers_receive => Some(limit.map_or(TICK, |limit| limit.min(TICK))),
                    _ if has_more => Some(Duration::ZERO),
                    limit => limit,
                }
            };
            if let Err(error) = self.gate.wait(limit) {
                monitor.close(&format!(
                    "connections from other hosts are not served any more: {}",
                    std::io::Error::from(error)
                ));
                return;
            }
        }
    }
}

/// Ends the service when it is dropped: closes all connections, and drops later frames.
struct ServiceEnd<'a>(&'a TcpState);

impl Drop for ServiceEnd<'_> {
    fn drop(&mut self) {
        let service = self.0.service.lock().take();
        for queue in &self.0.send_queues {
            drop(queue.lock().disconnect());
        }
        drop(service);
    }
}

/// All TCP connections of this process to other ranks, and the thread that serves them.
pub(crate) struct Network {
    shared: Arc<TcpState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Network {
    /// Starts the thread that serves `listener`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no resources for the thread.
    pub(crate) fn start(listener: TcpListener, options: TcpOptions) -> Result<Arc<Self>> {
        let io = |error| Error::io("serving other hosts", error);
        let poll = Poll::new().map_err(io)?;
        let (rank, monitor) = (options.rank, options.monitor.clone());
        // SAFETY: the descriptor is open while `poll` lives, which is longer than this call.
        let connections = unsafe { BorrowedFd::borrow_raw(poll.as_raw_fd()) };
        let gate = gate::ReceiveGate::new(connections).map_err(|error| io(error.into()))?;
        let send_queues = options.book.iter().map(|_| Mutex::default()).collect();
        let shared = Arc::new(TcpState {
            rank,
            ports: Ports::new(inbound::BUFFER_BYTES),
            send_queues,
            calls: Mutex::default(),
            gate,
            service: Mutex::new(Some(service::Service::new(poll, listener, options)?)),
            has_more: AtomicBool::new(false),
        });
        let own = shared.clone();
        let work = move || own.ports.serve("smd-tcp", || own.serve(&monitor));
        let thread = std::thread::Builder::new().name("smd-tcp".into()).spawn(work).map_err(io)?;
        Ok(Arc::new(Self { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Closes all connections. Data that the system has accepted still reaches the receivers; later frames are dropped.
    pub(crate) fn close(&self) {
        // The thread does not exist in a forked child.
        if fork::is_child() {
            return;
        }
        let Some(thread) = self.thread.lock().take() else { return };
        self.shared.call(TcpCommand::Stop);
        // The thread itself may hold the last reference to a group.
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

    fn send(&self, from: PortKey, to: usize, prefix: &[u8; PREFIX_BYTES], payload: &[u8]) -> bool {
        let shared = &self.shared;
        let sent = shared.send_queues[to].lock().send(from, prefix, payload);
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

    fn await_thread(&self, waits: bool) {
        self.shared.gate.await_thread(waits);
        if waits {
            self.shared.announce_rest();
        }
    }

    fn receives(&self, begins: bool) -> bool {
        match begins {
            true => self.shared.gate.enter(),
            false => {
                if !self.shared.gate.leave() {
                    self.shared.announce_rest();
                }
            }
        }
        true
    }

    fn receive(&self) -> bool {
        let shared = &self.shared;
        shared.gate.look();
        let Some(mut service) = shared.service.try_lock() else { return false };
        let Some(serving) = service.as_mut() else { return false };
        let received = serving.receive(shared);
        let has_more = serving.has_more();
        shared.has_more.store(has_more, Ordering::SeqCst);
        if has_more && shared.gate.is_watched() {
            // This caller may lose its core before it looks again. The thread looks every tick from now on.
            shared.gate.ring();
        }
        received
    }

    fn flush(&self, deadline: Instant) {
        let others = || self.shared.send_queues.iter().enumerate().filter(|(rank, _)| *rank != self.shared.rank);
        while others().any(|(_, queue)| queue.lock().is_sending()) && Instant::now() < deadline {
            std::thread::sleep(FLUSH_PAUSE);
        }
    }

    fn needs_all_members(&self) -> bool {
        false
    }
}
