//! Which rank holds which part of sharded parameters, gradients and optimizer states.
//!
//! Two layouts:
//! - optimizer state sharding concatenates all parameters and divides the result evenly ([`Shards`]). A rank's shard
//!   is contiguous; a parameter may be divided among several ranks.
//! - sharded data parallelism divides each parameter separately ([`shard_elems`]), so that the shards of one layer
//!   can be gathered separately.
//!
//! - SHA-1: shards of all ranks have the same size. The last ones are padded.

use crate::error::{Error, Result};

/// A part of a parameter, in elements of the flattened parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardPiece {
    /// Position of the parameter in the list.
    pub parameter: usize,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
    /// Offset of the piece in its shard.
    pub offset: usize,
}

/// Concatenated parameters, divided evenly over ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    elems: usize,
    pieces: Vec<Vec<ShardPiece>>,
}

impl Shards {
    /// Divides parameters of these sizes in elements over `ranks`; the size of a shard is a multiple of `alignment`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are no ranks, or the alignment is 0.
    pub fn new(sizes: &[usize], ranks: usize, alignment: usize) -> Result<Self> {
        if ranks == 0 || alignment == 0 {
            return Err(Error::InvalidArgument(format!(
                "{ranks} ranks and an alignment of {alignment}: expected at least 1"
            )));
        }
        let total: usize = sizes.iter().sum();
        let elems = total.div_ceil(ranks).next_multiple_of(alignment);
        let mut pieces = vec![Vec::new(); ranks];
        let mut place = 0;
        for (parameter, &size) in sizes.iter().enumerate() {
            let mut start = 0;
            while start < size {
                let (rank, offset) = ((place + start) / elems, (place + start) % elems);
                let end = size.min(start + elems - offset);
                pieces[rank].push(ShardPiece { parameter, start, end, offset });
                start = end;
            }
            place += size;
        }
        Ok(Self { elems, pieces })
    }

    /// Elements of each shard, padding included.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// The pieces of each rank's shard.
    pub fn pieces(&self) -> &[Vec<ShardPiece>] {
        &self.pieces
    }
}

/// Number of elements of each rank's shard of a parameter that is divided separately, with padding.
pub fn shard_elems(size: usize, ranks: usize) -> usize {
    size.div_ceil(ranks)
}

/// The groups of sharded data parallelism.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardingGroups {
    /// Ranks that together hold one model. They are adjacent, because they communicate most.
    pub sharding: Vec<Vec<usize>>,
    /// Ranks that hold the same shard.
    pub replication: Vec<Vec<usize>>,
}

impl ShardingGroups {
    /// Divides the ranks of a data-parallel group into sharding groups of `degree`.
    ///
    /// # Errors
    /// [`Error::Config`] with both sizes if the degree does not divide the group.
    pub fn new(members: &[usize], degree: usize) -> Result<Self> {
        if degree == 0 || !members.len().is_multiple_of(degree) {
            return Err(Error::Config(format!(
                "`sharded_data_parallel_degree` {degree} does not divide the data-parallel degree {}",
                members.len()
            )));
        }
        let sharding = members.chunks(degree).map(<[usize]>::to_vec).collect();
        let replication = (0..degree).map(|at| members.iter().skip(at).step_by(degree).copied().collect()).collect();
        Ok(Self { sharding, replication })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_every_element_once() {
        for sizes in [&[7, 1, 0, 12, 5][..], &[1], &[], &[3, 3, 3], &[1000, 1]] {
            for ranks in 1..6 {
                for alignment in [1, 4] {
                    let shards = Shards::new(sizes, ranks, alignment).expect("valid");
                    let mut covered: Vec<_> = sizes.iter().map(|&size| vec![0; size]).collect();
                    assert_eq!(shards.pieces().len(), ranks);
                    for pieces in shards.pieces() {
                        let mut end = 0;
                        for piece in pieces {
                            assert_eq!(piece.offset, end, "pieces of a shard are contiguous");
                            end += piece.end - piece.start;
                            covered[piece.parameter][piece.start..piece.end].iter_mut().for_each(|count| *count += 1);
                        }
                        assert!(end <= shards.elems());
                    }
                    assert!(covered.iter().flatten().all(|&count| count == 1));
                    assert!(shards.elems() * ranks < sizes.iter().sum::<usize>() + ranks * (alignment + 1));
                }
            }
        }
    }

    #[test]
    fn a_large_parameter_lies_on_several_ranks() {
        let shards = Shards::new(&[10, 2], 3, 1).expect("valid");
        assert_eq!(shards.elems(), 4);
        assert_eq!(
            shards.pieces(),
            [
                vec![ShardPiece { parameter: 0, start: 0, end: 4, offset: 0 }],
                vec![ShardPiece { parameter: 0, start: 4, end: 8, offset: 0 }],
                vec![
                    ShardPiece { parameter: 0, start: 8, end: 10, offset: 0 },
                    ShardPiece { parameter: 1, start: 0, end: 2, offset: 2 }
                ],
            ]
        );
    }

    #[test]
    fn groups_are_neighbours_and_replicas_hold_the_same_shard() {
        let groups = ShardingGroups::new(&[0, 2, 4, 6], 2).expect("valid");
        assert_eq!(groups.sharding, [[0, 2], [4, 6]]);
        assert_eq!(groups.replication, [[0, 4], [2, 6]]);
        let error = ShardingGroups::new(&[0, 1, 2, 3], 3).expect_err("3 does not divide 4").to_string();
        assert!(
            error.contains("`sharded_data_parallel_degree` 3 does not divide the data-parallel degree 4"),
            "{error}"
        );
        assert!(ShardingGroups::new(&[0], 0).is_err());
    }

    #[test]
    fn a_parameter_is_padded_to_equal_shards() {
        assert_eq!([shard_elems(10, 4), shard_elems(8, 4), shard_elems(1, 4), shard_elems(0, 4)], [3, 2, 1, 0]);
    }
}
