//! The ranks that run on this host, under any launcher: their processes hold a segment of counters (MET-2).

use std::fs;
use std::path::Path;

use super::{Counters, SEGMENT, Snapshot};
use crate::transport::shm::segment::SharedSegment;

/// The counters of one rank, mapped.
pub(crate) struct RankCounters {
    pid: u64,
    segment: SharedSegment,
}

impl RankCounters {
    /// Those of process `pid`, if it has a segment that this user may read, made by this version of the library.
    pub(crate) fn of(pid: u64) -> Option<Self> {
        let folder = format!("/proc/{pid}/fd");
        let target = format!("/memfd:{SEGMENT} (deleted)");
        let is_it = |path: &Path| fs::read_link(path).is_ok_and(|found| found == Path::new(&target));
        let found = fs::read_dir(folder).ok()?.flatten().find(|entry| is_it(&entry.path()))?;
        let descriptor = found.file_name().to_str()?.parse().ok()?;
        let bytes = Counters::segment_bytes();
        let segment = SharedSegment::attach([pid, descriptor, bytes as u64], bytes).ok()?;
        Some(Self { pid, segment })
    }

    /// The counters now. None if they are another process's: a forked child inherits the segment.
    pub(crate) fn read(&self) -> Option<Snapshot> {
        Snapshot::of_another(Counters::in_segment(&self.segment)).filter(|snapshot| snapshot.pid == self.pid)
    }

    /// Whether the process has not ended.
    pub(crate) fn is_alive(&self) -> bool {
        Path::new(&format!("/proc/{}/fd", self.pid)).exists()
    }
}

/// All ranks on this host whose counters this user may read.
pub(crate) fn all() -> Vec<RankCounters> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(RankCounters::of).filter(|rank| rank.read().is_some()).collect()
}
