//! The contract of point-to-point messages over every transport: cancellation, and messages that no receive matches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ranks::MakeTransports;
use crate::transport::{Message, Tag, Transport};

const LIMIT: Duration = Duration::from_secs(20);

struct Pair {
    ends: Vec<Arc<dyn Transport>>,
}

impl Pair {
    fn new(make: MakeTransports) -> Self {
        Self { ends: make(2) }
    }

    /// Makes progress on both ends until `ready` returns true or `limit` has passed; returns whether it became ready.
    fn drive(&self, limit: Duration, ready: impl Fn() -> bool) -> bool {
        let start = Instant::now();
        while !ready() {
            if start.elapsed() >= limit {
                return false;
            }
            for _ in 0..16 {
                self.ends.iter().for_each(|end| end.progress());
            }
            std::thread::yield_now();
        }
        true
    }

    fn send(&self, tag: Tag, data: &[u8]) -> Message {
        // SAFETY: the tests keep the data until the message is complete or cancelled.
        unsafe { self.ends[0].post_send(1, tag, data.as_ptr(), data.len()) }
    }

    fn recv(&self, tag: Tag, data: &mut [u8]) -> Message {
        // SAFETY: as above.
        unsafe { self.ends[1].post_recv(Some(0), tag, data.as_mut_ptr(), data.len()) }
    }
}

fn is_over(message: &Message) -> bool {
    message.poll().inspect(|result| assert!(result.is_ok(), "{result:?}")).is_some()
}

/// When a send is cancelled.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CancelTime {
    /// The receiver has the announcement, but no receive is posted.
    Announced,
    /// A receive is matched, and the sender does not know it yet, unless a thread of the transport makes progress for
    /// it.
    Matched,
    /// A part of the data has arrived.
    InFlight,
}

/// Messages of `large` bytes are announced before their data is sent, and take several frames.
pub(super) fn a_cancelled_send_is_withdrawn(make: MakeTransports, large: usize) {
    for when in [CancelTime::Announced, CancelTime::Matched, CancelTime::InFlight] {
        let pair = Pair::new(make);
        let (first, second, third) = (vec![1; large], vec![2; large], vec![3; large]);
        let mut received = vec![0; large];
        let cancelled = pair.send(7, &first);
        let mut matched = None;
        match when {
            CancelTime::Announced => drop(pair.drive(Duration::from_millis(50), || false)),
            CancelTime::Matched => {
                matched = Some(pair.recv(7, &mut received));
                let start = Instant::now();
                while start.elapsed() < Duration::from_millis(50) {
                    pair.ends[1].progress();
                }
            }
            CancelTime::InFlight => {
                matched = Some(pair.recv(7, &mut received));
                let start = Instant::now();
                let last = received.as_ptr();
                // SAFETY: both lie inside of `received`; a value that changes meanwhile is only compared.
                let has_arrived = |at: usize| unsafe { last.add(at).read_volatile() } == 1;
                while !has_arrived(0) && start.elapsed() < LIMIT {
                    pair.ends.iter().for_each(|end| end.progress());
                }
                assert!(has_arrived(0), "no data has arrived");
            }
        }
        pair.ends[0].cancel(&cancelled);
        if is_over(&cancelled) {
            // All bytes were already in flight: a cancelled message may have been sent.
            assert_ne!(when, CancelTime::Announced);
            assert!(pair.drive(LIMIT, || matched.as_ref().is_some_and(is_over)), "{when:?}");
            assert!(received == first);
            continue;
        }
        // The next tries, of which the first receive takes the first.
        let sends = [pair.send(7, &second), pair.send(7, &third)];
        let first_recv = matched.unwrap_or_else(|| pair.recv(7, &mut received));
        assert!(pair.drive(LIMIT, || is_over(&first_recv) && is_over(&sends[0])), "{when:?}: the retry is not matched");
        assert!(received == second, "{when:?}");
        let second_recv = pair.recv(7, &mut received);
        assert!(pair.drive(LIMIT, || is_over(&second_recv) && is_over(&sends[1])), "{when:?}");
        assert!(received == third, "{when:?}");
    }
}

/// A sender leaves while its announced message is being matched. The receive can be cancelled at once.
pub(super) fn a_receive_whose_sender_has_left_can_be_cancelled(make: MakeTransports, large: usize) {
    for attempt in 0..20 {
        let mut pair = Pair::new(make);
        let data = vec![1; large];
        let mut received = vec![0; large];
        let sent = pair.send(7, &data);
        pair.drive(Duration::from_millis(5), || false);
        let matched = pair.recv(7, &mut received);
        std::thread::sleep(Duration::from_micros(attempt % 5 * 40));
        pair.ends[0].cancel(&sent);
        drop(pair.ends.remove(0));
        let since = Instant::now();
        pair.ends[0].cancel(&matched);
        assert!(since.elapsed() < Duration::from_secs(2), "attempt {attempt}: {:?}", since.elapsed());
        received.fill(2);
        std::thread::sleep(Duration::from_millis(2));
        assert!(received.iter().all(|byte| *byte == 2), "it was written after the cancellation");
    }
}

pub(super) fn messages_that_nobody_receives_are_bounded(make: MakeTransports) {
    /// Fits one frame on every transport.
    const BYTES: usize = 1 << 10;
    /// Twice the number of messages that a receiver buffers.
    const COUNT: usize = 8 << 10;
    let pair = Pair::new(make);
    let data: Vec<[u8; BYTES]> = (0..COUNT).map(|number| [(number % 251) as u8; BYTES]).collect();
    let sends: Vec<Message> = data.iter().map(|data| pair.send(5, data)).collect();
    let over = || sends.iter().filter(|send| is_over(send)).count();
    // Until the transport accepts no more.
    let mut before = usize::MAX;
    while over() != before {
        before = over();
        pair.drive(Duration::from_millis(300), || false);
    }
    let kept = over();
    assert!((COUNT / 4..COUNT * 5 / 8).contains(&kept), "{kept} of {COUNT} messages are buffered");
    // The messages arrive in order, and every send ends with its receive.
    let mut received = [0; BYTES];
    for (number, expected) in data.iter().enumerate() {
        let recv = pair.recv(5, &mut received);
        assert!(pair.drive(LIMIT, || is_over(&recv)), "message {number}");
        assert!(received == *expected, "message {number}");
    }
    assert!(pair.drive(LIMIT, || over() == COUNT), "{} of {COUNT}", over());
    // The receiver has returned the buffer space.
    let again: Vec<Message> = data[..COUNT / 4].iter().map(|data| pair.send(5, data)).collect();
    assert!(pair.drive(LIMIT, || again.iter().all(is_over)), "room is not returned");
}
