//! The congestion control of connections to other hosts.
//!
//! BBR, which some systems use for all connections, sends at a rate that it measures, and timers hold packets back until
//! their time has come. Where the network's delay is shorter than what timers and measurements can resolve, this costs
//! most of the speed (benches/NOTES.md, "Congestion control"). So BBR is replaced where the delay is short; each
//! connection measures it. On longer ways, BBR stays: it keeps its speed where packets are lost.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use mio::net::TcpStream;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use crate::config::Setting;
use crate::error::{Error, Result};

/// Up to this delay there and back, BBR is replaced. Within it, a connection at 10 Gbit/s regains its speed half a second
/// after a lost packet with each of [`WITHOUT_PACING`], and sooner over a shorter way.
const SHORT_DELAY: Duration = Duration::from_millis(1);
/// Replacements, best first. Every system has the last one.
const WITHOUT_PACING: [&str; 2] = ["cubic", "reno"];

/// The congestion control of the TCP connections on which this process sends. Each connection carries data in one
/// direction only, so the receiver's congestion control does not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CongestionControl {
    /// The system's.
    System,
    /// The one that the user has chosen.
    Chosen(String),
    /// The first one in place of the second one, which is the system's, if the delay is short.
    Replaced { by: &'static str, system: String },
}

impl CongestionControl {
    /// Chooses by `setting`, or by the system's congestion control. `tells` says whether this rank logs the choice.
    ///
    /// # Errors
    /// [`Error::Config`] if the system does not have or permit the user's choice, [`Error::Io`] if there is no socket.
    pub(crate) fn choose(setting: &Setting, tells: bool) -> Result<Self> {
        let io = |error: Errno| Error::io("choosing the congestion control of TCP connections", error);
        let socket = socket(AddressFamily::INET).or_else(|_| socket(AddressFamily::INET6)).map_err(io)?;
        let permits = |name: &str| sockopt::set_tcp_congestion(&socket, name);
        if let Some((variable, name)) = setting.set() {
            return permits(&name).map(|()| Self::Chosen(name.clone())).map_err(|error| {
                let known = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
                let known = known.as_deref().unwrap_or("one that the system has").trim();
                Error::Config(format!("`{variable}` is `{name}`: expected one of `{known}` ({error})"))
            });
        }
        let system = match sockopt::tcp_congestion(&socket) {
            Ok(system) if paces(&system) => system,
            Ok(_) => return Ok(Self::System),
            Err(error) => {
                tracing::debug!("the congestion control of TCP connections is not known: {error}");
                return Ok(Self::System);
            }
        };
        // Connections with a long delay return to the system's.
        let by = WITHOUT_PACING.into_iter().find(|name| permits(name).is_ok()).filter(|_| permits(&system).is_ok());
        match by {
            Some(by) => {
                if tells {
                    tracing::info!(
                        "TCP connections to other hosts use `{by}` instead of the system's `{system}` where the delay is \
                         up to {SHORT_DELAY:?}; `{}={system}` keeps it",
                        setting.name
                    );
                }
                Ok(Self::Replaced { by, system })
            }
            None => {
                if tells {
                    tracing::warn!(
                        "TCP connections to other hosts keep the congestion control `{system}`, which is slow where the \
                         delay is short: this system does not permit a change to one of {WITHOUT_PACING:?} and back"
                    );
                }
                Ok(Self::System)
            }
        }
    }

    /// Starts a connection without waiting for it.
    pub(super) fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let socket = socket(if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 })?;
        // Before the connection begins: one that has begun with BBR paces its packets ever after.
        match self {
            Self::System => {}
            Self::Chosen(name) => sockopt::set_tcp_congestion(&socket, name)?,
            Self::Replaced { by, .. } => {
                if let Err(error) = sockopt::set_tcp_congestion(&socket, by) {
                    tracing::debug!("a TCP connection keeps the system's congestion control: {error}");
                }
            }
        }
        match net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpStream::from_std(socket.into())),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns a connection over which messages went there and back to the system's congestion control, if its delay is
    /// long or not known.
    pub(super) fn adapt(&self, stream: &TcpStream) {
        if let Self::Replaced { .. } = self
            && let Err(error) = delay(stream).and_then(|delay| self.adapt_to(stream, delay))
        {
            tracing::debug!("a TCP connection keeps its congestion control: {error}");
        }
    }

    fn adapt_to(&self, stream: &TcpStream, delay: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Replaced { system, .. } if delay.is_none_or(|delay| delay > SHORT_DELAY) => {
                Ok(sockopt::set_tcp_congestion(stream, system)?)
            }
            _ => Ok(()),
        }
    }
}

/// Whether a congestion control holds packets back by timers: BBR, whatever its version.
fn paces(name: &str) -> bool {
    name.starts_with("bbr")
}

fn socket(family: AddressFamily) -> rustix::io::Result<std::os::fd::OwnedFd> {
    net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, Some(ipproto::TCP))
}

/// The shortest time that a packet has taken there and back, if the system has measured it. The first packet of a
/// connection may take longer than others: networks set up their ways, and the other host looks for this one's address.
fn delay(stream: &impl AsFd) -> io::Result<Option<Duration>> {
    // Offset of `tcpi_min_rtt` in the kernel's `tcp_info` (linux/tcp.h, since Linux 4.6), which libc's ends before.
    const MIN_RTT: usize = 148;
    let mut info = [0u32; 64];
    let mut bytes = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the descriptor is open, and the system writes at most `bytes` bytes to `info`.
    let answer = unsafe {
        let to = info.as_mut_ptr().cast();
        libc::getsockopt(stream.as_fd().as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &mut bytes)
    };
    match answer {
        0 => {
            let micros = info[MIN_RTT / 4];
            // All bits are set before the first measurement.
            let is_known = bytes as usize >= MIN_RTT + 4 && micros > 0 && micros < u32::MAX;
            Ok(is_known.then(|| Duration::from_micros(u64::from(micros))))
        }
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::net::TcpListener;
    use std::time::Instant;

    use super::*;

    /// An established connection with `control`, and its listener.
    fn connected(control: &CongestionControl, address: &str) -> (TcpStream, TcpListener) {
        let listener = TcpListener::bind((address, 0)).unwrap();
        let stream = control.connect(listener.local_addr().unwrap()).unwrap();
        let start = Instant::now();
        while stream.peer_addr().is_err() && start.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        (stream, listener)
    }

    #[test]
    fn only_bbr_is_replaced_and_only_where_the_delay_is_short() {
        assert!(paces("bbr") && paces("bbr3") && !paces("cubic") && !paces("dctcp") && !paces("reno"));
        // A name that the system does not know shows by an error that it is set.
        let replaced = CongestionControl::Replaced { by: "reno", system: "unknown".into() };
        let (stream, _listener) = connected(&replaced, "127.0.0.1");
        assert!(delay(&stream).unwrap().is_some_and(|delay| delay < Duration::from_secs(10)), "{:?}", delay(&stream));
        replaced.adapt_to(&stream, Some(SHORT_DELAY)).unwrap();
        assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), "reno");
        for long in [Some(2 * SHORT_DELAY), None] {
            replaced.adapt_to(&stream, long).unwrap_err();
        }
    }

    #[test]
    fn the_users_choice_counts() {
        let chosen = CongestionControl::Chosen("reno".into());
        for address in ["127.0.0.1", "::1"] {
            if TcpListener::bind((address, 0)).is_ok() {
                let (stream, _listener) = connected(&chosen, address);
                chosen.adapt(&stream);
                assert_eq!(sockopt::tcp_congestion(&stream).unwrap(), "reno");
            }
        }
    }

    #[test]
    fn a_choice_that_the_system_does_not_have_names_those_that_it_permits() {
        let setting = |name| Setting { name, aliases: &[], default: "", doc: "" };
        let variable = "SMD_CONGESTION_CONTROL_OF_A_TEST";
        assert!(!matches!(CongestionControl::choose(&setting(variable), true).unwrap(), CongestionControl::Chosen(_)));
        // SAFETY: no other test reads or writes this variable, and the standard library's functions take a lock.
        unsafe { std::env::set_var(variable, "unknown") };
        let text = CongestionControl::choose(&setting(variable), true).unwrap_err().to_string();
        assert!(text.contains(variable) && text.contains("`unknown`") && text.contains("reno"), "{text}");
    }
}
