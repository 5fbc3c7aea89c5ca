//! The tag that authenticates a frame: a message authentication code (MAC) over its length and sequence number, its
//! head, and its body.
//!
//! - [`MacAlgorithm::Blake3`]: keyed BLAKE3 over length, sequence, head, and the BLAKE3 hash of the body, if there is
//!   one. A body that is hashed alone may lie elsewhere than the head, and its blocks begin with it. BLAKE3 picks the
//!   widest vectors of the processor.
//! - [`MacAlgorithm::Aegis`]: the MAC of AEGIS-128X2 (draft-irtf-cfrg-aegis-aead) over the same bytes in order, with a
//!   tag of 256 bits. Half of the direction's key is the key. The nonce is the other half, XORed with the sequence
//!   number, so no two frames have the same nonce. It is fast on processors with AES instructions only.

use std::time::{Duration, Instant};

use aegis::aegis128x2::Aegis128X2Mac;
use blake3::{Hash, Hasher};
use serde::{Deserialize, Serialize};

/// Bytes of a tag.
pub const TAG_BYTES: usize = 32;
const AEGIS_BYTES: usize = 16;

/// How tags are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MacAlgorithm {
    /// Keyed BLAKE3.
    Blake3,
    /// AEGIS-128X2.
    Aegis,
}

/// The bytes of a frame that its tag authenticates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TagCoverage {
    /// All of them.
    WholeFrame,
    /// Length, sequence and the payload's head. Only a holder of the key can send a frame, but an attacker on the
    /// network can change a body unnoticed.
    HeadOnly,
}

/// The tags of a connection. Both ends must have the same: with different algorithms the first frame is refused, with
/// different coverage the first frame with a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TagOptions {
    /// How they are computed.
    pub algorithm: MacAlgorithm,
    /// What they authenticate.
    pub coverage: TagCoverage,
}

impl TagOptions {
    /// The tags of control connections, whose ends have not agreed on anything yet.
    pub const CONTROL: Self = Self { algorithm: MacAlgorithm::Blake3, coverage: TagCoverage::WholeFrame };
}

impl MacAlgorithm {
    /// Returns the algorithm that is faster on this processor for the body of a large frame; measured for some tens of
    /// microseconds.
    pub fn fastest() -> Self {
        const BODY: [u8; 16 << 10] = [1; 16 << 10];
        const RUNS: usize = 4;
        let time = |algorithm| -> Duration {
            let key = TagKey::new(&[0; 32], algorithm);
            let run = |_| {
                let start = Instant::now();
                let mut tag = key.begin(TagCoverage::WholeFrame, &[], 0, &[]);
                tag.update(&BODY);
                std::hint::black_box(tag.finish());
                start.elapsed()
            };
            (0..RUNS).map(run).min().unwrap_or_default()
        };
        if time(Self::Aegis) < time(Self::Blake3) { Self::Aegis } else { Self::Blake3 }
    }

    /// Returns AEGIS if it is the faster algorithm on every rank, otherwise BLAKE3, because AEGIS is very slow without
    /// AES instructions; and if ranks differ, the first one where BLAKE3 is faster. `fastest` has the faster algorithm
    /// of each rank.
    pub fn common(fastest: &[Self]) -> (Self, Option<usize>) {
        match fastest.iter().position(|each| *each == Self::Blake3) {
            None => (Self::Aegis, None),
            Some(rank) => (Self::Blake3, fastest.contains(&Self::Aegis).then_some(rank)),
        }
    }
}

/// The key of one direction of a connection.
pub(super) enum TagKey {
    Blake3([u8; 32]),
    Aegis { key: [u8; AEGIS_BYTES], nonce: [u8; AEGIS_BYTES] },
}

impl TagKey {
    pub(super) fn new(key: &[u8; 32], algorithm: MacAlgorithm) -> Self {
        match algorithm {
            MacAlgorithm::Blake3 => Self::Blake3(*key),
            MacAlgorithm::Aegis => {
                let (mut first, mut second) = ([0; AEGIS_BYTES], [0; AEGIS_BYTES]);
                first.copy_from_slice(&key[..AEGIS_BYTES]);
                second.copy_from_slice(&key[AEGIS_BYTES..]);
                Self::Aegis { key: first, nonce: second }
            }
        }
    }

    /// Begins the tag of frame `sequence`, which begins with `start` (its length and sequence) and `head`. Each
    /// sequence number is used for one frame only. BLAKE3 authenticates it as part of `start`.
    pub(super) fn begin(&self, coverage: TagCoverage, start: &[u8], sequence: u64, head: &[u8]) -> FrameTag {
        let state = match self {
            Self::Blake3(key) => {
                let mut tag = Hasher::new_keyed(key);
                tag.update(start).update(head);
                MacState::Blake3 { tag, body: None }
            }
            Self::Aegis { key, nonce } => {
                let mut nonce = *nonce;
                nonce.iter_mut().zip(sequence.to_le_bytes()).for_each(|(byte, other)| *byte ^= other);
                let mut mac = Aegis128X2Mac::new_with_nonce(key, &nonce);
                mac.update(start);
                mac.update(head);
                MacState::Aegis(mac)
            }
        };
        FrameTag { coverage, state }
    }
}

#[expect(
    clippy::large_enum_variant,
    reason = "a tag exists while one frame is sent or received, and is not moved often"
)]
enum MacState {
    Blake3 { tag: Hasher, body: Option<Hasher> },
    Aegis(Aegis128X2Mac<TAG_BYTES>),
}

/// A tag to which a body is added.
pub struct FrameTag {
    coverage: TagCoverage,
    state: MacState,
}

impl FrameTag {
    /// Adds bytes of the body, if the tag covers them.
    pub fn update(&mut self, body: &[u8]) {
        if self.coverage == TagCoverage::HeadOnly || body.is_empty() {
            return;
        }
        match &mut self.state {
            MacState::Blake3 { body: hasher, .. } => {
                hasher.get_or_insert_default().update(body);
            }
            MacState::Aegis(mac) => mac.update(body),
        }
    }

    /// Returns the tag, as a [`Hash`], which is compared in constant time.
    pub fn finish(self) -> Hash {
        match self.state {
            MacState::Blake3 { mut tag, body } => {
                if let Some(body) = body {
                    tag.update(body.finalize().as_bytes());
                }
                tag.finalize()
            }
            MacState::Aegis(mac) => Hash::from_bytes(mac.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn aegis_gives_the_tag_of_its_specification() {
        // The test vector of AEGISMAC-128X2 in draft-irtf-cfrg-aegis-aead, with a tag of 256 bits.
        let mut key = [0; 32];
        (key[0], key[1], key[AEGIS_BYTES], key[AEGIS_BYTES + 1], key[AEGIS_BYTES + 2]) = (0x10, 0x01, 0x10, 0x00, 0x02);
        let data: Vec<u8> = (0..35).collect();
        let mut tag =
            TagKey::new(&key, MacAlgorithm::Aegis).begin(TagCoverage::WholeFrame, &data[..7], 0, &data[7..20]);
        tag.update(&data[20..]);
        let expected = "afcba3fc2d63c8d6c7f2d63f3ec8fbbbaf022e15ac120e78ffa7755abccd959c";
        assert_eq!(tag.finish().to_hex().as_str(), expected);
    }

    proptest! {
        #[test]
        fn a_body_in_pieces_has_the_tag_of_the_whole(
            body in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            for algorithm in [MacAlgorithm::Blake3, MacAlgorithm::Aegis] {
                let key = TagKey::new(&[3; 32], algorithm);
                let mut whole = key.begin(TagCoverage::WholeFrame, b"start", 5, b"head");
                whole.update(&body);
                let mut pieces = key.begin(TagCoverage::WholeFrame, b"start", 5, b"head");
                let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
                cuts.sort_unstable();
                let mut from = 0;
                for cut in cuts.into_iter().chain([body.len()]) {
                    pieces.update(&body[from..cut]);
                    from = cut;
                }
                prop_assert_eq!(whole.finish(), pieces.finish());
            }
        }
    }

    #[test]
    fn a_tag_depends_on_key_and_every_part_and_with_aegis_on_the_sequence() {
        for algorithm in [MacAlgorithm::Blake3, MacAlgorithm::Aegis] {
            let tag = |key: u8, sequence: u64, parts: [&[u8]; 3]| {
                let [start, head, body] = parts;
                let key = TagKey::new(&[key; 32], algorithm);
                let mut tag = key.begin(TagCoverage::WholeFrame, start, sequence, head);
                tag.update(body);
                tag.finish()
            };
            let one = tag(1, 0, [b"a", b"head", b"body"]);
            assert_eq!(one, tag(1, 0, [b"a", b"head", b"body"]));
            assert_ne!(one, tag(2, 0, [b"a", b"head", b"body"]), "{algorithm:?}");
            for parts in [
                [&b"b"[..], b"head", b"body"],
                [b"a", b"heaD", b"body"],
                [b"a", b"head", b"bodY"],
                [b"a", b"head", b""],
            ] {
                assert_ne!(one, tag(1, 0, parts), "{algorithm:?}");
            }
            for sequence in [1, 1 << 40, u64::MAX] {
                let same = one == tag(1, sequence, [b"a", b"head", b"body"]);
                assert_eq!(same, algorithm == MacAlgorithm::Blake3, "{sequence}");
            }
        }
    }

    #[test]
    fn ranks_use_the_algorithm_that_is_much_slower_on_none() {
        use MacAlgorithm::{Aegis, Blake3};
        assert_eq!(MacAlgorithm::common(&[Aegis, Aegis]), (Aegis, None));
        assert_eq!(MacAlgorithm::common(&[Blake3, Blake3]), (Blake3, None));
        assert_eq!(MacAlgorithm::common(&[Aegis, Blake3, Aegis, Blake3]), (Blake3, Some(1)));
    }

    #[test]
    fn the_choice_of_the_fastest_algorithm_is_cheap() {
        // It takes some tens of microseconds; without AES instructions a millisecond.
        let start = Instant::now();
        MacAlgorithm::fastest();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}
