//! Measures the time of calls for [`tune`](super::tune).

use std::time::{Duration, Instant};

use super::p2p::{KernelTuning, Peers};
use super::queue;
use super::tune::{DeviceAlgorithm, Sample};
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::{Overlap, Request};
use crate::device::nccl::Comm;
use crate::device::{DeviceBuffer, Priority, Stream, memory};
use crate::error::Result;
use crate::transport::Wait;

/// Number of rounds; the shortest time counts.
const ROUNDS: usize = 3;
/// Bytes that the calls of one round process, within the limits on their number.
const ROUND_BYTES: usize = 128 << 20;
const CALLS: std::ops::RangeInclusive<usize> = 3..=20;
/// The value of every byte of the data that is reduced: numbers of about 0.7.
const FILLING: u8 = 0x3f;
/// How often a wait for the device checks whether members have departed.
const DEPARTURE_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Measures those of `calls` that this group of `size` supports, on memory of its own. Collective.
///
/// Errors
/// [`crate::Error::Device`]; the errors of `wait`, after which the communicator and the peer memory cannot be used
/// any more.
pub(super) fn measure(
    calls: &[(usize, DeviceAlgorithm)],
    (me, size): (usize, usize),
    comm: &Comm,
    peers: Option<&Peers>,
    wait: &Wait<'_>,
    others: &dyn Fn() -> Vec<usize>,
) -> Result<Vec<Sample>> {
    let context = comm.context();
    let largest = calls.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
    let buffer = DeviceBuffer::zeroed(context, largest)?;
    let stream = Stream::new(context, Priority::High)?;
    let mut samples = Vec::new();
    for &(bytes, algorithm) in calls {
        let tuning = |one_shot_bytes, channels| KernelTuning {
            one_shot_bytes,
            peer_bytes: bytes,
            channels,
            ..KernelTuning::NEVER
        };
        let tuning = match algorithm {
            DeviceAlgorithm::OneShot { channels } => tuning(usize::MAX, channels),
            DeviceAlgorithm::TwoShot { channels } => tuning(0, channels),
            DeviceAlgorithm::Chunks | DeviceAlgorithm::ChunksOf16Bits | DeviceAlgorithm::ChunksOfBlocks => {
                KernelTuning { chunks_bytes: bytes, ..KernelTuning::NEVER }
            }
            DeviceAlgorithm::Nccl | DeviceAlgorithm::NcclOfBlocks => KernelTuning::NEVER,
        };
        let peers = match (algorithm, peers) {
            // Without the alternative, there is no choice.
            (DeviceAlgorithm::NcclOfBlocks, peers) if peers.is_none() || size != 2 => continue,
            (DeviceAlgorithm::Nccl | DeviceAlgorithm::NcclOfBlocks, _) => None,
            (_, Some(peers)) if peers.supports(bytes, &tuning) => {
                peers.set_tuning(tuning);
                Some(peers)
            }
            _ => continue,
        };
        // Float32 as in reducers' buckets; reducers do not send 16 bits in chunks. Blocks as in sharded training: 16
        // bits, all-gathers in place.
        let (dtype, overlap) = match algorithm {
            DeviceAlgorithm::ChunksOf16Bits | DeviceAlgorithm::ChunksOfBlocks | DeviceAlgorithm::NcclOfBlocks => {
                (DType::BFloat16, Overlap::Unknown)
            }
            _ => (DType::Float32, Overlap::Computation),
        };
        let (ptr, device) = (buffer.ptr() as *mut u8, Device::Cuda(context.device()));
        // SAFETY: the memory belongs to this function and lives until the queued operations are complete or aborted.
        let view = unsafe { TensorView::new(ptr, bytes / dtype.size(), dtype, device, stream.raw()) }?;
        let requests = match algorithm {
            DeviceAlgorithm::ChunksOfBlocks | DeviceAlgorithm::NcclOfBlocks => {
                let elems = view.elems() / size;
                let blocks: Vec<_> = (0..size).map(|block| view.slice(block * elems, elems)).collect();
                let own = blocks[me];
                vec![
                    Request::ReduceScatter { inputs: blocks.clone(), output: own, op: ReduceOp::Sum },
                    Request::AllGather { input: own, outputs: blocks },
                ]
            }
            _ => vec![Request::AllReduce { input: view, output: view, op: ReduceOp::Sum }],
        };
        // Numbers with non-zero low halves, for the chunked kernels. There are too few calls for the sums to
        // overflow.
        // SAFETY: as above.
        unsafe { memory::fill(buffer.ptr(), FILLING, bytes, &stream) }?;
        let in_chunks = tuning.chunks_bytes <= bytes;
        let one = || -> Result<()> {
            requests.iter().try_for_each(|request| match peers {
                // SAFETY: as below.
                Some(peers) if in_chunks => unsafe {
                    peers.queue_chunks(std::slice::from_ref(request), overlap, &stream).map(drop)
                },
                // SAFETY: the views are of this device and live long enough, as above.
                Some(peers) => unsafe { peers.queue(request, &stream) }.map(drop),
                // SAFETY: as above.
                None => unsafe { queue::queue(comm, request, me, size, &stream) },
            })
        };
        let count = (ROUND_BYTES / bytes).clamp(*CALLS.start(), *CALLS.end());
        let mut least = f32::INFINITY;
        for round in 0..=ROUNDS {
            // The first round warms up, and synchronises the members.
            let count = if round == 0 { 1 } else { count };
            let start = Instant::now();
            let queued = match peers {
                // NCCL connects to the members, and waits for them.
                None if round == 0 => comm.interruptible(|| wait.check(others), one),
                _ => (0..count).try_for_each(|_| one()),
            };
            queued.and_then(|()| arrive(&stream, wait, others)).inspect_err(|_| {
                if let Some(peers) = peers {
                    peers.abort();
                }
                comm.abort();
            })?;
            if round > 0 {
                least = least.min(start.elapsed().as_secs_f32() * 1e6 / count as f32);
            }
        }
        samples.push(Sample { bytes, algorithm, micros: least });
    }
    Ok(samples)
}

/// Waits until the stream is idle, or a member has departed.
fn arrive(stream: &Stream, wait: &Wait<'_>, others: &dyn Fn() -> Vec<usize>) -> Result<()> {
    let mut next_check = Instant::now() + DEPARTURE_CHECK_INTERVAL;
    while !stream.is_idle()? {
        if Instant::now() >= next_check {
            wait.check(others)?;
            next_check = Instant::now() + DEPARTURE_CHECK_INTERVAL;
        }
        std::hint::spin_loop();
    }
    Ok(())
}
