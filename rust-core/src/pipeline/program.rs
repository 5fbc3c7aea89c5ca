//! One list of actions for each rank.

use std::fmt;
use std::str::FromStr;

use super::Action;
use crate::error::{Error, Result};

/// The actions of each rank, in order. The text form has a line for each rank, `rank: actions`, and can be parsed
/// back.
///
/// A receive marks where a message is needed. Messages between two ranks arrive in the order of their receives
/// (PIPE-2), so an executor may post receives earlier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    ranks: Vec<Vec<Action>>,
}

impl Program {
    /// A program with these lists.
    pub fn new(ranks: Vec<Vec<Action>>) -> Self {
        Self { ranks }
    }

    /// The lists of all ranks.
    pub fn ranks(&self) -> &[Vec<Action>] {
        &self.ranks
    }

    /// The list of one rank.
    pub fn rank(&self, rank: usize) -> &[Action] {
        &self.ranks[rank]
    }

    /// Removes the transfers, which follow from the computations.
    pub fn computations(&self) -> Self {
        let keep = |actions: &Vec<Action>| actions.iter().filter(|action| action.kind.computes()).copied().collect();
        Self { ranks: self.ranks.iter().map(keep).collect() }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (rank, actions) in self.ranks.iter().enumerate() {
            write!(f, "{rank}:")?;
            for action in actions {
                write!(f, " {action}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl FromStr for Program {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut ranks = Vec::new();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let Some((_, actions)) = line.split_once(':').filter(|(rank, _)| rank.trim().parse() == Ok(ranks.len()))
            else {
                return Err(Error::InvalidArgument(format!(
                    "expected a line that begins with `{}:`, not `{line}`",
                    ranks.len()
                )));
            };
            ranks.push(actions.split_whitespace().map(str::parse).collect::<Result<_>>()?);
        }
        Ok(Self { ranks })
    }
}
