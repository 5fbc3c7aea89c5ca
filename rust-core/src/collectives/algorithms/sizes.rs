//! Exchanges the numbers of rows: the first part of an operation on rows ([`crate::collectives::rows`]). In shared
//! memory, the calls contain the numbers, so one arrival suffices. Over messages, members get only the result of the
//! comparison, so the numbers are exchanged afterwards.

use super::messages::exchange;
use crate::collectives::Group;
use crate::collectives::agreement::{agree, agree_without_memory, publish};
use crate::collectives::call::Call;
use crate::collectives::rows::rows_for;
use crate::error::{Error, Result};

/// Arrives with `call`, compares, and returns how many rows each member has for this one.
pub(in crate::collectives) fn gather_rows(call: &Call, group: &Group<'_>) -> Result<Vec<usize>> {
    let (me, size) = (group.members.me, group.members.size());
    let Some(memory) = group.memory else {
        agree_without_memory(call, group)?;
        return by_messages(call, group);
    };
    publish(memory, call, 0);
    let calls = agree(memory, call, group)?;
    // Equal calls are not returned.
    Ok(if calls.is_empty() { rows_for(vec![call; size], me) } else { rows_for(&calls, me) })
}

fn by_messages(call: &Call, group: &Group<'_>) -> Result<Vec<usize>> {
    let (me, size) = (group.members.me, group.members.size());
    let mine: Vec<u64> = (0..size).map(|rank| rows_for([call], rank)[0] as u64).collect();
    let mut theirs = vec![0u64; size];
    theirs[me] = mine[me];
    let others = || (0..size).filter(|rank| *rank != me);
    let place = theirs.as_mut_ptr();
    let sends: Vec<_> = others().map(|rank| (rank, mine[rank..].as_ptr().cast(), size_of::<u64>())).collect();
    let recvs: Vec<_> = others().map(|rank| (rank, place.wrapping_add(rank).cast(), size_of::<u64>())).collect();
    exchange(group, &sends, &recvs)?;
    let rows =
        |count: u64| usize::try_from(count).map_err(|_| Error::Internal(format!("a member announced {count} rows")));
    theirs.into_iter().map(rows).collect()
}
