//! Models of the core's lock-free code for shared memory, compiled from the same files with loom's atomics. Loom runs each
//! model with all interleavings of its threads, and with every value that the memory model allows a load to return.
//!
//! The models do not check that the kernel's futex compares and sleeps in one step, which is modelled by a lock, nor what
//! happens if another process writes invalid values to the memory (TRA-2).

#![cfg(test)]
#![allow(dead_code, reason = "models use a part of each file")]

mod sync {
    use std::time::Duration;

    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    loom::lazy_static! {
        static ref KERNEL: (loom::sync::Mutex<()>, loom::sync::Condvar) = (loom::sync::Mutex::new(()), loom::sync::Condvar::new());
    }

    /// Ignores the limit, so that a lost wake-up is a deadlock, which loom reports.
    pub(crate) fn futex_wait(counter: &AtomicU32, seen: u32, _limit: Duration) {
        let guard = KERNEL.0.lock().unwrap();
        if counter.load(Ordering::SeqCst) == seen {
            drop(KERNEL.1.wait(guard).unwrap());
        }
    }

    pub(crate) fn futex_wake_all(_counter: &AtomicU32) {
        let _guard = KERNEL.0.lock().unwrap();
        KERNEL.1.notify_all();
    }

    pub(crate) fn between_sequential_accesses() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

#[path = "../../rust-core/src/transport/shm/arrivals.rs"]
mod arrivals;
#[path = "../../rust-core/src/transport/shm/counts.rs"]
mod counts;
#[path = "../../rust-core/src/transport/shm/event.rs"]
mod event;

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use sync::{AtomicU32, AtomicU64, Ordering};

const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Default)]
struct Words {
    counter: AtomicU32,
    sleepers: AtomicU32,
}

impl Words {
    fn event(&self) -> event::FutexEvent<'_> {
        event::FutexEvent { counter: &self.counter, sleepers: &self.sleepers }
    }
}

/// Explores the interleavings with at most `switches` preemptions. Exploring all takes minutes, and two or three preemptions
/// suffice to find mistakes.
fn bounded(switches: usize) -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(switches);
    model
}

/// Two threads wait for an event, and a third one adds to it.
#[test]
fn no_wake_is_lost() {
    bounded(2).check(|| {
        let words = Arc::new(Words::default());
        let waiter = || {
            let words = words.clone();
            thread::spawn(move || {
                while words.event().value() == 0 {
                    words.event().sleep(0, POLL_INTERVAL);
                }
            })
        };
        let waiters = [waiter(), waiter()];
        words.event().add();
        words.event().wake();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        assert_eq!(words.sleepers.load(Ordering::SeqCst), 0);
    });
}

/// Two models with mistakes must fail. Each runs in its own process, because loom ends a deadlocked model with a panic in a
/// destructor, which aborts the process.
#[test]
fn the_models_notice_mistakes() {
    for (name, text) in [("waker_that_checks_first", "deadlock"), ("frame_without_release", "Causality violation")] {
        let own = std::env::current_exe().unwrap();
        let arguments = [name, "--exact", "--ignored", "--nocapture"];
        let output = std::process::Command::new(own).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(text), "{name}: {}\n{stderr}", output.status);
    }
}

/// As `no_wake_is_lost`, but the waker checks for sleepers before it adds to the event.
#[test]
#[ignore = "a mistake: the_models_notice_mistakes runs it"]
fn waker_that_checks_first() {
    loom::model(|| {
        let words = Arc::new(Words::default());
        let own = words.clone();
        let waiter = thread::spawn(move || {
            while own.event().value() == 0 {
                own.event().sleep(0, POLL_INTERVAL);
            }
        });
        let has_sleepers = words.sleepers.load(Ordering::SeqCst) != 0;
        words.event().add();
        if has_sleepers {
            sync::futex_wake_all(&words.counter);
        }
        waiter.join().unwrap();
    });
}

/// Two members pass two barriers. After a barrier, each member sees the other's writes from before it: loom reports a cell
/// that is read while it is written, or whose last write need not be visible.
#[test]
fn members_that_arrive_see_what_all_wrote_before() {
    struct Memory {
        words: Words,
        /// By member and parity of the phase, like the regions of the transport.
        cells: [[UnsafeCell<u32>; 2]; 2],
    }
    // SAFETY: the protocol under test orders the accesses of the cells, and loom checks that.
    unsafe impl Sync for Memory {}
    // SAFETY: as above.
    unsafe impl Send for Memory {}

    fn member(memory: &Memory, me: usize) {
        let arrivals = arrivals::Arrivals { event: memory.words.event(), size: 2 };
        for phase in 1..=2u32 {
            let cell = |member: usize| &memory.cells[member][phase as usize % 2];
            // SAFETY: the other member reads the cell only after this member's arrival.
            cell(me).with_mut(|value| unsafe { *value = phase });
            arrivals.arrive(phase);
            while let Err(seen) = arrivals.poll(phase) {
                arrivals.event.sleep(seen, POLL_INTERVAL);
            }
            // SAFETY: the other member writes the cell only before its arrival.
            cell(1 - me).with(|value| assert_eq!(unsafe { *value }, phase));
        }
    }

    bounded(3).check(|| {
        let memory = Arc::new(Memory { words: Words::default(), cells: Default::default() });
        let own = memory.clone();
        let other = thread::spawn(move || member(&own, 1));
        member(&memory, 0);
        other.join().unwrap();
    });
}

/// Sends four frames through a ring of two slots, with a doorbell for each side. The frames arrive in order, no slot is
/// written while it is read, and no side sleeps for ever.
#[test]
fn frames_come_in_order_through_a_full_ring() {
    const SLOTS: usize = 2;
    const FRAMES: u64 = 4;
    #[derive(Default)]
    struct Ring {
        head: AtomicU64,
        tail: AtomicU64,
        slots: [UnsafeCell<u64>; SLOTS],
        /// The producer's doorbell, and the consumer's.
        doorbells: [Words; 2],
    }
    // SAFETY: the protocol under test orders the accesses of the slots, and loom checks that.
    unsafe impl Sync for Ring {}
    // SAFETY: as above.
    unsafe impl Send for Ring {}

    impl Ring {
        fn counts(&self) -> counts::Counts<'_, SLOTS> {
            counts::Counts { head: &self.head, tail: &self.tail }
        }
        /// Waits until `find` returns a slot.
        fn wait(&self, side: usize, find: impl Fn() -> Option<usize>) -> usize {
            loop {
                let seen = self.doorbells[side].event().value();
                match find() {
                    Some(slot) => return slot,
                    None => self.doorbells[side].event().sleep(seen, POLL_INTERVAL),
                }
            }
        }
        fn ring(&self, side: usize) {
            self.doorbells[side].event().add();
            self.doorbells[side].event().wake();
        }
    }

    bounded(2).check(|| {
        let ring = Arc::new(Ring::default());
        let own = ring.clone();
        let producer = thread::spawn(move || {
            for number in 0..FRAMES {
                let slot = own.wait(0, || own.counts().free_slot(number));
                // SAFETY: the slot is the producer's until it is published.
                own.slots[slot].with_mut(|frame| unsafe { *frame = 100 + number });
                own.counts().publish(number);
                own.ring(1);
            }
        });
        for number in 0..FRAMES {
            let slot = ring.wait(1, || ring.counts().full_slot(number));
            // SAFETY: the slot is the consumer's until it is released.
            ring.slots[slot].with(|frame| assert_eq!(unsafe { *frame }, 100 + number));
            ring.counts().release(number);
            ring.ring(0);
        }
        producer.join().unwrap();
    });
}

/// The producer stores the head without release ordering, so the frame need not be visible.
#[test]
#[ignore = "a mistake: the_models_notice_mistakes runs it"]
fn frame_without_release() {
    loom::model(|| {
        let ring = Arc::new((AtomicU64::new(0), AtomicU64::new(0), UnsafeCell::new(0u64)));
        let own = ring.clone();
        let producer = thread::spawn(move || {
            // SAFETY: not safe: the model must find this race.
            own.2.with_mut(|frame| unsafe { *frame = 7 });
            own.0.store(1, Ordering::Relaxed);
        });
        let counts = counts::Counts::<1> { head: &ring.0, tail: &ring.1 };
        if counts.full_slot(0).is_some() {
            // SAFETY: as above.
            ring.2.with(|frame| assert_eq!(unsafe { *frame }, 7));
        }
        producer.join().unwrap();
    });
}
