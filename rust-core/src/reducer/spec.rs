//! Specifications of reducers: registered when a graph is traced, which ranks do at different times and different numbers
//! of times, and used when it runs.
//!
//! - BLU-1: the same parameters and options, for the n-th time in a graph, are the same spec. So a graph that is
//!   traced again finds the reducer of the first one.
//! - BLU-2: the reducers of a graph are made together, in the order in which it names them, when the first one is
//!   needed: in which order they are needed, ranks do not agree on.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fingerprint::ReducerDescription;
use crate::error::{Error, Result};

/// The graph of operations that run at once: it has no others.
pub const NO_GRAPH: u64 = 0;

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// The parameters, options and ranks of a reducer.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ReducerSpec {
    /// What its ranks compare.
    pub description: ReducerDescription,
    /// The ranks whose gradients it reduces; all that there are, if it names none.
    pub ranks: Option<Vec<usize>>,
}

#[derive(Default)]
struct Registry {
    /// By number.
    specs: Vec<Arc<ReducerSpec>>,
    /// By the content of a spec, and the number of equal specs that the graph names before it.
    numbers: HashMap<(Vec<u8>, usize), usize>,
    /// What each graph names, in order.
    graphs: HashMap<u64, Vec<usize>>,
    /// By spec: the last graph that names it.
    graph_of: Vec<u64>,
}

/// Registers the spec that `graph` names next and returns its number. Without a graph, equal specs have the same number.
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

/// The specs whose reducers are made together with this one's, in order.
pub fn made_with(number: usize) -> Vec<usize> {
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
        assert_eq!(trace(7002, &["reducer a", "reducer b", "reducer a"]), first, "BLU-1");
        assert_eq!(made_with(first[2]), first, "BLU-2");
        assert_eq!(trace(NO_GRAPH, &["reducer a", "reducer a"]), [first[0], first[0]]);
        let alone = trace(NO_GRAPH, &["reducer c"]);
        assert_eq!(made_with(alone[0]), alone);
        let some = register(7003, of("reducer a", Some(vec![0, 2]))).expect("the options are good");
        assert!(!first.contains(&some), "ranks that are others have a reducer of their own");
        assert_eq!(get(first[1]).expect("it was registered").description.params[0].name, "reducer b");
        assert!(get(1 << 40).is_err());
    }
}
