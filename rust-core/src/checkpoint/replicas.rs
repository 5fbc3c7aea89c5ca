//! Divides the writing of tensors that all replicas hold among the replicas.
//!
//! - REPL-1: exactly one replica writes each row of a shared tensor. The division depends only on the tensors' sizes
//!   and the number of replicas, so all replicas compute the same one without a message.

/// Tensors of fewer bytes are written whole, by one replica, because parts of them would cause many small reads.
const MIN_SPLIT_BYTES: u64 = 1 << 20;

/// The size of a tensor that a rank holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldTensor {
    /// Length along the first axis; `None` for a scalar.
    pub rows: Option<u64>,
    /// Size in bytes of the whole tensor.
    pub bytes: u64,
    /// Whether all replicas hold it. If not, this rank writes all of it.
    pub is_shared: bool,
}

/// The part of one tensor that a replica writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaShare {
    /// The tensor's index.
    pub tensor: usize,
    /// The first row and the number of rows; `None` for the whole tensor.
    pub rows: Option<(u64, u64)>,
}

/// Returns which parts of `tensors` the replica with index `replica` of `replicas` writes, in their order. Rows of
/// large tensors are divided evenly. A smaller tensor goes to the replica that has got the fewest bytes of such
/// tensors so far.
pub fn shares_of_replica(tensors: &[HeldTensor], replica: usize, replicas: usize) -> Vec<ReplicaShare> {
    let count = replicas.max(1) as u64;
    let mut given = vec![0; replicas.max(1)];
    let mut shares = Vec::new();
    for (tensor, held) in tensors.iter().enumerate() {
        let rows = held.rows.filter(|&rows| held.bytes >= MIN_SPLIT_BYTES && rows >= count);
        if !held.is_shared {
            shares.push(ReplicaShare { tensor, rows: None });
        } else if let Some(rows) = rows {
            let begin = |replica: u64| (u128::from(rows) * u128::from(replica) / u128::from(count)) as u64;
            let first = begin(replica as u64);
            shares.push(ReplicaShare { tensor, rows: Some((first, begin(replica as u64 + 1) - first)) });
        } else {
            let least = (0..given.len()).min_by_key(|&at| given[at]).expect("there is a replica");
            // Counts empty tensors as well, so that they are spread over the replicas.
            given[least] += held.bytes + 1;
            if least == replica {
                shares.push(ReplicaShare { tensor, rows: None });
            }
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_writer() {
        let sizes = [(Some(7), 7 << 20), (Some(2), 4 << 20), (None, 8), (Some(3), 12), (Some(1 << 20), 1 << 22)];
        let tensors: Vec<HeldTensor> =
            sizes.into_iter().map(|(rows, bytes)| HeldTensor { rows, bytes, is_shared: true }).collect();
        for replicas in 1..6 {
            let mut written: Vec<Vec<(u64, u64)>> = vec![Vec::new(); tensors.len()];
            for replica in 0..replicas {
                for share in shares_of_replica(&tensors, replica, replicas) {
                    let whole = (0, tensors[share.tensor].rows.unwrap_or(1));
                    written[share.tensor].push(share.rows.unwrap_or(whole));
                }
            }
            for (tensor, ranges) in tensors.iter().zip(&mut written) {
                ranges.sort_unstable();
                let end = ranges.iter().fold(0, |end, &(first, rows)| {
                    assert_eq!(first, end, "{replicas} replicas, {tensor:?}");
                    first + rows
                });
                assert_eq!(end, tensor.rows.unwrap_or(1), "{replicas} replicas, {tensor:?}");
            }
        }
    }

    #[test]
    fn small_tensors_are_spread_and_own_ones_stay() {
        let small = HeldTensor { rows: Some(4), bytes: 16, is_shared: true };
        let own = HeldTensor { is_shared: false, ..small };
        let of = |replica| shares_of_replica(&[small, small, own, small], replica, 2);
        let whole = |tensor| ReplicaShare { tensor, rows: None };
        assert_eq!(of(0), [whole(0), whole(2), whole(3)]);
        assert_eq!(of(1), [whole(1), whole(2)]);
    }
}
