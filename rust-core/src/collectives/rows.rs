//! Collectives of rows, where only the sender knows the number of rows.
//!
//! ```text
//! arrival: I have 3 rows | I have 0 | I have 5    ->  outputs for [3, 0, 5] rows  ->  an ordinary all-gather
//! ```
//!
//! - ROW-1: the exchange of the numbers and the operation itself are adjacent in the group's order (COM-1), so no
//!   other operation runs between them on any member. In a batch on a device, the exchanges of all its operations come
//!   first.
//! - ROW-2: a member whose outputs cannot be allocated takes part by failing (COM-4).

use std::fmt;

use super::Request;
use super::call::{Call, Kind};
use crate::buffer::TensorView;
use crate::error::Result;

/// Allocates an operation's outputs as soon as their sizes are known.
pub trait MakeOutputs: fmt::Debug + Send + Sync {
    /// Memory for `rows[i]` rows from member i, for every member. Called at most once an operation, on the thread
    /// that runs it; the views' promise holds until the operation is complete.
    ///
    /// # Errors
    /// The reason why the memory cannot be allocated; the other members get an error with it.
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>>;
}

/// Whether the numbers of rows must be exchanged before the operation.
pub(super) fn are_exchanged(request: &Request) -> bool {
    matches!(request, Request::AllGatherRows { .. } | Request::AllToAllRows { .. })
}

/// The operation itself, once the numbers of rows are known: `rows[i]` come from member i.
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

/// The numbers of rows that the members send to member `me`, from their calls in order.
pub(super) fn rows_for<'a>(calls: impl IntoIterator<Item = &'a Call>, me: usize) -> Vec<usize> {
    let rows = |call: &Call| match call.kind {
        Kind::AllGatherRows => call.elems,
        _ => call.sent.get(me).copied().unwrap_or(0),
    };
    calls.into_iter().map(rows).collect()
}
