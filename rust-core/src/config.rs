//! All settings of the environment, each declared once: name, aliases, default, unit and meaning. The reference in
//! `docs/reference/environment.md` is generated from this list.

use std::time::Duration;

use crate::error::{Error, Result};

/// One setting that is read from the environment.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// The variable that is read first.
    pub name: &'static str,
    /// Aliases, tried in order.
    pub aliases: &'static [&'static str],
    /// The default, as text.
    pub default: &'static str,
    /// Its meaning, with the unit.
    pub doc: &'static str,
}

macro_rules! knobs {
    ($($ident:ident = $name:literal, [$($alias:literal),*], $default:literal, $doc:literal;)*) => {
        $(#[doc = $doc] pub const $ident: Knob = Knob { name: $name, aliases: &[$($alias),*], default: $default, doc: $doc };)*
        /// Every setting, in the order of the reference.
        pub const ALL: &[Knob] = &[$($ident),*];
    };
}

knobs! {
    TIMEOUT_SECONDS = "SMD_TIMEOUT_SECONDS", [], "300",
        "Longest wait of a collective for its peers, in seconds; then an error names the missing ranks. Process groups of `torch.distributed` have the `timeout` that they were made with instead.";
    EXIT_TIMEOUT_SECONDS = "SMD_EXIT_TIMEOUT_SECONDS", [], "1800",
        "How long rank 0 keeps serving the rendezvous after it has finished, until the other ranks have left, in seconds; as long, all ranks of a job under MPI wait for each other before they end MPI.";
    INIT_TIMEOUT_SECONDS = "SMD_INIT_TIMEOUT_SECONDS", ["HOROVOD_GLOO_TIMEOUT_SECONDS"], "300",
        "Longest wait of `init()` for the other ranks, in seconds.";
    PEER_TIMEOUT_SECONDS = "SMD_PEER_TIMEOUT_SECONDS", [], "10",
        "Silence of a host, in seconds, after which its ranks count as dead. A process that dies is noticed at once; this is for hosts and links.";
    SECRET = "SMD_SECRET", [], "",
        "Secret that the members of a job share; `smdrun` makes a new one for each job. Without it, rank 0 gives a secret to this user's processes where all ranks are on one host; a job on several hosts is open to the network, with a warning (docs/security.md).";
    SAFE_GLOBALS = "SMD_SAFE_GLOBALS", [], "",
        "Full names of classes and functions, separated by commas, that objects from other ranks may contain beside plain data, arrays, tensors and data classes; `*` stands for any part of a name (docs/security.md). A lone `*` allows everything, in jobs with a secret only.";
    RENDEZVOUS = "SMD_RENDEZVOUS", [], "",
        "`host:port` of a rendezvous that the launcher serves. Without it rank 0 serves one.";
    WORKER = "SMD_WORKER", [], "",
        "Name of this process in a job whose processes come and go, set by `smdrun elastic`: it then gets its rank from the launcher at each `init()`.";
    ELASTIC_TIMEOUT_SECONDS = "SMD_ELASTIC_TIMEOUT_SECONDS", ["HOROVOD_ELASTIC_TIMEOUT"], "600",
        "Longest wait of such a job for enough slots, and how long its processes try again when sessions fail to come about, in seconds.";
    P2P_MAX_BYTES = "SMD_P2P_MAX_BYTES", [], "8388608",
        "Largest message between GPUs of one host, in bytes, that goes through kernels that write to the peers' memory instead of through NCCL; 0 turns these off. Between two GPUs all-reduces of float32 that are larger than this and than 8 MiB go through such kernels too, unless this is 0 or a measurement (`SMD_AUTOTUNE`) chose NCCL. Each group takes four times as much of every GPU's memory, and 16 MiB more if it has two members, once it is used there.";
    AUTOTUNE = "SMD_AUTOTUNE", ["HOROVOD_AUTOTUNE"], "0",
        "1: each group that is used on GPUs measures for a moment which messages go between peers and how, on how many channels, and how large a reducer's buckets are, instead of taking the usual values. Rank 0 of the group says so for all, and prints the choice. Collectives by name of the world try sizes of what runs together (`SMD_FUSION_BYTES`, unless it is set) while the job trains, and the fastest stays.";
    AUTOTUNE_WARMUP_SAMPLES = "SMD_AUTOTUNE_WARMUP_SAMPLES", ["HOROVOD_AUTOTUNE_WARMUP_SAMPLES"], "3",
        "Samples of those trials that do not count.";
    AUTOTUNE_STEPS_PER_SAMPLE = "SMD_AUTOTUNE_STEPS_PER_SAMPLE", ["HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"], "10",
        "Steps of a sample; five samples are a trial.";
    AUTOTUNE_MAX_SAMPLES = "SMD_AUTOTUNE_MAX_SAMPLES", ["HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"], "20",
        "Sizes that those trials look at: four that cover the range from 64 KiB to 128 MiB, and then those that a Gaussian process expects to be most of an improvement.";
    AUTOTUNE_NOISE = "SMD_AUTOTUNE_NOISE", ["HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"], "0.8",
        "How much of the variance of what trials measure is taken for noise, from 0 to 1.";
    AUTOTUNE_LOG = "SMD_AUTOTUNE_LOG", ["HOROVOD_AUTOTUNE_LOG"], "",
        "File that rank 0 writes those trials to, as lines with commas; the last one is what stays.";
    AUTOTUNE_FILE = "SMD_AUTOTUNE_FILE", [], "",
        "File that keeps these choices: those for as many GPUs of the same name are taken from it, also without `SMD_AUTOTUNE`, and new ones are added.";
    INTERFACE = "SMD_INTERFACE", ["HOROVOD_GLOO_IFACE"], "",
        "Network interfaces, separated by commas: at the address of the first of them that a host has its processes take connections from other hosts. Empty: the one that reaches the rendezvous.";
    TRUSTED_NETWORK = "SMD_TRUSTED_NETWORK", [], "0",
        "1: of each TCP frame between hosts, authenticate the first 64 bytes only, and not the tensor behind them, which saves processor time. Only for networks on which nobody can change data in transit. It takes effect if all ranks set it; otherwise whole frames are authenticated, and rank 0 logs a warning. Ranks prove the job's secret in both cases.";
    STALL_WARNING_SECONDS = "SMD_STALL_WARNING_SECONDS", ["HOROVOD_STALL_CHECK_TIME_SECONDS"], "60",
        "After this time a collective that has a name and is not called by all ranks is told on standard error, with the ranks that are missing, and again after as long; in seconds.";
    STALL_CHECK_DISABLE = "SMD_STALL_CHECK_DISABLE", ["HOROVOD_STALL_CHECK_DISABLE"], "0",
        "1: no such warning.";
    STALL_SHUTDOWN_SECONDS = "SMD_STALL_SHUTDOWN_SECONDS", ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"], "0",
        "After this time such a collective fails on every rank, and with it all that wait; in seconds. 0, or less than the time of the warning: not before `SMD_TIMEOUT_SECONDS`.";
    FUSION_BYTES = "SMD_FUSION_BYTES", ["HOROVOD_FUSION_THRESHOLD"], "67108864",
        "Collectives with names that are ready together run as one operation up to this size, in bytes; 0: each alone. Rank 0 of the group says so for all.";
    CACHE_CAPACITY = "SMD_CACHE_CAPACITY", ["HOROVOD_CACHE_CAPACITY"], "4096",
        "Names of collectives that a group remembers, so that a bit tells that one is ready again; 0: none. Rank 0 of the group says so for all.";
    DYNAMIC_PROCESS_SETS = "SMD_DYNAMIC_PROCESS_SETS", ["HOROVOD_DYNAMIC_PROCESS_SETS"], "0",
        "1: `horovod`'s process sets may be added and removed after `init()`.";
    TIMELINE = "SMD_TIMELINE", [], "",
        "Path of a Chrome trace to write, of what all ranks do; Perfetto opens it.";
    NAMES_TIMELINE = "SMD_NAMES_TIMELINE", ["HOROVOD_TIMELINE"], "",
        "Path of a Chrome trace to write, of collectives by name as rank 0 sees them, in the form of Horovod's timelines. `DYNAMIC`: none before `start_timeline`.";
    NAMES_TIMELINE_MARK_CYCLES = "SMD_NAMES_TIMELINE_MARK_CYCLES", ["HOROVOD_TIMELINE_MARK_CYCLES"], "0",
        "1: that trace marks each answer of the negotiation.";
    LOG = "SMD_LOG", ["HOROVOD_LOG_LEVEL"], "warn",
        "What to log on standard error: error, warn, info, debug or trace.";
    LOG_HIDE_TIME = "SMD_LOG_HIDE_TIME", ["HOROVOD_LOG_HIDE_TIME"], "1",
        "0: lines of the log begin with the time, in Horovod's form: `[2026-01-20 12:00:01.123456: W file.rs:12] [rank]: text`, with T, D, I, W or E for the level.";
    DISABLE_GROUP_FUSION = "SMD_DISABLE_GROUP_FUSION", ["HOROVOD_DISABLE_GROUP_FUSION"], "0",
        "1: each group of tensors that one call gives, and each single tensor, is an operation of its own, whatever `SMD_FUSION_BYTES` says. Rank 0 of the group says so for all.";
    THREAD_AFFINITY = "SMD_THREAD_AFFINITY", ["HOROVOD_THREAD_AFFINITY"], "",
        "Numbers of cores, with commas, one for each process of a host: the thread that runs a process's collectives by name stays on its core. A list that does not fit is told in the log and has no effect.";
    CACHE_DIR = "SMD_CACHE_DIR", [], "~/.cache/opensmd",
        "Where shims for the installed frameworks and the plug-in for MPI are kept, once built.";
    KERAS_COMPAT = "SMD_KERAS_COMPAT", [], "1",
        "0: leaves out the adapters that let scripts for TensorFlow 2.3 and 2.4 run with today's Keras, such as `optimizer.variables()`.";
    METRICS = "SMD_METRICS", [], "",
        "Where counters of this host's ranks are published in Prometheus' text format: a file, which is replaced by rename, or `host:port` for an HTTP endpoint (docs/guides/metrics.md).";
    METRICS_SECONDS = "SMD_METRICS_SECONDS", [], "5",
        "Time between two writes of such a file, in seconds.";
    STRICT_PIPELINE = "SMD_STRICT_PIPELINE", [], "0",
        "1: a call inside of a `smp.step` function that leaves the pipeline, so that all ranks wait for one of them, is an error. Without it each such place is a warning.";
    AG_SCRATCH_BUFFER_BYTES = "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", [], "16777216",
        "A buffer of the original's all-gather, in bytes. Checked (a multiple of 8192) and otherwise without effect: there is no such buffer here.";
    AG_SORT_BUFFER_BYTES = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES", [], "134217728",
        "Another buffer of the original's all-gather, in bytes. Checked (a multiple of 8192) and otherwise without effect.";
}

/// Validates the settings that nothing reads during `init`, so that a mistake in them is reported. These are settings
/// for the original library that have no effect here, and settings that are read later.
///
/// # Errors
/// [`Error::Config`] naming the variable and its value.
pub fn check_unread() -> Result<()> {
    [AG_SCRATCH_BUFFER_BYTES, AG_SORT_BUFFER_BYTES].iter().try_for_each(|knob| knob.bytes(8192).map(drop))?;
    [DYNAMIC_PROCESS_SETS, NAMES_TIMELINE_MARK_CYCLES, STRICT_PIPELINE]
        .iter()
        .try_for_each(|knob| knob.flag().map(drop))
}

impl Knob {
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

    /// As [`Knob::seconds`], where 0 means no limit.
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
            _ => Err(Error::Config(format!("`{name}` is `{text}`: expected a multiple of {grain} bytes"))),
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
         Settings are read when they are needed first, mostly by `init()`; empty ones count as not set.\n\n\
         | variable | default | meaning |\n\
         | --- | --- | --- |\n",
    );
    for knob in ALL {
        let mut names = format!("`{}`", knob.name);
        for alias in knob.aliases {
            names.push_str(&format!(", `{alias}`"));
        }
        let default = if knob.default.is_empty() { "none".to_owned() } else { format!("`{}`", knob.default) };
        text.push_str(&format!("| {names} | {default} | {} |\n", knob.doc));
    }
    text.push_str(
        "\nWho a process is comes from its launcher's variables; the first launcher that names a rank decides, and an MPI\n\
         launcher that says otherwise is an error.\n\n\
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
            ALL.iter().flat_map(|knob| [knob.name].into_iter().chain(knob.aliases.iter().copied())).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn defaults_are_acceptable() {
        for knob in ALL.iter().filter(|knob| knob.name.ends_with("_SECONDS")) {
            let default = knob.default.parse::<f64>();
            assert!(default.is_ok_and(|seconds| seconds > 0.0 || knob.default == "0"), "{}", knob.name);
        }
        check_unread().unwrap();
    }
}
