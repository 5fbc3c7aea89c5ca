//! Chooses the kernel and the number of blocks for a call. The choice depends on sizes alone, so it is equal on all
//! members.

use super::{MAX_BLOCKS, MAX_RANKS, VECTOR};
use crate::device::Grid;

/// Threads of a block; mirrored by the kernels' launch bounds.
const THREADS: u32 = 512;

/// Largest message that one-shot kernels or NCCL run faster than the chunked kernels.
pub(super) const CHUNKS_ABOVE: usize = 8 << 20;

/// The message sizes at which a group switches between kernels; equal on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct KernelTuning {
    /// Largest all-reduce, in bytes, that each member reduces as a whole (one-shot), if the staging memory is large
    /// enough.
    pub one_shot_bytes: usize,
    /// Largest message, in bytes, that the core's kernels run; NCCL runs larger ones.
    pub peer_bytes: usize,
    /// Largest number of blocks of a launch; each synchronises with one block of every peer.
    pub channels: u32,
    /// Smallest all-reduce of float32 between two members, in bytes, that the chunked kernels run.
    #[serde(default = "never")]
    pub chunks_bytes: usize,
    /// The same for numbers of 16 bits, if the caller is no reducer.
    #[serde(default = "never")]
    pub chunks_of_16_bits_bytes: usize,
    /// Smallest reduce-scatter or all-gather between two members, in bytes of all blocks, that the chunked kernels run.
    #[serde(default = "never")]
    pub chunks_of_blocks_bytes: usize,
}

fn never() -> usize {
    usize::MAX
}

impl KernelTuning {
    /// Sizes with which NCCL runs every message.
    pub const NEVER: Self = Self {
        one_shot_bytes: 0,
        peer_bytes: 0,
        channels: 1,
        chunks_bytes: usize::MAX,
        chunks_of_16_bits_bytes: usize::MAX,
        chunks_of_blocks_bytes: usize::MAX,
    };

    /// Default sizes for NVLink, for a group of `size`.
    pub fn usual(size: usize, peer_bytes: usize) -> Self {
        // One-shot writes n - 1 times a member's bytes; two-shot writes 2 (n - 1) / n times as many and synchronises
        // once more. For two members that is the same number of bytes.
        let one_shot_bytes = match size {
            0..=2 => usize::MAX,
            3..=4 => 512 << 10,
            _ => 256 << 10,
        };
        let chunks_bytes = if size == 2 { peer_bytes.max(CHUNKS_ABOVE).saturating_add(1) } else { usize::MAX };
        Self {
            one_shot_bytes,
            peer_bytes,
            channels: 64,
            chunks_bytes,
            chunks_of_16_bits_bytes: chunks_bytes,
            chunks_of_blocks_bytes: chunks_bytes,
        }
    }
}

/// A kernel and its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelLaunch {
    pub(super) entry: &'static str,
    pub(super) grid: Grid,
}

impl KernelLaunch {
    pub(super) const ONE_SHOT: &'static str = "one_shot";
    pub(super) const TWO_SHOT: &'static str = "two_shot";

    /// The kernel and grid for an all-reduce of `bytes` bytes.
    pub(super) fn all_reduce(bytes: usize, size: usize, half_bytes: usize, tuning: &KernelTuning) -> Self {
        let vectors = bytes.div_ceil(VECTOR);
        if bytes <= tuning.one_shot_bytes && vectors * VECTOR * size <= half_bytes {
            Self::new(Self::ONE_SHOT, vectors, tuning)
        } else {
            Self::new(Self::TWO_SHOT, vectors.div_ceil(size), tuning)
        }
    }

    /// The kernel and grid for a reduce-scatter to blocks of `bytes` bytes.
    pub(super) fn reduce_scatter(bytes: usize, tuning: &KernelTuning) -> Self {
        Self::new("reduce_scatter", bytes.div_ceil(VECTOR), tuning)
    }

    /// The kernel and grid for blocks of `bytes` bytes from each member to each other one.
    pub(super) fn exchange(bytes: usize, tuning: &KernelTuning) -> Self {
        Self::new("exchange", bytes.div_ceil(VECTOR), tuning)
    }

    /// The number of blocks with one thread for each of `vectors` vectors, up to the limit.
    fn new(entry: &'static str, vectors: usize, tuning: &KernelTuning) -> Self {
        let most = tuning.channels.clamp(1, MAX_BLOCKS) as usize;
        let blocks = vectors.div_ceil(THREADS as usize).clamp(1, most) as u32;
        Self { entry, grid: Grid { blocks, threads: THREADS } }
    }
}

/// Bytes of a half of the staging memory, for messages of `bytes`. Two-shot needs space for every member's piece of a
/// part, which begins at a whole vector, and for every part's result.
pub(super) fn half_bytes(bytes: usize, size: usize) -> usize {
    2 * bytes.next_multiple_of(VECTOR * size).next_multiple_of(256)
}

/// Bytes of each block of a reduce-scatter of `bytes` bytes in total.
pub(super) fn block_bytes(bytes: usize, size: usize) -> usize {
    bytes / size / VECTOR * VECTOR
}

const _: () = assert!(MAX_RANKS <= THREADS as usize, "each peer has a thread that waits for it");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_take_one_shot_and_few_blocks() {
        let all_reduce = |bytes, size| {
            let most = 8 << 20;
            let launch =
                KernelLaunch::all_reduce(bytes, size, half_bytes(most, size), &KernelTuning::usual(size, most));
            (launch.entry, launch.grid.blocks)
        };
        assert_eq!(all_reduce(1, 4), ("one_shot", 1));
        assert_eq!(all_reduce(64 << 10, 4), ("one_shot", 8));
        assert_eq!(all_reduce(512 << 10, 4), ("one_shot", 64));
        assert_eq!(all_reduce((512 << 10) + 1, 4), ("two_shot", 17));
        assert_eq!(all_reduce(8 << 20, 4), ("two_shot", 64));
        assert_eq!(all_reduce(8 << 20, 2), ("one_shot", 64));
    }

    #[test]
    fn one_shot_needs_room_for_the_input_of_each_member() {
        let (half, tuning) =
            (half_bytes(8 << 20, 4), KernelTuning { one_shot_bytes: usize::MAX, ..KernelTuning::usual(4, 8 << 20) });
        assert_eq!(KernelLaunch::all_reduce(4 << 20, 4, half, &tuning).entry, "one_shot");
        assert_eq!(KernelLaunch::all_reduce((4 << 20) + 1, 4, half, &tuning).entry, "two_shot");
    }

    #[test]
    fn there_are_no_more_blocks_than_flags() {
        for channels in [0, 1, 64, MAX_BLOCKS, 100_000] {
            let tuning = KernelTuning { channels, ..KernelTuning::usual(2, 8 << 20) };
            let blocks = KernelLaunch::reduce_scatter(8 << 20, &tuning).grid.blocks;
            assert!((1..=MAX_BLOCKS).contains(&blocks), "{blocks} blocks for {channels} channels");
        }
    }

    #[test]
    fn parts_of_every_member_fit_into_a_half() {
        for size in 2..=MAX_RANKS {
            for bytes in [1usize, 16, 17, 4096, 100_001, 8 << 20] {
                let half = half_bytes(bytes, size);
                let part = bytes.div_ceil(VECTOR).div_ceil(size) * VECTOR;
                assert!(2 * part * size <= half, "{bytes} bytes for {size}");
                assert!(block_bytes(half / 2, size) * size <= half, "{bytes} bytes for {size}");
                assert!(block_bytes(half / 2, size) > 0, "{bytes} bytes for {size}");
            }
        }
    }
}
