//! The rendezvous: the processes of a job find each other, and learn of each other's departure.
//!
//! One server, in rank 0's process or in the launcher; one TCP connection for each rank, open from `init` to
//! `shutdown`.
//!
//! ```text
//!   rank 1 --Join--> +--------+ <--Join-- rank 0          all joined: Welcome to each
//!          <-Notice- | server | -Notice->                 a connection ends: Notice to the others
//!                    +--------+ <--Set/Get-- (store)      Depart: a departure that is not a failure
//! ```
//!
//! - RDV-1: a connection that does not prove the job's secret gets no further than [`handshake`]. Its data is limited
//!   in size, number and time, and it costs the job only a log line.
//! - RDV-2: every frame after the handshake carries a sequence number under a MAC, with a key that is new for each
//!   connection and direction. A frame that was changed, replayed, dropped or reordered ends the connection.
//! - RDV-3: a connection that ends without a departure message counts as a death. All other members of the session are
//!   told in the same order, and before any later departure that this one may have caused.
//! - RDV-4: one server serves several sessions, one after the other, so that `init` can be called again after
//!   `shutdown`.
//! - RDV-5: in an elastic job, the launcher assigns the ranks. Workers enter without one and wait for an assignment.
//! - RDV-6: ranks that are all on one host get the secret from rank 0 over [`owner_socket`], unless the launcher or
//!   the user has provided one.
//!
//! [`job`] contains the logic, without sockets and clock; [`server`] and [`client`] transport its messages.

pub mod client;
pub mod frame;
pub mod frame_tag;
pub mod handshake;
pub mod job;
pub mod message;
pub mod owner_socket;
pub(crate) mod refusals;
pub mod server;

pub use client::{Client, RendezvousLocation};
pub use handshake::JobKey;
pub use server::{Server, ServerOptions};
