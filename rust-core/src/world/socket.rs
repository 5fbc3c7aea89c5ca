//! Options of control sockets.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

use crate::error::{Error, Result};

/// Whether a connection broke because the other host, or the route to it, is gone. When only a process ends, for any
/// reason, its system closes its connections.
pub fn is_silence(kind: ErrorKind) -> bool {
    use ErrorKind::{HostUnreachable, NetworkDown, NetworkUnreachable, TimedOut};
    matches!(kind, TimedOut | HostUnreachable | NetworkUnreachable | NetworkDown)
}

/// Sends small messages at once, and detects lost hosts: after `peer_timeout` of silence, the kernel reports the
/// connection as lost, whether this side was sending or only receiving.
pub fn configure(socket: &impl AsFd, peer_timeout: Duration) -> Result<()> {
    let set = || {
        sockopt::set_tcp_nodelay(socket, true)?;
        sockopt::set_socket_keepalive(socket, true)?;
        // Half of the time without traffic, then four probes in the other half. The kernel counts in seconds.
        let probe = Duration::from_secs((peer_timeout.as_secs() / 8).max(1));
        sockopt::set_tcp_keepidle(socket, Duration::from_secs((peer_timeout.as_secs() / 2).max(1)))?;
        sockopt::set_tcp_keepintvl(socket, probe)?;
        sockopt::set_tcp_keepcnt(socket, 4)?;
        sockopt::set_tcp_user_timeout(socket, peer_timeout.as_millis().min(u128::from(u32::MAX)) as u32)
    };
    set().map_err(|error: rustix::io::Errno| Error::io("setting the options of a control connection", error))
}
