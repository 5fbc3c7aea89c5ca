//! Reads this process's rank from the launcher's environment variables. A pure function from variables to a
//! [`Launch`].
//!
//! | order | launcher | variables |
//! | --- | --- | --- |
//! | 1 | torchrun, smdrun, by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, or `HOROVOD_RANK`, `_SIZE`, .. |
//! | 2 | Open MPI | `OMPI_COMM_WORLD_*` |
//! | 3 | MPICH, Intel MPI, PMI | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | 4 | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, .. |
//! | 5 | none | a job of one process |
//!
//! - ENV-1: the first launcher in this order whose variables contain a rank decides.
//! - ENV-2: an MPI launcher that contradicts it is an error that names both variables and both values.
//! - ENV-3: Slurm's variables may differ, because `srun` often starts one `torchrun` for each host; so may PMI
//!   variables, which `srun` sets, too. Values that the deciding launcher does not set are taken from launchers that
//!   agree with it.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::hydra;
use crate::error::{Error, Result};

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// The launcher of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// torchrun, smdrun, or variables set by hand.
    Torch,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH, Intel MPI and other launchers that speak PMI.
    Pmi,
    /// `srun`.
    Slurm,
    /// None: a job of one process.
    Single,
}

/// The launcher's variables, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The launcher.
    pub launcher: Launcher,
    /// Global rank.
    pub rank: usize,
    /// Number of processes of the job.
    pub size: usize,
    /// Rank on this host and number of processes on it, if known.
    pub local: Option<(usize, usize)>,
    /// Host of rank 0, if known.
    pub master_addr: Option<String>,
    /// Port for torch's `env://` store.
    pub master_port: u16,
    /// Identifies the job among others on the same hosts; equal on all ranks.
    pub job: String,
}

/// Ports for jobs whose launcher sets none, and for `smdrun`: below the range that Linux uses for outgoing connections.
pub(crate) const FIRST_PORT: u16 = 16_384;
pub(crate) const NUM_PORTS: u16 = 16_384;

/// The variables of one launcher, in the order rank, size, local rank, local size; alternative names of one are tried
/// in order.
struct LauncherVariables {
    launcher: Launcher,
    names: [&'static [&'static str]; 4],
}

const SPELLINGS: [LauncherVariables; 4] = [
    LauncherVariables {
        launcher: Launcher::Torch,
        names: [
            &["RANK", "HOROVOD_RANK"],
            &["WORLD_SIZE", "HOROVOD_SIZE"],
            &["LOCAL_RANK", "HOROVOD_LOCAL_RANK"],
            &["LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"],
        ],
    },
    LauncherVariables {
        launcher: Launcher::OpenMpi,
        names: [
            &["OMPI_COMM_WORLD_RANK"],
            &["OMPI_COMM_WORLD_SIZE"],
            &["OMPI_COMM_WORLD_LOCAL_RANK"],
            &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        ],
    },
    LauncherVariables {
        launcher: Launcher::Pmi,
        names: [
            &["PMI_RANK"],
            &["PMI_SIZE"],
            &["PMI_LOCAL_RANK", "MPI_LOCALRANKID"],
            &["PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"],
        ],
    },
    LauncherVariables {
        launcher: Launcher::Slurm,
        names: [
            &["SLURM_PROCID"],
            &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
            &["SLURM_LOCALID"],
            &[], // from SLURM_STEP_TASKS_PER_NODE, see `slurm_local_size`
        ],
    },
];

const QUANTITIES: [&str; 4] = ["rank", "world size", "local rank", "local world size"];

/// A number and the variable that it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LauncherNumber {
    name: &'static str,
    value: usize,
}

/// The values of one launcher's variables, in the order of [`QUANTITIES`].
struct LauncherClaim {
    launcher: Launcher,
    found: [Option<LauncherNumber>; 4],
}

impl LauncherClaim {
    fn value(&self, quantity: usize) -> Option<usize> {
        self.found[quantity].as_ref().map(|found| found.value)
    }
}

/// Variables that this process set for torch; see [`remember_exports`].
static EXPORTED: Mutex<Variables> = Mutex::new(Variables::new());

/// The environment of this process without the variables that it set itself. Under MPICH, the address of `mpiexec` is
/// among them.
pub fn variables() -> Variables {
    let exported = EXPORTED.lock();
    let mut found: Variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| exported.get(name) != Some(value))
        .collect();
    if found.contains_key("PMI_RANK")
        && let Some(address) = hydra::control_port()
    {
        found.insert(hydra::VARIABLE.to_owned(), address);
    }
    found
}

/// Whether an MPI launcher started this process so that MPI can find its job: `mpirun`, or `srun` with a PMI plug-in.
pub fn started_by_mpi(variables: &Variables) -> bool {
    ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"].iter().any(|name| set(variables, name).is_some())
}

/// Records variables that this process is about to set, so that the next `init()` does not take them for the
/// launcher's: they would change the job's identity.
pub fn remember_exports(exports: &[(&'static str, String)]) {
    EXPORTED.lock().extend(exports.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
}

/// Reads the launcher's variables.
///
/// # Errors
/// [`Error::Config`] naming the variables and their values if one is not a number, a rank is not below its size, or
/// two launchers contradict each other.
pub fn detect(variables: &Variables) -> Result<Launch> {
    let mut claims = Vec::new();
    for spelling in &SPELLINGS {
        let mut found: [Option<LauncherNumber>; 4] = [None, None, None, None];
        for (quantity, names) in spelling.names.iter().enumerate() {
            found[quantity] = number(variables, names)?;
        }
        if spelling.launcher == Launcher::Slurm {
            // A batch script and an allocation have these variables too, but are not processes of a job.
            if !variables.contains_key("SLURM_STEP_ID") && !variables.contains_key("SLURM_STEPID") {
                continue;
            }
            found[3] = slurm_local_size(variables)?;
        }
        // A size without a rank is often set for other purposes, so it is ignored.
        if found[0].is_some() {
            claims.push(LauncherClaim { launcher: spelling.launcher, found });
        }
    }
    let slurm_rank = claims.iter().find(|claim| claim.launcher == Launcher::Slurm).and_then(|claim| claim.value(0));
    let Some((first, others)) = claims.split_first() else {
        return Ok(single(variables));
    };
    let mut merged = first.found.clone();
    for other in others {
        let from_srun = other.launcher == Launcher::Slurm
            || (other.launcher == Launcher::Pmi && slurm_rank.is_some() && slurm_rank == other.value(0));
        let disagreement = (0..4).find_map(|quantity| {
            let (ours, theirs) = (first.found[quantity].as_ref()?, other.found[quantity].as_ref()?);
            (ours.value != theirs.value).then_some((quantity, ours, theirs))
        });
        match disagreement {
            None => {
                for (mine, theirs) in merged.iter_mut().zip(&other.found) {
                    if mine.is_none() {
                        mine.clone_from(theirs);
                    }
                }
            }
            Some(_) if from_srun => {}
            Some((quantity, ours, theirs)) => {
                return Err(Error::Config(format!(
                    "`{}` is {} but `{}` is {}: two launchers disagree about the {}; unset the variables of the one \
                     that did not start this process",
                    ours.name, ours.value, theirs.name, theirs.value, QUANTITIES[quantity]
                )));
            }
        }
    }
    let launcher = first.launcher;
    build(variables, launcher, merged)
}

fn build(variables: &Variables, launcher: Launcher, found: [Option<LauncherNumber>; 4]) -> Result<Launch> {
    let [rank, size, local_rank, local_size] = found;
    let rank = rank.expect("a claim has a rank");
    let Some(size) = size else {
        let names = SPELLINGS.iter().find(|s| s.launcher == launcher).expect("every launcher is listed").names[1];
        return Err(Error::Config(format!("`{}` is {} but `{}` is not set", rank.name, rank.value, names[0])));
    };
    inside(&rank, &size)?;
    if let Some(local_size) = &local_size
        && local_size.value > size.value
    {
        return Err(Error::Config(format!(
            "`{}` is {}, more than `{}`, which is {}",
            local_size.name, local_size.value, size.name, size.value
        )));
    }
    if let (Some(local_rank), Some(local_size)) = (&local_rank, &local_size) {
        inside(local_rank, local_size)?;
    }
    let local = local_rank.zip(local_size).map(|(rank, size)| (rank.value, size.value));
    let job = job(variables);
    let on_one_host = local.is_some_and(|(_, local_size)| local_size == size.value);
    Ok(Launch {
        launcher,
        rank: rank.value,
        size: size.value,
        local,
        master_addr: master_addr(variables, on_one_host),
        master_port: master_port(variables, &job)?,
        job,
    })
}

fn single(variables: &Variables) -> Launch {
    let job = format!("process {}", std::process::id());
    Launch {
        launcher: Launcher::Single,
        rank: 0,
        size: 1,
        local: Some((0, 1)),
        master_addr: Some("127.0.0.1".to_owned()),
        // A job of one process ignores an invalid port.
        master_port: master_port(variables, &job).unwrap_or(FIRST_PORT),
        job,
    }
}

fn inside(rank: &LauncherNumber, size: &LauncherNumber) -> Result<()> {
    if rank.value < size.value {
        return Ok(());
    }
    Err(Error::Config(format!(
        "`{}` is {} but `{}` is {}: expected a rank below the size",
        rank.name, rank.value, size.name, size.value
    )))
}

fn number(variables: &Variables, names: &[&'static str]) -> Result<Option<LauncherNumber>> {
    for name in names {
        let Some(text) = variables.get(*name).map(|text| text.trim()).filter(|text| !text.is_empty()) else { continue };
        // 2^31 or more processes are a mistake; smaller numbers fit every integer type of the API.
        return match text.parse::<u32>() {
            Ok(value) if value < 1 << 31 => Ok(Some(LauncherNumber { name, value: value as usize })),
            _ => Err(Error::Config(format!("`{name}` is `{text}`: expected a whole number"))),
        };
    }
    Ok(None)
}

/// Number of tasks on this node, from a list such as `2(x3),1` and the node's index.
fn slurm_local_size(variables: &Variables) -> Result<Option<LauncherNumber>> {
    let Some(node) = number(variables, &["SLURM_NODEID"])? else { return Ok(None) };
    for name in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(list) = variables.get(name) else { continue };
        let mut tasks = Vec::new();
        for part in list.split(',') {
            let (count, times) = part.split_once("(x").map_or((part, Some("1")), |(c, t)| (c, t.strip_suffix(')')));
            match (count.parse::<usize>(), times.and_then(|times| times.parse::<usize>().ok())) {
                (Ok(count), Some(times)) if times <= 1 << 20 => tasks.extend(std::iter::repeat_n(count, times)),
                _ => return Err(Error::Config(format!("`{name}` is `{list}`: expected a list such as `2(x3),1`"))),
            }
        }
        return Ok(tasks.get(node.value).map(|&value| LauncherNumber { name, value }));
    }
    Ok(None)
}

fn set<'a>(variables: &'a Variables, name: &str) -> Option<&'a str> {
    variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
}

/// The host of rank 0, from the first source that has it.
fn master_addr(variables: &Variables, on_one_host: bool) -> Option<String> {
    if let Some(address) = set(variables, "MASTER_ADDR") {
        return Some(address.to_owned());
    }
    if on_one_host {
        return Some("127.0.0.1".to_owned());
    }
    // The platform sorts the list; its first host is the master.
    if let Some(hosts) =
        set(variables, "SM_HOSTS").and_then(|hosts| serde_json::from_str::<BTreeSet<String>>(hosts).ok())
    {
        return hosts.into_iter().next();
    }
    if let Some(address) = set(variables, "SLURM_STEP_ID").and_then(|_| first_slurm_host(variables)) {
        return Some(address);
    }
    // `1234.0;tcp://10.0.0.1,192.168.0.1:41234`: the host of `mpirun`, which runs rank 0 by default.
    if let Some(uri) = set(variables, "OMPI_MCA_orte_hnp_uri") {
        let (_, addresses) = uri.split_once("tcp://")?;
        return Some(addresses.split([',', ':']).next()?.to_owned());
    }
    // Open MPI 5 has `prterun-HOST-PROCESS@JOB`, MPICH `HOST:PORT GROUP`: again the host of `mpirun`.
    if let Some(place) = set(variables, "PMIX_NAMESPACE").and_then(|name| name.strip_prefix("prterun-")) {
        return Some(place.rsplit_once('@')?.0.rsplit_once('-')?.0.to_owned());
    }
    Some(set(variables, hydra::VARIABLE)?.rsplit_once(':')?.0.to_owned())
}

/// The first host of a list such as `node[003-007,9],login1`.
fn first_slurm_host(variables: &Variables) -> Option<String> {
    let list = set(variables, "SLURM_STEP_NODELIST").or_else(|| set(variables, "SLURM_JOB_NODELIST"))?;
    match list.find(['[', ',']) {
        Some(at) if list[at..].starts_with('[') => {
            let (first, rest) = list[at + 1..].split_at(list[at + 1..].find(['-', ',', ']'])?);
            let suffix = rest.split_once(']')?.1.split(',').next()?;
            Some(format!("{}{first}{suffix}", &list[..at]))
        }
        Some(at) => Some(list[..at].to_owned()),
        None => Some(list.to_owned()),
    }
}

fn master_port(variables: &Variables, job: &str) -> Result<u16> {
    match set(variables, "MASTER_PORT") {
        None => Ok(port(&[job, "torch"])),
        Some(text) => match text.parse() {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(Error::Config(format!("`MASTER_PORT` is `{text}`: expected a port, 1 to 65535"))),
        },
    }
}

/// The job's identity, from a variable that the launcher sets for each job.
fn job(variables: &Variables) -> String {
    const NAMES: [&str; 10] = [
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "OMPI_MCA_ess_base_jobid",
        "PMIX_NAMESPACE",
        "PMI_JOBID",
        hydra::VARIABLE,
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
    ];
    let set_variables = NAMES.iter().filter_map(|name| Some(format!("{name}={}", set(variables, name)?)));
    set_variables.collect::<Vec<_>>().join(" ")
}

fn digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn port(parts: &[&str]) -> u16 {
    let digest = digest(parts);
    FIRST_PORT + u16::from_le_bytes([digest[0], digest[1]]) % NUM_PORTS
}

impl Launch {
    /// The variables of a rank in session `generation` of the elastic job whose launcher is at `address`.
    pub fn assigned(rank: usize, size: usize, generation: u64, address: &str) -> Self {
        let job = format!("session {generation} of the elastic job at {address}");
        let master_port = port(&[&job, "torch"]);
        Self { launcher: Launcher::Torch, rank, size, local: None, master_addr: None, master_port, job }
    }

    /// Ports at which rank 0 may serve the rendezvous, equal on all ranks. `MASTER_PORT` is not among them, because
    /// torch's own store may use it.
    pub fn rendezvous_ports(&self) -> Vec<u16> {
        const NUM_CANDIDATES: usize = 8;
        let mut ports = Vec::new();
        for attempt in 0usize.. {
            let port = port(&[&self.job, "rendezvous", &attempt.to_string()]);
            if port != self.master_port && !ports.contains(&port) {
                ports.push(port);
            }
            if ports.len() == NUM_CANDIDATES {
                break;
            }
        }
        ports
    }

    /// A key for jobs without `SMD_SECRET`. It distinguishes jobs, but processes that can read the launcher's
    /// variables know it.
    pub fn derived_secret(&self) -> [u8; 32] {
        digest(&[&self.job, "secret"])
    }

    /// Whether all processes are known to be on this host.
    pub fn on_one_host(&self) -> bool {
        self.local.is_some_and(|(_, local_size)| local_size == self.size)
    }

    /// Variables of torch's `env://` that are not set yet, with their values.
    pub fn missing_variables(&self, variables: &Variables) -> Vec<(&'static str, String)> {
        let mut wanted = vec![("RANK", self.rank.to_string()), ("WORLD_SIZE", self.size.to_string())];
        if let Some((local_rank, local_size)) = self.local {
            wanted.push(("LOCAL_RANK", local_rank.to_string()));
            wanted.push(("LOCAL_WORLD_SIZE", local_size.to_string()));
        }
        if let Some(address) = &self.master_addr {
            wanted.push(("MASTER_ADDR", address.clone()));
        }
        wanted.push(("MASTER_PORT", self.master_port.to_string()));
        wanted.retain(|(name, _)| set(variables, name).is_none());
        wanted
    }
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
