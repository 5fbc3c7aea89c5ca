//! The command line of `smdrun elastic`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use super::driver::ElasticLimits;
use super::hosts::Cooldown;
use crate::error::{Error, Result};

/// Names of hosts and their slots, in order.
pub(in super::super) type HostList = Vec<(String, usize)>;

/// Starts an elastic job: workers run on the hosts that a script finds, and each session of the training uses the hosts
/// that are available.
#[derive(Debug, Parser)]
#[command(
    name = "smdrun elastic",
    override_usage = "smdrun elastic -n N --min-np N --host-discovery-script SCRIPT [OPTIONS] COMMAND...",
    after_help = "The script prints `host:slots` lines and runs every second. The command is run unchanged."
)]
pub(super) struct ElasticArgs {
    /// Number of slots of the first session
    #[arg(short = 'n', long = "num-processes", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub first: u32,

    /// The job waits until there are this many slots; default: those of the first session
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub min_np: Option<u32>,

    /// The job uses at most this many slots
    #[arg(long, value_name = "N", default_value = "4096", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_np: u32,

    /// Script that prints the hosts and their slots
    #[arg(long, value_name = "SCRIPT", required_unless_present = "hosts", conflicts_with = "hosts")]
    pub host_discovery_script: Option<OsString>,

    /// A fixed list of hosts and slots instead of a script, such as `a:2,b:2`
    #[arg(long, value_name = "HOSTS", value_parser = hosts)]
    pub hosts: Option<HostList>,

    /// Slots of hosts for which the script prints no number
    #[arg(long, value_name = "N")]
    pub slots_per_host: Option<usize>,

    /// Timeout for enough slots and for started workers, in seconds; default: `SMD_ELASTIC_TIMEOUT_SECONDS`
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..1_000_000_000))]
    pub elastic_timeout: Option<u64>,

    /// Maximum number of restarts of the session
    #[arg(long, value_name = "N")]
    pub reset_limit: Option<usize>,

    /// Shortest and longest time for which a host is not used after a failure, in seconds; default: forever
    #[arg(long, value_names = ["LOW", "HIGH"], num_args = 2)]
    pub blacklist_cooldown_range: Option<Vec<u64>>,

    /// Also writes what each rank prints to DIR/rank.RANK/stdout and DIR/rank.RANK/stderr
    #[arg(long, value_name = "DIR")]
    pub output_dir: Option<PathBuf>,

    /// Prefixes lines as `horovodrun` does
    #[arg(long, hide = true)]
    pub horovod: bool,

    /// With `--horovod`: prefixes lines with the time
    #[arg(long, hide = true)]
    pub prefix_timestamp: bool,

    /// File for the reason if the job fails
    #[arg(long, hide = true)]
    pub reason_file: Option<PathBuf>,

    /// Port of `ssh` on the other hosts
    #[arg(long, value_name = "PORT")]
    pub ssh_port: Option<u16>,

    /// Key for `ssh`
    #[arg(long, value_name = "FILE")]
    pub ssh_identity_file: Option<PathBuf>,

    /// The command of each worker
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// Reads the command line; the error is also what `--help` prints.
pub(super) fn parse(argv: &[OsString]) -> std::result::Result<ElasticArgs, clap::Error> {
    ElasticArgs::try_parse_from(argv)
}

impl ElasticArgs {
    /// The limits of the driver.
    ///
    /// # Errors
    /// [`Error::Config`] naming options that do not fit.
    pub fn limits(&self) -> Result<ElasticLimits> {
        let (first, most) = (self.first as usize, self.max_np as usize);
        let least = self.min_np.map_or(first, |least| least as usize);
        if least > most || first > most {
            return Err(Error::Config(format!(
                "`--max-np` is {most}, less than `-n`, which is {first}, or `--min-np`, which is {least}"
            )));
        }
        let timeout = match self.elastic_timeout {
            Some(seconds) => Duration::from_secs(seconds),
            None => crate::config::ELASTIC_TIMEOUT_SECONDS.seconds()?,
        };
        // More slots than the least are welcome, and worth no wait.
        Ok(ElasticLimits {
            num_proc: first.max(least),
            min_num_proc: least,
            max_num_proc: most,
            reset_limit: self.reset_limit,
            timeout,
        })
    }

    /// The time for which hosts are not used after a worker failed there.
    ///
    /// # Errors
    /// [`Error::Config`] for an invalid range.
    pub fn cooldown(&self) -> Result<Option<Cooldown>> {
        let seconds = |low: u64, high: u64| Cooldown { low: Duration::from_secs(low), high: Duration::from_secs(high) };
        match self.blacklist_cooldown_range.as_deref() {
            None => Ok(None),
            Some(&[low, high]) if low >= 1 && high <= 3600 && low <= high => Ok(Some(seconds(low, high))),
            Some(range) => Err(Error::Config(format!(
                "`--blacklist-cooldown-range` is {range:?}: expected two numbers of seconds, 1 to 3600, the smaller first"
            ))),
        }
    }
}

/// Reads `a:2,b:2`.
pub(in super::super) fn hosts(text: &str) -> std::result::Result<HostList, String> {
    let host = |part: &str| match part.trim().rsplit_once(':') {
        Some((name, slots)) if !name.is_empty() => Some((name.to_owned(), slots.parse().ok()?)),
        _ => None,
    };
    let part = |part: &str| match host(part) {
        Some((name, 0)) => Err(format!("host `{name}` has no slot: expected one or more")),
        host => host.ok_or_else(|| format!("expected a list such as `a:2,b:2`, not `{part}`")),
    };
    text.split(',').map(part).collect()
}
