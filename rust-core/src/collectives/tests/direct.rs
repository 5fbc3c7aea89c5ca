//! Collectives in which members read each other's tensors: the results of other paths, and errors that name the culprit.

use super::ranks::*;
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::paths::{Path, PathChooser};
use crate::collectives::stores::StoreChooser;
use crate::collectives::{Communicator, Request};
use crate::error::Code;
use crate::world::{Departure, Monitor};

/// Members that take this path only.
fn members(size: usize, path: Path) -> TestGroup {
    let monitors: Vec<_> = (0..size).map(|rank| std::sync::Arc::new(Monitor::new(rank))).collect();
    let communicators = shm(size).into_iter().zip(&monitors).map(|(transport, monitor)| {
        assert!(
            transport.shared().is_some_and(|memory| memory.direct().is_some()),
            "a process can read its own memory"
        );
        let (stores, paths) = (StoreChooser::default(), PathChooser::only(path));
        Communicator::with_choosers(3, transport, monitor.clone(), TIMEOUT, stores, paths)
    });
    TestGroup { communicators: communicators.collect(), monitors: monitors.clone() }
}

/// The part of `memory` without its first `skipped` elements, so that it is aligned to an element only.
fn tail(memory: &mut Memory, skipped: usize) -> TensorView {
    memory.view().slice(skipped, memory.elems - skipped)
}

#[test]
#[cfg_attr(miri, ignore)]
fn direct_reads_have_the_results_of_the_reference() {
    for size in [2, 3, 4, 7] {
        let job = members(size, Path::Direct);
        // One part of a chunk, several chunks of all members, and lengths that fit neither.
        for (dtype, op, elems) in [
            (DType::Float32, ReduceOp::Sum, 16 << 10),
            (DType::BFloat16, ReduceOp::Average, 100_003),
            (DType::Float64, ReduceOp::Product, 1_250_001),
            (DType::UInt8, ReduceOp::Max, 9_000_007),
        ] {
            let inputs: Vec<_> = (0..size).map(|rank| Memory::random(dtype, elems, rank as u64)).collect();
            let expected = fold(dtype, op, &inputs);
            on_all(&job, |me, communicator| {
                let run = |request: Request| communicator.run(&request).unwrap();
                let mut input = inputs[me].clone();
                let mut output = Memory::zeros(dtype, elems);
                run(Request::AllReduce { input: input.view(), output: output.view(), op });
                assert!(output.bytes() == expected, "all_reduce {dtype} {size}");
                assert!(input.bytes() == inputs[me].bytes(), "the input stays as it is");
                run(Request::AllReduce { input: input.view(), output: input.view(), op });
                assert!(input.bytes() == expected, "all_reduce in place {dtype} {size}");

                let mut input = inputs[me].clone();
                let mut outputs = vec![Memory::zeros(dtype, elems); size];
                let mut places = views(&mut outputs);
                places[me] = input.view();
                run(Request::AllGather { input: input.view(), outputs: places });
                for (rank, output) in outputs.iter().enumerate().filter(|(rank, _)| *rank != me) {
                    assert!(output.bytes() == inputs[rank].bytes(), "all_gather {dtype} {size}");
                }

                let root = elems % size;
                let mut data = if me == root { inputs[root].clone() } else { Memory::zeros(dtype, elems) };
                run(Request::Broadcast { data: data.view(), root });
                assert!(data.bytes() == inputs[root].bytes(), "broadcast {dtype} {size}");
            });
        }
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn blocks_of_different_lengths_at_any_address() {
    let size = 3;
    let job = members(size, Path::Direct);
    let (dtype, op) = (DType::Float32, ReduceOp::Sum);
    // One of them is empty.
    let lengths = [300_000, 0, 70_001];
    let block = |from: usize, to: usize| Memory::random(dtype, 1 + lengths[to], (10 * from + to) as u64);
    let without_first = |memory: &Memory| memory.bytes()[dtype.size()..].to_vec();
    on_all(&job, |me, communicator| {
        let mut inputs: Vec<_> = (0..size).map(|to| block(me, to)).collect();
        let mut output = Memory::zeros(dtype, 1 + lengths[me]);
        let blocks = inputs.iter_mut().map(|input| tail(input, 1)).collect();
        communicator.run(&Request::ReduceScatter { inputs: blocks, output: tail(&mut output, 1), op }).unwrap();
        let of_all: Vec<_> = (0..size).map(|from| block(from, me)).collect();
        assert!(without_first(&output)[..] == fold(dtype, op, &of_all)[dtype.size()..]);

        let mut input = block(me, me);
        let mut outputs: Vec<_> = lengths.iter().map(|elems| Memory::zeros(dtype, 1 + elems)).collect();
        let places = outputs.iter_mut().map(|output| tail(output, 1)).collect();
        communicator.run(&Request::AllGather { input: tail(&mut input, 1), outputs: places }).unwrap();
        for (rank, output) in outputs.iter().enumerate() {
            assert!(without_first(output) == without_first(&block(rank, rank)));
        }
    });
}

#[test]
#[cfg_attr(miri, ignore)]
fn calls_that_differ_are_told_to_all_and_the_group_continues() {
    let job = members(3, Path::Direct);
    for _ in 0..3 {
        let codes = on_all(&job, |me, communicator| {
            let mut data = Memory::zeros(DType::Float32, if me == 1 { 500_000 } else { 400_000 });
            let (input, output) = (data.view(), data.view());
            communicator.run(&Request::AllReduce { input, output, op: ReduceOp::Sum }).unwrap_err().code()
        });
        assert_eq!(codes, vec![Code::Mismatch; 3]);
        on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
    }
}

/// Memory from `memfd_secret(2)`: its process can use it, but `process_vm_readv` fails there.
fn secret_memory(bytes: usize) -> Option<*mut u8> {
    // SAFETY: the calls take no memory of this process; the mapping is new, and stays until the process ends.
    unsafe {
        let fd = libc::syscall(libc::SYS_memfd_secret, 0);
        if fd < 0 || libc::ftruncate(fd as i32, bytes as i64) != 0 {
            return None;
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let start = libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, fd as i32, 0);
        (start != libc::MAP_FAILED).then_some(start.cast())
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_tensor_that_peers_cannot_read_goes_through_shared_memory() {
    let (size, elems) = (3, 100_000);
    let Some(secret) = secret_memory(4 * elems).map(|start| start as usize) else {
        eprintln!("skipped: this system has no `memfd_secret`");
        return;
    };
    let job = members(size, Path::Direct);
    let inputs: Vec<_> = (0..size).map(|rank| Memory::random(DType::Float32, elems, rank as u64)).collect();
    let expected = fold(DType::Float32, ReduceOp::Sum, &inputs);
    for _ in 0..3 {
        on_all(&job, |me, communicator| {
            let mut data = inputs[me].clone();
            let view = if me == 1 {
                // SAFETY: the mapping has as many bytes, and no other user.
                let view =
                    unsafe { TensorView::new(secret as *mut u8, elems, DType::Float32, Device::Cpu, 0) }.unwrap();
                // SAFETY: as above.
                unsafe { view.as_bytes_mut() }.copy_from_slice(inputs[me].bytes());
                view
            } else {
                data.view()
            };
            communicator.run(&Request::AllReduce { input: view, output: view, op: ReduceOp::Sum }).unwrap();
            // SAFETY: as above.
            assert!(unsafe { view.as_bytes() } == expected);
        });
    }
}

#[test]
#[cfg_attr(miri, ignore)]
fn values_of_a_member_that_failed_are_not_trusted() {
    let job = members(3, Path::Direct);
    on_all(&job, |me, communicator| {
        if me == 1 {
            // As after a deadline in the last wait of a call, in which others may still read.
            communicator.shared_memory().unwrap().withdraw(1);
        }
        let mut data = Memory::zeros(DType::Float32, 100_000);
        let (input, output) = (data.view(), data.view());
        let error = communicator.run(&Request::AllReduce { input, output, op: ReduceOp::Sum }).unwrap_err();
        assert_eq!(error.code(), Code::PeerFailed);
        assert!(error.to_string().starts_with("rank 1 failed, or could not be read"), "{error}");
    });
}

#[test]
#[cfg_attr(miri, ignore)]
fn a_member_that_dies_in_a_call_is_named() {
    let job = members(3, Path::Direct);
    on_all(&job, |me, communicator| {
        if me == 1 {
            std::thread::sleep(std::time::Duration::from_millis(50));
            for monitor in &job.monitors {
                monitor.report(1, Departure::Died { detail: "killed by signal 9".into() });
            }
            return;
        }
        let mut data = Memory::zeros(DType::Float32, 3_000_000);
        let (input, output) = (data.view(), data.view());
        let error = communicator.run(&Request::AllReduce { input, output, op: ReduceOp::Sum }).unwrap_err();
        assert_eq!(error.code(), Code::PeerFailed);
        assert!(error.to_string().starts_with("rank 1 "), "{error}");
    });
}
