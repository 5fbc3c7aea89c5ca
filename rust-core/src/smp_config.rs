//! The `modelparallel` parameters: each key is declared once, with its kind and default, and the rules between keys.
//!
//! - PAR-1: the launcher passes on only the given keys, and always `partitions`. It adds no defaults, because values
//!   from the launcher override those of the script, and defaults must not.

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ValueKind {
    Bool,
    /// An integer of at least this value.
    Int(u64),
    /// A number in this range.
    Float(f64, f64),
    Text,
    Choice(&'static [&'static str]),
    /// `spread`, `cluster`, or the letters D, P and T in any order and case.
    Placement,
}

/// A key of the parameters.
#[derive(Clone, Copy, Debug)]
struct ConfigKey {
    name: &'static str,
    kind: ValueKind,
    /// The default of the library.
    default: DefaultValue,
}

#[derive(Clone, Copy, Debug)]
enum DefaultValue {
    /// No default, or one that follows from other keys.
    None,
    Bool(bool),
    Int(u64),
    Float(f64),
    Text(&'static str),
}

const fn key(name: &'static str, kind: ValueKind, default: DefaultValue) -> ConfigKey {
    ConfigKey { name, kind, default }
}

/// A boolean that is false by default.
const fn switch(name: &'static str) -> ConfigKey {
    key(name, ValueKind::Bool, DefaultValue::Bool(false))
}

/// Every key, for the launcher and for the library.
const KEYS: &[ConfigKey] = &[
    // Memory that a schedule may use on a rank.
    key("activation_memory_bytes", ValueKind::Int(1), DefaultValue::None),
    key("active_microbatches", ValueKind::Int(1), DefaultValue::None),
    key("activation_loading_horizon", ValueKind::Int(1), DefaultValue::Int(4)),
    key("auto_partition", ValueKind::Bool, DefaultValue::Bool(true)),
    switch("bf16"),
    key("contiguous", ValueKind::Bool, DefaultValue::Bool(true)),
    switch("cuda_graphs"),
    switch("ddp"),
    key("ddp_dist_backend", ValueKind::Choice(&["auto", "nccl"]), DefaultValue::Text("auto")),
    key("ddp_port", ValueKind::Int(0), DefaultValue::None),
    key("default_partition", ValueKind::Int(0), DefaultValue::None),
    switch("delayed_parameter_initialization"),
    switch("deterministic_server"),
    switch("fast_mode"),
    switch("fp16"),
    switch("fp16_params"),
    switch("horovod"),
    key("load_partition", ValueKind::Bool, DefaultValue::None),
    key("memory_weight", ValueKind::Float(0.0, 1.0), DefaultValue::None),
    key("microbatches", ValueKind::Int(1), DefaultValue::Int(1)),
    switch("offload_activations"),
    key("optimize", ValueKind::Choice(&["memory", "speed"]), DefaultValue::Text("memory")),
    key("partition_file", ValueKind::Text, DefaultValue::None),
    // Two names of the same number.
    key("partitions", ValueKind::Int(1), DefaultValue::None),
    key("pipeline_parallel_degree", ValueKind::Int(1), DefaultValue::Int(1)),
    key(
        "pipeline",
        ValueKind::Choice(&["interleaved", "simple", "zero_bubble", "_only_forward"]),
        DefaultValue::Text("interleaved"),
    ),
    key("placement_strategy", ValueKind::Placement, DefaultValue::Text("cluster")),
    switch("prescaled_batch"),
    key("sdp_gradient_clipping", ValueKind::Float(0.0, f64::MAX), DefaultValue::Float(1.0)),
    key("sdp_hierarchical_allgather", ValueKind::Bool, DefaultValue::Bool(true)),
    key("sdp_max_live_parameters", ValueKind::Int(1), DefaultValue::Int(1_000_000_000)),
    key("sdp_param_persistence_threshold", ValueKind::Int(0), DefaultValue::Int(1_000_000)),
    key("sdp_reduce_bucket_size", ValueKind::Int(1), DefaultValue::Int(500_000_000)),
    key("sharded_data_parallel_degree", ValueKind::Int(1), DefaultValue::Int(1)),
    switch("shard_optimizer_state"),
    switch("skip_tracing"),
    switch("static_mode"),
    key("tensor_parallel_degree", ValueKind::Int(1), DefaultValue::Int(1)),
];

/// All keys except `partitions`, an alias, with their defaults; null if there is none, or it follows from other keys.
pub fn defaults() -> Map<String, Value> {
    let value = |default| match default {
        DefaultValue::None => Value::Null,
        DefaultValue::Bool(value) => value.into(),
        DefaultValue::Int(value) => value.into(),
        DefaultValue::Float(value) => value.into(),
        DefaultValue::Text(value) => value.into(),
    };
    let keys = KEYS.iter().filter(|key| key.name != "partitions");
    keys.map(|key| (key.name.to_owned(), value(key.default))).collect()
}

/// Returns the given `parameters` with validated and normalised values. Unknown keys are dropped with a text in
/// `warnings`, except keys that start with `_`. Null is dropped, too, for keys without a default.
///
/// # Errors
/// [`Error::Config`] naming the key, its value and the allowed values.
pub fn checked(parameters: Map<String, Value>, warnings: &mut Vec<String>) -> Result<Map<String, Value>> {
    let mut given = Map::new();
    for (name, value) in parameters {
        match KEYS.iter().find(|key| key.name == name) {
            Some(ConfigKey { default: DefaultValue::None, .. }) if value.is_null() => {}
            Some(key) => {
                let value = check(&name, key.kind, value)?;
                given.insert(name, value);
            }
            None if name.starts_with('_') => {}
            None => warnings.push(format!("`{name}` is not a modelparallel parameter: ignored")),
        }
    }
    // Scripts and Hugging Face look for `partitions`.
    if let (Some(old), Some(new)) = (given.get("partitions"), given.get("pipeline_parallel_degree"))
        && old != new
    {
        return Err(Error::Config(format!(
            "`partitions` is {old} and `pipeline_parallel_degree` is {new}: they are two names of one parameter"
        )));
    }
    Ok(given)
}

/// Checks the rules between given keys.
///
/// # Errors
/// [`Error::Config`] naming the keys.
pub fn check_rules(given: &Map<String, Value>) -> Result<()> {
    let mut given = given.clone();
    name_partitions(&mut given);
    ModelParallel { given }.check_rules()
}

/// Adds the number of partitions under the name `partitions`, which scripts and Hugging Face look for.
fn name_partitions(given: &mut Map<String, Value>) {
    if !given.contains_key("partitions") {
        let new = given.get("pipeline_parallel_degree").cloned();
        given.insert("partitions".into(), new.unwrap_or(1.into()));
    }
}

/// Validated parameters of a model-parallel job.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelParallel {
    given: Map<String, Value>,
}

impl ModelParallel {
    /// Validates `parameters`; unknown keys are dropped with a text in `warnings`, except keys that start with `_`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the key, its value and the allowed values.
    pub fn new(parameters: Map<String, Value>, warnings: &mut Vec<String>) -> Result<Self> {
        let mut given = checked(parameters, warnings)?;
        name_partitions(&mut given);
        let parameters = Self { given };
        parameters.check_rules()?;
        Ok(parameters)
    }

    /// The given keys, and `partitions` (PAR-1).
    pub fn given(&self) -> &Map<String, Value> {
        &self.given
    }

    /// The value of the command-line argument `--mp_parameters`: sorted keys, Python literals.
    pub fn argument(&self) -> String {
        let literal = |value: &Value| match value {
            Value::Bool(true) => "True".to_owned(),
            Value::Bool(false) => "False".to_owned(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        self.given.iter().map(|(key, value)| format!("{key}={}", literal(value))).collect::<Vec<_>>().join(",")
    }

    /// Checks the rules that depend on the number of processes.
    ///
    /// # Errors
    /// [`Error::Config`] with the sizes.
    pub fn check_world(&self, num_ranks: usize) -> Result<()> {
        let (pp, tp) = (self.degree("partitions"), self.degree("tensor_parallel_degree"));
        let num_ranks = num_ranks as u64;
        if !num_ranks.is_multiple_of(pp * tp) {
            return Err(Error::Config(format!(
                "{num_ranks} processes do not divide into model-parallel groups of {} \
                 (`partitions` {pp} x `tensor_parallel_degree` {tp})",
                pp * tp
            )));
        }
        let (sharding, dp) = (self.degree("sharded_data_parallel_degree"), num_ranks / pp);
        if !dp.is_multiple_of(sharding) {
            return Err(Error::Config(format!(
                "`sharded_data_parallel_degree` {sharding} does not divide the data-parallel degree {dp} \
                 ({num_ranks} processes / `partitions` {pp})"
            )));
        }
        Ok(())
    }

    fn check_rules(&self) -> Result<()> {
        let fail = |text: String| Err(Error::Config(text));
        let partitions = self.degree("partitions");
        match self.given.get("default_partition").and_then(Value::as_u64) {
            Some(default) if default >= partitions => {
                return fail(format!(
                    "`default_partition` is {default}: expected less than `partitions`, which is {partitions}"
                ));
            }
            None if self.given.get("auto_partition") == Some(&Value::Bool(false)) => {
                return fail("`auto_partition` is false: `default_partition` is needed".into());
            }
            _ => {}
        }
        for key in ["ddp_port", "ddp_dist_backend"] {
            if self.given.contains_key(key) && !self.given.contains_key("ddp") {
                return fail(format!("`{key}` needs `ddp`"));
            }
        }
        if self.is_on("horovod") && self.is_on("ddp") {
            return fail("`horovod` and `ddp` are both true: choose one".into());
        }
        if self.is_on("fp16") && self.is_on("bf16") {
            return fail("`fp16` and `bf16` are both true: choose one".into());
        }
        if self.degree("tensor_parallel_degree") > 1 && !self.is_on("ddp") {
            return fail(format!(
                "`tensor_parallel_degree` {} needs `ddp: true`",
                self.degree("tensor_parallel_degree")
            ));
        }
        if self.degree("sharded_data_parallel_degree") > 1 && self.is_on("shard_optimizer_state") {
            return fail("`sharded_data_parallel_degree` cannot be combined with `shard_optimizer_state`".into());
        }
        Ok(())
    }

    /// The value of a degree; 1 by default.
    fn degree(&self, key: &str) -> u64 {
        self.given.get(key).and_then(Value::as_u64).unwrap_or(1)
    }

    /// Whether a boolean is given and true.
    fn is_on(&self, key: &str) -> bool {
        self.given.get(key) == Some(&Value::Bool(true))
    }
}

/// Returns the normalised value if it is of this kind.
fn check(key: &str, kind: ValueKind, value: Value) -> Result<Value> {
    let expected = match kind {
        ValueKind::Bool if value.is_boolean() => return Ok(value),
        ValueKind::Bool => "true or false".to_owned(),
        ValueKind::Int(least) if value.as_u64().is_some_and(|number| number >= least) => return Ok(value),
        // A configuration may write a large integer as 5e8.
        ValueKind::Int(least) => match value.as_f64() {
            Some(number) if number.fract() == 0.0 && number >= least as f64 && number < 9.0e15 => {
                return Ok((number as u64).into());
            }
            _ => format!("a whole number of at least {least}"),
        },
        ValueKind::Float(low, high) if value.as_f64().is_some_and(|number| (low..=high).contains(&number)) => {
            return Ok(value);
        }
        ValueKind::Float(low, f64::MAX) => format!("a number of at least {low}"),
        ValueKind::Float(low, high) => format!("a number from {low} to {high}"),
        ValueKind::Text if value.is_string() => return Ok(value),
        ValueKind::Text => "a text".to_owned(),
        ValueKind::Choice(names) if value.as_str().is_some_and(|text| names.contains(&text)) => return Ok(value),
        ValueKind::Choice(names) => {
            let public: Vec<_> = names.iter().filter(|name| !name.starts_with('_')).collect();
            format!("one of {public:?}")
        }
        ValueKind::Placement => match value.as_str().and_then(placement) {
            Some(strategy) => return Ok(strategy.into()),
            None => "\"cluster\", \"spread\" or the letters D, P and T in any order".to_owned(),
        },
    };
    Err(Error::Config(format!("`{key}` is {value}: expected {expected}")))
}

/// Normalises the name of a placement strategy.
fn placement(text: &str) -> Option<String> {
    if matches!(text, "cluster" | "spread") {
        return Some(text.to_owned());
    }
    let letters = text.to_ascii_uppercase();
    let mut sorted: Vec<_> = letters.chars().collect();
    sorted.sort_unstable();
    (sorted == ['D', 'P', 'T']).then_some(letters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> (Result<ModelParallel>, Vec<String>) {
        let Value::Object(map) = value else { panic!("the test passes an object") };
        let mut warnings = Vec::new();
        (ModelParallel::new(map, &mut warnings), warnings)
    }

    fn valid(value: Value) -> ModelParallel {
        parse(value).0.expect("valid parameters")
    }

    fn error(value: Value) -> String {
        parse(value).0.expect_err("invalid parameters").to_string()
    }

    #[test]
    fn the_list_of_keys_is_frozen() {
        let mut names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), KEYS.len(), "a key is declared once");
        assert_eq!(names.len(), 38, "a new key is a decision: see the documentation of the parameters");
    }

    #[test]
    fn partitions_and_its_new_name_are_one() {
        assert_eq!(valid(json!({})).given()["partitions"], 1);
        assert_eq!(valid(json!({"pipeline_parallel_degree": 4})).given()["partitions"], 4);
        assert_eq!(
            error(json!({"partitions": 2, "pipeline_parallel_degree": 4})),
            "`partitions` is 2 and `pipeline_parallel_degree` is 4: they are two names of one parameter"
        );
    }

    #[test]
    fn the_argument_has_sorted_keys_and_python_literals() {
        let parameters = valid(json!({"microbatches": 4, "ddp": true, "partitions": 2, "pipeline": "simple"}));
        assert_eq!(parameters.argument(), "ddp=True,microbatches=4,partitions=2,pipeline=simple");
    }

    #[test]
    fn values_are_checked() {
        for (parameters, text) in [
            (json!({"microbatches": 0}), "`microbatches` is 0: expected a whole number of at least 1"),
            (json!({"microbatches": true}), "`microbatches` is true: expected a whole number of at least 1"),
            (json!({"partitions": 1.5}), "`partitions` is 1.5: expected a whole number of at least 1"),
            (json!({"ddp": 1}), "`ddp` is 1: expected true or false"),
            (
                json!({"pipeline": "gpipe"}),
                "`pipeline` is \"gpipe\": expected one of [\"interleaved\", \"simple\", \"zero_bubble\"]",
            ),
            (json!({"memory_weight": 1.5}), "`memory_weight` is 1.5: expected a number from 0 to 1"),
            (json!({"partition_file": 3}), "`partition_file` is 3: expected a text"),
            (json!({"auto_partition": false}), "`auto_partition` is false: `default_partition` is needed"),
            (
                json!({"partitions": 2, "default_partition": 2}),
                "`default_partition` is 2: expected less than `partitions`, which is 2",
            ),
            (json!({"ddp_port": 7777}), "`ddp_port` needs `ddp`"),
            (json!({"ddp": true, "ddp_port": -1}), "`ddp_port` is -1: expected a whole number of at least 0"),
            (json!({"ddp": true, "horovod": true}), "`horovod` and `ddp` are both true: choose one"),
            (json!({"fp16": true, "bf16": true}), "`fp16` and `bf16` are both true: choose one"),
            (json!({"tensor_parallel_degree": 2}), "`tensor_parallel_degree` 2 needs `ddp: true`"),
            (
                json!({"sharded_data_parallel_degree": 2, "shard_optimizer_state": true, "ddp": true}),
                "`sharded_data_parallel_degree` cannot be combined with `shard_optimizer_state`",
            ),
            (
                json!({"placement_strategy": "DPP"}),
                "`placement_strategy` is \"DPP\": expected \"cluster\", \"spread\" or the letters D, P and T in any order",
            ),
        ] {
            assert_eq!(error(parameters), text);
        }
    }

    #[test]
    fn every_default_is_a_value_of_its_key() {
        let mut warnings = Vec::new();
        let given = checked(defaults(), &mut warnings).expect("defaults are valid");
        assert!(warnings.is_empty() && check_rules(&given).is_ok());
        assert_eq!(defaults().len(), KEYS.len() - 1);
    }

    #[test]
    fn accepted_spellings() {
        let own = json!({"pipeline": "zero_bubble", "activation_memory_bytes": 4096, "sdp_gradient_clipping": 0});
        assert_eq!(valid(own.clone()).given()["pipeline"], own["pipeline"]);
        assert_eq!(valid(own).given()["activation_memory_bytes"], 4096);
        assert_eq!(valid(json!({"ddp_port": null})).given().len(), 1);
        assert_eq!(valid(json!({"placement_strategy": "tpd"})).given()["placement_strategy"], "TPD");
        assert_eq!(valid(json!({"sdp_reduce_bucket_size": 5e8})).given()["sdp_reduce_bucket_size"], 500_000_000);
        assert_eq!(valid(json!({"pipeline": "_only_forward"})).given()["pipeline"], "_only_forward");
        let (parameters, warnings) = parse(json!({"microbatch": 3, "_internal": 1}));
        assert_eq!(warnings, ["`microbatch` is not a modelparallel parameter: ignored"]);
        assert_eq!(parameters.expect("unknown keys are no error").given().len(), 1);
    }

    #[test]
    fn sizes_must_divide() {
        let parameters = valid(json!({"partitions": 2, "tensor_parallel_degree": 2, "ddp": true}));
        assert!(parameters.check_world(8).is_ok());
        assert_eq!(
            parameters.check_world(6).unwrap_err().to_string(),
            "6 processes do not divide into model-parallel groups of 4 (`partitions` 2 x `tensor_parallel_degree` 2)"
        );
        let sharded = valid(json!({"sharded_data_parallel_degree": 4}));
        assert!(sharded.check_world(4).is_ok());
        let pipelines = valid(json!({"sharded_data_parallel_degree": 2, "partitions": 2}));
        assert!(pipelines.check_world(4).is_ok());
        assert_eq!(
            sharded.check_world(6).unwrap_err().to_string(),
            "`sharded_data_parallel_degree` 4 does not divide the data-parallel degree 6 (6 processes / `partitions` 1)"
        );
    }
}
