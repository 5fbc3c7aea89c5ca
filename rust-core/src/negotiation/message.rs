//! Messages between members: announcements and reports go up the tree, answers go down.

use super::bits::{BitSet, RankSet};
use super::description::Description;

/// Number of different descriptions of one name that a message lists; ranks with further ones are omitted.
pub(super) const MAX_VARIANTS: usize = 4;
/// Number of names that a report about waits lists.
pub(super) const MAX_WAITING: usize = 32;

/// From a member to its parent, about all ranks of its subtree. Every field except `report` is sent once.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Up {
    /// Number of answers that the sender has received.
    pub(super) num_received: u64,
    /// Cache positions for which all ranks of the subtree are ready.
    pub(super) ready: BitSet,
    /// The positions of `ready` for which a rank of the subtree was not needed, because it has joined.
    pub(super) with_neutral: BitSet,
    /// The same for names that are not in the cache, or have another description there.
    pub(super) named: Vec<Announcement>,
    /// All ranks of the subtree have joined, this one last.
    pub(super) joined: Option<u32>,
    /// A rank of the subtree that has joined and cannot take part on a device.
    pub(super) unable: Option<u32>,
    /// Replaces the sender's last report.
    pub(super) report: Option<Report>,
}

/// All ranks of a subtree are ready for `name`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Announcement {
    pub(super) name: String,
    /// Their descriptions; more than one if they disagree.
    pub(super) variants: Vec<Variant>,
    pub(super) with_neutral: bool,
}

/// A description, and the ranks that have it.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Variant {
    pub(super) description: Description,
    pub(super) ranks: RankSet,
}

/// The names for which a subtree has waited for some time.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Report {
    /// No rank of the subtree can do anything else.
    pub(super) stuck: bool,
    /// The same, on the condition that the waits in `steps` never end.
    pub(super) held: bool,
    /// Waits for names, the longest first.
    pub(super) waiting: Vec<Waiting>,
    /// Ranks that have joined, so no name waits for them.
    pub(super) joined: RankSet,
    /// Ranks that wait in a collective without a name.
    pub(super) elsewhere: RankSet,
    /// Their waits that are not for a name ([`super::OtherWaits`]).
    pub(super) steps: Vec<Waiting>,
}

impl Report {
    /// A rank of the subtree can continue.
    pub(super) fn clear_stuck(&mut self) {
        (self.stuck, self.held) = (false, false);
    }
}

/// Ranks that wait for a name.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Waiting {
    pub(super) name: String,
    pub(super) ranks: RankSet,
    /// Longest wait of these ranks when the message was sent.
    pub(super) age_ms: u64,
}

/// From a member to its children: the root's answer, equal on all ranks.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Down {
    /// Number of answers before this one.
    pub(super) number: u64,
    /// In the first answer: settings that must be equal on all members.
    pub(super) limits: Option<NegotiationLimits>,
    /// Cache positions that all ranks are ready for.
    pub(super) ready: BitSet,
    /// The positions of `ready` to which joined ranks contribute neutral elements.
    pub(super) with_neutral: BitSet,
    pub(super) named: Vec<Response>,
    /// All ranks have joined, this one last.
    pub(super) joined: Option<u32>,
    /// Fails everything that waits.
    pub(super) failure: Option<NegotiationFailure>,
}

/// See [`Down::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct NegotiationLimits {
    /// Capacity of the cache, in names.
    pub(super) cache: u32,
    /// Fusion size: tensors that are ready together run as one operation up to this many bytes.
    pub(super) fusion_bytes: u64,
}

/// The decision about a name.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Response {
    pub(super) name: String,
    pub(super) outcome: ResponseOutcome,
}

/// See [`Response`].
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ResponseOutcome {
    /// The operation runs.
    Agreed {
        /// The common description.
        description: Description,
        /// Whether joined ranks take part in it.
        with_neutral: bool,
    },
    /// The operation fails, for this reason.
    Refused(String),
}

/// Why everything that waits fails.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum NegotiationFailure {
    /// Every rank waits, and no name can become ready.
    Stuck {
        /// Which rank waits for what.
        detail: String,
        /// Global ranks whose waits are not for a name, one for each such wait; these end as well.
        steps: Vec<usize>,
    },
    /// The ranks have different gradients in a step.
    GradientsDiffer {
        /// Which rank lacks which gradients.
        detail: String,
    },
    /// Some ranks have not submitted a name within the time limit.
    Stalled {
        /// The time limit.
        waited_ms: u64,
        /// Names, the longest wait first, and the global ranks that are missing.
        tensors: Vec<(String, Vec<usize>)>,
    },
}

/// A message on the transport.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum NegotiationMessage {
    /// To the parent.
    Up(Up),
    /// To a child.
    Down(Down),
}
