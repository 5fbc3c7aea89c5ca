//! Compares which gradients a step has on each rank. A rank that lacks a gradient would leave the others waiting for
//! its name, and a rank without any gradient would be a step ahead of them.
//!
//! A rank submits its list under a name like a collective ([`Kind::Presence`]), but no operation runs. The error for
//! ranks whose lists differ is made here. If all gradients of the step have been submitted, those that still wait
//! would never be matched; they end with the same error
//! ([`NegotiationFailure::GradientsDiffer`](super::message::NegotiationFailure)).

use std::collections::BTreeMap;

use super::bits::RankSet;
use super::description::Description;
use super::message::Variant;
use crate::collectives::Kind;

/// Number of gradients that an error lists.
const MAX_LISTED: usize = 4;

/// The gradients of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gradients<'a> {
    /// Their names for errors, one in each line.
    pub names: &'a str,
    /// Numbers that identify them on all ranks; if empty, the names do.
    pub numbers: &'a [u64],
    /// Whether all of them have been submitted.
    pub is_last: bool,
}

impl Description {
    pub(super) fn presence(gradients: &Gradients<'_>) -> Self {
        let Gradients { names, numbers, is_last } = *gradients;
        let number = |(at, name): (usize, &str)| numbers.get(at).copied().unwrap_or_else(|| hash(name));
        let mut gradients: Vec<(u64, &str)> = names.lines().enumerate().map(|each| (number(each), each.1)).collect();
        // Sorted, because ranks may list them in different orders.
        gradients.sort_unstable();
        let (blocks, names): (_, Vec<&str>) = gradients.into_iter().unzip();
        Self { kind: Kind::Presence, blocks, is_last, ..Self::poison(names.join("\n")) }
    }
}

/// FNV-1a: the same on all ranks.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Describes in which gradients the ranks' steps differ, if these are lists of gradients.
pub(super) fn difference(variants: &[Variant], ranks: &[usize]) -> Option<String> {
    let is_step = |variant: &Variant| variant.description.kind == Kind::Presence;
    if variants.len() < 2 || !variants.iter().all(is_step) {
        return None;
    }
    // For each number: a name, and the descriptions that contain it.
    let mut all: BTreeMap<u64, (&str, Vec<usize>)> = BTreeMap::new();
    for (at, Variant { description, .. }) in variants.iter().enumerate() {
        for (number, name) in description.blocks.iter().zip(description.message.lines()) {
            all.entry(*number).or_insert((name, Vec::new())).1.push(at);
        }
    }
    let merged = |wanted: &dyn Fn(usize) -> bool| {
        let wanted = variants.iter().enumerate().filter(|(at, _)| wanted(*at));
        wanted.fold(RankSet::default(), |mut all, (_, variant)| {
            all.merge(&variant.ranks);
            all
        })
    };
    let mut differing: Vec<(&str, RankSet, RankSet)> = (all.into_values())
        .map(|(name, have)| (name, merged(&|at| have.contains(&at)), merged(&|at| !have.contains(&at))))
        .filter(|(_, _, without)| !without.is_empty())
        .collect();
    // For gradients that are identified by numbers, equal names do not help.
    differing.sort_by_key(|(name, ..)| *name);
    let have = |ranks: &RankSet| if ranks.is_one() { "has" } else { "have" };
    let tell = |(name, with, without): &(&str, RankSet, RankSet)| {
        let (lacks, has) = (without.text(ranks), with.text(ranks));
        format!("{lacks} {} no gradient of `{name}`, {has} {} one", have(without), have(with))
    };
    let mut text = differing.iter().take(MAX_LISTED).map(tell).collect::<Vec<_>>().join("; ");
    if differing.len() > MAX_LISTED {
        text += &format!("; and {} more", differing.len() - MAX_LISTED);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variant(numbers: &[u64], names: &str, ranks: std::ops::Range<usize>) -> Variant {
        let gradients = Gradients { names, numbers, is_last: false };
        Variant { description: Description::presence(&gradients), ranks: RankSet::of(ranks) }
    }

    #[test]
    fn ranks_and_parameters_are_named() {
        let global: Vec<usize> = (0..4).map(|rank| 10 + rank).collect();
        let text = |variants: &[Variant]| difference(variants, &global).expect("they differ");
        let expected = "rank 13 has no gradient of `b`, ranks 10-12 have one";
        assert_eq!(text(&[variant(&[0, 1], "a\nb", 0..3), variant(&[0], "a", 3..4)]), expected);
        assert_eq!(text(&[variant(&[], "b\na", 0..3), variant(&[], "a", 3..4)]), expected);
        assert_eq!(
            text(&[variant(&[0], "a", 0..1), variant(&[1], "b", 1..2), variant(&[], "", 2..4)]),
            "ranks 11-13 have no gradient of `a`, rank 10 has one; ranks 10, 12, 13 have no gradient of `b`, rank 11 \
             has one"
        );
        let many = text(&[variant(&[0, 1, 2, 3, 4, 5], "a\nb\nc\nd\ne\nf", 0..1), variant(&[], "", 1..4)]);
        assert!(many.ends_with("of `d`, rank 10 has one; and 2 more"), "{many}");
    }

    #[test]
    fn names_of_numbered_parameters_are_not_compared() {
        let of = |numbers: &[u64], names: &str| variant(numbers, names, 0..1).description;
        assert_eq!(of(&[0, 1], "a\nb"), of(&[0, 1], "c\nd"));
        assert_ne!(of(&[0, 1], "a\nb"), of(&[0, 2], "a\nb"));
        assert_ne!(of(&[], "a\nb"), of(&[], "a\nc"));
        assert_eq!(of(&[], "a\nb"), of(&[], "b\na"));
        assert_ne!(Description::poison("a".into()), Description::poison("b".into()));
    }
}
