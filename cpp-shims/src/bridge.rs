//! The bridge between C++ and the core: the functions that C++ may call, and the callbacks of the core.

pub use ffi::*;

use crate::calls::{
    NamedHandle, accumulate, check_device, check_interrupt, clear, compare_gradients, copy, fail_next, group_rank,
    group_ranks, group_size, join_named, monitored_barrier, note_exposed, note_fallback, process_set_group,
    process_set_ranks, process_set_root, raise_on_return, rank, ranks_and_sizes, run, run_batch, run_coalesced,
    session_id, size, submit, submit_batch, submit_group_named, submit_named,
};
use crate::chunk_trial::{ChunkTrial, is_capturing, new_chunk_trial};
use crate::membership::{Membership, join_all, join_some};
use crate::plan::{GradientPlan, find_plan, place_for_op, placed_elsewhere_for_op};
use crate::reducer::{
    Arena, Ballot, PendingReducer, Reducer, SlotLease, cast_ballot, create_reducer_async, new_reducer,
};
use crate::step_scope::{StepScope, begin_step};

/// Signatures shared with C++ (namespace `smd`).
#[cxx::bridge(namespace = "smd")]
mod ffi {
    /// `smd_core::buffer::DType`.
    #[derive(Debug)]
    enum DType {
        UInt8,
        Int8,
        Int16,
        Int32,
        Int64,
        Float16,
        BFloat16,
        Float32,
        Float64,
        Bool,
        Complex64,
        Complex128,
    }

    /// The kinds of `smd_core::buffer::Device`.
    #[derive(Debug)]
    enum DeviceKind {
        Cpu,
        Cuda,
    }

    /// `smd_core::buffer::TensorView`: a contiguous tensor that the framework owns.
    #[derive(Debug)]
    struct TensorView {
        ptr: *mut u8,
        elems: usize,
        dtype: DType,
        device: DeviceKind,
        /// 0 on the CPU.
        device_index: u16,
        /// CUDA stream, 0 on the CPU.
        stream: usize,
    }

    /// The kinds of `smd_core::collectives::Request` that a framework may submit.
    #[derive(Debug)]
    enum Collective {
        AllReduce,
        Reduce,
        Broadcast,
        AllGather,
        Gather,
        Scatter,
        ReduceScatter,
        AllToAll,
        /// `AllGather` and `AllToAll` of rows, where `Call::rows` has their number for each rank or in total.
        /// `Completion::make_outputs` allocates the outputs. Only `submit` and `submit_group_named` support these.
        AllGatherRows,
        AllToAllRows,
        Barrier,
        Send,
        Recv,
        /// `Recv` from the first member that sends.
        RecvAny,
    }

    /// One operation. Inputs and outputs are blocks in rank order, if the collective has one block for each rank.
    #[derive(Debug)]
    struct Call<'a> {
        collective: Collective,
        /// Id of the communicator; 0 is the world.
        group: u64,
        /// Name of a reduction, such as `sum`; empty if there is none.
        op: &'a str,
        /// Root or peer, as a rank inside the group.
        peer: i64,
        /// Tag of a send or receive.
        tag: u32,
        /// Timeout for other members; 0 selects the session's.
        timeout_ms: u64,
        inputs: &'a [TensorView],
        outputs: &'a [TensorView],
        /// For operations on rows: the number of rows of each input, and the elements of one row.
        rows: &'a [usize],
        row_elems: usize,
    }

    /// Options of a submission by name (`smd_core::negotiation::NamedRequest`).
    #[derive(Debug)]
    struct NamedCall<'a> {
        /// Prefix of the name, such as `allreduce`; may be empty if there is a name.
        kind: &'a str,
        /// If empty, the negotiation generates a name.
        name: &'a str,
        /// Other calls of this process may have the same name; they run one after the other.
        shared: bool,
        prescale: f64,
        postscale: f64,
        /// The caller applies the factors, and ranks only compare them.
        is_scaled: bool,
        /// This process does nothing else until the operation completes.
        blocking: bool,
        /// For each call, the number of dimensions of its tensor, and all dimensions one after the other.
        num_dims: &'a [usize],
        dims: &'a [u64],
    }

    /// `smd_core::negotiation::Gradients`.
    #[derive(Debug)]
    struct StepGradients<'a> {
        /// Names, one in each line.
        names: &'a str,
        /// If empty, gradients are identified by their names.
        numbers: &'a [u64],
        /// Whether all of them have been submitted.
        is_last: bool,
    }

    /// The fields of `smd_core::session::RanksAndSizes` that operations return.
    #[derive(Debug)]
    struct RanksAndSizes {
        rank: usize,
        size: usize,
        local_rank: usize,
        local_size: usize,
    }

    /// `smd_core::reducer::ParamSpec`.
    #[derive(Debug)]
    struct Param {
        name: String,
        shape: Vec<u64>,
        dtype: DType,
        sparse: bool,
        delayed: bool,
    }

    /// The kinds of `smd_core::reducer::BucketReduction`.
    #[derive(Debug)]
    enum Reduction {
        Average,
        /// Rounded to float16 before the reduction, and so on for other types.
        Float16,
        BFloat16,
        ByCaller,
    }

    /// `smd_core::reducer::ReducerOptions`.
    #[derive(Debug)]
    struct ReducerOptions {
        bucket_bytes: Vec<usize>,
        find_unused_parameters: bool,
        accumulation_steps: u32,
        static_graph: bool,
        reduction: Reduction,
        sum: bool,
        on_device: bool,
    }

    /// The values of `smd_core::reducer::ballot::Readiness` that a rank without a reducer may vote.
    #[derive(Debug)]
    enum Readiness {
        ByName,
        NoReducer,
        Creating,
    }

    /// `smd_core::reducer::ballot::VoteResult`.
    #[derive(Debug)]
    enum VoteResult {
        Planned,
        ByName,
        CreateReducers,
        DropReducers,
    }

    /// `smd_core::reducer::Record`.
    #[derive(Debug)]
    struct StepRecord {
        order: Vec<usize>,
        communication_start: u64,
        communication_end: u64,
        rebuilt: bool,
        unused_bytes: usize,
    }

    /// Range of buckets, from `begin` up to, but not including, `end`.
    #[derive(Debug)]
    struct Buckets {
        begin: usize,
        end: usize,
    }

    /// One bucket of the current plan.
    #[derive(Debug)]
    struct BucketDescription {
        /// Offset in the arena.
        offset_bytes: usize,
        elems: usize,
        dtype: DType,
        /// Element type in which it is reduced.
        wire: DType,
        /// Parameters of the bucket; for each, the offset of its slot in elements of the bucket, and whether its
        /// gradient is reduced in place.
        params: Vec<usize>,
        starts: Vec<usize>,
        in_place: Vec<bool>,
        /// Number of the plan, unique in the process.
        num_buckets: usize,
    }

    /// `smd_core::device::pack::PackedPiece`: a gradient on a device and its place in a bucket, in elements.
    #[derive(Debug)]
    struct Piece {
        ptr: *mut u8,
        start: usize,
        elems: usize,
    }

    /// `smd_core::reducer::DeviceBucket`.
    #[derive(Debug)]
    struct DeviceBucket<'a> {
        pieces: &'a [Piece],
        /// Empty, or the memory of the slots.
        flat: &'a [TensorView],
        /// Empty, or the memory in which slots are reduced in a narrower type.
        wire: &'a [TensorView],
        in_place: &'a [TensorView],
        stream: usize,
    }

    /// `smd_core::reducer::arrival::Execution`.
    #[derive(Clone, Copy, Debug)]
    struct Execution {
        step: i64,
        frame: u64,
        iteration: i64,
    }

    /// `smd_core::chunk_trial::ChunkTurn`.
    #[derive(Clone, Copy, Debug)]
    struct ChunkTurn {
        /// 0 if the ranks have to choose.
        chunks: u32,
        is_measured: bool,
    }

    extern "Rust" {
        /// `smd_core::chunk_trial::ChunkTrial`.
        type ChunkTrial;
        fn new_chunk_trial() -> Result<Box<ChunkTrial>>;
        fn turn(self: &mut ChunkTrial, step: u64) -> Result<ChunkTurn>;
        fn chosen(self: &ChunkTrial) -> u32;
        fn add(self: &mut ChunkTrial, chunks: u32, seconds: f32);
        fn medians(self: &ChunkTrial) -> Result<Vec<f32>>;
        fn choose(self: &mut ChunkTrial, sums: &[f32]);
        /// Whether a stream of a CUDA device is being captured in a graph.
        fn is_capturing(device: u16, stream: usize) -> Result<bool>;

        /// Global rank of this process.
        fn rank() -> Result<usize>;
        /// Number of processes of the job.
        fn size() -> Result<usize>;
        /// A number of the session that is equal on all ranks and new for each `init`.
        fn session_id() -> Result<u64>;
        /// This process's rank inside `group`.
        fn group_rank(group: u64) -> Result<usize>;
        /// Number of members of `group`.
        fn group_size(group: u64) -> Result<usize>;
        /// The members of a group, as global ranks.
        fn group_ranks(group: u64) -> Result<Vec<usize>>;

        /// Runs the operation on the caller's thread and returns when this rank's part is complete; on CUDA tensors,
        /// when it is queued into the stream that their views name.
        ///
        /// # Safety
        /// The views describe memory as `smd_core::buffer::TensorView` requires, until the call returns; on CUDA
        /// tensors, until the device has completed the operation.
        unsafe fn run(call: &Call) -> Result<()>;

        /// Queues several operations on CUDA tensors of one group as one operation, into the stream that their views
        /// name.
        ///
        /// # Safety
        /// As `run`, until the device has completed the operation.
        unsafe fn run_coalesced(calls: &[Call]) -> Result<()>;

        /// Copies a tensor, or fills one with zero bytes: at once in CPU memory, queued into its stream on a device.
        ///
        /// # Safety
        /// As `run`; both are of one type and length, on one device, and do not overlap.
        unsafe fn copy(from: &TensorView, to: &TensorView) -> Result<()>;
        /// See `copy`.
        ///
        /// # Safety
        /// As `copy`.
        unsafe fn clear(tensor: &TensorView) -> Result<()>;
        /// Adds a float16 or bfloat16 tensor on a device to a float32 one, queued into its stream.
        ///
        /// # Safety
        /// As `copy`, but for the types.
        unsafe fn accumulate(total: &TensorView, addend: &TensorView) -> Result<()>;

        /// Throws the error that ended the operations of `group` on CUDA tensors, if there is one.
        fn check_device(group: u64, during: &str) -> Result<()>;

        /// Queues the operation. If this returns an error, `done` is not called; otherwise it is called once, from
        /// a thread of the core; on CUDA tensors, when the device is done.
        ///
        /// # Safety
        /// As `run`, until `done` is called; on CUDA tensors in stream order, after the work that the views' stream
        /// holds now.
        unsafe fn submit(call: &Call, done: UniquePtr<Completion>) -> Result<()>;

        /// As `submit`, in any order: the operation runs when every rank has submitted one under `name`
        /// (`smd_core::negotiation::Negotiator`). `shape` is that of the caller's tensor, and is compared; `blocking`
        /// says that this process does nothing else until `done` is called.
        ///
        /// # Safety
        /// As `submit`.
        unsafe fn submit_named(
            name: &str,
            call: &Call,
            shape: &[u64],
            blocking: bool,
            done: UniquePtr<Completion>,
        ) -> Result<()>;

        /// As `submit_named`, for one or several collectives of one group, which run together or not at all. Errors
        /// of this call are thrown at once, and other ranks do not learn of them; `done` may be called with the error
        /// as well.
        ///
        /// # Safety
        /// As `submit`.
        unsafe fn submit_group_named(
            named: &NamedCall,
            calls: &[Call],
            done: UniquePtr<Completion>,
        ) -> Result<Box<NamedHandle>>;
        type NamedHandle;
        /// Runs the negotiation on this thread, which waits for the operation, for a short time; returns false if
        /// there is nothing to run. May call `done`.
        fn drive(self: &NamedHandle) -> bool;

        /// Compares across ranks under `name` which gradients a step has. If they differ, `done` gets an error that
        /// names ranks and gradients (`smd_core::negotiation::Negotiator::compare_gradients`).
        fn compare_gradients(
            group: u64,
            name: &str,
            gradients: &StepGradients,
            blocking: bool,
            done: UniquePtr<Completion>,
        ) -> Result<Box<NamedHandle>>;

        /// Joins `group`: this process has nothing more to submit by name. `done` gets the rank of the group that
        /// joined last. For the other ranks' all-reduces on devices, `named` is the CUDA device that the script has
        /// chosen and `current` that of the framework; negative if there is none
        /// (`smd_core::negotiation::Negotiator::join`).
        fn join_named(group: u64, named: i64, current: i64, done: UniquePtr<Completion>) -> Result<()>;

        /// The group of a process set; throws if this rank is not a member.
        fn process_set_group(process_set: i64) -> Result<u64>;
        /// This rank's position in the world of process sets.
        fn ranks_and_sizes() -> Result<RanksAndSizes>;
        /// The ranks of a process set.
        fn process_set_ranks(process_set: i64) -> Result<Vec<usize>>;
        /// The position in a process set of a rank of the world.
        fn process_set_root(process_set: i64, rank: i64) -> Result<usize>;

        /// As `run`, for several collectives of one group as one batch
        /// (`smd_core::collectives::Communicator::run_batch`). The timeout of the first one applies to each.
        ///
        /// # Safety
        /// As `run`.
        unsafe fn run_batch(calls: &[Call]) -> Result<()>;

        /// As `run_batch`, queued like `submit`.
        ///
        /// # Safety
        /// As `submit`.
        unsafe fn submit_batch(calls: &[Call], done: UniquePtr<Completion>) -> Result<()>;

        /// For an operation that cannot be described: the other members' next operation of `group` fails with
        /// `message` instead of waiting for this one (`smd_core::collectives::Communicator::fail_next`).
        fn fail_next(group: u64, message: &str) -> Result<()>;

        /// `smd_core::collectives::Communicator::monitored_barrier`.
        fn monitored_barrier(group: u64, timeout_ms: u64, all: bool) -> Result<()>;

        /// For waits outside of the core: throws if a signal asks the calling thread to end its wait in `during`.
        fn check_interrupt(during: &str) -> Result<()>;

        /// Lets the host language raise the exception of a signal handler as soon as this thread returns to it, after
        /// an interrupted wait; false if it cannot (`smd_core::world::monitor::raise_on_return`).
        fn raise_on_return() -> bool;

        /// Adds to the time in which threads of the script waited (`smd_core::metrics`).
        fn note_exposed(nanoseconds: u64);

        /// Counts a slower path by its name (`smd_core::metrics`).
        fn note_fallback(reason: &str);
    }

    // Steps of a pipeline; see `smd_core::session::step_scope`.
    extern "Rust" {
        /// The scope of a running step.
        type StepScope;

        /// Begins a step; throws without a session.
        fn begin_step() -> Result<Box<StepScope>>;
        /// Ends a step: its operations here are complete, or all ranks know that they will not complete.
        fn end(self: &StepScope);
        /// Reports that an operation of the step failed, or that the step was cancelled.
        fn fail(self: &StepScope);
    }

    // Process groups of a framework; see `smd_core::session::membership`.
    extern "Rust" {
        /// A process group with a communicator of its own, which is closed when the group is dropped.
        type Membership;

        /// Creates the group of all `size` ranks. Joins the job through `store` if this process has no session.
        /// Collective.
        fn join_all(
            rank: usize,
            size: usize,
            timeout_ms: u64,
            store: UniquePtr<BootstrapStore>,
        ) -> Result<Box<Membership>>;
        /// Creates a group of global ranks, in this order. Its members call this.
        fn join_some(ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>>;
        /// Splits a group of these global ranks from this one. All members of this group call this or
        /// `split_nocolor`.
        fn split(self: &Membership, ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>>;
        /// As `split`, for a member that is in no new group.
        fn split_nocolor(self: &Membership, timeout_ms: u64) -> Result<()>;
        /// Prepares operations on a CUDA device; otherwise the first operation does so. Collective.
        fn connect_device(self: &Membership, device: u16) -> Result<()>;
        /// Id of its communicator.
        fn group(self: &Membership) -> Result<u64>;
        /// The members' global ranks.
        fn ranks(self: &Membership) -> Result<Vec<usize>>;
        /// Closes the group: running and later operations fail.
        fn close(self: &Membership);
    }

    // Gradient reduction; see `smd_core::reducer::Reducer`. Functions may be called on any thread and take no lock of
    // a framework.
    extern "Rust" {
        /// Reduces the gradients of one model.
        type Reducer;
        /// The right to use one slot, which is freed when the lease is dropped. Empty if all slots were taken.
        type SlotLease;
        /// The memory of all slots, kept alive by this handle.
        type Arena;

        /// Creates a reducer among these global ranks, or all if there are none. Collective.
        fn new_reducer(ranks: &[usize], params: &[Param], options: &ReducerOptions) -> Result<Box<Reducer>>;
        /// Changes the options, between backwards. Collective.
        fn configure(self: &Reducer, options: &ReducerOptions) -> Result<()>;
        /// Id of the reducer's own communicator.
        fn group(self: &Reducer) -> Result<u64>;
        /// Waits until the communicator may be used for another operation, between backwards.
        fn await_step(self: &Reducer) -> Result<()>;
        /// Begins a backward, which is reduced if `sync`; returns false if its gradients stay local.
        fn begin(self: &Reducer, sync: bool) -> Result<bool>;
        /// Begins a round by a vote: if all ranks of the reducer's `group` take part, it continues like `begin`.
        /// `name` and `what` are as for `cast_ballot`.
        fn begin_by_vote(self: &Reducer, group: u64, name: &str, what: &str) -> Result<Box<Ballot>>;
        /// Whether the session of the reducer is the current one.
        fn is_current(self: &Reducer) -> bool;
        /// Notes a gradient that stays local.
        fn note_local(self: &Reducer, param: usize) -> Result<()>;
        /// In a static graph: notes a part of a gradient; returns true if it is the last one.
        fn accumulated(self: &Reducer, param: usize) -> Result<bool>;
        /// Whether a gradient is in its slot; `ptr` is not read.
        unsafe fn is_slot(self: &Reducer, param: usize, ptr: *const u8) -> Result<bool>;
        /// Returns a free slot of a parameter; an empty lease if tensors use all of them.
        fn take_slot(self: &Reducer, param: usize) -> Result<Box<SlotLease>>;
        /// Starts the predictions of a backward on a thread whose allocator calls `place`.
        fn start_placement(self: &Reducer);
        /// Returns the slot for an allocation of `bytes` bytes that is predicted to become a gradient; an empty lease
        /// if none is predicted.
        fn place(self: &Reducer, bytes: usize) -> Box<SlotLease>;
        /// Reports that the allocation of the last `place`, which returned an empty lease, lies at `ptr`. `ptr` is not
        /// read.
        unsafe fn placed_elsewhere(self: &Reducer, bytes: usize, ptr: *const u8);
        /// Notes that the gradient of a parameter was computed at `ptr`, which is not its slot; `ptr` is not read.
        unsafe fn observe(self: &Reducer, param: usize, ptr: *const u8) -> Result<()>;
        /// Marks a gradient, or zeros in its place if not `used`, as complete at `ptr`. Returns the buckets that the
        /// caller must reduce now, if it reduces buckets.
        ///
        /// # Safety
        /// The bytes stay valid and untouched until `finish` or `abandon` returns.
        unsafe fn mark_ready(self: &Reducer, param: usize, ptr: *mut u8, used: bool) -> Result<Buckets>;
        /// Number of buckets of the current plan; 0 if all gradients are sparse.
        fn num_buckets(self: &Reducer) -> Result<usize>;
        /// Describes a bucket; throws if it does not exist.
        fn bucket(self: &Reducer, index: usize) -> Result<BucketDescription>;
        /// Address of the slots; null on a device.
        fn arena(self: &Reducer) -> Result<Box<Arena>>;
        /// Number of the current plan, unique in the process.
        fn plan_number(self: &Reducer) -> Result<u64>;
        /// Packs a bucket on a device and queues its reduction into the stream `communication`.
        ///
        /// # Safety
        /// See `smd_core::reducer::Reducer::launch`.
        unsafe fn launch(self: &Reducer, index: usize, bucket: &DeviceBucket, communication: usize) -> Result<()>;
        /// Makes a stream wait for the queued reductions.
        ///
        /// # Safety
        /// The stream belongs to the device of the buckets.
        unsafe fn follow(self: &Reducer, stream: usize) -> Result<()>;
        /// Waits until the device has completed the queued reductions, and throws what has ended them.
        fn await_device(self: &Reducer) -> Result<()>;
        /// Reports that the caller has reduced a bucket.
        fn reduced_by_caller(self: &Reducer) -> Result<()>;
        /// Parameters without a gradient in this backward so far.
        fn missing(self: &Reducer) -> Result<Vec<usize>>;
        /// The same in the order in which they must be marked ready; throws if they must have a gradient.
        fn unused_parameters(self: &Reducer, frozen: &[usize]) -> Result<Vec<usize>>;
        /// Waits until all buckets are reduced; returns for each parameter whether any rank used it, if that is
        /// tracked.
        fn finish(self: &Reducer) -> Result<Vec<u8>>;
        /// Abandons a backward that cannot continue.
        fn abandon(self: &Reducer, message: &str, more_follows: bool);
        /// A vote on how a round of gradients is reduced (`smd_core::reducer::ballot`).
        type Ballot;
        /// Votes under `name`, without a reducer for `what`.
        fn cast_ballot(group: u64, name: &str, what: &str, readiness: Readiness) -> Result<Box<Ballot>>;
        /// Waits for the common result.
        fn result(self: &Ballot) -> Result<VoteResult>;
        /// Whether `result` returns without waiting.
        fn is_decided(self: &Ballot) -> bool;
        /// After the result `Make`: the token for `create_reducer_async`.
        fn token(self: &Ballot) -> Result<u64>;
        /// A reducer that a thread of the core creates (`smd_core::session::pending_reducer`).
        type PendingReducer;
        /// As `new_reducer`, for rounds; does not wait. `order` is the order in which gradients arrived.
        fn create_reducer_async(
            token: u64,
            ranks: &[usize],
            params: &[Param],
            options: &ReducerOptions,
            order: &[usize],
        ) -> Result<Box<PendingReducer>>;
        fn is_done(self: &PendingReducer) -> bool;
        /// Returns the reducer, once its creation has ended.
        fn take(self: &PendingReducer) -> Result<Box<Reducer>>;
        /// Statistics of the last reduced step.
        fn record(self: &Reducer) -> Result<StepRecord>;
        /// Describes the buckets, one in each line.
        fn describe_plan(self: &Reducer) -> Result<String>;

        /// Address of the slot; null if the lease is empty.
        fn ptr(self: &SlotLease) -> *mut u8;
        /// Copies bytes to the slot.
        ///
        /// # Safety
        /// As many bytes as the slot has are readable at `from`.
        unsafe fn fill(self: &mut SlotLease, from: *const u8) -> Result<()>;
        /// Fills the slot with zeros.
        fn zero(self: &mut SlotLease) -> Result<()>;

        /// Address of the byte at an offset.
        fn at(self: &Arena, offset_bytes: usize) -> Result<*mut u8>;
    }

    // Gradients that graphs compute; see `smd_core::reducer::arrival`. Functions may be called on any thread.
    extern "Rust" {
        /// A specification whose reducer is created when its first gradient arrives.
        type GradientPlan;

        /// The specification that this process registered under this number.
        fn find_plan(number: i64) -> Result<Box<GradientPlan>>;
        /// Another handle of the same specification.
        fn share(self: &GradientPlan) -> Result<Box<GradientPlan>>;
        /// Number of bytes of a parameter; throws if it does not exist.
        fn param_bytes(self: &GradientPlan, param: usize) -> Result<usize>;
        /// Name of a parameter.
        fn param_name(self: &GradientPlan, param: usize) -> String;
        /// Returns a free slot for a parameter's gradient that was computed at `ptr`, which is not read; an empty
        /// lease if it is in a slot already, or all slots are taken. `learn` says that the operation which allocated
        /// it may get the slot the next time.
        unsafe fn take_slot(self: &GradientPlan, param: usize, ptr: *const u8, learn: bool) -> Box<SlotLease>;
        /// Reports that a gradient was allocated in its slot but must not be changed there, so the prediction was
        /// useless.
        fn placement_was_unused(self: &GradientPlan, param: usize);
        /// Submits a complete gradient, in the slot if `lease` holds it. `owner` is called when it is reduced, unless
        /// this throws.
        ///
        /// # Safety
        /// Until then, the bytes are valid and no other code accesses them; on a device in stream order, after the
        /// work that its stream holds now.
        unsafe fn arrive(
            self: &GradientPlan,
            param: usize,
            data: &TensorView,
            lease: Box<SlotLease>,
            execution: &Execution,
            owner: SharedPtr<GradientOwner>,
            position: usize,
        ) -> Result<()>;
        /// Ends an execution, whether or not its gradients were reduced.
        fn ended(self: &GradientPlan, execution: &Execution);
        /// Returns the slot for an allocation of `bytes` bytes by operation `op` that is predicted to become a
        /// gradient; an empty lease if none is predicted.
        fn place_for_op(bytes: usize, op: usize) -> Box<SlotLease>;
        /// Reports that the allocation of the last `place_for_op` of `op`, which returned an empty lease, lies at
        /// `ptr`. `ptr` is not read.
        unsafe fn placed_elsewhere_for_op(bytes: usize, op: usize, ptr: *const u8);
    }

    unsafe extern "C++" {
        include!("smd/gradient_owner.h");

        /// See gradient_owner.h.
        type GradientOwner;
        /// A gradient is reduced, in the slot if `lease` holds it; `error` is the report, empty on success.
        fn reduced(self: &GradientOwner, position: usize, error: &str, lease: Box<SlotLease>);
        /// Allocates memory on the gradient's device, until the gradient is answered.
        fn allocate(self: &GradientOwner, position: usize, bytes: usize) -> Result<*mut u8>;
        /// The execution need not report its end any more.
        fn release(self: &GradientOwner);

        include!("smd/completion.h");

        /// See completion.h.
        type Completion;
        /// Ends the operation; `error` is the report, empty on success. After a receive, `source` is the member that
        /// sent; otherwise it is -1.
        fn done(self: Pin<&mut Completion>, error: &str, source: i64);
        /// Appends to `outputs` memory for `rows[i]` rows from member i.
        fn make_outputs(self: Pin<&mut Completion>, rows: &[usize], outputs: &mut Vec<TensorView>) -> Result<()>;

        include!("smd/bootstrap_store.h");

        /// See bootstrap_store.h.
        type BootstrapStore;
        /// Writes a key.
        fn set(self: &BootstrapStore, key: &str, value: &[u8]) -> Result<()>;
        /// Appends a key's value to `value`; returns false if it has none.
        fn get(self: &BootstrapStore, key: &str, value: &mut Vec<u8>) -> Result<bool>;
        /// Deletes a key.
        fn remove(self: &BootstrapStore, key: &str) -> Result<()>;
    }
}
