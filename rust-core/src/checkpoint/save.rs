//! One rank's part in saving checkpoints: copies, writes, meets the others, and lets the training go on meanwhile.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::MANIFEST;
use super::claim::Claim;
use super::commit::{NEWEST, check_tag, commit, hidden, note_name, put, retain};
use super::manifest::Manifest;
use super::staging::Staging;
use super::write::{Job, Note, write};
use crate::error::{Error, Result};

/// The file in which a rank says why it failed.
const FAILED: &str = "failed";
/// How long a rank sleeps between two looks at what others have written: a share of the time it has waited, within bounds.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// What all saves of a [`Saver`] have in common.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where checkpoints are.
    pub directory: PathBuf,
    /// This rank.
    pub rank: usize,
    /// Ranks that save.
    pub world: usize,
    /// Files, and threads, of this rank.
    pub threads: usize,
    /// Whether a checkpoint is on the disk before it gets its name.
    pub durable: bool,
    /// How many checkpoints are kept; `None`: all.
    pub keep: Option<usize>,
    /// How long a rank waits for others.
    pub timeout: Duration,
}

/// Which checkpoint is saved.
#[derive(Clone, Debug)]
struct Name {
    tag: String,
    step: u64,
    attempt: u64,
    layout: serde_json::Value,
    content: serde_json::Value,
}

/// See the module's text. One save is under way at a time.
#[derive(Debug)]
pub struct Saver {
    options: Options,
    staging: Arc<Mutex<Staging>>,
    outcome: Arc<Outcome>,
}

#[derive(Debug, Default)]
struct Outcome {
    /// Whether a thread writes.
    busy: Mutex<bool>,
    done: Condvar,
    error: Mutex<Option<Error>>,
}

impl Saver {
    /// For saves with these options.
    pub fn new(options: Options) -> Self {
        Self { options, staging: Arc::default(), outcome: Arc::default() }
    }

    /// Saves this rank's part of a checkpoint, and returns when the checkpoint has its name; with `asynchronous`, when the
    /// state has been copied. Every rank calls it with the same `tag`, `step` and `attempt`; layout and content are rank 0's.
    ///
    /// # Errors
    /// What went wrong, here or on another rank, in this save or in the one before that nobody waited for.
    ///
    /// # Safety
    /// The sources' memory is readable, and written by nobody until the call returns.
    #[expect(clippy::too_many_arguments, reason = "each is one word about the same checkpoint")]
    pub unsafe fn save(
        &self,
        tag: &str,
        step: u64,
        attempt: u64,
        layout: serde_json::Value,
        content: serde_json::Value,
        mut job: Job,
        asynchronous: bool,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        check_tag(tag)?;
        self.wait(look)?;
        let name = Name { tag: tag.to_owned(), step, attempt, layout, content };
        if !asynchronous {
            return run(&self.options, &name, &job, look);
        }
        // SAFETY: the caller's promise; the copies stay until the next save, which waits for this one.
        unsafe { self.staging.lock().take(&mut job.sources, self.options.threads)? };
        *self.outcome.busy.lock() = true;
        let (options, outcome) = (self.options.clone(), Arc::clone(&self.outcome));
        // Held, so that the copies outlive a saver that is dropped.
        let staging = Arc::clone(&self.staging);
        let spawned = std::thread::Builder::new().name("smd-checkpoint".into()).spawn(move || {
            let work = std::panic::AssertUnwindSafe(|| run(&options, &name, &job, &mut || Ok(())));
            let result = std::panic::catch_unwind(work).unwrap_or_else(|panic| Err(Error::from_panic(&*panic)));
            drop(staging);
            *outcome.error.lock() = result.err();
            *outcome.busy.lock() = false;
            outcome.done.notify_all();
        });
        if let Err(error) = spawned {
            *self.outcome.busy.lock() = false;
            return Err(Error::io("starting a thread that writes a checkpoint", error));
        }
        Ok(())
    }

    /// Waits for the save under way, if there is one; `look` is called now and then and may end the wait.
    ///
    /// # Errors
    /// As [`Saver::save`]; or `look`'s.
    pub fn wait(&self, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let mut busy = self.outcome.busy.lock();
        while *busy {
            if self.outcome.done.wait_for(&mut busy, LOOKS.1).timed_out() {
                look()?;
            }
        }
        drop(busy);
        self.outcome.error.lock().take().map_or(Ok(()), Err)
    }

    /// Whether a save is under way.
    pub fn is_busy(&self) -> bool {
        *self.outcome.busy.lock()
    }
}

fn run(options: &Options, name: &Name, job: &Job, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let folder = hidden(&options.directory, &name.tag, name.attempt);
    let result = Claim::take(&folder).and_then(|_claim| {
        write_part(options, &folder, job)?;
        if options.rank == 0 { finish(options, name, &folder, look) } else { follow(options, name, &folder, look) }
    });
    if let Err(error) = &result {
        // For the others, who wait, and look there also when the folder had its name already and `newest` could not be written. They
        // have their time limit if even this fails.
        let _ = fs::create_dir_all(&folder);
        let text = format!("rank {}: {}", options.rank, error.text());
        let _ = put(&folder.join(FAILED), text.as_bytes(), false);
    }
    result
}

fn write_part(options: &Options, folder: &Path, job: &Job) -> Result<()> {
    let note = write(folder, options.rank, &job.sources, options.threads, options.durable)?;
    let text = serde_json::to_vec(&note).expect("names and numbers are JSON");
    put(&folder.join(note_name(options.rank)), &text, options.durable)
}

/// Rank 0: when all notes are there, the checkpoint gets its name.
fn finish(options: &Options, name: &Name, folder: &Path, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let mut notes: Vec<Note> = Vec::with_capacity(options.world);
    let during = format!("saving checkpoint `{}`", name.tag);
    wait_until(
        options.timeout,
        look,
        || {
            while notes.len() < options.world {
                let path = folder.join(note_name(notes.len()));
                let Ok(bytes) = fs::read(&path) else { return others_failed(folder, &during).map(|()| false) };
                let note = serde_json::from_slice(&bytes).map_err(|error| super::damaged(&path, error.to_string()))?;
                notes.push(note);
            }
            Ok(true)
        },
        |waited| {
            let missing = (0..options.world).filter(|&rank| !folder.join(note_name(rank)).exists()).collect();
            Error::Timeout { during: during.clone(), waited, missing }
        },
    )?;
    let manifest = Manifest {
        format: Manifest::FORMAT.to_owned(),
        step: name.step,
        attempt: name.attempt,
        world: options.world,
        layout: name.layout.clone(),
        content: name.content.clone(),
        files: Vec::new(),
        tensors: Vec::new(),
    };
    commit(&options.directory, &name.tag, options.durable, manifest, notes)?;
    options.keep.map_or(Ok(()), |keep| retain(&options.directory, keep, &name.tag, name.attempt))
}

/// All others: until the folder has its name.
fn follow(options: &Options, name: &Name, folder: &Path, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let during = format!("saving checkpoint `{}`", name.tag);
    let manifest = options.directory.join(&name.tag).join(MANIFEST);
    let note = folder.join(note_name(options.rank));
    wait_until(
        options.timeout,
        look,
        || {
            if note.exists() {
                return others_failed(folder, &during).map(|()| false);
            }
            // Rank 0 removes notes when it has them all, shortly before the manifest has its place.
            let ours = fs::read(&manifest).ok().and_then(|bytes| Manifest::parse(&bytes).ok());
            // It is done when it is the newest: who goes on may read it at once.
            let named = || fs::read_to_string(options.directory.join(NEWEST)).is_ok_and(|text| text == name.tag);
            if ours.is_some_and(|found| found.attempt == name.attempt) && named() {
                return Ok(true);
            }
            others_failed(folder, &during).map(|()| false)
        },
        |waited| Error::Timeout { during: during.clone(), waited, missing: vec![0] },
    )
}

fn others_failed(folder: &Path, during: &str) -> Result<()> {
    match fs::read_to_string(folder.join(FAILED)) {
        Ok(text) => Err(Error::io(during, std::io::Error::other(text))),
        Err(_) => Ok(()),
    }
}

fn wait_until(
    timeout: Duration,
    look: &mut dyn FnMut() -> Result<()>,
    mut ready: impl FnMut() -> Result<bool>,
    expired: impl Fn(Duration) -> Error,
) -> Result<()> {
    let start = Instant::now();
    while !ready()? {
        let waited = start.elapsed();
        if waited > timeout {
            return Err(expired(waited));
        }
        look()?;
        std::thread::sleep((waited / 20).clamp(LOOKS.0, LOOKS.1));
    }
    Ok(())
}
