//! Copies many tensors into one flat buffer and back, in few launches, with a cast on the way.

use super::driver::Context;
use super::kernel::{Grid, Kernel, KernelSource};
use super::stream::Stream;
use crate::buffer::DType;
use crate::error::{Error, Result};

const SOURCE: KernelSource = KernelSource { name: "pack.cu", text: include_str!("kernels/pack.cu") };

/// One tensor and its place in the flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedPiece {
    /// Address of the tensor, on the device.
    pub tensor: u64,
    /// Where it starts in the flat buffer, in elements.
    pub offset: usize,
    /// Length in elements.
    pub elems: usize,
}

/// Largest number of pieces of one launch: a kernel's argument has at most 4 KiB.
const PIECES: usize = 120;
/// Threads of a block; mirrored by the kernel's launch bounds.
const THREADS: u32 = 256;
/// Bytes, in the wider type, that one block moves: large enough to amortise its start, small enough to occupy the
/// device.
const BLOCK_BYTES: usize = 32 << 10;

/// The struct `Piece` of pack.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Entry {
    tensor: u64,
    offset: u64,
    elems: u64,
    first_block: u64,
}

/// The struct `Pieces` of pack.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct PiecesArgument {
    flat: u64,
    count: u32,
    block_elems: u32,
    pieces: [Entry; PIECES],
}

const _: () = assert!(size_of::<PiecesArgument>() <= 4096, "a kernel's arguments have at most 4 KiB");

/// Packs tensors into a flat buffer, or unpacks them, between two element types.
#[derive(Clone, Copy, Debug)]
pub struct Packer {
    kernel: &'static Kernel,
    tensors: DType,
    flat: DType,
}

impl Packer {
    /// Prepares copies of tensors of type `tensors` into a flat buffer of type `flat`. The types are equal, or two
    /// floating-point types.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for other pairs; those of [`Kernel::get`].
    pub fn pack(context: &'static Context, tensors: DType, flat: DType) -> Result<Self> {
        let kernel = Kernel::get(context, &SOURCE, "pack", &defines(tensors, flat, "1")?)?;
        Ok(Self { kernel, tensors, flat })
    }

    /// Prepares copies in the opposite direction.
    ///
    /// # Errors
    /// As [`Packer::pack`].
    pub fn unpack(context: &'static Context, flat: DType, tensors: DType) -> Result<Self> {
        let kernel = Kernel::get(context, &SOURCE, "pack", &defines(flat, tensors, "0")?)?;
        Ok(Self { kernel, tensors, flat })
    }

    /// Queues the copies of all `pieces` between their tensors and the buffer at `flat`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address that is not aligned to its element, [`Error::Device`].
    ///
    /// # Safety
    /// Every tensor, and the flat buffer at every piece's offset, is memory of the stream's device with as many
    /// elements until the copies are done; destinations overlap nothing else.
    pub unsafe fn run(&self, pieces: &[PackedPiece], flat: u64, stream: &Stream) -> Result<()> {
        let wider = self.tensors.size().max(self.flat.size());
        let block_elems = BLOCK_BYTES / wider;
        aligned(flat, self.flat)?;
        for chunk in pieces.chunks(PIECES) {
            let mut argument =
                PiecesArgument { flat, count: 0, block_elems: block_elems as u32, pieces: [Entry::default(); PIECES] };
            let mut blocks = 0;
            for piece in chunk.iter().filter(|piece| piece.elems > 0) {
                aligned(piece.tensor, self.tensors)?;
                argument.pieces[argument.count as usize] = Entry {
                    tensor: piece.tensor,
                    offset: piece.offset as u64,
                    elems: piece.elems as u64,
                    first_block: blocks,
                };
                argument.count += 1;
                blocks += piece.elems.div_ceil(block_elems) as u64;
            }
            if blocks == 0 {
                continue;
            }
            let blocks = u32::try_from(blocks).map_err(|_| {
                Error::InvalidArgument(format!(
                    "the arguments for {} tensors are too large for one launch",
                    chunk.len()
                ))
            })?;
            // SAFETY: `PiecesArgument` matches the kernel's parameter; the rest is the caller's promise.
            unsafe { self.kernel.launch(Grid { blocks, threads: THREADS }, &argument, stream)? };
        }
        Ok(())
    }
}

fn aligned(address: u64, dtype: DType) -> Result<()> {
    // Without a cast, elements are moved as words of their size, 8 bytes for complex128.
    let align = dtype.size().min(8) as u64;
    if address.is_multiple_of(align) {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("a {dtype} tensor at {address:#x} is not aligned to {align} bytes")))
}

/// Type names of pack.cu. Equal types are moved by their size alone.
fn defines(from: DType, to: DType, pack: &'static str) -> Result<[(&'static str, &'static str); 3]> {
    let float = |dtype| match dtype {
        DType::Float16 => Some("f16"),
        DType::BFloat16 => Some("bf16"),
        DType::Float32 => Some("f32"),
        DType::Float64 => Some("f64"),
        _ => None,
    };
    let (from, to) = match (float(from), float(to)) {
        _ if from == to => {
            let word = match from.size() {
                1 => "u8",
                2 => "u16",
                4 => "u32",
                8 => "u64",
                _ => "Pair",
            };
            (word, word)
        }
        // Conversion goes through float32, which would round a float64 twice on its way to 16 bits.
        (Some(from_name), Some(to_name)) if from.size() + to.size() != 10 => (from_name, to_name),
        _ => return Err(Error::Unsupported(format!("there is no cast of {from} into {to} when tensors are packed"))),
    };
    Ok([("FROM", from), ("TO", to), ("PACK", pack)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::kernel::compile_for_test;

    #[test]
    fn every_cast_compiles() {
        let floats = [DType::Float16, DType::BFloat16, DType::Float32, DType::Float64];
        let casts = floats.iter().flat_map(|from| floats.iter().map(|to| (*from, *to)));
        let moves = [DType::UInt8, DType::Int16, DType::Int32, DType::Int64, DType::Complex128];
        for (from, to) in casts.filter(|(from, to)| from != to).chain(moves.map(|dtype| (dtype, dtype))) {
            let Ok(defines) = defines(from, to, if from.size() < to.size() { "0" } else { "1" }) else {
                continue;
            };
            if compile_for_test(&SOURCE, &defines).is_none() {
                return;
            }
        }
    }

    #[test]
    fn casts_of_other_types_are_refused() {
        let text = defines(DType::Int32, DType::Float16, "1").unwrap_err().to_string();
        assert_eq!(text, "there is no cast of int32 into float16 when tensors are packed");
        assert!(defines(DType::Float64, DType::BFloat16, "1").is_err());
    }
}
