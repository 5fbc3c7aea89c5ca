//! Boxes in a tensor's index space, and how the bytes of one lie in another.

/// A box: where it starts in the whole tensor, and its lengths.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Slice {
    /// First index in each dimension.
    pub start: Vec<u64>,
    /// Length in each dimension.
    pub shape: Vec<u64>,
}

/// Bytes that lie in a row in both boxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContiguousBytes {
    /// Offset in the first box.
    pub(super) from: u64,
    /// Offset in the second.
    pub(super) to: u64,
    /// Length.
    pub(super) bytes: u64,
}

impl Slice {
    /// All of a tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Elements, or `None` if there are more than fit a number.
    pub fn elems(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |product, &length| product.checked_mul(length))
    }

    /// Whether it lies inside a tensor of this shape.
    pub fn lies_in(&self, shape: &[u64]) -> bool {
        self.start.len() == shape.len()
            && self.shape.len() == shape.len()
            && (0..shape.len()).all(|at| self.start[at].checked_add(self.shape[at]).is_some_and(|end| end <= shape[at]))
    }

    /// What both have in common.
    pub(super) fn intersection(&self, other: &Self) -> Option<Self> {
        let (mut start, mut shape) = (Vec::new(), Vec::new());
        for at in 0..self.shape.len() {
            let from = self.start[at].max(other.start[at]);
            let to = (self.start[at] + self.shape[at]).min(other.start[at] + other.shape[at]);
            if from >= to {
                return None;
            }
            start.push(from);
            shape.push(to - from);
        }
        Some(Self { start, shape })
    }

    /// The bytes that `self` and `other` have in common, each box stored by itself, last index fastest; in the order in
    /// which they lie in `self`.
    pub(super) fn runs(&self, other: &Self, element: u64) -> Vec<ContiguousBytes> {
        let Some(common) = self.intersection(other) else { return Vec::new() };
        let rank = common.shape.len();
        // Trailing dimensions that are whole in both boxes run on into the dimension before them.
        let mut row = rank;
        let mut length = element;
        while row > 0 {
            row -= 1;
            length *= common.shape[row];
            if common.shape[row] != self.shape[row] || common.shape[row] != other.shape[row] {
                break;
            }
        }
        let offset = |slice: &Self, index: &[u64]| {
            (0..rank).fold(0, |sum, at| sum * slice.shape[at] + (common.start[at] - slice.start[at] + index[at]))
                * element
        };
        let mut index = vec![0; rank];
        let mut runs = Vec::new();
        loop {
            runs.push(ContiguousBytes { from: offset(self, &index), to: offset(other, &index), bytes: length });
            // The next row, as an odometer counts.
            let Some(at) = (0..row).rev().find(|&at| index[at] + 1 < common.shape[at]) else { return runs };
            index[at] += 1;
            index[at + 1..].fill(0);
        }
    }
}
