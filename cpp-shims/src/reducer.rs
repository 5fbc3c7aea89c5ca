//! Bodies of the bridge's reducer section.

use std::sync::Arc;

use smd_core::buffer::{Device, TensorView};
use smd_core::collectives::Request;
use smd_core::reducer::{self, ParamSpec};
use smd_core::session::{self, Session};
use smd_core::{Error, Result};

use crate::bridge as ffi;
use crate::calls::dtype;
use crate::guard::{Report, guard};

/// A reducer with a group of its own, so that its operations keep their order whatever else the script does.
pub struct Reducer {
    inner: Arc<reducer::Reducer>,
    session: Arc<Session>,
}

/// A slot that a tensor holds, or nothing.
pub struct SlotLease(Option<reducer::SlotLease>);

pub fn new_reducer(group: u64, params: &[ffi::Param], options: &ffi::ReducerOptions) -> Result<Box<Reducer>, Report> {
    guard(|| {
        let session = session::current("DistributedDataParallel")?;
        let params = params
            .iter()
            .map(|param| {
                Ok(ParamSpec { name: param.name.clone(), shape: param.shape.clone(), dtype: dtype(param.dtype)? })
            })
            .collect::<Result<Vec<_>>>()?;
        let options = reducer::Options {
            bucket_bytes: options.bucket_bytes,
            first_bucket_bytes: options.first_bucket_bytes,
            find_unused_parameters: options.find_unused_parameters,
            accumulation_steps: options.accumulation_steps,
        };
        let members = session.communicator(group)?.members().ranks.clone();
        let own = session.new_group(&members)?;
        match reducer::Reducer::new(Arc::clone(&own), params, options) {
            Ok(inner) => Ok(Box::new(Reducer { inner, session })),
            Err(error) => {
                // The reason counts; that the group cannot be removed either adds nothing.
                let _ = session.remove_group(own.id());
                Err(error)
            }
        }
    })
}

impl Drop for Reducer {
    fn drop(&mut self) {
        // The group is gone already after `shutdown()`.
        let _ = self.session.remove_group(self.inner.communicator().id());
    }
}

impl Reducer {
    pub fn set_sync(&self, sync: bool) {
        self.inner.set_sync(sync);
    }

    pub fn sync(&self) -> bool {
        self.inner.sync()
    }

    pub fn begin(&self) -> Result<bool, Report> {
        guard(|| self.inner.begin())
    }

    pub fn note_local(&self, param: usize) {
        self.inner.note_local(param);
    }

    pub fn slot_ptr(&self, param: usize) -> *mut u8 {
        self.inner.slot_ptr(param)
    }

    pub fn take_slot(&self, param: usize) -> Box<SlotLease> {
        Box::new(SlotLease(self.inner.take_slot(param)))
    }

    pub fn lend(&self, bytes: usize) -> Box<SlotLease> {
        Box::new(SlotLease(self.inner.lend(bytes)))
    }

    pub fn start_lending(&self) {
        self.inner.start_lending();
    }

    pub fn lent_elsewhere(&self, bytes: usize, ptr: *const u8) {
        self.inner.lent_elsewhere(bytes, ptr);
    }

    pub fn observe(&self, param: usize, ptr: *const u8) {
        self.inner.observe(param, ptr);
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn mark_ready(&self, param: usize, ptr: *mut u8, used: bool) -> Result<(), Report> {
        // SAFETY: the caller's promise.
        guard(|| unsafe { self.inner.mark_ready(param, ptr, used) })
    }

    pub fn tracks_unused(&self) -> bool {
        self.inner.options().find_unused_parameters
    }

    pub fn missing(&self) -> Vec<usize> {
        self.inner.missing()
    }

    pub fn finish(&self) -> Result<Vec<u8>, Report> {
        guard(|| {
            let used = self.inner.finish()?;
            Ok(used.map(|used| used.into_iter().map(u8::from).collect()).unwrap_or_default())
        })
    }

    pub fn abandon(&self, message: &str, more_follows: bool) {
        // Called from a destructor, which has nobody to tell; a panic closes the group, which the next call says.
        let _ = guard(|| {
            self.inner.abandon(message, more_follows);
            Ok(())
        });
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn broadcast(&self, data: &ffi::TensorView, root: usize) -> Result<(), Report> {
        guard(|| {
            if data.device != ffi::DeviceKind::Cpu {
                return Err(Error::Unsupported("a reducer works on CPU tensors".to_owned()));
            }
            // SAFETY: the caller's promise.
            let data = unsafe { TensorView::new(data.ptr, data.elems, dtype(data.dtype)?, Device::Cpu, data.stream) }?;
            self.inner.run(&Request::Broadcast { data, root })
        })
    }

    pub fn describe_plan(&self) -> String {
        reducer::plan::describe(&self.inner.plan(), self.inner.params())
    }
}

impl SlotLease {
    pub fn ptr(&self) -> *mut u8 {
        self.0.as_ref().map_or(std::ptr::null_mut(), reducer::SlotLease::ptr)
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn fill(&mut self, from: *const u8) {
        if let Some(lease) = &mut self.0 {
            // SAFETY: the caller's promise.
            unsafe { lease.fill(from) }
        }
    }

    pub fn zero(&mut self) {
        if let Some(lease) = &mut self.0 {
            lease.zero();
        }
    }
}
