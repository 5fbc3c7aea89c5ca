//! Frames on an authenticated connection: `length u32, sequence u64, HMAC-SHA256 over both and the payload, payload`;
//! integers little-endian (RDV-2).

use hmac::Mac;

use super::handshake::mac;

/// Largest payload. A frame that announces more is refused before any of it is read.
pub const MAX_PAYLOAD: usize = 1 << 20;

const LENGTH_BYTES: usize = 4;
const SEQUENCE_END: usize = LENGTH_BYTES + 8;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = SEQUENCE_END + 32;

/// Why a stream of frames cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// See [`MAX_PAYLOAD`].
    #[error("a frame announces {announced} bytes, more than the limit of {MAX_PAYLOAD}")]
    TooLong {
        /// Bytes that it announces.
        announced: usize,
    },
    /// A frame was replayed, dropped or reordered.
    #[error("frame {got} came where frame {expected} belongs")]
    OutOfOrder {
        /// Its number.
        got: u64,
        /// The next number.
        expected: u64,
    },
    /// The bytes were changed on the way, or come from somebody without the key.
    #[error("frame {sequence} is not authentic")]
    NotAuthentic {
        /// Its number.
        sequence: u64,
    },
}

/// Writes frames of one direction.
pub struct Sealer {
    key: [u8; 32],
    sequence: u64,
}

impl Sealer {
    /// Starts at frame 0.
    pub fn new(key: [u8; 32]) -> Self {
        Self { key, sequence: 0 }
    }

    /// Appends the next frame, with `payload`, to `out`.
    ///
    /// # Panics
    /// If the payload is longer than [`MAX_PAYLOAD`]; senders check what users give them.
    pub fn seal(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        assert!(payload.len() <= MAX_PAYLOAD, "senders limit the size of what they send");
        let length = (payload.len() as u32).to_le_bytes();
        let sequence = self.sequence.to_le_bytes();
        let tag = mac(&self.key, &[&length, &sequence, payload]).finalize().into_bytes();
        out.reserve(HEADER_BYTES + payload.len());
        out.extend_from_slice(&length);
        out.extend_from_slice(&sequence);
        out.extend_from_slice(&tag);
        out.extend_from_slice(payload);
        self.sequence += 1;
    }
}

/// Reads frames of one direction from pieces of any size.
pub struct Opener {
    key: [u8; 32],
    sequence: u64,
    buffer: Vec<u8>,
    /// Bytes of `buffer` that earlier frames used.
    used: usize,
}

impl Opener {
    /// Starts at frame 0.
    pub fn new(key: [u8; 32]) -> Self {
        Self { key, sequence: 0, buffer: Vec::new(), used: 0 }
    }

    /// Takes what the connection gave. Call [`Opener::next`] until it returns `None` before the next piece, so
    /// that no more than one incomplete frame is ever held.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.used);
        self.used = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The payload of the next frame, if it is complete.
    ///
    /// # Errors
    /// [`FrameError`]; the connection must be closed then.
    #[expect(clippy::should_implement_trait, reason = "an iterator has no place for the error")]
    pub fn next(&mut self) -> Result<Option<&[u8]>, FrameError> {
        let bytes = &self.buffer[self.used..];
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let announced = u32::from_le_bytes(*length) as usize;
        if announced > MAX_PAYLOAD {
            return Err(FrameError::TooLong { announced });
        }
        let Some(sequence) = rest.first_chunk::<8>() else { return Ok(None) };
        let got = u64::from_le_bytes(*sequence);
        if got != self.sequence {
            return Err(FrameError::OutOfOrder { got, expected: self.sequence });
        }
        if bytes.len() < HEADER_BYTES + announced {
            return Ok(None);
        }
        let (header, rest) = bytes.split_at(HEADER_BYTES);
        let payload = &rest[..announced];
        mac(&self.key, &[&header[..SEQUENCE_END], payload])
            .verify_slice(&header[SEQUENCE_END..])
            .map_err(|_| FrameError::NotAuthentic { sequence: got })?;
        self.used += HEADER_BYTES + announced;
        self.sequence += 1;
        Ok(Some(payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: [u8; 32] = [7; 32];

    fn sealed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealer = Sealer::new(KEY);
        let mut bytes = Vec::new();
        for payload in payloads {
            sealer.seal(payload, &mut bytes);
        }
        bytes
    }

    fn opened(bytes: &[u8], piece: usize) -> Result<Vec<Vec<u8>>, FrameError> {
        let mut opener = Opener::new(KEY);
        let mut payloads = Vec::new();
        for piece in bytes.chunks(piece) {
            opener.feed(piece);
            while let Some(payload) = opener.next()? {
                payloads.push(payload.to_vec());
            }
        }
        Ok(payloads)
    }

    proptest! {
        #[test]
        fn frames_come_out_as_they_went_in(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..6), piece in 1usize..500,
        ) {
            prop_assert_eq!(opened(&sealed(&payloads), piece).unwrap(), payloads);
        }

        #[test]
        fn a_changed_byte_is_never_accepted(
            payload in prop::collection::vec(any::<u8>(), 0..100), at in any::<prop::sample::Index>(), flip in 1u8..,
        ) {
            let mut bytes = sealed(std::slice::from_ref(&payload));
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            // A longer announced length only waits for bytes that never come.
            prop_assert_ne!(opened(&bytes, 64), Ok(vec![payload]));
        }

        #[test]
        fn any_bytes_are_refused_or_wait_for_more(bytes in prop::collection::vec(any::<u8>(), 0..400), piece in 1usize..64) {
            prop_assert!(opened(&bytes, piece).map_or(true, |payloads| payloads.is_empty()));
        }
    }

    #[test]
    fn replayed_and_reordered_frames_are_refused() {
        let bytes = sealed(&[b"a".to_vec(), b"b".to_vec()]);
        let (first, second) = bytes.split_at(HEADER_BYTES + 1);
        let replayed = [first, first].concat();
        assert_eq!(opened(&replayed, 1000), Err(FrameError::OutOfOrder { got: 0, expected: 1 }));
        let swapped = [second, first].concat();
        assert_eq!(opened(&swapped, 1000), Err(FrameError::OutOfOrder { got: 1, expected: 0 }));
    }

    #[test]
    fn an_oversized_frame_is_refused_at_its_first_bytes() {
        let announced = (MAX_PAYLOAD + 1) as u32;
        let error = opened(&announced.to_le_bytes(), 4).unwrap_err();
        assert_eq!(error, FrameError::TooLong { announced: MAX_PAYLOAD + 1 });
    }
}
