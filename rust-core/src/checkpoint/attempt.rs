//! One attempt to save a checkpoint: a hidden folder into which only its ranks write, until its content is
//! renamed to the checkpoint.
//!
//! ```text
//!   DIR/.step-110.91c0....smd-attempt/rank-00003.status     the progress of rank 3
//!   DIR/.step-110.91c0....smd-attempt/rank-00003.json       the files that rank 3 wrote
//!   DIR/.step-110.91c0....smd-attempt/data/                 the content of DIR/step-110
//!   DIR/.step-110.91c0....smd-attempt/old/                  the checkpoint that it replaces, until that is removed
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::files::{put, sync_folder};
use super::manifest::{CheckpointKind, FileEntry, Manifest};
use super::mark::sum;
use super::recover::{prepare, settle_and_remove};
use super::status::{self, Status, StatusFile};
use super::write::WrittenFiles;
use super::{commit, damaged, failed, place};
use crate::error::{Error, Limit, Result};

/// The folder with the content of the new checkpoint.
pub(super) const DATA: &str = "data";
/// The folder for the checkpoint that is replaced.
pub(super) const OLD: &str = "old";
/// The suffix of the names of attempts' folders.
const ENDING: &str = ".smd-attempt";
/// How long a rank sleeps between two polls of other ranks' files: a fraction of the time it has waited, within
/// bounds.
const POLL_INTERVAL_BOUNDS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The contents of an attempt, and the ranks that take part. All fields except `rank` are equal on all ranks.
#[derive(Clone, Debug)]
pub struct SaveSpec {
    /// The directory of checkpoints.
    pub directory: PathBuf,
    /// The checkpoint's name.
    pub tag: String,
    /// The kind of checkpoint.
    pub kind: CheckpointKind,
    /// The id of the attempt, which no two saves share (CKPT-2).
    pub number: u64,
    /// This rank.
    pub rank: usize,
    /// Number of ranks that save.
    pub world: usize,
    /// Whether the checkpoint is synced to the disk before it is renamed.
    pub durable: bool,
    /// Whether `renameat2` may exchange two names, where the file system supports it.
    pub exchange: bool,
}

impl SaveSpec {
    /// The attempt's folder.
    pub(super) fn folder(&self) -> PathBuf {
        self.directory.join(format!(".{}.{:016x}{ENDING}", self.tag, self.number))
    }

    /// The name for error messages.
    fn during(&self) -> String {
        format!("saving checkpoint `{}`", self.tag)
    }
}

/// The folder of an attempt, and the fields of its name.
#[derive(Debug)]
pub(super) struct AttemptFolder {
    pub(super) folder: PathBuf,
    pub(super) tag: String,
    pub(super) number: u64,
}

/// The attempts in `directory`, by their names.
pub(super) fn folders(directory: &Path) -> Vec<AttemptFolder> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (tag, number) = name.strip_suffix(ENDING)?.strip_prefix('.')?.rsplit_once('.')?;
            let is_number = number.len() == 16 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
            let number = u64::from_str_radix(number, 16).ok().filter(|_| is_number)?;
            let is_ours = place::check_tag(tag).is_ok() && entry.file_type().is_ok_and(|kind| kind.is_dir());
            is_ours.then(|| AttemptFolder { folder: entry.path(), tag: tag.to_owned(), number })
        })
        .collect()
}

/// This rank's part in one attempt to save a checkpoint.
#[derive(Debug)]
pub struct SaveAttempt {
    setting: SaveSpec,
    folder: PathBuf,
    status: StatusFile,
}

impl SaveAttempt {
    /// Opens the attempt. Rank 0 checks that the checkpoint may be replaced, removes the remains of interrupted
    /// attempts, and creates the folder. The other ranks wait for the folder, and join.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a file or folder that a save must not replace has the checkpoint's name;
    /// [`Error::Timeout`] if rank 0 does not create the folder in time; or the error of `check`.
    pub fn open(setting: SaveSpec, timeout: Duration, check: &mut dyn FnMut() -> Result<()>) -> Result<Self> {
        let folder = setting.folder();
        if setting.rank > 0 {
            place::check_tag(&setting.tag)?;
            let expired = |waited| Error::Timeout {
                during: setting.during(),
                waited,
                missing: vec![0],
                limit: Limit::Checkpoint,
            };
            // An NFS client may have cached that the folder did not exist; opening it asks the server.
            let is_there = || Ok(File::open(folder.join(DATA)).is_ok());
            wait_until(timeout, check, is_there, expired)?;
            let status = StatusFile::create(&folder, setting.rank)?;
            return Ok(Self { setting, folder, status });
        }
        place::check(&setting.directory, &setting.tag, setting.kind)?;
        prepare(&setting.directory, setting.durable)?;
        fs::create_dir(&folder).map_err(failed("creating", &folder))?;
        let made = StatusFile::create(&folder, 0).and_then(|status| {
            let data = folder.join(DATA);
            fs::create_dir(&data).map_err(failed("creating", &data)).map(|()| status)
        });
        match made {
            Ok(status) => Ok(Self { setting, folder, status }),
            Err(error) => {
                let _ = settle_and_remove(&setting.directory, &setting.tag, setting.number, &folder);
                Err(error)
            }
        }
    }

    /// The options of the attempt.
    pub fn setting(&self) -> &SaveSpec {
        &self.setting
    }

    /// The attempt's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder with the content of the new checkpoint.
    pub fn data(&self) -> PathBuf {
        self.folder.join(DATA)
    }

    /// Writes the note with which rank 0 learns the files that this rank has written.
    pub(super) fn report(&self, note: &WrittenFiles) -> Result<()> {
        let text = serde_json::to_vec(note).expect("names and numbers are JSON");
        put(&self.folder, &self.folder, &note_name(self.setting.rank), &text, self.setting.durable)?;
        self.status.set(&Status::Written)
    }

    /// As [`SaveAttempt::report`], for files that the caller wrote into [`SaveAttempt::data`].
    ///
    /// # Errors
    /// If one of the files cannot be read.
    pub fn report_files(&self, names: &[String]) -> Result<()> {
        let mut note = WrittenFiles::default();
        for name in names {
            let path = self.data().join(name);
            let file = File::open(&path).map_err(failed("opening", &path))?;
            if self.setting.durable {
                file.sync_all().map_err(failed("syncing", &path))?;
            }
            let bytes = file.metadata().map_err(failed("reading", &path))?.len();
            let header_crc = sum(&file, bytes).map_err(failed("reading", &path))?;
            note.files.push(FileEntry { name: name.clone(), bytes, header_bytes: bytes, header_crc });
        }
        self.report(&note)
    }

    /// On rank 0: renames the complete attempt to the checkpoint's name, and removes all but `keep` checkpoints of
    /// this kind.
    ///
    /// # Errors
    /// If a report is missing, or the folder cannot be renamed. The previous checkpoint then stays.
    pub fn commit(&self, step: Option<u64>, keep: Option<usize>) -> Result<()> {
        let SaveSpec { directory, kind, .. } = &self.setting;
        match kind {
            CheckpointKind::Full => return commit::commit_full(self),
            CheckpointKind::Tensorflow => {
                return Err(Error::InvalidArgument("TensorFlow names its files itself".into()));
            }
            CheckpointKind::Sharded | CheckpointKind::Partial => {}
        }
        let notes = (0..self.setting.world).map(|rank| self.note(rank)).collect::<Result<Vec<_>>>()?;
        let step = match step {
            Some(step) => step,
            None => place::list(directory, *kind)?.pop().map_or(0, |(step, _)| step + 1),
        };
        commit::commit(self, self.manifest(step, "null".into(), "null".into()), notes)?;
        keep.map_or(Ok(()), |keep| commit::retain(self, keep))
    }

    /// Creates a manifest without files.
    pub(super) fn manifest(&self, step: u64, layout: serde_json::Value, content: serde_json::Value) -> Manifest {
        Manifest {
            format: Manifest::FORMAT.to_owned(),
            kind: self.setting.kind,
            step,
            attempt: self.setting.number,
            world: self.setting.world,
            layout,
            content,
            files: Vec::new(),
            tensors: Vec::new(),
        }
    }

    fn note(&self, rank: usize) -> Result<WrittenFiles> {
        let path = self.folder.join(note_name(rank));
        let bytes = fs::read(&path).map_err(failed("reading", &path))?;
        serde_json::from_slice(&bytes).map_err(|error| damaged(&path, error.to_string()))
    }

    /// On rank 0: waits until all ranks have reported, and returns the reports.
    pub(super) fn gather(&self, timeout: Duration, check: &mut dyn FnMut() -> Result<()>) -> Result<Vec<WrittenFiles>> {
        let world = self.setting.world;
        let (mut missing, mut seen) = ((0..world).collect::<Vec<_>>(), vec![false; world]);
        let mut ready = || {
            let mut failure = None;
            missing.retain(|&rank| match status::read(&self.folder, rank) {
                Some(Status::Failed(why)) => {
                    failure.get_or_insert(why);
                    true
                }
                Some(status) => {
                    seen[rank] = true;
                    status != Status::Written
                }
                // Not even the reason could be written to that rank's disk.
                None if seen[rank] && !status::exists(&self.folder, rank) => {
                    failure.get_or_insert_with(|| format!("rank {rank}: it stopped, and could not write the reason"));
                    true
                }
                None => true,
            });
            match failure {
                Some(why) => Err(Error::io(self.setting.during(), std::io::Error::other(why))),
                None => Ok(missing.is_empty()),
            }
        };
        let start = Instant::now();
        let late = wait_until(timeout, check, &mut ready, |waited| Error::Timeout {
            during: self.setting.during(),
            waited,
            missing: Vec::new(),
            limit: Limit::Checkpoint,
        });
        match late {
            Err(Error::Timeout { during, .. }) => {
                let waited = start.elapsed();
                return Err(Error::Timeout { during, waited, missing, limit: Limit::Checkpoint });
            }
            other => other?,
        }
        (0..world).map(|rank| self.note(rank)).collect()
    }

    /// On rank 0: reports to the other ranks that the checkpoint is complete under its name.
    pub(super) fn announce(&self) -> Result<()> {
        self.status.set(&Status::Committed)
    }

    /// On the other ranks: waits until rank 0 has renamed the checkpoint.
    pub(super) fn follow(&self, timeout: Duration, check: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let ready = || match status::read(&self.folder, 0) {
            Some(Status::Committed) => Ok(true),
            Some(Status::Failed(why)) => Err(Error::io(self.setting.during(), std::io::Error::other(why))),
            None if !status::exists(&self.folder, 0) => {
                let why = "rank 0: it stopped, and could not write the reason";
                Err(Error::io(self.setting.during(), std::io::Error::other(why)))
            }
            _ => Ok(false),
        };
        let expired = |waited| Error::Timeout {
            during: self.setting.during(),
            waited,
            missing: vec![0],
            limit: Limit::Checkpoint,
        };
        wait_until(timeout, check, ready, expired)
    }

    /// Fails an attempt that this rank cannot complete: frees disk space, and reports the reason to the other ranks.
    pub(super) fn fail(&self, error: &Error) {
        let ours = format!("rank-{:05}-", self.setting.rank);
        for entry in fs::read_dir(self.data()).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&ours) {
                let _ = fs::remove_file(entry.path());
            }
        }
        let text = error.text();
        // Rank 0 forwards the reason of another rank.
        let own = format!("rank {}: ", self.setting.rank);
        let during = format!("{}: rank ", self.setting.during());
        let why = if text.starts_with(&during) { text[during.len() - "rank ".len()..].to_owned() } else { own + &text };
        if self.status.set(&Status::Failed(why)).is_err() {
            self.status.remove();
        }
    }

    /// Closes a complete attempt. The last rank removes its folder.
    pub fn leave(self) {
        if self.setting.rank > 0 {
            self.status.remove();
        }
        if status::all(&self.folder).iter().all(|path| path.ends_with("rank-00000.status")) {
            let SaveSpec { directory, tag, number, .. } = &self.setting;
            let _ = settle_and_remove(directory, tag, *number, &self.folder);
        }
    }

    /// Closes an attempt that all ranks know to have failed. Rank 0 moves the replaced checkpoint back and removes
    /// the attempt's folder.
    ///
    /// # Errors
    /// If a file cannot be moved or removed.
    pub fn discard(self) -> Result<()> {
        discard(&self.setting)
    }
}

/// As [`SaveAttempt::discard`].
///
/// # Errors
/// As [`SaveAttempt::discard`].
pub(super) fn discard(setting: &SaveSpec) -> Result<()> {
    if setting.rank > 0 {
        return Ok(());
    }
    settle_and_remove(&setting.directory, &setting.tag, setting.number, &setting.folder())
}

/// The name of the file in which a rank reports the files that it wrote.
pub(super) fn note_name(rank: usize) -> String {
    format!("rank-{rank:05}.json")
}

/// With `durable`, syncs the folder `path`, so that the names in it are on the disk.
pub(super) fn sync_if(durable: bool, path: &Path) -> Result<()> {
    if durable { sync_folder(path) } else { Ok(()) }
}

fn wait_until(
    timeout: Duration,
    check: &mut dyn FnMut() -> Result<()>,
    mut ready: impl FnMut() -> Result<bool>,
    expired: impl Fn(Duration) -> Error,
) -> Result<()> {
    let start = Instant::now();
    while !ready()? {
        let waited = start.elapsed();
        if waited > timeout {
            return Err(expired(waited));
        }
        check()?;
        std::thread::sleep((waited / 20).clamp(POLL_INTERVAL_BOUNDS.0, POLL_INTERVAL_BOUNDS.1));
    }
    Ok(())
}
