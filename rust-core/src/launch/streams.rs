//! The output of one rank: its pipes, cut into lines, and the files that get a copy.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::output::{OutputPiece, Sink, Splitter};
use super::process::Pipes;
use crate::error::{Error, Result};

/// One open pipe.
struct OutputStream {
    sink: Sink,
    pipe: OwnedFd,
    splitter: Splitter,
    /// The file that gets a copy of the bytes, until one cannot be written.
    file: Option<(PathBuf, File)>,
}

/// The output pipes of one rank.
pub(super) struct Streams(Vec<OutputStream>);

impl Streams {
    /// Takes over a rank's pipes. Files in `folder` get copies.
    ///
    /// # Errors
    /// [`Error::Io`] if the files cannot be created.
    pub fn new(pipes: Pipes, folder: Option<&Path>) -> Result<Self> {
        let stream = |sink, pipe| {
            let file = folder.map(|folder| output_file(folder, sink)).transpose()?;
            Ok::<_, Error>(OutputStream { sink, pipe, splitter: Splitter::default(), file })
        };
        Ok(Self(vec![stream(Sink::Stdout, pipes.stdout)?, stream(Sink::Stderr, pipes.stderr)?]))
    }

    /// Whether both pipes have ended.
    pub fn ended(&self) -> bool {
        self.0.is_empty()
    }

    /// The pipes to poll.
    pub fn pipes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(|stream| stream.pipe.as_fd())
    }

    /// Reads the available bytes, at most one buffer per pipe.
    pub fn read(&mut self, buffer: &mut [u8], emit: &mut dyn FnMut(Sink, OutputPiece)) {
        self.0.retain_mut(|stream| {
            let sink = stream.sink;
            let mut emit = |piece| emit(sink, piece);
            match rustix::io::read(&stream.pipe, &mut *buffer) {
                Ok(0) => {
                    stream.splitter.end(&mut emit);
                    false
                }
                Ok(read) => {
                    if let Some((path, file)) = &mut stream.file
                        && let Err(error) = file.write_all(&buffer[..read])
                    {
                        // A full disk must not end the job.
                        eprintln!("smdrun: warning: the output in `{}` is incomplete: {error}", path.display());
                        stream.file = None;
                    }
                    stream.splitter.feed(&buffer[..read], &mut emit);
                    true
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => true,
                Err(_) => false,
            }
        });
    }
}

/// Removes the files of an earlier job.
pub(super) fn remove_files(folder: &Path) {
    for name in ["stdout", "stderr"] {
        // A file that cannot be removed is appended to.
        let _ = std::fs::remove_file(folder.join(name));
    }
}

/// Opens the file that gets a copy of a stream. A worker that replaces another one appends to its file.
fn output_file(folder: &Path, sink: Sink) -> Result<(PathBuf, File)> {
    let path = folder.join(if sink == Sink::Stdout { "stdout" } else { "stderr" });
    let open = || File::options().create(true).append(true).open(&path);
    match std::fs::create_dir_all(folder).and_then(|()| open()) {
        Ok(file) => Ok((path, file)),
        Err(error) => Err(Error::io(format!("making `{}`", path.display()), error)),
    }
}
