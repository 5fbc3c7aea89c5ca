//! Groups on CUDA devices, over a driver and an NCCL that need no device (`fake_device/`) and that end a process which
//! breaks NCCL's rules. Ranks are threads. Each test runs in a process of its own: what a process has loaded stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[path = "fake_device/mod.rs"]
mod fake_device;

use fake_device::{Fake, LIMIT, eventually, has_fake_device};
use smd_core::buffer::{DType, Device, ReduceOp, TensorView};
use smd_core::collectives::{Communicator, Request};
use smd_core::error::Code;
use smd_core::transport::mock::{MockOptions, MockTransport};
use smd_core::world::{Departure, LocalStore, Monitor, Store};
use smd_core::{Error, Result};

struct Group {
    store: Arc<LocalStore>,
    monitors: Vec<Arc<Monitor>>,
    members: Vec<Arc<Communicator>>,
}

fn group(id: u64, size: usize, timeout: Duration) -> Group {
    let store = Arc::new(LocalStore::default());
    let monitors: Vec<_> = (0..size).map(|rank| Arc::new(Monitor::new(rank))).collect();
    let ends = MockTransport::net(size, MockOptions { seed: id, max_delay: Duration::ZERO });
    let members = ends.into_iter().zip(&monitors).map(|(end, monitor)| {
        let member = Communicator::new(id, end, monitor.clone(), timeout);
        member.set_store(store.clone());
        member
    });
    Group { members: members.collect(), store, monitors }
}

impl Group {
    /// Connects each member on a device of its own.
    fn connect(&self) {
        thread::scope(|scope| {
            let connect = |(rank, member): (usize, &Arc<Communicator>)| member.connect_device(rank as u16);
            let all: Vec<_> = self.members.iter().enumerate().map(|one| scope.spawn(move || connect(one))).collect();
            all.into_iter().for_each(|one| one.join().unwrap().unwrap());
        });
    }
}

fn all_reduce(member: &Communicator, stream: usize) -> Result<()> {
    let device = Device::Cuda(member.members().me as u16);
    // SAFETY: the fake NCCL looks at no memory.
    let view = unsafe { TensorView::new(64 as *mut u8, 4, DType::Float32, device, stream) }?;
    member.run(&Request::AllReduce { input: view, output: view, op: ReduceOp::Sum })
}

fn threads_called(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|found| found.trim_end().starts_with(name)).count()
}

#[test]
fn a_closed_group_ends_an_operation_that_no_other_member_calls() {
    if !has_fake_device("a_closed_group_ends_an_operation_that_no_other_member_calls") {
        return;
    }
    let (fake, group) = (Fake::new(), group(1, 2, Duration::from_secs(1)));
    group.connect();
    let stream = fake.stream();
    // The first all-reduce connects the members.
    thread::scope(|scope| {
        group.members.iter().for_each(|member| drop(scope.spawn(|| all_reduce(member, stream).unwrap())));
    });
    let start = Instant::now();
    all_reduce(&group.members[0], stream).unwrap();
    group.members[0].close("the script destroyed the group");
    // As `torch.cuda.synchronize()`: it has no limit of its own.
    fake.synchronize(stream);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    group.members[1].close("the end");
    eventually("freeing both communicators", || fake.live_communicators() == 0);
}

#[test]
fn a_closed_group_completes_what_all_members_call() {
    if !has_fake_device("a_closed_group_completes_what_all_members_call") {
        return;
    }
    let (fake, group) = (Fake::new(), group(2, 2, LIMIT));
    group.connect();
    thread::scope(|scope| {
        for member in &group.members {
            let stream = fake.stream();
            let fake = &fake;
            scope.spawn(move || {
                (0..5).for_each(|_| all_reduce(member, stream).unwrap());
                member.close("the end");
                fake.synchronize(stream);
            });
        }
    });
    eventually("freeing both communicators", || fake.live_communicators() == 0);
    eventually("the end of the threads that close", || threads_called("smd-cuda-close") == 0);
}

#[test]
fn a_member_that_never_joins_is_named_and_leaves_no_thread_behind() {
    if !has_fake_device("a_member_that_never_joins_is_named_and_leaves_no_thread_behind") {
        return;
    }
    let (fake, group) = (Fake::new(), group(3, 2, Duration::from_secs(1)));
    // Rank 1 says which device it has, and then hangs.
    let device = postcard::to_stdvec(&(("another host".to_owned(), [9u8; 16]), false)).unwrap();
    group.store.set("cuda/3/0/device/1", &device).unwrap();
    let (start, threads) = (Instant::now(), threads_called(""));
    let error = group.members[0].connect_device(0).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
    eventually("the end of NCCL's wait", || fake.live_communicators() == 0);
    // The thread that watches all groups may have started.
    eventually("the end of the threads that connected", || threads_called("") <= threads + 1);
}

/// NCL-4: a call stays inside of NCCL as long as it connects with the other members.
#[test]
fn a_first_operation_that_no_other_member_calls_ends_at_its_limit() {
    if !has_fake_device("a_first_operation_that_no_other_member_calls_ends_at_its_limit") {
        return;
    }
    let (fake, group) = (Fake::new(), group(4, 2, Duration::from_secs(1)));
    group.connect();
    let start = Instant::now();
    let error = all_reduce(&group.members[0], fake.stream()).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
    group.members[1].close("the end");
    eventually("freeing both communicators", || fake.live_communicators() == 0);
}

#[test]
fn a_first_operation_ends_when_another_member_dies() {
    if !has_fake_device("a_first_operation_ends_when_another_member_dies") {
        return;
    }
    let (fake, group) = (Fake::new(), group(5, 2, LIMIT));
    group.connect();
    thread::scope(|scope| {
        let (member, stream) = (&group.members[0], fake.stream());
        let call = scope.spawn(move || all_reduce(member, stream).unwrap_err());
        thread::sleep(Duration::from_millis(100));
        group.monitors[0].report(1, Departure::Died { detail: "killed by signal 9".to_owned() });
        let error = call.join().unwrap();
        assert!(matches!(&error, Error::PeerFailed { rank: 1, .. }), "{error}");
    });
}

/// NCL-2: the fake ends the process where a thread uses a communicator that another thread frees.
#[test]
fn an_abort_under_an_operation_frees_the_communicator_when_no_thread_uses_it() {
    if !has_fake_device("an_abort_under_an_operation_frees_the_communicator_when_no_thread_uses_it") {
        return;
    }
    let fake = Fake::new();
    for round in 0..60 {
        let group = group(100 + round, 2, LIMIT);
        group.connect();
        let departed = AtomicBool::new(false);
        thread::scope(|scope| {
            for member in &group.members {
                let (stream, departed) = (fake.stream(), &departed);
                scope.spawn(move || {
                    let error = loop {
                        match all_reduce(member, stream) {
                            Ok(()) => assert!(member.check_device("a look").is_ok() || departed.load(Ordering::SeqCst)),
                            Err(error) => break error,
                        }
                    };
                    assert!(matches!(error.code(), Code::PeerFailed | Code::Closed), "{error}");
                });
            }
            thread::sleep(Duration::from_micros(200 * (round % 20)));
            departed.store(true, Ordering::SeqCst);
            for monitor in &group.monitors {
                let detail = "killed by signal 9".to_owned();
                monitor.report(1 - monitor.me(), Departure::Died { detail });
            }
        });
    }
    eventually("freeing all communicators", || fake.live_communicators() == 0);
}
