//! The messages between ranks and the rendezvous, serialized with postcard in a [`super::frame`].

use serde::{Deserialize, Serialize};

use crate::metrics::Snapshot;
use crate::world::Departure;

/// Longest key of the store, in bytes.
pub const MAX_KEY: usize = 1 << 10;
/// Longest value of the store, in bytes.
pub const MAX_VALUE: usize = 1 << 18;
/// Longest text of a failure; longer ones are truncated.
pub const MAX_TEXT: usize = 1 << 14;

/// A rank introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// Version of this package, which must be equal on all ranks.
    pub version: String,
    /// Global rank.
    pub rank: u32,
    /// Number of processes of the job, as this rank knows it.
    pub size: u32,
    /// Identity of the host: see [`crate::world::host`].
    pub host: String,
    /// The host's name, for messages.
    pub hostname: String,
    /// Process id on that host.
    pub pid: u32,
    /// Local rank and size, if the launcher set them.
    pub local: Option<(u32, u32)>,
}

/// The place of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankLocation {
    /// Index into [`Welcome::hosts`].
    pub host: u32,
    /// Local rank.
    pub local_rank: u32,
    /// Number of processes on the host.
    pub local_size: u32,
    /// Process id on the host.
    pub pid: u32,
}

/// All ranks have joined the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Id of the session.
    pub session: u64,
    /// Names of the hosts, in the order of their first ranks.
    pub hosts: Vec<String>,
    /// The place of each rank.
    pub places: Vec<RankLocation>,
}

/// An assignment of a rank of an elastic job, valid for one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAssignment {
    /// Number of the session in the job, counted from 1.
    pub generation: u64,
    /// Global rank.
    pub rank: u32,
    /// Number of processes of the session.
    pub size: u32,
}

/// The launcher of an elastic job has found changed hosts or slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostsUpdated {
    /// When it was found, in microseconds since 1970.
    pub at_micros: u64,
    /// 1: places were removed, 2: places were added, 3: both.
    pub kinds: u8,
}

/// A message from a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are explained at their variant")]
pub enum ToServer {
    /// Requests a rank from the launcher of an elastic job; the first message of a worker.
    Enter { worker: String },
    /// Joins the session; the first message of a rank, or the reply to [`ToClient::Assignment`].
    Join(Join),
    /// Writes a key of the store.
    Set { key: String, value: Vec<u8> },
    /// Requests a key; the answer is sent when it is written, with the same `ticket`.
    Get { ticket: u64, key: String },
    /// The rank no longer waits for `ticket`.
    Forget { ticket: u64 },
    /// Removes the keys that start with `prefix`.
    RemovePrefix { prefix: String },
    /// Requests the ranks that have not joined.
    QueryMissing,
    /// The rank has failed; it may still announce its departure.
    Fail { message: String },
    /// The rank leaves in good order.
    Depart,
    /// Releases the keys that start with `prefix`; they are removed when as many ranks as `members` have released
    /// them.
    Release { prefix: String, members: u32 },
    /// The rank's counters, shortly before it leaves; for the launcher.
    Counters(Snapshot),
}

/// A message from the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "fields are explained at their variant")]
pub enum ToClient {
    /// The rank may not join; the connection is closed.
    Refused { reason: String },
    /// An answer to [`ToServer::Enter`]: the rank to join as.
    Assignment(RankAssignment),
    /// The other answer to [`ToServer::Enter`]: the worker is removed, for this reason.
    Removed { reason: String },
    /// The launcher has found changed hosts.
    HostsUpdated(HostsUpdated),
    /// See [`Welcome`].
    Welcome(Welcome),
    /// The answer to [`ToServer::Get`], at once or after [`ToClient::NotYet`].
    Value { ticket: u64, value: Vec<u8> },
    /// The key of [`ToServer::Get`] is not written yet. A rank whose departure was reported before this did not write
    /// it.
    NotYet { ticket: u64 },
    /// The answer to [`ToServer::QueryMissing`].
    Missing { ranks: Vec<u32> },
    /// Another rank departed.
    Notice { rank: u32, departure: Departure },
}

/// Serializes a message.
pub fn encode<M: Serialize>(message: &M) -> Vec<u8> {
    postcard::to_stdvec(message).expect("messages consist of what postcard can write")
}

/// Parses a message from all of `bytes`.
///
/// # Errors
/// A text that describes the error.
pub fn decode<'a, M: Deserialize<'a>>(bytes: &'a [u8]) -> Result<M, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("a message of {} bytes has {} bytes too many", bytes.len(), rest.len())),
        Err(error) => Err(format!("a message of {} bytes is malformed: {error}", bytes.len())),
    }
}

/// Truncates `text` to at most [`MAX_TEXT`] bytes.
pub fn shorten(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let end = (0..=MAX_TEXT).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{} ...", &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> impl Strategy<Value = ToServer> {
        let bytes = prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            (".{0,20}", any::<u32>(), any::<u32>(), ".{0,40}", any::<Option<(u32, u32)>>()).prop_map(
                |(version, rank, size, host, local)| ToServer::Join(Join {
                    version,
                    rank,
                    size,
                    hostname: host.clone(),
                    host,
                    pid: rank ^ size,
                    local,
                })
            ),
            (".{0,40}", bytes).prop_map(|(key, value)| ToServer::Set { key, value }),
            (any::<u64>(), ".{0,40}").prop_map(|(ticket, key)| ToServer::Get { ticket, key }),
            any::<u64>().prop_map(|ticket| ToServer::Forget { ticket }),
            ".{0,40}".prop_map(|prefix| ToServer::RemovePrefix { prefix }),
            ".{0,40}".prop_map(|message| ToServer::Fail { message }),
            ".{0,40}".prop_map(|worker| ToServer::Enter { worker }),
            Just(ToServer::QueryMissing),
            Just(ToServer::Depart),
            (".{0,40}", any::<u32>()).prop_map(|(prefix, members)| ToServer::Release { prefix, members }),
            any::<Vec<u64>>().prop_map(|calls| ToServer::Counters(Snapshot { calls, ..Snapshot::default() })),
        ]
    }

    proptest! {
        #[test]
        fn a_message_survives_the_trip(message in messages()) {
            prop_assert_eq!(decode::<ToServer>(&encode(&message)), Ok(message));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode::<ToServer>(&bytes);
            let _ = decode::<ToClient>(&bytes);
        }

        #[test]
        fn a_cut_message_is_an_error(message in messages(), at in any::<prop::sample::Index>()) {
            let bytes = encode(&message);
            prop_assert!(decode::<ToServer>(&bytes[..at.index(bytes.len())]).is_err());
        }
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let text = "ä".repeat(MAX_TEXT);
        assert!(shorten(&text).len() <= MAX_TEXT + 4);
        assert_eq!(shorten("short"), "short");
    }
}
