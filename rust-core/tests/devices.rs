//! Groups on CUDA devices, over a driver and an NCCL that need no device (`fake_device/`) and that end a process which
//! breaks NCCL's rules. Ranks are threads. Each test runs in a process of its own: what a process has loaded stays.

use std::ffi::c_void;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libloading::os::unix::Library;
use smd_core::buffer::{DType, Device, ReduceOp, TensorView};
use smd_core::collectives::{Communicator, Request};
use smd_core::error::Code;
use smd_core::transport::mock::{MockOptions, MockTransport};
use smd_core::world::{Departure, LocalStore, Monitor, Store};
use smd_core::{Error, Result};

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_device/device.c");
/// Set in the process that runs a test's body.
const INSIDE: &str = "SMD_TEST_FAKE_DEVICE";
const LIMIT: Duration = Duration::from_secs(60);

/// Whether this process has the fake libraries. Otherwise runs the test `name` in one that does, to its end.
fn has_fake_device(name: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (library, soname) in [("libcuda.so", "libcuda.so"), ("libnccl.so.2", "libnccl.so.2")] {
        // NCCL's half refers to the driver's, so both are one library.
        if library == "libnccl.so.2" {
            std::os::unix::fs::symlink(folder.join("libcuda.so"), folder.join(library)).unwrap();
            continue;
        }
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let compiled = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", SOURCE, "-o"])
            .arg(folder.join(library))
            .arg(format!("-Wl,-soname,{soname}"))
            .status()
            .expect("a C compiler, which building this crate's neighbours needs too");
        assert!(compiled.success());
    }
    let mut inside = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .envs([(INSIDE, "1"), ("SMD_P2P_MAX_BYTES", "0")])
        .env("LD_LIBRARY_PATH", &folder)
        .spawn()
        .unwrap();
    let start = Instant::now();
    let status: Option<ExitStatus> = loop {
        let status = inside.try_wait().unwrap();
        if status.is_some() || start.elapsed() > LIMIT {
            break status;
        }
        thread::sleep(Duration::from_millis(10));
    };
    if status.is_none() {
        inside.kill().unwrap();
        inside.wait().unwrap();
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(status.expect("it ends within its limit").success(), "{status:?}");
    false
}

/// The functions of the fake that are no driver's.
struct Fake(Library);

impl Fake {
    fn new() -> Self {
        // SAFETY: the library is the one that the core loads; it has no initialisers.
        Self(unsafe { Library::new("libcuda.so") }.unwrap())
    }

    fn stream(&self) -> usize {
        // SAFETY: the function has this signature.
        unsafe { self.0.get::<unsafe extern "C" fn() -> *mut c_void>(b"fake_stream\0").unwrap()() as usize }
    }

    fn live_communicators(&self) -> i32 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(b"fake_live_communicators\0").unwrap()() }
    }

    fn synchronize(&self, stream: usize) {
        // SAFETY: as above.
        let function = unsafe { self.0.get::<unsafe extern "C" fn(usize) -> i32>(b"cuStreamSynchronize\0") };
        // SAFETY: the stream is one of the fake's, which are never freed.
        assert_eq!(unsafe { function.unwrap()(stream) }, 0);
    }
}

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

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT / 2, "{what} did not come true");
        thread::sleep(Duration::from_millis(1));
    }
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
    // They connect.
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
