//! The interface of the core for PyTorch's and TensorFlow's shims.
//!
//! - BRG-1: `bridge.rs` is the only `cxx::bridge` of the project and holds signatures, no logic.
//! - BRG-2: every exported function, and the end of every exported type that has one, runs inside `guard.rs`: nothing
//!   unwinds into C++, and an error crosses as `Error::report()`, unchanged.
//! - BRG-4: an index that C++ passes is checked before it is used.
//! - BRG-3: memory that a call describes belongs to the caller until the call returns (`run`) or its
//!   completion is called (`submit`). A completion is called exactly once, whatever happens.
//!
//! The C++ half of the bridge is compiled twice: into the core's library, which calls completions, and into each
//! shim, which calls the core. [`SOURCES`] carries all that a shim is built from.

mod bridge;
mod calls;
mod chunk_trial;
mod guard;
mod membership;
mod plan;
mod reducer;
mod step_scope;

/// Name and text of every file from which shims are built. `include/` is the include path; all other files are
/// compiled.
pub const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// Keeps the bridge's exported symbols in a library that refers to this crate only through this function.
pub fn link() {}
