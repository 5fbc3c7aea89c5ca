//! The variables that SageMaker's containers set for training scripts: hosts, hyperparameters, folders. Scripts,
//! Hugging Face's Trainer and `smp.init()` read them.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::distribution::Distribution;

/// Placeholders for numbers that only another host can determine; the shell there replaces them.
pub(super) const REMOTE_PLACEHOLDERS: HostResources =
    HostResources { num_gpus: "@smd-num-gpus@", num_cpus: "@smd-num-cpus@", instance_type: "@smd-instance-type@" };

/// Variables whose folders scripts write to without creating them.
pub(super) const FOLDERS: [&str; 2] = ["SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR"];

pub(super) struct HostResources {
    pub num_gpus: &'static str,
    pub num_cpus: &'static str,
    pub instance_type: &'static str,
}

/// Variables that are equal on all ranks.
#[derive(Debug)]
pub(super) struct Training {
    distribution: Distribution,
    /// Hyperparameters: the script's options, and `mp_parameters`.
    hyperparameters: BTreeMap<String, Hyperparameter>,
    module_dir: String,
}

/// The parsed value, and the original text.
#[derive(Clone, Debug)]
struct Hyperparameter {
    value: Value,
    text: String,
}

/// A rank's place on the hosts of its job.
#[derive(Debug)]
pub(super) struct TrainingRank<'a> {
    /// Names of the hosts, in the order of ranks.
    pub hosts: Vec<&'a str>,
    /// Name of the rank's host.
    pub host: &'a str,
    pub local_rank: usize,
    /// Whether that is the host of this process.
    pub here: bool,
    /// Largest number of ranks on a host.
    pub processes_per_host: usize,
    pub master: &'a str,
}

impl Training {
    /// The variables of a job with this configuration, and a script in `module_dir` with these arguments.
    pub fn new(distribution: Distribution, arguments: &[String], module_dir: String) -> Self {
        let mut hyperparameters = hyperparameters(arguments);
        if let Some(parameters) = &distribution.model_parallel {
            // serde_json keeps the keys of a map sorted and prints compactly, which is the documented form.
            let value = Value::Object(parameters.given().clone());
            let text = value.to_string();
            hyperparameters.insert("mp_parameters".into(), Hyperparameter { value, text });
        }
        Self { distribution, hyperparameters, module_dir }
    }

    /// Variables that the user may have set.
    pub fn defaults(&self, work_dir: &Path) -> BTreeMap<String, String> {
        let path = |folder: &str| work_dir.join(folder).to_string_lossy().into_owned();
        // A container has fixed folders; elsewhere the user may have set others.
        BTreeMap::from([
            ("SM_MODULE_DIR".into(), self.module_dir.clone()),
            ("SM_MODEL_DIR".into(), path("model")),
            ("SM_OUTPUT_DATA_DIR".into(), path("output")),
        ])
    }

    /// Variables of a rank.
    pub fn variables(&self, place: &TrainingRank<'_>) -> Vec<(String, String)> {
        let hyperparameters: Map<String, Value> =
            self.hyperparameters.iter().map(|(name, each)| (name.clone(), each.value.clone())).collect();
        let (num_gpus, num_cpus) = match place.here {
            true => (count_gpus().to_string(), count_cpus().to_string()),
            false => (REMOTE_PLACEHOLDERS.num_gpus.to_owned(), REMOTE_PLACEHOLDERS.num_cpus.to_owned()),
        };
        let mut framework = self.distribution.framework_parameters(place.processes_per_host);
        if !framework.is_empty() {
            framework.insert("sagemaker_instance_type".into(), instance_type(place.here).into());
        }
        let framework = Value::Object(framework);
        let mut resources = json!({"current_host": place.host, "hosts": place.hosts});
        let mut training_env = json!({
            "additional_framework_parameters": framework,
            "current_host": place.host,
            "hosts": place.hosts,
            "hyperparameters": hyperparameters,
            "is_master": place.host == place.hosts[0],
            "master_hostname": place.hosts[0],
            "module_dir": self.module_dir,
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
        });
        let mut variables = Vec::new();
        if place.hosts.len() == 1 {
            // Hosts may have network interfaces of different names.
            resources["network_interface_name"] = "lo".into();
            training_env["network_interface_name"] = "lo".into();
            variables.push(("SM_NETWORK_INTERFACE_NAME".into(), "lo".into()));
        }
        training_env["resource_config"] = resources.clone();
        let mut training_env = training_env.to_string();
        for (name, number) in [("num_cpus", &num_cpus), ("num_gpus", &num_gpus)] {
            // Values that are numbers, from any source.
            training_env = training_env.replace(&format!("\"{name}\":\"{number}\""), &format!("\"{name}\":{number}"));
        }
        variables.extend(
            [
                ("SM_HOSTS", json!(place.hosts).to_string()),
                ("SM_CURRENT_HOST", place.host.to_owned()),
                ("SM_NUM_GPUS", num_gpus),
                ("SM_NUM_CPUS", num_cpus),
                ("SM_HPS", Value::Object(hyperparameters).to_string()),
                ("SM_FRAMEWORK_PARAMS", framework.to_string()),
                ("SM_RESOURCE_CONFIG", resources.to_string()),
                ("SM_TRAINING_ENV", training_env),
            ]
            .map(|(name, value)| (name.to_owned(), value)),
        );
        variables.extend(
            self.hyperparameters.iter().map(|(key, each)| (format!("SM_HP_{}", key.to_uppercase()), each.text.clone())),
        );
        if self.distribution.data_parallel {
            variables.push(("SAGEMAKER_INSTANCE_TYPE".into(), instance_type(place.here)));
            variables.push(("SMDATAPARALLEL_LOCAL_RANK".into(), place.local_rank.to_string()));
            if place.hosts.len() == 1 {
                variables.push(("SMDATAPARALLEL_USE_SINGLENODE".into(), "1".into()));
            } else {
                variables.push(("SMDATAPARALLEL_USE_HOMOGENEOUS".into(), "1".into()));
                variables.push(("SMDATAPARALLEL_SERVER_ADDR".into(), place.master.to_owned()));
                variables.push(("SMDATAPARALLEL_SERVER_PORT".into(), "7592".into()));
            }
        }
        variables
    }
}

/// A container's entry point passes hyperparameters as options, `--name value`; this parses them back. Options end at
/// `--`.
fn hyperparameters(arguments: &[String]) -> BTreeMap<String, Hyperparameter> {
    let mut found = BTreeMap::new();
    let mut words = arguments.iter().take_while(|word| *word != "--").peekable();
    while let Some(word) = words.next() {
        let Some(option) = name(word) else { continue };
        let (option, text) = match option.split_once('=') {
            Some((option, value)) => (option, value.to_owned()),
            None => (option, words.next_if(|next| name(next).is_none()).cloned().unwrap_or_default()),
        };
        // This option has a syntax of its own.
        if option != "mp_parameters" {
            let value = serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.clone()));
            found.insert(option.to_owned(), Hyperparameter { value, text });
        }
    }
    found
}

/// The name of an option: two dashes, or one before a single letter.
fn name(word: &str) -> Option<&str> {
    let starts = |name: &&str| name.starts_with(|first: char| first.is_ascii_alphabetic());
    match word.strip_prefix("--") {
        Some(name) => Some(name).filter(starts),
        None => word.strip_prefix('-').filter(|name| name.len() == 1).filter(starts),
    }
}

/// The name of a machine type in SageMaker's local mode.
fn instance_type(here: bool) -> String {
    let found = || match here {
        true if count_gpus() > 0 => "local_gpu",
        true => "local",
        false => REMOTE_PLACEHOLDERS.instance_type,
    };
    std::env::var("SAGEMAKER_INSTANCE_TYPE").unwrap_or_else(|_| found().into())
}

fn count_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Number of NVIDIA devices of this host, from `CUDA_VISIBLE_DEVICES` or else the driver's files in `/proc`.
pub(super) fn count_gpus() -> usize {
    if let Ok(visible) = std::env::var("CUDA_VISIBLE_DEVICES") {
        return visible.split(',').take_while(|id| !id.is_empty() && *id != "-1").count();
    }
    std::fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, |entries| entries.flatten().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(config: &str, arguments: &str) -> Training {
        let arguments: Vec<String> = arguments.split_whitespace().map(str::to_owned).collect();
        Training::new(Distribution::parse(config).expect("valid configuration"), &arguments, "/scripts".into())
    }

    fn variables(training: &Training, hosts: &[&str], host: usize) -> BTreeMap<String, String> {
        let place = TrainingRank {
            hosts: hosts.to_vec(),
            host: hosts[host],
            local_rank: 1,
            here: host == 0,
            processes_per_host: 2,
            master: "10.0.0.1",
        };
        training.variables(&place).into_iter().collect()
    }

    #[test]
    fn options_of_the_script_are_hyperparameters() {
        let line = "--batch-size 64 --lr=-0.50 data.csv -e 3 --name run-1 --fast --mp_parameters ddp=True --bias -1 --no-x -- --y 2";
        let found = variables(&training("{}", line), &["a"], 0);
        assert_eq!(
            found["SM_HPS"],
            r#"{"batch-size":64,"bias":-1,"e":3,"fast":"","lr":-0.5,"name":"run-1","no-x":""}"#
        );
        let texts = ["BATCH-SIZE", "NAME", "LR", "NO-X"].map(|name| found[&format!("SM_HP_{name}")].as_str());
        assert_eq!(texts, ["64", "run-1", "-0.50", ""]);
        assert!(!found.contains_key("SM_HP_MP_PARAMETERS"));
    }

    #[test]
    fn every_host_of_a_job_is_shown() {
        let config = r#"{"smdistributed": {"dataparallel": {"enabled": true}}}"#;
        let found = variables(&training(config, ""), &["b", "a"], 1);
        for (name, value) in [
            ("SM_HOSTS", r#"["b","a"]"#),
            ("SM_CURRENT_HOST", "a"),
            ("SM_RESOURCE_CONFIG", r#"{"current_host":"a","hosts":["b","a"]}"#),
            ("SMDATAPARALLEL_LOCAL_RANK", "1"),
            ("SMDATAPARALLEL_USE_HOMOGENEOUS", "1"),
            ("SMDATAPARALLEL_SERVER_ADDR", "10.0.0.1"),
            ("SMDATAPARALLEL_SERVER_PORT", "7592"),
        ] {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!found.contains_key("SM_NETWORK_INTERFACE_NAME"));
        assert_eq!(
            [&found["SM_NUM_GPUS"], &found["SM_NUM_CPUS"]],
            [REMOTE_PLACEHOLDERS.num_gpus, REMOTE_PLACEHOLDERS.num_cpus]
        );
        let numbers = found["SM_TRAINING_ENV"]
            .replace(REMOTE_PLACEHOLDERS.num_gpus, "8")
            .replace(REMOTE_PLACEHOLDERS.num_cpus, "96");
        let env: Value = serde_json::from_str(&numbers).expect("JSON");
        assert_eq!((&env["num_gpus"], &env["num_cpus"]), (&json!(8), &json!(96)));
        assert_eq!((&env["is_master"], &env["master_hostname"]), (&json!(false), &json!("b")));
        let alone = variables(&training(config, ""), &["localhost"], 0);
        assert_eq!(alone["SMDATAPARALLEL_USE_SINGLENODE"], "1");
        assert!(!alone.contains_key("SMDATAPARALLEL_SERVER_PORT"));
        assert_eq!(alone["SM_NETWORK_INTERFACE_NAME"], "lo");
    }
}
