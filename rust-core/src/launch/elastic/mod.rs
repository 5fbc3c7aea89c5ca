//! `smdrun elastic`: a job whose hosts are added and removed while it runs, and whose workers may die without ending
//! it.
//!
//! ```text
//!   discovery script --hosts--> driver --start, stop--> workers            discovery.rs, driver.rs, supervisor.rs
//!                                 |  \--places-> rendezvous --rank--> waiting workers
//!                                 \-----changed hosts------^--> training workers, which then ask for new ranks
//! ```
//!
//! The decisions are in [`driver`], which has no processes and no clock; [`supervisor`] carries them out.

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
            // Nothing can be reported if writing to standard error fails.
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
