//! The tag that authenticates a frame: a message authentication code (MAC) over its length and sequence number, its
//! head, and its body.
//!
//! - [`MacAlgorithm::Blake3`]: keyed BLAKE3 over length, sequence, head, and the BLAKE3 hash of the body, if there is
//!   one. A body that is hashed alone may lie elsewhere than the head, and its blocks begin with it. BLAKE3 picks the
//!   widest vectors of the processor.
//! - [`MacAlgorithm::Aegis128X2`] and [`MacAlgorithm::Aegis128X4`]: the MAC of these ciphers
//!   (draft-irtf-cfrg-aegis-aead) over the same bytes in order, with a tag of 256 bits. Half of the direction's key is
//!   the key. The nonce is the other half, XORed with the sequence number, so no two frames have the same nonce. They
//!   are fast on processors with AES instructions only, and X4 is the faster one where these work on 512 bits.

use std::time::Instant;

use aegis::aegis128x2::Aegis128X2Mac;
use aegis::aegis128x4::Aegis128X4Mac;
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
    Aegis128X2,
    /// AEGIS-128X4.
    Aegis128X4,
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
    /// All of them, in the order of [`MacTimes`].
    pub const ALL: [Self; 3] = [Self::Blake3, Self::Aegis128X2, Self::Aegis128X4];

    /// Returns the algorithm for all ranks: the one whose time on its slowest rank is the shortest, because AEGIS is very
    /// slow without AES instructions. If AEGIS is much faster on some ranks but BLAKE3 is chosen, also returns the rank
    /// that is the slowest with AEGIS.
    pub fn common(times: &[MacTimes]) -> (Self, Option<usize>) {
        let slowest = |algorithm: usize| {
            let times = times.iter().map(|times| times.0[algorithm]).enumerate();
            times.max_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or_default()
        };
        let least = |one: &usize, other: &usize| slowest(*one).1.total_cmp(&slowest(*other).1);
        let chosen = (0..Self::ALL.len()).min_by(least).unwrap_or_default();
        let aegis = (1..Self::ALL.len()).min_by(least).unwrap_or_default();
        // By half: where both take about the same time, the choice does not matter.
        let is_faster_somewhere = times.iter().any(|MacTimes(times)| 2.0 * times[aegis] < times[0]);
        (Self::ALL[chosen], (chosen == 0 && is_faster_somewhere).then(|| slowest(aegis).0))
    }
}

/// The time of each of [`MacAlgorithm::ALL`] on a processor, in seconds, for the body of a large frame.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct MacTimes([f32; MacAlgorithm::ALL.len()]);

impl MacTimes {
    /// Measures them on this processor, for some tens of microseconds.
    pub fn measure() -> Self {
        const BODY: [u8; 16 << 10] = [1; 16 << 10];
        const RUNS: usize = 4;
        Self(MacAlgorithm::ALL.map(|algorithm| {
            let key = TagKey::new(&[0; 32], algorithm);
            let run = |_| {
                let start = Instant::now();
                let mut tag = key.begin(TagCoverage::WholeFrame, &[], 0, &[]);
                tag.update(&BODY);
                std::hint::black_box(tag.finish());
                start.elapsed()
            };
            (0..RUNS).map(run).min().unwrap_or_default().as_secs_f32()
        }))
    }
}

/// The key of one direction of a connection.
pub(super) enum TagKey {
    Blake3([u8; 32]),
    Aegis { key: [u8; AEGIS_BYTES], nonce: [u8; AEGIS_BYTES], lanes: AegisLanes },
}

/// How many AEGIS states work side by side.
#[derive(Clone, Copy)]
pub(super) enum AegisLanes {
    Two,
    Four,
}

impl TagKey {
    pub(super) fn new(key: &[u8; 32], algorithm: MacAlgorithm) -> Self {
        let lanes = match algorithm {
            MacAlgorithm::Blake3 => return Self::Blake3(*key),
            MacAlgorithm::Aegis128X2 => AegisLanes::Two,
            MacAlgorithm::Aegis128X4 => AegisLanes::Four,
        };
        let (mut first, mut second) = ([0; AEGIS_BYTES], [0; AEGIS_BYTES]);
        first.copy_from_slice(&key[..AEGIS_BYTES]);
        second.copy_from_slice(&key[AEGIS_BYTES..]);
        Self::Aegis { key: first, nonce: second, lanes }
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
            Self::Aegis { key, nonce, lanes } => {
                let mut nonce = *nonce;
                nonce.iter_mut().zip(sequence.to_le_bytes()).for_each(|(byte, other)| *byte ^= other);
                match lanes {
                    AegisLanes::Two => {
                        let mut mac = Aegis128X2Mac::new_with_nonce(key, &nonce);
                        mac.update(start);
                        mac.update(head);
                        MacState::Aegis128X2(mac)
                    }
                    AegisLanes::Four => {
                        let mut mac = Aegis128X4Mac::new_with_nonce(key, &nonce);
                        mac.update(start);
                        mac.update(head);
                        MacState::Aegis128X4(mac)
                    }
                }
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
    Aegis128X2(Aegis128X2Mac<TAG_BYTES>),
    Aegis128X4(Aegis128X4Mac<TAG_BYTES>),
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
            MacState::Aegis128X2(mac) => mac.update(body),
            MacState::Aegis128X4(mac) => mac.update(body),
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
            MacState::Aegis128X2(mac) => Hash::from_bytes(mac.finalize()),
            MacState::Aegis128X4(mac) => Hash::from_bytes(mac.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn aegis_gives_the_tag_of_its_specification() {
        // The test vectors of AEGISMAC in draft-irtf-cfrg-aegis-aead, with a tag of 256 bits.
        let mut key = [0; 32];
        (key[0], key[1], key[AEGIS_BYTES], key[AEGIS_BYTES + 1], key[AEGIS_BYTES + 2]) = (0x10, 0x01, 0x10, 0x00, 0x02);
        let data: Vec<u8> = (0..35).collect();
        for (algorithm, expected) in [
            (MacAlgorithm::Aegis128X2, "afcba3fc2d63c8d6c7f2d63f3ec8fbbbaf022e15ac120e78ffa7755abccd959c"),
            (MacAlgorithm::Aegis128X4, "26fdc76f41b1da7aec7779f6e964beae8904e662f05aca8345ae3befb357412a"),
        ] {
            let mut tag = TagKey::new(&key, algorithm).begin(TagCoverage::WholeFrame, &data[..7], 0, &data[7..20]);
            tag.update(&data[20..]);
            assert_eq!(tag.finish().to_hex().as_str(), expected);
        }
    }

    proptest! {
        #[test]
        fn a_body_in_pieces_has_the_tag_of_the_whole(
            body in prop::collection::vec(any::<u8>(), 0..5000),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            for algorithm in MacAlgorithm::ALL {
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
        for algorithm in MacAlgorithm::ALL {
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
                assert_eq!(same, algorithm == MacAlgorithm::Blake3, "{algorithm:?} {sequence}");
            }
        }
    }

    #[test]
    fn ranks_use_the_algorithm_that_is_much_slower_on_none() {
        use MacAlgorithm::{Aegis128X2, Aegis128X4, Blake3};
        let (wide, narrow, without) =
            (MacTimes([3.0, 0.5, 0.3]), MacTimes([3.5, 0.6, 0.7]), MacTimes([4.0, 40.0, 50.0]));
        assert_eq!(MacAlgorithm::common(&[wide, wide]), (Aegis128X4, None));
        assert_eq!(MacAlgorithm::common(&[wide, narrow, wide]), (Aegis128X2, None));
        assert_eq!(MacAlgorithm::common(&[without, without]), (Blake3, None));
        assert_eq!(MacAlgorithm::common(&[wide, without, narrow, wide]), (Blake3, Some(1)));
    }

    #[test]
    fn measuring_the_algorithms_is_cheap() {
        // It takes some tens of microseconds; without AES instructions a millisecond.
        let start = Instant::now();
        MacTimes::measure();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    }
}
