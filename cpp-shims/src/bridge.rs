//! The bridge: what C++ may say to the core, and the one thing that the core says back.

pub use ffi::*;

use crate::calls::{
    NamedHandle, add_up, check_device, check_interrupt, clear, compare_gradients, copy, fail_next, group_rank,
    group_ranks, group_size, join_named, monitored_barrier, process_set_group, process_set_ranks, process_set_root,
    raise_later, rank, run, run_batch, run_together, session_id, size, submit, submit_batch, submit_group_named,
    submit_named, world_place,
};
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

    /// The kinds of `smd_core::collectives::Request` that a framework may ask for.
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
        /// `AllGather` and `AllToAll` of rows, `Call::rows` of them for each rank or in all, with outputs that
        /// `Completion::make_outputs` makes. Only `submit` has them.
        AllGatherRows,
        AllToAllRows,
        Barrier,
        Send,
        Recv,
        /// `Recv` from whoever sends first.
        RecvAny,
    }

    /// One operation. Inputs and outputs are blocks in the order of the group's ranks where the collective has
    /// one a rank.
    #[derive(Debug)]
    struct Call<'a> {
        collective: Collective,
        /// Communicator; 0 is the world.
        group: u64,
        /// Name of a reduction, such as `sum`; empty where nothing is reduced.
        op: &'a str,
        /// Root or peer, a rank inside the group.
        peer: i64,
        /// Of send and recv.
        tag: u32,
        /// Longest wait for other members; 0 is the session's own.
        timeout_ms: u64,
        inputs: &'a [TensorView],
        outputs: &'a [TensorView],
        /// Of operations on rows: how many each input has, and elements of one.
        rows: &'a [usize],
        row_elems: usize,
    }

    /// How operations are submitted by name (`smd_core::negotiation::NamedRequest`).
    #[derive(Debug)]
    struct NamedCall<'a> {
        /// In front of the name: `allreduce`; may be empty if there is a name.
        kind: &'a str,
        /// Empty: the negotiation gives one.
        name: &'a str,
        /// Others of this process may have the name too; they run one after the other.
        shared: bool,
        prescale: f64,
        postscale: f64,
        /// The caller multiplies: ranks only compare the factors.
        is_scaled: bool,
        /// This process does nothing else meanwhile.
        blocking: bool,
        /// Of each call's tensor, and all dimensions one after the other.
        num_dims: &'a [usize],
        dims: &'a [u64],
    }

    /// `smd_core::negotiation::Gradients`.
    #[derive(Debug)]
    struct StepGradients<'a> {
        /// A line for each.
        names: &'a str,
        /// Empty: they are known by their names.
        numbers: &'a [u64],
        /// They have all been submitted.
        is_last: bool,
    }

    /// The parts of `smd_core::session::WorldPlace` that operations ask for.
    #[derive(Debug)]
    struct WorldPlace {
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
        /// Compressed to this type, and so on.
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

    /// Of `smd_core::reducer::ballot::Readiness`, what a rank without a reducer may bring.
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
        Make,
        Forget,
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

    /// Buckets `begin` to `end`, without the last.
    #[derive(Debug)]
    struct Buckets {
        begin: usize,
        end: usize,
    }

    /// One bucket of the plan in force.
    #[derive(Debug)]
    struct BucketDescription {
        /// Start in the arena.
        offset_bytes: usize,
        elems: usize,
        dtype: DType,
        /// What its values travel as.
        wire: DType,
        /// Parameters in the bucket, where each one's slot starts, in elements of the bucket, and whether its gradient is
        /// reduced where it lies.
        params: Vec<usize>,
        starts: Vec<usize>,
        apart: Vec<bool>,
        /// Of the whole plan.
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
        /// Empty, or the memory in which the slots travel.
        wire: &'a [TensorView],
        apart: &'a [TensorView],
        stream: usize,
    }

    /// `smd_core::reducer::arrival::Execution`.
    #[derive(Clone, Copy, Debug)]
    struct Execution {
        step: i64,
        frame: u64,
        iteration: i64,
    }

    extern "Rust" {
        /// Global rank of this process.
        fn rank() -> Result<usize>;
        /// Processes of the job.
        fn size() -> Result<usize>;
        /// A number for the session, the same on all ranks and new for each `init`.
        fn session_id() -> Result<u64>;
        /// This process's rank inside `group`.
        fn group_rank(group: u64) -> Result<usize>;
        /// Members of `group`.
        fn group_size(group: u64) -> Result<usize>;
        /// The members of a group, by their ranks in the job.
        fn group_ranks(group: u64) -> Result<Vec<usize>>;

        /// Runs the operation on the caller's thread and returns when this rank's part is complete; on CUDA tensors, when
        /// it is queued into the stream that their views name.
        ///
        /// # Safety
        /// The views describe memory as `smd_core::buffer::TensorView` demands, until the call returns; on CUDA tensors,
        /// until the device has done what was queued.
        unsafe fn run(call: &Call) -> Result<()>;

        /// Queues operations on CUDA tensors, all of one group, as one, into the stream that their views name.
        ///
        /// # Safety
        /// As `run`, until the device has done what was queued.
        unsafe fn run_together(calls: &[Call]) -> Result<()>;

        /// Copies a tensor, or sets all bytes of one to zero: at once in CPU memory, queued into its stream on a device.
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
        unsafe fn add_up(total: &TensorView, addend: &TensorView) -> Result<()>;

        /// Throws what ended the operations of `group` on CUDA tensors, if something did.
        fn check_device(group: u64, during: &str) -> Result<()>;

        /// Queues the operation. If this returns an error, `done` is not called; otherwise it is called once, from
        /// a thread of the core; on CUDA tensors, when the device is done.
        ///
        /// # Safety
        /// As `run`, until `done` is called; on CUDA tensors, from what the views' stream was given so far.
        unsafe fn submit(call: &Call, done: UniquePtr<Completion>) -> Result<()>;

        /// As `submit`, in any order: the operation runs when every rank has submitted one under `name`
        /// (`smd_core::negotiation::Negotiator`). `shape` is that of the caller's tensor, and is compared; `blocking` says that
        /// this process does nothing else until `done` is called.
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

        /// As `submit_named`, of one or several collectives of one group, which run together or not at all. What this
        /// process cannot ask for is thrown at once, and the others hear nothing of it; `done` may hear of it, too.
        ///
        /// # Safety
        /// As `submit`.
        unsafe fn submit_group_named(
            named: &NamedCall,
            calls: &[Call],
            done: UniquePtr<Completion>,
        ) -> Result<Box<NamedHandle>>;
        type NamedHandle;
        /// Brings the operation on by this thread, which waits for it, for a moment; false if there is nothing that it
        /// could do. `done` may be called in here.
        fn drive(self: &NamedHandle) -> bool;

        /// Has all ranks compare under `name` which gradients a step has: `done` gets an error that names ranks and gradients if they
        /// differ (`smd_core::negotiation::Negotiator::compare_gradients`).
        fn compare_gradients(
            group: u64,
            name: &str,
            gradients: &StepGradients,
            blocking: bool,
            done: UniquePtr<Completion>,
        ) -> Result<Box<NamedHandle>>;

        /// This process has nothing more to submit by name in `group`; `done` gets the rank of the group that joined last. The
        /// script has `named` a CUDA device for the others' all-reduces on devices, and the framework's is `current`; negative: none
        /// (`smd_core::negotiation::Negotiator::join`).
        fn join_named(group: u64, named: i64, current: i64, done: UniquePtr<Completion>) -> Result<()>;

        /// The group of a process set; throws if this rank is in no such set.
        fn process_set_group(process_set: i64) -> Result<u64>;
        /// This rank's place in the world of process sets.
        fn world_place() -> Result<WorldPlace>;
        /// The ranks of a process set.
        fn process_set_ranks(process_set: i64) -> Result<Vec<usize>>;
        /// The position of a rank of the world in a process set.
        fn process_set_root(process_set: i64, rank: i64) -> Result<usize>;

        /// As `run`, several collectives of one group in one go (`smd_core::collectives::Communicator::run_batch`); the
        /// first one's timeout is that of each.
        ///
        /// # Safety
        /// As `run`.
        unsafe fn run_batch(calls: &[Call]) -> Result<()>;

        /// As `run_batch`, queued as by `submit`.
        ///
        /// # Safety
        /// As `submit`.
        unsafe fn submit_batch(calls: &[Call], done: UniquePtr<Completion>) -> Result<()>;

        /// For an operation that cannot be described: the other members' next operation of `group` fails with
        /// `message` instead of waiting for this one (`smd_core::collectives::Communicator::fail_next`).
        fn fail_next(group: u64, message: &str) -> Result<()>;

        /// `smd_core::collectives::Communicator::monitored_barrier`.
        fn monitored_barrier(group: u64, timeout_ms: u64, all: bool) -> Result<()>;

        /// For waits outside the core: throws if a signal asks the calling thread to end its wait in `during`.
        fn check_interrupt(during: &str) -> Result<()>;

        /// After an interrupted wait: the host language raises what the signal's handler raised as soon as this thread
        /// is back in it; false if it cannot (`smd_core::world::monitor::raise_later`).
        fn raise_later() -> bool;
    }

    // Steps of a pipeline that run here; `smd_core::session::step_scope` says more.
    extern "Rust" {
        /// A step that has begun.
        type StepScope;

        /// A step begins; throws without a session.
        fn begin_step() -> Result<Box<StepScope>>;
        /// All that it had to do here is done, or all ranks know that it will not be.
        fn end(self: &StepScope);
        /// An operation of it failed, or it was cancelled.
        fn fail(self: &StepScope);
    }

    // Process groups of a framework; `smd_core::session::membership` says more.
    extern "Rust" {
        /// A process group with a communicator of its own; dropping it closes it.
        type Membership;

        /// The group of all `size` ranks. Joins the job through `store` if this process is in none. Collective.
        fn join_all(
            rank: usize,
            size: usize,
            timeout_ms: u64,
            store: UniquePtr<BootstrapStore>,
        ) -> Result<Box<Membership>>;
        /// A group of global ranks, in this order. Its members call it.
        fn join_some(ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>>;
        /// A group of these global ranks out of this one, all of whose members call this or `stay_out_of_split`.
        fn split(self: &Membership, ranks: &[usize], timeout_ms: u64) -> Result<Box<Membership>>;
        /// As `split`, of a member that is in no new group.
        fn stay_out_of_split(self: &Membership, timeout_ms: u64) -> Result<()>;
        /// Makes ready for operations on a CUDA device; the first one would do so otherwise. All members call it.
        fn connect_device(self: &Membership, device: u16) -> Result<()>;
        /// Its communicator.
        fn group(self: &Membership) -> Result<u64>;
        /// Its members' global ranks.
        fn ranks(self: &Membership) -> Result<Vec<usize>>;
        /// Operations under way and all later ones fail.
        fn close(self: &Membership);
    }

    // Gradient reduction; `smd_core::reducer::Reducer` says more. Functions may be called on any thread and take no
    // lock of a framework.
    extern "Rust" {
        /// Reduces the gradients of one model.
        type Reducer;
        /// The right of one tensor to one slot, given back when dropped; holds nothing if the slot was taken.
        type SlotLease;
        /// The memory of all slots, kept while this is held.
        type Arena;

        /// A reducer among these global ranks, or all if there are none. Collective.
        fn new_reducer(ranks: &[usize], params: &[Param], options: &ReducerOptions) -> Result<Box<Reducer>>;
        /// Chooses anew, between backwards. Collective.
        fn configure(self: &Reducer, options: &ReducerOptions) -> Result<()>;
        /// The reducer's own communicator.
        fn group(self: &Reducer) -> Result<u64>;
        /// Returns when the communicator may be used for something else, between backwards.
        fn await_step(self: &Reducer) -> Result<()>;
        /// Begins a backward that is to be reduced, if `sync`; false if its gradients stay local.
        fn begin(self: &Reducer, sync: bool) -> Result<bool>;
        /// Begins a round: as `begin`, if all ranks of `group`, the one that the reducer is for, turn out to take part. `name`
        /// and `what` are as for `cast_ballot`.
        fn begin_by_vote(self: &Reducer, group: u64, name: &str, what: &str) -> Result<Box<Ballot>>;
        /// Whether the session that it belongs to is the one in force.
        fn is_current(self: &Reducer) -> bool;
        /// Takes note of a gradient that stays local.
        fn note_local(self: &Reducer, param: usize) -> Result<()>;
        /// In a static graph: takes note of a part of a gradient; true if it is the last.
        fn accumulated(self: &Reducer, param: usize) -> Result<bool>;
        /// Whether a gradient lies where it belongs; `ptr` is not read.
        unsafe fn is_slot(self: &Reducer, param: usize, ptr: *const u8) -> Result<bool>;
        /// A slot of a parameter, unless tensors hold all of them.
        fn take_slot(self: &Reducer, param: usize) -> Result<Box<SlotLease>>;
        /// Starts the predictions of a backward on a thread whose allocator calls `place`.
        fn start_placement(self: &Reducer);
        /// Returns the slot for an allocation of `bytes` bytes that is predicted to become a gradient; an empty lease if
        /// none is predicted.
        fn place(self: &Reducer, bytes: usize) -> Box<SlotLease>;
        /// Reports that the allocation of the last `place`, which returned an empty lease, lies at `ptr`. `ptr` is not read.
        unsafe fn placed_elsewhere(self: &Reducer, bytes: usize, ptr: *const u8);
        /// The gradient of a parameter was made at `ptr`, which is not read, and not in its slot.
        unsafe fn observe(self: &Reducer, param: usize, ptr: *const u8) -> Result<()>;
        /// Takes note that a gradient, or its stand-in if not `used`, is complete at `ptr`. Returns the buckets that
        /// the caller reduces now, if it does.
        ///
        /// # Safety
        /// The bytes stay valid and untouched until `finish` or `abandon` returns.
        unsafe fn mark_ready(self: &Reducer, param: usize, ptr: *mut u8, used: bool) -> Result<Buckets>;
        /// Buckets of the plan in force; none if all gradients are sparse.
        fn num_buckets(self: &Reducer) -> Result<usize>;
        /// Describes a bucket; throws if there is no such bucket.
        fn bucket(self: &Reducer, index: usize) -> Result<BucketDescription>;
        /// Where the slots are; nowhere on a device.
        fn arena(self: &Reducer) -> Result<Box<Arena>>;
        /// Tells the plan in force from every other one of this process.
        fn plan_number(self: &Reducer) -> Result<u64>;
        /// Packs a bucket on a device and has it reduced in the stream `communication`.
        ///
        /// # Safety
        /// See `smd_core::reducer::Reducer::launch`.
        unsafe fn launch(self: &Reducer, index: usize, bucket: &DeviceBucket, communication: usize) -> Result<()>;
        /// Makes a stream wait for what was launched.
        ///
        /// # Safety
        /// It is a stream of the device that buckets are on.
        unsafe fn follow(self: &Reducer, stream: usize) -> Result<()>;
        /// The caller has reduced a bucket.
        fn reduced_by_caller(self: &Reducer) -> Result<()>;
        /// Parameters without a gradient in this backward so far.
        fn missing(self: &Reducer) -> Result<Vec<usize>>;
        /// The same in the order in which they get a stand-in, or an error if they must have a gradient.
        fn unused_parameters(self: &Reducer, frozen: &[usize]) -> Result<Vec<usize>>;
        /// Waits until everything is reduced; for each parameter whether any rank used it, where this is tracked.
        fn finish(self: &Reducer) -> Result<Vec<u8>>;
        /// Ends a backward that cannot go on.
        fn abandon(self: &Reducer, message: &str, more_follows: bool);
        /// A vote on how a round of gradients is reduced (`smd_core::reducer::ballot`).
        type Ballot;
        /// Votes under `name`, without a reducer for `what`.
        fn cast_ballot(group: u64, name: &str, what: &str, readiness: Readiness) -> Result<Box<Ballot>>;
        /// Waits for what all ranks do.
        fn result(self: &Ballot) -> Result<VoteResult>;
        /// Whether `result` waits no longer.
        fn is_decided(self: &Ballot) -> bool;
        /// After the result `Make`: what `create_reducer_async` takes.
        fn token(self: &Ballot) -> Result<u64>;
        /// A reducer that a thread of the core makes (`smd_core::session::pending_reducer`).
        type PendingReducer;
        /// As `new_reducer`, for rounds; waits for nobody. `order` is that in which gradients came.
        fn create_reducer_async(
            token: u64,
            ranks: &[usize],
            params: &[Param],
            options: &ReducerOptions,
            order: &[usize],
        ) -> Result<Box<PendingReducer>>;
        fn is_done(self: &PendingReducer) -> bool;
        /// Once it is done.
        fn take(self: &PendingReducer) -> Result<Box<Reducer>>;
        /// What the last reduced step did.
        fn record(self: &Reducer) -> Result<StepRecord>;
        /// The buckets, one a line.
        fn describe_plan(self: &Reducer) -> Result<String>;

        /// First byte; null if the lease holds nothing.
        fn ptr(self: &SlotLease) -> *mut u8;
        /// Fills the slot.
        ///
        /// # Safety
        /// As many bytes as the slot has are readable at `from`.
        unsafe fn fill(self: &mut SlotLease, from: *const u8) -> Result<()>;
        /// Fills the slot with zeros.
        fn zero(self: &mut SlotLease) -> Result<()>;

        /// The byte at an offset.
        fn at(self: &Arena, offset_bytes: usize) -> Result<*mut u8>;
    }

    // Gradients of graphs; `smd_core::reducer::arrival` says more. Functions may be called on any thread.
    extern "Rust" {
        /// A reducer that is made when its first gradient comes.
        type GradientPlan;

        /// The plan that the process drew under this number.
        fn find_plan(number: i64) -> Result<Box<GradientPlan>>;
        /// The same plan.
        fn share(self: &GradientPlan) -> Result<Box<GradientPlan>>;
        /// Bytes of a parameter; throws if there is no such parameter.
        fn param_bytes(self: &GradientPlan, param: usize) -> Result<usize>;
        /// Its name.
        fn param_name(self: &GradientPlan, param: usize) -> String;
        /// A slot for the gradient of a parameter that was made at `ptr`, which is not read; nothing if it was made in
        /// one, or tensors hold all of them. `learn` says that the operation which allocated it may get the slot the next time.
        unsafe fn take_slot(self: &GradientPlan, param: usize, ptr: *const u8, learn: bool) -> Box<SlotLease>;
        /// Reports that a gradient was allocated in its slot but must not be changed there, so the prediction was useless.
        fn placed_in_vain(self: &GradientPlan, param: usize);
        /// A gradient is complete, in the slot if `lease` holds it. `owner` is told when it is reduced, unless this
        /// throws.
        ///
        /// # Safety
        /// Until then, the bytes are valid and nobody else touches them; on a device, from what its stream was given so
        /// far.
        unsafe fn arrive(
            self: &GradientPlan,
            param: usize,
            data: &TensorView,
            lease: Box<SlotLease>,
            execution: &Execution,
            owner: SharedPtr<GradientOwner>,
            position: usize,
        ) -> Result<()>;
        /// An execution ends, whatever became of its gradients.
        fn ended(self: &GradientPlan, execution: &Execution);
        /// Returns the slot for an allocation of `bytes` bytes by operation `op` that is predicted to become a gradient; an
        /// empty lease if none is predicted.
        fn place_for_op(bytes: usize, op: usize) -> Box<SlotLease>;
        /// Reports that the allocation of the last `place_for_op` of `op`, which returned an empty lease, lies at `ptr`.
        /// `ptr` is not read.
        unsafe fn placed_elsewhere_for_op(bytes: usize, op: usize, ptr: *const u8);
    }

    unsafe extern "C++" {
        include!("smd/gradient_owner.h");

        /// See the header.
        type GradientOwner;
        /// A gradient is reduced, in the slot if `lease` holds it; `error` is the report, empty on success.
        fn reduced(self: &GradientOwner, position: usize, error: &str, lease: Box<SlotLease>);
        /// Memory of the gradient's device, until it is answered.
        fn allocate(self: &GradientOwner, position: usize, bytes: usize) -> Result<*mut u8>;
        /// The execution needs to tell no more how it goes.
        fn release(self: &GradientOwner);

        include!("smd/completion.h");

        /// See the header.
        type Completion;
        /// Ends the operation; `error` is the report, empty on success. After a receive, `source` is the member that
        /// sent; otherwise it is -1.
        fn done(self: Pin<&mut Completion>, error: &str, source: i64);
        /// Appends to `outputs` memory for `rows[i]` rows from member i.
        fn make_outputs(self: Pin<&mut Completion>, rows: &[usize], outputs: &mut Vec<TensorView>) -> Result<()>;

        include!("smd/bootstrap_store.h");

        /// See the header.
        type BootstrapStore;
        /// Writes a key.
        fn set(self: &BootstrapStore, key: &str, value: &[u8]) -> Result<()>;
        /// Appends a key's value to `value`; false if it has none.
        fn get(self: &BootstrapStore, key: &str, value: &mut Vec<u8>) -> Result<bool>;
        /// Forgets a key.
        fn remove(self: &BootstrapStore, key: &str) -> Result<()>;
    }
}
