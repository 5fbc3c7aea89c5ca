//! Provides the plug-in: it is compiled once against the MPI of this host's `mpicc`, and kept in the cache folder
//! that also holds the shims. Later starts need no compiler.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};

use crate::cache;
use crate::error::{Error, Limit, Result};

const SOURCE: &str = include_str!("../../../../mpi-plugin/plugin.c");
const HEADER: &str = include_str!("../../../../mpi-plugin/plugin.h");

/// Interval between two tries to take the lock.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the plug-in for this host's MPI, compiled if necessary.
///
/// # Errors
/// [`Error::Unsupported`] that says what to install or to set; [`Error::Timeout`] if another process holds the
/// cache's lock until `deadline`.
pub fn provide(deadline: Instant) -> Result<PathBuf> {
    let folder = cache_folder()?;
    let source = short_digest(&[SOURCE.as_bytes(), HEADER.as_bytes()]);
    let compiler = std::env::var_os("MPICC").filter(|name| !name.is_empty()).unwrap_or_else(|| "mpicc".into());
    let Some(flags) = flags(&compiler) else {
        // A host without a compiler may share the cache with a host that has one.
        return newest(&folder, &source).ok_or_else(|| {
            Error::Unsupported(format!(
                "`{}` is not there to compile the MPI plug-in with: install the compiler of the MPI whose `mpirun` \
                 starts the job (Debian: libopenmpi-dev or libmpich-dev), or set `MPICC`",
                compiler.to_string_lossy()
            ))
        });
    };
    let path = folder.join(format!("{}.so", file_stem(&source, &flags)));
    if is_usable(&path) {
        return Ok(path);
    }
    let lock = std::fs::File::create(folder.join("mpi-plugin.lock")).map_err(|error| cache_error(&folder, error))?;
    let start = Instant::now();
    while rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            let during = format!("waiting for another process to compile the MPI plug-in in `{}`", folder.display());
            let (waited, missing) = (start.elapsed(), Vec::new());
            return Err(Error::Timeout { during, waited, missing, limit: Limit::Init });
        }
        std::thread::sleep(PAUSE);
    }
    // Another process may have compiled it while this one waited.
    if !is_usable(&path) {
        compile(&compiler, &folder, &path)?;
    }
    Ok(path)
}

/// The folder for plug-ins; logs once why it is not the configured one.
fn cache_folder() -> Result<PathBuf> {
    static LOGGED: Once = Once::new();
    let folder = cache::folder("mpi")?;
    if let Some(warning) = &folder.warning {
        LOGGED.call_once(|| tracing::warn!("{warning}"));
    }
    Ok(folder.path)
}

/// Whether the plug-in exists and may be loaded.
fn is_usable(path: &Path) -> bool {
    if !path.is_file() {
        return false;
    }
    let why = cache::untrusted(path);
    if let Some(why) = &why {
        tracing::warn!("an MPI plug-in is not loaded: {why}");
    }
    why.is_none()
}

fn cache_error(folder: &Path, error: std::io::Error) -> Error {
    Error::io(format!("keeping the MPI plug-in in `{}`", folder.display()), error)
}

/// Identifies an MPI compiler: the command line that the wrapper runs. `None` without a compiler.
fn flags(compiler: &OsString) -> Option<Vec<u8>> {
    let output = Command::new(compiler).arg("-show").output().ok()?;
    output.status.success().then_some(output.stdout)
}

fn file_stem(source: &str, flags: &[u8]) -> String {
    format!("mpi-plugin-{source}-{}", short_digest(&[flags]))
}

/// The newest plug-in that was compiled from this source.
fn newest(folder: &Path, source: &str) -> Option<PathBuf> {
    let prefix = format!("mpi-plugin-{source}-");
    let fits = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == "so")
            && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            && is_usable(path)
    };
    let found = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(fits);
    found.max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok())
}

fn compile(compiler: &OsString, folder: &Path, path: &Path) -> Result<()> {
    tracing::info!("compiling the MPI plug-in with `{}`, once", compiler.to_string_lossy());
    let work = path.with_extension("build");
    let outcome = (|| -> std::io::Result<Output> {
        std::fs::create_dir_all(&work)?;
        std::fs::write(work.join("plugin.c"), SOURCE)?;
        std::fs::write(work.join("plugin.h"), HEADER)?;
        Command::new(compiler)
            .args([
                "-O2",
                "-fPIC",
                "-shared",
                "-fvisibility=hidden",
                "plugin.c",
                "-o",
                "plugin.so",
                "-ldl",
                "-lpthread",
            ])
            .current_dir(&work)
            .output()
    })();
    let made = outcome.map_err(|error| cache_error(folder, error)).and_then(|output| {
        if output.status.success() {
            // Renamed into place, because a process that finds the file may load it at once.
            return std::fs::rename(work.join("plugin.so"), path).map_err(|error| cache_error(folder, error));
        }
        Err(Error::Unsupported(format!(
            "`{}` cannot compile the MPI plug-in: {}",
            compiler.to_string_lossy(),
            String::from_utf8_lossy(&output.stderr).trim()
        )))
    });
    let _ = std::fs::remove_dir_all(&work);
    made
}

fn short_digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..6].iter().map(|byte| format!("{byte:02x}")).collect()
}
