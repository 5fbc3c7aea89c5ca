//! The environment of each rank: what torchrun sets, what the SageMaker containers set, and how to find the job.
//!
//! Later layers override earlier ones: the environment of `smdrun` without variables of other launchers; defaults;
//! the job's variables; `-x` of `custom_mpi_options`; `--env`.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::path::PathBuf;

use super::distribution::Distribution;
use super::training::{Training, TrainingRank};
use crate::error::{Error, Result};
use crate::world::env::{FIRST_PORT, NUM_PORTS};

/// Variables by which other launchers tell processes their rank. `smdrun` may itself run inside a batch job, and its
/// ranks must not take that job's variables for their own.
const OTHER_LAUNCHERS: &[&str] = &[
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_SIZE",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_STEP_",
    "SLURM_TASKS_PER_NODE",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_",
    "HOROVOD_CROSS_",
];

/// The name of this host in the variables of SageMaker's containers.
const HOST: &str = "localhost";

/// One job on this host.
#[derive(Debug)]
pub(super) struct HostJob {
    /// Processes of the job.
    pub num_ranks: usize,
    /// Defaults, equal on all ranks; variables that the user has set win.
    defaults: BTreeMap<String, String>,
    /// Variables of the job, equal on all ranks.
    shared: BTreeMap<String, String>,
    /// Variables of `--env` and `-x`.
    user: Vec<(String, String)>,
    /// Names of the variables whose value is the rank.
    ranks: Vec<&'static str>,
    /// The place of each rank on the job's hosts; empty if all ranks run on this host.
    positions: Vec<LocalPosition>,
    training: Training,
}

/// A rank's position on its host, and among the ranks with the same local rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LocalPosition {
    pub host: String,
    pub host_index: usize,
    pub local: (usize, usize),
    pub cross: (usize, usize),
}

/// Places of the first `num_ranks` slots, host by host.
pub(super) fn positions(hosts: &[(String, usize)], num_ranks: usize) -> Vec<LocalPosition> {
    let slots =
        hosts.iter().enumerate().flat_map(|(index, (host, slots))| (0..*slots).map(move |slot| (index, host, slot)));
    let taken: Vec<(usize, &String, usize)> = slots.take(num_ranks).collect();
    let count = |which: &dyn Fn(&(usize, &String, usize)) -> bool| taken.iter().filter(|one| which(one)).count();
    let position = |&(index, host, slot): &(usize, &String, usize)| LocalPosition {
        host: host.clone(),
        host_index: index,
        local: (slot, count(&|other| other.0 == index)),
        cross: (count(&|other| other.2 == slot && other.0 < index), count(&|other| other.2 == slot)),
    };
    taken.iter().map(position).collect()
}

impl HostJob {
    /// Creates a job of `num_ranks` processes. `script_dir` is the folder of the script, if there is one; `arguments`
    /// are the script's arguments.
    ///
    /// # Errors
    /// [`Error::Io`] if there is no free port or no source of random bytes.
    pub fn new(
        num_ranks: usize,
        distribution: Distribution,
        script_dir: Option<PathBuf>,
        arguments: &[String],
        env: &[(String, String)],
    ) -> Result<Self> {
        let run_id = random_hex(8)?;
        let mut defaults = BTreeMap::new();
        if num_ranks > 1 {
            // Otherwise each rank would start as many threads as there are cores. torchrun has the same default.
            defaults.insert("OMP_NUM_THREADS".into(), "1".into());
        }
        let shared: BTreeMap<String, String> = [
            // Scripts for Horovod read their rank from these variables.
            ("HOROVOD_SIZE", num_ranks.to_string()),
            ("HOROVOD_LOCAL_SIZE", num_ranks.to_string()),
            ("HOROVOD_CROSS_RANK", "0".into()),
            ("HOROVOD_CROSS_SIZE", "1".into()),
            ("HOROVOD_HOSTNAME", HOST.into()),
            ("HOROVOD_CONTROLLER", "gloo".into()),
            ("HOROVOD_CPU_OPERATIONS", "gloo".into()),
            ("WORLD_SIZE", num_ranks.to_string()),
            ("LOCAL_WORLD_SIZE", num_ranks.to_string()),
            ("ROLE_WORLD_SIZE", num_ranks.to_string()),
            ("GROUP_RANK", "0".into()),
            ("GROUP_WORLD_SIZE", "1".into()),
            ("ROLE_NAME", "default".into()),
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", free_port()?.to_string()),
            ("TORCHELASTIC_RUN_ID", run_id),
            ("TORCHELASTIC_RESTART_COUNT", "0".into()),
            ("TORCHELASTIC_MAX_RESTARTS", "0".into()),
            // torch's own store is served by rank 0, not by an agent.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".into()),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
        let user = distribution.mpi_variables.iter().chain(env).cloned().collect();
        let work_dir = std::env::current_dir().unwrap_or_default();
        let module_dir = script_dir.as_ref().unwrap_or(&work_dir).to_string_lossy().into_owned();
        let training = Training::new(distribution, arguments, module_dir);
        defaults.extend(training.defaults(&work_dir));
        let ranks = vec!["RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"];
        Ok(Self { num_ranks, defaults, shared, user, ranks, positions: Vec::new(), training })
    }

    /// Assigns the ranks to these hosts, in order.
    ///
    /// # Errors
    /// [`Error::Config`] if the hosts have too few slots; [`Error::Io`] if the name of another host cannot be
    /// resolved.
    pub fn spread(&mut self, hosts: &[(String, usize)]) -> Result<()> {
        let positions = positions(hosts, self.num_ranks);
        if positions.len() < self.num_ranks {
            return Err(Error::Config(format!(
                "Requested more processes ({}) than there are available slots ({})",
                self.num_ranks,
                positions.len()
            )));
        }
        if positions.iter().all(|position| super::remote::is_here(&position.host)) {
            // Several names of this host are one host.
            return Ok(());
        }
        let first = &positions[0].host;
        let master = match super::remote::is_here(first) {
            true => {
                let other = positions
                    .iter()
                    .find(|position| !super::remote::is_here(&position.host))
                    .expect("not all are here");
                super::remote::address_towards(&other.host)?.to_string()
            }
            false => first.clone(),
        };
        self.shared.insert("MASTER_ADDR".into(), master);
        let last = positions.last().map_or(0, |position| position.host_index);
        self.shared.insert("GROUP_WORLD_SIZE".into(), (last + 1).to_string());
        self.positions = positions;
        Ok(())
    }

    /// The host of a rank.
    pub fn host(&self, rank: usize) -> &str {
        self.positions.get(rank).map_or(HOST, |position| &position.host)
    }

    /// All hosts.
    pub fn hosts(&self) -> impl Iterator<Item = &str> {
        self.positions.iter().map(|position| position.host.as_str())
    }

    /// Ranks on this host.
    pub fn num_here(&self) -> usize {
        match self.positions.is_empty() {
            true => self.num_ranks,
            false => self.hosts().filter(|host| super::remote::is_here(host)).count(),
        }
    }

    fn place(&self, rank: usize) -> TrainingRank<'_> {
        let mut hosts: Vec<&str> = self.hosts().collect();
        hosts.dedup();
        if hosts.is_empty() {
            hosts.push(HOST);
        }
        TrainingRank {
            hosts,
            host: self.host(rank),
            local_rank: self.positions.get(rank).map_or(rank, |position| position.local.0),
            here: self.positions.get(rank).is_none_or(|position| super::remote::is_here(&position.host)),
            processes_per_host: self.positions.iter().map(|position| position.local.1).max().unwrap_or(self.num_ranks),
            master: &self.shared["MASTER_ADDR"],
        }
    }

    /// Sets the variables with which ranks find and enter the job.
    pub fn set_rendezvous(&mut self, address: String, secret: String) {
        self.shared.insert(crate::config::RENDEZVOUS.name.into(), address);
        self.shared.insert(crate::config::SECRET.name.into(), secret);
    }

    /// Creates the folders for models and other output that exist in a training container.
    pub fn make_folders(&self, inherited: impl IntoIterator<Item = (OsString, OsString)>) {
        let variables = self.variables(0, inherited);
        for name in super::training::FOLDERS {
            let Some(folder) = variables.get(OsStr::new(name)).filter(|folder| !folder.is_empty()) else { continue };
            if let Err(error) = std::fs::create_dir_all(folder) {
                let folder = folder.to_string_lossy();
                eprintln!("smdrun: warning: cannot create the folder of `{name}`, `{folder}`: {error}");
            }
        }
    }

    /// The complete environment of `rank`, based on that of `smdrun`.
    pub fn variables(
        &self,
        rank: usize,
        inherited: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> BTreeMap<OsString, OsString> {
        let mut variables = without_launchers(inherited);
        for (name, value) in &self.defaults {
            variables.entry(name.into()).or_insert_with(|| value.into());
        }
        let ranks = self.ranks.iter().map(|name| (name.into(), rank.to_string().into()));
        variables.extend(self.shared.iter().map(|(name, value)| (name.into(), value.into())));
        variables.extend(ranks);
        let training = self.training.variables(&self.place(rank));
        variables.extend(training.into_iter().map(|(name, value)| (name.into(), value.into())));
        if let Some(position) = self.positions.get(rank) {
            variables.extend(position.variables());
        }
        variables.extend(self.user.iter().map(|(name, value)| (name.into(), value.into())));
        variables
    }
}

impl LocalPosition {
    fn variables(&self) -> Vec<(OsString, OsString)> {
        let variables = [
            ("LOCAL_RANK", self.local.0.to_string()),
            ("LOCAL_WORLD_SIZE", self.local.1.to_string()),
            ("GROUP_RANK", self.host_index.to_string()),
        ];
        variables.into_iter().chain(self.horovod_variables()).map(|(name, value)| (name.into(), value.into())).collect()
    }

    /// Horovod's variables for the rank's place.
    pub fn horovod_variables(&self) -> [(&'static str, String); 5] {
        [
            ("HOROVOD_LOCAL_RANK", self.local.0.to_string()),
            ("HOROVOD_LOCAL_SIZE", self.local.1.to_string()),
            ("HOROVOD_CROSS_RANK", self.cross.0.to_string()),
            ("HOROVOD_CROSS_SIZE", self.cross.1.to_string()),
            ("HOROVOD_HOSTNAME", self.host.clone()),
        ]
    }
}

/// The environment of `smdrun` without the variables of other launchers.
pub(super) fn without_launchers(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
) -> BTreeMap<OsString, OsString> {
    let is_mark = |name: &OsString| {
        let name = name.to_string_lossy();
        OTHER_LAUNCHERS.iter().any(|prefix| name.starts_with(prefix))
    };
    inherited.into_iter().filter(|(name, _)| !is_mark(name)).collect()
}

/// Returns a port that is free on all addresses, on which torch's store will listen. It is not one of those that Linux by
/// default gives to connections and to servers without a port of their own, so none of the job's processes is given it
/// before rank 0 listens. Another program may still take it, as with every launcher. OpenSMD's own rendezvous does not use
/// it.
fn free_port() -> Result<u16> {
    const ATTEMPTS: usize = 64;
    let failed = |error| Error::io("looking for a free port for MASTER_PORT", error);
    for _ in 0..ATTEMPTS {
        let random = getrandom::u32().map_err(|error| failed(std::io::Error::other(error.to_string())))?;
        let port = FIRST_PORT + (random % u32::from(NUM_PORTS)) as u16;
        if is_free(port) {
            return Ok(port);
        }
    }
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?;
    listener.local_addr().map(|address| address.port()).map_err(failed)
}

/// Whether no socket of this host uses the port, whatever its address.
fn is_free(port: u16) -> bool {
    let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), IpAddr::from(Ipv4Addr::UNSPECIFIED)];
    // Where the system has no IPv6, another error says so.
    everywhere.into_iter().all(
        |address| !matches!(TcpListener::bind((address, port)), Err(error) if error.kind() == ErrorKind::AddrInUse),
    )
}

/// Random bytes as text.
pub(super) fn random_hex(bytes: usize) -> Result<String> {
    let mut buffer = vec![0; bytes];
    getrandom::fill(&mut buffer)
        .map_err(|error| Error::io("reading random bytes", std::io::Error::other(error.to_string())))?;
    Ok(buffer.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(config: &str, env: &[(&str, &str)]) -> HostJob {
        let distribution = Distribution::parse(config).expect("valid configuration");
        let env: Vec<_> = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        HostJob::new(4, distribution, Some("/scripts".into()), &[], &env).expect("a port is free")
    }

    /// The environment of rank `rank` when that of `smdrun` is `pairs`.
    fn variables(job: &HostJob, rank: usize, pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let inherited = pairs.iter().map(|(name, value)| (name.into(), value.into()));
        let text = |text: OsString| text.into_string().expect("the test sets text");
        job.variables(rank, inherited).into_iter().map(|(name, value)| (text(name), text(value))).collect()
    }

    #[test]
    fn a_port_that_is_used_on_one_address_is_not_free() {
        // The system chooses it for this address alone, as for servers of NCCL on an interface.
        let other = TcpListener::bind(("127.0.0.2", 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        assert!(!is_free(port));
        let free = free_port().unwrap();
        assert!((FIRST_PORT..FIRST_PORT + NUM_PORTS).contains(&free) && is_free(free));
    }

    #[test]
    fn a_rank_sees_torchruns_variables() {
        let variables = variables(&job("{}", &[]), 2, &[("PATH", "/bin"), ("WORLD_SIZE", "9")]);
        for (name, value) in [
            ("RANK", "2"),
            ("LOCAL_RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("OMP_NUM_THREADS", "1"),
            ("HOROVOD_RANK", "2"),
            ("HOROVOD_SIZE", "4"),
            ("HOROVOD_LOCAL_RANK", "2"),
            ("HOROVOD_LOCAL_SIZE", "4"),
            ("HOROVOD_CROSS_RANK", "0"),
            ("HOROVOD_CROSS_SIZE", "1"),
            ("PATH", "/bin"),
            ("SM_HOSTS", r#"["localhost"]"#),
            ("SM_CURRENT_HOST", "localhost"),
            ("SM_MODULE_DIR", "/scripts"),
            ("SM_FRAMEWORK_PARAMS", "{}"),
            ("SM_HPS", "{}"),
        ] {
            assert_eq!(variables.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(variables["MASTER_PORT"].parse::<u16>().is_ok_and(|port| port > 0));
        assert!(!variables.contains_key("SM_HP_MP_PARAMETERS"), "no model parallelism was asked for");
    }

    #[test]
    fn marks_of_other_launchers_are_not_passed_on() {
        let variables = variables(
            &job("{}", &[]),
            0,
            &[("SLURM_PROCID", "3"), ("OMPI_COMM_WORLD_RANK", "1"), ("PMI_RANK", "1"), ("SLURM_JOB_ID", "7")],
        );
        for name in ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
            assert!(!variables.contains_key(name), "{name}");
        }
        assert_eq!(variables["SLURM_JOB_ID"], "7");
    }

    #[test]
    fn the_users_word_is_the_last() {
        let config = r#"{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"partitions": 2}}},
                         "mpi": {"enabled": true, "custom_mpi_options": "-x A=1 -x B=2"}}"#;
        let all = variables(&job(config, &[("B", "3"), ("OMP_NUM_THREADS", "8")]), 1, &[("A", "0")]);
        assert_eq!((all["A"].as_str(), all["B"].as_str()), ("1", "3"));
        assert_eq!(all["OMP_NUM_THREADS"], "8");
        let kept = variables(&job("{}", &[]), 1, &[("OMP_NUM_THREADS", "2")]);
        assert_eq!(kept["OMP_NUM_THREADS"], "2", "a default does not replace what is set");
    }

    #[test]
    fn a_model_parallel_job_shows_what_the_trainer_looks_for() {
        let config = r#"{"smdistributed": {"modelparallel": {"enabled": true, "parameters":
                         {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": true}}}, "mpi": {"enabled": true}}"#;
        let variables = variables(&job(config, &[]), 0, &[]);
        assert_eq!(
            variables["SM_HP_MP_PARAMETERS"],
            r#"{"ddp":true,"microbatches":4,"partitions":2,"pipeline_parallel_degree":2}"#
        );
        assert_eq!(
            variables["SM_FRAMEWORK_PARAMS"].replace("local_gpu", "local"),
            r#"{"sagemaker_instance_type":"local","sagemaker_mpi_custom_mpi_options":"","sagemaker_mpi_enabled":true,"sagemaker_mpi_num_of_processes_per_host":4}"#
        );
    }

    #[test]
    fn a_data_parallel_job_shows_what_the_trainer_looks_for() {
        let variables = variables(&job(r#"{"smdistributed": {"dataparallel": {"enabled": true}}}"#, &[]), 0, &[]);
        assert_eq!(
            variables["SM_FRAMEWORK_PARAMS"].replace("local_gpu", "local"),
            r#"{"sagemaker_distributed_dataparallel_custom_mpi_options":"","sagemaker_distributed_dataparallel_enabled":true,"sagemaker_instance_type":"local"}"#
        );
    }
}
