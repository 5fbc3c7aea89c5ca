//! A secret that rank 0 sends to each other rank through a store that other processes can read.
//!
//! Rank 0 and the other rank write an X25519 public key each to the store (RFC 7748). From the value that both can
//! compute, and from both public keys, BLAKE3 derives a key that covers this one secret by exclusive or. A process that
//! only reads the store cannot compute the key. A process that writes to the store before the ranks have read it can
//! replace a public key by its own. A sealed secret that was changed opens to a different secret, which the handshake of
//! the rendezvous refuses.

use x25519_dalek::{X25519_BASEPOINT_BYTES, x25519};

use crate::error::{Error, Result};

/// Bytes of a secret and of a key.
pub const BYTES: usize = 32;

/// The use of the derived key, as BLAKE3 requires it.
const CONTEXT: &str = "OpenSMD 2026-11-27 secret of a rendezvous through a store";

/// One rank's private key and its public part. For one rendezvous only.
pub struct KeyPair {
    private: [u8; BYTES],
    /// What the other side needs.
    pub public: [u8; BYTES],
}

impl KeyPair {
    /// A random one.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut private = [0; BYTES];
        getrandom::fill(&mut private).map_err(|error| Error::Internal(format!("no random numbers: {error}")))?;
        Ok(Self { private, public: x25519(private, X25519_BASEPOINT_BYTES) })
    }

    /// On rank 0: covers `secret` for the rank with the public key `theirs`.
    ///
    /// # Errors
    /// If `theirs` is no key that a rank makes.
    pub fn seal(&self, secret: [u8; BYTES], theirs: [u8; BYTES]) -> Result<[u8; BYTES]> {
        self.cover(secret, theirs, [self.public, theirs])
    }

    /// On the other rank: the secret that rank 0, with the public key `theirs`, has sealed for this key pair.
    ///
    /// # Errors
    /// As [`KeyPair::seal`].
    pub fn open(&self, sealed: [u8; BYTES], theirs: [u8; BYTES]) -> Result<[u8; BYTES]> {
        self.cover(sealed, theirs, [theirs, self.public])
    }

    /// The exclusive or of `value` with the derived key.
    fn cover(&self, value: [u8; BYTES], theirs: [u8; BYTES], both: [[u8; BYTES]; 2]) -> Result<[u8; BYTES]> {
        let shared = x25519(self.private, theirs);
        // A public key of small order gives zero whatever the private key is (RFC 7748, section 6.1).
        if shared == [0; BYTES] {
            return Err(Error::Rendezvous("a public key in the store is not one that a rank makes".to_owned()));
        }
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&shared).update(both.as_flattened());
        let key = hasher.finalize();
        Ok(std::array::from_fn(|index| value[index] ^ key.as_bytes()[index]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_it_is_sealed_for_opens_it() {
        let [first, second, other] = std::array::from_fn(|_| KeyPair::random().unwrap());
        let secret = [9; BYTES];
        let sealed = first.seal(secret, second.public).unwrap();
        assert_eq!(second.open(sealed, first.public).unwrap(), secret);
        assert_ne!(sealed, secret);
        assert_ne!(other.open(sealed, first.public).unwrap(), secret);
        assert_ne!(first.seal(secret, other.public).unwrap(), sealed, "each rank has a key of its own");
    }

    #[test]
    fn keys_of_small_order_are_refused() {
        let own = KeyPair::random().unwrap();
        assert!(matches!(own.seal([1; BYTES], [0; BYTES]), Err(Error::Rendezvous(_))));
    }
}
