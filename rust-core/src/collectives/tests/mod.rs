//! The contract of collectives, over every transport: threads are ranks, `reference` says what must come out.

mod messages;
mod panics;
mod ranks;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use self::ranks::*;
use super::{Communicator, MakeOutputs, ReduceOp, Request, kernels};
use crate::buffer::{DType, TensorView};
use crate::error::{Code, Error, Result};
use crate::transport::mock::{MockOptions, MockTransport};
use crate::world::{Departure, Monitor};

fn all_reduce_every_type(make: Make) {
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

fn all_reduce_every_size(make: Make, sizes: &[usize]) {
    for size in [2, 3, 4] {
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

fn every_exchange(make: Make, scale: usize) {
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

fn windows(make: Make) {
    for size in [1, 2, 3, 4] {
        let job = job(make, size, TIMEOUT);
        on_all(&job, |me, communicator| {
            let first = communicator.window(100_000).unwrap();
            let window = communicator.window(0x20000).unwrap();
            for (elems, dtype) in [(1, DType::Float32), (5000, DType::Float32), (77, DType::BFloat16), (0, DType::Int8)]
            {
                let inputs: Vec<_> = (0..size).map(|rank| Memory::random(dtype, elems, rank as u64)).collect();
                for window in [&first, &window] {
                    // Places differ between members.
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

/// A batch gives what its collectives give one by one, whichever of them travel together.
/// Memory that is made once its sizes are known.
#[derive(Debug)]
struct Late {
    row_elems: usize,
    blocks: parking_lot::Mutex<Vec<Memory>>,
}

impl Late {
    fn new(row_elems: usize) -> Arc<Self> {
        Arc::new(Self { row_elems, blocks: Default::default() })
    }
}

impl MakeOutputs for Late {
    fn make(&self, rows: &[usize]) -> Result<Vec<TensorView>> {
        if rows.iter().sum::<usize>() > 1_000_000 {
            return Err(Error::InvalidArgument("too much to take".into()));
        }
        let mut blocks = self.blocks.lock();
        *blocks = rows.iter().map(|rows| Memory::zeros(DType::Int16, rows * self.row_elems)).collect();
        Ok(views(&mut blocks))
    }
}

fn rows_of_unknown_number(make: Make) {
    for size in [1, 2, 3, 5] {
        let job = job(make, size, TIMEOUT);
        for round in 0..3 {
            let mut random = Random(round);
            // All the same in one round.
            let mut count = || if round == 1 { 4 } else { random.below(2_000) * usize::from(random.below(3) > 0) };
            let table: Vec<Vec<usize>> = (0..size).map(|_| (0..size).map(|_| 3 * count()).collect()).collect();
            let block = |from: usize, to: usize| {
                Memory::random(DType::Int16, table[from][to], (from * 100 + to) as u64 + round)
            };
            on_all(&job, |me, communicator| {
                let (outputs, mut input) = (Late::new(3), block(me, 0));
                let request = Request::AllGatherRows {
                    input: input.view(),
                    rows: input.elems / 3,
                    row_elems: 3,
                    outputs: outputs.clone(),
                };
                communicator.run(&request).unwrap();
                for (from, output) in outputs.blocks.lock().iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, 0).bytes(), "all_gather from {from} of {size}");
                }
                let mut inputs: Vec<_> = (0..size).map(|to| block(me, to)).collect();
                let rows = inputs.iter().map(|input| input.elems / 3).collect();
                let (inputs, outputs) = (views(&mut inputs), Late::new(3));
                communicator
                    .run(&Request::AllToAllRows { inputs, rows, row_elems: 3, outputs: outputs.clone() })
                    .unwrap();
                for (from, output) in outputs.blocks.lock().iter().enumerate() {
                    assert_eq!(output.bytes(), block(from, me).bytes(), "all_to_all from {from} of {size}");
                }
            });
        }
        let errors = on_all(&job, |me, communicator| {
            let mut input = Memory::zeros(DType::Int16, if me == 0 { 12 } else { 6 });
            let row_elems = if me + 1 == size { 3 } else { 2 };
            let (rows, outputs) = (input.elems / row_elems, Late::new(row_elems));
            communicator.run(&Request::AllGatherRows { input: input.view(), rows, row_elems, outputs }).map_err(
                |error| {
                    assert_eq!(error.code(), Code::Mismatch);
                    error.to_string()
                },
            )
        });
        let text = format!(
            "rank 0 called all_gather of rows of 2 int16, rank {} called all_gather of rows of 3 int16",
            size - 1
        );
        assert!(errors.iter().all(|error| size == 1 || error.as_ref().is_err_and(|error| error.ends_with(&text))));
        // One member cannot take what it gets; the others hear of that.
        let errors = on_all(&job, |me, communicator| {
            let mut inputs: Vec<_> =
                (0..size).map(|to| Memory::zeros(DType::Int16, if to == 0 { 1_000_001 } else { 1 })).collect();
            let rows = inputs.iter().map(|input| input.elems).collect();
            let (inputs, outputs) = (views(&mut inputs), Late::new(1));
            let error = communicator.run(&Request::AllToAllRows { inputs, rows, row_elems: 1, outputs }).unwrap_err();
            assert_eq!(error.code(), if me == 0 { Code::InvalidArgument } else { Code::PeerFailed });
            error.to_string()
        });
        assert!(errors.iter().all(|error| error.contains("too much to take")), "{errors:?}");
        on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
    }
}

fn batches(make: Make) {
    for size in [1, 2, 3] {
        let job = job(make, size, TIMEOUT);
        on_all(&job, |me, communicator| {
            let mut random = Random(size as u64);
            // Per collective: what it works on, and what must come out.
            let mut requests = Vec::new();
            let mut kept: Vec<(Vec<Memory>, Vec<Vec<u8>>)> = Vec::new();
            for step in 0..60 {
                let dtype = [DType::Float32, DType::Float16][step / 20 % 2];
                let elems = random.below(if step % 7 == 0 { 20_000 } else { 300 });
                let block = |from: usize, to: usize| Memory::random(dtype, elems, (step * 100 + from * 10 + to) as u64);
                let inputs: Vec<_> = (0..size).map(|rank| block(rank, 0)).collect();
                let (mut own, op) = (inputs[me].clone(), ReduceOp::Average);
                let (request, outputs, expected) = match step % 20 / 4 {
                    0 | 1 => {
                        // In place and not.
                        let mut output = Memory::zeros(dtype, elems);
                        let (input, other) = (own.view(), output.view());
                        let at = if step % 2 == 0 { input } else { other };
                        let result = if step % 2 == 0 { vec![own, output] } else { vec![output, own] };
                        (Request::AllReduce { input, output: at, op }, result, vec![fold(dtype, op, &inputs)])
                    }
                    2 => {
                        let root = step % size;
                        (Request::Broadcast { data: own.view(), root }, vec![own], vec![inputs[root].bytes().into()])
                    }
                    3 => {
                        let mut outputs = vec![Memory::zeros(dtype, elems); size];
                        let request = Request::AllGather { input: own.view(), outputs: views(&mut outputs) };
                        outputs.push(own);
                        (request, outputs, inputs.iter().map(|input| input.bytes().into()).collect())
                    }
                    _ => {
                        let mut blocks: Vec<_> = (0..size).map(|to| block(me, to)).collect();
                        let mut output = Memory::zeros(dtype, elems);
                        let request = Request::ReduceScatter { inputs: views(&mut blocks), output: output.view(), op };
                        let parts: Vec<_> = (0..size).map(|from| block(from, me)).collect();
                        blocks.insert(0, output);
                        (request, blocks, vec![fold(dtype, op, &parts)])
                    }
                };
                requests.push(request);
                kept.push((outputs, expected));
            }
            communicator.run_batch(&requests, None).unwrap();
            for (step, (outputs, expected)) in kept.iter().enumerate() {
                for (output, expected) in outputs.iter().zip(expected) {
                    assert_eq!(output.bytes(), expected, "collective {step} of the batch, {size} ranks");
                }
            }
        });
    }
}

/// Whoever cannot take part in a batch fails it as a whole, and all are in step afterwards.
fn batches_fail_as_one(make: Make) {
    let job = job(make, 3, TIMEOUT);
    on_all(&job, |me, communicator| {
        let mut data = Memory::zeros(DType::Float32, 10);
        let view = data.view();
        let sum = |elems| {
            let data = view.slice(0, elems);
            Request::AllReduce { input: data, output: data, op: ReduceOp::Sum }
        };
        for round in 0..3 {
            // In the middle, one that differs; then one that never was.
            let other = if (round, me) == (0, 1) { 7 } else { 8 };
            let requests = vec![sum(9), Request::Barrier, sum(other), sum(5), Request::Barrier, sum(4)];
            let (sender, receiver) = channel();
            let done = Box::new(move |result| sender.send(result).unwrap());
            match (round, me) {
                (1, 2) => communicator.fail_next("it has no batch".into(), done),
                _ => communicator.submit_batch(requests, None, done),
            }
            let outcome = receiver.recv_timeout(TIMEOUT).unwrap();
            let text = outcome.map_or_else(|error| error.to_string(), |_| "fine".into());
            match (round, me) {
                (0, _) => assert!(text.contains("(2 packed into one): ranks disagree: rank 0 called all_reduce(sum) of 13 float32, rank 1 called all_reduce(sum) of 12"), "{text}"),
                (1, 0 | 1) => assert!(text.starts_with("rank 2 failed (it has no batch)"), "{text}"),
                _ => assert_eq!(text, "fine"),
            }
        }
        communicator.run(&Request::Barrier).unwrap();
    });
}

/// Programs of random collectives, blocking and queued, are the same on all ranks and end.
fn random_programs(make: Make) {
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

fn messages_do_not_block_each_other(make: Make) {
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
        // From anybody; equal tags stay in order.
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

fn a_message_of_another_length_is_an_error(make: Make) {
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

fn mismatches_are_told_to_all(make: Make) {
    for size in [2, 3, 5] {
        let job = job(make, size, TIMEOUT);
        for _ in 0..3 {
            let texts = on_all(&job, |me, communicator| {
                let mut data = Memory::zeros(DType::Float32, if me == 1 { 500_000 } else { 10 });
                let view = data.view();
                let request = Request::AllReduce { input: view, output: view, op: ReduceOp::Sum };
                let error = communicator.run(&request).unwrap_err();
                assert_eq!(error.code(), Code::Mismatch);
                error.to_string()
            });
            let expected = "ranks disagree: rank 0 called all_reduce(sum) of 10 float32, \
                            rank 1 called all_reduce(sum) of 500000 float32";
            assert!(texts.iter().all(|text| text == &texts[0] && text.ends_with(expected)), "{texts:?}");
            // Another operation on one rank.
            let codes = on_all(&job, |me, communicator| {
                let mut data = Memory::zeros(DType::Float32, 10);
                let mut outputs: Vec<_> = (0..size).map(|_| Memory::zeros(DType::Float32, 10)).collect();
                let request = match me {
                    0 => Request::AllGather { input: data.view(), outputs: views(&mut outputs) },
                    _ => Request::Broadcast { data: data.view(), root: 0 },
                };
                communicator.run(&request).unwrap_err().code()
            });
            assert_eq!(codes, vec![Code::Mismatch; size]);
            // The group goes on.
            on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
        }
    }
}

fn failing_members_are_named(make: Make) {
    let job = job(make, 3, TIMEOUT);
    for _ in 0..3 {
        let outcomes = on_all(&job, |me, communicator| {
            let mut data = Memory::zeros(DType::Float32, 10);
            if me == 1 {
                let (sender, receiver) = channel();
                let done = Box::new(move |result: Result<_>| sender.send(result).unwrap());
                communicator.fail_next("no gradient for `w`".into(), done);
                return receiver.recv_timeout(TIMEOUT).unwrap().map(|_| String::new());
            }
            let error = communicator.run(&Request::Broadcast { data: data.view(), root: 0 }).unwrap_err();
            assert_eq!(error.code(), Code::PeerFailed);
            Ok(error.to_string())
        });
        let text =
            "rank 1 failed (no gradient for `w`) while rank 2 was in broadcast of 10 float32 from rank 0 of the group";
        assert_eq!(outcomes[2].as_ref().unwrap(), text);
        // A call that may not be made counts as such a failure.
        let outcomes = on_all(&job, |me, communicator| {
            let mut data = Memory::zeros(DType::Complex64, 10);
            let view = data.view();
            let op = if me == 2 { ReduceOp::Min } else { ReduceOp::Sum };
            communicator.run(&Request::AllReduce { input: view, output: view, op }).unwrap_err()
        });
        assert_eq!(outcomes[2].code(), Code::Unsupported);
        assert!(outcomes[0].to_string().starts_with("rank 2 failed (all_reduce: complex64 values have no order"));
    }
    on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
}

/// Those who came pass together; who did not come is named, and hears the next call.
fn monitored_barriers(make: Make) {
    let job = job(make, 3, TIMEOUT);
    // Long enough for whoever comes at once, on a busy machine too.
    let short = Some(Duration::from_secs(1));
    on_all(&job, |me, communicator| {
        for round in 0..20 {
            communicator.monitored_barrier(None, round % 2 == 0).unwrap();
        }
        communicator.run(&Request::Barrier).unwrap();
        for all in [false, true, false] {
            let outcome = if me == 2 { Ok(()) } else { communicator.monitored_barrier(short, all) };
            communicator.run(&Request::Barrier).unwrap();
            match outcome {
                Ok(()) => assert_eq!(me, 2),
                Err(Error::Timeout { during, .. }) if me == 0 => {
                    let expected = "Rank 0 timed out in monitoredBarrier: Rank 2 failed to pass monitoredBarrier";
                    assert!(during.starts_with(expected), "{during}");
                }
                Err(error) => assert!(error.to_string().starts_with("Rank 1 successfully reached"), "{error}"),
            }
        }
        communicator.monitored_barrier(None, true).unwrap();
        communicator.monitored_barrier(None, true).unwrap();
    });
}

fn departures_end_waits(make: Make) {
    let job = job(make, 3, Duration::from_secs(60));
    let start = Instant::now();
    let outcomes = on_all(&job, |me, communicator| {
        let mut data = Memory::zeros(DType::Float32, 10);
        match me {
            0 => communicator.run(&Request::Barrier),
            1 => communicator.run(&Request::Recv { data: data.view(), from: Some(2), tag: 0 }),
            _ => {
                std::thread::sleep(Duration::from_millis(100));
                for monitor in &job.monitors {
                    monitor.report(2, Departure::Died { detail: "killed by signal 9".into() });
                }
                Ok(())
            }
        }
    });
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    for outcome in &outcomes[..2] {
        let text = outcome.as_ref().unwrap_err().to_string();
        assert!(text.starts_with("rank 2 died (killed by signal 9) while rank"), "{text}");
    }
    // Later operations fail at once.
    let error = job.communicators[0].run(&Request::Barrier).unwrap_err();
    assert!(error.to_string().starts_with("rank 2 died"), "{error}");
}

fn timeouts_name_the_missing(make: Make) {
    let job = job(make, 3, Duration::from_millis(300));
    let outcomes = on_all(&job, |me, communicator| match me {
        1 => Ok(()),
        _ => communicator.run(&Request::Barrier),
    });
    match outcomes[0].as_ref().unwrap_err() {
        Error::Timeout { during, missing, .. } => {
            assert_eq!(during, "barrier");
            assert!(missing.contains(&1), "{missing:?}");
        }
        other => panic!("{other}"),
    }
}

fn closing_ends_waits(make: Make) {
    let job = job(make, 2, TIMEOUT);
    let communicator = &job.communicators[0];
    let (sender, receiver) = channel();
    let mut data = Memory::zeros(DType::Float32, 10);
    for request in [Request::Barrier, Request::Barrier, Request::Recv { data: data.view(), from: Some(1), tag: 0 }] {
        let sender = sender.clone();
        communicator.submit(request, Box::new(move |result| sender.send(result).unwrap()));
    }
    std::thread::sleep(Duration::from_millis(20));
    communicator.close("the test ends");
    for _ in 0..3 {
        let error = receiver.recv_timeout(Duration::from_secs(10)).unwrap().unwrap_err();
        assert_eq!(error.to_string(), "the session is closed: the test ends");
    }
    assert_eq!(communicator.run(&Request::Barrier).unwrap_err().code(), Code::Closed);
}

macro_rules! contract {
    ($transport:ident, $scale:expr, $sizes:expr) => {
        mod $transport {
            const MAKE: super::Make = super::$transport;
            #[test]
            fn all_reduce_every_type() {
                super::all_reduce_every_type(MAKE);
            }
            #[test]
            fn all_reduce_every_size() {
                super::all_reduce_every_size(MAKE, $sizes);
            }
            #[test]
            fn every_exchange() {
                super::every_exchange(MAKE, $scale);
            }
            #[test]
            fn rows_of_unknown_number() {
                super::rows_of_unknown_number(MAKE);
            }
            #[test]
            fn a_cancelled_send_is_withdrawn() {
                super::messages::a_cancelled_send_is_withdrawn(MAKE, 15 * $scale);
            }
            #[test]
            fn messages_that_nobody_receives_are_bounded() {
                super::messages::messages_that_nobody_receives_are_bounded(MAKE);
            }
            #[test]
            fn a_panic_in_a_completion_spoils_the_group() {
                super::panics::a_panic_in_a_completion_spoils_the_group(MAKE);
            }
            #[test]
            fn windows() {
                super::windows(MAKE);
            }
            #[test]
            fn batches() {
                super::batches(MAKE);
            }
            #[test]
            fn batches_fail_as_one() {
                super::batches_fail_as_one(MAKE);
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
                super::mismatches_are_told_to_all(MAKE);
            }
            #[test]
            fn failing_members_are_named() {
                super::failing_members_are_named(MAKE);
            }
            #[test]
            fn monitored_barriers() {
                super::monitored_barriers(MAKE);
            }
            #[test]
            fn departures_end_waits() {
                super::departures_end_waits(MAKE);
            }
            #[test]
            fn timeouts_name_the_missing() {
                super::timeouts_name_the_missing(MAKE);
            }
            #[test]
            fn closing_ends_waits() {
                super::closing_ends_waits(MAKE);
            }
        }
    };
}

contract!(shm, 200_000, &[0, 1, 100, 8_191, 8_193, 40_000, 700_001, 2_500_000]);
contract!(mock, 2_000, &[0, 1, 100, 8_193]);
contract!(pairs, 200_000, &[0, 1, 100, 8_193, 700_001, 2_500_000]);
contract!(dealt, 20_000, &[0, 1, 100, 8_193, 700_001]);
contract!(tcp_pairs, 200_000, &[0, 1, 100, 8_193, 700_001, 2_500_000]);
contract!(tcp_dealt, 20_000, &[0, 1, 100, 8_193, 700_001]);

/// A rank that vanished without a word is found by the timeout.
#[test]
fn a_lost_rank_times_out() {
    let net = MockTransport::net(2, MockOptions { seed: 1, max_delay: Duration::ZERO });
    net[1].lose();
    let timeout = Duration::from_millis(200);
    let communicator = Communicator::new(0, net[0].clone(), Arc::new(Monitor::new(0)), timeout);
    let error = communicator.run(&Request::Barrier).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no sign of rank(s) [1] before the timeout passed; to wait longer, set `SMD_TIMEOUT_SECONDS`"),
        "{error}"
    );
}
