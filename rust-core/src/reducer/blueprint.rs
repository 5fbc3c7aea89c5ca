//! What reducers will be made from: drawn when a graph is traced, which ranks do at different times and different numbers
//! of times, and used when it runs.
//!
//! - BLU-1: the same parameters and options, for the n-th time in a graph, are the same blueprint. So a graph that is
//!   traced again finds the reducer of the first one.
//! - BLU-2: the reducers of a graph are made together, in the order in which it names them, when the first one is
//!   needed: in which order they are needed, ranks do not agree on.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::fingerprint::Description;
use crate::error::{Error, Result};

/// The graph of operations that run at once: it has no others.
pub const NO_GRAPH: u64 = 0;

static DRAWN: Mutex<Option<Drawn>> = Mutex::new(None);

/// What a reducer is made from.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Blueprint {
    /// What its ranks compare.
    pub description: Description,
    /// The ranks whose gradients it reduces; all that there are, if it names none.
    pub ranks: Option<Vec<usize>>,
}

#[derive(Default)]
struct Drawn {
    /// By number.
    blueprints: Vec<Arc<Blueprint>>,
    /// By what a blueprint says and how many that say it the graph has before it.
    numbers: HashMap<(Vec<u8>, usize), usize>,
    /// What each graph names, in order.
    graphs: HashMap<u64, Vec<usize>>,
    /// By blueprint: the last graph that names it.
    graph_of: Vec<u64>,
}

/// The number of the blueprint that `graph` names next, or without a graph, of the only one that says this.
///
/// # Errors
/// [`Error::InvalidArgument`] for options that no reducer can have.
pub fn draw(graph: u64, blueprint: Blueprint) -> Result<usize> {
    blueprint.description.options.check()?;
    let key = postcard::to_stdvec(&blueprint)
        .map_err(|error| Error::Internal(format!("the parameter list cannot be encoded: {error}")))?;
    let drawn = &mut *DRAWN.lock();
    let Drawn { blueprints, numbers, graphs, graph_of } = drawn.get_or_insert_default();
    let named = graphs.entry(graph).or_default();
    let before = match graph {
        NO_GRAPH => 0,
        _ => named.iter().filter(|&&number| *blueprints[number] == blueprint).count(),
    };
    let number = *numbers.entry((key, before)).or_insert_with(|| {
        blueprints.push(Arc::new(blueprint));
        graph_of.push(graph);
        blueprints.len() - 1
    });
    if graph != NO_GRAPH {
        named.push(number);
        graph_of[number] = graph;
    }
    Ok(number)
}

/// The blueprint with this number.
///
/// # Errors
/// [`Error::InvalidArgument`] if this process has drawn none.
pub fn get(number: usize) -> Result<Arc<Blueprint>> {
    let drawn = DRAWN.lock();
    drawn.as_ref().and_then(|drawn| drawn.blueprints.get(number)).cloned().ok_or_else(|| {
        Error::InvalidArgument(format!(
            "this process has no plan {number} of gradients: a graph that reduces gradients runs only where it was traced"
        ))
    })
}

/// The blueprints whose reducers are made together with this one's, in order.
pub fn made_with(number: usize) -> Vec<usize> {
    let drawn = DRAWN.lock();
    let graph = drawn.as_ref().and_then(|drawn| drawn.graph_of.get(number).copied());
    match (&*drawn, graph) {
        (Some(drawn), Some(graph)) if graph != NO_GRAPH => drawn.graphs.get(&graph).cloned().unwrap_or_default(),
        _ => vec![number],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::DType;
    use crate::reducer::{Options, ParamSpec};

    #[test]
    fn graphs_that_are_traced_again_find_their_blueprints() {
        let of = |name: &str, ranks: Option<Vec<usize>>| Blueprint {
            description: Description {
                params: vec![ParamSpec::dense(name, [3], DType::Float32)],
                options: Options::default(),
            },
            ranks,
        };
        let trace = |graph, names: &[&str]| -> Vec<usize> {
            names.iter().map(|name| draw(graph, of(name, None)).expect("the options are good")).collect()
        };
        // Numbers are the process's, so the names are this test's own.
        let first = trace(7001, &["blueprint a", "blueprint b", "blueprint a"]);
        assert!(first[0] != first[2] && first[0] != first[1]);
        assert_eq!(trace(7002, &["blueprint a", "blueprint b", "blueprint a"]), first, "BLU-1");
        assert_eq!(made_with(first[2]), first, "BLU-2");
        assert_eq!(trace(NO_GRAPH, &["blueprint a", "blueprint a"]), [first[0], first[0]]);
        let alone = trace(NO_GRAPH, &["blueprint c"]);
        assert_eq!(made_with(alone[0]), alone);
        let some = draw(7003, of("blueprint a", Some(vec![0, 2]))).expect("the options are good");
        assert!(!first.contains(&some), "ranks that are others have a reducer of their own");
        assert_eq!(get(first[1]).expect("it was drawn").description.params[0].name, "blueprint b");
        assert!(get(1 << 40).is_err());
    }
}
