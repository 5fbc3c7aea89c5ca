//! Collectives between the devices of one host without NCCL. Each call is one kernel, which writes to the peers' memory
//! over NVLink or PCIe, and for a large all-gather also a copy of the member's own block. These kernels start faster
//! than NCCL's and fold in the order of COL-1, so results have the same bits as on the CPU, except for the payload of
//! NaNs. They run small reductions, all-gathers and broadcasts of any group, large all-reduces between at most eight
//! members, and large reduce-scatters and all-gathers between two ([`chunks`]).
//!
//! Each member has an *arena* on its device, which its peers map: flags with which the kernels' blocks synchronise, and
//! staging memory. `device/kernels/arena.cuh` describes its use by kernels, with the invariants PEER-1 to PEER-5. On
//! the host:
//!
//! - PEER-6: the members decide together whether they are peers: all or none. If one cannot share its memory or reach
//!   another's, all use NCCL.
//! - PEER-7: calls of a member run one after the other, whichever streams they are queued into, also in one CUDA graph.
//! - PEER-8: an arena is freed only when its owner knows that no member uses it any more. Otherwise it stays until the
//!   process ends.

mod alignment;
mod chunks;
mod exchange;
mod kernel_launch;
mod memory_exchange;

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::buffer::{DType, ReduceOp, TensorView};
use crate::collectives::Request;
use crate::config;
use crate::device::{
    Capture, Context, DeviceBuffer, Event, Grid, HostMapped, Kernel, KernelSource, PeerMemory, Stream, nccl,
};
use crate::error::{Error, Result};
use exchange::Blocks;
pub use kernel_launch::KernelTuning;
use kernel_launch::{KernelLaunch, block_bytes, half_bytes};
pub use memory_exchange::{MemberStore, read, write};

const SOURCE: KernelSource =
    KernelSource { name: "reduce.cu", text: include_str!("../../../device/kernels/reduce.cu") };

/// The largest number of members. This constant and those below are mirrored in arena.cuh.
const MAX_RANKS: usize = 16;
const MAX_BLOCKS: u32 = 128;
const FINGERPRINT_BITS: u32 = 24;
/// Bytes in front of an arena's staging memory.
const HEADER_BYTES: usize = MAX_BLOCKS as usize * (MAX_RANKS + 1) * 8 + 256;
/// Bytes of one vector load or store.
const VECTOR: usize = 16;
/// The value of the result's owner if all members get the result.
const ALL: u64 = u64::MAX;

/// Words of the control block, which the host and the kernels share.
const ABORT: usize = 0;
const MISMATCH: usize = 1;
const MISMATCH_CALL: usize = 2;

/// The struct `Peers` of arena.cuh.
#[repr(C)]
#[derive(Clone, Copy)]
struct PeersArgument {
    arenas: [u64; MAX_RANKS],
    control: u64,
    half_bytes: u64,
    me: u32,
    fingerprint: u32,
}

/// The struct `AllReduce` of reduce.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllReduceArgument {
    peers: PeersArgument,
    input: u64,
    output: u64,
    elems: u64,
}

/// The struct `ReduceScatter` of reduce.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReduceScatterArgument {
    peers: PeersArgument,
    inputs: [u64; MAX_RANKS],
    output: u64,
    elems: u64,
}

/// The members of a group whose devices access each other's memory directly.
pub struct Peers {
    context: &'static Context,
    me: usize,
    size: usize,
    /// Freed only if `unused` is set (PEER-8).
    arena: ManuallyDrop<DeviceBuffer>,
    mapped: ManuallyDrop<Vec<PeerMemory>>,
    control: ManuallyDrop<HostMapped>,
    arenas: [u64; MAX_RANKS],
    half_bytes: usize,
    tuning: Mutex<KernelTuning>,
    state: Mutex<CallState>,
    /// Whether calls were captured in a CUDA graph, which may repeat them.
    captured: AtomicBool,
    /// Whether no member uses the arenas any more (PEER-8).
    unused: AtomicBool,
}

/// A difference between the calls of two members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The other member.
    pub member: usize,
    /// The number of this member's call; `None` once calls were captured, because replays are not counted.
    pub call: Option<u32>,
}

struct CallState {
    /// The number of calls so far, without captured ones.
    calls: u32,
    kernels: Vec<(&'static str, DType, ReduceOp, &'static Kernel)>,
    /// The last call that was queued directly (PEER-7).
    run: LastCall<usize>,
    /// The last call that was captured in a graph (PEER-7).
    captured: LastCall<(usize, Capture)>,
}

/// The place where the last call was queued, and an event behind it.
struct LastCall<T> {
    place: Option<T>,
    done: Event,
}

impl<T> LastCall<T> {
    fn new(context: &'static Context) -> Result<Self> {
        Ok(Self { place: None, done: Event::new(context)? })
    }
}

impl CallState {
    /// Returns the kernel for this type and reduction; `load` compiles it at the first use.
    fn kernel(
        &mut self,
        entry: &'static str,
        dtype: DType,
        op: ReduceOp,
        load: impl FnOnce() -> Result<&'static Kernel>,
    ) -> Result<&'static Kernel> {
        if let Some((.., kernel)) = self.kernels.iter().find(|known| (known.0, known.1, known.2) == (entry, dtype, op))
        {
            return Ok(kernel);
        }
        let kernel = load()?;
        self.kernels.push((entry, dtype, op, kernel));
        Ok(kernel)
    }

    /// Makes `stream` wait for the last call, if that was queued into another stream. Captured and direct calls cannot
    /// wait for each other; a graph is ordered where it is launched.
    fn follow(&self, stream: &Stream, capture: Option<Capture>) -> Result<()> {
        let (elsewhere, done) = match capture {
            None => (self.run.place.is_some_and(|last| last != stream.raw()), &self.run.done),
            Some(capture) => {
                let other = |(last, its): (usize, Capture)| last != stream.raw() && its.is(&capture);
                (self.captured.place.is_some_and(other), &self.captured.done)
            }
        };
        if elsewhere { stream.wait(done) } else { Ok(()) }
    }

    /// Notes a launch that was just queued and counts as `calls` calls.
    fn note(&mut self, stream: &Stream, capture: Option<Capture>, calls: u32) -> Result<()> {
        match capture {
            None => {
                self.calls = self.calls.wrapping_add(calls);
                self.run.place = Some(stream.raw());
                self.run.done.record(stream)
            }
            Some(capture) => {
                self.captured.place = Some((stream.raw(), capture));
                self.captured.done.record(stream)
            }
        }
    }
}

impl Peers {
    /// Finds out with the other members whether all reach each other's memory. Messages of at most `peer_bytes` will
    /// use it; the smallest value of all members counts. Returns none if they do not, and logs the reason. Collective.
    ///
    /// # Errors
    /// Any error of `store`.
    pub fn join(
        context: &'static Context,
        me: usize,
        size: usize,
        peer_bytes: usize,
        store: &dyn MemberStore,
    ) -> Result<Option<Self>> {
        if !(2..=MAX_RANKS).contains(&size) {
            return Ok(None);
        }
        // Compiles the most frequent reduction. This shows that there is a compiler, and takes its time before any
        // kernel waits.
        let mut kernels = Vec::new();
        let compile = || {
            if peer_bytes == 0 {
                return Err(Error::Unsupported(format!("`{}` is 0", config::P2P_MAX_BYTES.name)));
            }
            let (dtype, op) = (DType::Float32, ReduceOp::Sum);
            let known = |entry| Ok((entry, dtype, op, kernel(context, entry, dtype, op, size)?));
            kernels = [KernelLaunch::ONE_SHOT, KernelLaunch::TWO_SHOT].into_iter().map(known).collect::<Result<_>>()?;
            if let Some((entry, kernel)) = chunks::kernel(context, op, size)? {
                kernels.push((entry, dtype, op, kernel));
            }
            Ok(())
        };
        let Some(shared) = memory_exchange::share(context, me, size, peer_bytes, store, compile)? else {
            return Ok(None);
        };
        let mut arenas = [0; MAX_RANKS];
        let others = (0..size).filter(|rank| *rank != me).zip(&shared.mapped);
        others.for_each(|(rank, memory)| arenas[rank] = memory.ptr());
        arenas[me] = shared.arena.ptr();
        let state = CallState { calls: 0, kernels, run: LastCall::new(context)?, captured: LastCall::new(context)? };
        Ok(Some(Self {
            context,
            me,
            size,
            arena: ManuallyDrop::new(shared.arena),
            mapped: ManuallyDrop::new(shared.mapped),
            control: ManuallyDrop::new(shared.control),
            arenas,
            half_bytes: half_bytes(shared.bytes, size),
            tuning: Mutex::new(KernelTuning::usual(size, shared.bytes)),
            state: Mutex::new(state),
            captured: AtomicBool::new(false),
            unused: AtomicBool::new(false),
        }))
    }

    /// The sizes at which this member changes its algorithm.
    pub fn tuning(&self) -> KernelTuning {
        *self.tuning.lock()
    }

    /// Sets these sizes; on all members between the same calls.
    pub fn set_tuning(&self, tuning: KernelTuning) {
        *self.tuning.lock() = tuning;
    }

    /// The largest message that is not divided, in bytes.
    pub fn piece_bytes(&self) -> usize {
        self.half_bytes / 2
    }

    /// Whether an all-reduce (in chunks, any collective) of `bytes` would run here with `tuning`: in one piece, or in chunks.
    pub fn supports(&self, bytes: usize, tuning: &KernelTuning) -> bool {
        if tuning.chunks_bytes <= bytes {
            return self.size == 2;
        }
        let one_shot =
            KernelLaunch::all_reduce(bytes, self.size, self.half_bytes, tuning).entry == KernelLaunch::ONE_SHOT;
        bytes <= self.piece_bytes() && one_shot == (bytes <= tuning.one_shot_bytes)
    }

    /// Whether [`Peers::queue`] runs `request`; equal on all members. Reductions that NCCL lacks are accepted at any
    /// size.
    pub fn accepts(&self, request: &Request) -> bool {
        let most = self.tuning.lock().peer_bytes.min(self.piece_bytes());
        match request {
            Request::AllReduce { input, op, .. } | Request::Reduce { input, op, .. } => {
                input.bytes() <= most || nccl::reduction(input, *op).is_err()
            }
            Request::ReduceScatter { inputs, output, op } => {
                (is_even(inputs) && output.bytes() <= block_bytes(most, self.size))
                    || nccl::reduction(output, *op).is_err()
            }
            _ => self.small_blocks(request, most).is_some(),
        }
    }

    /// Queues `request`, which [`Peers::accepts`], into `stream`; divided into pieces if it is larger than the staging
    /// memory. Returns the number of calls so far, as counted in [`Mismatch::call`].
    ///
    /// # Errors
    /// [`Error::Device`]; those of [`Kernel::get`].
    ///
    /// # Safety
    /// The views are valid on this device, as the request demands, until the device has completed the operation.
    /// `stream` belongs to this device.
    pub unsafe fn queue(&self, request: &Request, stream: &Stream) -> Result<u32> {
        alignment::note(request);
        let mut state = self.state.lock();
        // SAFETY, for every call: the caller's promise.
        match request {
            Request::AllReduce { input, output, op } => {
                // SAFETY: see above.
                unsafe { self.reduce(&mut state, input, Some(output), *op, ALL, stream)? };
            }
            Request::Reduce { input, output, op, root } => {
                let output = (self.me == *root).then_some(output);
                // SAFETY: see above.
                unsafe { self.reduce(&mut state, input, output, *op, *root as u64, stream)? };
            }
            Request::ReduceScatter { inputs, output, op } if is_even(inputs) => {
                // SAFETY: see above.
                unsafe { self.reduce_scatter(&mut state, inputs, output, *op, stream)? };
            }
            Request::ReduceScatter { inputs, output, op } => {
                for (root, input) in inputs.iter().enumerate() {
                    let output = (self.me == root).then_some(output);
                    // SAFETY: see above.
                    unsafe { self.reduce(&mut state, input, output, *op, root as u64, stream)? };
                }
            }
            _ => {
                let Some(blocks) = Blocks::of(request, self.me, self.size) else {
                    return Err(Error::Internal("an operation without a kernel for peers was queued for peers".into()));
                };
                // SAFETY: see above.
                unsafe { self.exchange(&mut state, &blocks, stream)? };
            }
        }
        Ok(state.calls)
    }

    /// Reduces to `output`, if this member has one; `owner` is that member, or [`ALL`].
    ///
    /// # Safety
    /// As [`Peers::queue`].
    unsafe fn reduce(
        &self,
        state: &mut CallState,
        input: &TensorView,
        output: Option<&TensorView>,
        op: ReduceOp,
        owner: u64,
        stream: &Stream,
    ) -> Result<()> {
        let (tuning, dtype) = (self.tuning(), input.dtype());
        for (start, elems) in pieces(input.elems(), self.piece_bytes() / dtype.size()) {
            let input = input.slice(start, elems);
            let argument = AllReduceArgument {
                peers: self.argument(&[1, dtype as u64, op as u64, elems as u64, owner]),
                input: input.ptr() as u64,
                output: output.map_or(0, |output| output.slice(start, elems).ptr() as u64),
                elems: elems as u64,
            };
            let KernelLaunch { entry, grid } =
                KernelLaunch::all_reduce(input.bytes(), self.size, self.half_bytes, &tuning);
            let kernel = state.kernel(entry, dtype, op, || kernel(self.context, entry, dtype, op, self.size))?;
            // SAFETY: the argument is the kernel's, declared alike; the arenas live (PEER-8), the rest is the caller's
            // promise.
            unsafe { self.launch(state, kernel, grid, 1, &argument, stream)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Peers::queue`].
    unsafe fn reduce_scatter(
        &self,
        state: &mut CallState,
        inputs: &[TensorView],
        output: &TensorView,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        let (tuning, dtype) = (self.tuning(), output.dtype());
        for (start, elems) in pieces(output.elems(), block_bytes(self.piece_bytes(), self.size) / dtype.size()) {
            let output = output.slice(start, elems);
            let argument = ReduceScatterArgument {
                peers: self.argument(&[2, dtype as u64, op as u64, elems as u64]),
                inputs: addresses(inputs, start, elems),
                output: output.ptr() as u64,
                elems: elems as u64,
            };
            let KernelLaunch { entry, grid } = KernelLaunch::reduce_scatter(output.bytes(), &tuning);
            let kernel = state.kernel(entry, dtype, op, || kernel(self.context, entry, dtype, op, self.size))?;
            // SAFETY: as in `reduce`.
            unsafe { self.launch(state, kernel, grid, 1, &argument, stream)? };
        }
        Ok(())
    }

    /// Ends the kernels that wait now, and every later call. They return at once without a result.
    pub fn abort(&self) {
        self.control.word(ABORT).store(1, Ordering::Release);
    }

    /// The difference between this member's call and another's, if kernels have found one; the kernels of both have
    /// given up.
    pub fn mismatch(&self) -> Option<Mismatch> {
        let member = (self.control.word(MISMATCH).load(Ordering::Acquire) as usize).checked_sub(1)?;
        let call = self.control.word(MISMATCH_CALL).load(Ordering::Acquire);
        Some(Mismatch { member, call: (!self.captured.load(Ordering::Relaxed)).then_some(call) })
    }

    /// Declares that no member has a call in flight any more, so that the memory may be freed (PEER-8).
    pub fn set_unused(&self) {
        self.unused.store(true, Ordering::Release);
    }

    fn argument(&self, call: &[u64]) -> PeersArgument {
        PeersArgument {
            arenas: self.arenas,
            control: self.control.device_ptr(),
            half_bytes: self.half_bytes as u64,
            me: self.me as u32,
            fingerprint: fingerprint(call),
        }
    }

    /// Launches `kernel`, which counts as `calls` calls.
    ///
    /// # Safety
    /// As [`Kernel::launch`].
    unsafe fn launch<T: Copy>(
        &self,
        state: &mut CallState,
        kernel: &Kernel,
        grid: Grid,
        calls: u32,
        argument: &T,
        stream: &Stream,
    ) -> Result<()> {
        let capture = stream.capture()?;
        state.follow(stream, capture)?;
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(grid, argument, stream)? };
        if capture.is_some() {
            self.captured.store(true, Ordering::Relaxed);
        }
        state.note(stream, capture, calls)
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if !*self.unused.get_mut() {
            return;
        }
        // SAFETY: the value ends here, so the fields are not used again; no code uses the memory any more (PEER-8).
        unsafe {
            ManuallyDrop::drop(&mut self.mapped);
            ManuallyDrop::drop(&mut self.arena);
            ManuallyDrop::drop(&mut self.control);
        }
    }
}

fn kernel(
    context: &'static Context,
    entry: &'static str,
    dtype: DType,
    op: ReduceOp,
    size: usize,
) -> Result<&'static Kernel> {
    let ranks = size.to_string();
    let defines = [("TYPE", type_name(dtype)), ("OP", op_name(op)), ("RANKS", ranks.as_str())];
    Kernel::get(context, &SOURCE, entry, &defines)
}

/// Whether all blocks have one length.
fn is_even(blocks: &[TensorView]) -> bool {
    blocks.windows(2).all(|pair| pair[0].elems() == pair[1].elems())
}

/// Divides `elems` elements into ranges of at most `most`, as starts and lengths.
fn pieces(elems: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..elems).step_by(most.max(1)).map(move |start| (start, most.min(elems - start)))
}

fn addresses(views: &[TensorView], start: usize, elems: usize) -> [u64; MAX_RANKS] {
    let mut addresses = [0; MAX_RANKS];
    addresses.iter_mut().zip(views).for_each(|(address, view)| *address = view.slice(start, elems).ptr() as u64);
    addresses
}

/// A hash of a call, which members compare (PEER-2): FNV-1a, folded to the bits that a flag has room for.
fn fingerprint(call: &[u64]) -> u32 {
    let bytes = call.iter().flat_map(|word| word.to_le_bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let hash = (hash ^ (hash >> 32)) as u32;
    (hash ^ (hash >> FINGERPRINT_BITS)) & ((1 << FINGERPRINT_BITS) - 1)
}

/// The type that stands for all types of the same size where values are only moved.
fn bits_of(dtype: DType) -> DType {
    match dtype.size() {
        1 => DType::UInt8,
        2 => DType::Int16,
        4 => DType::Int32,
        // Pairs of four bytes, whose addresses need not be multiples of eight.
        8 if dtype == DType::Complex64 => DType::Complex64,
        8 => DType::Int64,
        _ => DType::Complex128,
    }
}

/// Names of element types in number.cuh.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::UInt8 => "u8",
        DType::Int8 => "i8",
        DType::Int16 => "i16",
        DType::Int32 => "i32",
        DType::Int64 => "i64",
        DType::Float16 => "f16",
        DType::BFloat16 => "bf16",
        DType::Float32 => "f32",
        DType::Float64 => "f64",
        DType::Bool => "truth",
        DType::Complex64 => "c64",
        DType::Complex128 => "c128",
    }
}

/// Names of reductions in number.cuh.
fn op_name(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "Sum",
        ReduceOp::Average => "Average",
        ReduceOp::Min => "Min",
        ReduceOp::Max => "Max",
        ReduceOp::Product => "Product",
        ReduceOp::BitAnd => "BitAnd",
        ReduceOp::BitOr => "BitOr",
        ReduceOp::BitXor => "BitXor",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::kernels;
    use crate::device::kernel::compile_for_test;

    #[test]
    fn kernels_compile_for_every_type() {
        for dtype in DType::ALL {
            let defines = [("TYPE", type_name(dtype)), ("OP", "Sum"), ("RANKS", "3")];
            if compile_for_test(&SOURCE, &defines).is_none() {
                return;
            }
        }
    }

    /// Compiles all reductions in one program, because each program takes long.
    #[test]
    fn every_reduction_has_its_arithmetic() {
        let mut text = "#include \"number.cuh\"\n".to_owned();
        for dtype in DType::ALL {
            for op in ReduceOp::ALL.into_iter().filter(|op| kernels::check(dtype, *op).is_ok()) {
                let (dtype, op) = (type_name(dtype), op_name(op));
                text += &format!(
                    "extern \"C\" __global__ void {op}_{dtype}({dtype} *x) {{ typedef Element<{dtype}> E; \
                     *x = E::narrow({op}::finish({op}::of(E::widen(x[0]), E::widen(x[1])), 3)); }}\n"
                );
            }
        }
        let source = KernelSource { name: "reductions.cu", text: text.leak() };
        compile_for_test(&source, &[]);
    }

    #[test]
    fn calls_that_differ_have_other_fingerprints() {
        let mut seen = std::collections::HashSet::new();
        for dtype in 0..12 {
            for op in 0..8 {
                for elems in [1, 2, 3, 1000, 1001] {
                    let print = fingerprint(&[1, dtype, op, elems, ALL]);
                    assert!(print < 1 << FINGERPRINT_BITS);
                    assert!(seen.insert(print), "dtype {dtype}, op {op}, {elems} elements");
                }
            }
        }
    }

    #[test]
    fn pieces_cover_everything_once() {
        let all = |elems, most| pieces(elems, most).collect::<Vec<_>>();
        assert_eq!(all(0, 4), []);
        assert_eq!(all(4, 4), [(0, 4)]);
        assert_eq!(all(9, 4), [(0, 4), (4, 4), (8, 1)]);
    }
}
