//! Stands in where no transport can reach all members: every operation says why, and what to do about it. The group
//! exists all the same, since operations on other devices do not go through it.

use std::time::Duration;

use super::mailbox::Message;
use super::shm::SharedMemory;
use super::{Members, Tag, Transport};
use crate::error::{Error, Result};

/// See the module's text.
pub struct AbsentTransport {
    members: Members,
    why: Error,
}

impl AbsentTransport {
    /// For a group whose operations end with `why`.
    pub fn new(members: Members, why: Error) -> Self {
        Self { members, why }
    }
}

impl Transport for AbsentTransport {
    fn name(&self) -> &'static str {
        "none"
    }

    fn members(&self) -> &Members {
        &self.members
    }

    unsafe fn post_send(&self, to: usize, _tag: Tag, _data: *const u8, _bytes: usize) -> Message {
        Message::failed(Some(to), self.why.clone())
    }

    unsafe fn post_recv(&self, from: Option<usize>, _tag: Tag, _data: *mut u8, _bytes: usize) -> Message {
        Message::failed(from, self.why.clone())
    }

    fn progress(&self) {}

    fn cancel(&self, _message: &Message) {}

    fn doorbell(&self) -> u32 {
        0
    }

    fn doze(&self, _seen: u32, limit: Duration) {
        std::thread::sleep(limit);
    }

    fn ring(&self) {}

    fn shared(&self) -> Option<&SharedMemory> {
        None
    }

    fn ready(&self) -> Result<()> {
        Err(self.why.clone())
    }
}
