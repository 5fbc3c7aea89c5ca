//! Collectives of rows whose numbers only their owners know.
//!
//! ```text
//! arrival: I have 3 rows | I have 0 | I have 5    ->  outputs for [3, 0, 5] rows  ->  an ordinary all-gather
//! ```
//!
//! - ROW-1: the arrival and the operation proper are neighbours in the group's order (COM-1), so nothing comes between
//!   them on any member.
//! - ROW-2: a member whose outputs cannot be made takes part by failing (COM-4).

use std::fmt;

use super::Request;
use super::call::{Call, Kind};
use crate::buffer::TensorView;
use crate::error::Result;

/// Makes an operation's outputs as soon as their sizes are known.
pub trait MakeOutputs: fmt::Debug + Send + Sync {
    /// Memory for `rows[i]` rows from member i, for every member. Called at most once an operation, on the thread
    /// that runs it; the views' promise holds until the operation is complete.
    ///
    /// # Errors
    /// Whatever keeps it from being made; the other members hear of it.
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>>;
}

/// The operation proper, once every member has said how many rows it has for this one: `rows[i]` come from member i.
pub(super) fn settle(request: &Request, rows: &[usize]) -> Result<Request> {
    Ok(match request {
        Request::AllGatherRows { input, outputs, .. } => {
            Request::AllGather { input: *input, outputs: outputs.make(rows)? }
        }
        Request::AllToAllRows { inputs, outputs, .. } => {
            Request::AllToAll { inputs: inputs.clone(), outputs: outputs.make(rows)? }
        }
        other => other.clone(),
    })
}

/// Rows that the member of each call, in order, has for member `me`.
pub(super) fn rows_for<'a>(calls: impl IntoIterator<Item = &'a Call>, me: usize) -> Vec<usize> {
    let rows = |call: &Call| match call.kind {
        Kind::AllGatherRows => call.elems,
        _ => call.sent.get(me).copied().unwrap_or(0),
    };
    calls.into_iter().map(rows).collect()
}
