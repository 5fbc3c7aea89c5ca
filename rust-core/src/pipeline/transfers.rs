//! Inserts sends and receives between computations.
//!
//! A send follows the task that computes the value. A receive comes before the task that needs it, and earlier if
//! that rank needs a message that the same sender sends later before that task: so both sides have the same order
//! (PIPE-2). An early receive does not delay its rank, because the later message arrives after it anyway (PIPE-1).

use std::collections::HashMap;

use super::{Action, ActionKind, Graph, Program};

/// Adds the transfers to `program`, which has computations only.
pub(super) fn insert(graph: &Graph, program: &Program) -> Program {
    let mut sent: Vec<Vec<Action>> = Vec::with_capacity(graph.ranks());
    for actions in program.ranks() {
        let mut list = Vec::with_capacity(actions.len() * 2);
        for &action in actions {
            list.push(action);
            messages_of(graph, action, |message, _| list.push(message));
        }
        sent.push(list);
    }
    let needed = Needs::of(graph, program);
    let mut ranks = Vec::with_capacity(graph.ranks());
    // For each rank, the messages that it receives, and the computations before which it needs them.
    let mut receives: Vec<Vec<(usize, usize, usize, Action)>> = vec![Vec::new(); graph.ranks()];
    for (rank, list) in sent.iter().enumerate() {
        // From the last message to the first, so that no message is received after one that was sent later.
        let mut latest: HashMap<usize, usize> = HashMap::new();
        for (order, message) in list.iter().enumerate().rev().filter(|(_, action)| action.kind.sends()) {
            let to = graph.stage(message.peer.expect("a send has a peer") as usize).rank;
            let before = needed.before(*message);
            let latest = latest.entry(to).or_insert(usize::MAX);
            *latest = before.min(*latest);
            receives[to].push((*latest, rank, order, message.counterpart().expect("a send has a counterpart")));
        }
    }
    for (list, mut receives) in sent.into_iter().zip(receives) {
        receives.sort_unstable_by_key(|&(before, rank, order, _)| (before, rank, order));
        let mut receives = receives.into_iter().peekable();
        let mut whole = Vec::with_capacity(list.len() + receives.len());
        let mut place = 0;
        for action in list {
            if action.kind.computes() {
                while let Some((_, _, _, receive)) = receives.next_if(|&(before, ..)| before <= place) {
                    whole.push(receive);
                }
                place += 1;
            }
            whole.push(action);
        }
        ranks.push(whole);
    }
    Program::new(ranks)
}

/// The stages to which `action` sends its result, and the size.
fn messages_of(graph: &Graph, action: Action, mut message: impl FnMut(Action, u64)) {
    let (stage, microbatch) = (action.stage as usize, action.microbatch as usize);
    let rank = graph.stage(stage).rank;
    match action.kind {
        ActionKind::Forward => {
            for &(to, bytes) in graph.consumers(stage).iter().filter(|&&(to, _)| graph.stage(to).rank != rank) {
                message(Action::transfer(ActionKind::SendForward, stage, microbatch, to), bytes);
            }
        }
        ActionKind::Backward | ActionKind::Input => {
            for edge in &graph.stage(stage).inputs {
                let from = graph.stage(edge.from);
                if from.rank != rank && from.backward {
                    message(Action::transfer(ActionKind::SendBackward, stage, microbatch, edge.from), edge.bytes);
                }
            }
        }
        _ => {}
    }
}

/// The position of each task in its rank's list.
struct Needs {
    microbatches: usize,
    forwards: Vec<usize>,
    backwards: Vec<usize>,
}

impl Needs {
    fn of(graph: &Graph, program: &Program) -> Self {
        let microbatches = graph.microbatches();
        let tasks = graph.stages().len() * microbatches;
        let mut needs = Self { microbatches, forwards: vec![usize::MAX; tasks], backwards: vec![usize::MAX; tasks] };
        for actions in program.ranks() {
            for (place, action) in actions.iter().enumerate() {
                let index = action.stage as usize * microbatches + action.microbatch as usize;
                match action.kind {
                    ActionKind::Forward => needs.forwards[index] = place,
                    ActionKind::Backward | ActionKind::Input => needs.backwards[index] = place,
                    _ => {}
                }
            }
        }
        needs
    }

    /// The position of the computation that needs a message.
    fn before(&self, message: Action) -> usize {
        let receiver = message.peer.expect("a send has a peer") as usize;
        let index = receiver * self.microbatches + message.microbatch as usize;
        if message.kind == ActionKind::SendForward { self.forwards[index] } else { self.backwards[index] }
    }
}
