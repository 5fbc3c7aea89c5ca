//! Two mailboxes over a network whose frames and transfers take random times, with messages that are cancelled.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;

use super::{Header, Link, Mailbox, Message, Messages};
use crate::transport::{Members, Tag};
use crate::trials::split_mix64;

const FRAME: usize = 100;
const LIMIT: usize = 350;

/// One end of a transfer.
struct TransferEnd {
    member: usize,
    message: u64,
    key: u64,
    data: usize,
    bytes: usize,
}

/// Frames in flight, and how many of them may arrive.
#[derive(Default)]
struct FramesInFlight {
    frames: VecDeque<(Header, Vec<u8>)>,
    may_arrive: usize,
}

#[derive(Default)]
struct RandomNetwork {
    /// By receiver.
    frames: [Mutex<FramesInFlight>; 2],
    receives: Mutex<Vec<TransferEnd>>,
    sends: Mutex<Vec<TransferEnd>>,
    /// Ends of transfers that the mailboxes are not told of yet, with the bytes of receives.
    ended: Mutex<Vec<(TransferEnd, usize)>>,
    random: Mutex<u64>,
    keys: Mutex<u64>,
    mailboxes: OnceLock<[Weak<Mailbox<RandomLink>>; 2]>,
}

impl RandomNetwork {
    fn random(&self, below: usize) -> usize {
        let mut state = self.random.lock();
        *state += 1;
        (split_mix64(17, *state) % below as u64) as usize
    }

    fn mailbox(&self, member: usize) -> Arc<Mailbox<RandomLink>> {
        self.mailboxes.get().expect("they are set")[member].upgrade().expect("it lives")
    }

    /// Something happens, or nothing.
    fn step(&self) {
        let member = self.random(2);
        match self.random(4) {
            0 => {
                self.frames[member].lock().may_arrive += 1 + self.random(6);
                self.mailbox(member).progress();
            }
            1 => self.move_bytes(),
            2 => {
                let mut ended = self.ended.lock();
                let count = ended.len();
                if count > 0 {
                    let (end, bytes) = ended.swap_remove(self.random(count));
                    drop(ended);
                    self.mailbox(end.member).end_transfer(end.message, bytes);
                }
            }
            _ => {}
        }
    }

    /// Moves the bytes of a transfer both of whose ends are there.
    fn move_bytes(&self) {
        let (mut sends, mut receives) = (self.sends.lock(), self.receives.lock());
        let found =
            |send: &TransferEnd| receives.iter().position(|it| (it.member, it.key) == (1 - send.member, send.key));
        let pairs: Vec<_> = sends.iter().enumerate().filter_map(|(at, send)| Some((at, found(send)?))).collect();
        if pairs.is_empty() {
            return;
        }
        let (send, receive) = pairs[self.random(pairs.len())];
        let (send, receive) = (sends.remove(send), receives.remove(receive));
        assert!(send.bytes <= receive.bytes);
        // SAFETY: mailboxes keep the memory of both until they are told of the end.
        unsafe { std::ptr::copy_nonoverlapping(send.data as *const u8, receive.data as *mut u8, send.bytes) };
        let bytes = send.bytes;
        let mut ended = self.ended.lock();
        ended.push((receive, bytes));
        if send.message != 0 {
            ended.push((send, 0));
        }
    }
}

struct RandomLink {
    member: usize,
    network: Arc<RandomNetwork>,
}

impl Link for RandomLink {
    fn payload_bytes(&self, _peer: usize) -> usize {
        FRAME
    }
    unsafe fn push(&self, to: usize, header: Header, payload: *const u8) -> bool {
        let mut frames = self.network.frames[to].lock();
        if frames.frames.len() >= 8 {
            return false;
        }
        let bytes = match header[4] {
            0 => Vec::new(),
            // SAFETY: the caller's promise.
            bytes => unsafe { std::slice::from_raw_parts(payload, bytes as usize) }.to_vec(),
        };
        frames.frames.push_back((header, bytes));
        true
    }
    fn pop(&self, _from: usize, take: &mut dyn FnMut(Header, *const u8)) -> bool {
        let mut frames = self.network.frames[self.member].lock();
        if frames.may_arrive == 0 {
            return false;
        }
        let Some((header, bytes)) = frames.frames.pop_front() else {
            frames.may_arrive = 0;
            return false;
        };
        frames.may_arrive -= 1;
        drop(frames);
        take(header, bytes.as_ptr());
        true
    }
    fn is_zero_copy(&self, _peer: usize) -> bool {
        true
    }
    unsafe fn start_receive(&self, _from: usize, message: u64, data: *mut u8, bytes: usize) -> Option<u64> {
        // Some keys are refused.
        if self.network.random(5) == 0 {
            return None;
        }
        let key = {
            let mut keys = self.network.keys.lock();
            *keys += 1;
            *keys
        };
        self.network.receives.lock().push(TransferEnd {
            member: self.member,
            message,
            key,
            data: data as usize,
            bytes,
        });
        Some(key)
    }
    unsafe fn start_send(&self, _to: usize, key: u64, message: u64, data: *const u8, bytes: usize) -> bool {
        self.network.sends.lock().push(TransferEnd { member: self.member, message, key, data: data as usize, bytes });
        true
    }
    fn has_transfers(&self, gives_up: bool) -> bool {
        assert!(!gives_up, "a transfer does not end");
        (0..20).for_each(|_| self.network.step());
        true
    }
    fn doorbell(&self) -> u32 {
        0
    }
    fn wait_doorbell(&self, _seen: u32, _limit: Duration) {}
    fn ring_own(&self) {}
}

/// A message with its memory.
struct MessageInMemory {
    member: usize,
    tag: Tag,
    message: Message,
    memory: Box<[u8]>,
    is_cancelled: bool,
}

/// What a program cancels.
#[derive(Clone, Copy)]
struct Cancels {
    sends: bool,
    receives: bool,
}

/// What a program does next.
#[derive(Clone, Debug)]
enum MessageStep {
    Send { member: usize, tag: Tag, bytes: usize },
    Receive { member: usize, tag: Tag },
    CancelSend(usize),
    CancelReceive(usize),
    Steps(usize),
}

fn step(cancels: Cancels) -> impl Strategy<Value = MessageStep> {
    let bytes = prop_oneof![Just(1usize), Just(90), Just(150), Just(300)];
    prop_oneof![
        4 => (0..2usize, 1..3u64, bytes).prop_map(|(member, tag, bytes)| MessageStep::Send { member, tag, bytes }),
        4 => (0..2usize, 1..3u64).prop_map(|(member, tag)| MessageStep::Receive { member, tag }),
        u32::from(cancels.sends) * 3 => (0..100usize).prop_map(MessageStep::CancelSend),
        u32::from(cancels.receives) * 3 => (0..100usize).prop_map(MessageStep::CancelReceive),
        4 => (1..30usize).prop_map(MessageStep::Steps),
    ]
}

/// The number of a message, in its bytes.
fn number(memory: &[u8]) -> u8 {
    memory[0]
}

fn run(seed: u64, actions: &[MessageStep], cancels: Cancels) {
    let network = Arc::new(RandomNetwork { random: Mutex::new(seed), ..RandomNetwork::default() });
    let mailboxes = [0, 1].map(|member| {
        let link = RandomLink { member, network: network.clone() };
        Arc::new(Mailbox::new(link, Members { ranks: Arc::new([0, 1]), me: member }))
    });
    let _ = network.mailboxes.set([0, 1].map(|member| Arc::downgrade(&mailboxes[member])));
    let (mut sends, mut receives): (Vec<MessageInMemory>, Vec<MessageInMemory>) = (Vec::new(), Vec::new());
    for action in actions {
        match *action {
            MessageStep::Send { member, tag, bytes } => {
                let memory = vec![sends.len() as u8 + 1; bytes].into_boxed_slice();
                // SAFETY: the memory lives until the end, and does not move.
                let message = unsafe { mailboxes[member].post_send(1 - member, tag, memory.as_ptr(), bytes) };
                sends.push(MessageInMemory { member, tag, message, memory, is_cancelled: false });
            }
            MessageStep::Receive { member, tag } => {
                let mut memory = vec![0; LIMIT].into_boxed_slice();
                let data = memory.as_mut_ptr();
                // SAFETY: as above.
                let message = unsafe { mailboxes[member].post_recv_up_to(1 - member, tag, data, LIMIT) };
                receives.push(MessageInMemory { member, tag, message, memory, is_cancelled: false });
            }
            MessageStep::CancelSend(which) if !sends.is_empty() => {
                let which = which % sends.len();
                let send = &mut sends[which];
                mailboxes[send.member].cancel(&send.message);
                if send.message.poll().is_none() {
                    // Nobody reads the memory any more.
                    send.memory.fill(0);
                    send.is_cancelled = true;
                }
            }
            MessageStep::CancelReceive(which) if !receives.is_empty() => {
                let which = which % receives.len();
                let receive = &mut receives[which];
                mailboxes[receive.member].cancel(&receive.message);
                if receive.message.poll().is_none() {
                    receive.memory.fill(0xee);
                    receive.is_cancelled = true;
                }
            }
            MessageStep::Steps(steps) => (0..steps).for_each(|_| network.step()),
            MessageStep::CancelSend(_) | MessageStep::CancelReceive(_) => {}
        }
    }
    let is_open = |posted: &&MessageInMemory| !posted.is_cancelled && posted.message.poll().is_none();
    let since = Instant::now();
    // Until nothing happens any more.
    for _ in 0..3000 {
        network.step();
    }
    while !network.ended.lock().is_empty() && since.elapsed() < Duration::from_secs(10) {
        network.step();
    }
    for receive in &receives {
        match receive.is_cancelled {
            true => assert!(receive.memory.iter().all(|byte| *byte == 0xee), "written after the cancellation"),
            false if receive.message.poll().is_some() => {
                let bytes = receive.message.received_bytes();
                let send = &sends[usize::from(number(&receive.memory)) - 1];
                assert_eq!((send.member, send.tag, send.memory.len()), (1 - receive.member, receive.tag, bytes));
                assert!(receive.memory[..bytes].iter().all(|byte| *byte == number(&receive.memory)));
            }
            false => {}
        }
    }
    for (member, tag) in [(0, 1), (0, 2), (1, 1), (1, 2)] {
        let waits = |posted: &&MessageInMemory| is_open(posted) && posted.tag == tag;
        let open =
            |list: &[MessageInMemory], member| list.iter().filter(waits).filter(|it| it.member == member).count();
        let (open_sends, open_receives) = (open(&sends, 1 - member), open(&receives, member));
        assert!(open_sends == 0 || open_receives == 0, "{open_sends} and {open_receives} are left of tag {tag}");
        let received: Vec<u8> = (receives.iter())
            .filter(|it| it.member == member && it.tag == tag && !it.is_cancelled && it.message.poll().is_some())
            .map(|it| number(&it.memory))
            .collect();
        let mut sorted = received.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), received.len(), "a message was received twice");
        let is_sent = |it: &&MessageInMemory| it.member != member && it.tag == tag && it.message.poll().is_some();
        if !cancels.receives && open_receives > 0 {
            assert_eq!(sends.iter().filter(is_sent).count(), received.len(), "a message with tag {tag} was lost");
        }
        if !cancels.sends {
            assert_eq!(sorted, received, "messages with tag {tag} overtook each other");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Messages with equal tags stay in order, arrive once and whole, and no memory is used after a cancellation.
    #[test]
    fn messages_arrive_once_and_in_order(seed: u32, steps in prop::collection::vec(step(RECEIVES), 1..80)) {
        run(seed.into(), &steps, RECEIVES);
    }

    /// Here a receive whose message is withdrawn may take a later one than receives behind it.
    #[test]
    fn messages_arrive_though_others_are_withdrawn(seed: u32, steps in prop::collection::vec(step(SENDS), 1..80)) {
        run(seed.into(), &steps, SENDS);
    }

    #[test]
    fn both_ends_cancel_messages(seed: u32, steps in prop::collection::vec(step(BOTH), 1..80)) {
        run(seed.into(), &steps, BOTH);
    }
}

const RECEIVES: Cancels = Cancels { sends: false, receives: true };
const SENDS: Cancels = Cancels { sends: true, receives: false };
const BOTH: Cancels = Cancels { sends: true, receives: true };
