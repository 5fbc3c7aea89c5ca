//! Offsets in a group's shared segment. Every rank computes the same layout from the number of members.
//!
//! ```text
//! header page | per member: control pages | per member: arena, results | per pair: frame ring
//! ```
//!
//! The arenas are sparse: the system allocates a page when it is first touched.

/// Bytes of one arena, and of the results area beside it.
pub(crate) const ARENA_BYTES: usize = 2 << 20;
/// Longest error text of a failing member.
pub(crate) const MESSAGE_BYTES: usize = 2048;
/// Number of words of a call's description.
pub(crate) const CALL_WORDS: usize = 8;
/// Number of frames in the ring of one pair.
pub(crate) const RING_SLOTS: usize = 8;
/// Payload of one frame, in bytes.
pub(crate) const FRAME_BYTES: usize = 16 << 10;
/// Bytes of one ring slot: a header line and the payload.
pub(crate) const SLOT_BYTES: usize = 64 + FRAME_BYTES;
/// Bytes of one ring: the producer's and the consumer's counts on separate cache lines (two lines each, because some
/// processors prefetch lines in pairs), then the slots.
pub(crate) const RING_BYTES: usize = 256 + RING_SLOTS * SLOT_BYTES;

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// The header's fields, as byte offsets.
pub(crate) mod header {
    /// `u64`: identifies a segment of this group.
    pub(crate) const NONCE: usize = 0;
    /// `u32`: number of arrivals so far.
    pub(crate) const ARRIVED: usize = 128;
    /// `u32`: members asleep on `ARRIVED`.
    pub(crate) const SLEEPERS: usize = 256;
}

/// Fields of a member's control block, as byte offsets.
mod control {
    pub(super) const PHASE: usize = 0;
    pub(super) const CORE: usize = 4;
    pub(super) const WITHDRAWN: usize = 8;
    pub(super) const DOORBELL: usize = 128;
    pub(super) const DOORBELL_SLEEPERS: usize = 256;
    pub(super) const CALLS: usize = 384;
    pub(super) const MESSAGES: usize = 512;
    pub(super) const ROWS: usize = 512 + 2 * super::MESSAGE_BYTES;
}

/// Offsets for a group of `size` members.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentLayout {
    size: usize,
    control_bytes: usize,
    arenas: usize,
    rings: usize,
}

impl SegmentLayout {
    pub(crate) fn new(size: usize) -> Self {
        // The fixed part is followed by two rows of sizes, and by addresses, for each of two parities.
        let control_bytes = (control::ROWS + 2 * (2 * size + Self::direct_words(size)) * 8).next_multiple_of(PAGE);
        let arenas = (PAGE + size * control_bytes).next_multiple_of(HUGE_PAGE);
        let rings = arenas + size * 2 * ARENA_BYTES;
        Self { size, control_bytes, arenas, rings }
    }

    /// Bytes of the whole segment.
    pub(crate) fn bytes(&self) -> usize {
        (self.rings + self.size * self.size * RING_BYTES).next_multiple_of(HUGE_PAGE)
    }

    fn control(&self, rank: usize) -> usize {
        debug_assert!(rank < self.size);
        PAGE + rank * self.control_bytes
    }

    /// `u32`: the last phase at which `rank` arrived, for messages about missing members.
    pub(crate) fn phase(&self, rank: usize) -> usize {
        self.control(rank) + control::PHASE
    }

    /// `u32`: the core on which `rank` arrived.
    pub(crate) fn core(&self, rank: usize) -> usize {
        self.control(rank) + control::CORE
    }

    /// `u32`: incremented when frames for `rank` arrive, or its own rings have space again.
    pub(crate) fn doorbell(&self, rank: usize) -> usize {
        self.control(rank) + control::DOORBELL
    }

    /// `u32`: threads of `rank` asleep on its doorbell.
    pub(crate) fn doorbell_sleepers(&self, rank: usize) -> usize {
        self.control(rank) + control::DOORBELL_SLEEPERS
    }

    /// `[u64; CALL_WORDS]`: the call of `rank`.
    pub(crate) fn call(&self, rank: usize, parity: usize) -> usize {
        self.control(rank) + control::CALLS + parity * CALL_WORDS * 8
    }

    /// `[u64; 2 * size]`: the block sizes of the call.
    pub(crate) fn rows(&self, rank: usize, parity: usize) -> usize {
        self.control(rank) + control::ROWS + parity * 2 * self.size * 8
    }

    /// `u32`: once `rank` has failed in an operation in which others read its memory, the culprit's global rank plus one.
    pub(crate) fn withdrawn(&self, rank: usize) -> usize {
        self.control(rank) + control::WITHDRAWN
    }

    /// `[u64; 1 + size]`: how long calls of this kind take by either path, and addresses in the memory of `rank`.
    pub(crate) fn direct(&self, rank: usize, parity: usize) -> usize {
        self.control(rank) + control::ROWS + (2 * 2 * self.size + parity * Self::direct_words(self.size)) * 8
    }

    fn direct_words(size: usize) -> usize {
        1 + size
    }

    /// [`MESSAGE_BYTES`] bytes of text that belong to the call.
    pub(crate) fn message(&self, rank: usize, parity: usize) -> usize {
        self.control(rank) + control::MESSAGES + parity * MESSAGE_BYTES
    }

    /// [`ARENA_BYTES`] bytes that `rank` writes for its peers.
    pub(crate) fn arena(&self, rank: usize) -> usize {
        self.arenas + rank * 2 * ARENA_BYTES
    }

    /// [`ARENA_BYTES`] bytes for results that `rank` computes for its peers.
    pub(crate) fn results(&self, rank: usize) -> usize {
        self.arena(rank) + ARENA_BYTES
    }

    /// The ring that carries frames from one member to another.
    pub(crate) fn ring(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.size && to < self.size);
        self.rings + (from * self.size + to) * RING_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        for size in [1, 2, 3, 8, 200] {
            let layout = SegmentLayout::new(size);
            let mut ranges = vec![(0, header::SLEEPERS + 4)];
            for rank in 0..size {
                ranges.push((layout.phase(rank), 4));
                ranges.push((layout.core(rank), 4));
                ranges.push((layout.withdrawn(rank), 4));
                ranges.push((layout.doorbell(rank), 4));
                ranges.push((layout.doorbell_sleepers(rank), 4));
                for parity in 0..2 {
                    ranges.push((layout.call(rank, parity), CALL_WORDS * 8));
                    ranges.push((layout.rows(rank, parity), 2 * size * 8));
                    ranges.push((layout.message(rank, parity), MESSAGE_BYTES));
                    ranges.push((layout.direct(rank, parity), (1 + size) * 8));
                }
                ranges.push((layout.arena(rank), ARENA_BYTES));
                ranges.push((layout.results(rank), ARENA_BYTES));
                for to in 0..size {
                    ranges.push((layout.ring(rank, to), RING_BYTES));
                }
            }
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap for {size} members");
            }
            let last = ranges.last().expect("there are ranges");
            assert!(last.0 + last.1 <= layout.bytes());
        }
    }
}
