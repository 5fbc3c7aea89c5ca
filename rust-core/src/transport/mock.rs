//! Messages between ranks that are threads of one process, with delays and interleavings that a seed determines. It
//! has no shared memory, so it represents transports that only send messages.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::mailbox::{Header, Link, Mailbox, Messages};
use super::shm::SharedMemory;
use super::{Members, Transport};
use crate::trials::split_mix64;

/// Options of the mock.
#[derive(Clone, Copy, Debug)]
pub struct MockOptions {
    /// Seed of the delays.
    pub seed: u64,
    /// Largest delay of a frame; zero means none.
    pub max_delay: Duration,
}

struct MockFrame {
    due: Instant,
    header: Header,
    payload: Vec<u8>,
}

struct Wires {
    /// `queues[from * size + to]`.
    queues: Vec<VecDeque<MockFrame>>,
    doorbells: Vec<u32>,
    lost: Vec<bool>,
    /// The number of random delays so far.
    delays: u64,
}

struct Net {
    size: usize,
    options: MockOptions,
    wires: Mutex<Wires>,
    frames_changed: Condvar,
}

/// The transport of one rank that is a thread, with random delays.
pub struct MockTransport {
    members: Members,
    mailbox: Mailbox<MockLink>,
}

struct MockLink {
    net: Arc<Net>,
    me: usize,
}

const FRAME_BYTES: usize = 1 << 10;
/// Number of frames of one pair that may be in flight: small, so that tests cover a full link.
const QUEUE_FRAMES: usize = 4;

impl MockTransport {
    /// The transports of `size` connected ranks.
    pub fn net(size: usize, options: MockOptions) -> Vec<Arc<Self>> {
        let wires = Wires {
            queues: (0..size * size).map(|_| VecDeque::new()).collect(),
            doorbells: vec![0; size],
            lost: vec![false; size],
            delays: 0,
        };
        let net = Arc::new(Net { size, options, wires: Mutex::new(wires), frames_changed: Condvar::new() });
        let ranks: Arc<[usize]> = (0..size).collect();
        let end = |me| {
            let members = Members { ranks: ranks.clone(), me };
            let link = MockLink { net: net.clone(), me };
            Arc::new(Self { members: members.clone(), mailbox: Mailbox::new(link, members) })
        };
        (0..size).map(end).collect()
    }

    /// Drops everything from and to this rank from now on, as if its host had failed.
    pub fn disconnect(&self) {
        self.mailbox.link.net.wires.lock().lost[self.members.me] = true;
    }
}

impl Link for MockLink {
    fn payload_bytes(&self, _peer: usize) -> usize {
        FRAME_BYTES
    }

    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool {
        let mut wires = self.net.wires.lock();
        if wires.lost[to] || wires.lost[self.me] {
            return true;
        }
        wires.delays += 1;
        let random = split_mix64(self.net.options.seed, wires.delays);
        let late = self.net.options.max_delay.mul_f64((random >> 11) as f64 / (1u64 << 53) as f64);
        let queue = &mut wires.queues[self.me * self.net.size + to];
        if queue.len() >= QUEUE_FRAMES {
            return false;
        }
        let length = header[4] as usize;
        let mut copy = vec![0; FRAME_BYTES];
        if length > 0 {
            // SAFETY: the caller promises `length` readable bytes, at most FRAME_BYTES.
            unsafe { std::ptr::copy_nonoverlapping(payload, copy.as_mut_ptr(), length) };
        }
        // Frames of a pair stay in order.
        let due = queue.back().map_or(Instant::now(), |last| last.due.max(Instant::now())) + late;
        queue.push_back(MockFrame { due, header, payload: copy });
        wires.doorbells[to] = wires.doorbells[to].wrapping_add(1);
        self.net.frames_changed.notify_all();
        true
    }

    fn pop(&self, from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
        let frame = {
            let mut wires = self.net.wires.lock();
            let queue = &mut wires.queues[from * self.net.size + self.me];
            if queue.front().is_none_or(|frame| frame.due > Instant::now()) {
                return false;
            }
            let frame = queue.pop_front();
            wires.doorbells[from] = wires.doorbells[from].wrapping_add(1);
            self.net.frames_changed.notify_all();
            frame
        };
        let frame = frame.expect("the front was there under the same lock");
        take(frame.header, frame.payload.as_ptr());
        true
    }

    fn doorbell(&self) -> u32 {
        self.net.wires.lock().doorbells[self.me]
    }

    fn wait_doorbell(&self, seen: u32, limit: Duration) {
        let mut wires = self.net.wires.lock();
        if wires.doorbells[self.me] != seen {
            return;
        }
        let size = self.net.size;
        let due = (0..size).filter_map(|from| wires.queues[from * size + self.me].front()).map(|frame| frame.due).min();
        let latest = Instant::now() + limit;
        self.net.frames_changed.wait_until(&mut wires, due.map_or(latest, |due| due.min(latest)));
    }

    fn ring_own(&self) {
        let mut wires = self.net.wires.lock();
        wires.doorbells[self.me] = wires.doorbells[self.me].wrapping_add(1);
        self.net.frames_changed.notify_all();
    }
}

impl Transport for MockTransport {
    fn name(&self) -> &'static str {
        "mock"
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn messages(&self) -> &dyn Messages {
        &self.mailbox
    }

    fn shared(&self) -> Option<&SharedMemory> {
        None
    }
}
