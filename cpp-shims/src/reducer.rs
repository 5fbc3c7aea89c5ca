//! Implements the bridge's functions for reducers.

use std::sync::Arc;

use smd_core::buffer::DType;
use smd_core::device::pack::PackedPiece;
use smd_core::reducer::ballot::{self, Readiness, VoteResult};
use smd_core::reducer::{self, BucketReduction, DeviceBucket, ParamSpec};
use smd_core::session::{self, Session};
use smd_core::{Error, Result};

use crate::bridge as ffi;
use crate::calls::{dtype, tensor};
use crate::guard::{Report, guard, guard_or};

/// A reducer with a group of its own, so that other operations of the script cannot change the order of its
/// operations.
pub struct Reducer {
    inner: Arc<reducer::Reducer>,
    session: Arc<Session>,
}

/// The lease of a slot, or none.
pub struct SlotLease(pub(crate) Option<reducer::SlotLease>);

/// The memory of all slots.
pub struct Arena(Option<Arc<reducer::Arena>>);

/// A vote.
pub struct Ballot(ballot::Ballot);

/// A reducer that is being created.
pub struct PendingReducer(session::pending_reducer::PendingReducer);

pub fn cast_ballot(group: u64, name: &str, what: &str, readiness: ffi::Readiness) -> Result<Box<Ballot>, Report> {
    guard(|| {
        let session = session::current("DistributedOptimizer")?;
        let readiness = match readiness {
            ffi::Readiness::NoReducer => Readiness::NoReducer,
            ffi::Readiness::Creating => Readiness::Creating,
            _ => Readiness::ByName,
        };
        let (negotiator, group) = (session.negotiator(group)?, session.communicator(group)?);
        Ok(Box::new(Ballot(ballot::Ballot::cast(&negotiator, &group, name, what, readiness, |_| (), |_| ())?)))
    })
}

impl Ballot {
    pub fn result(&self) -> Result<ffi::VoteResult, Report> {
        guard(|| {
            Ok(match self.0.result()? {
                VoteResult::Planned => ffi::VoteResult::Planned,
                VoteResult::ByName => ffi::VoteResult::ByName,
                VoteResult::CreateReducers => ffi::VoteResult::CreateReducers,
                VoteResult::DropReducers => ffi::VoteResult::DropReducers,
            })
        })
    }

    pub fn is_decided(&self) -> bool {
        // `result` returns the error.
        guard_or(true, || self.0.is_decided())
    }

    pub fn token(&self) -> Result<u64, Report> {
        guard(|| Ok(self.0.token()))
    }
}

pub fn create_reducer_async(
    token: u64,
    ranks: &[usize],
    params: &[ffi::Param],
    options: &ffi::ReducerOptions,
    order: &[usize],
) -> Result<Box<PendingReducer>, Report> {
    guard(|| {
        let session = session::current("DistributedOptimizer")?;
        let (params, options) = (read_params(params)?, read_options(options)?);
        Ok(Box::new(PendingReducer(session.create_reducer_async(
            token,
            ranks.to_vec(),
            params,
            options,
            order.to_vec(),
        )?)))
    })
}

impl PendingReducer {
    pub fn is_done(&self) -> bool {
        // `take` returns the error.
        guard_or(true, || self.0.is_done())
    }

    pub fn take(&self) -> Result<Box<Reducer>, Report> {
        guard(|| Ok(Box::new(Reducer { inner: self.0.take()?, session: Arc::clone(self.0.session()) })))
    }
}

pub fn new_reducer(
    ranks: &[usize],
    params: &[ffi::Param],
    options: &ffi::ReducerOptions,
) -> Result<Box<Reducer>, Report> {
    guard(|| {
        let session = session::current("DistributedDataParallel")?;
        let params = read_params(params)?;
        let all = session.communicator(0)?.members().ranks.clone();
        let own = session.new_group(if ranks.is_empty() { &all } else { ranks })?;
        match read_options(options).and_then(|options| reducer::Reducer::new(Arc::clone(&own), params, options)) {
            Ok(inner) => Ok(Box::new(Reducer { inner, session })),
            Err(error) => {
                // The first error is returned; an error of the clean-up is ignored.
                let _ = session.remove_group(own.id());
                Err(error)
            }
        }
    })
}

fn read_params(params: &[ffi::Param]) -> Result<Vec<ParamSpec>> {
    let read = |param: &ffi::Param| {
        Ok(ParamSpec {
            name: param.name.clone(),
            shape: param.shape.clone(),
            dtype: dtype(param.dtype)?,
            sparse: param.sparse,
            delayed: param.delayed,
        })
    };
    params.iter().map(read).collect()
}

fn read_options(options: &ffi::ReducerOptions) -> Result<reducer::ReducerOptions> {
    Ok(reducer::ReducerOptions {
        bucket_bytes: options.bucket_bytes.clone(),
        find_unused_parameters: options.find_unused_parameters,
        accumulation_steps: options.accumulation_steps,
        static_graph: options.static_graph,
        on_device: options.on_device,
        reduction: match options.reduction {
            ffi::Reduction::Average => BucketReduction::Average,
            ffi::Reduction::Float16 => BucketReduction::Compressed(DType::Float16),
            ffi::Reduction::BFloat16 => BucketReduction::Compressed(DType::BFloat16),
            ffi::Reduction::ByCaller => BucketReduction::ByCaller,
            // An enum of C++ may have any value.
            unknown => return Err(Error::Internal(format!("there is no reduction {}", unknown.repr))),
        },
        sum: options.sum,
        // Used for gradients of graphs only.
        absent: Vec::new(),
    })
}

impl Drop for Reducer {
    fn drop(&mut self) {
        guard_or((), || {
            // After `shutdown()` the group is gone already.
            let _ = self.session.remove_group(self.inner.communicator().id());
        });
    }
}

impl Reducer {
    pub fn configure(&self, options: &ffi::ReducerOptions) -> Result<(), Report> {
        guard(|| self.inner.configure(read_options(options)?))
    }

    pub fn group(&self) -> Result<u64, Report> {
        guard(|| Ok(self.inner.communicator().id()))
    }

    /// Checks an index of C++ (BRG-4).
    fn check(&self, param: usize) -> Result<usize> {
        let count = self.inner.params().len();
        if param < count {
            return Ok(param);
        }
        Err(Error::InvalidArgument(format!("the reducer has {count} parameters, so there is no parameter {param}")))
    }

    pub fn await_step(&self) -> Result<(), Report> {
        guard(|| self.inner.await_step())
    }

    pub fn begin(&self, sync: bool) -> Result<bool, Report> {
        guard(|| self.inner.begin(sync))
    }

    pub fn begin_by_vote(&self, group: u64, name: &str, what: &str) -> Result<Box<Ballot>, Report> {
        guard(|| {
            let (negotiator, group) = (self.session.negotiator(group)?, self.session.communicator(group)?);
            Ok(Box::new(Ballot(self.inner.begin_by_vote(&negotiator, &group, name, what)?)))
        })
    }

    pub fn is_current(&self) -> bool {
        guard_or(false, || session::current("a reducer").is_ok_and(|session| Arc::ptr_eq(&session, &self.session)))
    }

    pub fn note_local(&self, param: usize) -> Result<(), Report> {
        guard(|| {
            self.inner.note_local(self.check(param)?);
            Ok(())
        })
    }

    pub fn accumulated(&self, param: usize) -> Result<bool, Report> {
        guard(|| self.inner.accumulated(self.check(param)?))
    }

    pub fn is_slot(&self, param: usize, ptr: *const u8) -> Result<bool, Report> {
        guard(|| Ok(self.inner.is_slot(self.check(param)?, ptr)))
    }

    pub fn take_slot(&self, param: usize) -> Result<Box<SlotLease>, Report> {
        guard(|| Ok(Box::new(SlotLease(self.inner.take_slot(self.check(param)?)))))
    }

    pub fn place(&self, bytes: usize) -> Box<SlotLease> {
        guard_or(Box::new(SlotLease(None)), || Box::new(SlotLease(self.inner.place(bytes))))
    }

    pub fn start_placement(&self) {
        guard_or((), || self.inner.start_placement());
    }

    pub fn placed_elsewhere(&self, bytes: usize, ptr: *const u8) {
        guard_or((), || self.inner.placed_elsewhere(bytes, ptr));
    }

    pub fn observe(&self, param: usize, ptr: *const u8) -> Result<(), Report> {
        guard(|| {
            self.inner.observe(self.check(param)?, ptr);
            Ok(())
        })
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn mark_ready(&self, param: usize, ptr: *mut u8, used: bool) -> Result<ffi::Buckets, Report> {
        guard(|| {
            let param = self.check(param)?;
            // SAFETY: the caller's promise.
            let range = unsafe { self.inner.mark_ready(param, ptr, used) }?;
            Ok(ffi::Buckets { begin: range.start, end: range.end })
        })
    }

    pub fn num_buckets(&self) -> Result<usize, Report> {
        guard(|| Ok(self.inner.plan().buckets().len()))
    }

    pub fn bucket(&self, index: usize) -> Result<ffi::BucketDescription, Report> {
        guard(|| {
            let plan = self.inner.plan();
            // Checks an index of C++ (BRG-4).
            let bucket = plan.buckets().get(index).ok_or_else(|| no_bucket(index, plan.buckets().len()))?;
            let size = bucket.dtype.size();
            Ok(ffi::BucketDescription {
                offset_bytes: bucket.offset_bytes,
                elems: bucket.elems(),
                dtype: bucket.dtype.into(),
                wire: self.inner.options().wire_dtype(bucket.dtype).into(),
                params: bucket.slots.iter().map(|slot| slot.param).collect(),
                starts: bucket.slots.iter().map(|slot| (slot.offset_bytes - bucket.offset_bytes) / size).collect(),
                in_place: bucket.slots.iter().map(|slot| slot.in_place).collect(),
                num_buckets: plan.buckets().len(),
            })
        })
    }

    pub fn arena(&self) -> Result<Box<Arena>, Report> {
        guard(|| Ok(Box::new(Arena(self.inner.arena()))))
    }

    pub fn plan_number(&self) -> Result<u64, Report> {
        guard(|| Ok(self.inner.plan_number()))
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn launch(&self, index: usize, bucket: &ffi::DeviceBucket, communication: usize) -> Result<(), Report> {
        guard(|| {
            let num_buckets = self.inner.plan().buckets().len();
            if index >= num_buckets {
                return Err(no_bucket(index, num_buckets));
            }
            let pieces: Vec<PackedPiece> = (bucket.pieces.iter())
                .map(|piece| PackedPiece { tensor: piece.ptr as u64, offset: piece.start, elems: piece.elems })
                .collect();
            // SAFETY: the caller's promise.
            let view = |view: &ffi::TensorView| unsafe { tensor(view) };
            let flat = bucket.flat.first().map(view).transpose()?;
            let wire = bucket.wire.first().map(view).transpose()?;
            let in_place = bucket.in_place.iter().map(view).collect::<Result<Vec<_>>>()?;
            let bucket = DeviceBucket { pieces: &pieces, flat, wire, in_place: &in_place, stream: bucket.stream };
            // SAFETY: as above.
            unsafe { self.inner.launch(index, &bucket, communication) }
        })
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn follow(&self, stream: usize) -> Result<(), Report> {
        // SAFETY: the caller's promise.
        guard(|| unsafe { self.inner.follow(stream) })
    }

    pub fn await_device(&self) -> Result<(), Report> {
        guard(|| self.inner.await_device())
    }

    pub fn reduced_by_caller(&self) -> Result<(), Report> {
        guard(|| {
            self.inner.reduced_by_caller();
            Ok(())
        })
    }

    pub fn missing(&self) -> Result<Vec<usize>, Report> {
        guard(|| Ok(self.inner.missing()))
    }

    pub fn unused_parameters(&self, frozen: &[usize]) -> Result<Vec<usize>, Report> {
        guard(|| {
            frozen.iter().try_for_each(|param| self.check(*param).map(drop))?;
            self.inner.unused_parameters(frozen)
        })
    }

    pub fn finish(&self) -> Result<Vec<u8>, Report> {
        guard(|| {
            let used = self.inner.finish()?;
            Ok(used.map(|used| used.into_iter().map(u8::from).collect()).unwrap_or_default())
        })
    }

    pub fn abandon(&self, message: &str, more_follows: bool) {
        // Called from a destructor, where an error cannot be reported. A panic closes the group, and its next call
        // returns that error.
        guard_or((), || self.inner.abandon(message, more_follows));
    }

    pub fn record(&self) -> Result<ffi::StepRecord, Report> {
        guard(|| {
            let reducer::Record { order, communication_start, communication_end, rebuilt, unused_bytes } =
                self.inner.record();
            Ok(ffi::StepRecord { order, communication_start, communication_end, rebuilt, unused_bytes })
        })
    }

    pub fn describe_plan(&self) -> Result<String, Report> {
        guard(|| Ok(reducer::plan::describe(&self.inner.plan(), self.inner.params())))
    }
}

fn no_bucket(index: usize, count: usize) -> Error {
    Error::InvalidArgument(format!("the plan has {count} buckets, so there is no bucket {index}"))
}

impl SlotLease {
    pub fn ptr(&self) -> *mut u8 {
        guard_or(std::ptr::null_mut(), || self.0.as_ref().map_or(std::ptr::null_mut(), reducer::SlotLease::ptr))
    }

    /// # Safety
    /// See the bridge.
    pub unsafe fn fill(&mut self, from: *const u8) -> Result<(), Report> {
        guard(|| {
            if let Some(lease) = &mut self.0 {
                // SAFETY: the caller's promise.
                unsafe { lease.fill(from) }
            }
            Ok(())
        })
    }

    pub fn zero(&mut self) -> Result<(), Report> {
        guard(|| {
            if let Some(lease) = &mut self.0 {
                lease.zero();
            }
            Ok(())
        })
    }
}

impl Arena {
    pub fn at(&self, offset_bytes: usize) -> Result<*mut u8, Report> {
        guard(|| Ok(self.0.as_ref().map_or(std::ptr::null_mut(), |arena| arena.at(offset_bytes))))
    }
}

#[cfg(test)]
mod tests {
    use smd_core::session::InitOptions;

    use super::*;

    #[test]
    fn a_bucket_that_the_plan_lacks_is_an_error() {
        session::init(InitOptions { variables: Some(Default::default()), ..InitOptions::default() })
            .expect("a job of one");
        let param =
            ffi::Param { name: "p".into(), shape: vec![4], dtype: ffi::DType::Float32, sparse: false, delayed: false };
        let options = ffi::ReducerOptions {
            bucket_bytes: vec![512],
            find_unused_parameters: false,
            accumulation_steps: 1,
            static_graph: false,
            reduction: ffi::Reduction::Average,
            sum: false,
            on_device: false,
        };
        let reducer = new_reducer(&[], &[param], &options).expect("it can be made");
        assert_eq!(reducer.bucket(0).expect("it is there").num_buckets, 1);
        let report = reducer.bucket(1).expect_err("it is not there").to_string();
        assert_eq!(report, "the plan has 1 buckets, so there is no bucket 1 [smd:invalid_argument]");
        drop(reducer);
        session::shutdown();
    }
}
