//! Implements the bridge's functions for operations: converts C++'s description to the core's request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cxx::UniquePtr;
use parking_lot::Mutex;
use smd_core::buffer::{DType, Device, ReduceOp, TensorView};
use smd_core::collectives::{Communicator, Done, MakeOutputs, Overlap, Request};
use smd_core::device::{add, memory};
use smd_core::metrics;
use smd_core::negotiation::{self, Factors, Gradients, Name, NamedRequest};
use smd_core::session;
use smd_core::world::monitor;
use smd_core::{Error, Result};

use crate::bridge as ffi;
use crate::guard::{Report, guard, guard_or};

// SAFETY: completion.h requires that `done` and the destructor may run on any thread.
unsafe impl Send for ffi::Completion {}

pub fn rank() -> Result<usize, Report> {
    guard(|| Ok(session::current("rank")?.rank()))
}

pub fn size() -> Result<usize, Report> {
    guard(|| Ok(session::current("size")?.size()))
}

pub fn session_id() -> Result<u64, Report> {
    guard(|| Ok(session::current("session_id")?.id()))
}

pub fn group_rank(group: u64) -> Result<usize, Report> {
    guard(|| Ok(session::current("group_rank")?.communicator(group)?.members().me))
}

pub fn group_ranks(group: u64) -> Result<Vec<usize>, Report> {
    guard(|| Ok(session::current("group_ranks")?.communicator(group)?.members().ranks.to_vec()))
}

pub fn group_size(group: u64) -> Result<usize, Report> {
    guard(|| Ok(session::current("group_size")?.communicator(group)?.members().size()))
}

/// # Safety
/// See the bridge.
pub unsafe fn run(call: &ffi::Call) -> Result<(), Report> {
    guard(|| {
        let communicator = communicator(call)?;
        // SAFETY: the caller's promise.
        let request = unsafe { request(call, None) }?;
        let _exposed = metrics::exposed();
        communicator.run_within(&request, timeout(call))
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn run_coalesced(calls: &[ffi::Call]) -> Result<(), Report> {
    guard(|| {
        let Some(first) = calls.first() else { return Ok(()) };
        if let Some(other) = calls.iter().find(|call| call.group != first.group) {
            let (group, other) = (first.group, other.group);
            return Err(Error::Internal(format!("a batch mixes operations of groups {group} and {other}")));
        }
        // SAFETY: the caller's promise.
        let requests = calls.iter().map(|call| unsafe { request(call, None) }).collect::<Result<Vec<_>>>()?;
        communicator(first)?.run_on_device(&requests, timeout(first), Overlap::Unknown)
    })
}

pub fn note_exposed(nanoseconds: u64) {
    guard_or((), || metrics::note_exposed(Duration::from_nanos(nanoseconds)));
}

pub fn note_fallback(reason: &str) {
    guard_or((), || {
        let is_known = metrics::note_fallback_named(reason);
        debug_assert!(is_known, "there is no counter of the fallback `{reason}`");
    });
}

/// # Safety
/// See the bridge.
pub unsafe fn copy(from: &ffi::TensorView, to: &ffi::TensorView) -> Result<(), Report> {
    guard(|| {
        // SAFETY: the caller's promise, for this and the next line.
        let from = unsafe { tensor(from) }?;
        // SAFETY: as above.
        let to = unsafe { tensor(to) }?;
        // SAFETY: as above.
        unsafe { memory::copy_tensor(&from, &to) }
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn clear(view: &ffi::TensorView) -> Result<(), Report> {
    guard(|| {
        // SAFETY: the caller's promise.
        let view = unsafe { tensor(view) }?;
        // SAFETY: as above.
        unsafe { memory::clear_tensor(&view) }
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn accumulate(total: &ffi::TensorView, addend: &ffi::TensorView) -> Result<(), Report> {
    guard(|| {
        // SAFETY: the caller's promise, for this and the next line.
        let total = unsafe { tensor(total) }?;
        // SAFETY: as above.
        let addend = unsafe { tensor(addend) }?;
        // SAFETY: as above.
        unsafe { add::accumulate(&total, &addend) }
    })
}

pub fn check_device(group: u64, during: &str) -> Result<(), Report> {
    guard(|| session::current("an operation on CUDA tensors")?.communicator(group)?.check_device(during))
}

/// # Safety
/// See the bridge.
pub unsafe fn submit(call: &ffi::Call, done: UniquePtr<ffi::Completion>) -> Result<(), Report> {
    guard(|| {
        let communicator = communicator(call)?;
        let completion = Shared::new(done);
        // SAFETY: the caller's promise.
        let request = unsafe { request(call, Some(&completion)) }?;
        communicator.submit_within(request, timeout(call), completing(completion));
        Ok(())
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn submit_named(
    name: &str,
    call: &ffi::Call,
    shape: &[u64],
    blocking: bool,
    done: UniquePtr<ffi::Completion>,
) -> Result<(), Report> {
    guard(|| {
        let negotiator = session::current(self::name(call.collective))?.negotiator(call.group)?;
        let completion = Shared::new(done);
        // SAFETY: the caller's promise.
        let request = unsafe { request(call, Some(&completion)) }?;
        negotiator.submit(name, Some(shape), request, blocking, completing(completion));
        Ok(())
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn submit_group_named(
    named: &ffi::NamedCall,
    calls: &[ffi::Call],
    done: UniquePtr<ffi::Completion>,
) -> Result<Box<NamedHandle>, Report> {
    guard(|| {
        let first = calls.first().ok_or_else(|| Error::Internal("a shim passed an empty group".into()))?;
        let negotiator = session::current(self::name(first.collective))?.negotiator(first.group)?;
        let completion = Shared::new(done);
        let mut dims = named.dims;
        let mut tensors = Vec::with_capacity(calls.len());
        for (call, num_dims) in calls.iter().zip(named.num_dims) {
            let (shape, rest) = dims
                .split_at_checked(*num_dims)
                .ok_or_else(|| Error::Internal("a shim passed too few dimensions".into()))?;
            dims = rest;
            // SAFETY: the caller's promise.
            tensors.push((unsafe { request(call, Some(&completion)) }?, Some(shape.to_vec())));
        }
        let full = match named.kind {
            "" => named.name.to_owned(),
            kind => format!("{kind}.{}", named.name),
        };
        let name = match (named.name, named.shared) {
            ("", false) => Name::Next(named.kind.to_owned()),
            (_, false) => Name::Given(full),
            (_, true) => Name::Shared(full),
        };
        let factors = Factors { before: named.prescale, after: named.postscale, by_caller: named.is_scaled };
        let handle = negotiator
            .request(NamedRequest { name, tensors, factors, blocking: named.blocking }, || completing(completion))?;
        Ok(Box::new(NamedHandle(handle)))
    })
}

pub fn compare_gradients(
    group: u64,
    name: &str,
    gradients: &ffi::StepGradients,
    blocking: bool,
    done: UniquePtr<ffi::Completion>,
) -> Result<Box<NamedHandle>, Report> {
    guard(|| {
        let session = session::current("a comparison of gradients")?;
        session.replicas().begin_step(name);
        let negotiator = session.negotiator(group)?;
        let ffi::StepGradients { names, numbers, is_last } = *gradients;
        let completion = Shared::new(done);
        let gradients = Gradients { names, numbers, is_last };
        let name = Name::Shared(name.to_owned());
        Ok(Box::new(NamedHandle(negotiator.compare_gradients(name, &gradients, blocking, || completing(completion))?)))
    })
}

/// The result of a call by name, kept until it is waited for.
pub struct NamedHandle(negotiation::NamedHandle);

impl NamedHandle {
    pub fn drive(&self) -> bool {
        // A panic ends the negotiation, and the operation gets its error.
        guard_or(false, || self.0.drive())
    }
}

pub fn join_named(group: u64, named: i64, current: i64, done: UniquePtr<ffi::Completion>) -> Result<(), Report> {
    guard(|| {
        let device = |number: i64| u16::try_from(number).ok();
        let negotiator = session::current("join")?.negotiator(group)?;
        negotiator.join(device(named), device(current), completing(Shared::new(done)));
        Ok(())
    })
}

pub fn process_set_group(process_set: i64) -> Result<u64, Report> {
    guard(|| {
        let call = "a collective of a process set";
        session::current(call)?.process_set(number(process_set)?, call)
    })
}

pub fn ranks_and_sizes() -> Result<ffi::RanksAndSizes, Report> {
    guard(|| {
        let place = session::current("rank")?.ranks_and_sizes("rank")?;
        let ((rank, size), (local_rank, local_size)) = (place.world, place.local);
        Ok(ffi::RanksAndSizes { rank, size, local_rank, local_size })
    })
}

pub fn process_set_ranks(process_set: i64) -> Result<Vec<usize>, Report> {
    guard(|| {
        let number = number(process_set)?;
        let sets = session::current("process_set_ranks")?.process_sets()?;
        let found = sets.into_iter().find(|(id, _)| *id == number).map(|(_, ranks)| ranks);
        found.ok_or_else(|| unknown(process_set))
    })
}

pub fn process_set_root(process_set: i64, rank: i64) -> Result<usize, Report> {
    guard(|| session::current("broadcast")?.position_in_process_set(number(process_set)?, rank, "broadcast"))
}

fn number(process_set: i64) -> Result<u32> {
    u32::try_from(process_set).map_err(|_| unknown(process_set))
}

fn unknown(process_set: i64) -> Error {
    Error::InvalidArgument(format!("process set {process_set} does not exist, or has not been registered"))
}

/// A completion whose outputs may be requested before it is called.
struct Shared(Mutex<UniquePtr<ffi::Completion>>);

impl Shared {
    fn new(completion: UniquePtr<ffi::Completion>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(completion)))
    }

    /// The lock is released while C++ runs.
    fn take(&self) -> UniquePtr<ffi::Completion> {
        std::mem::replace(&mut *self.0.lock(), UniquePtr::null())
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Completion")
    }
}

impl MakeOutputs for Shared {
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>> {
        let mut outputs = Vec::new();
        let mut completion = self.take();
        let pinned = completion.as_mut().ok_or_else(|| Error::Internal("a shim passed no completion".into()))?;
        let made = pinned.make_outputs(rows, &mut outputs);
        *self.0.lock() = completion;
        made.map_err(|error| Error::InvalidArgument(error.what().to_owned()))?;
        // SAFETY: completion.h requires that they are valid until the completion is called.
        outputs.iter().map(|view| unsafe { tensor(view) }).collect()
    }
}

/// The callback that the core calls when an operation has ended.
fn completing(completion: Arc<Shared>) -> Done {
    let pending = Pending(Some(move |error: &str, source: i64| {
        if let Some(done) = completion.take().as_mut() {
            done.done(error, source);
        }
    }));
    Box::new(move |result| pending.complete(result))
}

/// # Safety
/// See the bridge.
pub unsafe fn run_batch(calls: &[ffi::Call]) -> Result<(), Report> {
    guard(|| {
        // SAFETY: the caller's promise.
        let (communicator, requests, timeout) = unsafe { batch(calls) }?;
        let _exposed = metrics::exposed();
        communicator.run_batch(&requests, timeout)
    })
}

/// # Safety
/// See the bridge.
pub unsafe fn submit_batch(calls: &[ffi::Call], done: UniquePtr<ffi::Completion>) -> Result<(), Report> {
    guard(|| {
        // SAFETY: the caller's promise.
        let (communicator, requests, timeout) = unsafe { batch(calls) }?;
        communicator.submit_batch(requests, timeout, completing(Shared::new(done)));
        Ok(())
    })
}

/// # Safety
/// As [`request`].
unsafe fn batch(calls: &[ffi::Call]) -> Result<(Arc<Communicator>, Vec<Request>, Option<Duration>)> {
    let first = calls.first().ok_or_else(|| Error::Internal("a shim passed an empty batch".into()))?;
    if let Some(other) = calls.iter().find(|call| call.group != first.group) {
        return Err(Error::Internal(format!("a shim passed a batch over groups {} and {}", first.group, other.group)));
    }
    // SAFETY: the caller's promise.
    let requests = calls.iter().map(|call| unsafe { request(call, None) }).collect::<Result<_>>()?;
    Ok((communicator(first)?, requests, timeout(first)))
}

pub fn fail_next(group: u64, message: &str) -> Result<(), Report> {
    guard(|| {
        let communicator = session::current("fail_next")?.communicator(group)?;
        // A rank that failed has its own error already.
        communicator.fail_next(message, Box::new(|_| {}));
        Ok(())
    })
}

pub fn raise_on_return() -> bool {
    guard_or(false, monitor::raise_on_return)
}

pub fn monitored_barrier(group: u64, timeout_ms: u64, all: bool) -> Result<(), Report> {
    guard(|| {
        let communicator = session::current("monitored_barrier")?.communicator(group)?;
        communicator.monitored_barrier(Some(Duration::from_millis(timeout_ms)), all)
    })
}

pub fn check_interrupt(during: &str) -> Result<(), Report> {
    guard(|| match monitor::interrupt_pending() {
        true => Err(Error::Interrupted { during: during.to_owned() }),
        false => Ok(()),
    })
}

/// A completion that has not been called. Dropping it calls it with an error, so that no caller waits for an
/// operation that the core dropped (BRG-3).
struct Pending<F: FnOnce(&str, i64)>(Option<F>);

impl<F: FnOnce(&str, i64)> Pending<F> {
    fn complete(mut self, result: Result<Option<usize>>) {
        match result {
            Ok(source) => self.call("", source),
            Err(error) => self.call(&error.report(), None),
        }
    }

    fn call(&mut self, error: &str, source: Option<usize>) {
        if let Some(done) = self.0.take() {
            done(error, source.and_then(|source| i64::try_from(source).ok()).unwrap_or(-1));
        }
    }
}

impl<F: FnOnce(&str, i64)> Drop for Pending<F> {
    fn drop(&mut self) {
        self.call(&Error::Internal("an operation was dropped before it completed".into()).report(), None);
    }
}

fn timeout(call: &ffi::Call) -> Option<Duration> {
    (call.timeout_ms > 0).then(|| Duration::from_millis(call.timeout_ms))
}

fn communicator(call: &ffi::Call) -> Result<Arc<Communicator>> {
    session::current(name(call.collective))?.communicator(call.group)
}

/// The operation's name in errors.
fn name(collective: ffi::Collective) -> &'static str {
    match collective {
        ffi::Collective::AllReduce => "all_reduce",
        ffi::Collective::Reduce => "reduce",
        ffi::Collective::Broadcast => "broadcast",
        ffi::Collective::AllGather | ffi::Collective::AllGatherRows => "all_gather",
        ffi::Collective::Gather => "gather",
        ffi::Collective::Scatter => "scatter",
        ffi::Collective::ReduceScatter => "reduce_scatter",
        ffi::Collective::AllToAll | ffi::Collective::AllToAllRows => "all_to_all",
        ffi::Collective::Barrier => "barrier",
        ffi::Collective::Send => "send",
        ffi::Collective::Recv | ffi::Collective::RecvAny => "recv",
        // cxx's enums can have any number as value.
        _ => "an unknown operation",
    }
}

/// `outputs_of` allocates missing outputs, if the caller can.
///
/// # Safety
/// The views' promise holds for as long as the request is in use.
unsafe fn request(call: &ffi::Call, outputs_of: Option<&Arc<Shared>>) -> Result<Request> {
    // SAFETY: the caller's promise, for this and the next line.
    let inputs = call.inputs.iter().map(|view| unsafe { tensor(view) }).collect::<Result<Vec<_>>>()?;
    // SAFETY: as above.
    let outputs = call.outputs.iter().map(|view| unsafe { tensor(view) }).collect::<Result<Vec<_>>>()?;
    Ok(match call.collective {
        ffi::Collective::AllReduce if call.op == ADASUM => {
            Request::Adasum { input: one(call, inputs)?, output: one(call, outputs)? }
        }
        ffi::Collective::AllReduce => {
            Request::AllReduce { input: one(call, inputs)?, output: one(call, outputs)?, op: reduce_op(call.op)? }
        }
        ffi::Collective::Reduce => Request::Reduce {
            input: one(call, inputs)?,
            output: one(call, outputs)?,
            op: reduce_op(call.op)?,
            root: peer(call)?,
        },
        ffi::Collective::Broadcast => Request::Broadcast { data: one(call, outputs)?, root: peer(call)? },
        ffi::Collective::AllGather => Request::AllGather { input: one(call, inputs)?, outputs },
        ffi::Collective::Gather => Request::Gather { input: one(call, inputs)?, outputs, root: peer(call)? },
        ffi::Collective::Scatter => Request::Scatter { inputs, output: one(call, outputs)?, root: peer(call)? },
        ffi::Collective::ReduceScatter => {
            Request::ReduceScatter { inputs, output: one(call, outputs)?, op: reduce_op(call.op)? }
        }
        ffi::Collective::AllToAll => Request::AllToAll { inputs, outputs },
        ffi::Collective::AllGatherRows => Request::AllGatherRows {
            input: one(call, inputs)?,
            rows: call.rows.iter().sum(),
            row_elems: call.row_elems,
            outputs: later(call, outputs_of)?,
        },
        ffi::Collective::AllToAllRows => Request::AllToAllRows {
            inputs,
            rows: call.rows.to_vec(),
            row_elems: call.row_elems,
            outputs: later(call, outputs_of)?,
        },
        ffi::Collective::Barrier => Request::Barrier,
        ffi::Collective::Send => Request::Send { data: one(call, inputs)?, to: peer(call)?, tag: call.tag },
        ffi::Collective::Recv => Request::Recv { data: one(call, outputs)?, from: Some(peer(call)?), tag: call.tag },
        ffi::Collective::RecvAny => Request::Recv { data: one(call, outputs)?, from: None, tag: call.tag },
        other => return Err(Error::Internal(format!("a shim requested operation {}", other.repr))),
    })
}

fn later(call: &ffi::Call, outputs: Option<&Arc<Shared>>) -> Result<Arc<dyn MakeOutputs>> {
    match outputs {
        Some(outputs) => Ok(outputs.clone()),
        None => {
            Err(Error::Internal(format!("`{}` needs a callback that allocates its outputs", name(call.collective))))
        }
    }
}

fn one(call: &ffi::Call, views: Vec<TensorView>) -> Result<TensorView> {
    match views[..] {
        [view] => Ok(view),
        _ => Err(Error::Internal(format!("`{}` got {} tensors, expected one", name(call.collective), views.len()))),
    }
}

fn peer(call: &ffi::Call) -> Result<usize> {
    usize::try_from(call.peer).map_err(|_| {
        Error::InvalidArgument(format!("`{}`: rank {} is not a rank of the group", name(call.collective), call.peer))
    })
}

/// # Safety
/// As [`TensorView::new`].
pub unsafe fn tensor(view: &ffi::TensorView) -> Result<TensorView> {
    let device = match view.device {
        ffi::DeviceKind::Cpu => Device::Cpu,
        ffi::DeviceKind::Cuda => Device::Cuda(view.device_index),
        other => return Err(Error::Internal(format!("a shim named device kind {}", other.repr))),
    };
    // SAFETY: the caller's promise.
    unsafe { TensorView::new(view.ptr, view.elems, dtype(view.dtype)?, device, view.stream) }
}

impl From<DType> for ffi::DType {
    fn from(dtype: DType) -> Self {
        // No wildcard, so that a new element type of the core does not compile until the bridge has it, too.
        match dtype {
            DType::UInt8 => ffi::DType::UInt8,
            DType::Int8 => ffi::DType::Int8,
            DType::Int16 => ffi::DType::Int16,
            DType::Int32 => ffi::DType::Int32,
            DType::Int64 => ffi::DType::Int64,
            DType::Float16 => ffi::DType::Float16,
            DType::BFloat16 => ffi::DType::BFloat16,
            DType::Float32 => ffi::DType::Float32,
            DType::Float64 => ffi::DType::Float64,
            DType::Bool => ffi::DType::Bool,
            DType::Complex64 => ffi::DType::Complex64,
            DType::Complex128 => ffi::DType::Complex128,
        }
    }
}

pub fn dtype(dtype: ffi::DType) -> Result<DType> {
    DType::ALL
        .into_iter()
        .find(|candidate| ffi::DType::from(*candidate) == dtype)
        .ok_or_else(|| Error::Internal(format!("a shim named element type {}", dtype.repr)))
}

/// Adasum: in op schemas a reduction of all-reduce, in the core an operation of its own.
const ADASUM: &str = "adasum";

/// The name of a reduction in op schemas.
fn op_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "sum",
        ReduceOp::Average => "average",
        ReduceOp::Min => "min",
        ReduceOp::Max => "max",
        ReduceOp::Product => "product",
        ReduceOp::BitAnd => "bit_and",
        ReduceOp::BitOr => "bit_or",
        ReduceOp::BitXor => "bit_xor",
    }
}

fn reduce_op(name: &str) -> Result<ReduceOp> {
    ReduceOp::ALL.into_iter().find(|op| op_name(*op) == name).ok_or_else(|| {
        let known = ReduceOp::ALL.map(op_name).join("`, `");
        Error::InvalidArgument(format!("`{name}` is not a reduction: expected one of `{known}`"))
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn view(values: &mut [f32]) -> ffi::TensorView {
        ffi::TensorView {
            ptr: values.as_mut_ptr().cast(),
            elems: values.len(),
            dtype: ffi::DType::Float32,
            device: ffi::DeviceKind::Cpu,
            device_index: 0,
            stream: 0,
        }
    }

    fn call<'a>(
        collective: ffi::Collective,
        inputs: &'a [ffi::TensorView],
        outputs: &'a [ffi::TensorView],
    ) -> ffi::Call<'a> {
        let (op, rows) = ("sum", &[][..]);
        ffi::Call { collective, group: 0, op, peer: 0, tag: 0, timeout_ms: 0, inputs, outputs, rows, row_elems: 0 }
    }

    fn refusal(call: &ffi::Call) -> String {
        // SAFETY: the views describe live arrays, and the request is not run.
        unsafe { request(call, None) }.expect_err("the call is not acceptable").report()
    }

    #[test]
    fn every_type_and_reduction_crosses_and_comes_back() {
        for each in DType::ALL {
            assert_eq!(dtype(ffi::DType::from(each)).expect("the bridge has it"), each);
        }
        for each in ReduceOp::ALL {
            assert_eq!(reduce_op(op_name(each)).expect("the bridge has it"), each);
        }
        assert!(dtype(ffi::DType { repr: 200 }).is_err());
        let report = reduce_op("mean").expect_err("no such reduction").report();
        assert!(report.starts_with("`mean` is not a reduction: expected one of `sum`, `average`"), "{report}");
    }

    #[test]
    fn a_call_becomes_the_request_it_describes() {
        let mut values = [1.0, 2.0, 3.0];
        let views = [view(&mut values)];
        // SAFETY: as in `refusal`.
        let request =
            unsafe { request(&call(ffi::Collective::AllReduce, &views, &views), None) }.expect("it is acceptable");
        let Request::AllReduce { input, output, op: ReduceOp::Sum } = request else { panic!("{request:?}") };
        assert_eq!((input.ptr(), input.elems(), input.dtype()), (views[0].ptr, 3, DType::Float32));
        assert_eq!(input.ptr(), output.ptr());
    }

    #[test]
    fn invalid_requests_of_shims_are_rejected() {
        let mut values = [0.0];
        let views = [view(&mut values)];
        let report = refusal(&ffi::Call { peer: -1, ..call(ffi::Collective::Broadcast, &[], &views) });
        assert_eq!(report, "`broadcast`: rank -1 is not a rank of the group [smd:invalid_argument]");
        let report = refusal(&call(ffi::Collective::AllReduce, &[], &views));
        assert!(report.contains("`all_reduce` got 0 tensors, expected one"), "{report}");
        let report = refusal(&call(ffi::Collective { repr: 99 }, &[], &[]));
        assert!(report.contains("a shim requested operation 99"), "{report}");
    }

    #[test]
    fn views_keep_their_device_and_stream() {
        let mut values = [0.0];
        let cuda = [ffi::TensorView { device: ffi::DeviceKind::Cuda, device_index: 3, stream: 5, ..view(&mut values) }];
        // SAFETY: as in `refusal`.
        let request =
            unsafe { request(&call(ffi::Collective::AllReduce, &cuda, &cuda), None) }.expect("it is acceptable");
        let Request::AllReduce { input, .. } = request else { panic!("{request:?}") };
        assert_eq!((input.device(), input.stream()), (Device::Cuda(3), 5));
    }

    #[test]
    fn a_completion_is_called_once_whatever_happens() {
        let results = RefCell::new(Vec::new());
        let pending = || Pending(Some(|error: &str, source| results.borrow_mut().push((error.to_owned(), source))));
        pending().complete(Ok(Some(4)));
        pending().complete(Err(Error::InvalidArgument("no".into())));
        drop(pending());
        let results = results.into_inner();
        assert_eq!(results[..2], [(String::new(), 4), ("no [smd:invalid_argument]".to_owned(), -1)]);
        assert!(results[2].0.contains("dropped before it completed"), "{results:?}");
        assert_eq!(results.len(), 3);
    }
}
