//! CUDA, as far as the core needs it: checked wrappers over cudarc's raw bindings of the driver and of NVRTC.
//!
//! | file | what it owns |
//! | --- | --- |
//! | [`driver`] | whether there is CUDA, a device's primary context, its properties, answers as errors |
//! | [`stream`] | a stream, ours or the framework's |
//! | [`ending`] | nothing is called any more when the process ends |
//! | [`event`] | a place in a stream that another one waits for |
//! | [`memory`] | memory of the device, memory of a peer's device, host memory that the device sees |
//! | [`kernel`] | kernels compiled from source at run time, and their launch |
//! | [`add`] | a tensor added to one of a wider type |
//! | [`pack`] | many tensors into one flat buffer and back, with a cast |
//!
//! - DEV-1: nothing of CUDA is needed to build this crate or to load it. The libraries are looked for at the first
//!   call; a machine without them gets [`crate::Error::Unsupported`] that says which one is missing.
//! - DEV-2: the context is the device's primary one, which frameworks use too, so their pointers, streams and events
//!   are valid here. It is kept until the process ends.
//! - DEV-3: every call makes its device current for the calling thread and puts back what was current before.
//! - DEV-4: nothing here waits for the device unless its name says so (`synchronize`, `read`, `write`).

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
