//! Members write shared memory with the kind of stores that is faster at present: here one kind is slowed down.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::ranks::*;
use crate::buffer::{DType, ReduceOp};
use crate::bulk_copy;
use crate::collectives::paths::{Path, PathChooser};
use crate::collectives::stores::{Purpose, StoreChooser, Stores};
use crate::collectives::{Communicator, Request};
use crate::world::Monitor;

/// The kind that is slow, as a number.
static SLOW: AtomicUsize = AtomicUsize::new(0);

/// Takes a microsecond for each line if `kind` is the slow one.
fn delay(kind: Stores, bytes: usize) {
    let end = Instant::now() + Duration::from_micros(bytes as u64 / 64);
    while SLOW.load(Ordering::Relaxed) == kind as usize && Instant::now() < end {}
}

unsafe fn ordinary(from: *const u8, to: *mut u8, bytes: usize) {
    delay(Stores::Ordinary, bytes);
    // SAFETY: the caller's promise.
    unsafe { bulk_copy::ordinary(from, to, bytes) };
}

unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    delay(Stores::Streaming, bytes);
    // SAFETY: the caller's promise.
    unsafe { bulk_copy::streaming(from, to, bytes) };
}

/// The choices of all members for calls of 64 KiB.
fn choices(job: &TestGroup, purpose: Purpose) -> Vec<Stores> {
    job.communicators.iter().map(|each| each.stores().chosen(purpose, 64 << 10)).collect()
}

#[test]
#[cfg_attr(miri, ignore)]
fn the_choice_follows_the_faster_stores_within_fifty_calls() {
    let elems = 16 << 10;
    for size in [2, 3] {
        let monitors: Vec<_> = (0..size).map(|rank| std::sync::Arc::new(Monitor::new(rank))).collect();
        let communicators = shm(size).into_iter().zip(&monitors).map(|(transport, monitor)| {
            let stores = StoreChooser::with_copies([ordinary, streaming]);
            let paths = PathChooser::only(Path::Shared);
            Communicator::with_choosers(3, transport, monitor.clone(), TIMEOUT, stores, paths)
        });
        let job = TestGroup { communicators: communicators.collect(), monitors: monitors.clone() };
        for (slow, fast) in [
            (Stores::Ordinary, Stores::Streaming),
            (Stores::Streaming, Stores::Ordinary),
            (Stores::Ordinary, Stores::Streaming),
        ] {
            SLOW.store(slow as usize, Ordering::Relaxed);
            on_all(&job, |rank, communicator| {
                let mut data = Memory::random(DType::Float32, elems, rank as u64);
                let inputs: Vec<_> = (0..size).map(|rank| Memory::random(DType::Float32, elems, rank as u64)).collect();
                let mut outputs = inputs.clone();
                for call in 0..50 {
                    data.clone_from(&inputs[rank]);
                    let view = data.view();
                    communicator.run(&Request::AllReduce { input: view, output: view, op: ReduceOp::Sum }).unwrap();
                    assert_eq!(data.bytes(), fold(DType::Float32, ReduceOp::Sum, &inputs), "call {call}");
                    data.clone_from(&inputs[rank]);
                    let outputs = views(&mut outputs);
                    communicator.run(&Request::AllGather { input: data.view(), outputs }).unwrap();
                }
                for (input, output) in inputs.iter().zip(&outputs) {
                    assert_eq!(input.bytes(), output.bytes());
                }
            });
            assert_eq!(choices(&job, Purpose::Reduce), vec![fast; size], "{size} members reduce");
            assert_eq!(choices(&job, Purpose::Move), vec![fast; size], "{size} members move");
        }
    }
}
