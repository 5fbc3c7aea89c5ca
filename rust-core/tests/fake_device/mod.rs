//! A driver and an NCCL without a device (`device.c`), in a process of its own for each test.
#![allow(dead_code, reason = "each test file uses a part")]

use std::ffi::c_void;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use libloading::os::unix::Library;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_device/device.c");
/// Set in the process that runs a test's body.
const INSIDE: &str = "SMD_TEST_FAKE_DEVICE";
pub const LIMIT: Duration = Duration::from_secs(60);

/// Whether this process has the fake libraries. Otherwise runs the test `name` in one that does, to its end.
pub fn has_fake_device(name: &str) -> bool {
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
        let compiler =
            std::env::var("SMD_TEST_CC").or_else(|_| std::env::var("CC")).unwrap_or_else(|_| "cc".to_owned());
        let compiled = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", SOURCE, "-o"])
            .arg(folder.join(library))
            .arg(format!("-Wl,-soname,{soname}"))
            .status()
            .expect("a C compiler, which building this crate's neighbours needs too");
        assert!(compiled.success());
    }
    let mut inside = this_program()
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

/// The program of this test, under the emulator that a test for another processor runs in (`tests/aarch64.sh`).
fn this_program() -> Command {
    let program = std::env::current_exe().unwrap();
    let runner = std::env::var("SMD_TEST_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace();
    let Some(emulator) = words.next() else { return Command::new(program) };
    let mut command = Command::new(emulator);
    command.args(words).arg(program);
    command
}

/// The functions of the fake that are no driver's.
pub struct Fake(Library);

impl Fake {
    pub fn new() -> Self {
        // SAFETY: the library is the one that the core loads; it has no initialisers.
        Self(unsafe { Library::new("libcuda.so") }.unwrap())
    }

    pub fn stream(&self) -> usize {
        // SAFETY: the function has this signature.
        unsafe { self.0.get::<unsafe extern "C" fn() -> *mut c_void>(b"fake_stream\0").unwrap()() as usize }
    }

    pub fn live_communicators(&self) -> i32 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(b"fake_live_communicators\0").unwrap()() }
    }

    /// The lengths of the all-reduces that the first member has called.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths = vec![0; 1 << 16];
        // SAFETY: as above; the fake writes at most as many.
        let function = unsafe { self.0.get::<unsafe extern "C" fn(*mut usize) -> i32>(b"fake_lengths\0") };
        // SAFETY: as above.
        let count = unsafe { function.unwrap()(lengths.as_mut_ptr()) };
        lengths.truncate(count as usize);
        lengths
    }

    pub fn synchronize(&self, stream: usize) {
        // SAFETY: as above.
        let function = unsafe { self.0.get::<unsafe extern "C" fn(usize) -> i32>(b"cuStreamSynchronize\0") };
        // SAFETY: the stream is one of the fake's, which are never freed.
        assert_eq!(unsafe { function.unwrap()(stream) }, 0);
    }
}

pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < LIMIT / 2, "{what} did not come true");
        thread::sleep(Duration::from_millis(1));
    }
}
