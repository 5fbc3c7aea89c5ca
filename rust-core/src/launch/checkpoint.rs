//! `smdrun checkpoint`: lists checkpoints, verifies them, and merges them into one file.

use std::path::{Path, PathBuf};

use clap::{Parser, Subcommand};

use crate::checkpoint::{Checkpoint, describe, merge};
use crate::error::Result;

/// Inspects checkpoints that `smp.CheckpointManager` wrote.
#[derive(Debug, Parser)]
#[command(name = "smdrun checkpoint")]
pub(super) struct CheckpointArgs {
    #[command(subcommand)]
    what: CheckpointCommand,
}

#[derive(Debug, Subcommand)]
enum CheckpointCommand {
    /// Shows step, layout and tensors
    Inspect(CheckpointPath),
    /// Reads everything and compares all checksums
    Verify(CheckpointPath),
    /// Writes the model's tensors, whole, into one safetensors file
    Merge {
        #[command(flatten)]
        place: CheckpointPath,
        /// The file to write
        out: PathBuf,
        /// Only tensors whose names have this prefix, which is removed; empty: all tensors
        #[arg(long, default_value = "model/")]
        prefix: String,
    },
}

#[derive(Debug, clap::Args)]
struct CheckpointPath {
    /// A checkpoint, or a folder of checkpoints, whose newest one is used
    directory: PathBuf,
    /// The name of the checkpoint in the folder
    #[arg(long)]
    tag: Option<String>,
}

/// The output of `smdrun checkpoint`.
pub(super) fn run(args: &CheckpointArgs) -> Result<String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    match &args.what {
        CheckpointCommand::Inspect(place) => Ok(describe(&place.open()?)),
        CheckpointCommand::Verify(place) => {
            let checkpoint = place.open()?;
            checkpoint.verify(threads)?;
            let bytes: u64 = checkpoint.manifest().files.iter().map(|file| file.bytes).sum();
            Ok(format!(
                "{}: {bytes} bytes in {} files are as they were written\n",
                checkpoint.tag(),
                checkpoint.manifest().files.len()
            ))
        }
        CheckpointCommand::Merge { place, out, prefix } => {
            let checkpoint = place.open()?;
            let count = merge(&checkpoint, prefix, out, threads)?;
            Ok(format!("{}: {count} tensors in `{}`\n", checkpoint.tag(), out.display()))
        }
    }
}

impl CheckpointPath {
    fn open(&self) -> Result<Checkpoint> {
        let is_one = self.tag.is_none() && self.directory.join(crate::checkpoint::MANIFEST).exists();
        if is_one {
            let name = self
                .directory
                .canonicalize()
                .ok()
                .and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
            return Checkpoint::open_folder(
                &self.directory,
                name.unwrap_or_else(|| self.directory.display().to_string()),
            );
        }
        Checkpoint::open(Path::new(&self.directory), self.tag.as_deref())
    }
}
