//! The bridge: what C++ may say to the core, and the one thing that the core says back.

pub use ffi::*;

use crate::calls::{check_interrupt, group_rank, group_size, rank, run, session_id, size, submit};

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
        Barrier,
        Send,
        Recv,
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
        /// Root or peer, a rank inside the group; -1 receives from anybody.
        peer: i64,
        /// Of send and recv.
        tag: u32,
        inputs: &'a [TensorView],
        outputs: &'a [TensorView],
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

        /// Runs the operation on the caller's thread and returns when this rank's part is complete.
        ///
        /// # Safety
        /// The views describe memory as `smd_core::buffer::TensorView` demands, until the call returns.
        unsafe fn run(call: &Call) -> Result<()>;

        /// Queues the operation. If this returns an error, `done` is not called; otherwise it is called once, from
        /// a thread of the core.
        ///
        /// # Safety
        /// As `run`, until `done` is called.
        unsafe fn submit(call: &Call, done: UniquePtr<Completion>) -> Result<()>;

        /// For waits outside the core: throws if a signal asks the calling thread to end its wait in `during`.
        fn check_interrupt(during: &str) -> Result<()>;
    }

    unsafe extern "C++" {
        include!("smd/completion.h");

        /// See the header.
        type Completion;
        /// Ends the operation; `error` is the report, empty on success.
        fn done(self: Pin<&mut Completion>, error: &str);
    }
}
