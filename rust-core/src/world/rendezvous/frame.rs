//! Frames on an authenticated connection: `length u32, sequence u64, tag [u8; 32], payload`; integers little-endian
//! (RDV-2).
//!
//! The tag authenticates length, sequence, the payload's first [`HEAD_BYTES`] bytes, which are its head, and the bytes
//! behind them, its body ([`super::frame_tag`]). On a network that the operator trusts, bodies may stay out of the tag
//! ([`TagCoverage::HeadOnly`](super::frame_tag::TagCoverage)).

use blake3::Hash;

use super::frame_tag::{FrameTag, TAG_BYTES, TagKey, TagOptions};

/// Largest payload. A frame with a larger length is rejected before its payload is read.
pub const MAX_PAYLOAD: usize = 1 << 20;

const LENGTH_BYTES: usize = 4;
const SEQUENCE_END: usize = LENGTH_BYTES + 8;
/// Bytes of the header before the payload.
pub const HEADER_BYTES: usize = SEQUENCE_END + TAG_BYTES;
/// Bytes of a payload's head; the rest is its body.
pub const HEAD_BYTES: usize = 64;

/// Splits a payload into head and body.
fn split(payload: &[u8]) -> (&[u8], &[u8]) {
    payload.split_at(payload.len().min(HEAD_BYTES))
}

/// Errors of a stream of frames, after which the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// See [`MAX_PAYLOAD`].
    #[error("a frame announces {announced} bytes, more than the limit of {limit}")]
    TooLong {
        /// The length in its header.
        announced: usize,
        /// The largest payload.
        limit: usize,
    },
    /// A frame was replayed, dropped or reordered.
    #[error("frame {got} arrived instead of frame {expected}")]
    OutOfOrder {
        /// The frame's number.
        got: u64,
        /// The expected number.
        expected: u64,
    },
    /// The bytes were changed in transit, or the sender does not have the key.
    #[error("frame {sequence} is not authentic")]
    NotAuthentic {
        /// The frame's number.
        sequence: u64,
    },
}

/// Writes frames of one direction.
pub struct Sealer {
    key: TagKey,
    tags: TagOptions,
    sequence: u64,
}

impl Sealer {
    /// Starts at frame 0.
    pub fn new(key: [u8; 32], tags: TagOptions) -> Self {
        Self { key: TagKey::new(&key, tags.algorithm), tags, sequence: 0 }
    }

    /// Appends the next frame, with `payload`, to `out`.
    ///
    /// # Panics
    /// If the payload is longer than [`MAX_PAYLOAD`]; senders must check user data before.
    pub fn seal(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        out.reserve(HEADER_BYTES + payload.len());
        let (head, body) = split(payload);
        out.extend_from_slice(&self.header(head, body));
        out.extend_from_slice(payload);
    }

    /// The header that makes `head` and `body` the next frame. The body is empty, or the head has [`HEAD_BYTES`]
    /// bytes.
    ///
    /// # Panics
    /// As [`Sealer::seal`].
    pub fn header(&mut self, head: &[u8], body: &[u8]) -> [u8; HEADER_BYTES] {
        let length = head.len() + body.len();
        assert!(length <= MAX_PAYLOAD, "senders limit the size of what they send");
        assert!(head.len() == length.min(HEAD_BYTES), "a head of {} of {length} bytes", head.len());
        let mut header = [0; HEADER_BYTES];
        header[..LENGTH_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
        header[LENGTH_BYTES..SEQUENCE_END].copy_from_slice(&self.sequence.to_le_bytes());
        let mut tag = self.key.begin(self.tags.coverage, &header[..SEQUENCE_END], self.sequence, head);
        tag.update(body);
        header[SEQUENCE_END..].copy_from_slice(tag.finish().as_bytes());
        self.sequence += 1;
        header
    }
}

/// Verifies the frames of one direction, whose bytes may be anywhere.
pub struct Verifier {
    key: TagKey,
    tags: TagOptions,
    sequence: u64,
    limit: usize,
}

impl Verifier {
    /// Starts at frame 0. No payload may be longer than `limit`.
    pub fn new(key: [u8; 32], tags: TagOptions, limit: usize) -> Self {
        Self { key: TagKey::new(&key, tags.algorithm), tags, sequence: 0, limit }
    }

    /// Begins the tag of the next frame, for a body that arrives in pieces.
    pub fn begin_tag(&self, header: &[u8; HEADER_BYTES], head: &[u8]) -> FrameTag {
        self.key.begin(self.tags.coverage, &header[..SEQUENCE_END], self.sequence, head)
    }

    /// Returns the length of the next frame's payload, given the frame's first bytes; `None` if there are too few
    /// bytes.
    ///
    /// # Errors
    /// [`FrameError`] as soon as the bytes show it; the connection must be closed then.
    pub fn announced(&self, bytes: &[u8]) -> Result<Option<usize>, FrameError> {
        let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let announced = u32::from_le_bytes(*length) as usize;
        if announced > self.limit {
            return Err(FrameError::TooLong { announced, limit: self.limit });
        }
        let Some(sequence) = rest.first_chunk::<8>() else { return Ok(None) };
        let got = u64::from_le_bytes(*sequence);
        if got != self.sequence {
            return Err(FrameError::OutOfOrder { got, expected: self.sequence });
        }
        Ok((bytes.len() >= HEADER_BYTES).then_some(announced))
    }

    /// Verifies the next frame, whose length [`announced`](Verifier::announced) returned.
    ///
    /// # Errors
    /// [`FrameError::NotAuthentic`]; the connection must be closed then.
    pub fn verify(&mut self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<(), FrameError> {
        let (head, body) = split(payload);
        let mut tag = self.begin_tag(header, head);
        tag.update(body);
        self.verify_tag(header, tag)
    }

    /// As [`Verifier::verify`], with the complete tag that [`Verifier::begin_tag`] began.
    ///
    /// # Errors
    /// As there.
    pub fn verify_tag(&mut self, header: &[u8; HEADER_BYTES], tag: FrameTag) -> Result<(), FrameError> {
        let mut stated = [0; TAG_BYTES];
        stated.copy_from_slice(&header[SEQUENCE_END..]);
        // Hashes are compared in constant time.
        if Hash::from_bytes(stated) != tag.finish() {
            return Err(FrameError::NotAuthentic { sequence: self.sequence });
        }
        self.sequence += 1;
        Ok(())
    }
}

/// Splits a byte stream of one direction into verified frames.
pub struct Opener {
    verifier: Verifier,
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that belong to earlier frames.
    used: usize,
}

impl Opener {
    /// Starts at frame 0.
    pub fn new(key: [u8; 32]) -> Self {
        Self { verifier: Verifier::new(key, TagOptions::CONTROL, MAX_PAYLOAD), buffer: Vec::new(), used: 0 }
    }

    /// Adds bytes of the connection. Call [`Opener::next`] until it returns `None` before adding more, so that at
    /// most one incomplete frame is held.
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
        let Some(announced) = self.verifier.announced(bytes)? else { return Ok(None) };
        if bytes.len() < HEADER_BYTES + announced {
            return Ok(None);
        }
        let Some((header, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        let payload = &rest[..announced];
        self.verifier.verify(header, payload)?;
        self.used += HEADER_BYTES + announced;
        Ok(Some(payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::rendezvous::frame_tag::{MacAlgorithm, TagCoverage};
    use proptest::prelude::*;

    const KEY: [u8; 32] = [7; 32];

    fn sealed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealer = Sealer::new(KEY, TagOptions::CONTROL);
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
            payload in prop::collection::vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>(), flip in 1u8..,
        ) {
            let mut bytes = sealed(std::slice::from_ref(&payload));
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            // With a longer length in the header, the reader waits for bytes that never come.
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
    fn a_flipped_bit_of_a_large_frame_is_refused_wherever_it_is() {
        let bytes = sealed(&[vec![5; 100_000]]);
        for at in [LENGTH_BYTES, SEQUENCE_END, HEADER_BYTES, HEADER_BYTES + HEAD_BYTES, 50_000, bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let error = opened(&changed, 4096).unwrap_err();
            let out_of_order = FrameError::OutOfOrder { got: 1, expected: 0 };
            assert_eq!(error, if at == LENGTH_BYTES { out_of_order } else { FrameError::NotAuthentic { sequence: 0 } });
        }
    }

    #[test]
    fn bytes_cannot_move_between_head_and_body_or_to_another_direction() {
        let (head, body) = ([1; HEAD_BYTES], [2; 40]);
        for algorithm in MacAlgorithm::ALL {
            let tags = TagOptions { algorithm, coverage: TagCoverage::WholeFrame };
            let header = Sealer::new(KEY, tags).header(&head, &body);
            let mut verifier = Verifier::new(KEY, tags, MAX_PAYLOAD);
            // The hash of a body in its place.
            let mut short = header;
            short[..LENGTH_BYTES].copy_from_slice(&((HEAD_BYTES + 32) as u32).to_le_bytes());
            let whole = [head.as_slice(), &body].concat();
            assert!(verifier.verify(&short, &[head.as_slice(), blake3::hash(&body).as_bytes()].concat()).is_err());
            assert_eq!(verifier.verify(&header, &whole), Ok(()));
            assert!(Verifier::new([8; 32], tags, MAX_PAYLOAD).verify(&header, &whole).is_err());
            for other in MacAlgorithm::ALL.into_iter().filter(|other| *other != algorithm) {
                let other = TagOptions { algorithm: other, ..tags };
                assert!(Verifier::new(KEY, other, MAX_PAYLOAD).verify(&header, &whole).is_err());
            }
        }
    }

    #[test]
    fn a_tag_of_the_head_leaves_the_body_out_and_nothing_else() {
        let (head, body) = ([1; HEAD_BYTES], [2; 40]);
        for algorithm in MacAlgorithm::ALL {
            let tags = |coverage| TagOptions { algorithm, coverage };
            let header = Sealer::new(KEY, tags(TagCoverage::HeadOnly)).header(&head, &body);
            let verify = |key, coverage, header: &[u8; HEADER_BYTES], head: [u8; HEAD_BYTES], body: &[u8]| {
                Verifier::new(key, tags(coverage), MAX_PAYLOAD).verify(header, &[head.as_slice(), body].concat())
            };
            assert_eq!(verify(KEY, TagCoverage::HeadOnly, &header, head, &body), Ok(()));
            assert_eq!(verify(KEY, TagCoverage::HeadOnly, &header, head, &[3; 40]), Ok(()));
            let refused = Err(FrameError::NotAuthentic { sequence: 0 });
            assert_eq!(verify(KEY, TagCoverage::HeadOnly, &header, [3; HEAD_BYTES], &body), refused);
            assert_eq!(verify([8; 32], TagCoverage::HeadOnly, &header, head, &body), refused);
            assert_eq!(verify(KEY, TagCoverage::WholeFrame, &header, head, &body), refused);
            let mut later = header;
            later[LENGTH_BYTES] += 1;
            assert_eq!(verify(KEY, TagCoverage::HeadOnly, &later, head, &body), refused);
        }
    }

    #[test]
    fn an_oversized_frame_is_refused_at_its_first_bytes() {
        let announced = (MAX_PAYLOAD + 1) as u32;
        let error = opened(&announced.to_le_bytes(), 4).unwrap_err();
        assert_eq!(error, FrameError::TooLong { announced: MAX_PAYLOAD + 1, limit: MAX_PAYLOAD });
    }
}
