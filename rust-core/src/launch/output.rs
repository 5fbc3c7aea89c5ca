//! The output of ranks: split into lines, marked with the rank, written one line at a time.
//!
//! A progress bar rewrites its line with carriage returns. On a terminal, rank 0's unfinished line is shown at the
//! bottom, below the finished lines of all ranks. Elsewhere, and for other ranks, only the final state of a line is
//! shown, when a newline finishes it. Colours are kept; sequences that move the cursor or erase are removed, because
//! they would affect other ranks' lines.

use std::io::{self, Write};

use crate::clock;

/// Longest unfinished line; a longer one is written without waiting for its end.
const MAX_LINE_BYTES: usize = 64 * 1024;

/// An event of one rank's stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OutputPiece {
    /// A finished line, without its newline.
    Line(Vec<u8>),
    /// The current state of a line that is being rewritten.
    Progress(Vec<u8>),
}

/// Splits one stream into lines.
#[derive(Debug, Default)]
pub(super) struct Splitter {
    /// The text since the last line end or carriage return.
    pending: Vec<u8>,
    /// The text that the last carriage return ended; shown if a newline follows.
    rewritten: Option<Vec<u8>>,
}

impl Splitter {
    /// Processes bytes that were read.
    pub fn feed(&mut self, bytes: &[u8], emit: &mut dyn FnMut(OutputPiece)) {
        for &byte in bytes {
            match byte {
                b'\n' => self.finish_line(emit),
                b'\r' if self.pending.is_empty() => {
                    self.rewritten.get_or_insert_default();
                }
                b'\r' => self.rewritten = Some(std::mem::take(&mut self.pending)),
                other => {
                    self.pending.push(other);
                    if self.pending.len() >= MAX_LINE_BYTES {
                        self.finish_line(emit);
                    }
                }
            }
        }
        if let Some(rewritten) = &self.rewritten {
            let newest = if self.pending.is_empty() { rewritten } else { &self.pending };
            emit(OutputPiece::Progress(newest.clone()));
        }
    }

    /// Processes the end of the stream.
    pub fn end(&mut self, emit: &mut dyn FnMut(OutputPiece)) {
        // The last bytes of a progress bar often only make the cursor visible again.
        if !without_cursor_control(&self.pending).is_empty() || self.rewritten.is_some() {
            self.finish_line(emit);
        }
    }

    fn finish_line(&mut self, emit: &mut dyn FnMut(OutputPiece)) {
        let rewritten = self.rewritten.take();
        let pending = std::mem::take(&mut self.pending);
        emit(OutputPiece::Line(if pending.is_empty() { rewritten.unwrap_or_default() } else { pending }));
    }
}

/// Which output stream of `smdrun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sink {
    Stdout,
    Stderr,
}

/// How lines are shown.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    /// Whether ranks are marked with colours.
    pub colour: bool,
    /// Whether unfinished lines are shown, as on a terminal.
    pub live: bool,
    /// Number of digits of the largest rank.
    pub width: usize,
    pub line_style: LineStyle,
}

/// The prefixes of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LineStyle {
    /// `[3] `.
    Ours,
    /// The prefix of `horovodrun`, with this name of the stream, and optionally the time before it.
    Horovod { stream: &'static str, timestamp: bool },
}

/// Writes to the output streams of `smdrun`; nothing else writes to them while ranks run.
pub(super) struct Printer<O, E> {
    stdout: (O, Style),
    stderr: (E, Style),
    /// Rank 0's unfinished line on the terminal.
    live: Option<(Sink, Vec<u8>)>,
}

impl<O: Write, E: Write> Printer<O, E> {
    pub fn new(stdout: (O, Style), stderr: (E, Style)) -> Self {
        Self { stdout, stderr, live: None }
    }

    /// Writes the output of `rank`.
    pub fn rank(&mut self, sink: Sink, rank: usize, piece: &OutputPiece) -> io::Result<()> {
        let style = self.style(sink);
        match piece {
            OutputPiece::Line(line) => {
                if rank == 0 && self.live.as_ref().is_some_and(|(owner, _)| *owner == sink) {
                    self.erase_live()?;
                    self.live = None;
                }
                let mut text = prefix(style, rank);
                text.extend(without_cursor_control(line));
                text.push(b'\n');
                self.line(sink, &text)
            }
            OutputPiece::Progress(line) if rank == 0 && style.live => {
                self.live = Some((sink, line.clone()));
                self.paint_live()
            }
            OutputPiece::Progress(_) => Ok(()),
        }
    }

    /// Writes a message of `smdrun` itself.
    pub fn log(&mut self, text: &str) -> io::Result<()> {
        self.line(Sink::Stderr, format!("smdrun: {text}\n").as_bytes())
    }

    fn line(&mut self, sink: Sink, text: &[u8]) -> io::Result<()> {
        // The unfinished line is in the way only if this line goes to a terminal.
        let in_the_way = self.live.is_some() && self.style(sink).live;
        if in_the_way {
            self.erase_live()?;
        }
        self.write(sink, text)?;
        if in_the_way { self.paint_live() } else { Ok(()) }
    }

    fn erase_live(&mut self) -> io::Result<()> {
        match self.live {
            Some((sink, _)) => self.write(sink, b"\r\x1b[K"),
            None => Ok(()),
        }
    }

    fn paint_live(&mut self) -> io::Result<()> {
        let Some((sink, line)) = &self.live else { return Ok(()) };
        // Without automatic wrapping, one carriage return goes back to the start of the line, however long it is.
        let mut text = b"\r\x1b[K\x1b[?7l".to_vec();
        text.extend(prefix(self.style(*sink), 0));
        text.extend(without_cursor_control(line));
        text.extend_from_slice(b"\x1b[?7h");
        self.write(*sink, &text)
    }

    fn style(&self, sink: Sink) -> Style {
        match sink {
            Sink::Stdout => self.stdout.1,
            Sink::Stderr => self.stderr.1,
        }
    }

    fn write(&mut self, sink: Sink, text: &[u8]) -> io::Result<()> {
        let stream: &mut dyn Write = match sink {
            Sink::Stdout => &mut self.stdout.0,
            Sink::Stderr => &mut self.stderr.0,
        };
        stream.write_all(text)?;
        stream.flush()
    }
}

/// Removes control sequences (`ESC [ .. letter`) except those that set colours (`m`).
fn without_cursor_control(text: &[u8]) -> Vec<u8> {
    let mut kept = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        let sequence = match tail.strip_prefix(b"[") {
            Some(parameters) if first == 0x1b => {
                let length = parameters.iter().position(|byte| (0x40..=0x7e).contains(byte));
                length.map(|length| &rest[..length + 3])
            }
            _ => None,
        };
        let taken = sequence.map_or(1, <[u8]>::len);
        if sequence.is_none_or(|sequence| sequence.ends_with(b"m")) {
            kept.extend_from_slice(&rest[..taken]);
        }
        rest = &rest[taken..];
    }
    kept
}

/// `[3] `, in the rank's colour.
fn prefix(style: Style, rank: usize) -> Vec<u8> {
    const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];
    let Style { width, .. } = style;
    if let LineStyle::Horovod { stream, timestamp } = style.line_style {
        let time = if timestamp { clock::date_and_time() } else { String::new() };
        format!("{time}[{rank}]<{stream}>:").into_bytes()
    } else if style.colour {
        format!("\x1b[{}m[{rank:width$}]\x1b[0m ", COLOURS[rank % COLOURS.len()]).into_bytes()
    } else {
        format!("[{rank:width$}] ").into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&str]) -> Vec<OutputPiece> {
        let mut splitter = Splitter::default();
        let mut pieces = Vec::new();
        for chunk in chunks {
            splitter.feed(chunk.as_bytes(), &mut |piece| pieces.push(piece));
        }
        splitter.end(&mut |piece| pieces.push(piece));
        pieces
    }

    fn line(text: &str) -> OutputPiece {
        OutputPiece::Line(text.into())
    }

    fn progress(text: &str) -> OutputPiece {
        OutputPiece::Progress(text.into())
    }

    #[test]
    fn lines_are_put_together() {
        assert_eq!(split(&["a", "b\nc\r\n", "\nd"]), [line("ab"), line("c"), line(""), line("d")]);
    }

    #[test]
    fn a_rewritten_line_shows_its_newest_state_once_per_read() {
        assert_eq!(
            split(&["\r 1%", "\r 2%", "\r 3%\r 4%", "\n"]),
            [progress(" 1%"), progress(" 2%"), progress(" 4%"), line(" 4%")]
        );
        assert_eq!(split(&["1%\r2%\r", "\nx\n"]), [progress("2%"), line("2%"), line("x")]);
        assert_eq!(split(&["x\n\x1b[?25h"]), [line("x")]);
    }

    #[test]
    fn a_line_has_a_limit() {
        let pieces = split(&[&"x".repeat(MAX_LINE_BYTES + 5)]);
        assert_eq!(pieces, [line(&"x".repeat(MAX_LINE_BYTES)), line("xxxxx")]);
    }

    fn shown(style: Style, pieces: &[(usize, OutputPiece)]) -> String {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let mut printer = Printer::new((&mut out, style), (&mut err, style));
        for (rank, piece) in pieces {
            printer.rank(Sink::Stdout, *rank, piece).expect("a vector takes everything");
        }
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn a_file_gets_finished_lines_only() {
        let style = Style { colour: false, live: false, width: 2, line_style: LineStyle::Ours };
        let pieces = [(0, progress("50%")), (11, line("b")), (0, progress("99%")), (0, line("100%"))];
        assert_eq!(shown(style, &pieces), "[11] b\n[ 0] 100%\n");
    }

    #[test]
    fn lines_may_begin_as_horovods_do() {
        let style = Style {
            colour: false,
            live: false,
            width: 2,
            line_style: LineStyle::Horovod { stream: "stdout", timestamp: false },
        };
        assert_eq!(shown(style, &[(0, line("a")), (11, line(""))]), "[0]<stdout>:a\n[11]<stdout>:\n");
    }

    #[test]
    fn colours_pass_and_cursor_movements_do_not() {
        let text = b"\x1b[?25l\x1b[2K\x1b[1A\x1b[1;31mred\x1b[0m \x1b] plain \x1b[";
        assert_eq!(without_cursor_control(text), b"\x1b[1;31mred\x1b[0m \x1b] plain \x1b[");
    }

    #[test]
    fn a_terminal_keeps_rank_0s_progress_below_the_lines() {
        let style = Style { colour: true, live: true, width: 1, line_style: LineStyle::Ours };
        let pieces = [(0, progress("50%")), (1, progress("40%")), (1, line("b")), (0, line("100%"))];
        let live = "\r\x1b[K\x1b[?7l\x1b[36m[0]\x1b[0m 50%\x1b[?7h";
        let erase = "\r\x1b[K";
        assert_eq!(
            shown(style, &pieces),
            format!("{live}{erase}\x1b[33m[1]\x1b[0m b\n{live}{erase}\x1b[36m[0]\x1b[0m 100%\n")
        );
    }
}
