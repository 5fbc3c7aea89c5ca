//! The reducer over the mock transport and over shared memory: threads are ranks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::arrival::{ArrivalDriver, Execution, GradientOwner, ReadyGradient};
use super::fingerprint::{ReducerDescription, view};
use super::{ParamSpec, Reducer, ReducerOptions, SlotLease};
use crate::buffer::{DType, Device, TensorView};
use crate::collectives::{Communicator, Request};
use crate::error::{Code, Error, Result};
use crate::transport::mock::{MockOptions, MockTransport};
use crate::transport::{Members, ShmTransport, Transport};
use crate::world::{LocalStore, Monitor};

const TIMEOUT: Duration = Duration::from_secs(20);
const ELEMS: usize = 50;
const PARAMS: usize = 9;

/// Runs `rank` as every member, over each transport, and passes the results to `check`.
fn over_each_transport<T: Send>(
    size: usize,
    rank: impl Fn(usize, Arc<Communicator>) -> T + Sync,
    check: impl Fn(Vec<T>),
) {
    let store = LocalStore::default();
    let net = MockTransport::net(size, MockOptions { seed: 1, max_delay: Duration::from_micros(30) });
    for shared in [true, false] {
        let returned = std::thread::scope(|scope| {
            let spawn = |me: usize| {
                let (store, rank, mock) = (&store, &rank, net[me].clone());
                scope.spawn(move || {
                    let monitor = Arc::new(Monitor::new(me));
                    let transport: Arc<dyn Transport> = if shared {
                        let members = Members { ranks: (0..size).collect(), me };
                        ShmTransport::join("reducer", members, store, &monitor, TIMEOUT).expect("joining works")
                    } else {
                        mock
                    };
                    rank(me, Communicator::new(7, transport, monitor, TIMEOUT))
                })
            };
            let threads: Vec<_> = (0..size).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        check(returned);
    }
}

fn params() -> Vec<ParamSpec> {
    (0..PARAMS).map(|i| ParamSpec::dense(format!("p{i}"), [ELEMS as u64], DType::Float32)).collect()
}

/// Buckets of two parameters.
fn options() -> ReducerOptions {
    ReducerOptions { bucket_bytes: vec![512], ..ReducerOptions::default() }
}

/// Runs one backward with the gradients of `order`, each `value(param)`; those of `outside` are not in their slots.
/// Returns the first element of every gradient.
fn backward(
    reducer: &Arc<Reducer>,
    order: &[usize],
    outside: &[usize],
    value: impl Fn(usize) -> f32,
) -> Result<Vec<f32>> {
    assert!(reducer.begin(true)?);
    let mut leases = Vec::new();
    let mut others: Vec<(usize, Vec<f32>)> = outside.iter().map(|&param| (param, vec![value(param); ELEMS])).collect();
    for &param in order {
        let gradient = [value(param); ELEMS];
        let ptr = match others.iter_mut().find(|(other, _)| *other == param) {
            Some((_, gradient)) => gradient.as_mut_ptr().cast(),
            None => {
                let mut lease = reducer.take_slot(param).expect("the last step's leases are gone");
                // SAFETY: the vector is as long as the slot.
                unsafe { lease.fill(gradient.as_ptr().cast()) };
                let ptr = lease.ptr();
                leases.push((param, lease));
                ptr
            }
        };
        // SAFETY: leases and vectors live until `finish` has returned.
        if let Err(error) = unsafe { reducer.mark_ready(param, ptr, true) } {
            // The step failed during this backward; its caller ends it here.
            reducer.abandon("not reported: the step has ended", false);
            return Err(error);
        }
    }
    reducer.unused_parameters(&[])?;
    reducer.finish()?;
    let mut reduced = vec![f32::NAN; PARAMS];
    for (param, lease) in &leases {
        // SAFETY: the lease keeps the slot, which holds `ELEMS` floats.
        reduced[*param] = unsafe { *lease.ptr().cast::<f32>() };
    }
    for (param, gradient) in others {
        assert!(gradient.iter().all(|&value| value == gradient[0]));
        reduced[param] = gradient[0];
    }
    Ok(reduced)
}

fn value(rank: usize, param: usize) -> f32 {
    (10 * param + rank) as f32
}

#[test]
fn gradients_are_averaged_in_their_slots_and_elsewhere_in_any_order() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options()).unwrap();
        let reversed: Vec<usize> = (0..PARAMS).rev().collect();
        // Rank 0's order becomes the plan's order; the other ranks' orders differ.
        let mut other = reversed.clone();
        other.rotate_left(2 * me);
        let mut steps = Vec::new();
        for outside in [vec![], vec![3], vec![], vec![0, 1, 8]] {
            steps.push(backward(&reducer, &other, &outside, |param| value(me, param)).unwrap());
        }
        (steps, super::plan::describe(&reducer.plan(), reducer.params()))
    };
    over_each_transport(3, rank, |returned| {
        for (steps, plan) in &returned {
            assert_eq!(*plan, returned[0].1, "RED-5");
            for step in steps {
                for (param, &reduced) in step.iter().enumerate() {
                    assert_eq!(reduced, value(1, param), "the mean of ranks 0, 1 and 2");
                }
            }
        }
    });
}

#[test]
fn a_round_reduces_nothing_before_all_take_part_and_ends_when_its_caller_says_so() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options()).unwrap();
        let mut gradients: Vec<Vec<f32>> = (0..PARAMS).map(|param| vec![value(me, param); ELEMS]).collect();
        let mut mark = |from: usize, to: usize| {
            for (param, gradient) in gradients.iter_mut().enumerate().take(to).skip(from) {
                // SAFETY: the vectors outlive the rounds.
                unsafe { reducer.mark_ready(param, gradient.as_mut_ptr().cast(), true) }.unwrap();
            }
        };
        // The round does not take place: gradients keep their values, and the next round may begin.
        let round = reducer.begin_held(None).unwrap();
        assert_eq!(reducer.begin_held(None).unwrap_err().code(), Code::InvalidArgument);
        mark(0, 4);
        reducer.cancel(round);
        mark(4, PARAMS);
        reducer.abandon("not reported: no member takes part", false);
        let round = reducer.begin_held(None).unwrap();
        reducer.release(round - 1);
        mark(0, 4);
        reducer.release(round);
        mark(4, PARAMS);
        reducer.finish().unwrap();
        let firsts = gradients.iter().map(|gradient| gradient[0]).collect::<Vec<_>>();
        // One rank gives up before the result of the vote is known.
        let round = reducer.begin_held(None).unwrap();
        let outcome = if me == 1 {
            reducer.abandon("rank 1 had enough", true);
            reducer.release(round);
            Ok(None)
        } else {
            reducer.release(round);
            for (param, gradient) in gradients.iter_mut().enumerate() {
                // SAFETY: as above.
                unsafe { reducer.mark_ready(param, gradient.as_mut_ptr().cast(), true) }?;
            }
            reducer.finish()
        };
        reducer.await_step().unwrap();
        Ok::<_, Error>((firsts, outcome.map(drop)))
    };
    over_each_transport(3, rank, |returned| {
        for (me, returned) in returned.into_iter().enumerate() {
            let (firsts, outcome) = match returned {
                Ok(returned) => returned,
                Err(error) => {
                    assert!(error.to_string().contains("rank 1 had enough"), "{error}");
                    continue;
                }
            };
            let means: Vec<f32> = (0..PARAMS).map(|param| value(1, param)).collect();
            assert_eq!(firsts, means, "the mean of ranks 0, 1 and 2");
            match outcome {
                Ok(()) => assert_eq!(me, 1),
                Err(error) => assert!(error.to_string().contains("rank 1 had enough"), "{error}"),
            }
        }
    });
}

#[test]
fn a_gradient_that_outlives_its_step_leaves_the_other_slot_to_the_next_one() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options()).unwrap();
        let read = |lease: &SlotLease| {
            // SAFETY: the slot holds floats, and the lease keeps it.
            unsafe { *lease.ptr().cast::<f32>() }
        };
        let mut held: Vec<SlotLease> = Vec::new();
        for step in 0..5 {
            assert!(reducer.begin(true).unwrap());
            let mut leases = Vec::new();
            for param in (0..PARAMS).rev() {
                let gradient = [value(me, param) + step as f32; ELEMS];
                let mut lease = reducer.take_slot(param).expect("there are two, and one tensor at most is kept");
                // SAFETY: the array is as long as the slot.
                unsafe { lease.fill(gradient.as_ptr().cast()) };
                // SAFETY: the lease lives until `finish` has returned.
                unsafe { reducer.mark_ready(param, lease.ptr(), true) }.unwrap();
                leases.push(lease);
            }
            reducer.finish().unwrap();
            let before = (step > 0).then(|| held.iter().map(read).collect::<Vec<_>>());
            for (param, lease) in (0..PARAMS).rev().zip(&leases) {
                assert_eq!(read(lease), value(1, param) + step as f32, "the mean of ranks 0, 1 and 2");
            }
            for value in before.into_iter().flatten() {
                assert_eq!(value.fract(), 0.0);
                assert_eq!(value as usize % 10, 1 + step - 1, "as the step before left it");
            }
            // Rank 0 keeps all slots, so that its buckets change to the other set as a whole; rank 1 keeps none; rank
            // 2 some, so that its buckets use the spare range.
            let keeps = |(at, lease)| (me == 0 || (me == 2 && at % 2 == 0)).then_some(lease);
            held = leases.into_iter().enumerate().filter_map(keeps).collect();
        }
        // Both slots of the parameters whose gradients are kept twice are in use.
        let kept = reducer.take_slot(PARAMS - 1);
        let more = reducer.take_slot(PARAMS - 1);
        assert_eq!((kept.is_some(), more.is_some()), (true, me == 1));
        assert!(reducer.take_slot(PARAMS - 1).is_none());
    };
    over_each_transport(3, rank, drop);
}

#[test]
fn a_missing_gradient_is_an_error_on_every_rank_and_the_next_step_works() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options()).unwrap();
        let order: Vec<usize> = (0..PARAMS).rev().collect();
        let mut outcomes = Vec::new();
        for step in 0..4 {
            let have = if me == 1 && step % 2 == 0 { &order[..5] } else { &order[..] };
            outcomes.push(backward(&reducer, have, &[], |param| value(me, param)));
        }
        outcomes
    };
    over_each_transport(3, rank, |returned| {
        for (me, outcomes) in returned.iter().enumerate() {
            for step in [0, 2] {
                let error = outcomes[step].as_ref().unwrap_err();
                let text = error.to_string();
                assert!(text.contains("`p0`, `p1`, `p2`, `p3`") && text.contains("on rank 1"), "{text}");
                assert_eq!(error.code(), if me == 1 { Code::InvalidArgument } else { Code::PeerFailed });
                assert!(outcomes[step + 1].is_ok(), "{:?}", outcomes[step + 1]);
            }
        }
    });
}

#[test]
fn a_backward_abandoned_after_its_last_gradient_leaves_nothing_behind() {
    // With one bucket, it is in flight when the backward is abandoned; with several, the last one may still be
    // queued.
    let rank = |options: ReducerOptions, me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options).unwrap();
        let order: Vec<usize> = (0..PARAMS).rev().collect();
        // With this option, no operation follows a step's last bucket.
        backward(&reducer, &order, &[], |param| value(me, param)).unwrap();
        for _ in 0..50 {
            if me == 0 {
                assert!(reducer.begin(true).unwrap());
                let leases: Vec<_> = order.iter().map(|&param| reducer.take_slot(param).unwrap()).collect();
                for &param in &order {
                    // SAFETY: the leases live until `abandon` has returned.
                    unsafe { reducer.mark_ready(param, reducer.arena().expect("on a CPU").slot_ptr(param, 0), true) }
                        .unwrap();
                }
                reducer.abandon("it raised", false);
                drop(leases);
            } else if let Err(error) = backward(&reducer, &order, &[], |param| value(me, param)) {
                assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
            }
            let whole = backward(&reducer, &order, &[], |param| value(me, param)).unwrap();
            assert_eq!(whole[4], 40.5);
        }
    };
    over_each_transport(2, |me, communicator| rank(ReducerOptions::default(), me, communicator), drop);
    over_each_transport(2, |me, communicator| rank(options(), me, communicator), drop);
}

#[test]
fn a_backward_fails_on_all_ranks_if_a_reducer_was_given_up_before_its_end() {
    // As `finish` does when a signal interrupts it, with the caller's message.
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator.clone(), params(), options()).unwrap();
        let order: Vec<usize> = (0..PARAMS).rev().collect();
        backward(&reducer, &order, &[], |param| value(me, param)).unwrap();
        for _ in 0..20 {
            let mut buffer = [me as u8];
            let data = view(&mut buffer).unwrap();
            if me == 0 {
                assert!(reducer.begin(true).unwrap());
                let leases: Vec<_> = order.iter().map(|&param| reducer.take_slot(param).unwrap()).collect();
                for &param in &order {
                    // SAFETY: the leases live until the step has ended.
                    unsafe { reducer.mark_ready(param, reducer.arena().expect("on a CPU").slot_ptr(param, 0), true) }
                        .unwrap();
                }
                reducer.abandon("it was interrupted", false);
                reducer.abandon("its backward ended with an exception", true);
                drop(leases);
            } else {
                let outcome = backward(&reducer, &order, &[], |param| value(me, param))
                    .and_then(|_| communicator.run(&Request::Broadcast { data, root: 0 }));
                let error = outcome.unwrap_err();
                assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
                assert!(error.to_string().contains("it was interrupted"), "{error}");
            }
            let whole = backward(&reducer, &order, &[], |param| value(me, param)).unwrap();
            assert_eq!(whole[4], 40.5);
        }
    };
    over_each_transport(2, rank, drop);
}

#[test]
fn an_abandoned_backward_reaches_the_others_wherever_it_ended() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let reducer = Reducer::new(communicator, params(), options()).unwrap();
        let order: Vec<usize> = (0..PARAMS).rev().collect();
        let mut outcomes = Vec::new();
        for ready in 0..PARAMS {
            if me == 0 {
                assert!(reducer.begin(true).unwrap());
                let mut leases = Vec::new();
                let mut result = Ok(());
                for &param in &order[..ready] {
                    leases.extend(reducer.take_slot(param));
                    // SAFETY: the leases live until `abandon` has returned.
                    result = result.and(
                        unsafe {
                            reducer.mark_ready(param, reducer.arena().expect("on a CPU").slot_ptr(param, 0), true)
                        }
                        .map(drop),
                    );
                }
                reducer.abandon("it raised", false);
                outcomes.push(result.map(|()| Vec::new()));
            } else {
                outcomes.push(backward(&reducer, &order, &[], |param| value(me, param)));
            }
        }
        outcomes.push(backward(&reducer, &order, &[], |param| value(me, param)));
        outcomes
    };
    over_each_transport(2, rank, |mut returned| {
        for outcomes in &mut returned {
            assert_eq!(outcomes.pop().unwrap().unwrap()[4], 40.5, "the step after them is whole");
        }
        for outcome in &returned[1] {
            let error = outcome.as_ref().unwrap_err();
            assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
            assert!(error.to_string().contains("it raised"), "{error}");
        }
    });
}

/// An operation of a graph that submits one gradient.
struct GradientOp {
    param: usize,
    /// The gradient's memory, if it is not in its slot.
    outside: Vec<f32>,
    answers: Sender<(usize, Result<f32>)>,
}

impl GradientOwner for GradientOp {
    fn reduced(&self, _position: usize, result: Result<Option<SlotLease>>) {
        let value = result.map(|lease| match lease {
            // SAFETY: the slot holds `ELEMS` floats.
            Some(lease) => unsafe { *lease.ptr().cast::<f32>() },
            None => self.outside[0],
        });
        self.answers.send((self.param, value)).expect("the rank waits for its answers");
    }

    fn allocate(&self, _position: usize, _bytes: usize) -> Result<*mut u8> {
        unreachable!("the gradients are in CPU memory")
    }

    fn release(&self) {}
}

fn execution(step: i64) -> Execution {
    Execution { step, frame: 0, iteration: 0 }
}

fn give(arrivals: &Arc<ArrivalDriver>, step: i64, param: usize, value: f32, answers: &Sender<(usize, Result<f32>)>) {
    let mut given = GradientOp { param, outside: vec![value; ELEMS], answers: answers.clone() };
    let mut ptr = given.outside.as_mut_ptr().cast();
    let mut lease = arrivals.take_slot(param);
    if let Some(lease) = &mut lease {
        // SAFETY: the vector is as long as the slot.
        unsafe { lease.fill(ptr) };
        ptr = lease.ptr();
    }
    let owner = Arc::new(given);
    // SAFETY: the owner, which has the vector, lives until it is answered.
    let data = unsafe { TensorView::new(ptr, ELEMS, DType::Float32, Device::Cpu, 0) }.unwrap();
    // SAFETY: as above.
    unsafe { arrivals.arrive(ReadyGradient { param, data, lease, execution: execution(step), owner, position: 0 }) };
}

fn answered(answers: &Receiver<(usize, Result<f32>)>, count: usize) -> Vec<(usize, Result<f32>)> {
    let mut got: Vec<_> =
        (0..count).map(|_| answers.recv_timeout(TIMEOUT).expect("every gradient is answered")).collect();
    got.sort_by_key(|(param, _)| *param);
    got
}

#[test]
fn gradients_that_arrive_are_answered_and_later_steps_wait() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let arrivals = ArrivalDriver::new(&ReducerDescription { params: params(), options: options() });
        let (sender, answers) = channel();
        // Two steps before the reducer is created, interleaved.
        for param in 0..PARAMS {
            give(&arrivals, 1, param, value(me, param), &sender);
            give(&arrivals, 2, PARAMS - 1 - param, value(me, PARAMS - 1 - param), &sender);
        }
        arrivals.made(Reducer::new(communicator, params(), options()));
        let mut steps = vec![answered(&answers, 2 * PARAMS)];
        for step in 3..10 {
            for param in 0..PARAMS {
                give(&arrivals, step, (param + 2 * me) % PARAMS, value(me, (param + 2 * me) % PARAMS), &sender);
            }
            steps.push(answered(&answers, PARAMS));
        }
        steps
    };
    over_each_transport(3, rank, |returned| {
        for (param, reduced) in returned.into_iter().flatten().flatten() {
            assert_eq!(reduced.unwrap(), value(1, param), "the mean of ranks 0, 1 and 2");
        }
    });
}

#[test]
fn an_execution_that_ends_early_ends_the_step_everywhere_and_the_next_one_works() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let arrivals = ArrivalDriver::new(&ReducerDescription { params: params(), options: options() });
        arrivals.made(Reducer::new(communicator, params(), options()));
        let (sender, answers) = channel();
        let mut failed = Vec::new();
        for early in 0..PARAMS {
            let step = 10 * early as i64;
            let ends = me == 1 && early > 0;
            let given = if ends { early } else { PARAMS };
            for param in (0..PARAMS).rev().take(given) {
                give(&arrivals, step, param, value(me, param), &sender);
            }
            if ends {
                arrivals.ended(execution(step));
                // A gradient that was in flight when the driver was closed.
                give(&arrivals, step, 0, value(me, 0), &sender);
            }
            failed.push(answered(&answers, given + usize::from(ends)));
            for param in 0..PARAMS {
                give(&arrivals, step + 1, param, value(me, param), &sender);
            }
            for (param, reduced) in answered(&answers, PARAMS) {
                assert_eq!(reduced.unwrap(), (10 * param) as f32 + 0.5);
            }
        }
        failed
    };
    over_each_transport(2, rank, |returned| {
        for (early, (first, second)) in returned[0].iter().zip(&returned[1]).enumerate() {
            let error_of =
                |answers: &[(usize, Result<f32>)]| answers.iter().find_map(|(_, result)| result.clone().err());
            match early {
                0 => assert!(error_of(first).or(error_of(second)).is_none()),
                _ => {
                    let error = error_of(first).expect("rank 0 hears of it");
                    assert!(matches!(error, Error::PeerFailed { rank: 1, .. }), "{error}");
                    assert!(second.last().is_some_and(|_| error_of(second).is_some()));
                }
            }
        }
    });
}

#[test]
fn gradients_of_a_reducer_that_cannot_be_made_get_the_reason() {
    let rank = |me: usize, communicator: Arc<Communicator>| {
        let arrivals = ArrivalDriver::new(&ReducerDescription { params: params(), options: options() });
        let (sender, answers) = channel();
        give(&arrivals, 1, 0, 1.0, &sender);
        let options = ReducerOptions { absent: if me == 0 { vec!["p10".to_owned()] } else { Vec::new() }, ..options() };
        arrivals.made(Reducer::new(communicator, params(), options));
        give(&arrivals, 1, 1, 1.0, &sender);
        answered(&answers, 2)
    };
    over_each_transport(2, rank, |returned| {
        for (_, result) in returned.into_iter().flatten() {
            let error = result.unwrap_err().to_string();
            assert!(error.ends_with("parameter `p10` has a gradient on rank 1 and none on rank 0"), "{error}");
        }
    });
}
