//! The handshake: both sides prove that they know the job's secret without sending it, and derive the connection's
//! keys.
//!
//! ```text
//!   server -> client   greeting   magic, server nonce
//!   client -> server   answer     magic, client nonce, HMAC(job key, "client", both nonces)
//!   server -> client   proof      HMAC(job key, "server", both nonces), or REFUSAL
//! ```
//!
//! The client verifies the proof before it sends anything else, because the port may belong to another job.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::{Error, Result};

/// Identifies this protocol and its version, because another program may listen on the port.
const MAGIC: [u8; 8] = *b"smd-rdv2";
/// Bytes of a nonce, a key and a proof.
const WIDTH: usize = 32;

/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = MAGIC.len() + WIDTH;
/// Bytes of the client's answer.
pub const ANSWER_BYTES: usize = MAGIC.len() + 2 * WIDTH;
/// Bytes of the server's proof.
pub const PROOF_BYTES: usize = WIDTH;

/// Sent instead of a proof to a client that does not know the secret, so that its error can say why the connection
/// ends. It is never a valid proof.
pub const REFUSAL: [u8; PROOF_BYTES] = [0; PROOF_BYTES];

/// The key that is derived from a job's secret.
#[derive(Clone)]
#[cfg_attr(test, derive(PartialEq, Eq))]
pub struct JobKey([u8; WIDTH]);

impl std::fmt::Debug for JobKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobKey(..)")
    }
}

/// The keys of one connection, as one side uses them.
pub struct SessionKeys {
    /// The key of outgoing frames.
    pub send: [u8; WIDTH],
    /// The key of incoming frames.
    pub receive: [u8; WIDTH],
}

/// The MAC of the concatenated `parts`.
pub(super) fn mac(key: &[u8; WIDTH], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac
}

fn nonce() -> Result<[u8; WIDTH]> {
    let mut nonce = [0; WIDTH];
    getrandom::fill(&mut nonce)
        .map_err(|error| Error::io("reading random bytes for a handshake", std::io::Error::other(error)))?;
    Ok(nonce)
}

impl JobKey {
    /// Derives the key from `secret`.
    pub fn new(secret: &[u8]) -> Self {
        Self(mac(&[0; WIDTH], &[b"smd job key", secret]).finalize().into_bytes().into())
    }

    /// Derives the key of the same job for another protocol, so that messages of one protocol are invalid in the
    /// other.
    pub fn scoped(&self, protocol: &[u8]) -> Self {
        Self(mac(&self.0, &[b"smd protocol", protocol]).finalize().into_bytes().into())
    }

    fn derive(&self, label: &[u8], server: &[u8], client: &[u8]) -> Hmac<Sha256> {
        mac(&self.0, &[label, server, client])
    }

    fn key(&self, label: &[u8], server: &[u8], client: &[u8]) -> [u8; WIDTH] {
        self.derive(label, server, client).finalize().into_bytes().into()
    }
}

/// The server's side of one connection's handshake.
pub struct Challenge {
    nonce: [u8; WIDTH],
}

impl Challenge {
    /// Creates a random challenge.
    ///
    /// # Errors
    /// [`Error::Io`] if the system provides no random bytes.
    pub fn new() -> Result<Self> {
        Ok(Self { nonce: nonce()? })
    }

    /// The server's greeting.
    pub fn greeting(&self) -> [u8; GREETING_BYTES] {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[MAGIC.len()..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Returns the proof to send and the keys, if `answer` shows that the client knows the secret.
    pub fn verify(&self, key: &JobKey, answer: &[u8; ANSWER_BYTES]) -> Option<([u8; PROOF_BYTES], SessionKeys)> {
        let (magic, rest) = answer.split_at(MAGIC.len());
        let (client, proof) = rest.split_at(WIDTH);
        if magic != MAGIC {
            return None;
        }
        key.derive(b"client", &self.nonce, client).verify_slice(proof).ok()?;
        let keys = SessionKeys {
            send: key.key(b"to client", &self.nonce, client),
            receive: key.key(b"to server", &self.nonce, client),
        };
        Some((key.key(b"server", &self.nonce, client), keys))
    }
}

/// The client's side.
pub struct ChallengeResponse {
    server: [u8; WIDTH],
    client: [u8; WIDTH],
}

impl ChallengeResponse {
    /// Parses a greeting. `None` if it is not one of this protocol.
    ///
    /// # Errors
    /// [`Error::Io`] if the system provides no random bytes.
    pub fn new(greeting: &[u8; GREETING_BYTES]) -> Result<Option<Self>> {
        let (magic, server) = greeting.split_at(MAGIC.len());
        if magic != MAGIC {
            return Ok(None);
        }
        Ok(Some(Self { server: server.try_into().expect("a greeting ends with a nonce"), client: nonce()? }))
    }

    /// The client's answer.
    pub fn bytes(&self, key: &JobKey) -> [u8; ANSWER_BYTES] {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[MAGIC.len()..MAGIC.len() + WIDTH].copy_from_slice(&self.client);
        bytes[MAGIC.len() + WIDTH..].copy_from_slice(&key.key(b"client", &self.server, &self.client));
        bytes
    }

    /// Returns the keys, if `proof` shows that the server knows the secret.
    pub fn verify(&self, key: &JobKey, proof: &[u8; PROOF_BYTES]) -> Option<SessionKeys> {
        key.derive(b"server", &self.server, &self.client).verify_slice(proof).ok()?;
        Some(SessionKeys {
            send: key.key(b"to server", &self.server, &self.client),
            receive: key.key(b"to client", &self.server, &self.client),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_agree_only_on_one_secret() {
        let key = JobKey::new(b"secret");
        let challenge = Challenge::new().unwrap();
        let answer = ChallengeResponse::new(&challenge.greeting()).unwrap().unwrap();
        let (proof, server) = challenge.verify(&key, &answer.bytes(&key)).unwrap();
        let client = answer.verify(&key, &proof).unwrap();
        assert_eq!(server.send, client.receive);
        assert_eq!(server.receive, client.send);
        assert_ne!(server.send, server.receive);

        for other in [JobKey::new(b"guess"), key.scoped(b"other")] {
            assert!(challenge.verify(&key, &answer.bytes(&other)).is_none());
            assert!(answer.verify(&other, &proof).is_none());
        }
    }

    #[test]
    fn an_answer_is_good_for_one_challenge_only() {
        let key = JobKey::new(b"secret");
        let recorded = ChallengeResponse::new(&Challenge::new().unwrap().greeting()).unwrap().unwrap().bytes(&key);
        assert!(Challenge::new().unwrap().verify(&key, &recorded).is_none());
    }

    #[test]
    fn another_protocol_is_recognised() {
        assert!(ChallengeResponse::new(&[b'H'; GREETING_BYTES]).unwrap().is_none());
        let challenge = Challenge::new().unwrap();
        assert!(challenge.verify(&JobKey::new(b""), &[b'G'; ANSWER_BYTES]).is_none());
    }
}
