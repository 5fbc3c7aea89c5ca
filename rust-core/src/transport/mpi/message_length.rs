//! Measures how long messages through MPI should be.
//!
//! Note "long messages". MPI sends a short message at once, and announces a longer one to its receiver, which answers
//! before the data follows. The limit depends on the library and the network, and programs cannot query it. For Open MPI
//! over TCP it is 64 KiB, and long all-reduces with messages below it take 0.6 of the time of messages of 256 KiB. Over other
//! networks, messages that are announced are faster, because they are not copied.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::engine::{Completed, Failure, MessageTag, Wire};
use super::service::MpiService;
use crate::transport::ports::FRAME_BYTES;
use crate::trials::Trials;

/// The lengths to compare; the first one is preferred if no other one is clearly faster.
const LENGTHS: [usize; 4] = [FRAME_BYTES, below(64 << 10), below(32 << 10), below(16 << 10)];
/// The length before any measurement.
pub(super) const DEFAULT_LENGTH: usize = LENGTHS[0];

/// Number of times for each length.
const ROUNDS: usize = 5;
/// Bytes that each of the two processes sends in a round.
const ROUND_BYTES: usize = 4 << 20;
/// If a round takes longer, nothing is measured, and the start does not take seconds: the network's speed is then the limit,
/// whatever the length.
const MAX_ROUND: Duration = Duration::from_millis(100);
/// Number of messages in flight in each direction.
const WINDOW: usize = 8;
/// Another length is chosen if its median is less than this part of the first one's.
const SWITCH_RATIO: f32 = 0.85;

/// A length that stays below a library's limit of `limit` bytes, which includes the library's own header.
const fn below(limit: usize) -> usize {
    limit - 512
}

/// The fastest length of messages between this process and `partner`, which calls this function, too. Both send at the same
/// time, as members of an all-reduce do. Ends with an error once `gave_up` is set.
pub(super) fn measure(wire: &mut dyn Wire, partner: usize, gave_up: &AtomicBool) -> Result<usize, Failure> {
    let mut measurement = LengthMeasurement::new(partner, gave_up);
    let outcome = measurement.choose(wire);
    if outcome.is_err() {
        // MPI may still use its memory.
        std::mem::forget(measurement);
    }
    outcome
}

/// Messages in both directions between two processes.
struct LengthMeasurement<'a> {
    partner: usize,
    gave_up: &'a AtomicBool,
    /// What is sent, in messages of equal length; and where received messages are copied, as those of frames are.
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// Receive buffers, by slot; the slots of sends follow.
    buffers: Vec<Vec<u8>>,
}

impl<'a> LengthMeasurement<'a> {
    fn new(partner: usize, gave_up: &'a AtomicBool) -> Self {
        let buffers = (0..WINDOW).map(|_| vec![0; FRAME_BYTES]).collect();
        Self { partner, gave_up, outgoing: vec![1; ROUND_BYTES], incoming: vec![0; ROUND_BYTES], buffers }
    }

    fn choose(&mut self, wire: &mut dyn Wire) -> Result<usize, Failure> {
        // Connects the processes.
        self.run(wire, DEFAULT_LENGTH, 1)?;
        let start = Instant::now();
        self.run(wire, DEFAULT_LENGTH, ROUND_BYTES)?;
        let slowest = self.slowest(wire, start.elapsed())?;
        if slowest > MAX_ROUND {
            tracing::debug!(?slowest, "the network is too slow for measuring messages of MPI");
            return Ok(DEFAULT_LENGTH);
        }
        let mut trials = Trials::<{ LENGTHS.len() }, ROUNDS>::default();
        for _ in 0..ROUNDS {
            for (option, length) in LENGTHS.into_iter().enumerate() {
                let start = Instant::now();
                self.run(wire, length, ROUND_BYTES)?;
                trials.add(option, start.elapsed().as_secs_f32());
            }
        }
        let medians = trials.medians();
        trials.switch(medians, SWITCH_RATIO);
        let chosen = LENGTHS[trials.chosen()];
        tracing::debug!(chosen, ?LENGTHS, ?medians, "messages of MPI were measured");
        Ok(chosen)
    }

    /// The longer one of both processes' times.
    fn slowest(&mut self, wire: &mut dyn Wire, own: Duration) -> Result<Duration, Failure> {
        let nanoseconds = own.as_nanos() as u64;
        self.outgoing[..8].copy_from_slice(&nanoseconds.to_le_bytes());
        self.run(wire, 8, 8)?;
        let other = self.incoming.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(Duration::from_nanos(nanoseconds.max(other)))
    }

    /// Sends and receives `total` bytes in messages of `length` bytes.
    fn run(&mut self, wire: &mut dyn Wire, length: usize, total: usize) -> Result<(), Failure> {
        const { assert!(2 * WINDOW <= MpiService::SLOTS) };
        let messages = total.div_ceil(length);
        let (mut started, mut sent, mut posted, mut received) = (0, 0, 0, 0);
        let mut free_sends: Vec<usize> = (WINDOW..2 * WINDOW).collect();
        let mut free_receives: Vec<usize> = (0..WINDOW).collect();
        let mut done: Vec<Completed> = Vec::new();
        while sent < messages || received < messages {
            while posted < messages
                && let Some(slot) = free_receives.pop()
            {
                // SAFETY: the buffer is kept until the slot is complete; after a failure it is leaked.
                unsafe { wire.recv(slot, &mut self.buffers[slot], MessageTag::Measurement)? };
                posted += 1;
            }
            while started < messages
                && let Some(slot) = free_sends.pop()
            {
                let start = started * length;
                let data = &self.outgoing[start..total.min(start + length)];
                // SAFETY: as above; nothing changes these bytes.
                unsafe { wire.send(slot, data, self.partner, MessageTag::Measurement)? };
                started += 1;
            }
            wire.poll(&mut done)?;
            if done.is_empty() {
                if self.gave_up.load(Ordering::Relaxed) {
                    return Err(Failure("the measurement of messages was given up".to_owned()));
                }
                // The partner may share this core.
                std::thread::yield_now();
            }
            for Completed { slot, bytes, .. } in done.drain(..) {
                if slot < WINDOW {
                    let start = (received * length).min(total.saturating_sub(bytes));
                    self.incoming[start..start + bytes].copy_from_slice(&self.buffers[slot][..bytes]);
                    received += 1;
                    free_receives.push(slot);
                } else {
                    sent += 1;
                    free_sends.push(slot);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::engine::MpiWorld;
    use super::super::engine::loopback::Loopback;
    use super::*;

    #[test]
    fn a_length_is_measured() {
        let mut wire = Loopback::default();
        assert!(LENGTHS.contains(&measure(&mut wire, 0, &AtomicBool::new(false)).expect("the loopback works")));
        let gave_up = AtomicBool::new(false);
        let mut measurement = LengthMeasurement::new(0, &gave_up);
        for (option, length) in LENGTHS.into_iter().enumerate() {
            measurement.outgoing.fill(option as u8 + 1);
            measurement.run(&mut wire, length, ROUND_BYTES).expect("the loopback works");
            assert!(measurement.incoming[..length].iter().all(|byte| *byte == option as u8 + 1));
        }
        // Nobody answers.
        gave_up.store(true, Ordering::Relaxed);
        assert!(measure(&mut Silent, 0, &gave_up).is_err());
    }

    /// A wire whose messages never arrive.
    struct Silent;

    impl Wire for Silent {
        fn init(&mut self) -> Result<bool, Failure> {
            Ok(true)
        }
        fn start(&mut self, _num_slots: usize) -> Result<MpiWorld, Failure> {
            Err(Failure("it is silent".to_owned()))
        }
        unsafe fn send(&mut self, _: usize, _: &[u8], _: usize, _: MessageTag) -> Result<(), Failure> {
            Ok(())
        }
        unsafe fn recv(&mut self, _: usize, _: &mut [u8], _: MessageTag) -> Result<(), Failure> {
            Ok(())
        }
        fn poll(&mut self, _done: &mut Vec<Completed>) -> Result<(), Failure> {
            Ok(())
        }
        fn finish(&mut self) -> Result<(), Failure> {
            Ok(())
        }
    }
}
