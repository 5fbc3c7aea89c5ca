//! Measures how MPI should be used: how long messages with frames are to be, and whether long messages of groups are to
//! be moved without copies (transport/zero_copy.rs).
//!
//! Note "long messages". MPI sends a short message at once, and announces a longer one to its receiver, which answers
//! before the data follows. The limit depends on the library and the network, and programs cannot query it. For Open MPI
//! over TCP it is 64 KiB. Over other networks, messages that are announced are faster, because they are not copied. The
//! measurement does not show that a receiver may do something else when an announcement arrives: members of a chain
//! need 1.4 times as long with messages of 256 KiB as with those below 64 KiB, which the measurement finds equally fast.
//! So messages below 64 KiB are preferred. A message of a megabyte or more makes up for the time of its announcement, if
//! neither end copies it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::engine::{Completed, Failure, MessageTag, Wire};
use super::service::MpiService;
use crate::transport::ports::FRAME_BYTES;
use crate::trials::Trials;

/// How to use MPI; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MessageOptions {
    /// The longest message with a frame or a part of one.
    pub(crate) bytes: usize,
    /// Whether long messages of groups are moved without copies.
    pub(crate) zero_copy: bool,
}

/// Before any measurement.
impl Default for MessageOptions {
    fn default() -> Self {
        Self { bytes: LENGTHS[0], zero_copy: true }
    }
}

/// The lengths of messages with frames to compare; the first one is preferred if no other one is clearly faster.
const LENGTHS: [usize; 4] = [below(64 << 10), FRAME_BYTES, below(32 << 10), below(16 << 10)];
/// The length of messages that are not copied.
const ZERO_COPY_BYTES: usize = 1 << 20;

/// Number of times for each option.
const ROUNDS: usize = 5;
/// Bytes that each of the two processes sends in a round.
const ROUND_BYTES: usize = 4 << 20;
/// If a round takes longer, nothing is measured, and the start does not take seconds: the network's speed is then the limit,
/// whatever the length.
const MAX_ROUND: Duration = Duration::from_millis(100);
/// Number of messages in flight in each direction.
const WINDOW: usize = 8;
/// Another option is chosen if its median is less than this part of the first one's.
const SWITCH_RATIO: f32 = 0.85;

/// A length that stays below a library's limit of `limit` bytes, which includes the library's own header.
const fn below(limit: usize) -> usize {
    limit - 512
}

/// The fastest messages between this process and `partner`, which calls this function, too. Both send at the same
/// time, as members of an all-reduce do. Ends with an error once `gave_up` is set.
pub(super) fn measure(wire: &mut dyn Wire, partner: usize, gave_up: &AtomicBool) -> Result<MessageOptions, Failure> {
    let mut measurement = MessageMeasurement::new(partner, gave_up);
    let outcome = measurement.choose(wire);
    if outcome.is_err() {
        // MPI may still use its memory.
        std::mem::forget(measurement);
    }
    outcome
}

/// Messages in both directions between two processes.
struct MessageMeasurement<'a> {
    partner: usize,
    gave_up: &'a AtomicBool,
    /// What is sent, in messages of equal length; and where it is received.
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    /// The messages of frames, which are copied at both ends, by slot: receives, then sends.
    buffers: Vec<Vec<u8>>,
}

impl<'a> MessageMeasurement<'a> {
    fn new(partner: usize, gave_up: &'a AtomicBool) -> Self {
        let buffers = (0..2 * WINDOW).map(|_| vec![0; FRAME_BYTES]).collect();
        Self { partner, gave_up, outgoing: vec![1; ROUND_BYTES], incoming: vec![0; ROUND_BYTES], buffers }
    }

    fn choose(&mut self, wire: &mut dyn Wire) -> Result<MessageOptions, Failure> {
        let default = MessageOptions::default();
        // Connects the processes.
        self.run(wire, default.bytes, 1)?;
        let slowest = self.time(wire, default.bytes)?;
        if slowest > MAX_ROUND {
            tracing::debug!(?slowest, "the network is too slow for measuring messages of MPI");
            return Ok(default);
        }
        let mut lengths = Trials::<{ LENGTHS.len() }, ROUNDS>::default();
        for _ in 0..ROUNDS {
            for (option, length) in LENGTHS.into_iter().enumerate() {
                lengths.add(option, self.time(wire, length)?.as_secs_f32());
            }
        }
        lengths.switch(lengths.medians(), SWITCH_RATIO);
        let bytes = LENGTHS[lengths.chosen()];
        let mut copies = Trials::<2, ROUNDS>::default();
        for _ in 0..ROUNDS {
            for (option, length) in [bytes, ZERO_COPY_BYTES].into_iter().enumerate() {
                copies.add(option, self.time(wire, length)?.as_secs_f32());
            }
        }
        copies.switch(copies.medians(), SWITCH_RATIO);
        let options = MessageOptions { bytes, zero_copy: copies.chosen() == 1 };
        tracing::debug!(
            ?options, ?LENGTHS, lengths = ?lengths.medians(), copies = ?copies.medians(),
            "messages of MPI were measured"
        );
        Ok(options)
    }

    /// The longer one of both processes' times for a round in messages of `length` bytes. Both begin at the same time,
    /// because they have exchanged the times of the round before.
    fn time(&mut self, wire: &mut dyn Wire, length: usize) -> Result<Duration, Failure> {
        let start = Instant::now();
        self.run(wire, length, ROUND_BYTES)?;
        let nanoseconds = start.elapsed().as_nanos() as u64;
        self.outgoing[..8].copy_from_slice(&nanoseconds.to_le_bytes());
        self.run(wire, 8, 8)?;
        let other = self.incoming.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(Duration::from_nanos(nanoseconds.max(other)))
    }

    /// Sends and receives `total` bytes in messages of `length` bytes: of frames, or without copies if they are longer.
    fn run(&mut self, wire: &mut dyn Wire, length: usize, total: usize) -> Result<(), Failure> {
        const { assert!(2 * WINDOW <= MpiService::SLOTS) };
        let is_copied = length <= FRAME_BYTES;
        let messages = total.div_ceil(length);
        let (mut started, mut sent, mut posted, mut received) = (0, 0, 0, 0);
        let mut free_sends: Vec<usize> = (WINDOW..2 * WINDOW).collect();
        let mut free_receives: Vec<usize> = (0..WINDOW).collect();
        let mut done: Vec<Completed> = Vec::new();
        let range = |message: usize| message * length..total.min((message + 1) * length);
        while sent < messages || received < messages {
            while posted < messages
                && let Some(slot) = free_receives.pop()
            {
                let memory = match is_copied {
                    true => &mut self.buffers[slot][..],
                    false => &mut self.incoming[range(posted)],
                };
                // SAFETY: the memory is kept until the slot is complete; after a failure it is leaked.
                unsafe { wire.recv(slot, memory, Some(self.partner), MessageTag::Measurement)? };
                posted += 1;
            }
            while started < messages
                && let Some(slot) = free_sends.pop()
            {
                let mut data = &self.outgoing[range(started)];
                if is_copied {
                    self.buffers[slot][..data.len()].copy_from_slice(data);
                    data = &self.buffers[slot][..data.len()];
                }
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
                    if is_copied {
                        let start = (received * length).min(total.saturating_sub(bytes));
                        self.incoming[start..start + bytes].copy_from_slice(&self.buffers[slot][..bytes]);
                    }
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
    fn messages_are_measured() {
        let mut wire = Loopback::default();
        let options = measure(&mut wire, 0, &AtomicBool::new(false)).expect("the loopback works");
        assert!(LENGTHS.contains(&options.bytes));
        let gave_up = AtomicBool::new(false);
        let mut measurement = MessageMeasurement::new(0, &gave_up);
        for (option, length) in LENGTHS.into_iter().chain([ZERO_COPY_BYTES]).enumerate() {
            measurement.outgoing.fill(option as u8 + 1);
            measurement.run(&mut wire, length, ROUND_BYTES).expect("the loopback works");
            // Messages that are copied may complete in another order.
            let filled = if length == ZERO_COPY_BYTES { ROUND_BYTES } else { length };
            assert!(measurement.incoming[..filled].iter().all(|byte| *byte == option as u8 + 1));
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
        unsafe fn recv(&mut self, _: usize, _: &mut [u8], _: Option<usize>, _: MessageTag) -> Result<(), Failure> {
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
