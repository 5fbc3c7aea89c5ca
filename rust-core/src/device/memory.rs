//! Memory: of the device, of a peer's device, and host memory that the device maps.

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use cudarc::driver::sys;

use super::driver::{Context, check, relaxed};
use super::stream::Stream;
use crate::buffer::{Device, TensorView};
use crate::error::{Error, Result};

/// Memory of a device, from `cuMemAlloc`, so that it can be shared with other processes.
#[derive(Debug)]
pub struct DeviceBuffer {
    ptr: u64,
    bytes: usize,
    context: &'static Context,
}

impl DeviceBuffer {
    /// Allocates `bytes` zeroed bytes. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`], for example if the memory is exhausted.
    pub fn zeroed(context: &'static Context, bytes: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut ptr = 0;
        relaxed(|| {
            // SAFETY: `ptr` is valid for the write and the context is current.
            check(unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes) }, || {
                format!("allocating {bytes} bytes on `cuda:{}`", context.device())
            })
        })?;
        let buffer = Self { ptr, bytes, context };
        let stream = Stream::new(context, super::Priority::Normal)?;
        // SAFETY: the range was just allocated.
        check(unsafe { sys::cuMemsetD8Async(ptr, 0, bytes, stream.handle()) }, || {
            format!("zeroing {bytes} bytes on `cuda:{}`", context.device())
        })?;
        stream.synchronize()?;
        Ok(buffer)
    }

    /// Address of the first byte.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// A handle with which another process of this host can map the memory.
    ///
    /// # Errors
    /// [`Error::Device`] if the system does not support CUDA IPC.
    pub fn export(&self) -> Result<IpcHandle> {
        let _entered = self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: `handle` is valid for the write; the address is the start of an allocation.
        check(unsafe { sys::cuIpcGetMemHandle(&mut handle, self.ptr) }, || {
            format!("sharing {} bytes of `cuda:{}`", self.bytes, self.context.device())
        })?;
        Ok(IpcHandle(handle.reserved.iter().map(|byte| *byte as u8).collect()))
    }

    /// Copies `data` to byte `offset` and waits for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range outside the buffer, [`Error::Device`].
    pub fn write(&self, offset: usize, data: &[u8], stream: &Stream) -> Result<()> {
        self.inside(offset, data.len())?;
        let _entered = self.context.enter()?;
        // SAFETY: the range lies inside the buffer; `data` outlives the copy, which is waited for.
        let answer = unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.ptr + offset as u64, data.as_ptr().cast(), data.len(), stream.handle())
        };
        check(answer, || format!("writing {} bytes to `cuda:{}`", data.len(), self.context.device()))?;
        stream.synchronize()
    }

    /// Copies from byte `offset` to `data` and waits for it.
    ///
    /// # Errors
    /// As [`DeviceBuffer::write`].
    pub fn read(&self, offset: usize, data: &mut [u8], stream: &Stream) -> Result<()> {
        self.inside(offset, data.len())?;
        let _entered = self.context.enter()?;
        let (from, to) = (self.ptr + offset as u64, data.as_mut_ptr().cast());
        // SAFETY: the range lies inside the buffer; `data` outlives the copy, which is waited for.
        check(unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, data.len(), stream.handle()) }, || {
            format!("reading {} bytes from `cuda:{}`", data.len(), self.context.device())
        })?;
        stream.synchronize()
    }

    fn inside(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "{bytes} bytes at byte {offset} do not lie inside a buffer of {} bytes",
            self.bytes
        )))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the memory is ours; the driver waits for work that uses it. An error means that the driver is
            // shutting down, which frees everything.
            relaxed(|| unsafe { sys::cuMemFree_v2(self.ptr) });
        }
    }
}

/// A handle for a [`DeviceBuffer`] that other processes of the host can open.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct IpcHandle(Vec<u8>);

/// A [`DeviceBuffer`] of another process, in this process's address space.
#[derive(Debug)]
pub struct PeerMemory {
    ptr: u64,
    context: &'static Context,
}

impl PeerMemory {
    /// Maps a peer's buffer; kernels of `context` reach it over NVLink or PCIe.
    ///
    /// # Errors
    /// [`Error::Device`] where the devices do not reach each other, or the handle is this process's own.
    pub fn open(context: &'static Context, handle: &IpcHandle) -> Result<Self> {
        let bytes: [u8; 64] = (handle.0.as_slice().try_into())
            .map_err(|_| Error::Internal(format!("a CUDA IPC handle of {} bytes", handle.0.len())))?;
        let handle = sys::CUipcMemHandle { reserved: bytes.map(|byte| byte as c_char) };
        let _entered = context.enter()?;
        let mut ptr = 0;
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        relaxed(|| {
            // SAFETY: `ptr` is valid for the write and the context is current; the driver validates the handle.
            check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut ptr, handle, flags) }, || {
                format!("mapping memory of a peer on `cuda:{}`", context.device())
            })
        })?;
        Ok(Self { ptr, context })
    }

    /// Address of the first byte, in this process.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the mapping is ours. An error means that the driver is shutting down.
            relaxed(|| unsafe { sys::cuIpcCloseMemHandle(self.ptr) });
        }
    }
}

/// Zeroed host memory that the device maps, for words that the host and kernels share. The device reads it over PCIe,
/// so rarely.
#[derive(Debug)]
pub struct HostMapped {
    host: NonNull<u8>,
    device: u64,
    words: usize,
    context: &'static Context,
}

// SAFETY: the memory lives as long as the value, and is reached through atomics only.
unsafe impl Send for HostMapped {}
// SAFETY: as above.
unsafe impl Sync for HostMapped {}

impl HostMapped {
    /// `words` words of 32 bits.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn zeroed(context: &'static Context, words: usize) -> Result<Self> {
        let during = || format!("allocating {words} words of host memory for `cuda:{}`", context.device());
        let _entered = context.enter()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: `host` is valid for the write and the context is current.
        check(relaxed(|| unsafe { sys::cuMemHostAlloc(&mut host, words * 4, flags) }), during)?;
        let start = NonNull::new(host.cast::<u8>())
            .ok_or_else(|| Error::Internal("CUDA allocated host memory at the null pointer".into()))?;
        let mut memory = Self { host: start, device: 0, words, context };
        // SAFETY: the memory was just allocated, and no other code sees it yet.
        unsafe { std::ptr::write_bytes(start.as_ptr(), 0, words * 4) };
        // SAFETY: `device` is valid for the write; the memory was allocated mapped.
        check(unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.device, host, 0) }, during)?;
        Ok(memory)
    }

    /// Address of the first word for the device.
    pub fn device_ptr(&self) -> u64 {
        self.device
    }

    /// One word.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.words, "word {index} of {}", self.words);
        // SAFETY: the word lies inside the allocation, is aligned, and is reached through atomics only; the device
        // uses accesses of the same size.
        unsafe { AtomicU32::from_ptr(self.host.as_ptr().cast::<u32>().add(index)) }
    }
}

impl Drop for HostMapped {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: the memory is ours. An error means that the driver is shutting down.
            relaxed(|| unsafe { sys::cuMemFreeHost(self.host.as_ptr().cast()) });
        }
    }
}

/// Queues a copy of `bytes` bytes inside the device, or between devices with peer access.
///
/// # Errors
/// [`Error::Device`].
///
/// # Safety
/// Both ranges are device memory until the copy is done. No other code writes the source or accesses the destination.
pub unsafe fn copy(to: u64, from: u64, bytes: usize, stream: &Stream) -> Result<()> {
    let _entered = stream.context().enter()?;
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.handle()) }, || {
        format!("copying {bytes} bytes on `cuda:{}`", stream.context().device())
    })
}

/// Queues setting `bytes` bytes to `value`.
///
/// # Errors
/// [`Error::Device`].
///
/// # Safety
/// The range is memory of the stream's device until this is done, and no other code accesses it.
pub unsafe fn fill(to: u64, value: u8, bytes: usize, stream: &Stream) -> Result<()> {
    let _entered = stream.context().enter()?;
    // SAFETY: the caller's promise.
    check(unsafe { sys::cuMemsetD8Async(to, value, bytes, stream.handle()) }, || {
        format!("filling {bytes} bytes on `cuda:{}`", stream.context().device())
    })
}

/// Copies a tensor to another one: at once in CPU memory, queued into the views' stream on a device.
///
/// # Errors
/// [`Error::InvalidArgument`] if lengths or devices differ, [`Error::Device`].
///
/// # Safety
/// The views' promise holds until the copy is done; they do not overlap.
pub unsafe fn copy_tensor(from: &TensorView, to: &TensorView) -> Result<()> {
    if from.bytes() != to.bytes() || from.device() != to.device() {
        return Err(Error::InvalidArgument(format!(
            "cannot copy {} bytes on {:?} to {} bytes on {:?}",
            from.bytes(),
            from.device(),
            to.bytes(),
            to.device()
        )));
    }
    match to.device() {
        _ if to.elems() == 0 => Ok(()),
        Device::Cpu => {
            // SAFETY: the caller's promise, for both.
            unsafe { to.as_bytes_mut().copy_from_slice(from.as_bytes()) };
            Ok(())
        }
        Device::Cuda(device) => {
            let context = Context::primary(device)?;
            // SAFETY: the views' promise covers their stream.
            let stream = unsafe { Stream::borrowed(context, to.stream()) };
            // SAFETY: the caller's promise.
            unsafe { copy(to.ptr() as u64, from.ptr() as u64, to.bytes(), &stream) }
        }
    }
}

/// Sets a tensor to zeros, as [`copy_tensor`] copies one.
///
/// # Errors
/// [`Error::Device`].
///
/// # Safety
/// The view's promise holds until it is done.
pub unsafe fn clear_tensor(view: &TensorView) -> Result<()> {
    match view.device() {
        _ if view.elems() == 0 => Ok(()),
        Device::Cpu => {
            // SAFETY: the caller's promise.
            unsafe { view.as_bytes_mut().fill(0) };
            Ok(())
        }
        Device::Cuda(device) => {
            let context = Context::primary(device)?;
            // SAFETY: the view's promise covers its stream.
            let stream = unsafe { Stream::borrowed(context, view.stream()) };
            // SAFETY: the caller's promise.
            unsafe { fill(view.ptr() as u64, 0, view.bytes(), &stream) }
        }
    }
}
