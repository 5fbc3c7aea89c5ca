//! The frames that mailboxes exchange.

/// The kind of a frame; the `#[repr]` values are sent on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum FrameKind {
    Eager = 1,
    Rts = 2,
    Cts = 3,
    Nack = 4,
    Data = 5,
    Withdraw = 6,
    Credit = 7,
}

impl FrameKind {
    pub(super) fn decode(value: u64) -> Option<Self> {
        let all = [Self::Eager, Self::Rts, Self::Cts, Self::Nack, Self::Data, Self::Withdraw, Self::Credit];
        all.into_iter().find(|kind| *kind as u64 == value)
    }
}

/// The words before a frame's payload: `[kind, a, b, c, payload bytes]`, where a, b, c are
/// Eager: tag; Rts: tag, bytes, id; Cts: id, slot, key (transport/zero_copy.rs) or 0; Nack: id, bytes;
/// Data: slot, offset; Withdraw: id; Credit: bytes.
pub(crate) type Header = [u64; 5];

/// The key in a frame that clears a message for a transfer.
pub(crate) fn key_of(header: &Header) -> Option<u64> {
    (header[0] == FrameKind::Cts as u64 && header[3] != 0).then_some(header[3])
}
