//! Adds a tensor to one of a wider type, in one pass over both. PyTorch's kernel for mixed types accesses single
//! elements; this one accesses whole vectors.

use parking_lot::Mutex;

use super::driver::Context;
use super::kernel::{Grid, Kernel, KernelSource};
use super::stream::Stream;
use crate::buffer::{DType, Device, TensorView};
use crate::error::{Error, Result};

const SOURCE: KernelSource = KernelSource { name: "add.cu", text: include_str!("kernels/add.cu") };

/// Threads of a block. Mirrored by add.cu, like the number of bytes below.
const THREADS: usize = 256;
/// Bytes of the narrower type that a thread adds.
const GROUP_BYTES: usize = 16;

/// The struct `Addition` of add.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdditionArgument {
    total: u64,
    addend: u64,
    elems: u64,
}

/// Queues `total += addend` into the stream of `total`: float16 or bfloat16 into float32, each sum rounded once.
///
/// # Errors
/// [`Error::Unsupported`] for other types, [`Error::InvalidArgument`] for views that do not fit together; those of
/// [`Kernel::get`].
///
/// # Safety
/// The views' promise holds until the addition is done; they do not overlap.
pub unsafe fn accumulate(total: &TensorView, addend: &TensorView) -> Result<()> {
    let Device::Cuda(device) = total.device() else {
        return Err(Error::Unsupported("a tensor in CPU memory was passed to an addition on a device".to_owned()));
    };
    if addend.device() != total.device() || addend.elems() != total.elems() {
        return Err(Error::InvalidArgument(format!(
            "cannot add {} elements on {:?} to {} elements on {:?}",
            addend.elems(),
            addend.device(),
            total.elems(),
            total.device()
        )));
    }
    let defines = defines(total.dtype(), addend.dtype())?;
    if total.elems() == 0 {
        return Ok(());
    }
    let context = Context::primary(device)?;
    let blocks = u32::try_from(total.elems().div_ceil(THREADS * GROUP_BYTES / addend.dtype().size()))
        .map_err(|_| Error::InvalidArgument(format!("{} elements are too many for one launch", total.elems())))?;
    let argument =
        AdditionArgument { total: total.ptr() as u64, addend: addend.ptr() as u64, elems: total.elems() as u64 };
    // SAFETY: the views' promise covers their stream.
    let stream = unsafe { Stream::borrowed(context, total.stream()) };
    // SAFETY: `AdditionArgument` matches the kernel's parameter; the rest is the caller's promise.
    unsafe {
        kernel(context, addend.dtype(), &defines)?.launch(Grid { blocks, threads: THREADS as u32 }, &argument, &stream)
    }
}

/// Cached, because looking a kernel up by its name takes longer than launching it.
fn kernel(
    context: &'static Context,
    addend: DType,
    defines: &[(&'static str, &'static str); 2],
) -> Result<&'static Kernel> {
    static KNOWN: Mutex<Vec<(u16, DType, &'static Kernel)>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock();
    if let Some((.., kernel)) = known.iter().find(|(device, dtype, _)| (*device, *dtype) == (context.device(), addend))
    {
        return Ok(kernel);
    }
    let kernel = Kernel::get(context, &SOURCE, "accumulate", defines)?;
    known.push((context.device(), addend, kernel));
    Ok(kernel)
}

/// Type names of add.cu.
fn defines(total: DType, addend: DType) -> Result<[(&'static str, &'static str); 2]> {
    let narrow = match (total, addend) {
        (DType::Float32, DType::Float16) => "f16",
        (DType::Float32, DType::BFloat16) => "bf16",
        _ => return Err(Error::Unsupported(format!("there is no kernel that adds {addend} to {total}"))),
    };
    Ok([("TOTAL", "f32"), ("ADDEND", narrow)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::kernel::compile_for_test;

    #[test]
    fn every_sum_compiles() {
        for addend in [DType::Float16, DType::BFloat16] {
            if compile_for_test(&SOURCE, &defines(DType::Float32, addend).unwrap()).is_none() {
                return;
            }
        }
    }

    #[test]
    fn sums_of_other_types_are_refused() {
        let text = defines(DType::Float64, DType::Float32).unwrap_err().to_string();
        assert_eq!(text, "there is no kernel that adds float32 to float64");
    }
}
