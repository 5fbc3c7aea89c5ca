//! CUDA, as far as the core needs it: checked wrappers over cudarc's raw bindings of the driver and of NVRTC.
//!
//! | file | what it owns |
//! | --- | --- |
//! | [`driver`] | whether CUDA is available, a device's primary context, its properties, result codes as errors |
//! | [`stream`] | a stream, created here or by the framework |
//! | [`ending`] | no call of the driver begins while the process ends |
//! | [`event`] | a marker in a stream that another stream waits for |
//! | [`memory`] | memory of the device, memory of a peer's device, host memory that the device maps |
//! | [`kernel`] | kernels compiled from source at run time, and their launch |
//! | [`add`] | a tensor added to one of a wider type |
//! | [`pack`] | many tensors into one flat buffer and back, with a cast |
//!
//! - DEV-1: CUDA is not needed to build this crate or to load it. The libraries are loaded at the first call. On a
//!   machine without them, the call returns a [`crate::Error::Unsupported`] that names the missing one.
//! - DEV-2: the context is the device's primary one, which frameworks use too, so their pointers, streams and events
//!   are valid here. It is kept until the process ends.
//! - DEV-3: every call makes its device current for the calling thread and restores the previous one.
//! - DEV-4: no function here waits for the device unless its name says so (`synchronize`, `read`, `write`).

pub mod add;
pub mod driver;
pub(crate) mod ending;
pub mod event;
pub mod kernel;
pub mod memory;
pub mod nccl;
pub mod pack;
pub mod stream;

pub use driver::{Context, Properties};
pub use event::Event;
pub use kernel::{Grid, Kernel, KernelSource};
pub use memory::{DeviceBuffer, HostMapped, IpcHandle, PeerMemory};
pub use stream::{Capture, Priority, Stream};
