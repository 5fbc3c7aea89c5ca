//! The end of each rank's error output, and the rank that failed first.

use std::collections::VecDeque;
use std::time::Duration;

use super::process::Exit;

/// Number of lines of standard error that are kept for each rank.
const KEPT_LINES: usize = 200;
/// Number of these lines that the report shows.
const SHOWN_LINES: usize = 24;
/// The kernel closes a dying process's files and sockets before it notifies the parent. So peers may raise exceptions
/// this long before the death is noticed here.
const DEATH_NOTICE_DELAY: Duration = Duration::from_millis(500);
/// Longest line that is kept without truncation.
const KEPT_LINE_BYTES: usize = 2048;

/// The last lines of a rank's standard error.
#[derive(Debug, Default)]
pub(super) struct Tail {
    lines: VecDeque<String>,
    /// When the last traceback began.
    traceback_at: Option<Duration>,
}

/// The line with which Python begins the traceback of an uncaught exception.
const TRACEBACK: &str = "Traceback (most recent call last):";

impl Tail {
    /// Adds a line that was printed at `at`, a time since the start.
    pub fn push(&mut self, line: &[u8], at: Duration) {
        let line = &line[..line.len().min(KEPT_LINE_BYTES)];
        let line = String::from_utf8_lossy(line).into_owned();
        if line == TRACEBACK {
            self.traceback_at = Some(at);
        }
        if self.lines.len() == KEPT_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// The last traceback and all lines after it; without one, the last few lines.
    fn shown(&self) -> Vec<&str> {
        let lines: Vec<_> = self.lines.iter().map(String::as_str).collect();
        match lines.iter().rposition(|line| *line == TRACEBACK) {
            Some(start) if lines.len() - start > SHOWN_LINES => {
                let end = lines.len() + 2 - SHOWN_LINES;
                [&lines[start..=start], &["  ..."], &lines[end..]].concat()
            }
            Some(start) => lines[start..].to_vec(),
            None => lines[lines.len().saturating_sub(6)..].to_vec(),
        }
    }

    /// Whether the last traceback of `rank` ends with [`crate::Error::PeerFailed`], under any exception class.
    fn blames_a_peer(&self, rank: usize) -> bool {
        let Some(start) = self.lines.iter().rposition(|line| line == TRACEBACK) else { return false };
        let mark = format!(" while rank {rank} was in ");
        self.lines.iter().skip(start).any(|line| !line.starts_with(' ') && line.contains(&mark))
    }

    /// The line that names the exception: the first line after the frames of the last traceback that is not indented.
    pub fn exception(&self) -> Option<&str> {
        let start = self.lines.iter().rposition(|line| line == TRACEBACK)?;
        self.lines.iter().skip(start + 1).find(|line| !line.is_empty() && !line.starts_with(' ')).map(String::as_str)
    }
}

/// How and when a rank ended.
#[derive(Debug)]
pub(super) struct RankExit {
    pub rank: usize,
    pub exit: Exit,
    pub at: Duration,
    /// Whether `smdrun` had sent it a signal before.
    pub was_signaled: bool,
}

impl RankExit {
    /// When its failure began: a process that raised an exception may take long to end.
    fn began(&self, tails: &[Tail]) -> Duration {
        match self.exit {
            Exit::Signal(_) => self.at.saturating_sub(DEATH_NOTICE_DELAY),
            Exit::Code(_) => tails[self.rank].traceback_at.map_or(self.at, |traceback| traceback.min(self.at)),
        }
    }

    /// Whether it failed only because another rank was gone.
    fn is_consequence(&self, tails: &[Tail]) -> bool {
        tails[self.rank].blames_a_peer(self.rank)
    }
}

/// The rank that failed first (RUN-4), if any failed by itself.
pub(super) fn first_failure<'a>(ends: &'a [RankExit], tails: &[Tail]) -> Option<&'a RankExit> {
    ends.iter()
        .filter(|end| !end.exit.success() && !end.was_signaled)
        .min_by_key(|end| (end.is_consequence(tails), end.began(tails)))
}

/// The final report of a failed job.
pub(super) fn failure(first: &RankExit, ends: &[RankExit], tails: &[Tail]) -> String {
    let mut text = format!("rank {} failed first: {} after {:.1} s", first.rank, first.exit, first.at.as_secs_f64());
    for line in tails[first.rank].shown() {
        text.push_str("\n    ");
        text.push_str(line);
    }
    let mut others: Vec<_> = ends.iter().filter(|end| end.rank != first.rank && !end.exit.success()).collect();
    others.sort_by_key(|end| end.rank);
    const MAX_LISTED: usize = 16;
    for end in others.iter().take(MAX_LISTED) {
        let why = match (end.was_signaled, tails[end.rank].exception()) {
            (_, Some(exception)) => format!(": {exception}"),
            (true, None) => ", ended by smdrun".to_owned(),
            (false, None) => String::new(),
        };
        text.push_str(&format!("\nsmdrun: then rank {}: {}{why}", end.rank, end.exit));
    }
    if others.len() > MAX_LISTED {
        text.push_str(&format!("\nsmdrun: then {} more", others.len() - MAX_LISTED));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(lines: &[&str], at_ms: u64) -> Tail {
        let mut tail = Tail::default();
        for line in lines {
            tail.push(line.as_bytes(), Duration::from_millis(at_ms));
        }
        tail
    }

    fn end(rank: usize, exit: Exit, at_ms: u64) -> RankExit {
        RankExit { rank, exit, at: Duration::from_millis(at_ms), was_signaled: false }
    }

    const RAISED: &[&str] = &["warming up", TRACEBACK, "  File \"t.py\", line 3, in <module>", "ValueError: bad batch"];
    const VICTIM: &[&str] = &[
        TRACEBACK,
        "  File \"t.py\", line 9, in <module>",
        "PeerFailedError: rank 1 failed (ValueError) while rank 0 was in barrier",
    ];

    #[test]
    fn a_failure_without_another_cause_is_first_even_if_it_ended_last() {
        let tails = [tail(VICTIM, 1100), tail(RAISED, 1000)];
        let ends = [end(0, Exit::Code(1), 1200), end(1, Exit::Code(1), 1500)];
        let first = first_failure(&ends, &tails).expect("both failed");
        assert_eq!(first.rank, 1);
        assert_eq!(
            failure(first, &ends, &tails),
            "rank 1 failed first: exit code 1 after 1.5 s\n    Traceback (most recent call last):\n    \
             \u{20} File \"t.py\", line 3, in <module>\n    ValueError: bad batch\n\
             smdrun: then rank 0: exit code 1: PeerFailedError: rank 1 failed (ValueError) while rank 0 was in barrier"
        );
    }

    #[test]
    fn the_earlier_exception_is_first() {
        let tails = [tail(RAISED, 1100), tail(RAISED, 1000)];
        let ends = [end(0, Exit::Code(1), 1200), end(1, Exit::Code(1), 1500)];
        assert_eq!(first_failure(&ends, &tails).expect("both failed").rank, 1);
    }

    #[test]
    fn a_killed_rank_is_reported_before_the_ranks_that_failed_after_it() {
        let tails = [tail(VICTIM, 900), tail(&["hello"], 10)];
        let ends = [end(0, Exit::Code(1), 950), end(1, Exit::Signal(9), 1000)];
        let first = first_failure(&ends, &tails).expect("both failed");
        assert_eq!(first.rank, 1);
        assert!(
            failure(first, &ends, &tails)
                .starts_with("rank 1 failed first: killed by SIGKILL (signal 9) after 1.0 s\n    hello\n")
        );
    }

    #[test]
    fn a_death_explains_what_was_raised_just_before_it_was_seen() {
        let tails = [tail(RAISED, 900), tail(&[], 0)];
        let ends = [end(0, Exit::Code(1), 950), end(1, Exit::Signal(9), 1000)];
        assert_eq!(first_failure(&ends, &tails).expect("both failed").rank, 1);
        let later = [end(0, Exit::Code(1), 950), end(1, Exit::Signal(9), 1500)];
        assert_eq!(first_failure(&later, &tails).expect("both failed").rank, 0);
    }

    #[test]
    fn a_rank_that_smdrun_ended_did_not_fail() {
        let ends = [RankExit { was_signaled: true, ..end(0, Exit::Signal(15), 5) }, end(1, Exit::Code(0), 4)];
        assert!(first_failure(&ends, &[Tail::default(), Tail::default()]).is_none());
    }

    #[test]
    fn a_long_traceback_is_cut_in_its_middle() {
        let mut lines = vec![TRACEBACK.to_owned()];
        lines.extend((0..50).map(|frame| format!("  frame {frame}")));
        lines.push("KeyError: 'x'".into());
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let tail = tail(&lines, 0);
        let shown = tail.shown();
        assert_eq!(shown.len(), SHOWN_LINES);
        assert_eq!((shown[0], shown[1], shown[SHOWN_LINES - 1]), (TRACEBACK, "  ...", "KeyError: 'x'"));
    }
}
