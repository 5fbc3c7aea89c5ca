//! All settings of the environment, each declared once: name, aliases, default, unit and meaning. The reference in
//! `docs/reference/environment.md` is generated from this list.

use std::time::Duration;

use crate::error::{Error, Result};

/// One setting that is read from the environment.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The variable that is read first.
    pub name: &'static str,
    /// Aliases, tried in order.
    pub aliases: &'static [&'static str],
    /// The default, as text.
    pub default: &'static str,
    /// Meaning, with the unit.
    pub doc: &'static str,
}

macro_rules! settings {
    ($($ident:ident = $name:literal, [$($alias:literal),*], $default:literal, $doc:literal;)*) => {
        $(#[doc = $doc] pub const $ident: Setting = Setting { name: $name, aliases: &[$($alias),*], default: $default, doc: $doc };)*
        /// Every setting, in the order of the reference.
        pub const ALL: &[Setting] = &[$($ident),*];
    };
}

settings! {
    TIMEOUT_SECONDS = "SMD_TIMEOUT_SECONDS", [], "300",
        "Timeout of collectives, in seconds. The error names the missing ranks. Process groups of `torch.distributed` use the `timeout` that they were created with instead.";
    EXIT_TIMEOUT_SECONDS = "SMD_EXIT_TIMEOUT_SECONDS", [], "1800",
        "How long rank 0 keeps serving the rendezvous after it has finished, until the other ranks have left, in seconds. With MPI, all ranks wait up to the same time for each other before they finalize MPI.";
    INIT_TIMEOUT_SECONDS = "SMD_INIT_TIMEOUT_SECONDS", ["HOROVOD_GLOO_TIMEOUT_SECONDS"], "300",
        "Longest wait of `init()` for the other ranks, in seconds. The launcher ends an `ssh` that does not read variables longer than a pipe's buffer within this time.";
    PEER_TIMEOUT_SECONDS = "SMD_PEER_TIMEOUT_SECONDS", [], "7",
        "Time without any message from a host, in seconds, after which its ranks count as dead. The death of a single process is noticed at once; this timeout detects lost hosts and links.";
    SECRET = "SMD_SECRET", [], "",
        "Secret that the members of a job share. `smdrun` creates a new one for each job. Without it, rank 0 gives a secret to this user's processes if all ranks are on one host; a job on several hosts is open to the network, with a warning (docs/security.md).";
    SAFE_GLOBALS = "SMD_SAFE_GLOBALS", [], "",
        "Comma-separated full names of classes and functions that objects from other ranks may contain, in addition to plain data, arrays, tensors and data classes. `*` matches any part of a name (docs/security.md). A lone `*` allows everything, but only in jobs with a secret.";
    RENDEZVOUS = "SMD_RENDEZVOUS", [], "",
        "`host:port` of a rendezvous that the launcher serves. Without it, rank 0 serves one.";
    WORKER = "SMD_WORKER", [], "",
        "Name of this process in an elastic job, set by `smdrun elastic`. The process then gets its rank from the launcher at each `init()`.";
    ELASTIC_TIMEOUT_SECONDS = "SMD_ELASTIC_TIMEOUT_SECONDS", ["HOROVOD_ELASTIC_TIMEOUT"], "600",
        "Elastic jobs: timeout for enough slots to become available, for the first of the started workers to call `init()`, and how long a worker retries to start a session, in seconds.";
    P2P_MAX_BYTES = "SMD_P2P_MAX_BYTES", [], "8388608",
        "Largest message between GPUs of one host, in bytes, that is sent by kernels which write to the peers' memory instead of by NCCL; 0 turns these kernels off. Between two GPUs, all-reduces of float32, and of bfloat16 or float16 outside of gradient buckets, and reduce-scatters and all-gathers, that are larger than this and than 8 MiB use such kernels too, unless this is 0 or a measurement (`SMD_AUTOTUNE`) chose NCCL. A group that is used on GPUs takes four times this size of each GPU's memory, plus 32 to 57 MiB if it has two to eight members.";
    AUTOTUNE = "SMD_AUTOTUNE", ["HOROVOD_AUTOTUNE"], "0",
        "1: each group that is used on GPUs measures at its first use which messages use the peers' memory, with which algorithm and how many channels, and the bucket size for reducers. Without it, defaults apply. Rank 0's setting decides for the group, and rank 0 prints the result. Collectives by name among all ranks also try fusion sizes while the job trains and keep the fastest, unless `SMD_FUSION_BYTES` is set.";
    AUTOTUNE_WARMUP_SAMPLES = "SMD_AUTOTUNE_WARMUP_SAMPLES", ["HOROVOD_AUTOTUNE_WARMUP_SAMPLES"], "3",
        "Number of samples that autotuning of the fusion size discards before the first one that counts.";
    AUTOTUNE_STEPS_PER_SAMPLE = "SMD_AUTOTUNE_STEPS_PER_SAMPLE", ["HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"], "10",
        "Steps in a sample of that autotuning; a trial of one size has five samples.";
    AUTOTUNE_MAX_SAMPLES = "SMD_AUTOTUNE_MAX_SAMPLES", ["HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"], "20",
        "Number of fusion sizes that autotuning tries: first four between 64 KiB and 128 MiB, then those with the largest expected improvement by a Gaussian process.";
    AUTOTUNE_NOISE = "SMD_AUTOTUNE_NOISE", ["HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"], "0.8",
        "Share of the measurements' variance that the Gaussian process attributes to noise, from 0 to 1.";
    AUTOTUNE_LOG = "SMD_AUTOTUNE_LOG", ["HOROVOD_AUTOTUNE_LOG"], "",
        "CSV file to which rank 0 writes the trials of fusion sizes; the last line is the chosen size.";
    AUTOTUNE_FILE = "SMD_AUTOTUNE_FILE", [], "",
        "File that stores the choices of `SMD_AUTOTUNE` for GPUs. A group reads the entry with its GPU name and number of GPUs, also without `SMD_AUTOTUNE`; new choices are added.";
    INTERFACE = "SMD_INTERFACE", ["HOROVOD_GLOO_IFACE"], "",
        "Network interfaces to listen on for connections from other hosts, comma-separated, in order of preference. Empty: the interface that reaches the rendezvous.";
    TRUSTED_NETWORK = "SMD_TRUSTED_NETWORK", [], "0",
        "1: of each TCP frame between hosts, authenticate the first 64 bytes only, and not the tensor behind them, which saves processor time. Only for networks on which nobody can change data in transit. It takes effect if all ranks set it; otherwise whole frames are authenticated, and rank 0 logs a warning. Ranks prove the job's secret in both cases.";
    TCP_CONGESTION_CONTROL = "SMD_TCP_CONGESTION_CONTROL", [], "",
        "Congestion control of TCP connections between hosts, such as `cubic`. Empty: the system's, but where the network's delay is up to 1 ms, `cubic` or `reno` instead of BBR, which is slow there.";
    STALL_WARNING_SECONDS = "SMD_STALL_WARNING_SECONDS", ["HOROVOD_STALL_CHECK_TIME_SECONDS"], "60",
        "Time after which rank 0 of a group warns about a collective by name that some ranks have not called, in seconds. The warning lists the missing ranks and is repeated at this interval.";
    STALL_CHECK_DISABLE = "SMD_STALL_CHECK_DISABLE", ["HOROVOD_STALL_CHECK_DISABLE"], "0",
        "1: turns this warning off.";
    STALL_SHUTDOWN_SECONDS = "SMD_STALL_SHUTDOWN_SECONDS", ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"], "0",
        "Time after which such a collective, and every other one that waits, fails on all ranks, in seconds. 0, or less than `SMD_STALL_WARNING_SECONDS`: `SMD_TIMEOUT_SECONDS` applies.";
    FUSION_BYTES = "SMD_FUSION_BYTES", ["HOROVOD_FUSION_THRESHOLD"], "67108864",
        "Fusion size: collectives by name that are ready together run as one operation up to this size, in bytes. 0: each one runs alone. The setting of the group's rank 0 counts.";
    CACHE_CAPACITY = "SMD_CACHE_CAPACITY", ["HOROVOD_CACHE_CAPACITY"], "4096",
        "Capacity of a group's response cache, in names. A cached name is negotiated with one bit. 0: no cache. The setting of the group's rank 0 counts.";
    DYNAMIC_PROCESS_SETS = "SMD_DYNAMIC_PROCESS_SETS", ["HOROVOD_DYNAMIC_PROCESS_SETS"], "0",
        "1: process sets of `horovod` may be added and removed after `init()`.";
    TIMELINE = "SMD_TIMELINE", [], "",
        "Path of a Chrome trace with the operations of all ranks of a host; open it in Perfetto.";
    NAMES_TIMELINE = "SMD_NAMES_TIMELINE", ["HOROVOD_TIMELINE"], "",
        "Path of a Chrome trace of collectives by name in the format of Horovod's timelines, written by rank 0. `DYNAMIC`: starts with `start_timeline`.";
    NAMES_TIMELINE_MARK_CYCLES = "SMD_NAMES_TIMELINE_MARK_CYCLES", ["HOROVOD_TIMELINE_MARK_CYCLES"], "0",
        "1: `SMD_NAMES_TIMELINE` marks each answer of the negotiation.";
    LOG = "SMD_LOG", ["HOROVOD_LOG_LEVEL"], "warn",
        "Log level on standard error: error, warn, info, debug or trace.";
    LOG_HIDE_TIME = "SMD_LOG_HIDE_TIME", ["HOROVOD_LOG_HIDE_TIME"], "1",
        "0: log lines begin with the time, in Horovod's format: `[2026-01-20 12:00:01.123456: W file.rs:12] [rank]: text`, with T, D, I, W or E for the level.";
    DISABLE_GROUP_FUSION = "SMD_DISABLE_GROUP_FUSION", ["HOROVOD_DISABLE_GROUP_FUSION"], "0",
        "1: each group of tensors of one call, and each single tensor, is an operation of its own, regardless of `SMD_FUSION_BYTES`. The setting of the group's rank 0 counts.";
    THREAD_AFFINITY = "SMD_THREAD_AFFINITY", ["HOROVOD_THREAD_AFFINITY"], "",
        "Comma-separated core numbers, one for each process of a host: the thread that runs a process's collectives by name is pinned to its core. An invalid list is logged and ignored.";
    CACHE_DIR = "SMD_CACHE_DIR", [], "~/.cache/opensmd",
        "Folder for compiled shims of the installed frameworks and the compiled MPI plug-in.";
    KERAS_COMPAT = "SMD_KERAS_COMPAT", [], "1",
        "0: turns off the adapters with which scripts for TensorFlow 2.3 and 2.4 run with Keras 3, such as `optimizer.variables()`.";
    METRICS = "SMD_METRICS", [], "",
        "Where counters of this host's ranks are published in Prometheus' text format: a file, which is replaced by rename, or `host:port` of an HTTP endpoint (docs/guides/metrics.md).";
    METRICS_SECONDS = "SMD_METRICS_SECONDS", [], "5",
        "Interval between two writes of the file of `SMD_METRICS`, in seconds.";
    STRICT_PIPELINE = "SMD_STRICT_PIPELINE", [], "0",
        "1: a call in an `smp.step` function that cannot be pipelined, so that all ranks wait for the rank that runs it, is an error. 0: the first such call of each kind is a warning.";
    AG_SCRATCH_BUFFER_BYTES = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", [], "16777216",
        "Size of a buffer of the original library's all-gather, in bytes. Must be a multiple of 8192; otherwise ignored, because there is no such buffer here.";
    AG_SORT_BUFFER_BYTES = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES", [], "134217728",
        "Size of another buffer of the original library's all-gather, in bytes. Must be a multiple of 8192; otherwise ignored.";
}

/// Validates the settings that nothing reads during `init`, so that a mistake in them is reported. These are settings
/// for the original library that have no effect here, and settings that are read later.
///
/// # Errors
/// [`Error::Config`] naming the variable and its value.
pub fn check_unread() -> Result<()> {
    [AG_SCRATCH_BUFFER_BYTES, AG_SORT_BUFFER_BYTES].iter().try_for_each(|setting| setting.bytes(8192).map(drop))?;
    [DYNAMIC_PROCESS_SETS, NAMES_TIMELINE_MARK_CYCLES, STRICT_PIPELINE]
        .iter()
        .try_for_each(|setting| setting.flag().map(drop))
}

impl Setting {
    /// The value in the environment, if one of the names is set and not empty.
    pub fn text(&self) -> Option<String> {
        self.set().map(|(_, text)| text)
    }

    /// The name that is set, and its value.
    pub fn set(&self) -> Option<(&'static str, String)> {
        let mut names = std::iter::once(self.name).chain(self.aliases.iter().copied());
        names.find_map(|name| Some((name, std::env::var(name).ok().filter(|value| !value.is_empty())?)))
    }

    /// The value, or the default, and the name to use in errors.
    fn named(&self) -> (&'static str, String) {
        self.set().unwrap_or_else(|| (self.name, self.default.to_owned()))
    }

    /// Parses the value as a duration in seconds; fractions are allowed.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is not a positive number.
    pub fn seconds(&self) -> Result<Duration> {
        let (name, text) = self.named();
        match text.parse::<f64>() {
            Ok(seconds) if seconds > 0.0 && seconds < 1e9 => Ok(Duration::from_secs_f64(seconds)),
            _ => Err(Error::Config(format!("`{name}` is `{text}`: expected a positive number of seconds"))),
        }
    }

    /// As [`Setting::seconds`], where 0 means no limit.
    ///
    /// # Errors
    /// [`Error::Config`] if the text is not a number, or negative.
    pub fn seconds_or_never(&self) -> Result<Option<Duration>> {
        match self.named().1.parse::<f64>() {
            Ok(0.0) => Ok(None),
            _ => self.seconds().map(Some),
        }
    }

    /// Parses the value as a count.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not a whole number.
    pub fn count(&self) -> Result<u32> {
        let (name, text) = self.named();
        text.parse().map_err(|_| Error::Config(format!("`{name}` is `{text}`: expected a whole number")))
    }

    /// Parses the value as a fraction from 0 to 1.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not such a number.
    pub fn share(&self) -> Result<f64> {
        let (name, text) = self.named();
        match text.parse::<f64>() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
            _ => Err(Error::Config(format!("`{name}` is `{text}`: expected a number from 0 to 1"))),
        }
    }

    /// Parses the value as a size in bytes that is a multiple of `grain`.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not.
    pub fn bytes(&self, grain: u64) -> Result<u64> {
        let (name, text) = self.named();
        match text.parse::<u64>() {
            Ok(bytes) if bytes > 0 && bytes.is_multiple_of(grain) => Ok(bytes),
            _ => Err(Error::Config(format!("`{name}` is `{text}`: expected a positive multiple of {grain} bytes"))),
        }
    }

    /// Parses the value as a boolean, in any of the common spellings.
    ///
    /// # Errors
    /// [`Error::Config`] if it is none of them.
    pub fn flag(&self) -> Result<bool> {
        let (name, text) = self.named();
        match text.to_lowercase().as_str() {
            "false" | "no" | "off" => Ok(false),
            "true" | "yes" | "on" => Ok(true),
            // Some scripts set a log level here.
            number => match number.parse::<i64>() {
                Ok(number) => Ok(number > 0),
                Err(_) => Err(Error::Config(format!("`{name}` is `{text}`: expected 0 or 1"))),
            },
        }
    }

    /// Parses the value as a size limit in bytes, where 0 means that nothing is accepted.
    ///
    /// # Errors
    /// [`Error::Config`] if it is not a whole number.
    pub fn most_bytes(&self) -> Result<usize> {
        let (name, text) = self.named();
        text.parse().map_err(|_| Error::Config(format!("`{name}` is `{text}`: expected a number of bytes")))
    }
}

/// The environment reference, in Markdown.
pub fn reference() -> String {
    let mut text = String::from(
        "<!-- Generated from rust-core/src/config.rs by `make generated`; do not edit. -->\n\n\
         # Environment\n\n\
         Each setting is read at its first use, mostly by `init()`. An empty value counts as not set.\n\n\
         | variable | default | meaning |\n\
         | --- | --- | --- |\n",
    );
    for setting in ALL {
        let mut names = format!("`{}`", setting.name);
        for alias in setting.aliases {
            names.push_str(&format!(", `{alias}`"));
        }
        let default = if setting.default.is_empty() { "none".to_owned() } else { format!("`{}`", setting.default) };
        text.push_str(&format!("| {names} | {default} | {} |\n", setting.doc));
    }
    text.push_str(
        "\nA process gets its rank from its launcher's variables. The first launcher below whose variables\n\
         name a rank decides. An MPI launcher that names another rank is an error.\n\n\
         | order | launcher | variables |\n\
         | --- | --- | --- |\n\
         | 1 | torchrun, smdrun, by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` or `HOROVOD_RANK`, `HOROVOD_SIZE`, `HOROVOD_LOCAL_RANK`, `HOROVOD_LOCAL_SIZE`; `MASTER_ADDR`, `MASTER_PORT` |\n\
         | 2 | Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |\n\
         | 3 | MPICH, Intel MPI, PMI | `PMI_RANK`, `PMI_SIZE`, `PMI_LOCAL_RANK` or `MPI_LOCALRANKID`, `PMI_LOCAL_SIZE` or `MPI_LOCALNRANKS` |\n\
         | 4 | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |\n\
         | 5 | none | a job of one process |\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The list is pinned, so that each new setting is a deliberate decision that shows in the reference.
    #[test]
    fn the_reference_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/environment.md");
        if std::env::var_os("SMD_UPDATE_GENERATED").is_some() {
            std::fs::write(path, reference()).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(found == reference(), "`docs/reference/environment.md` is not current: run `make generated`");
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<&str> =
            ALL.iter().flat_map(|setting| [setting.name].into_iter().chain(setting.aliases.iter().copied())).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn defaults_are_acceptable() {
        for setting in ALL.iter().filter(|setting| setting.name.ends_with("_SECONDS")) {
            let default = setting.default.parse::<f64>();
            assert!(default.is_ok_and(|seconds| seconds > 0.0 || setting.default == "0"), "{}", setting.name);
        }
        check_unread().unwrap();
    }
}
