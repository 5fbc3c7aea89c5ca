//! Kernels, compiled at run time from source for the device at their first use.
//!
//! - KRN-1: a kernel takes one argument: a structure by value, whose layout Rust and CUDA C++ declare alike.
//! - KRN-2: compiled without contraction of multiplications and additions, with divisions and square roots that
//!   round correctly and with denormals: arithmetic is the CPU's, bit by bit (COL-1).

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;
use parking_lot::Mutex;

use super::driver::{Context, check, relaxed};
use super::stream::Stream;
use crate::error::{Error, Result};

/// A program in CUDA C++, and the preprocessor definitions that specialise it.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// Name in the compiler's messages.
    pub name: &'static str,
    /// The source text; it may include the headers beside it.
    pub text: &'static str,
}

/// Headers that sources may include.
const HEADERS: [(&CStr, &str); 5] = [
    (c"number.cuh", include_str!("kernels/number.cuh")),
    (c"vectors.cuh", include_str!("kernels/vectors.cuh")),
    (c"positions.cuh", include_str!("kernels/positions.cuh")),
    (c"arena.cuh", include_str!("kernels/arena.cuh")),
    (c"chunk.cuh", include_str!("kernels/chunk.cuh")),
];

/// Values of the preprocessor definitions that specialise a source.
pub type Defines<'a> = &'a [(&'static str, &'a str)];

/// The grid of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of each block.
    pub threads: u32,
}

/// A kernel that is loaded into a context, for as long as the process lives.
#[derive(Debug)]
pub struct Kernel {
    function: sys::CUfunction,
    name: String,
    context: &'static Context,
}

// SAFETY: a function of a module may be launched from any thread, and the module is never unloaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Loaded kernels, by device and name.
struct Loaded {
    kernels: Vec<(u16, String, &'static Kernel)>,
    modules: Vec<(u16, String, Module)>,
}

/// The kernels of one source under one set of definitions.
struct Module(sys::CUmodule);

// SAFETY: a module may be used from any thread, and is never unloaded.
unsafe impl Send for Module {}

impl Kernel {
    /// Returns the kernel `entry` of `source` under `defines`, compiled for the device of `context`; compiled once in
    /// a process. Compiling takes some 100 ms, so callers on a fast path keep the result.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without NVRTC, [`Error::Internal`] with the compiler's messages, [`Error::Device`].
    pub fn get(
        context: &'static Context,
        source: &KernelSource,
        entry: &'static str,
        defines: Defines<'_>,
    ) -> Result<&'static Kernel> {
        static LOADED: Mutex<Loaded> = Mutex::new(Loaded { kernels: Vec::new(), modules: Vec::new() });
        let name = format!("{}:{entry}{}", source.name, label(defines));
        // Held while compiling, so that two threads that want the same kernel compile it once.
        let mut loaded = LOADED.lock();
        let Loaded { kernels, modules } = &mut *loaded;
        let known = kernels.iter().find(|(device, known, _)| *device == context.device() && *known == name);
        if let Some((_, _, kernel)) = known {
            return Ok(kernel);
        }
        let program = format!("{}{}", source.name, label(defines));
        let loaded = modules.iter().find(|(device, known, _)| *device == context.device() && *known == program);
        let _entered = context.enter()?;
        let module = match loaded {
            Some((_, _, module)) => module.0,
            None => {
                let image = compile(source, defines, context.properties().compute)?;
                let mut module = std::ptr::null_mut();
                relaxed(|| {
                    // SAFETY: `module` is valid for the write; the image is a whole one from the compiler, with a zero
                    // behind.
                    check(unsafe { sys::cuModuleLoadData(&mut module, image.as_ptr().cast()) }, || {
                        format!("loading the kernels of `{program}` on `cuda:{}`", context.device())
                    })
                })?;
                modules.push((context.device(), program, Module(module)));
                module
            }
        };
        let symbol = CString::new(entry).expect("names of kernels have no zero bytes");
        let mut function = std::ptr::null_mut();
        relaxed(|| {
            // SAFETY: `function` is valid for the write, the module was loaded above.
            check(unsafe { sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()) }, || {
                format!("finding the kernel `{name}`")
            })
        })?;
        let kernel: &'static Kernel = Box::leak(Box::new(Kernel { function, name: name.clone(), context }));
        kernels.push((context.device(), name, kernel));
        Ok(kernel)
    }

    /// The context that the kernel is loaded into.
    pub fn context(&self) -> &'static Context {
        self.context
    }

    /// Queues the kernel.
    ///
    /// # Errors
    /// [`Error::Device`].
    ///
    /// # Safety
    /// `argument` has the layout of the kernel's one parameter (KRN-1). What it points to is as the kernel expects and
    /// stays so until the kernel is done.
    pub unsafe fn launch<T: Copy>(&self, grid: Grid, argument: &T, stream: &Stream) -> Result<()> {
        let _entered = self.context.enter()?;
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast()];
        // SAFETY: function and stream live; the driver copies the argument, whose size it knows from the function,
        // before it returns. The rest is the caller's promise.
        let answer = unsafe {
            let parameters = arguments.as_mut_ptr();
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(
                self.function,
                grid.blocks,
                1,
                1,
                grid.threads,
                1,
                1,
                0,
                stream.handle(),
                parameters,
                none,
            )
        };
        check(answer, || format!("launching `{}` on `cuda:{}`", self.name, self.context.device()))
    }
}

fn label(defines: Defines<'_>) -> String {
    let parts: Vec<String> = defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if parts.is_empty() { String::new() } else { format!("[{}]", parts.join(" ")) }
}

/// Machine code of `source` for a compute capability; portable code if the compiler does not know that one.
///
/// # Errors
/// As [`Kernel::get`].
pub fn compile(source: &KernelSource, defines: Defines<'_>, compute: (u32, u32)) -> Result<Vec<u8>> {
    load()?;
    let wanted = (compute.0 * 10 + compute.1) as c_int;
    let known = supported()?;
    let native = known.contains(&wanted);
    let newest = known.iter().copied().filter(|arch| *arch <= wanted).max();
    let architecture = match newest {
        _ if native => format!("--gpu-architecture=sm_{wanted}"),
        Some(arch) => format!("--gpu-architecture=compute_{arch}"),
        None => {
            return Err(Error::Unsupported(format!(
                "this NVRTC compiles for compute capability {known:?}, the device has {wanted}"
            )));
        }
    };
    let mut options = vec![architecture, "--std=c++17".to_owned(), "--fmad=false".to_owned()];
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    let options: Vec<CString> =
        options.into_iter().map(|option| CString::new(option).expect("options have no zero bytes")).collect();
    let program = CompiledProgram::new(source)?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    // SAFETY: the program lives; the pointers are to strings that outlive the call.
    let answer = unsafe { nvrtc::nvrtcCompileProgram(program.0, pointers.len() as c_int, pointers.as_ptr()) };
    if answer != nvrtc::nvrtcResult::NVRTC_SUCCESS {
        let name = format!("{}{}", source.name, label(defines));
        return Err(Error::Internal(format!("compiling `{name}`: {}: {}", text(answer), program.log())));
    }
    let mut bytes = 0;
    // SAFETY: the program lives and was compiled; the size is valid for the write.
    check_nvrtc(unsafe {
        if native {
            nvrtc::nvrtcGetCUBINSize(program.0, &mut bytes)
        } else {
            nvrtc::nvrtcGetPTXSize(program.0, &mut bytes)
        }
    })?;
    // PTX is text whose size includes the terminating zero. The extra byte does no harm after machine code.
    let mut image = vec![0u8; bytes + 1];
    // SAFETY: the image has the room that was asked for.
    check_nvrtc(unsafe {
        let to = image.as_mut_ptr().cast();
        if native { nvrtc::nvrtcGetCUBIN(program.0, to) } else { nvrtc::nvrtcGetPTX(program.0, to) }
    })?;
    Ok(image)
}

/// Destroys the program when dropped.
struct CompiledProgram(nvrtc::nvrtcProgram);

impl CompiledProgram {
    fn new(source: &KernelSource) -> Result<Self> {
        let string = |text: &str| CString::new(text).expect("sources have no zero bytes");
        let (name, text) = (string(source.name), string(source.text));
        let headers = HEADERS.map(|(_, text)| string(text));
        let headers = headers.each_ref().map(|header| header.as_ptr());
        let names = HEADERS.map(|(name, _)| name.as_ptr());
        let mut program = std::ptr::null_mut();
        // SAFETY: all are strings that outlive the call, which copies them; the arrays have the length that is passed.
        check_nvrtc(unsafe {
            let count = HEADERS.len() as c_int;
            let (headers, names) = (headers.as_ptr(), names.as_ptr());
            nvrtc::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), count, headers, names)
        })?;
        Ok(Self(program))
    }

    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program lives; the size is valid for the write.
        if unsafe { nvrtc::nvrtcGetProgramLogSize(self.0, &mut bytes) } != nvrtc::nvrtcResult::NVRTC_SUCCESS {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the log has the room that was asked for.
        let _ = unsafe { nvrtc::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned()
    }
}

impl Drop for CompiledProgram {
    fn drop(&mut self) {
        // SAFETY: the program is ours and not used any more; that it is known was seen at its creation.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn check_nvrtc(answer: nvrtc::nvrtcResult) -> Result<()> {
    match answer {
        nvrtc::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        answer => Err(Error::Device { doing: "asking NVRTC".into(), answer: text(answer) }),
    }
}

fn text(answer: nvrtc::nvrtcResult) -> String {
    // SAFETY: the text is static and ends with a zero.
    unsafe { CStr::from_ptr(nvrtc::nvrtcGetErrorString(answer)) }.to_string_lossy().into_owned()
}

fn supported() -> Result<Vec<c_int>> {
    let mut count = 0;
    // SAFETY: the count is valid for the write.
    check_nvrtc(unsafe { nvrtc::nvrtcGetNumSupportedArchs(&mut count) })?;
    let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as were announced.
    check_nvrtc(unsafe { nvrtc::nvrtcGetSupportedArchs(known.as_mut_ptr()) })?;
    Ok(known)
}

/// Loads NVRTC; the first result is cached.
fn load() -> Result<()> {
    static ANSWER: OnceLock<Result<()>> = OnceLock::new();
    ANSWER
        .get_or_init(|| {
            // A library that is loaded already is found by its name from then on, so this makes the bindings use the
            // copy that a framework installed.
            for path in candidates() {
                if [builtins(&path), Some(path.clone())].into_iter().flatten().all(|path| keep(&path)) {
                    tracing::debug!("NVRTC is `{}`", path.display());
                    break;
                }
            }
            // SAFETY: as in `keep`.
            if unsafe { nvrtc::is_culib_present() } {
                return Ok(());
            }
            Err(Error::Unsupported(
                "NVRTC was not found: install the CUDA build of PyTorch or TensorFlow (`tensorflow[and-cuda]`), or CUDA's toolkit, or name its folder in `CUDA_HOME`"
                    .into(),
            ))
        })
        .clone()
}

/// Loads a library for as long as the process lives; false if it cannot be loaded.
fn keep(path: &Path) -> bool {
    // SAFETY: running NVRTC's initialisers is what loading it is for.
    unsafe { libloading::Library::new(path) }.map(std::mem::forget).is_ok()
}

/// The library that NVRTC loads by name when it compiles, and cannot find outside of the system's folders.
fn builtins(nvrtc: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(nvrtc.parent()?).ok()?.flatten();
    let version = nvrtc.extension()?.to_string_lossy().into_owned();
    let start = format!("libnvrtc-builtins.so.{version}");
    files
        .map(|file| file.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&start)))
}

/// Folders that may contain NVRTC: beside loaded CUDA libraries (a framework's), in the active virtual environment,
/// in the CUDA toolkit.
fn candidates() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for line in maps.lines().filter(|line| line.contains("libcudart.so") || line.contains("libtorch_cuda.so")) {
        if let Some(folder) = line.find('/').and_then(|start| Path::new(&line[start..]).parent()) {
            folders.push(folder.to_owned());
            // .../site-packages/torch/lib and .../site-packages/nvidia/cu13/lib
            folders.extend(folder.ancestors().skip(1).take(3).flat_map(wheels));
        }
    }
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
        let versions = std::fs::read_dir(Path::new(&environment).join("lib")).into_iter().flatten().flatten();
        folders.extend(versions.flat_map(|version| wheels(&version.path().join("site-packages"))));
    }
    for root in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os) {
        folders.push(Path::new(&root).join("lib64"));
    }
    folders.push("/usr/local/cuda/lib64".into());
    let mut paths: Vec<PathBuf> = Vec::new();
    for folder in folders {
        for name in ["libnvrtc.so.13", "libnvrtc.so.12"] {
            let path = folder.join(name);
            if path.exists() && !paths.contains(&path) {
                paths.push(path);
            }
        }
    }
    paths
}

/// Where NVIDIA's wheels put NVRTC inside a `site-packages`.
fn wheels(packages: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let nvidia = packages.join("nvidia");
    ["cu13", "cuda_nvrtc"].into_iter().map(move |wheel| nvidia.join(wheel).join("lib"))
}

/// Compiles a kernel for Hopper in a test; returns `None` and prints a note where NVRTC is missing.
#[cfg(test)]
pub(crate) fn compile_for_test(source: &KernelSource, defines: Defines<'_>) -> Option<Vec<u8>> {
    if let Err(error) = load() {
        eprintln!("skipped: {error}");
        return None;
    }
    Some(compile(source, defines, (9, 0)).unwrap_or_else(|error| panic!("{error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_messages_reach_the_caller() {
        if load().is_err() {
            return;
        }
        let source = KernelSource { name: "wrong.cu", text: "extern \"C\" __global__ void wrong(int) { mistake }" };
        let text = compile(&source, &[("SIZE", "3")], (9, 0)).unwrap_err().to_string();
        assert!(text.contains("wrong.cu[SIZE=3]") && text.contains("mistake"), "{text}");
    }
}
