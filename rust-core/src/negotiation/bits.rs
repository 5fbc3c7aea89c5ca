//! Sets of small numbers (cache positions) and of ranks.

use std::ops::Range;

/// A set of positions. Trailing empty words are removed, so that equal sets compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(from = "Vec<u8>", into = "Vec<u8>")]
pub(super) struct BitSet(Vec<u64>);

impl BitSet {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Words from position `64 * index` on, up to the end.
    pub(super) fn word(&self, index: usize) -> u64 {
        self.0.get(index).copied().unwrap_or(0)
    }

    pub(super) fn num_words(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, position: usize) -> bool {
        self.word(position / 64) >> (position % 64) & 1 == 1
    }

    pub(super) fn set(&mut self, position: usize) {
        self.set_word(position / 64, 1 << (position % 64));
    }

    /// Adds the positions of `word`, whose first position is `64 * index`.
    pub(super) fn set_word(&mut self, index: usize, word: u64) {
        if word == 0 {
            return;
        }
        if self.0.len() <= index {
            self.0.resize(index + 1, 0);
        }
        self.0[index] |= word;
    }

    /// Removes a position; returns whether it was in the set.
    pub(super) fn take(&mut self, position: usize) -> bool {
        let was = self.get(position);
        if was {
            self.0[position / 64] &= !(1 << (position % 64));
            self.trim();
        }
        was
    }

    pub(super) fn add(&mut self, other: &Self) {
        other.0.iter().enumerate().for_each(|(index, word)| self.set_word(index, *word));
    }

    pub(super) fn remove(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(word, other)| *word &= !other);
        self.trim();
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The positions, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(index, word)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
                rest &= rest - 1;
                Some(64 * index + bit)
            })
        })
    }

    fn trim(&mut self) {
        while self.0.last() == Some(&0) {
            self.0.pop();
        }
    }
}

impl From<Vec<u8>> for BitSet {
    fn from(bytes: Vec<u8>) -> Self {
        let word = |chunk: &[u8]| chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let mut bits = Self(bytes.chunks(8).map(word).collect());
        bits.trim();
        bits
    }
}

impl From<BitSet> for Vec<u8> {
    fn from(bits: BitSet) -> Self {
        let mut bytes: Vec<u8> = bits.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        bytes
    }
}

/// A set of ranks of the group, as ranges. A set of too many ranges is enlarged to the ranges around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct RankSet(Vec<(u32, u32)>);

/// Largest number of ranges, so that a message about a set is small for any number of ranks.
const MAX_ROWS: usize = 64;

impl RankSet {
    pub(super) fn of(range: Range<usize>) -> Self {
        let mut set = Self::default();
        set.add(range);
        set
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it is one rank.
    pub(super) fn is_one(&self) -> bool {
        matches!(self.0[..], [(start, end)] if start + 1 == end)
    }

    pub(super) fn first(&self) -> Option<u32> {
        self.0.first().map(|row| row.0)
    }

    pub(super) fn add(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.start as u32, range.end as u32);
        let first = self.0.partition_point(|row| row.1 < start);
        let last = first + self.0[first..].partition_point(|row| row.0 <= end);
        if first < last {
            (start, end) = (start.min(self.0[first].0), end.max(self.0[last - 1].1));
        }
        self.0.splice(first..last, [(start, end)]);
        if self.0.len() > MAX_ROWS {
            // Merges the two ranges with the smallest gap.
            let gap = |at: &usize| self.0[at + 1].0 - self.0[*at].1;
            let at = (0..self.0.len() - 1).min_by_key(gap).expect("there are several rows");
            self.0[at].1 = self.0[at + 1].1;
            self.0.remove(at + 1);
        }
    }

    pub(super) fn merge(&mut self, other: &Self) {
        other.0.iter().for_each(|row| self.add(row.0 as usize..row.1 as usize));
    }

    /// The ranks of `0..size` that are not in the set.
    pub(super) fn missing(&self, size: usize) -> Vec<usize> {
        let mut next = 0;
        let mut missing = Vec::new();
        for row in &self.0 {
            missing.extend(next..size.min(row.0 as usize));
            next = next.max(row.1 as usize);
        }
        missing.extend(next..size);
        missing
    }

    /// `rank 3` or `ranks 0-2, 7`, as global ranks.
    pub(super) fn text(&self, ranks: &[usize]) -> String {
        let rows = self.0.iter().map(|row| row.0 as usize..ranks.len().min(row.1 as usize));
        text(&rows.flat_map(|row| ranks.get(row).unwrap_or_default()).copied().collect::<Vec<_>>())
    }
}

/// `rank 3` or `ranks 0-2, 7`; the first few of many.
pub(super) fn text(ranks: &[usize]) -> String {
    let mut rows: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match rows.last_mut() {
            Some(row) if row.1 + 1 == rank => row.1 = rank,
            _ => rows.push((rank, rank)),
        }
    }
    let row = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let shown = rows.iter().take(8).map(row).collect::<Vec<_>>().join(", ");
    let more = if rows.len() > 8 { ", .." } else { "" };
    format!("{} {shown}{more}", if ranks.len() == 1 { "rank" } else { "ranks" })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bits_are_a_set(members in prop::collection::btree_set(0..500usize, 0..40), out in 0..500usize) {
            let mut bits = BitSet::default();
            members.iter().for_each(|position| bits.set(*position));
            prop_assert_eq!(bits.iter().collect::<BTreeSet<_>>(), members.clone());
            prop_assert_eq!(BitSet::from(Vec::from(bits.clone())), bits.clone());
            prop_assert_eq!(bits.take(out), members.contains(&out));
            prop_assert!(!bits.get(out));
            bits.remove(&bits.clone());
            prop_assert!(bits.is_empty());
        }

        #[test]
        fn ranks_are_a_set(rows in prop::collection::vec((0..100usize, 0..6usize), 0..30)) {
            let (mut set, mut ranks) = (RankSet::default(), BTreeSet::new());
            for (start, length) in rows {
                set.add(start..start + length);
                ranks.extend(start..start + length);
            }
            let missing: Vec<usize> = (0..120).filter(|rank| !ranks.contains(rank)).collect();
            prop_assert_eq!(set.missing(120), missing);
        }
    }

    #[test]
    fn ranks_read_well() {
        let mut set = RankSet::of(0..3);
        assert_eq!(set.text(&[4, 5, 6, 7]), "ranks 4-6");
        set.add(5..6);
        assert_eq!(set.text(&[0, 1, 2, 3, 4, 5]), "ranks 0-2, 5");
        assert_eq!(RankSet::of(1..2).text(&[0, 1]), "rank 1");
        let mut many = RankSet::default();
        (0..200).for_each(|rank| many.add(2 * rank..2 * rank + 1));
        assert!(many.0.len() <= MAX_ROWS);
    }
}
