//! The `distribution` dictionary: the part of a job's configuration that the launcher reads.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::smp_config::ModelParallel;

/// A validated configuration. The default is the one without a dictionary.
#[derive(Debug, Default)]
pub(super) struct Distribution {
    /// `smdistributed.modelparallel`, if enabled.
    pub model_parallel: Option<ModelParallel>,
    /// Whether `smdistributed.dataparallel` is enabled.
    pub data_parallel: bool,
    /// Whether `mpi` is enabled.
    mpi: bool,
    /// `mpi.processes_per_host`.
    pub processes_per_host: Option<usize>,
    /// `custom_mpi_options`, unparsed.
    custom_mpi_options: String,
    /// Variables that `-x NAME=VALUE` sets in those options.
    pub mpi_variables: Vec<(String, String)>,
    warnings: Vec<String>,
}

impl Distribution {
    /// Reads a JSON or YAML file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Config`] that names the file and the key.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::io(format!("cannot read the configuration `{}`", path.display()), error))?;
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        Self::parse_in(&text, &folder).map_err(|error| Error::Config(format!("`{}`: {error}", path.display())))
    }

    /// A configuration from text instead of a file, for tests.
    #[cfg(test)]
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_in(text, Path::new(""))
    }

    fn parse_in(text: &str, folder: &Path) -> Result<Self> {
        // JSON first: its error messages are better, and a YAML parser reads a few JSON texts differently.
        let value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(json) if text.trim_start().starts_with(['{', '[']) => {
                return Err(Error::Config(format!("this is not JSON: {json}")));
            }
            Err(_) => serde_saphyr::from_str::<Value>(text)
                .map_err(|yaml| Error::Config(format!("this is neither JSON nor YAML: {yaml}")))?,
        };
        Self::from_value(value, folder)
    }

    fn from_value(value: Value, folder: &Path) -> Result<Self> {
        let mut this = Self::default();
        let mut top = object("the configuration", value)?;
        let smdistributed = match top.remove("smdistributed") {
            Some(value) => object("smdistributed", value)?,
            // The short form that some published notebooks show.
            None if top.contains_key("modelparallel") || top.contains_key("dataparallel") => {
                this.warnings.push("`modelparallel` and `dataparallel` belong inside `smdistributed`".into());
                ["modelparallel", "dataparallel"]
                    .into_iter()
                    .filter_map(|key| top.remove(key).map(|value| (key.to_owned(), value)))
                    .collect()
            }
            None => Map::new(),
        };
        let mpi = top.remove("mpi").map(|value| object("mpi", value)).transpose()?;
        match top.remove("instance_groups") {
            None => {}
            Some(Value::Array(_)) => this.warnings.push(
                "`instance_groups` has no effect here: the hosts of a job, and how many ranks each takes, are those of `--hosts`".into(),
            ),
            Some(groups) => return Err(Error::Config(format!("`instance_groups` is {groups}: expected a list"))),
        }
        this.warnings.extend(top.keys().map(|key| format!("`{key}` is not a key of a distribution: ignored")));

        if smdistributed.len() > 1 {
            let keys: Vec<_> = smdistributed.keys().collect();
            return Err(Error::Config(format!("`smdistributed` has the entries {keys:?}: expected one")));
        }
        match smdistributed.into_iter().next() {
            None => {}
            Some((key, value)) if key == "modelparallel" => {
                this.read_model_parallel(object("smdistributed.modelparallel", value)?, folder, mpi.is_some())?;
            }
            Some((key, value)) if key == "dataparallel" => {
                this.read_data_parallel(object("smdistributed.dataparallel", value)?)?;
            }
            Some((key, _)) => {
                return Err(Error::Config(format!(
                    "`smdistributed.{key}`: expected `modelparallel` or `dataparallel`"
                )));
            }
        }
        if let Some(mpi) = mpi {
            this.read_mpi(mpi)?;
        }
        Ok(this)
    }

    fn read_model_parallel(&mut self, mut section: Map<String, Value>, folder: &Path, has_mpi: bool) -> Result<()> {
        if !enabled("smdistributed.modelparallel", &mut section)? {
            return Ok(());
        }
        if !has_mpi {
            return Err(Error::Config("`smdistributed.modelparallel` needs a section `mpi`".into()));
        }
        let parameters = match section.remove("parameters") {
            Some(Value::Object(parameters)) => parameters,
            Some(Value::String(path)) => read_parameters(&folder.join(path))?,
            Some(other) => {
                return Err(Error::Config(format!(
                    "`smdistributed.modelparallel.parameters` is {other}: expected a dictionary or the path of a JSON file"
                )));
            }
            None => return Err(Error::Config("`smdistributed.modelparallel.parameters` is missing".into())),
        };
        self.unknown("smdistributed.modelparallel", &section);
        self.model_parallel = Some(ModelParallel::new(parameters, &mut self.warnings)?);
        Ok(())
    }

    fn read_data_parallel(&mut self, mut section: Map<String, Value>) -> Result<()> {
        self.data_parallel = enabled("smdistributed.dataparallel", &mut section)?;
        self.read_mpi_options("smdistributed.dataparallel", &mut section)?;
        self.unknown("smdistributed.dataparallel", &section);
        Ok(())
    }

    fn read_mpi(&mut self, mut section: Map<String, Value>) -> Result<()> {
        self.mpi = enabled("mpi", &mut section)?;
        if !self.mpi && self.model_parallel.is_some() {
            return Err(Error::Config("`mpi.enabled` must be true with `smdistributed.modelparallel`".into()));
        }
        match section.remove("processes_per_host") {
            None => {}
            Some(value) => match value.as_u64() {
                Some(n @ 1..=4096) => self.processes_per_host = Some(n as usize),
                _ => {
                    return Err(Error::Config(format!(
                        "`mpi.processes_per_host` is {value}: expected a whole number from 1 to 4096"
                    )));
                }
            },
        }
        self.read_mpi_options("mpi", &mut section)?;
        self.unknown("mpi", &section);
        Ok(())
    }

    /// `-x NAME=VALUE` is the documented way to set variables, and `--NCCL_DEBUG X` a special case of it. Other
    /// options are for mpirun, which is not used here.
    fn read_mpi_options(&mut self, section: &str, values: &mut Map<String, Value>) -> Result<()> {
        let options = match values.remove("custom_mpi_options") {
            None => return Ok(()),
            Some(Value::String(options)) => options,
            Some(other) => {
                return Err(Error::Config(format!("`{section}.custom_mpi_options` is {other}: expected a text")));
            }
        };
        let mut words = options.split_whitespace();
        let mut unused = Vec::new();
        while let Some(word) = words.next() {
            match word {
                "-x" => match words.next().map(|pair| pair.split_once('=').ok_or(pair)) {
                    Some(Ok((name, value))) => self.mpi_variables.push((name.to_owned(), value.to_owned())),
                    // `-x NAME` exports a variable, which smdrun does for all variables.
                    Some(Err(_)) => {}
                    None => return Err(Error::Config(format!("`{section}.custom_mpi_options` ends in `-x`"))),
                },
                "--NCCL_DEBUG" => {
                    let level = words.next().unwrap_or("INFO");
                    self.mpi_variables.push(("NCCL_DEBUG".into(), level.to_owned()));
                }
                other => unused.push(other.to_owned()),
            }
        }
        if !unused.is_empty() {
            self.warnings.push(format!("`{}` is for mpirun and has no effect here", unused.join(" ")));
        }
        self.custom_mpi_options = options;
        Ok(())
    }

    fn unknown(&mut self, section: &str, rest: &Map<String, Value>) {
        self.warnings.extend(rest.keys().map(|key| format!("`{section}.{key}` is not known: ignored")));
    }

    /// Whether any library is enabled.
    pub fn is_on(&self) -> bool {
        self.model_parallel.is_some() || self.data_parallel || self.mpi
    }

    /// Warnings for the user.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    /// Checks the rules that depend on the number of processes.
    pub fn check_world(&self, num_ranks: usize) -> Result<()> {
        self.model_parallel.as_ref().map_or(Ok(()), |parameters| parameters.check_world(num_ranks))
    }

    /// The content of `SM_FRAMEWORK_PARAMS`.
    pub fn framework_parameters(&self, processes_per_host: usize) -> Map<String, Value> {
        let mut parameters = Map::new();
        if self.model_parallel.is_some() {
            parameters.insert("sagemaker_mpi_enabled".into(), true.into());
            parameters.insert("sagemaker_mpi_num_of_processes_per_host".into(), processes_per_host.into());
            parameters.insert("sagemaker_mpi_custom_mpi_options".into(), self.custom_mpi_options.clone().into());
        }
        if self.data_parallel {
            parameters.insert("sagemaker_distributed_dataparallel_enabled".into(), true.into());
            parameters.insert(
                "sagemaker_distributed_dataparallel_custom_mpi_options".into(),
                self.custom_mpi_options.clone().into(),
            );
        }
        parameters
    }
}

fn object(name: &str, value: Value) -> Result<Map<String, Value>> {
    match value {
        Value::Object(map) => Ok(map),
        // An empty YAML file.
        Value::Null => Ok(Map::new()),
        other => Err(Error::Config(format!("`{name}` is {other}: expected a dictionary"))),
    }
}

fn enabled(section: &str, values: &mut Map<String, Value>) -> Result<bool> {
    match values.remove("enabled") {
        None => Ok(false),
        Some(Value::Bool(value)) => Ok(value),
        Some(other) => Err(Error::Config(format!("`{section}.enabled` is {other}: expected true or false"))),
    }
}

fn read_parameters(path: &PathBuf) -> Result<Map<String, Value>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::Config(format!("cannot read the parameters `{}`: {error}", path.display())))?;
    let value = serde_json::from_str(&text)
        .map_err(|error| Error::Config(format!("the parameters `{}` are not JSON: {error}", path.display())))?;
    object("parameters", value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Distribution::parse(text).expect_err("an invalid configuration").to_string()
    }

    #[test]
    fn yaml_and_json_say_the_same() {
        let yaml = "smdistributed:\n  modelparallel:\n    enabled: true\n    parameters:\n      partitions: 2\n      ddp: true\n\
                    mpi:\n  enabled: true\n  processes_per_host: 8\n";
        let json = r#"{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {"partitions": 2, "ddp": true}}},
                       "mpi": {"enabled": true, "processes_per_host": 8}}"#;
        let (yaml, json) = (Distribution::parse(yaml).expect("YAML"), Distribution::parse(json).expect("JSON"));
        assert_eq!(yaml.model_parallel, json.model_parallel);
        assert_eq!((yaml.processes_per_host, json.processes_per_host), (Some(8), Some(8)));
        assert!(yaml.warnings.is_empty() && json.warnings.is_empty());
    }

    #[test]
    fn the_short_form_is_accepted_with_a_warning() {
        let text = r#"{"modelparallel": {"enabled": true, "parameters": {"partitions": 2}}, "mpi": {"enabled": true}}"#;
        let mut distribution = Distribution::parse(text).expect("valid");
        assert!(distribution.model_parallel.is_some());
        assert_eq!(distribution.take_warnings(), ["`modelparallel` and `dataparallel` belong inside `smdistributed`"]);
    }

    #[test]
    fn mpi_options_set_variables() {
        let text = r#"{"smdistributed": {"dataparallel": {"enabled": true,
            "custom_mpi_options": "-x SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES=8192 --NCCL_DEBUG WARN -x PATH --mca a b"}}}"#;
        let mut distribution = Distribution::parse(text).expect("valid");
        assert_eq!(
            distribution.mpi_variables,
            [("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES".into(), "8192".into()), ("NCCL_DEBUG".into(), "WARN".into())]
        );
        assert_eq!(distribution.take_warnings(), ["`--mca a b` is for mpirun and has no effect here"]);
    }

    #[test]
    fn a_section_that_is_off_has_no_effect() {
        let text = r#"{"smdistributed": {"modelparallel": {"enabled": false}}}"#;
        assert!(Distribution::parse(text).expect("valid").model_parallel.is_none());
        assert!(Distribution::parse("").expect("an empty file is not a configuration").model_parallel.is_none());
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            (
                r#"{"smdistributed": {"modelparallel": {}, "dataparallel": {}}}"#,
                r#"`smdistributed` has the entries ["dataparallel", "modelparallel"]: expected one"#,
            ),
            (
                r#"{"smdistributed": {"horovod": {}}}"#,
                "`smdistributed.horovod`: expected `modelparallel` or `dataparallel`",
            ),
            (
                r#"{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {}}}}"#,
                "`smdistributed.modelparallel` needs a section `mpi`",
            ),
            (
                r#"{"smdistributed": {"modelparallel": {"enabled": true}}, "mpi": {"enabled": true}}"#,
                "`smdistributed.modelparallel.parameters` is missing",
            ),
            (
                r#"{"smdistributed": {"modelparallel": {"enabled": true, "parameters": {}}}, "mpi": {}}"#,
                "`mpi.enabled` must be true with `smdistributed.modelparallel`",
            ),
            (
                r#"{"mpi": {"processes_per_host": 0}}"#,
                "`mpi.processes_per_host` is 0: expected a whole number from 1 to 4096",
            ),
            (r#"{"mpi": {"enabled": "yes"}}"#, "`mpi.enabled` is \"yes\": expected true or false"),
            ("[1]", "`the configuration` is [1]: expected a dictionary"),
            (r#"{"mpi": }"#, "this is not JSON: expected value at line 1 column 9"),
        ] {
            assert_eq!(error(text), expected);
        }
    }

    #[test]
    fn parameters_may_be_a_file_beside_the_configuration() {
        let folder = std::env::temp_dir().join(format!("smd-distribution-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a writable temporary folder");
        std::fs::write(folder.join("mp.json"), r#"{"partitions": 2, "microbatches": 4}"#).expect("writable");
        std::fs::write(
            folder.join("job.yaml"),
            "smdistributed: {modelparallel: {enabled: true, parameters: mp.json}}\nmpi: {enabled: true}\n",
        )
        .expect("writable");
        let distribution = Distribution::read(&folder.join("job.yaml"));
        let missing = Distribution::read(&folder.join("no.yaml")).expect_err("there is no such file");
        std::fs::remove_dir_all(&folder).expect("the folder is ours");
        assert_eq!(distribution.expect("valid").model_parallel.expect("enabled").given()["microbatches"], 4);
        assert!(missing.to_string().starts_with("cannot read the configuration"), "{missing}");
    }
}
