//! What members tell each other: news go up the tree, answers come down.

use super::bits::{BitSet, RankSet};
use super::description::Description;

/// Descriptions of one name that a message tells apart; ranks with further ones are not listed.
pub(super) const MAX_VARIANTS: usize = 4;
/// Names that a message about waiting tells.
pub(super) const MAX_WAITING: usize = 32;

/// From a member to its parent, for all ranks behind it. Everything but `report` is told once.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Up {
    /// Answers that the sender has seen.
    pub(super) heard: u64,
    /// Cache positions for which all ranks behind the sender are ready.
    pub(super) ready: BitSet,
    /// Those of `ready` which some rank need not be ready for, since it has joined.
    pub(super) with_neutral: BitSet,
    /// The same for names that are not in the cache, or there with another description.
    pub(super) named: Vec<Announcement>,
    /// All ranks behind the sender have joined, this one last.
    pub(super) joined: Option<u32>,
    /// A rank behind the sender that has joined and has no device to take part with.
    pub(super) unable: Option<u32>,
    /// Replaces the sender's last one.
    pub(super) report: Option<Report>,
}

/// All ranks behind a member are ready for `name`.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Announcement {
    pub(super) name: String,
    /// What they ask for; more than one if they disagree.
    pub(super) variants: Vec<Variant>,
    pub(super) with_neutral: bool,
}

/// What some ranks ask for.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Variant {
    pub(super) description: Description,
    pub(super) ranks: RankSet,
}

/// Which names have been waited for for a while, behind a member.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Report {
    /// No rank behind the sender can do anything else.
    pub(super) stuck: bool,
    /// The same, if what `steps` says never comes.
    pub(super) held: bool,
    /// The longest waits first.
    pub(super) waiting: Vec<Waiting>,
    /// Ranks that have joined, and so miss nothing.
    pub(super) joined: RankSet,
    /// Ranks that wait in a collective without a name.
    pub(super) elsewhere: RankSet,
    /// What they wait for that is no name ([`super::OtherWaits`]).
    pub(super) steps: Vec<Waiting>,
}

impl Report {
    /// Somebody behind the sender can go on.
    pub(super) fn loosen(&mut self) {
        (self.stuck, self.held) = (false, false);
    }
}

/// Ranks that wait for a name.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Waiting {
    pub(super) name: String,
    pub(super) ranks: RankSet,
    /// Of the rank that has waited longest, when the message was sent.
    pub(super) age_ms: u64,
}

/// From a member to its children: the same on all ranks, made by the root.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Down {
    /// Answers before this one.
    pub(super) number: u64,
    /// In the first answer: what members must do alike.
    pub(super) limits: Option<NegotiationLimits>,
    /// Cache positions that all ranks are ready for.
    pub(super) ready: BitSet,
    /// Those of `ready` in which ranks that have joined take part with neutral elements.
    pub(super) with_neutral: BitSet,
    pub(super) named: Vec<Response>,
    /// All ranks have joined, this one last.
    pub(super) joined: Option<u32>,
    /// Ends everything that waits.
    pub(super) failure: Option<NegotiationFailure>,
}

/// See [`Down::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct NegotiationLimits {
    /// Names in the cache.
    pub(super) cache: u32,
    /// Tensors that are ready together run as one operation up to this.
    pub(super) fusion_bytes: u64,
}

/// What becomes of a name.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) struct Response {
    pub(super) name: String,
    pub(super) outcome: ResponseOutcome,
}

/// See [`Response`].
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum ResponseOutcome {
    /// It runs.
    Agreed {
        /// As what.
        description: Description,
        /// Ranks that have joined take part in it.
        with_neutral: bool,
    },
    /// It fails, for this reason.
    Refused(String),
}

/// Why everything that waits fails.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum NegotiationFailure {
    /// Every rank waits, and nothing can become ready.
    Stuck {
        /// Who waits for what.
        detail: String,
        /// Global ranks that wait for what is no name, one for each such thing; that ends as well.
        steps: Vec<usize>,
    },
    /// A step of the ranks has different gradients.
    Apart {
        /// Who lacks which.
        detail: String,
    },
    /// Ranks were waited for for too long.
    Stalled {
        /// How long.
        waited_ms: u64,
        /// Names, the longest wait first, and the global ranks that are missing.
        tensors: Vec<(String, Vec<usize>)>,
    },
}

/// What goes over the transport.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(super) enum NegotiationMessage {
    /// To the parent.
    Up(Up),
    /// To a child.
    Down(Down),
}
