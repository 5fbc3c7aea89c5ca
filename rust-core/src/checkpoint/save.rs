//! One rank's part in saving checkpoints: copies, writes, meets the others, and lets the training go on meanwhile.

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

/// How long a caller sleeps between two looks at a save under way.
const LOOK: Duration = Duration::from_millis(50);

/// What all saves of a [`Saver`] have in common.
#[derive(Clone, Debug)]
pub struct SaveOptions {
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
    /// Whether the file system's exchange of two names may be used, if it has one.
    pub exchange: bool,
    /// Called now and then while a save in the background waits for other ranks; an error ends it.
    pub watch: fn() -> Result<()>,
}

/// Which checkpoint is saved.
#[derive(Clone, Debug)]
struct Content {
    step: u64,
    layout: serde_json::Value,
    content: serde_json::Value,
}

/// Saves checkpoints of one rank, asynchronously. One save is in flight at a time.
#[derive(Debug)]
pub struct Saver {
    options: SaveOptions,
    staging: Arc<Mutex<Staging>>,
    outcome: Arc<SaveOutcome>,
    /// The attempt that [`Saver::open`] has begun.
    opened: Mutex<Option<SaveAttempt>>,
    /// The attempt that was begun last.
    last: Mutex<Option<SaveSpec>>,
}

#[derive(Debug, Default)]
struct SaveOutcome {
    /// Whether a thread writes.
    busy: Mutex<bool>,
    done: Condvar,
    error: Mutex<Option<Error>>,
}

impl Saver {
    /// For saves with these options.
    pub fn new(options: SaveOptions) -> Self {
        Self {
            options,
            staging: Arc::default(),
            outcome: Arc::default(),
            opened: Mutex::default(),
            last: Mutex::default(),
        }
    }

    /// Begins a save before there is anything to write: a rank that cannot save the checkpoint `tag` learns it here. Rank 0 comes first, the
    /// others wait for it. [`Saver::save`] of the same `tag` and `attempt` goes on.
    ///
    /// # Errors
    /// As [`SaveAttempt::open`]; or what went wrong in the save before that nobody waited for.
    pub fn open(&self, tag: &str, attempt: u64, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.wait(look)?;
        let SaveOptions { directory, rank, world, durable, exchange, timeout, .. } = self.options.clone();
        let kind = CheckpointKind::Sharded;
        let setting =
            SaveSpec { directory, tag: tag.to_owned(), kind, number: attempt, rank, world, durable, exchange };
        // Its lock goes first.
        *self.opened.lock() = None;
        *self.last.lock() = Some(setting.clone());
        *self.opened.lock() = Some(SaveAttempt::open(setting, timeout, look)?);
        Ok(())
    }

    /// Saves this rank's part of a checkpoint, and returns when the checkpoint has its name; with `asynchronous`, when the
    /// state has been copied. Every rank calls it with the same `tag`, `step` and `attempt`; layout and content are rank 0's.
    ///
    /// # Errors
    /// What went wrong, here or on another rank, in this save or in the one before that nobody waited for.
    ///
    /// # Safety
    /// The sources' memory is readable, and written by nobody until the call returns; that of sources which the job's owner holds, until
    /// the owner is dropped.
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
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let begun = |found: &Option<SaveAttempt>| {
            found.as_ref().is_some_and(|found| found.setting().tag == tag && found.setting().number == attempt)
        };
        if !begun(&self.opened.lock()) {
            self.open(tag, attempt, look)?;
        }
        let attempt = self.opened.lock().take().expect("it is open");
        let content = Content { step, layout, content };
        if !asynchronous {
            return run(&self.options, attempt, content, &job, look);
        }
        // SAFETY: the caller's promise; the copies stay until the next save, which waits for this one.
        let staged = unsafe { self.staging.lock().take(&mut job.sources, self.options.threads) };
        if let Err(error) = staged {
            attempt.fail(&error);
            return Err(error);
        }
        *self.outcome.busy.lock() = true;
        let (options, outcome) = (self.options.clone(), Arc::clone(&self.outcome));
        // Held, so that the copies outlive a saver that is dropped.
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

    /// Waits for the save under way, if there is one; `look` is called now and then and may end the wait.
    ///
    /// # Errors
    /// As [`Saver::save`]; or `look`'s.
    pub fn wait(&self, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let mut busy = self.outcome.busy.lock();
        while *busy {
            if self.outcome.done.wait_for(&mut busy, LOOK).timed_out() {
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

    /// Ends the attempt that was begun last, of which all ranks know that it has failed: rank 0 takes its files away. Without this, the next
    /// save does.
    ///
    /// # Errors
    /// If something cannot be moved or removed.
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
    look: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let result = write(&attempt.data(), options.rank, &job.sources, options.threads, options.durable)
        .and_then(|note| attempt.report(&note))
        .and_then(|()| match options.rank {
            0 => finish(options, &attempt, content, look),
            _ => attempt.follow(options.timeout, look),
        });
    match &result {
        Ok(()) => attempt.leave(),
        Err(error) => attempt.fail(error),
    }
    result
}

/// Rank 0: when all have reported, the checkpoint gets its name.
fn finish(
    options: &SaveOptions,
    attempt: &SaveAttempt,
    content: Content,
    look: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    let notes = attempt.gather(options.timeout, look)?;
    commit(attempt, attempt.manifest(content.step, content.layout, content.content), notes)?;
    if let Some(keep) = options.keep {
        retain(attempt, keep)?;
    }
    attempt.announce()
}
