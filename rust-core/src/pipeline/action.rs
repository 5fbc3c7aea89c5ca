//! Actions, of which the programs of ranks consist.
//!
//! | text | means |
//! | --- | --- |
//! | `2F0` | stage 2, forward of microbatch 0 |
//! | `2B0` | its backward; `2I0`, `2W0`: its two parts, gradients of inputs and of weights |
//! | `2SF0>3`, `3RF0<2` | stage 2's value for stage 3 is sent, is received |
//! | `3SB0>2`, `2RB0<3` | the same of its gradient, back from stage 3 |

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The kind of an action for one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ActionKind {
    /// The forward.
    Forward,
    /// The whole backward.
    Backward,
    /// The gradients of the stage's inputs.
    Input,
    /// The gradients of its parameters.
    Weight,
    /// Sends a value to a later stage.
    SendForward,
    /// Receives a value from an earlier stage.
    RecvForward,
    /// Sends a value's gradient to the stage that computed the value.
    SendBackward,
    /// Receives a gradient from a stage that used the value.
    RecvBackward,
}

impl ActionKind {
    const ALL: [(ActionKind, &str); 8] = [
        (ActionKind::SendForward, "SF"),
        (ActionKind::RecvForward, "RF"),
        (ActionKind::SendBackward, "SB"),
        (ActionKind::RecvBackward, "RB"),
        (ActionKind::Forward, "F"),
        (ActionKind::Backward, "B"),
        (ActionKind::Input, "I"),
        (ActionKind::Weight, "W"),
    ];

    /// Whether it is a computation.
    pub fn computes(self) -> bool {
        matches!(self, ActionKind::Forward | ActionKind::Backward | ActionKind::Input | ActionKind::Weight)
    }

    /// Whether it is a send.
    pub fn sends(self) -> bool {
        matches!(self, ActionKind::SendForward | ActionKind::SendBackward)
    }

    fn text(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).expect("the table has all kinds").1
    }
}

/// One action of a rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    /// The kind.
    pub kind: ActionKind,
    /// The stage, which is on the rank of the program.
    pub stage: u32,
    /// The microbatch.
    pub microbatch: u32,
    /// The other stage of a transfer.
    pub peer: Option<u32>,
}

impl Action {
    /// A computation.
    pub fn compute(kind: ActionKind, stage: usize, microbatch: usize) -> Self {
        debug_assert!(kind.computes());
        Self { kind, stage: stage as u32, microbatch: microbatch as u32, peer: None }
    }

    /// A transfer.
    pub fn transfer(kind: ActionKind, stage: usize, microbatch: usize, peer: usize) -> Self {
        debug_assert!(!kind.computes());
        Self { kind, stage: stage as u32, microbatch: microbatch as u32, peer: Some(peer as u32) }
    }

    /// Returns the receive that belongs to a send, or the send that belongs to a receive.
    pub fn counterpart(self) -> Option<Self> {
        let kind = match self.kind {
            ActionKind::SendForward => ActionKind::RecvForward,
            ActionKind::RecvForward => ActionKind::SendForward,
            ActionKind::SendBackward => ActionKind::RecvBackward,
            ActionKind::RecvBackward => ActionKind::SendBackward,
            _ => return None,
        };
        Some(Self { kind, stage: self.peer?, microbatch: self.microbatch, peer: Some(self.stage) })
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind, self.microbatch)?;
        match self.peer {
            Some(peer) if self.kind.sends() => write!(f, ">{peer}"),
            Some(peer) => write!(f, "<{peer}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Action {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad =
            || Error::InvalidArgument(format!("`{text}` is not an action of a pipeline, such as `2F0` or `2SF0>3`"));
        let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let (stage, rest) = text.split_at(digits);
        let &(kind, name) = ActionKind::ALL.iter().find(|(_, name)| rest.starts_with(name)).ok_or_else(bad)?;
        let rest = &rest[name.len()..];
        let (microbatch, peer) = if kind.computes() {
            (rest, None)
        } else {
            let (microbatch, peer) = rest.split_once(if kind.sends() { '>' } else { '<' }).ok_or_else(bad)?;
            (microbatch, Some(number(peer).ok_or_else(bad)?))
        };
        let (Some(stage), Some(microbatch)) = (number(stage), number(microbatch)) else { return Err(bad()) };
        Ok(Self { kind, stage, microbatch, peer })
    }
}

/// Checks for digits, because `parse` would accept a sign.
fn number(text: &str) -> Option<u32> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}
