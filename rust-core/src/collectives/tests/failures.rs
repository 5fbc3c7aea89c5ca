//! The contract of collectives that fail: every member gets an error that says why, and in time.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::ranks::*;
use crate::buffer::{DType, ReduceOp};
use crate::collectives::{Communicator, Request};
use crate::error::{Code, Error, Result};
use crate::transport::mock::{MockOptions, MockTransport};
use crate::world::{Departure, Monitor};

pub(super) fn mismatches_are_told_to_all(make: MakeTransports, group_sizes: &[usize]) {
    for &size in group_sizes {
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
            // The group continues.
            on_all(&job, |_, communicator| communicator.run(&Request::Barrier).unwrap());
        }
    }
}

pub(super) fn failing_members_are_named(make: MakeTransports) {
    let job = job(make, 3, TIMEOUT);
    for _ in 0..3 {
        let outcomes = on_all(&job, |me, communicator| {
            let mut data = Memory::zeros(DType::Float32, 10);
            if me == 1 {
                let (sender, receiver) = channel();
                let done = Box::new(move |result: Result<_>| sender.send(result).unwrap());
                communicator.fail_next("no gradient for `w`", done);
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
    // The failure of a rank of another group, of which only one member has heard so far.
    job.monitors[1].report(5, Departure::Died { detail: "killed by signal 9".into() });
    let outcomes = on_all(&job, |me, communicator| match me {
        1 => {
            communicator.fail_next("its step ended with an exception", Box::new(|_| {}));
            String::new()
        }
        _ => communicator.run(&Request::Barrier).unwrap_err().to_string(),
    });
    let text = "rank 1 failed (its step ended with an exception, after rank 5 died (killed by signal 9)) while rank 2";
    assert!(outcomes[2].starts_with(text), "{}", outcomes[2]);
}

/// Members that have arrived leave the barrier together; a missing member is named, and takes part in the next call.
pub(super) fn monitored_barriers(make: MakeTransports) {
    let job = job(make, 3, TIMEOUT);
    // Long enough for members that arrive at once, on a busy machine too.
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

pub(super) fn departures_end_waits(make: MakeTransports) {
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

/// A member is reported dead while a large reduction is under way, and goes on sending. The others name it, and nothing
/// writes to their tensors any more.
pub(super) fn a_death_during_a_reduction_leaves_no_message(make: MakeTransports) {
    // Of reductions in place and others. Some are complete before the report.
    let mut failures = [0, 0];
    for attempt in 0..60 {
        let (delay, in_place) = ([1, 3, 8, 2][attempt / 2 % 4], attempt % 2 == 0);
        if failures[usize::from(in_place)] > 2 {
            continue;
        }
        let job = job(make, 3, Duration::from_secs(60));
        let outcomes = on_all(&job, |me, communicator| {
            let mut input = Memory::zeros(DType::Float32, 4_000_000);
            let mut output = Memory::zeros(DType::Float32, if in_place { 0 } else { 4_000_000 });
            let view = input.view();
            let output_view = if in_place { view } else { output.view() };
            let request = Request::AllReduce { input: view, output: output_view, op: ReduceOp::Sum };
            if me == 2 {
                // It learns of nothing before the others have ended.
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(delay));
                        for monitor in &job.monitors[..2] {
                            monitor.report(2, Departure::Died { detail: "killed by signal 9".into() });
                        }
                        std::thread::sleep(Duration::from_millis(300));
                        job.monitors[2].report(0, Departure::Died { detail: "the test is over".into() });
                    });
                    let _ = communicator.run(&request);
                });
                return Ok(());
            }
            let outcome = communicator.run(&request);
            // Unlike any value that the others send.
            for memory in [&mut input, &mut output] {
                memory.bytes_mut().fill(0x5a);
            }
            std::thread::sleep(Duration::from_millis(100));
            for memory in [&input, &output] {
                assert!(memory.bytes().iter().all(|byte| *byte == 0x5a), "written after the end");
            }
            outcome
        });
        for outcome in outcomes[..2].iter().filter_map(|outcome| outcome.as_ref().err()) {
            assert!(outcome.to_string().starts_with("rank 2 died (killed by signal 9) while rank"), "{outcome}");
            failures[usize::from(in_place)] += 1;
        }
    }
    assert!(failures.iter().all(|failures| *failures > 0), "every reduction was faster than the report");
}

pub(super) fn timeouts_name_the_missing(make: MakeTransports) {
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

pub(super) fn closing_ends_waits(make: MakeTransports) {
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
        assert_eq!(error.to_string(), "no further operation runs: the test ends");
    }
    assert_eq!(communicator.run(&Request::Barrier).unwrap_err().code(), Code::Closed);
}

/// A rank that stops without a report is found by the timeout.
#[test]
fn a_lost_rank_times_out() {
    let net = MockTransport::net(2, MockOptions { seed: 1, max_delay: Duration::ZERO });
    net[1].disconnect();
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
