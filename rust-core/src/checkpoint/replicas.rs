//! Which replica writes what of the tensors that all replicas have.
//!
//! - REPL-1: each row of a shared tensor is written by exactly one replica, and what a replica writes follows from the tensors' sizes
//!   and the number of replicas alone, so that all replicas agree without a message.

/// Tensors of fewer bytes are written whole, by one replica: pieces of them would be many small reads.
const MIN_SPLIT_BYTES: u64 = 1 << 20;

/// The size of a tensor that a rank holds.
#[derive(Clone, Copy, Debug)]
pub struct HeldTensor {
    /// Its length along the first axis; `None` for a scalar.
    pub rows: Option<u64>,
    /// Of all of it.
    pub bytes: u64,
    /// Whether all replicas hold it. Otherwise this rank writes it.
    pub is_shared: bool,
}

/// What a replica writes of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaShare {
    /// The tensor's index.
    pub tensor: usize,
    /// The first row and their number; `None` is the whole tensor.
    pub rows: Option<(u64, u64)>,
}

/// What replica `replica` of `replicas` writes of `tensors`, in their order. Rows of large tensors are divided evenly. Smaller ones go to
/// the replica that has the fewest bytes of them so far.
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
            // Empty tensors are spread as well.
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
