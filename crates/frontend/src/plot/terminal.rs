//! The heat map as lines of text.

use std::ops::Range;

use candle_core::{Result, bail};
use unicode_width::UnicodeWidthStr;

use super::style::{ColourScale, NOT_FINITE, centre, contrasting, count, gradient, right, short, shorten, tick, wrap};
use super::{Axis, Heads, HeatMap};

/// The most columns of a row label.
const MAX_ROW_LABEL: usize = 16;
/// The most columns of a key label.
const MAX_KEY_LABEL: usize = 10;
/// The columns to which key labels are shortened before keys are omitted.
const ELIDED_KEY_LABEL: usize = 7;
/// The mark of omitted keys.
const GAP: &str = "… ";
/// The columns of the colour bar in the legend.
const BAR: usize = 24;
/// The least columns of a colour bar; a shorter one shows nothing.
const MIN_BAR: usize = 4;
/// The fill of cells without colour, by quarters of the scale.
const SHADES: [&str; 4] = ["░", "▒", "▓", "█"];
/// Viridis by tenths in the xterm palette. Chosen so that the lightness never falls: the nearest colour of each would
/// be grey in places.
const RAMP: [u8; 10] = [53, 54, 24, 30, 36, 71, 77, 148, 184, 220];
/// The number of colours at the beginning of [`RAMP`] that are so dark that white text has more contrast than black.
const DARK: usize = 3;
/// The xterm colour for weights that are not finite.
const GREY: u8 = 250;

/// The colours of cells in a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Color {
    /// 24-bit ANSI colours.
    TrueColor,
    /// Ten of the 256 colours of xterm.
    Ansi256,
    /// No escape sequences: cells are shaded with `░▒▓█`.
    #[default]
    None,
}

/// The abilities of the terminal. The default is plain text without limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct TerminalOptions {
    /// The colours of cells.
    pub color: Color,
    /// The most columns of a line; keys that do not fit are omitted in the middle, and counted.
    pub max_width: Option<usize>,
    /// The most rows of a panel; queries that do not fit are omitted in the middle, and counted.
    pub max_rows: Option<usize>,
}

impl TerminalOptions {
    /// Detects the abilities of the standard output. No colour if it is not a terminal, if `NO_COLOR` is set and not
    /// empty, or if `TERM` is unset, `dumb`, or names less than 256 colours; 24-bit colour if `COLORTERM` is
    /// `truecolor` or `24bit`, or `TERM` ends in `-direct`. In a terminal the width is that of `COLUMNS`, or 80 (most
    /// shells do not export it), and panels have at most 64 rows; to a file or pipe everything is written.
    pub fn detect() -> Self {
        use std::io::IsTerminal;
        Self::from_environment(std::io::stdout().is_terminal(), |name| std::env::var(name).ok())
    }

    fn from_environment(is_terminal: bool, variable: impl Fn(&str) -> Option<String>) -> Self {
        if !is_terminal {
            return Self::default();
        }
        let get = |name| variable(name).unwrap_or_default();
        let term = get("TERM");
        let color = match (term.as_str(), get("COLORTERM").as_str()) {
            ("" | "dumb", _) => Color::None,
            _ if !get("NO_COLOR").is_empty() => Color::None,
            (_, "truecolor" | "24bit") => Color::TrueColor,
            _ if term.ends_with("-direct") => Color::TrueColor,
            _ if term.contains("256color") => Color::Ansi256,
            _ => Color::None,
        };
        let columns = get("COLUMNS").parse().ok().filter(|&columns| columns > 0);
        Self { color, max_width: Some(columns.unwrap_or(80)), max_rows: Some(64) }
    }
}

impl HeatMap {
    /// Draws the map as text, without a newline at the end: the title, a matrix of T_q rows and T_kv columns for each
    /// panel with its caption, and a legend.
    ///
    /// All lines of a matrix have the same display width. Labels that are too long end in `…`; keys and queries that do
    /// not fit are omitted in the middle and counted in the legend.
    ///
    /// # Errors
    ///
    /// If a head is out of range, `max_rows` is 0, or `max_width` is too narrow for one key.
    pub fn to_terminal(&self, heads: Heads, options: &TerminalOptions) -> Result<String> {
        let panels = self.panels(heads)?;
        let matrix = PanelLayout::plan(self, ColourScale::of(self, &panels)?, options)?;
        let mut lines = self.title.as_deref().map_or(Vec::new(), |title| wrap(title, matrix.max_width));
        for (index, panel) in panels.iter().enumerate() {
            lines.extend((index > 0).then(String::new));
            lines.extend(wrap(&format!("{}{}", panel.name, panel.of), matrix.max_width));
            lines.extend(matrix.lines(&self.panel(panel)?));
        }
        lines.extend(matrix.legend());
        Ok(lines.join("\n"))
    }
}

/// The part of an axis that is drawn: all of it, or its two ends with a gap between them.
struct Shown<'a> {
    axis: &'a Axis,
    omitted: Range<usize>,
}

impl<'a> Shown<'a> {
    /// Selects at most `most` labels.
    fn of(axis: &'a Axis, most: usize) -> Self {
        let len = axis.labels.len();
        let shown = most.min(axis.labels.len());
        Self { axis, omitted: shown.div_ceil(2)..len - shown / 2 }
    }

    /// Returns the indices that are drawn, with `None` for the gap.
    fn indices(&self) -> impl Iterator<Item = Option<usize>> {
        let gap = (!self.omitted.is_empty()).then_some(None);
        (0..self.omitted.start).map(Some).chain(gap).chain((self.omitted.end..self.axis.labels.len()).map(Some))
    }

    /// Returns the note of the legend, `… 40 keys not shown (12 to 51 of 64)`.
    fn note(&self) -> Option<String> {
        let Range { start, end } = self.omitted;
        let omitted = match self.omitted.len() {
            0 => return None,
            1 => format!("1 {}", self.axis.noun.one),
            n => format!("{n} {}", self.axis.noun.many),
        };
        Some(format!("… {omitted} not shown ({start} to {} of {})", end - 1, self.axis.labels.len()))
    }
}

/// The layout that all panels share.
struct PanelLayout<'a> {
    scale: ColourScale,
    color: Color,
    max_width: usize,
    queries: Shown<'a>,
    keys: Shown<'a>,
    /// The number of columns of a row's label.
    label: usize,
    /// The number of columns of a cell, with the space that separates it from the next.
    cell: usize,
}

impl<'a> PanelLayout<'a> {
    fn plan(map: &'a HeatMap, scale: ColourScale, options: &TerminalOptions) -> Result<Self> {
        if options.max_rows == Some(0) {
            bail!("[heat_map] max_rows is 0; expected at least 1");
        }
        let num_keys = map.keys.labels.len();
        let max_width = options.max_width.unwrap_or(usize::MAX);
        let queries = Shown::of(&map.queries, options.max_rows.unwrap_or(usize::MAX));
        let widths = queries.indices().map(|query| query.map_or(1, |query| map.queries.labels[query].width()));
        let label = widths.max().unwrap_or(0).min(MAX_ROW_LABEL).min((max_width / 3).max(1));

        let smallest = scale.digits + 2;
        let widest = smallest.max(map.keys.columns.min(MAX_KEY_LABEL) + 1);
        let room = max_width.saturating_sub(label + 1);
        let cell: usize;
        let shown: usize;
        if room / num_keys >= smallest {
            cell = widest.min(room / num_keys);
            shown = num_keys;
        } else {
            let room_beside_gap = room.saturating_sub(GAP.width());
            let preferred = widest.min(ELIDED_KEY_LABEL + 1).max(smallest);
            cell = if room_beside_gap / preferred < 2 { smallest } else { preferred };
            shown = room_beside_gap / cell;
        }
        if shown == 0 {
            let needed = label + 1 + smallest + if num_keys > 1 { GAP.width() } else { 0 };
            bail!("[heat_map] max_width is {max_width} columns; the row labels and one key need {needed}");
        }
        let keys = Shown::of(&map.keys, shown);
        Ok(Self { scale, color: options.color, max_width, queries, keys, label, cell })
    }

    /// Returns the header and the rows of a panel, all of the same display width.
    fn lines(&self, weights: &[f64]) -> Vec<String> {
        let [queries, keys] = [&self.queries, &self.keys].map(|shown| &shown.axis.labels);
        let word = |text: &str| centre(&shorten(text, self.cell - 1), self.cell - 1) + " ";
        let rows = self.queries.indices().map(|query| match query {
            Some(query) => self.line(&queries[query], |key| self.cell(weights[query * keys.len() + key])),
            None => self.line("…", |_| word("…")),
        });
        std::iter::once(self.line("", |key| word(&keys[key]))).chain(rows).collect()
    }

    /// Returns a label and the text of each key that is shown.
    fn line(&self, label: &str, cell: impl Fn(usize) -> String) -> String {
        let cells = self.keys.indices().map(|key| key.map_or_else(|| String::from(GAP), &cell));
        right(&shorten(label, self.label), self.label) + " " + &cells.collect::<String>()
    }

    fn cell(&self, weight: f64) -> String {
        let number = right(&short(weight), self.scale.digits);
        let position = self.scale.position(weight);
        if self.color != Color::None {
            return paint(&centre(&number, self.cell), position, self.color);
        }
        let shade = match position {
            None => "?",
            Some(_) if weight == 0.0 => " ",
            Some(position) => SHADES[((position * 4.0).ceil() as usize).clamp(1, 4) - 1],
        };
        shade.repeat(self.cell - 1 - self.scale.digits) + &number + " "
    }

    fn legend(&self) -> Vec<String> {
        let ColourScale { low, high, not_finite, .. } = self.scale;
        let [first, last] = [low, high].map(tick);
        let room = self.max_width.saturating_sub(first.len() + last.len() + 2);
        let mut lines = if self.color == Color::None {
            let [a, b, c] = [0.25, 0.5, 0.75].map(|at| tick(low * (1.0 - at) + high * at));
            let from = if low < 0.0 { format!("from {first} ") } else { String::new() };
            wrap(&format!("{from}░ to {a}, ▒ to {b}, ▓ to {c}, █ to {last}, blank is exactly 0"), self.max_width)
        } else if room < MIN_BAR {
            wrap(&format!("colours from {first} to {last}"), self.max_width)
        } else {
            let bar = BAR.min(room);
            let bar = (0..bar).map(|i| paint(" ", Some(i as f64 / (bar - 1) as f64), self.color));
            vec![format!("{first} {} {last}", bar.collect::<String>())]
        };
        let mut notes = vec![String::from("rows are queries, columns are keys")];
        notes.extend(self.queries.note());
        notes.extend(self.keys.note());
        notes.extend((not_finite > 0).then(|| format!("{} not finite", count(not_finite, "weight"))));
        lines.extend(notes.iter().chain(&self.scale.notes).flat_map(|note| wrap(note, self.max_width)));
        lines
    }
}

/// Returns `text` in black or white on the colour of a position on the scale.
fn paint(text: &str, position: Option<f64>, color: Color) -> String {
    match color {
        Color::None => text.to_string(),
        Color::TrueColor => {
            let [r, g, b] = position.map_or(NOT_FINITE, gradient);
            let [fr, fg, fb] = contrasting([r, g, b]);
            format!("\x1b[38;2;{fr};{fg};{fb};48;2;{r};{g};{b}m{text}\x1b[0m")
        }
        Color::Ansi256 => {
            let step = position.map(|position| ((position * RAMP.len() as f64) as usize).min(RAMP.len() - 1));
            let background = step.map_or(GREY, |step| RAMP[step]);
            let foreground = if step.is_some_and(|step| step < DARK) { 231 } else { 16 };
            format!("\x1b[38;5;{foreground};48;5;{background}m{text}\x1b[0m")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detected(is_terminal: bool, variables: &[(&str, &str)]) -> TerminalOptions {
        TerminalOptions::from_environment(is_terminal, |name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn terminal_options_follow_environment() {
        let xterm = ("TERM", "xterm-256color");
        let full = ("COLORTERM", "truecolor");
        let wide = ("COLUMNS", "132");
        assert_eq!(detected(false, &[xterm, full, wide]), TerminalOptions::default(), "a file or pipe");
        for (variables, color, width) in [
            (&[xterm][..], Color::Ansi256, 80),
            (&[xterm, full, wide], Color::TrueColor, 132),
            (&[("TERM", "xterm"), ("COLORTERM", "24bit"), ("COLUMNS", "0")], Color::TrueColor, 80),
            (&[("TERM", "xterm-direct"), ("COLUMNS", "wide")], Color::TrueColor, 80),
            (&[("TERM", "vt100")], Color::None, 80),
            (&[("TERM", "dumb"), full], Color::None, 80),
            (&[], Color::None, 80),
            (&[xterm, ("NO_COLOR", "1")], Color::None, 80),
            (&[xterm, ("NO_COLOR", "")], Color::Ansi256, 80),
        ] {
            let expected = TerminalOptions { color, max_width: Some(width), max_rows: Some(64) };
            assert_eq!(detected(true, variables), expected, "{variables:?}");
        }
    }

    /// Returns the colour of an index from 16 of the xterm palette: a cube of 6 x 6 x 6, then 24 greys.
    fn xterm(index: u8) -> [u8; 3] {
        const LEVELS: [u8; 6] = [0, 95, 135, 175, 215, 255];
        match index {
            232.. => [8 + 10 * (index - 232); 3],
            _ => [36, 6, 1].map(|place| LEVELS[usize::from(index.saturating_sub(16) / place % 6)]),
        }
    }

    #[test]
    fn ramp_of_256_colours_grows_lighter() {
        let sum =
            |index| xterm(index).iter().zip([2126u32, 7152, 722]).map(|(&c, w)| u32::from(c).pow(2) * w).sum::<u32>();
        assert!(RAMP.map(sum).is_sorted_by(|a, b| a < b), "{:?}", RAMP.map(sum));
        let dark = RAMP.into_iter().chain([GREY]).take_while(|&index| contrasting(xterm(index)) == [255; 3]);
        assert_eq!(dark.count(), DARK);
        assert_eq!([xterm(16), xterm(231), xterm(24), xterm(250)], [[0; 3], [255; 3], [0, 95, 135], [188; 3]]);
    }
}
