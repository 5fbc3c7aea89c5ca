//! Implements the bridge's functions for gradients of graphs.

use std::sync::Arc;

use cxx::SharedPtr;
use smd_core::reducer::arrival::{self, Execution, ReadyGradient};
use smd_core::reducer::op_placement::Gradient;
use smd_core::reducer::spec::{self, ReducerSpec};
use smd_core::reducer::{self, ParamSpec};
use smd_core::session;
use smd_core::{Error, Result};

use crate::bridge as ffi;
use crate::calls::tensor;
use crate::guard::{Report, guard, guard_or};
use crate::reducer::SlotLease;

/// A specification; its reducer belongs to the session that runs when gradients arrive.
pub struct GradientPlan {
    number: usize,
    spec: Arc<ReducerSpec>,
}

// SAFETY: gradient_owner.h requires that all functions may be called on any thread.
unsafe impl Send for ffi::GradientOwner {}
// SAFETY: as above, also concurrently.
unsafe impl Sync for ffi::GradientOwner {}

struct GradientOwner(SharedPtr<ffi::GradientOwner>);

impl arrival::GradientOwner for GradientOwner {
    fn reduced(&self, position: usize, result: Result<Option<reducer::SlotLease>>) {
        let Some(owner) = self.0.as_ref() else { return };
        match result {
            Ok(lease) => owner.reduced(position, "", Box::new(SlotLease(lease))),
            Err(error) => owner.reduced(position, &error.report(), Box::new(SlotLease(None))),
        }
    }

    fn allocate(&self, position: usize, bytes: usize) -> Result<*mut u8> {
        let owner = self.0.as_ref().ok_or_else(|| Error::Internal("a shim passed no owner".to_owned()))?;
        owner.allocate(position, bytes).map_err(|error| Error::InvalidArgument(error.what().to_owned()))
    }

    fn release(&self) {
        if let Some(owner) = self.0.as_ref() {
            owner.release();
        }
    }
}

pub fn find_plan(number: i64) -> Result<Box<GradientPlan>, Report> {
    guard(|| {
        let number = usize::try_from(number)
            .map_err(|_| Error::InvalidArgument(format!("{number} is not the number of a plan of gradients")))?;
        Ok(Box::new(GradientPlan { number, spec: spec::get(number)? }))
    })
}

pub fn place_for_op(bytes: usize, op: usize) -> Box<SlotLease> {
    guard_or(Box::new(SlotLease(None)), || {
        let session = session::current("the reduction of gradients").ok();
        Box::new(SlotLease(session.and_then(|session| session.place(bytes, op))))
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn placed_elsewhere_for_op(bytes: usize, op: usize, ptr: *const u8) {
    guard_or((), || {
        if let Ok(session) = session::current("the reduction of gradients") {
            session.placed_elsewhere(bytes, op, ptr);
        }
    });
}

impl GradientPlan {
    pub fn share(&self) -> Result<Box<GradientPlan>, Report> {
        guard(|| Ok(Box::new(GradientPlan { number: self.number, spec: Arc::clone(&self.spec) })))
    }

    pub fn param_bytes(&self, param: usize) -> Result<usize, Report> {
        guard(|| Ok(self.spec(param)?.bytes()))
    }

    pub fn param_name(&self, param: usize) -> String {
        guard_or(String::new(), || self.spec(param).map(|spec| spec.name.clone()).unwrap_or_default())
    }

    /// Checks an index of C++ (BRG-4).
    fn spec(&self, param: usize) -> Result<&ParamSpec> {
        let params = &self.spec.description.params;
        params.get(param).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "plan {} has {} parameters, so there is no parameter {param}",
                self.number,
                params.len()
            ))
        })
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn take_slot(&self, param: usize, ptr: *const u8, learn: bool) -> Box<SlotLease> {
        guard_or(Box::new(SlotLease(None)), || {
            let session = session::current("the reduction of gradients").ok();
            // Without a slot, the gradient stays in place, and `arrive` reports an invalid parameter.
            let bytes = self.spec(param).map(ParamSpec::bytes).ok();
            let lease = session
                .zip(bytes)
                .and_then(|(session, bytes)| session.take_slot(self.gradient(param), bytes, ptr, learn));
            Box::new(SlotLease(lease))
        })
    }

    pub fn placement_was_unused(&self, param: usize) {
        guard_or((), || {
            if let (Ok(session), Ok(spec)) = (session::current("the reduction of gradients"), self.spec(param)) {
                session.placement_was_unused(self.gradient(param), spec.bytes());
            }
        });
    }

    fn gradient(&self, param: usize) -> Gradient {
        Gradient { plan: self.number, param }
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn arrive(
        &self,
        param: usize,
        data: &ffi::TensorView,
        lease: Box<SlotLease>,
        execution: &ffi::Execution,
        owner: SharedPtr<ffi::GradientOwner>,
        position: usize,
    ) -> Result<(), Report> {
        guard(|| {
            self.spec(param)?;
            let owner = Arc::new(GradientOwner(owner));
            // SAFETY: the caller's promise.
            let data = unsafe { tensor(data) }?;
            let arrival = ReadyGradient { param, data, lease: lease.0, execution: execution.into(), owner, position };
            // SAFETY: as above.
            unsafe { session::current("the reduction of gradients")?.arrive(self.number, arrival) }
        })
    }

    pub fn ended(&self, execution: &ffi::Execution) {
        // Called while an execution ends, where an error cannot be reported.
        guard_or((), || {
            let session = session::current("the reduction of gradients").ok();
            if let Some(arrivals) = session.and_then(|session| session.find_arrivals(self.number)) {
                arrivals.ended(execution.into());
            }
        });
    }
}

impl From<&ffi::Execution> for Execution {
    fn from(execution: &ffi::Execution) -> Self {
        Self { step: execution.step, frame: execution.frame, iteration: execution.iteration }
    }
}
