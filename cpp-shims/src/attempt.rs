//! Bodies of the bridge's section on steps of a pipeline.

use smd_core::session::attempt;

use crate::guard::{Report, guard, guard_or};

/// A step that has begun.
pub struct Attempt(attempt::Attempt);

pub fn begin_step() -> Result<Box<Attempt>, Report> {
    guard(|| Ok(Box::new(Attempt(attempt::Attempt::begin()?))))
}

impl Attempt {
    pub fn end(&self) {
        guard_or((), || self.0.end());
    }

    pub fn fail(&self) {
        guard_or((), || self.0.fail());
    }
}
