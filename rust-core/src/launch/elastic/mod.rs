//! `smdrun elastic`: a job whose hosts come and go, and whose workers may die without ending it.
//!
//! ```text
//!   discovery script --hosts--> driver --start, stop--> workers            discovery.rs, driver.rs, supervisor.rs
//!                                 |  \--seats--> rendezvous --rank--> workers that wait
//!                                 \-----news of hosts------^--> those that train, who then come for new ranks
//! ```
//!
//! What is decided is in [`driver`], which has no processes and no clock; [`supervisor`] does it.

mod args;
mod discovery;
mod driver;
mod hosts;
mod supervisor;

use std::ffi::OsString;

use super::USAGE_EXIT_CODE;

pub use driver::{Driver, ElasticLimits, JobOutcome, WorkerAction, WorkerId};
pub use hosts::{Cooldown, HostPool, WorkerSlot, jitter};

pub(super) use args::{HostList, hosts};

/// Runs `smdrun elastic` (`argv` begins with `elastic`) and returns its exit code.
pub(super) fn main(argv: &[OsString]) -> i32 {
    let args = match args::parse(argv) {
        Ok(args) => args,
        Err(usage) => {
            // What is left to say when not even this can be written?
            let _ = usage.print();
            return usage.exit_code();
        }
    };
    match supervisor::run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("smdrun: error: {}", error.report());
            USAGE_EXIT_CODE
        }
    }
}
