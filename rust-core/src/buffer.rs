//! The borrowed description of a tensor, its element types and reductions. The core has no other tensor type.

use crate::error::{Error, Result};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum DType {
    UInt8 = 0,
    Int8 = 1,
    Int16 = 2,
    Int32 = 3,
    Int64 = 4,
    Float16 = 5,
    BFloat16 = 6,
    Float32 = 7,
    Float64 = 8,
    Bool = 9,
    Complex64 = 10,
    Complex128 = 11,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 12] = [
        DType::UInt8,
        DType::Int8,
        DType::Int16,
        DType::Int32,
        DType::Int64,
        DType::Float16,
        DType::BFloat16,
        DType::Float32,
        DType::Float64,
        DType::Bool,
        DType::Complex64,
        DType::Complex128,
    ];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::UInt8 | DType::Int8 | DType::Bool => 1,
            DType::Int16 | DType::Float16 | DType::BFloat16 => 2,
            DType::Int32 | DType::Float32 => 4,
            DType::Int64 | DType::Float64 | DType::Complex64 => 8,
            DType::Complex128 => 16,
        }
    }

    /// The name that PyTorch and NumPy use.
    pub const fn name(self) -> &'static str {
        match self {
            DType::UInt8 => "uint8",
            DType::Int8 => "int8",
            DType::Int16 => "int16",
            DType::Int32 => "int32",
            DType::Int64 => "int64",
            DType::Float16 => "float16",
            DType::BFloat16 => "bfloat16",
            DType::Float32 => "float32",
            DType::Float64 => "float64",
            DType::Bool => "bool",
            DType::Complex64 => "complex64",
            DType::Complex128 => "complex128",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The reduction that combines the values of different ranks, element by element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the documentation")]
pub enum ReduceOp {
    Sum = 0,
    Average = 1,
    Min = 2,
    Max = 3,
    Product = 4,
    BitAnd = 5,
    BitOr = 6,
    BitXor = 7,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::BitAnd,
        ReduceOp::BitOr,
        ReduceOp::BitXor,
    ];
}

/// Where a tensor's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// Memory of the CUDA device with this index.
    Cuda(u16),
}

/// A contiguous tensor in memory that the core does not own.
///
/// The creator promises that `ptr` is valid for reads and writes of `elems * dtype.size()` bytes, and that no other
/// code accesses them, until the operation that got the view has completed. The promise is made once, in the `unsafe`
/// constructor; all code that uses the view relies on it.
#[derive(Clone, Copy, Debug)]
pub struct TensorView {
    ptr: *mut u8,
    elems: usize,
    dtype: DType,
    device: Device,
    /// CUDA stream that orders the producer and consumer of the bytes; 0 on the CPU.
    stream: usize,
}

// SAFETY: a view is a description; the constructor's promise covers use from the thread that runs the operation.
unsafe impl Send for TensorView {}
// SAFETY: as above; the view itself has no interior mutability.
unsafe impl Sync for TensorView {}

impl TensorView {
    /// Describes `elems` elements at `ptr`.
    ///
    /// # Errors
    /// A null pointer with elements, or a pointer that is not aligned to the element.
    ///
    /// # Safety
    /// The promise of [`TensorView`] holds until the operation that gets the view has completed.
    pub unsafe fn new(ptr: *mut u8, elems: usize, dtype: DType, device: Device, stream: usize) -> Result<Self> {
        if elems > 0 && ptr.is_null() {
            return Err(Error::InvalidArgument(format!("a tensor of {elems} {dtype} elements has no memory")));
        }
        // A complex number is a pair, aligned like one of its components.
        let align = match dtype {
            DType::Complex64 => 4,
            DType::Complex128 => 8,
            other => other.size(),
        };
        if !(ptr as usize).is_multiple_of(align) {
            return Err(Error::InvalidArgument(format!("a {dtype} tensor at {ptr:p} is not aligned to {align} bytes")));
        }
        Ok(Self { ptr, elems, dtype, device, stream })
    }

    /// A view of no elements.
    pub fn empty(dtype: DType) -> Self {
        Self { ptr: std::ptr::null_mut(), elems: 0, dtype, device: Device::Cpu, stream: 0 }
    }

    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }
    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.elems
    }
    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.size()
    }
    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Where the bytes are.
    pub fn device(&self) -> Device {
        self.device
    }
    /// CUDA stream, 0 on the CPU.
    pub fn stream(&self) -> usize {
        self.stream
    }

    /// The same memory, ordered by another CUDA stream.
    pub fn on_stream(self, stream: usize) -> Self {
        Self { stream, ..self }
    }

    /// Elements `start..start + elems` of this view.
    ///
    /// # Panics
    /// If the range does not lie inside the view.
    pub fn slice(&self, start: usize, elems: usize) -> Self {
        assert!(start.checked_add(elems).is_some_and(|end| end <= self.elems), "slice lies inside the view");
        // SAFETY: the assertion keeps the offset inside the allocation that the constructor's promise covers.
        let ptr = if self.ptr.is_null() { self.ptr } else { unsafe { self.ptr.add(start * self.dtype.size()) } };
        Self { ptr, elems, ..*self }
    }

    /// The bytes, to read.
    ///
    /// # Safety
    /// The view is on the CPU, its promise still holds, and no code writes the bytes while the slice lives.
    pub unsafe fn as_bytes<'a>(&self) -> &'a [u8] {
        if self.elems == 0 {
            return &[];
        }
        // SAFETY: the constructor's promise, and the caller's.
        unsafe { std::slice::from_raw_parts(self.ptr, self.bytes()) }
    }

    /// The bytes, to write.
    ///
    /// # Safety
    /// The view is on the CPU, its promise still holds, and no other code reads or writes the bytes while the slice
    /// lives.
    pub unsafe fn as_bytes_mut<'a>(&self) -> &'a mut [u8] {
        if self.elems == 0 {
            return &mut [];
        }
        // SAFETY: the constructor's promise, and the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.bytes()) }
    }
}
