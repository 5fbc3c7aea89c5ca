//! The tree over the ranks of a group in which members communicate. Each member covers a contiguous range of ranks.
//!
//! ```text
//! 0..13, 3 children each:   0 -+- 1..5  -> 1 -+- 2, 3, 4
//!                              +- 5..9  -> 5 -+- 6, 7, 8
//!                              +- 9..13 -> 9 -+- 10, 11, 12
//! ```

use std::ops::Range;

/// Largest number of children. With more, the tree is flatter, and each member has more messages; up to nine ranks
/// need one level.
pub(super) const FAN_IN: usize = 8;

/// One member's place in the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) me: usize,
    pub(super) size: usize,
    /// The parent, to which this member announces what its ranks are ready for; none for the root.
    pub(super) parent: Option<usize>,
    /// The range of ranks of each child's subtree; the child is the first rank of it.
    pub(super) children: Vec<Range<usize>>,
}

impl Tree {
    /// The place of rank `me` of `size`.
    pub(super) fn new(me: usize, size: usize) -> Self {
        let (mut parent, mut range) = (None, 0..size);
        loop {
            let children = split(range.start + 1..range.end);
            if range.start == me {
                return Self { me, size, parent, children };
            }
            parent = Some(range.start);
            range = children.into_iter().find(|child| child.contains(&me)).expect("a rank is in one of the rows");
        }
    }

    /// This member's subtree.
    #[cfg(test)]
    pub(super) fn range(&self) -> Range<usize> {
        self.me..self.children.last().map_or(self.me + 1, |last| last.end)
    }
}

/// Divides the range into parts of nearly equal length, one for each child.
fn split(row: Range<usize>) -> Vec<Range<usize>> {
    let parts = row.len().min(FAN_IN);
    let edge = |part: usize| row.start + row.len() * part / parts;
    (0..parts).map(|part| edge(part)..edge(part + 1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_one_place() {
        for size in [1, 2, 3, 9, 10, 11, 64, 100, 4096] {
            let trees: Vec<Tree> = (0..size).map(|me| Tree::new(me, size)).collect();
            for tree in &trees {
                assert!(tree.children.len() <= FAN_IN);
                assert_eq!(tree.parent.is_none(), tree.me == 0);
                let mut next = tree.me + 1;
                for child in &tree.children {
                    assert_eq!(child.start, next);
                    assert_eq!(trees[child.start].parent, Some(tree.me));
                    assert_eq!(trees[child.start].range(), *child);
                    next = child.end;
                }
                assert_eq!(tree.range(), tree.me..next);
            }
            assert_eq!(trees[0].range(), 0..size);
        }
        let depth = |mut rank: usize| {
            let parent = |rank| Tree::new(rank, 4096).parent;
            std::iter::from_fn(|| parent(rank).inspect(|up| rank = *up)).count()
        };
        assert!((0..4096).map(depth).max() <= Some(5));
    }
}
