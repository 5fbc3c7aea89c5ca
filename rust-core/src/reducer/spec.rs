//! Specifications of reducers. They are registered when a graph is traced, which happens at different times and
//! different numbers of times on the ranks, and used when the graph runs.
//!
//! - SPEC-1: the n-th spec with the same parameters and options in a graph is always the same spec. A graph that is
//!   traced again therefore finds the reducer of the first trace.
//! - SPEC-2: the reducers of a graph are all made when the first one is needed, in the order in which the graph names
//!   them. Ranks do not agree on the order in which they are needed.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fingerprint::ReducerDescription;
use crate::error::{Error, Result};

/// Stands for eager operations, which belong to no graph.
pub const NO_GRAPH: u64 = 0;

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// The parameters, options and ranks of a reducer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ReducerSpec {
    /// The part that the ranks compare.
    pub description: ReducerDescription,
    /// The ranks whose gradients it reduces; all ranks if `None`.
    pub ranks: Option<Vec<usize>>,
}

#[derive(Default)]
struct Registry {
    /// The specs, by number.
    specs: Vec<Arc<ReducerSpec>>,
    /// Spec numbers by content and by how many equal specs the graph names before.
    numbers: HashMap<(Vec<u8>, usize), usize>,
    /// The spec numbers that each graph names, in order.
    graphs: HashMap<u64, Vec<usize>>,
    /// For each spec, the last graph that names it.
    graph_of: Vec<u64>,
}

/// Registers the spec that `graph` names next and returns its number. Without a graph, equal specs have the same
/// number.
///
/// # Errors
/// [`Error::InvalidArgument`] for options that no reducer can have.
pub fn register(graph: u64, spec: ReducerSpec) -> Result<usize> {
    spec.description.options.check()?;
    let key = postcard::to_stdvec(&spec)
        .map_err(|error| Error::Internal(format!("the parameter list cannot be encoded: {error}")))?;
    let registry = &mut *REGISTRY.lock();
    let Registry { specs, numbers, graphs, graph_of } = registry.get_or_insert_default();
    let named = graphs.entry(graph).or_default();
    let before = match graph {
        NO_GRAPH => 0,
        _ => named.iter().filter(|&&number| *specs[number] == spec).count(),
    };
    let number = *numbers.entry((key, before)).or_insert_with(|| {
        specs.push(Arc::new(spec));
        graph_of.push(graph);
        specs.len() - 1
    });
    if graph != NO_GRAPH {
        named.push(number);
        graph_of[number] = graph;
    }
    Ok(number)
}

/// The spec with this number.
///
/// # Errors
/// [`Error::InvalidArgument`] if this process has registered none.
pub fn get(number: usize) -> Result<Arc<ReducerSpec>> {
    let registry = REGISTRY.lock();
    registry.as_ref().and_then(|registry| registry.specs.get(number)).cloned().ok_or_else(|| {
        Error::InvalidArgument(format!(
            "this process has no plan {number} of gradients: a graph that reduces gradients runs only where it was traced"
        ))
    })
}

/// The specs whose reducers are made together with this one (SPEC-2), in order.
pub fn created_with(number: usize) -> Vec<usize> {
    let registry = REGISTRY.lock();
    let graph = registry.as_ref().and_then(|registry| registry.graph_of.get(number).copied());
    match (&*registry, graph) {
        (Some(registry), Some(graph)) if graph != NO_GRAPH => registry.graphs.get(&graph).cloned().unwrap_or_default(),
        _ => vec![number],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::DType;
    use crate::reducer::{ParamSpec, ReducerOptions};

    #[test]
    fn graphs_that_are_traced_again_find_their_specs() {
        let of = |name: &str, ranks: Option<Vec<usize>>| ReducerSpec {
            description: ReducerDescription {
                params: vec![ParamSpec::dense(name, [3], DType::Float32)],
                options: ReducerOptions::default(),
            },
            ranks,
        };
        let trace = |graph, names: &[&str]| -> Vec<usize> {
            names.iter().map(|name| register(graph, of(name, None)).expect("the options are good")).collect()
        };
        // Numbers are the process's, so the names are this test's own.
        let first = trace(7001, &["reducer a", "reducer b", "reducer a"]);
        assert!(first[0] != first[2] && first[0] != first[1]);
        assert_eq!(trace(7002, &["reducer a", "reducer b", "reducer a"]), first, "SPEC-1");
        assert_eq!(created_with(first[2]), first, "SPEC-2");
        assert_eq!(trace(NO_GRAPH, &["reducer a", "reducer a"]), [first[0], first[0]]);
        let alone = trace(NO_GRAPH, &["reducer c"]);
        assert_eq!(created_with(alone[0]), alone);
        let some = register(7003, of("reducer a", Some(vec![0, 2]))).expect("the options are good");
        assert!(!first.contains(&some), "ranks that are others have a reducer of their own");
        assert_eq!(get(first[1]).expect("it was registered").description.params[0].name, "reducer b");
        assert!(get(1 << 40).is_err());
    }
}
