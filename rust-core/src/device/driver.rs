//! The CUDA driver: whether it is available, a device's primary context, and its result codes as errors.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use parking_lot::Mutex;

use super::ending::{self, DriverCallGuard};
use crate::error::{Error, Result};

/// Converts a result code; `doing` names the call for the error.
pub(crate) fn check(answer: CUresult, doing: impl FnOnce() -> String) -> Result<()> {
    if answer == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(Error::Device { doing: doing(), answer: text(answer) }) }
}

/// CUDA's name and text of a result code.
pub(crate) fn text(answer: CUresult) -> String {
    let query = |function: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut found = std::ptr::null();
        // SAFETY: `found` is valid for the write; the driver is loaded, since it gave the answer.
        let known = unsafe { function(answer, &mut found) } == CUresult::CUDA_SUCCESS && !found.is_null();
        // SAFETY: the driver's strings are static and end with a zero.
        known.then(|| unsafe { CStr::from_ptr(found) }.to_string_lossy().into_owned())
    };
    let name = query(sys::cuGetErrorName).unwrap_or_else(|| format!("CUresult {}", answer as u32));
    match query(sys::cuGetErrorString) {
        Some(text) => format!("{name} ({text})"),
        None => name,
    }
}

/// Whether CUDA can be used in this process; the first result is cached.
///
/// # Errors
/// [`Error::Unsupported`] saying what is missing.
pub fn available() -> Result<()> {
    static ANSWER: OnceLock<Result<()>> = OnceLock::new();
    ANSWER
        .get_or_init(|| {
            // SAFETY: loading the driver runs its initialisers, as every program that uses CUDA does.
            if !unsafe { sys::is_culib_present() } {
                return Err(Error::Unsupported(
                    "CUDA is not available: `libcuda.so.1` was not found; install NVIDIA's driver, or use CPU tensors"
                        .into(),
                ));
            }
            // SAFETY: no preconditions.
            check(unsafe { sys::cuInit(0) }, || "initialising CUDA".into())
                .map_err(|error| Error::Unsupported(format!("CUDA is not available: {error}")))
        })
        .clone()
}

/// Number of devices that this process sees.
///
/// # Errors
/// As [`available`].
pub fn device_count() -> Result<u16> {
    available()?;
    let mut count = 0;
    // SAFETY: `count` is valid for the write.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, || "counting CUDA devices".into())?;
    Ok(u16::try_from(count).unwrap_or(0))
}

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The driver's name of it: `NVIDIA H200`.
    pub name: String,
    /// Compute capability: (9, 0).
    pub compute: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// PCI address: `0000:0f:00.0`. It is the same in every process, whatever `CUDA_VISIBLE_DEVICES` says.
    pub pci: String,
    /// The device's UUID.
    pub uuid: [u8; 16],
}

/// A device and its primary context (DEV-2).
#[derive(Debug)]
pub struct Context {
    device: u16,
    handle: sys::CUdevice,
    raw: sys::CUcontext,
    properties: Properties,
}

// SAFETY: a context may be used from any thread; the value is never changed once made.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Returns the primary context of the device with this index, created if necessary.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without CUDA, [`Error::InvalidArgument`] for an index that does not exist,
    /// [`Error::Device`].
    pub fn primary(device: u16) -> Result<&'static Context> {
        static CONTEXTS: Mutex<Vec<&'static Context>> = Mutex::new(Vec::new());
        let mut contexts = CONTEXTS.lock();
        if let Some(context) = contexts.iter().find(|context| context.device == device) {
            return Ok(context);
        }
        let count = device_count()?;
        if device >= count {
            return Err(Error::InvalidArgument(format!(
                "there is no `cuda:{device}`: this process sees {count} devices"
            )));
        }
        let mut handle = 0;
        // SAFETY: `handle` is valid for the write, and the driver is initialised.
        check(unsafe { sys::cuDeviceGet(&mut handle, c_int::from(device)) }, || format!("finding `cuda:{device}`"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is valid for the write, and the device was found above.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, handle) }, || {
            format!("creating the context of `cuda:{device}`")
        })?;
        let properties = properties(device, handle)?;
        let context: &'static Context = Box::leak(Box::new(Context { device, handle, raw, properties }));
        contexts.push(context);
        Ok(context)
    }

    /// The device's index in this process.
    pub fn device(&self) -> u16 {
        self.device
    }

    /// Properties of the device.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Makes this context current for the calling thread until the guard is dropped (DEV-3).
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`] when the process ends (DEV-5).
    pub fn enter(&self) -> Result<ContextGuard> {
        let guard = ending::enter_driver()?;
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is valid for the write.
        let outcome = unsafe { sys::cuCtxGetCurrent(&mut current) };
        check(outcome, || "querying the current CUDA context".into())?;
        if current == self.raw {
            return Ok(ContextGuard { pushed: false, guard, not_send: std::marker::PhantomData });
        }
        // SAFETY: the context is never released.
        check(unsafe { sys::cuCtxPushCurrent_v2(self.raw) }, || {
            format!("entering the context of `cuda:{}`", self.device)
        })?;
        Ok(ContextGuard { pushed: true, guard, not_send: std::marker::PhantomData })
    }

    /// Whether kernels on this device can read and write the memory of the device at `pci` (as in
    /// [`Properties::pci`]); `false` also when this process does not see that device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn reaches(&self, pci: &str) -> Result<bool> {
        if pci == self.properties.pci {
            return Ok(true);
        }
        let name = std::ffi::CString::new(pci).map_err(|_| Error::Internal("a PCI address with a zero byte".into()))?;
        let mut peer = 0;
        // SAFETY: `peer` is valid for the write and the name ends with a zero.
        if unsafe { sys::cuDeviceGetByPCIBusId(&mut peer, name.as_ptr()) } != CUresult::CUDA_SUCCESS {
            return Ok(false);
        }
        let mut can = 0;
        // SAFETY: `can` is valid for the write; both are devices that the driver named.
        check(unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.handle, peer) }, || {
            format!("asking whether `cuda:{}` reaches the device at {pci}", self.device)
        })?;
        Ok(can != 0)
    }

    /// Least and greatest priority of streams; the greater one is the smaller number.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub(super) fn priorities(&self) -> Result<(c_int, c_int)> {
        let _entered = self.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both are valid for the write.
        check(unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }, || {
            "querying the priorities of streams".into()
        })?;
        Ok((least, greatest))
    }
}

/// While this value lives, a context is current for this thread; see [`Context::enter`].
#[must_use = "the context is current only while this lives"]
#[derive(Debug)]
pub struct ContextGuard {
    pushed: bool,
    #[expect(dead_code, reason = "held (DEV-5)")]
    guard: DriverCallGuard,
    /// Not `Send`, because the current context belongs to the thread.
    not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: this thread pushed a context and has not popped it since. An error means that the driver is
            // shutting down, when nothing is current any more.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

/// Runs `action`, which may allocate or load modules, while another thread may be capturing a stream. Relaxes this
/// thread's capture mode, in which CUDA would otherwise refuse such calls.
pub(crate) fn relaxed<T>(action: impl FnOnce() -> T) -> T {
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: `mode` is valid and gets this thread's mode so far.
    let exchanged = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) } == CUresult::CUDA_SUCCESS;
    let outcome = action();
    if exchanged {
        // SAFETY: as above; puts the mode back.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
    }
    outcome
}

fn properties(device: u16, handle: sys::CUdevice) -> Result<Properties> {
    let during = || format!("querying the properties of `cuda:{device}`");
    let attribute = |attribute: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: `value` is valid for the write; the device was found by the driver.
        check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, handle) }, during)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    let mut name = [0 as c_char; 128];
    // SAFETY: the driver writes at most the length that it is told, with a zero at the end.
    check(unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, handle) }, during)?;
    let mut pci = [0 as c_char; 32];
    // SAFETY: as above.
    check(unsafe { sys::cuDeviceGetPCIBusId(pci.as_mut_ptr(), pci.len() as c_int, handle) }, during)?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is valid for the write.
    check(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, handle) }, during)?;
    let string = |text: &[c_char]| {
        let bytes: Vec<u8> = text.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(Properties {
        name: string(&name),
        compute: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        pci: string(&pci),
        uuid: uuid.bytes.map(|byte| byte as u8),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn a_machine_without_cuda_says_so() {
        match device_count() {
            Ok(count) => assert_eq!(Context::primary(count).unwrap_err().code(), Code::InvalidArgument),
            Err(error) => {
                assert_eq!(error.code(), Code::Unsupported, "{error}");
                assert_eq!(Context::primary(0).unwrap_err().code(), Code::Unsupported);
            }
        }
    }
}
