//! Times calls for [`tune`](super::tune).

use std::time::{Duration, Instant};

use super::p2p::{KernelTuning, Peers};
use super::tune::{DeviceAlgorithm, Sample};
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::{Overlap, Request};
use crate::device::nccl::Comm;
use crate::device::{DeviceBuffer, Priority, Stream, memory};
use crate::error::Result;
use crate::transport::Wait;

/// Times are the least of as many rounds.
const ROUNDS: usize = 3;
/// Bytes of a round's calls, but for the least and the greatest number of them.
const ROUND_BYTES: usize = 128 << 20;
const CALLS: std::ops::RangeInclusive<usize> = 3..=20;
/// Every byte of what is reduced: numbers of about 0.7.
const FILLING: u8 = 0x3f;
/// How often a wait for the device looks for news of the members.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Times those of `calls` that this group can make, on memory of its own. All members do this at once.
///
/// # Errors
/// [`crate::Error::Device`]; those of `wait`, after which the communicator and the peers are of no use any more.
pub(super) fn measure(
    calls: &[(usize, DeviceAlgorithm)],
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
            DeviceAlgorithm::Chunks => KernelTuning { chunks_bytes: bytes, ..KernelTuning::NEVER },
            DeviceAlgorithm::Nccl => KernelTuning::NEVER,
        };
        let peers = match (algorithm, peers) {
            (DeviceAlgorithm::Nccl, _) => None,
            (_, Some(peers)) if peers.takes(bytes, &tuning) => {
                peers.set_tuning(tuning);
                Some(peers)
            }
            _ => continue,
        };
        let (ptr, device) = (buffer.ptr() as *mut u8, Device::Cuda(context.device()));
        // SAFETY: the memory is ours and lives until what is queued is done, or aborted.
        let view = unsafe { TensorView::new(ptr, bytes / 4, DType::Float32, device, stream.raw()) }?;
        let request = Request::AllReduce { input: view, output: view, op: ReduceOp::Sum };
        // Numbers whose low halves are not zero, for chunks; few enough calls double them.
        // SAFETY: as above.
        unsafe { memory::fill(buffer.ptr(), FILLING, bytes, &stream) }?;
        let one = || -> Result<()> {
            match peers {
                Some(peers) if algorithm == DeviceAlgorithm::Chunks => {
                    // SAFETY: as below.
                    unsafe { peers.queue_chunks(std::slice::from_ref(&request), Overlap::Computation, &stream) }
                        .map(drop)
                }
                // SAFETY: the views are of this device and live long enough, as above.
                Some(peers) => unsafe { peers.queue(&request, &stream) }.map(drop),
                // SAFETY: as above.
                None => unsafe { comm.all_reduce(&view, &view, ReduceOp::Sum, &stream) },
            }
        };
        let count = (ROUND_BYTES / bytes).clamp(*CALLS.start(), *CALLS.end());
        let mut least = f32::INFINITY;
        for round in 0..=ROUNDS {
            // The first round warms up, and brings the members together.
            let count = if round == 0 { 1 } else { count };
            let start = Instant::now();
            let queued = match peers {
                // NCCL connects with the members, and waits for them.
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

/// Waits until the stream is idle, or a member is gone.
fn arrive(stream: &Stream, wait: &Wait<'_>, others: &dyn Fn() -> Vec<usize>) -> Result<()> {
    let mut look = Instant::now() + LOOK_EVERY;
    while !stream.is_idle()? {
        if Instant::now() >= look {
            wait.check(others)?;
            look = Instant::now() + LOOK_EVERY;
        }
        std::hint::spin_loop();
    }
    Ok(())
}
