//! One rank's part in saving checkpoints: copies tensors, writes files, and synchronizes with the other ranks in
//! the background.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::attempt::{self, SaveAttempt, SaveSpec};
use super::commit::{commit, retain};
use super::manifest::CheckpointKind;
use super::staging::Staging;
use super::write::{RankSave, write};
use crate::error::{Error, Result};

/// How long a caller sleeps between two polls of a running save.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Options that are common to all saves of a [`Saver`].
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// The directory of checkpoints.
    pub directory: PathBuf,
    /// This rank.
    pub rank: usize,
    /// Number of ranks that save.
    pub world: usize,
    /// Number of files that this rank writes, each in its own thread.
    pub threads: usize,
    /// Whether a checkpoint is synced to the disk before it is renamed.
    pub durable: bool,
    /// How many checkpoints are kept; `None` for all.
    pub keep: Option<usize>,
    /// How long a rank waits for others.
    pub timeout: Duration,
    /// Whether `renameat2` may exchange two names, where the file system supports it.
    pub exchange: bool,
    /// Called periodically while a background save waits for other ranks; an error ends the wait.
    pub watch: fn() -> Result<()>,
}

/// The checkpoint that is saved.
#[derive(Clone, Debug)]
struct Content {
    step: u64,
    layout: serde_json::Value,
    content: serde_json::Value,
}

/// Saves checkpoints of one rank, asynchronously. At most one save is in progress.
#[derive(Debug)]
pub struct Saver {
    options: SaveOptions,
    staging: Arc<Mutex<Staging>>,
    outcome: Arc<SaveOutcome>,
    /// The attempt that [`Saver::open`] created and [`Saver::save`] has not used yet.
    opened: Mutex<Option<SaveAttempt>>,
    /// The attempt of the last save.
    last: Mutex<Option<SaveSpec>>,
}

#[derive(Debug, Default)]
struct SaveOutcome {
    /// Whether a background thread is writing.
    busy: Mutex<bool>,
    done: Condvar,
    error: Mutex<Option<Error>>,
}

impl Saver {
    /// Creates a saver with these options.
    pub fn new(options: SaveOptions) -> Self {
        Self {
            options,
            staging: Arc::default(),
            outcome: Arc::default(),
            opened: Mutex::default(),
            last: Mutex::default(),
        }
    }

    /// Opens a save before there is anything to write, so that a rank that cannot save the checkpoint `tag` fails
    /// here. Rank 0 comes first, the other ranks wait for it. [`Saver::save`] with the same `tag` and `attempt`
    /// continues.
    ///
    /// # Errors
    /// As [`SaveAttempt::open`]; or the error of the previous background save, if no call has returned it yet.
    pub fn open(&self, tag: &str, attempt: u64, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.wait(check)?;
        let SaveOptions { directory, rank, world, durable, exchange, timeout, .. } = self.options.clone();
        let kind = CheckpointKind::Sharded;
        let setting =
            SaveSpec { directory, tag: tag.to_owned(), kind, number: attempt, rank, world, durable, exchange };
        // Releases the lock of the previous attempt first.
        *self.opened.lock() = None;
        *self.last.lock() = Some(setting.clone());
        *self.opened.lock() = Some(SaveAttempt::open(setting, timeout, check)?);
        Ok(())
    }

    /// Saves this rank's part of a checkpoint. Returns when the checkpoint is complete; with `asynchronous`, when the
    /// state has been copied. Every rank calls it with the same `tag`, `step` and `attempt`; layout and content are
    /// those of rank 0.
    ///
    /// # Errors
    /// The error of this save, on this rank or another, or of the previous background save if no call has returned it
    /// yet.
    ///
    /// # Safety
    /// The sources' memory is readable and not written until the call returns; for sources that the job's owner
    /// holds, until the owner is dropped.
    #[expect(clippy::too_many_arguments, reason = "each is one word about the same checkpoint")]
    pub unsafe fn save(
        &self,
        tag: &str,
        step: u64,
        attempt: u64,
        layout: serde_json::Value,
        content: serde_json::Value,
        mut job: RankSave,
        asynchronous: bool,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let begun = |found: &Option<SaveAttempt>| {
            found.as_ref().is_some_and(|found| found.setting().tag == tag && found.setting().number == attempt)
        };
        if !begun(&self.opened.lock()) {
            self.open(tag, attempt, check)?;
        }
        let attempt = self.opened.lock().take().expect("it is open");
        let content = Content { step, layout, content };
        if !asynchronous {
            return run(&self.options, attempt, content, &job, check);
        }
        // SAFETY: the caller's promise; the copies stay until the next save, which waits for this one.
        let staged = unsafe { self.staging.lock().take(&mut job.sources, self.options.threads) };
        if let Err(error) = staged {
            attempt.fail(&error);
            return Err(error);
        }
        *self.outcome.busy.lock() = true;
        let (options, outcome) = (self.options.clone(), Arc::clone(&self.outcome));
        // Keeps the copies alive if the saver is dropped.
        let staging = Arc::clone(&self.staging);
        let spawned = std::thread::Builder::new().name("smd-checkpoint".into()).spawn(move || {
            let watch = options.watch;
            let work = std::panic::AssertUnwindSafe(|| run(&options, attempt, content, &job, &mut || watch()));
            let result = std::panic::catch_unwind(work).unwrap_or_else(|panic| Err(Error::from_panic(&*panic)));
            drop((staging, job));
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

    /// Waits for the save in progress, if there is one; `check` is called periodically and its error ends the wait.
    ///
    /// # Errors
    /// As [`Saver::save`]; or the error of `check`.
    pub fn wait(&self, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let mut busy = self.outcome.busy.lock();
        while *busy {
            if self.outcome.done.wait_for(&mut busy, POLL_INTERVAL).timed_out() {
                check()?;
            }
        }
        drop(busy);
        self.outcome.error.lock().take().map_or(Ok(()), Err)
    }

    /// Whether a save is in progress.
    pub fn is_busy(&self) -> bool {
        *self.outcome.busy.lock()
    }

    /// Closes the attempt that was opened last, if all ranks know that it has failed: rank 0 removes its files. If
    /// this is not called, the next save removes them.
    ///
    /// # Errors
    /// If a file cannot be moved or removed.
    pub fn discard(&self) -> Result<()> {
        *self.opened.lock() = None;
        self.last.lock().take().map_or(Ok(()), |setting| attempt::discard(&setting))
    }
}

fn run(
    options: &SaveOptions,
    attempt: SaveAttempt,
    content: Content,
    job: &RankSave,
    check: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let result = write(&attempt.data(), options.rank, &job.sources, options.threads, options.durable)
        .and_then(|note| attempt.report(&note))
        .and_then(|()| match options.rank {
            0 => finish(options, &attempt, content, check),
            _ => attempt.follow(options.timeout, check),
        });
    match &result {
        Ok(()) => attempt.leave(),
        Err(error) => attempt.fail(error),
    }
    result
}

/// On rank 0: renames the checkpoint when all ranks have reported.
fn finish(
    options: &SaveOptions,
    attempt: &SaveAttempt,
    content: Content,
    check: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let notes = attempt.gather(options.timeout, check)?;
    commit(attempt, attempt.manifest(content.step, content.layout, content.content), notes)?;
    if let Some(keep) = options.keep {
        retain(attempt, keep)?;
    }
    attempt.announce()
}
