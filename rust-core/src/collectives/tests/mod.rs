//! The contract of collectives, over every transport: threads are ranks, and `reference` computes the expected
//! results.

mod batches;
mod direct;
mod failures;
mod messages;
mod panics;
mod ranks;
mod rows;
mod stores;

use std::sync::mpsc::channel;

use self::ranks::*;
use super::{Request, kernels};
use crate::buffer::{DType, ReduceOp};
use crate::error::Code;

fn all_reduce_every_type(make: MakeTransports) {
    for size in [1, 2, 3, 4, 5, 7] {
        let job = job(make, size, TIMEOUT);
        for dtype in DType::ALL {
            for op in ReduceOp::ALL {
                let elems = [0, 1, 63, 130, 1031][(dtype as usize + op as usize + size) % 5];
                let inputs: Vec<_> = (0..size).map(|rank| Memory::random(dtype, elems, rank as u64)).collect();
                let supported = kernels::check(dtype, op).is_ok();
                let outputs = on_all(&job, |rank, communicator| {
                    let mut data = inputs[rank].clone();
                    let view = data.view();
                    communicator.run(&Request::AllReduce { input: view, output: view, op }).map(|()| data)
                });
                for output in outputs {
                    match output {
                        Ok(output) => {
                            assert_eq!(output.bytes(), fold(dtype, op, &inputs), "{dtype} {op:?} {size} {elems}")
                        }
                        Err(error) => assert!(error.code() == Code::Unsupported && !supported, "{error}"),
                    }
                }
            }
        }
    }
}

fn all_reduce_every_size(make: MakeTransports, group_sizes: &[usize], sizes: &[usize]) {
    for &size in group_sizes {
        let job = job(make, size, TIMEOUT);
        for &elems in sizes {
            for (dtype, op, in_place) in [
                (DType::Float32, ReduceOp::Sum, true),
                (DType::Float32, ReduceOp::Average, false),
                (DType::Float16, ReduceOp::Sum, false),
                (DType::UInt8, ReduceOp::Max, true),
            ] {
                let inputs: Vec<_> = (0..size).map(|rank| Memory::random(dtype, elems, rank as u64)).collect();
                let outputs = on_all(&job, |rank, communicator| {
                    let mut input = inputs[rank].clone();
                    let mut output = Memory::zeros(dtype, elems);
                    let view = if in_place { input.view() } else { output.view() };
                    communicator.run(&Request::AllReduce { input: input.view(), output: view, op }).unwrap();
                    if in_place { input } else { output }
                });
                let expected = fold(dtype, op, &inputs);
                assert!(outputs.iter().all(|output| output.bytes() == expected), "{dtype} {op:?} {size} {elems}");
                let root = size - 1;
                let outputs = on_all(&job, |rank, communicator| {
                    let mut input = inputs[rank].clone();
                    let mut output = Memory::zeros(dtype, if rank == root { elems } else { 0 });
                    let request = Request::Reduce { input: input.view(), output: output.view(), op, root };
                    communicator.run(&request).unwrap();
                    assert_eq!(input.bytes(), inputs[rank].bytes(), "the input stays as it is");
                    output
                });
                assert!(outputs[root].bytes() == expected, "reduce {dtype} {op:?} {size} {elems}");
            }
        }
    }
}

fn every_exchange(make: MakeTransports, scale: usize) {
    for size in [1, 2, 3, 4, 5] {
        let job = job(make, size, TIMEOUT);
        for (round, dtype) in DType::ALL.into_iter().enumerate() {
            let mut random = Random(round as u64);
            // Blocks of any size, some of them empty.
            let mut count = || random.below(scale) * usize::from(random.below(4) > 0);
            let table: Vec<Vec<usize>> = (0..size).map(|_| (0..size).map(|_| count()).collect()).collect();
            let root = round % size;
            let block = |from: usize, to: usize, elems: usize| Memory::random(dtype, elems, (from * 100 + to) as u64);
            on_all(&job, |me, communicator| {
                let run = |request: Request| communicator.run(&request).unwrap();
                let row = &table[0];

                let mut data = if me == root { block(root, 0, row[0]) } else { Memory::zeros(dtype, row[0]) };
                run(Request::Broadcast { data: data.view(), root });
                assert_eq!(data.bytes(), block(root, 0, row[0]).bytes(), "broadcast");

                let mut input = block(me, 0, row[me]);
                let mut outputs: Vec<_> = row.iter().map(|elems| Memory::zeros(dtype, *elems)).collect();
                run(Request::AllGather { input: input.view(), outputs: views(&mut outputs) });
                for (from, output) in outputs.iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, 0, row[from]).bytes(), "all_gather");
                }

                let mut outputs: Vec<_> = row.iter().map(|elems| Memory::zeros(dtype, *elems)).collect();
                let gathered = if me == root { views(&mut outputs) } else { vec![] };
                run(Request::Gather { input: input.view(), outputs: gathered, root });
                for (from, output) in outputs.iter().enumerate().filter(|_| me == root) {
                    assert_eq!(output.bytes(), block(from, 0, row[from]).bytes(), "gather");
                }

                let mut inputs: Vec<_> = (0..size).map(|to| block(root, to, row[to])).collect();
                let mut output = Memory::zeros(dtype, row[me]);
                let scattered = if me == root { views(&mut inputs) } else { vec![] };
                run(Request::Scatter { inputs: scattered, output: output.view(), root });
                assert_eq!(output.bytes(), block(root, me, row[me]).bytes(), "scatter");

                let mut inputs: Vec<_> = (0..size).map(|to| block(me, to, table[me][to])).collect();
                let mut outputs: Vec<_> = (0..size).map(|from| Memory::zeros(dtype, table[from][me])).collect();
                run(Request::AllToAll { inputs: views(&mut inputs), outputs: views(&mut outputs) });
                for (from, output) in outputs.iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, me, table[from][me]).bytes(), "all_to_all");
                }

                let mut inputs: Vec<_> = (0..size).map(|to| block(me, to, row[to])).collect();
                let mut output = Memory::zeros(dtype, row[me]);
                let op = if dtype == DType::Bool { ReduceOp::BitXor } else { ReduceOp::Average };
                run(Request::ReduceScatter { inputs: views(&mut inputs), output: output.view(), op });
                let parts: Vec<_> = (0..size).map(|from| block(from, me, row[me])).collect();
                assert_eq!(output.bytes(), fold(dtype, op, &parts), "reduce_scatter");

                run(Request::Barrier);
            });
        }
    }
}

fn windows(make: MakeTransports) {
    for size in [1, 2, 3, 4] {
        let job = job(make, size, TIMEOUT);
        on_all(&job, |me, communicator| {
            let first = communicator.window(100_000).unwrap();
            let window = communicator.window(0x20000).unwrap();
            for (elems, dtype) in [(1, DType::Float32), (5000, DType::Float32), (77, DType::BFloat16), (0, DType::Int8)]
            {
                let inputs: Vec<_> = (0..size).map(|rank| Memory::random(dtype, elems, rank as u64)).collect();
                for window in [&first, &window] {
                    // Offsets differ between members.
                    let offset_bytes = 64 * (me + 1);
                    let bytes = inputs[me].bytes();
                    // SAFETY: the range lies inside the own part, which only a running operation touches.
                    let place =
                        unsafe { std::slice::from_raw_parts_mut(window.local().add(offset_bytes), bytes.len()) };
                    place.copy_from_slice(bytes);
                    let op = ReduceOp::Average;
                    let window = window.clone();
                    communicator.run(&Request::AllReduceWindow { window, offset_bytes, elems, dtype, op }).unwrap();
                    assert_eq!(place, fold(dtype, op, &inputs));
                }
            }
        });
    }
}

/// Programs of random collectives, blocking and queued, are the same on all ranks and end.
fn random_programs(make: MakeTransports) {
    for seed in 0..6 {
        let size = 2 + seed % 3;
        let job = job(make, size, TIMEOUT);
        on_all(&job, |me, communicator| {
            let mut random = Random(seed as u64);
            let (sender, receiver) = channel();
            let mut waiting = 0;
            let mut kept: Vec<(Memory, Vec<u8>)> = Vec::new();
            for step in 0..40 {
                let elems = random.below(3000);
                let dtype = [DType::Float32, DType::Int64, DType::Float16][random.below(3)];
                let root = random.below(size);
                let inputs: Vec<_> =
                    (0..size).map(|rank| Memory::random(dtype, elems, (step * 10 + rank) as u64)).collect();
                let mut data = inputs[me].clone();
                let view = data.view();
                let (request, expected) = match random.below(3) {
                    0 => {
                        let request = Request::AllReduce { input: view, output: view, op: ReduceOp::Sum };
                        (request, fold(dtype, ReduceOp::Sum, &inputs))
                    }
                    1 => (Request::Broadcast { data: view, root }, inputs[root].bytes().to_vec()),
                    _ => (Request::Barrier, data.bytes().to_vec()),
                };
                // Which rank queues and which blocks may differ between ranks.
                if Random((me * 1000 + step) as u64).next().is_multiple_of(2) {
                    communicator.run(&request).unwrap();
                } else {
                    let sender = sender.clone();
                    communicator.submit(request, Box::new(move |result| sender.send(result).unwrap()));
                    waiting += 1;
                }
                kept.push((data, expected));
            }
            (0..waiting).for_each(|_| assert_eq!(receiver.recv_timeout(TIMEOUT).unwrap().unwrap(), None));
            kept.iter().for_each(|(data, expected)| assert_eq!(data.bytes(), expected));
        });
    }
}

fn messages_do_not_block_each_other(make: MakeTransports) {
    let size = 3;
    let job = job(make, size, TIMEOUT);
    // Larger than a frame and than a whole ring, and none at all.
    let sizes = [0, 1, 5000, 1_000_003];
    on_all(&job, |me, communicator| {
        let (sender, receiver) = channel();
        let mut kept = Vec::new();
        let mut submit = |request: Request, memory: Memory, expected: Option<Memory>| {
            let sender = sender.clone();
            communicator.submit(request, Box::new(move |result| sender.send(result).unwrap()));
            kept.push((memory, expected));
        };
        for peer in 0..size {
            for (tag, elems) in sizes.into_iter().enumerate() {
                let mut data = Memory::random(DType::UInt8, elems, (me * 10 + peer) as u64);
                submit(Request::Send { data: data.view(), to: peer, tag: tag as u32 }, data, None);
            }
        }
        // Receives in the opposite order of the sends.
        for peer in (0..size).rev() {
            for (tag, elems) in sizes.into_iter().enumerate().rev() {
                let mut data = Memory::zeros(DType::UInt8, elems);
                let expected = Memory::random(DType::UInt8, elems, (peer * 10 + me) as u64);
                submit(Request::Recv { data: data.view(), from: Some(peer), tag: tag as u32 }, data, Some(expected));
            }
        }
        (0..kept.len()).for_each(|_| assert!(receiver.recv_timeout(TIMEOUT).unwrap().is_ok()));
        for (memory, expected) in kept {
            assert!(expected.is_none_or(|expected| expected.bytes() == memory.bytes()));
        }
        communicator.run(&Request::Barrier).unwrap();
        // Rank 0 receives from any rank; messages with equal tags stay in order.
        if me == 0 {
            let mut seen = [0u8; 3];
            for _ in 0..2 * 20 {
                let mut data = Memory::zeros(DType::UInt8, 2);
                communicator.run(&Request::Recv { data: data.view(), from: None, tag: 9 }).unwrap();
                let (from, number) = (data.bytes()[0] as usize, data.bytes()[1]);
                assert_eq!(number, seen[from], "messages of one pair arrive in order");
                seen[from] += 1;
            }
        } else {
            for number in 0..20 {
                let mut data = Memory::zeros(DType::UInt8, 2);
                data.bytes_mut().copy_from_slice(&[me as u8, number]);
                communicator.run(&Request::Send { data: data.view(), to: 0, tag: 9 }).unwrap();
            }
        }
    });
}

fn a_message_of_another_length_is_an_error(make: MakeTransports) {
    let job = job(make, 2, TIMEOUT);
    for (sent, expected) in [(10, 11), (400_000, 3), (3, 400_000)] {
        let outcomes = on_all(&job, |me, communicator| {
            let mut data = Memory::zeros(DType::UInt8, if me == 0 { sent } else { expected });
            communicator.run(&match me {
                0 => Request::Send { data: data.view(), to: 1, tag: 1 },
                _ => Request::Recv { data: data.view(), from: Some(0), tag: 1 },
            })
        });
        let text = outcomes[1].as_ref().unwrap_err().to_string();
        assert!(text.contains(&format!("rank 0 sends {sent} bytes, rank 1 receives {expected} bytes")), "{text}");
        // A large send is still under way when the difference is found.
        assert_eq!(outcomes[0].is_err(), sent > 300_000);
    }
}

macro_rules! contract {
    ($transport:ident, $scale:expr, $sizes:expr) => {
        mod $transport {
            const MAKE: super::MakeTransports = super::$transport;
            #[test]
            fn all_reduce_every_type() {
                super::all_reduce_every_type(MAKE);
            }
            #[test]
            fn all_reduce_every_size() {
                super::all_reduce_every_size(MAKE, &[2, 3, 4], $sizes);
            }
            #[test]
            fn every_exchange() {
                super::every_exchange(MAKE, $scale);
            }
            #[test]
            fn rows_of_unknown_number() {
                super::rows::rows_of_unknown_number(MAKE);
            }
            #[test]
            fn a_cancelled_send_is_withdrawn() {
                super::messages::a_cancelled_send_is_withdrawn(MAKE, 15 * $scale);
            }
            #[test]
            fn a_receive_whose_sender_has_left_can_be_cancelled() {
                super::messages::a_receive_whose_sender_has_left_can_be_cancelled(MAKE, 15 * $scale);
            }
            #[test]
            fn messages_that_nobody_receives_are_bounded() {
                super::messages::messages_that_nobody_receives_are_bounded(MAKE);
            }
            #[test]
            fn a_panic_in_a_completion_stops_the_group() {
                super::panics::a_panic_in_a_completion_stops_the_group(MAKE);
            }
            #[test]
            fn windows() {
                super::windows(MAKE);
            }
            #[test]
            fn batches() {
                super::batches::batches(MAKE);
            }
            #[test]
            fn batches_fail_as_one() {
                super::batches::batches_fail_as_one(MAKE);
            }
            #[test]
            fn random_programs() {
                super::random_programs(MAKE);
            }
            #[test]
            fn messages_do_not_block_each_other() {
                super::messages_do_not_block_each_other(MAKE);
            }
            #[test]
            fn a_message_of_another_length_is_an_error() {
                super::a_message_of_another_length_is_an_error(MAKE);
            }
            #[test]
            fn mismatches_are_told_to_all() {
                super::failures::mismatches_are_told_to_all(MAKE, &[2, 3, 5]);
            }
            #[test]
            fn failing_members_are_named() {
                super::failures::failing_members_are_named(MAKE);
            }
            #[test]
            fn monitored_barriers() {
                super::failures::monitored_barriers(MAKE);
            }
            #[test]
            fn departures_end_waits() {
                super::failures::departures_end_waits(MAKE);
            }
            #[test]
            fn a_death_during_a_reduction_leaves_no_message() {
                super::failures::a_death_during_a_reduction_leaves_no_message(MAKE);
            }
            #[test]
            fn timeouts_name_the_missing() {
                super::failures::timeouts_name_the_missing(MAKE);
            }
            #[test]
            fn closing_ends_waits() {
                super::failures::closing_ends_waits(MAKE);
            }
        }
    };
}

contract!(shm, 200_000, &[0, 1, 100, 8_191, 8_193, 40_000, 700_001, 2_500_000]);
contract!(mock, 2_000, &[0, 1, 100, 8_193]);
contract!(pairs, 200_000, &[0, 1, 100, 8_193, 700_001, 2_500_000]);
contract!(alternating, 20_000, &[0, 1, 100, 8_193, 700_001]);
contract!(alone, 20_000, &[0, 1, 100, 8_193, 700_001]);
contract!(tcp_pairs, 200_000, &[0, 1, 100, 8_193, 700_001, 2_500_000]);
contract!(tcp_alternating, 20_000, &[0, 1, 100, 8_193, 700_001]);
contract!(tcp_alone, 200_000, &[0, 1, 100, 8_193, 700_001, 2_500_000]);

/// As many hosts as send calls directly to each other, and more, which compare them in a tree.
#[test]
fn few_hosts_and_many() {
    all_reduce_every_size(tcp_alone, &[8, 9], &[0, 1, 100, 2_000, 40_000]);
    failures::mismatches_are_told_to_all(tcp_alone, &[8, 9]);
}
