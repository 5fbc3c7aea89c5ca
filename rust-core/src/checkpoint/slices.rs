//! Slices of a tensor's index space, and how the bytes of one slice map to those of another.

/// A slice: its start in the whole tensor, and its lengths.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Slice {
    /// First index in each dimension.
    pub start: Vec<u64>,
    /// Length in each dimension.
    pub shape: Vec<u64>,
}

/// Bytes that are contiguous in both slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContiguousBytes {
    /// Offset in the first slice.
    pub(super) from: u64,
    /// Offset in the second slice.
    pub(super) to: u64,
    /// Length in bytes.
    pub(super) bytes: u64,
}

impl Slice {
    /// The slice that covers a whole tensor.
    pub fn whole(shape: &[u64]) -> Self {
        Self { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Number of elements; `None` on overflow.
    pub fn elems(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |product, &length| product.checked_mul(length))
    }

    /// Whether the slice lies inside a tensor of this shape.
    pub fn lies_in(&self, shape: &[u64]) -> bool {
        self.start.len() == shape.len()
            && self.shape.len() == shape.len()
            && (0..shape.len()).all(|at| self.start[at].checked_add(self.shape[at]).is_some_and(|end| end <= shape[at]))
    }

    /// The intersection of two slices.
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

    /// The contiguous byte ranges that `self` and `other` have in common, if each is stored densely in row-major
    /// order; sorted by their offset in `self`.
    pub(super) fn runs(&self, other: &Self, element: u64) -> Vec<ContiguousBytes> {
        let Some(common) = self.intersection(other) else { return Vec::new() };
        let rank = common.shape.len();
        // Trailing dimensions that are whole in both slices are contiguous with the dimension before them.
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
            // Advances to the next row: increments the last index and carries.
            let Some(at) = (0..row).rev().find(|&at| index[at] + 1 < common.shape[at]) else { return runs };
            index[at] += 1;
            index[at + 1..].fill(0);
        }
    }
}
