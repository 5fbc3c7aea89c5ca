//! Implements the bridge's functions for products that are divided into chunks.

use smd_core::chunk_trial::{self, ChunkTurn};
use smd_core::device::{Context, Stream};

use crate::bridge as ffi;
use crate::guard::{Report, guard, guard_or};

/// A trial of numbers of chunks.
pub struct ChunkTrial(chunk_trial::ChunkTrial);

pub fn new_chunk_trial() -> Result<Box<ChunkTrial>, Report> {
    guard(|| Ok(Box::new(ChunkTrial(chunk_trial::ChunkTrial::default()))))
}

impl ChunkTrial {
    pub fn turn(&mut self, step: u64) -> Result<ffi::ChunkTurn, Report> {
        guard(|| {
            let (chunks, is_measured) = match self.0.turn(step) {
                ChunkTurn::Run(chunks) => (chunks.get(), false),
                ChunkTurn::Measure(chunks) => (chunks.get(), true),
                ChunkTurn::Choose => (0, false),
            };
            Ok(ffi::ChunkTurn { chunks, is_measured })
        })
    }

    pub fn chosen(&self) -> u32 {
        guard_or(1, || self.0.chosen())
    }

    pub fn add(&mut self, chunks: u32, seconds: f32) {
        guard_or((), || self.0.add(chunks, seconds));
    }

    pub fn medians(&self) -> Result<Vec<f32>, Report> {
        guard(|| Ok(self.0.medians()))
    }

    pub fn choose(&mut self, sums: &[f32]) {
        guard_or((), || self.0.choose(sums));
    }
}

pub fn is_capturing(device: u16, stream: usize) -> Result<bool, Report> {
    guard(|| {
        // SAFETY: the caller's stream lives during the call, which queues nothing.
        let stream = unsafe { Stream::borrowed(Context::primary(device)?, stream) };
        stream.is_capturing()
    })
}
