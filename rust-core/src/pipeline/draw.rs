//! Draws timelines: characters for a terminal, SVG for a web page.

use std::fmt::Write;

use super::{Action, ActionKind, Timeline};

/// One row of characters for each rank, at most `width` wide. A forward is the last digit of its microbatch, a
/// backward a letter for its microbatch, `w` the gradients of weights, and `.` idle time.
pub fn grid(timeline: &Timeline, width: usize) -> String {
    let columns = width.clamp(1, timeline.step_time.max(1).try_into().unwrap_or(usize::MAX));
    let digits = timeline.spans.len().saturating_sub(1).to_string().len();
    let mut text = String::new();
    for (rank, spans) in timeline.spans.iter().enumerate() {
        let mut row = vec!['.'; columns];
        for span in spans {
            let column = |at: u64| (u128::from(at) * columns as u128 / u128::from(timeline.step_time.max(1))) as usize;
            let start = column(span.start);
            row[start..column(span.end).max(start + 1).min(columns)].fill(letter(span.action));
        }
        let row: String = row.into_iter().collect();
        writeln!(text, "{rank:>digits$} {row}").expect("a string takes everything");
    }
    text
}

fn letter(action: Action) -> char {
    let digit = |base: u8, count: u32| char::from(base + (action.microbatch % count) as u8);
    match action.kind {
        ActionKind::Forward => digit(b'0', 10),
        ActionKind::Weight => 'w',
        _ => digit(b'A', 26),
    }
}

/// Height of a rank's row and the margins of the picture, in pixels.
const ROW: u64 = 28;
const LEFT: u64 = 64;
const TOP: u64 = 44;

/// An SVG document of `width` pixels with these timelines below each other, at one scale. Forwards are blue,
/// backwards green, gradients of weights orange; later stages of a rank are darker.
pub fn svg(timelines: &[(&str, &Timeline)], width: u64) -> String {
    let height = |timeline: &Timeline| TOP + timeline.spans.len() as u64 * ROW + 12;
    let longest = timelines.iter().map(|(_, timeline)| timeline.step_time).max().unwrap_or(0).max(1);
    let mut text = String::new();
    writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
        timelines.iter().map(|(_, timeline)| height(timeline)).sum::<u64>()
    )
    .expect("a string takes everything");
    let mut top = 0;
    for (title, timeline) in timelines {
        draw(&mut text, timeline, title, top, width, longest);
        top += height(timeline);
    }
    text += "</svg>\n";
    text
}

/// Draws a timeline `above` pixels from the top; the whole width is `longest` time units.
fn draw(text: &mut String, timeline: &Timeline, title: &str, above: u64, width: u64, longest: u64) {
    let plot = width.saturating_sub(LEFT + 16).max(1);
    let x = |at: u64| LEFT as f64 + at as f64 * plot as f64 / longest as f64;
    let mut line = |arguments: std::fmt::Arguments<'_>| {
        text.write_fmt(arguments).expect("a string takes everything");
        text.push('\n');
    };
    line(format_args!(
        "<text x=\"{LEFT}\" y=\"{}\" font-size=\"14\">{}: {} units, bubble {:.1} %</text>",
        above + 22,
        escaped(title),
        timeline.step_time,
        100.0 * timeline.bubble()
    ));
    for (rank, spans) in timeline.spans.iter().enumerate() {
        let top = above + TOP + rank as u64 * ROW;
        line(format_args!("<text x=\"8\" y=\"{}\">rank {rank}</text>", top + ROW / 2 + 4));
        let mut stages: Vec<u32> = spans.iter().map(|span| span.action.stage).collect();
        stages.sort_unstable();
        stages.dedup();
        for span in spans {
            let lap = stages.binary_search(&span.action.stage).expect("it was put there");
            let (left, right) = (x(span.start), x(span.end));
            let shade = 72_u64.saturating_sub(14 * lap as u64).max(30);
            let hue = match span.action.kind {
                ActionKind::Forward => 212,
                ActionKind::Weight => 35,
                _ => 135,
            };
            line(format_args!(
                "<rect x=\"{left:.2}\" y=\"{top}\" width=\"{:.2}\" height=\"{}\" fill=\"hsl({hue} 60% {shade}%)\" stroke=\"white\" \
                 stroke-width=\"0.5\"><title>{} {}..{}</title></rect>",
                right - left,
                ROW - 6,
                span.action,
                span.start,
                span.end
            ));
            if right - left >= 16.0 {
                line(format_args!(
                    "<text x=\"{:.2}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                    f64::midpoint(left, right),
                    top + ROW / 2 + 1,
                    span.action.microbatch
                ));
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
