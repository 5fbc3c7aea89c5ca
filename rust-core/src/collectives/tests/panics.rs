//! COM-7: what panics on one member is an error on all of them, and no thread ends.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::ranks::*;
use crate::buffer::{DType, ReduceOp};
use crate::collectives::Request;
use crate::error::{Code, Error};

const TEXT: &str = "the callback of step 12 broke";

pub(super) fn a_panic_in_a_completion_stops_the_group(make: MakeTransports) {
    let job = job(make, 2, TIMEOUT);
    on_all(&job, |me, communicator| {
        let mut data = Memory::random(DType::Float32, 100, me as u64);
        let view = data.view();
        let request = || Request::AllReduce { input: view, output: view, op: ReduceOp::Max };
        let (sender, receiver) = channel();
        for number in 0..3 {
            let sender = sender.clone();
            let done = move |result| {
                sender.send((number, result)).expect("the test waits");
                assert!(me != 1 || number != 0, "{TEXT}");
            };
            communicator.submit(request(), Box::new(done));
        }
        let mut outcomes = Vec::new();
        while outcomes.len() < 3 {
            match receiver.recv_timeout(TIMEOUT) {
                Ok(outcome) => outcomes.push(outcome),
                Err(RecvTimeoutError::Timeout) => panic!("rank {me} waits for ever: {outcomes:?}"),
                Err(RecvTimeoutError::Disconnected) => panic!("rank {me}: a completion was forgotten: {outcomes:?}"),
            }
        }
        assert!(outcomes[0].1.is_ok(), "{outcomes:?}");
        let later = communicator.run(&request());
        for error in outcomes.into_iter().skip(1).map(|(_, result)| result.unwrap_err()).chain(later.err()) {
            let code = if me == 1 { Code::Internal } else { Code::PeerFailed };
            assert!(error.code() == code && error.to_string().contains(TEXT), "rank {me}: {error}");
        }
    });
}

/// A message's completion ends no thread either: messages that wait end with the panic's text.
#[test]
fn a_panic_in_the_completion_of_a_message_ends_those_that_wait() {
    let job = job(mock, 2, TIMEOUT);
    let communicator = &job.communicators[0];
    let mut data = Memory::zeros(DType::UInt8, 8);
    let view = data.view();
    let (sender, receiver) = channel();
    communicator.submit(
        Request::Recv { data: view, from: Some(1), tag: 9 },
        Box::new(move |result| sender.send(result).expect("the test waits")),
    );
    let mut own = Memory::zeros(DType::UInt8, 8);
    communicator.submit(Request::Send { data: own.view(), to: 1, tag: 3 }, Box::new(|_| panic!("{TEXT}")));
    let error = receiver.recv_timeout(Duration::from_secs(10)).expect("it ends").unwrap_err();
    assert!(matches!(&error, Error::Internal(text) if text.contains(TEXT)), "{error}");
    let error = communicator.run(&Request::Send { data: own.view(), to: 1, tag: 3 }).unwrap_err();
    assert!(error.to_string().contains(TEXT), "{error}");
}

/// A panic inside an operation: the group is broken, with the text.
#[test]
fn a_panic_in_an_operation_breaks_the_group_with_its_text() {
    struct Panics;
    impl super::super::PhaseListener for Panics {
        fn enters(&self, _: super::super::BatchPhase, _: &std::ops::Range<usize>) {
            panic!("{TEXT}");
        }
    }
    let job = job(mock, 1, TIMEOUT);
    let communicator = &job.communicators[0];
    let mut data = Memory::zeros(DType::Float32, 8);
    let view = data.view();
    let requests = vec![Request::AllReduce { input: view, output: view, op: ReduceOp::Sum }];
    let error = communicator.try_run_batch(&requests, Some(&Panics)).expect("it is idle").unwrap_err();
    assert!(error.code() == Code::Internal && error.to_string().contains(TEXT), "{error}");
    let error = communicator.run_batch(&requests, None).unwrap_err();
    assert!(error.code() == Code::Closed && error.to_string().contains(TEXT), "{error}");
}
