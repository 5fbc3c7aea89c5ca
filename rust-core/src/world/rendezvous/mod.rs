//! Where the processes of a job meet, and how they learn of each other's end.
//!
//! One server, in rank 0's process or in the launcher; one TCP connection a rank, open from `init` to `shutdown`.
//!
//! ```text
//!   rank 1 --Join--> +--------+ <--Join-- rank 0          all joined: Welcome to each
//!          <-Notice- | server | -Notice->                 a connection ends: Notice to the others
//!                    +--------+ <--Set/Get-- (store)      Goodbye: a departure that is no failure
//! ```
//!
//! - RDV-1: nobody who cannot prove the job's secret gets further than [`handshake`]; what they send is bounded in
//!   size, number and time, and costs the job nothing but a log line.
//! - RDV-2: every frame after the handshake carries a sequence number under an HMAC with a key that is new for each
//!   connection and direction, so a frame that was changed, replayed, dropped or reordered ends the connection.
//! - RDV-3: a connection that ends without a goodbye is a death. All other members of the session are told in the
//!   same order, and the server tells it before anything that the news caused.
//! - RDV-4: one server serves sessions one after another, so that `init` works again after `shutdown`.
//! - RDV-5: in an elastic job the launcher gives out the ranks. Workers enter without one and wait to be seated.
//! - RDV-6: ranks that are all on one host get the secret from rank 0 over [`owner_socket`], unless a launcher or the user
//!   has given them one.
//!
//! What a session is lives in [`job`], which has no sockets and no clock; [`server`] and [`client`] move its messages.

pub mod client;
pub mod frame;
pub mod handshake;
pub mod job;
pub mod message;
pub mod owner_socket;
pub(crate) mod refusals;
pub mod server;

pub use client::{Client, RendezvousLocation};
pub use handshake::JobKey;
pub use server::{Server, ServerOptions};
