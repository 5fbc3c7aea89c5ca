//! Bindings to the plug-in: a table of C functions (mpi-plugin/plugin.h), with every result code checked.

use std::ffi::{CStr, c_char, c_void};
use std::path::Path;

use libloading::{Library, Symbol};

use super::engine::{Completed, Failure, MessageTag, MpiWorld, Wire};
use crate::error::{Error, Result};

/// `SMD_MPI_ABI`.
const ABI: u32 = 4;

#[repr(C)]
struct RawWorld {
    rank: i32,
    size: i32,
    any_thread: i32,
    library: [c_char; 120],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RawDone {
    slot: i32,
    source: i32,
    bytes: i32,
}

/// `struct smd_mpi_plugin`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PluginTable {
    abi: u32,
    struct_bytes: u32,
    init: unsafe extern "C" fn(*mut i32) -> i32,
    start: unsafe extern "C" fn(i32, *mut RawWorld) -> i32,
    send: unsafe extern "C" fn(i32, *const c_void, i32, i32, i32) -> i32,
    recv: unsafe extern "C" fn(i32, *mut c_void, i32, i32, i32) -> i32,
    poll: unsafe extern "C" fn(*mut RawDone, *mut i32) -> i32,
    finish: unsafe extern "C" fn() -> i32,
    describe: unsafe extern "C" fn(i32, *mut c_char, i32),
}

/// A loaded plug-in. It is never unloaded: MPI starts threads and registers handlers.
pub(super) struct Plugin {
    table: PluginTable,
    done: Vec<RawDone>,
}

impl Plugin {
    /// Loads the library at `path` and checks its version.
    pub(super) fn load(path: &Path) -> Result<Self> {
        let refuse = |why: String| Error::Unsupported(format!("the MPI plug-in `{}` {why}", path.display()));
        // SAFETY: the library was compiled by this package and runs no code when it is loaded; MPI libraries, on
        // which it depends, support being loaded in this way.
        let library = unsafe { Library::new(path) }.map_err(|error| refuse(format!("cannot be loaded: {error}")))?;
        let library = Box::leak(Box::new(library));
        // SAFETY: the signature is that of plugin.h, whose version is checked below.
        let entry: Symbol<'_, unsafe extern "C" fn() -> *const PluginTable> =
            unsafe { library.get(b"smd_mpi_plugin\0") }
                .map_err(|error| refuse(format!("has no function `smd_mpi_plugin` ({error}): remove it")))?;
        // SAFETY: the function returns the address of a constant; version and size come first in every version.
        let table = unsafe {
            let table = entry();
            let (abi, bytes) = ((*table).abi, (*table).struct_bytes as usize);
            if abi != ABI || bytes != size_of::<PluginTable>() {
                return Err(refuse(format!("has interface {abi} of {bytes} bytes, expected {ABI}: remove the file")));
            }
            *table
        };
        Ok(Self { table, done: Vec::new() })
    }

    fn check(&self, code: i32) -> Result<(), Failure> {
        let text = match code {
            0 => return Ok(()),
            -1 => "a connection to another process broke".to_owned(),
            -2 => {
                "the script has initialised MPI with a thread level below MPI_THREAD_MULTIPLE: request this level, or \
                 initialise MPI after `init()`"
                    .to_owned()
            }
            -3 => "this process has finalized MPI".to_owned(),
            -4 => "no memory".to_owned(),
            code => {
                let mut text = [0 as c_char; 512];
                // SAFETY: the buffer has the length that is passed, and the function terminates the text.
                let text = unsafe {
                    (self.table.describe)(code, text.as_mut_ptr(), text.len() as i32);
                    CStr::from_ptr(text.as_ptr())
                };
                text.to_string_lossy().into_owned()
            }
        };
        Err(Failure(text))
    }
}

impl Wire for Plugin {
    fn init(&mut self) -> Result<bool, Failure> {
        let mut any_thread = 0;
        // SAFETY: the number lives during the call.
        let code = unsafe { (self.table.init)(&mut any_thread) };
        self.check(code)?;
        Ok(any_thread != 0)
    }

    fn start(&mut self, num_slots: usize) -> Result<MpiWorld, Failure> {
        let mut raw = RawWorld { rank: 0, size: 0, any_thread: 0, library: [0; 120] };
        // SAFETY: `raw` lives during the call.
        let code = unsafe { (self.table.start)(num_slots as i32, &mut raw) };
        self.check(code)?;
        self.done = vec![RawDone { slot: 0, source: 0, bytes: 0 }; num_slots];
        // SAFETY: the plug-in ends the text inside the array.
        let library = unsafe { CStr::from_ptr(raw.library.as_ptr()) };
        let (rank, size) = (raw.rank as usize, raw.size as usize);
        Ok(MpiWorld { rank, size, any_thread: raw.any_thread != 0, library: library.to_string_lossy().into_owned() })
    }

    unsafe fn send(&mut self, slot: usize, data: &[u8], to: usize, tag: MessageTag) -> Result<(), Failure> {
        let (start, bytes) = (data.as_ptr().cast(), data.len() as i32);
        // SAFETY: the caller keeps the memory until the slot is complete.
        let code = unsafe { (self.table.send)(slot as i32, start, bytes, to as i32, tag.value()) };
        self.check(code)
    }

    unsafe fn recv(
        &mut self,
        slot: usize,
        data: &mut [u8],
        from: Option<usize>,
        tag: MessageTag,
    ) -> Result<(), Failure> {
        let (start, bytes) = (data.as_mut_ptr().cast(), data.len() as i32);
        let from = from.map_or(-1, |from| from as i32);
        // SAFETY: as in `send`.
        let code = unsafe { (self.table.recv)(slot as i32, start, bytes, from, tag.value()) };
        self.check(code)
    }

    fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Failure> {
        let mut count = 0;
        // SAFETY: the array has a place for every slot.
        let code = unsafe { (self.table.poll)(self.done.as_mut_ptr(), &mut count) };
        self.check(code)?;
        let completed = |raw: &RawDone| Completed {
            slot: raw.slot as usize,
            source: raw.source.max(0) as usize,
            bytes: raw.bytes.max(0) as usize,
        };
        done.extend(self.done[..count as usize].iter().map(completed));
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        // SAFETY: the function has no preconditions.
        let code = unsafe { (self.table.finish)() };
        self.check(code)
    }
}
