//! Announced messages that their senders withdraw (MBX-3), and the receives that were matched with them.

use super::{Body, Filling, MailboxState, Posted, Unexpected};
use crate::transport::{Members, Tag};

impl MailboxState {
    /// The receive that takes a message with `tag` from `from` that is arriving, if there is one.
    pub(super) fn position_for_arrival(&self, from: usize, tag: Tag) -> Option<usize> {
        let is_earlier = |it: &Unexpected| it.from == from && it.tag == tag;
        // An earlier message may wait for a receive that is reserved (ZCP-2).
        self.position_of_receive(from, tag).filter(|_| !self.unexpected.iter().any(is_earlier))
    }

    /// The first posted receive that matches a message with `tag` from `from`, if that may take it (ZCP-2).
    pub(super) fn position_of_receive(&self, from: usize, tag: Tag) -> Option<usize> {
        let at = self.posted.iter().position(|recv| recv.is_for(from, tag))?;
        (!self.is_reserved(from, tag, self.posted[at].message.id())).then_some(at)
    }

    /// Whether a receive that is older than `recv` may get the next message with `tag` from `from` (ZCP-2).
    pub(super) fn is_reserved(&self, from: usize, tag: Tag, recv: u64) -> bool {
        self.older_fillings(from, tag, recv).any(|filling| filling.is_withdrawn)
    }

    /// The same of a message that was not matched at once: an older transfer may be withdrawn, too, although the mailbox
    /// has not learned of it yet.
    fn has_older_transfer(&self, from: usize, tag: Tag, recv: u64) -> bool {
        self.older_fillings(from, tag, recv).any(|filling| filling.in_transfer)
    }

    fn older_fillings(&self, from: usize, tag: Tag, recv: u64) -> impl Iterator<Item = &Filling> {
        let older = self.filling.iter().filter(move |(id, _)| **id < recv).map(|(_, filling)| filling);
        older.filter(move |filling| filling.recv.is_for(from, tag))
    }

    /// Returns a receive to its place in the order.
    pub(super) fn repost(&mut self, recv: Posted) {
        let at = self.posted.partition_point(|it| it.message.id() < recv.message.id());
        self.posted.insert(at, recv);
    }

    /// The sender has cancelled its message `id` (MBX-3).
    pub(super) fn withdraw(&mut self, from: usize, id: u64, members: &Members) {
        let announced = |it: &Unexpected| it.from == from && matches!(it.body, Body::Rts { id: own, .. } if own == id);
        self.unexpected.retain(|it| !announced(it));
        let Some((slot, filling)) = self.filling.iter_mut().find(|(_, it)| it.from == from && it.id == id) else {
            return;
        };
        if filling.in_transfer {
            // It ends with an empty message (ZCP-2).
            filling.is_withdrawn = true;
            return;
        }
        let slot = *slot;
        if let Some(Filling { recv, .. }) = self.filling.remove(&slot) {
            self.rematch(recv, members);
        }
    }

    /// Matches messages that waited because an older receive was to take the first of them (ZCP-2).
    pub(super) fn match_unexpected(&mut self, members: &Members) {
        let mut at = 0;
        while let Some(Unexpected { from, tag, .. }) = self.unexpected.get(at) {
            let is_next = |recv: &usize| !self.has_older_transfer(*from, *tag, self.posted[*recv].message.id());
            let found = self.position_of_receive(*from, *tag).filter(is_next);
            match found.and_then(|recv| self.posted.remove(recv)) {
                Some(recv) => self.deliver_unexpected(recv, at, members),
                None => at += 1,
            }
        }
    }

    /// Gives the unexpected message at `at` to a receive.
    pub(super) fn deliver_unexpected(&mut self, recv: Posted, at: usize, members: &Members) {
        let Some(arrived) = self.unexpected.remove(at) else { return };
        if let Body::Eager(bytes) = &arrived.body {
            self.note_taken(arrived.from, bytes.len(), members);
        }
        self.deliver(recv, arrived.from, arrived.body, members);
    }

    /// Matches a receive whose message was withdrawn with the next message, or returns it to its place.
    pub(super) fn rematch(&mut self, recv: Posted, members: &Members) {
        let id = recv.message.id();
        let wanted = |it: &Unexpected| recv.is_for(it.from, it.tag) && !self.has_older_transfer(it.from, it.tag, id);
        match self.unexpected.iter().position(wanted) {
            Some(at) => self.deliver_unexpected(recv, at, members),
            None => self.repost(recv),
        }
    }
}
