//! Chooses parameters that depend on the machine, by a short measurement when a group first uses devices
//! (`SMD_AUTOTUNE`).
//!
//! - TUN-1: all members make the same choice. Each measures, a call counts with the slowest member's time, and the
//!   choice follows from these times alone. Member 0 decides whether there is a measurement at all.
//! - TUN-2: a choice that was saved in a file serves groups with as many members on devices of the same name.

use std::path::Path;

use parking_lot::Mutex;

use super::p2p::{KernelTuning, MemberStore, read, write};
use crate::config;
use crate::error::{Error, Result};

/// The parameters chosen for a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Choice {
    /// Parameters of the kernels between peers, where these are used.
    pub(super) peers: Option<KernelTuning>,
    /// Size of the buckets that a reducer sends, in bytes.
    pub(super) bucket_bytes: usize,
}

/// The algorithm of an all-reduce, or of the last two's collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum DeviceAlgorithm {
    OneShot {
        channels: u32,
    },
    TwoShot {
        channels: u32,
    },
    /// Used where it is possible.
    Chunks,
    /// The same, of bfloat16 instead of float32.
    ChunksOf16Bits,
    Nccl,
    /// A reduce-scatter and an all-gather of bfloat16 in chunks.
    ChunksOfBlocks,
    /// The same by NCCL.
    NcclOfBlocks,
}

/// The measured time of a call.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Sample {
    pub(super) bytes: usize,
    pub(super) algorithm: DeviceAlgorithm,
    pub(super) micros: f32,
}

/// A choice as saved in the file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct StoredDecision {
    device: String,
    members: usize,
    #[serde(flatten)]
    choice: Choice,
}

/// Member 0's decision for all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum TuningDecision {
    /// Use the defaults.
    Usual,
    /// Use a choice of this process or of an earlier one.
    Known(Choice),
    Measure,
}

/// Message sizes at which the algorithms are compared.
const SIZES: [usize; 9] = [4 << 10, 32 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20];
/// Bucket sizes that are measured.
const BUCKETS: [usize; 8] = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20];
const CHANNELS: [u32; 4] = [16, 32, 64, 128];
/// More channels must be this much faster, because they take multiprocessors from the computation.
const CHANNELS_GAIN: f64 = 1.03;
/// The smallest bucket with this share of the greatest bandwidth is chosen: larger buckets start later.
const BANDWIDTH_SHARE: f64 = 0.9;

/// Makes the common choice of a group of `size` members on devices called `device`; `None` means the defaults.
/// `measure` times calls of these sizes. Algorithms between peers are timed only where they are possible.
pub(super) fn agree(
    me: usize,
    size: usize,
    device: &str,
    store: &dyn MemberStore,
    measure: impl FnOnce(&[(usize, DeviceAlgorithm)]) -> Result<Vec<Sample>>,
) -> Result<Option<Choice>> {
    /// The choices of this process's groups.
    static KNOWN: Mutex<Vec<StoredDecision>> = Mutex::new(Vec::new());
    let file = config::AUTOTUNE_FILE.text();
    if me == 0 {
        let decision = decide(&KNOWN.lock(), file.as_deref().map(Path::new), config::AUTOTUNE.flag()?, device, size)?;
        write(store, "decision", &decision)?;
    }
    match read(store, "decision", 0)? {
        TuningDecision::Usual => return Ok(None),
        TuningDecision::Known(choice) => return Ok(Some(choice)),
        TuningDecision::Measure => {}
    }
    let own = measure(&calls())?;
    write(store, "samples", &own)?;
    let all: Vec<Vec<Sample>> = (0..size).map(|member| read(store, "samples", member)).collect::<Result<_>>()?;
    let samples = slowest(&all)?;
    samples.iter().for_each(|Sample { bytes, algorithm, micros }| {
        tracing::debug!("{bytes} bytes, {algorithm:?}: {micros:.1} us")
    });
    let choice = choose(&samples)?;
    if me == 0 {
        let kept = StoredDecision { device: device.to_owned(), members: size, choice };
        eprintln!("opensmd: autotune: {}", describe(&kept));
        if let Some(file) = file {
            keep(Path::new(&file), &kept)?;
        }
        KNOWN.lock().push(kept);
    }
    Ok(Some(choice))
}

fn decide(
    known: &[StoredDecision],
    file: Option<&Path>,
    measure: bool,
    device: &str,
    size: usize,
) -> Result<TuningDecision> {
    let fits = |kept: &&StoredDecision| kept.device == device && kept.members == size;
    if let Some(kept) = known.iter().find(fits) {
        return Ok(TuningDecision::Known(kept.choice));
    }
    if let Some(file) = file
        && let Some(kept) = load(file)?.iter().find(fits)
    {
        return Ok(TuningDecision::Known(kept.choice));
    }
    Ok(if measure { TuningDecision::Measure } else { TuningDecision::Usual })
}

/// All calls that are measured, small ones first.
fn calls() -> Vec<(usize, DeviceAlgorithm)> {
    let mut calls = Vec::new();
    for bytes in SIZES {
        for channels in CHANNELS {
            calls.push((bytes, DeviceAlgorithm::OneShot { channels }));
            calls.push((bytes, DeviceAlgorithm::TwoShot { channels }));
        }
        calls.push((bytes, DeviceAlgorithm::Nccl));
    }
    let ways = [
        DeviceAlgorithm::Chunks,
        DeviceAlgorithm::ChunksOf16Bits,
        DeviceAlgorithm::Nccl,
        DeviceAlgorithm::ChunksOfBlocks,
        DeviceAlgorithm::NcclOfBlocks,
    ];
    calls.extend(large().flat_map(|bytes| ways.map(|algorithm| (bytes, algorithm))));
    calls
}

/// Bucket sizes above the sizes of [`SIZES`].
fn large() -> impl Iterator<Item = usize> {
    BUCKETS.into_iter().filter(|bytes| !SIZES.contains(bytes))
}

/// Takes the slowest member's time of each call (TUN-1).
fn slowest(members: &[Vec<Sample>]) -> Result<Vec<Sample>> {
    let (first, rest) = members.split_first().ok_or_else(|| Error::Internal("a group without members".into()))?;
    let mut slowest = first.clone();
    for samples in rest {
        let alike = samples.len() == slowest.len()
            && samples.iter().zip(&slowest).all(|(a, b)| (a.bytes, a.algorithm) == (b.bytes, b.algorithm));
        if !alike {
            return Err(Error::Internal("members measured different calls".into()));
        }
        slowest.iter_mut().zip(samples).for_each(|(all, one)| all.micros = all.micros.max(one.micros));
    }
    Ok(slowest)
}

fn choose(samples: &[Sample]) -> Result<Choice> {
    let time = |bytes: usize, algorithm: DeviceAlgorithm| {
        samples
            .iter()
            .find(|sample| sample.bytes == bytes && sample.algorithm == algorithm)
            .map(|sample| f64::from(sample.micros))
    };
    let one = |bytes, channels| time(bytes, DeviceAlgorithm::OneShot { channels });
    let two = |bytes, channels| time(bytes, DeviceAlgorithm::TwoShot { channels });
    // With many members, a large message does not fit the one-shot buffer.
    let best = |bytes, channels| [one(bytes, channels), two(bytes, channels)].into_iter().flatten().reduce(f64::min);
    // The mean logarithm of the times, so that each size has the same weight.
    let score = |channels: u32| {
        let logs: Vec<f64> = SIZES.iter().filter_map(|bytes| best(*bytes, channels)).map(f64::ln).collect();
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / logs.len() as f64).exp())
    };
    let least = CHANNELS.into_iter().filter_map(score).fold(f64::INFINITY, f64::min);
    let channels = CHANNELS.into_iter().find(|channels| score(*channels).is_some_and(|s| s <= least * CHANNELS_GAIN));
    let up_to = |holds: &dyn Fn(usize) -> Option<bool>| {
        SIZES.into_iter().take_while(|bytes| holds(*bytes) == Some(true)).last().unwrap_or(0)
    };
    let peers = channels.map(|channels| {
        let one_shot = up_to(&|bytes| Some(one(bytes, channels)? <= two(bytes, channels)?));
        let peer_bytes = up_to(&|bytes| Some(best(bytes, channels)? <= time(bytes, DeviceAlgorithm::Nccl)?));
        // For sizes above those, one algorithm serves all numbers of a type: the one with the smaller mean logarithm.
        // NCCL's time for an all-reduce depends on the bytes alone.
        let least_in_chunks = |algorithm, nccl| {
            let ratio = |bytes: usize| Some((time(bytes, algorithm)? / time(bytes, nccl)?).ln());
            let in_chunks = large().map(ratio).sum::<Option<f64>>().is_some_and(|logs| logs <= 0.0);
            if in_chunks { SIZES[SIZES.len() - 1] + 1 } else { usize::MAX }
        };
        KernelTuning {
            one_shot_bytes: one_shot,
            peer_bytes,
            channels,
            chunks_bytes: least_in_chunks(DeviceAlgorithm::Chunks, DeviceAlgorithm::Nccl),
            chunks_of_16_bits_bytes: least_in_chunks(DeviceAlgorithm::ChunksOf16Bits, DeviceAlgorithm::Nccl),
            chunks_of_blocks_bytes: least_in_chunks(DeviceAlgorithm::ChunksOfBlocks, DeviceAlgorithm::NcclOfBlocks),
        }
    });
    let chosen = |bytes: usize| match peers {
        Some(tuning) if tuning.chunks_bytes <= bytes => time(bytes, DeviceAlgorithm::Chunks),
        Some(tuning) if bytes <= tuning.peer_bytes => best(bytes, tuning.channels),
        _ => time(bytes, DeviceAlgorithm::Nccl),
    };
    let bandwidth = |bytes: usize| Some(bytes as f64 / chosen(bytes)?);
    let greatest = BUCKETS.into_iter().filter_map(bandwidth).fold(0.0, f64::max);
    let bucket_bytes = BUCKETS
        .into_iter()
        .find(|bytes| bandwidth(*bytes).is_some_and(|bandwidth| bandwidth >= greatest * BANDWIDTH_SHARE))
        .ok_or_else(|| Error::Internal("no call was measured".into()))?;
    Ok(Choice { peers, bucket_bytes })
}

fn describe(kept: &StoredDecision) -> String {
    let StoredDecision { device, members, choice } = kept;
    let size = |bytes: usize| match bytes {
        0 => "never".to_owned(),
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    };
    let peers = match choice.peers {
        Some(tuning) => format!(
            "one shot up to {}, between peers up to {}, {} channels, {}{}",
            size(tuning.one_shot_bytes),
            size(tuning.peer_bytes),
            tuning.channels,
            match (tuning.chunks_bytes, tuning.chunks_of_16_bits_bytes) {
                (usize::MAX, usize::MAX) => "the rest by NCCL",
                (_, usize::MAX) => "large ones of float32 in chunks",
                (usize::MAX, _) => "large ones of 16 bits in chunks",
                _ => "large ones in chunks",
            },
            if tuning.chunks_of_blocks_bytes < usize::MAX {
                ", large reduce-scatters and all-gathers in chunks"
            } else {
                ""
            }
        ),
        None => "no direct algorithm between peers".to_owned(),
    };
    format!("{members} x {device}: {peers}, buckets of {}", size(choice.bucket_bytes))
}

fn load(file: &Path) -> Result<Vec<StoredDecision>> {
    let during = || format!("reading `{}` (`{}`)", file.display(), config::AUTOTUNE_FILE.name);
    match std::fs::read_to_string(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Error::io(during(), error)),
        Ok(text) => serde_json::from_str(&text).map_err(|error| Error::Config(format!("{}: {error}", during()))),
    }
}

/// Adds the choice to the file, or replaces the one for such groups.
fn keep(file: &Path, kept: &StoredDecision) -> Result<()> {
    let mut all = load(file)?;
    all.retain(|known| (&known.device, known.members) != (&kept.device, kept.members));
    all.push(kept.clone());
    let text = serde_json::to_string_pretty(&all)
        .map_err(|error| Error::Internal(format!("choices cannot be serialized: {error}")))?;
    let during = || format!("writing `{}` (`{}`)", file.display(), config::AUTOTUNE_FILE.name);
    let beside = file.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&beside, text + "\n")
        .and_then(|()| std::fs::rename(&beside, file))
        .map_err(|error| Error::io(during(), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call with a latency of `us` microseconds and a bandwidth of `gigabytes` per second.
    fn line(us: f64, gigabytes: f64, bytes: usize) -> f32 {
        (us + bytes as f64 / gigabytes / 1e3) as f32
    }

    fn machine(peers: bool) -> Vec<Sample> {
        let time = |(bytes, algorithm): (usize, DeviceAlgorithm)| {
            let micros = match algorithm {
                // More channels help large messages up to 64.
                DeviceAlgorithm::OneShot { channels } => line(8.0, 2.0 * f64::from(channels.min(64)), bytes),
                DeviceAlgorithm::TwoShot { channels } => line(12.0, 4.0 * f64::from(channels.min(64)), bytes),
                DeviceAlgorithm::Chunks | DeviceAlgorithm::ChunksOf16Bits | DeviceAlgorithm::ChunksOfBlocks => {
                    line(20.0, 400.0, bytes)
                }
                DeviceAlgorithm::Nccl | DeviceAlgorithm::NcclOfBlocks => line(36.0, 350.0, bytes),
            };
            Sample { bytes, algorithm, micros }
        };
        let is_possible = |algorithm: &DeviceAlgorithm| {
            peers || matches!(algorithm, DeviceAlgorithm::Nccl | DeviceAlgorithm::NcclOfBlocks)
        };
        calls().into_iter().filter(|(_, algorithm)| is_possible(algorithm)).map(time).collect()
    }

    #[test]
    fn ways_change_where_their_lines_cross() {
        let choice = choose(&machine(true)).unwrap();
        // 8 + b/128 = 12 + b/256 at 1.02 MB; 12 + b/256 = 36 + b/350 at 22.9 MB, which is more than is measured.
        let peers = KernelTuning { one_shot_bytes: 512 << 10, ..KernelTuning::usual(2, 8 << 20) };
        assert_eq!(choice.peers, Some(peers));
        // 36 us and b/350 is nine tenths of the bandwidth of 128 MiB at some 100 MB.
        assert_eq!(choice.bucket_bytes, 64 << 20);
    }

    #[test]
    fn a_group_without_peers_has_a_bucket_all_the_same() {
        let choice = choose(&machine(false)).unwrap();
        assert_eq!(choice, Choice { peers: None, bucket_bytes: 64 << 20 });
        assert!(choose(&[]).is_err());
    }

    #[test]
    fn nccl_may_always_win() {
        let mut samples = machine(true);
        samples
            .iter_mut()
            .filter(|sample| sample.algorithm == DeviceAlgorithm::Nccl)
            .for_each(|sample| sample.micros = 1.0);
        assert_eq!(choose(&samples).unwrap().peers.unwrap().peer_bytes, 0);
    }

    #[test]
    fn a_bucket_suits_the_ways_that_were_chosen() {
        let mut samples = machine(true);
        let chunks = samples.iter_mut().filter(|sample| sample.algorithm == DeviceAlgorithm::Chunks);
        // Chunks would be by far the fastest for 16 MiB, but not for all that is large.
        chunks.for_each(|sample| sample.micros *= if sample.bytes == 16 << 20 { 0.1 } else { 10.0 });
        let choice = choose(&samples).unwrap();
        let peers = choice.peers.unwrap();
        assert_eq!((peers.chunks_bytes, choice.bucket_bytes), (usize::MAX, 64 << 20));
        assert_eq!(peers.chunks_of_16_bits_bytes, (8 << 20) + 1, "numbers of 16 bits have their own times");
    }

    #[test]
    fn numbers_of_16_bits_may_stay_with_nccl() {
        let mut samples = machine(true);
        let half = samples.iter_mut().filter(|sample| sample.algorithm == DeviceAlgorithm::ChunksOf16Bits);
        half.for_each(|sample| sample.micros *= 2.0);
        let choice = choose(&samples).unwrap();
        let peers = choice.peers.unwrap();
        assert_eq!((peers.chunks_bytes, peers.chunks_of_16_bits_bytes), ((8 << 20) + 1, usize::MAX));
        let text = describe(&StoredDecision { device: "NVIDIA H200".into(), members: 2, choice });
        assert!(text.contains("large ones of float32 in chunks"), "{text}");
    }

    #[test]
    fn all_gathers_may_stay_with_nccl() {
        let mut samples = machine(true);
        let nccl = samples.iter_mut().filter(|sample| sample.algorithm == DeviceAlgorithm::NcclOfBlocks);
        nccl.for_each(|sample| sample.micros *= 0.5);
        let peers = choose(&samples).unwrap().peers.unwrap();
        assert_eq!((peers.chunks_bytes, peers.chunks_of_blocks_bytes), ((8 << 20) + 1, usize::MAX));
    }

    #[test]
    fn one_shot_is_chosen_only_for_sizes_that_fit() {
        let mut samples = machine(true);
        samples
            .retain(|sample| sample.bytes <= 256 << 10 || !matches!(sample.algorithm, DeviceAlgorithm::OneShot { .. }));
        let peers = KernelTuning { one_shot_bytes: 256 << 10, ..KernelTuning::usual(2, 8 << 20) };
        assert_eq!(choose(&samples).unwrap().peers, Some(peers));
    }

    #[test]
    fn the_slowest_member_counts() {
        let (fast, mut slow) = (machine(true), machine(true));
        slow.iter_mut().filter(|sample| sample.bytes > 1 << 20).for_each(|sample| sample.micros *= 2.0);
        assert_eq!(slowest(&[fast.clone(), slow.clone()]).unwrap(), slow);
        assert_eq!(slowest(&[slow.clone(), fast.clone()]).unwrap(), slow);
        slow.pop();
        assert!(slowest(&[fast, slow]).is_err());
    }

    #[test]
    fn choices_survive_a_file_and_fit_their_groups_only() {
        let file = std::env::temp_dir().join(format!("smd-tuned-{}.json", std::process::id()));
        let known = |device: &str, size| decide(&[], Some(&file), false, device, size).unwrap();
        assert_eq!(known("A", 2), TuningDecision::Usual);
        assert_eq!(decide(&[], Some(&file), true, "A", 2).unwrap(), TuningDecision::Measure);
        let choice = choose(&machine(true)).unwrap();
        let other = choose(&machine(false)).unwrap();
        let kept = |device: &str, members, choice| StoredDecision { device: device.into(), members, choice };
        for one in [kept("A", 2, choice), kept("A", 4, choice), kept("A", 2, other)] {
            keep(&file, &one).unwrap();
        }
        assert_eq!(known("A", 2), TuningDecision::Known(other));
        assert_eq!(known("A", 4), TuningDecision::Known(choice));
        assert_eq!(known("B", 4), TuningDecision::Usual);
        std::fs::write(&file, "[{").unwrap();
        let text = decide(&[], Some(&file), true, "A", 2).unwrap_err().to_string();
        std::fs::remove_file(&file).unwrap();
        assert!(text.contains("smd-tuned-") && text.contains("SMD_AUTOTUNE_FILE"), "{text}");
    }

    #[test]
    fn a_choice_is_one_line() {
        let line = |members, choice| describe(&StoredDecision { device: "NVIDIA H200".into(), members, choice });
        assert_eq!(
            line(2, choose(&machine(true)).unwrap()),
            "2 x NVIDIA H200: one shot up to 512 KiB, between peers up to 8 MiB, 64 channels, large ones in chunks, large \
             reduce-scatters and all-gathers in chunks, buckets of 64 MiB"
        );
        assert_eq!(
            line(16, choose(&machine(false)).unwrap()),
            "16 x NVIDIA H200: no direct algorithm between peers, buckets of 64 MiB"
        );
    }
}
