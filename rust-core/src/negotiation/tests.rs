//! The contract of named collectives, over transports with and without shared memory: threads are ranks.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use super::factors::Factors;
use super::negotiator::{LONG_POLL_INTERVAL, Name, NamedHandle, NamedRequest, Negotiator, NegotiatorOptions};
use crate::buffer::{DType, Device, ReduceOp, TensorView};
use crate::collectives::{Communicator, Request};
use crate::error::{Code, Error, Result};
use crate::transport::mock::{MockOptions, MockTransport};
use crate::transport::{Members, ShmTransport, Transport};
use crate::world::{Departure, LocalStore, Monitor};

const TIMEOUT: Duration = Duration::from_secs(60);
const OPTIONS: NegotiatorOptions = NegotiatorOptions {
    cache_capacity: 100,
    fusion_bytes: 1 << 20,
    stall_warning: TIMEOUT,
    stall_limit: TIMEOUT,
    tuning: None,
    core: None,
    local_rank: 0,
};

type MakeGroup = fn(usize) -> Vec<Arc<dyn Transport>>;

fn shm(size: usize) -> Vec<Arc<dyn Transport>> {
    let store = LocalStore::default();
    let ranks: Arc<[usize]> = (0..size).collect();
    std::thread::scope(|scope| {
        let join = |me| {
            let (store, ranks) = (&store, ranks.clone());
            let join = move || ShmTransport::join("test", Members { ranks, me }, store, &Monitor::new(me), TIMEOUT);
            scope.spawn(move || join().expect("joining works") as Arc<dyn Transport>)
        };
        let threads: Vec<_> = (0..size).map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn mock(size: usize) -> Vec<Arc<dyn Transport>> {
    let options = MockOptions { seed: size as u64, max_delay: Duration::from_micros(200) };
    MockTransport::net(size, options).into_iter().map(|end| end as Arc<dyn Transport>).collect()
}

/// A rank: its negotiator, and the monitor of departed ranks.
struct Rank {
    me: usize,
    negotiator: Arc<Negotiator>,
    monitor: Arc<Monitor>,
}

fn job(make: MakeGroup, size: usize, options: NegotiatorOptions) -> Vec<Rank> {
    let rank = |(me, transport): (usize, Arc<dyn Transport>)| {
        let monitor = Arc::new(Monitor::new(me));
        let communicator = Communicator::new(3, transport.clone(), monitor.clone(), TIMEOUT);
        let other = Communicator::new(4, transport, monitor.clone(), TIMEOUT);
        let connect = Box::new(move || Ok(communicator));
        let negotiator =
            Negotiator::start(3, other, monitor.clone(), options.clone(), connect, None).expect("a thread");
        Rank { me, negotiator, monitor }
    };
    make(size).into_iter().enumerate().map(rank).collect()
}

/// Runs `rank` as every member, each on a thread.
fn on_all<T: Send>(job: &[Rank], rank: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = job.iter().map(|one| scope.spawn(move || rank(one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Values under reduction, and a channel for the result.
struct PendingReduction {
    values: Vec<f32>,
    outcome: Receiver<Result<Option<usize>>>,
}

impl PendingReduction {
    fn start(
        rank: &Rank,
        name: &str,
        mut values: Vec<f32>,
        blocking: bool,
        request: impl Fn(TensorView) -> Request,
    ) -> Self {
        // SAFETY: `wait` keeps the values until the operation is over, and so does `drop`.
        let view = unsafe { TensorView::new(values.as_mut_ptr().cast(), values.len(), DType::Float32, Device::Cpu, 0) };
        let (sender, outcome) = channel();
        let done = Box::new(move |result| drop(sender.send(result)));
        rank.negotiator.submit(name, None, request(view.expect("it is aligned")), blocking, done);
        Self { values, outcome }
    }

    fn sum(rank: &Rank, name: &str, values: Vec<f32>, blocking: bool) -> Self {
        Self::start(rank, name, values, blocking, |data| Request::AllReduce {
            input: data,
            output: data,
            op: ReduceOp::Sum,
        })
    }

    /// A sum whose caller waits with [`PendingReduction::drive`].
    fn request(rank: &Rank, name: &str, mut values: Vec<f32>) -> (Self, NamedHandle) {
        // SAFETY: as above.
        let view = unsafe { TensorView::new(values.as_mut_ptr().cast(), values.len(), DType::Float32, Device::Cpu, 0) };
        let data = view.expect("it is aligned");
        let request = Request::AllReduce { input: data, output: data, op: ReduceOp::Sum };
        let (sender, outcome) = channel();
        let done = Box::new(move |result| drop(sender.send(result)));
        let (name, factors) = (Name::Given(name.to_owned()), Factors::default());
        let request = NamedRequest { name, tensors: vec![(request, None)], factors, blocking: true };
        let handle = rank.negotiator.request(request, || done).expect("it can be handle for");
        (Self { values, outcome }, handle)
    }

    fn drive(self, handle: &NamedHandle) -> Result<Vec<f32>> {
        let start = Instant::now();
        loop {
            if let Ok(outcome) = self.outcome.try_recv() {
                return outcome.map(|_| self.values.clone());
            }
            assert!(start.elapsed() < TIMEOUT, "it ends");
            if !handle.drive() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn wait(self) -> Result<Vec<f32>> {
        let outcome = self.outcome.recv_timeout(TIMEOUT).expect("it ends");
        outcome.map(|_| self.values.clone())
    }
}

impl Drop for PendingReduction {
    fn drop(&mut self) {
        // The views of an operation in flight.
        let _ = self.outcome.recv_timeout(TIMEOUT);
    }
}

fn join(rank: &Rank) -> Result<Option<usize>> {
    let (sender, receiver) = channel();
    rank.negotiator.join(None, None, Box::new(move |result| drop(sender.send(result))));
    receiver.recv_timeout(TIMEOUT).expect("it ends")
}

/// A permutation that differs between ranks.
fn shuffled(count: usize, seed: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|at| (at * 7919 + seed * 104_729 + 13).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 7);
    order
}

fn names_in_any_order(make: MakeGroup) {
    for size in [1, 2, 5] {
        let job = job(make, size, OPTIONS);
        for step in 0..4 {
            on_all(&job, |rank| {
                let start = |name: &usize| {
                    // Of different sizes, so that some are fused and some run alone.
                    let elems = if name.is_multiple_of(20) { 20_000 } else { 1 + name };
                    let values = vec![(rank.me + name + step) as f32; elems];
                    (*name, PendingReduction::sum(rank, &format!("w{name}"), values, false))
                };
                let pending: Vec<_> = shuffled(150, rank.me + step).iter().map(start).collect();
                for (name, pending) in pending {
                    let expected = (0..size).map(|other| (other + name + step) as f32).sum::<f32>();
                    let values = pending.wait().expect("all agree");
                    assert!(values.iter().all(|value| *value == expected), "{name}: {values:?} {expected}");
                }
            });
        }
        job.iter().for_each(|rank| rank.negotiator.close("the test is over"));
    }
}

fn threads_and_repeated_names(make: MakeGroup) {
    let job = job(make, 3, OPTIONS);
    on_all(&job, |rank| {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    for turn in 0..20 {
                        let name = format!("t{}", (thread + rank.me) % 3);
                        let again = PendingReduction::sum(rank, &name, vec![turn as f32], false);
                        let more = PendingReduction::sum(rank, &name, vec![turn as f32 + 0.5], true);
                        // Each name's calls come in one order on each rank, because one thread submits them.
                        assert_eq!(again.wait().unwrap(), [3.0 * turn as f32]);
                        assert_eq!(more.wait().unwrap(), [3.0 * (turn as f32 + 0.5)]);
                    }
                });
            }
        });
    });
}

fn disagreement_is_told_to_all(make: MakeGroup) {
    let job = job(make, 3, OPTIONS);
    for turn in 0..20 {
        let start = Instant::now();
        let texts = on_all(&job, |rank| {
            let elems = if rank.me == 1 { 5 } else { 4 };
            let good = PendingReduction::sum(rank, "good", vec![1.0], false);
            let bad = match (turn % 3, rank.me) {
                (0, _) => PendingReduction::sum(rank, "bad", vec![1.0; elems], true),
                (1, 1) => PendingReduction::start(rank, "bad", vec![1.0; 4], true, |data| Request::Broadcast {
                    data,
                    root: 0,
                }),
                // A root that does not exist.
                (2, 1) => PendingReduction::start(rank, "bad", vec![1.0; 4], true, |data| Request::Broadcast {
                    data,
                    root: 9,
                }),
                (2, _) => PendingReduction::start(rank, "bad", vec![1.0; 4], true, |data| Request::Broadcast {
                    data,
                    root: 0,
                }),
                _ => PendingReduction::sum(rank, "bad", vec![1.0; 4], true),
            };
            assert_eq!(good.wait().unwrap(), [3.0]);
            bad.wait().unwrap_err()
        });
        let all = texts.iter().map(Error::to_string).collect::<Vec<_>>();
        let expected = [
            "`bad`: ranks disagree: Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [4], but another rank sent a tensor of \
             shape [5]: ranks 0, 2 ask for all_reduce(sum) of float32 [4], \
             rank 1 asks for all_reduce(sum) of float32 [5]",
            "`bad`: ranks disagree: Mismatched operations: One rank did an ALLREDUCE, but another rank did an BROADCAST: ranks 0, 2 ask for all_reduce(sum) of float32 [4], \
             rank 1 asks for broadcast of float32 [4] from rank 0 of the group",
            "`bad`: ranks disagree: a rank cannot take part: ranks 0, 2 ask for broadcast of float32 [4] from rank 0 of \
             the group, rank 1 asks for an error (broadcast: root 9 is not a rank of a group of 3)",
        ][turn % 3];
        assert_eq!(all[0], expected);
        assert_eq!(all[2], expected);
        if turn % 3 == 2 {
            assert_eq!(all[1], "broadcast: root 9 is not a rank of a group of 3");
        } else {
            assert_eq!(all[1], expected);
        }
        assert!(start.elapsed() < Duration::from_secs(20));
    }
}

fn different_names_are_told_to_all(make: MakeGroup) {
    let job = job(make, 2, OPTIONS);
    on_all(&job, |rank| {
        let name = ["a", "b"][rank.me];
        let text = PendingReduction::sum(rank, name, vec![1.0], true).wait().unwrap_err().to_string();
        assert!(text.contains("rank 0 waits for `a`, rank 1 waits for `b`"), "{text}");
        assert_eq!(PendingReduction::sum(rank, "a", vec![1.0], true).wait().unwrap(), [2.0]);
    });
}

fn a_missing_rank_is_named_after_the_limit(make: MakeGroup) {
    let job = job(make, 3, NegotiatorOptions { stall_limit: Duration::from_secs(1), ..OPTIONS });
    let ended = Barrier::new(3);
    on_all(&job, |rank| {
        // Rank 1 is merely late.
        if rank.me != 1 {
            let error = PendingReduction::sum(rank, "w", vec![1.0], true).wait().unwrap_err();
            assert!(
                matches!(&error, Error::Timeout { during, missing, .. } if during == "`w`" && missing == &[1]),
                "{error}"
            );
        }
        ended.wait();
        assert_eq!(PendingReduction::sum(rank, "v", vec![1.0], true).wait().unwrap(), [3.0]);
    });
}

fn a_departure_ends_everything(make: MakeGroup) {
    for how in [Departure::Left, Departure::Died { detail: "killed by signal 9".into() }] {
        let mut job = job(make, 3, OPTIONS);
        let gone = job.remove(1);
        on_all(&job, |rank| {
            let start = Instant::now();
            let pending = PendingReduction::sum(rank, "w", vec![1.0], true);
            std::thread::sleep(Duration::from_millis(50));
            rank.monitor.report(1, how.clone());
            let text = pending.wait().unwrap_err().to_string();
            assert!(text.contains(&format!("rank 1 {how} while rank {} was in `w`", rank.me)), "{text}");
            let text = PendingReduction::sum(rank, "v", vec![1.0], true).wait().unwrap_err().to_string();
            assert!(text.contains("was in `v`"), "{text}");
            assert!(start.elapsed() < Duration::from_secs(10));
        });
        drop(gone);
    }
}

fn closing_ends_everything(make: MakeGroup) {
    let job = job(make, 2, OPTIONS);
    on_all(&job, |rank| {
        let pending = PendingReduction::sum(rank, ["a", "b"][rank.me], vec![1.0], false);
        rank.negotiator.close("the test is over");
        assert_eq!(pending.wait().unwrap_err().code(), Code::Closed);
        assert_eq!(PendingReduction::sum(rank, "c", vec![1.0], false).wait().unwrap_err().code(), Code::Closed);
        assert_eq!(join(rank).unwrap_err().code(), Code::Closed);
    });
}

fn callers_that_wait_drive(make: MakeGroup) {
    for size in [1, 2, 5] {
        let job = job(make, size, OPTIONS);
        let expected = (size * (size + 1) / 2) as f32;
        let thread = |rank: &Rank, thread: usize| {
            for step in 0..30 {
                // Small operations run on this thread, large ones on another.
                let elems = if step % 20 == 7 { 100_000 } else { 1 + step };
                let beside =
                    PendingReduction::sum(rank, &format!("beside.{thread}.{step}"), vec![rank.me as f32 + 1.0], false);
                let (pending, handle) =
                    PendingReduction::request(rank, &format!("{thread}.{step}"), vec![rank.me as f32 + 1.0; elems]);
                assert!(pending.drive(&handle).expect("all ranks agree").iter().all(|&value| value == expected));
                assert_eq!(beside.wait().expect("all ranks agree"), [expected]);
                if (step + rank.me).is_multiple_of(15) {
                    // Longer than the negotiation's own thread stays asleep.
                    std::thread::sleep(Duration::from_millis(4));
                }
            }
        };
        on_all(&job, |rank| {
            std::thread::scope(|scope| {
                for number in 0..3 {
                    scope.spawn(move || thread(rank, number));
                }
            });
        });
    }
}

fn calls_without_a_driving_caller_wake_the_thread(make: MakeGroup) {
    const CALLS: u32 = 40;
    let job = job(make, 2, OPTIONS);
    let start = Instant::now();
    for _ in 0..CALLS {
        on_all(&job, |rank| {
            let (pending, handle) = PendingReduction::request(rank, "left alone", vec![rank.me as f32 + 1.0]);
            drop(handle);
            assert_eq!(pending.wait().expect("all ranks agree"), [3.0]);
        });
    }
    // Without the wake-up, each call would wait for the thread's next poll.
    assert!(start.elapsed() < LONG_POLL_INTERVAL * CALLS / 2, "{:?}", start.elapsed());
}

fn a_driving_caller_gets_the_error_of_an_end(make: MakeGroup) {
    for departs in [false, true] {
        let job = job(make, 3, OPTIONS);
        on_all(&job, |rank| {
            let (pending, handle) = PendingReduction::request(rank, "first", vec![1.0]);
            assert_eq!(pending.drive(&handle).expect("all ranks agree"), [3.0]);
            if rank.me == 1 {
                return;
            }
            let (pending, handle) = PendingReduction::request(rank, "second", vec![1.0]);
            let start = Instant::now();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    match departs {
                        true => rank.monitor.report(1, Departure::Died { detail: String::new() }),
                        false => rank.negotiator.close("enough"),
                    }
                });
                let error = pending.drive(&handle).expect_err("rank 1 does not come");
                assert_eq!(error.code(), if departs { Code::PeerFailed } else { Code::Closed }, "{error}");
            });
            assert!(start.elapsed() < TIMEOUT / 2);
        });
    }
}

fn ranks_that_joined_contribute_nothing(make: MakeGroup) {
    let job = job(make, 3, OPTIONS);
    for _ in 0..2 {
        let last = on_all(&job, |rank| {
            for step in 0..=2 * rank.me {
                let here = (0..3).filter(|other| step <= 2 * other).count() as f32;
                let average = PendingReduction::start(rank, "average", vec![3.0; 4], false, |data| {
                    Request::AllReduce { input: data, output: data, op: ReduceOp::Average }
                });
                let min = PendingReduction::start(rank, "min", vec![3.0; 2], false, |data| Request::AllReduce {
                    input: data,
                    output: data,
                    op: ReduceOp::Min,
                });
                assert_eq!(average.wait().unwrap(), [here; 4]);
                assert_eq!(min.wait().unwrap(), [3.0; 2]);
                if step > 0 {
                    let text = PendingReduction::start(rank, "b", vec![1.0], true, |data| Request::Broadcast {
                        data,
                        root: 2,
                    });
                    let text = text.wait().unwrap_err().to_string();
                    assert!(text.contains("Broadcast is not supported with Join"), "{text}");
                }
            }
            join(rank).expect("all join")
        });
        assert_eq!(last, [Some(2); 3]);
    }
}

macro_rules! contract {
    ($($transport:ident: $($test:ident),*;)*) => {
        $(mod $transport {
            $(#[test]
            fn $test() {
                super::$test(super::$transport);
            })*
        })*
    };
}

contract! {
    shm: names_in_any_order, threads_and_repeated_names, disagreement_is_told_to_all, different_names_are_told_to_all,
        a_missing_rank_is_named_after_the_limit, a_departure_ends_everything, closing_ends_everything,
        callers_that_wait_drive, calls_without_a_driving_caller_wake_the_thread, a_driving_caller_gets_the_error_of_an_end, ranks_that_joined_contribute_nothing;
    mock: names_in_any_order, threads_and_repeated_names, disagreement_is_told_to_all, different_names_are_told_to_all,
        a_missing_rank_is_named_after_the_limit, a_departure_ends_everything, closing_ends_everything,
        callers_that_wait_drive, calls_without_a_driving_caller_wake_the_thread, a_driving_caller_gets_the_error_of_an_end, ranks_that_joined_contribute_nothing;
}
