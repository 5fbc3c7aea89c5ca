//! The contract of batches: several collectives that take one place in a group's order.

use std::sync::mpsc::channel;

use super::ranks::*;
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Request;

pub(super) fn batches(make: MakeTransports) {
    for size in [1, 2, 3] {
        let job = job(make, size, TIMEOUT);
        on_all(&job, |me, communicator| {
            let mut random = Random(size as u64);
            // For each collective: the buffers, and the expected result.
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

/// A member that cannot take part in a batch fails the whole batch, and all members are in step afterwards.
pub(super) fn batches_fail_as_one(make: MakeTransports) {
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
                (1, 2) => communicator.fail_next("it has no batch", done),
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
