//! Implements the bridge's functions for steps of a pipeline.

use smd_core::session::step_scope;

use crate::guard::{Report, guard, guard_or};

/// The scope of a running step.
pub struct StepScope(step_scope::StepScope);

pub fn begin_step() -> Result<Box<StepScope>, Report> {
    guard(|| Ok(Box::new(StepScope(step_scope::StepScope::begin()?))))
}

impl StepScope {
    pub fn end(&self) {
        guard_or((), || self.0.end());
    }

    pub fn fail(&self) {
        guard_or((), || self.0.fail());
    }
}
