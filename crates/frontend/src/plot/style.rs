//! Code that all drawings share: the colour scale, weights as numbers, and untrusted text, made safe to print and
//! measured in terminal columns.

use std::borrow::Cow;

use candle_core::Result;
use textwrap::{Options, WordSplitter};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::{HeatMap, Panel};

/// The most by which rounding may move a weight out of \[0, 1\]: one step of bf16 above 1 is 0.0078.
const ROUNDING: f64 = 0.01;

/// A colour as red, green and blue.
pub(super) type Rgb = [u8; 3];

/// The colour of a weight that is not finite: viridis has no grey.
pub(super) const NOT_FINITE: Rgb = [187, 187, 187];

/// A linear colour scale from `low` to `high`.
pub(super) struct ColourScale {
    pub(super) low: f64,
    pub(super) high: f64,
    /// The most characters that [`short`] writes for a weight of this scale.
    pub(super) digits: usize,
    pub(super) not_finite: usize,
    /// The notes that are written under the scale, besides its two ends.
    pub(super) notes: Vec<String>,
}

impl ColourScale {
    /// Makes the scale of the weights of all panels of a drawing.
    pub(super) fn of(map: &HeatMap, panels: &[Panel]) -> Result<Self> {
        let mut min = 0f64;
        let mut max = 0f64;
        let mut not_finite = 0;
        let mut above = 0;
        let mut is_signed = false;
        for panel in panels {
            for weight in map.panel(panel)? {
                is_signed |= weight < 0.0;
                if weight.is_finite() {
                    min = min.min(weight);
                    max = max.max(weight);
                    above += usize::from(map.scale_max.is_some_and(|end| weight > end));
                } else {
                    not_finite += 1;
                }
            }
        }
        let mut notes = Vec::new();
        if max > 1.0 + ROUNDING {
            notes.push(format!("weights reach {}: dropout in training leaves weights above 1", tick(max)));
        }
        if min < -ROUNDING {
            notes.push(format!("weights reach below 0, to {}", tick(min)));
        }
        if let Some(end) = map.scale_max
            && above > 0
        {
            notes.push(format!("{} above the scale's end {}", count(above, "weight"), tick(end)));
        }
        let low = if min < -ROUNDING { min } else { 0.0 };
        let high = map.scale_max.unwrap_or(max);
        let digits = [short(min).len(), short(max).len(), 3 + usize::from(is_signed)].into_iter().max().unwrap_or(3);
        // A scale needs some length, also if all weights are 0.
        Ok(Self { low, high: if high > low { high } else { 1.0 }, digits, not_finite, notes })
    }

    /// Returns the position of a weight on the scale, from 0 to 1; `None` if it is not finite.
    pub(super) fn position(&self, weight: f64) -> Option<f64> {
        // Halved, so that a scale over nearly all of f64 has a finite length.
        let length = self.high / 2.0 - self.low / 2.0;
        let position = if self.low == 0.0 { weight / self.high } else { (weight / 2.0 - self.low / 2.0) / length };
        weight.is_finite().then(|| position.clamp(0.0, 1.0))
    }
}

/// Returns the colour at a position from 0 to 1: viridis, whose lightness grows evenly, also for the colour-blind.
pub(super) fn gradient(position: f64) -> Rgb {
    colorous::VIRIDIS.eval_continuous(position).into_array()
}

/// Returns black or white, the one with more contrast to `background` (the contrast ratio of WCAG 2.2).
pub(super) fn contrasting(background: Rgb) -> Rgb {
    let [r, g, b] = background.map(|channel| {
        let c = f64::from(channel) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    let luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) { [0; 3] } else { [255; 3] }
}

/// Formats a weight in two digits, `.27` or `1.3`; `0` only for exactly 0.
pub(super) fn short(weight: f64) -> String {
    match weight.abs() {
        0.0 => String::from("0"),
        ..0.995 => format!("{weight:.2}").replacen("0.", ".", 1),
        ..9.95 => format!("{weight:.1}"),
        ..999.5 => format!("{weight:.0}"),
        ..f64::INFINITY => format!("{weight:.0e}"),
        _ => weight.to_string().to_lowercase(),
    }
}

/// Formats a number of the scale in at most three significant digits, `0.813`.
pub(super) fn tick(value: f64) -> String {
    let rounded = format!("{value:.2e}");
    match rounded.parse::<f64>() {
        Ok(v) if v == 0.0 || (1e-4..1e6).contains(&v.abs()) => format!("{v}"),
        _ => rounded,
    }
}

/// Formats a count: `1 head`, `16 heads`.
pub(super) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// The most marks on one character: no script needs more, and a pile of them overlaps the lines around it.
const MAX_MARKS: usize = 3;

/// Returns `text` with everything escaped that would not print as itself.
pub(super) fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // The number of marks on the character before; `None` if that character cannot have any.
    let mut marks = None;
    for c in text.chars() {
        let is_mark = c.width() == Some(0) && !is_unprintable(c);
        if is_mark && marks.is_none() {
            // A dotted circle is the usual base of a mark without a character.
            out.push('◌');
        }
        let stacked = if is_mark { marks.unwrap_or(0) + 1 } else { 0 };
        let prints = c != '\\' && !is_unprintable(c) && stacked <= MAX_MARKS;
        if prints {
            out.push(c);
        } else {
            out.extend(c.escape_default());
        }
        marks = (prints || is_mark).then_some(stacked);
    }
    out
}

/// Returns tokens as the labels of an axis: [`safe`], with invisible characters made visible.
pub(super) fn tokens<S: AsRef<str>>(texts: &[S]) -> Vec<String> {
    let spaces = |count| "␣".repeat(count);
    let token = |text: &str| match text.trim_matches(' ') {
        "" if text.is_empty() => String::from("\"\""),
        "" => spaces(text.len()),
        inner => {
            let before = text.len() - text.trim_start_matches(' ').len();
            spaces(before) + &safe(inner) + &spaces(text.len() - before - inner.len())
        }
    };
    texts.iter().map(|text| token(text.as_ref())).collect()
}

/// Returns whether `c` moves the cursor, changes the direction of writing, is invisible, or is not a character at all.
fn is_unprintable(c: char) -> bool {
    // Default_Ignorable_Code_Point of Unicode's DerivedCoreProperties, the separators U+2028 and U+2029, the
    // bidirectional and interlinear controls, and the noncharacters, which XML forbids.
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{3164}' | '\u{fdd0}'..='\u{fdef}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}')
        || u32::from(c) & 0xfffe == 0xfffe
}

/// Returns `text`, or the part of it that fits in `columns` with a `…` at the end.
pub(super) fn shorten(text: &str, columns: usize) -> String {
    if text.width() <= columns {
        return text.to_string();
    }
    let ends = text.char_indices().map(|(start, c)| start + c.len_utf8());
    let end = ends.take_while(|&end| text[..end].width() < columns.max(1)).last().unwrap_or(0);
    format!("{}…", &text[..end])
}

/// Centres `text` in `columns`; an odd space goes to the right.
pub(super) fn centre(text: &str, columns: usize) -> String {
    let space = columns.saturating_sub(text.width());
    format!("{}{text}{}", " ".repeat(space / 2), " ".repeat(space - space / 2))
}

/// Aligns `text` at the right of `columns`.
pub(super) fn right(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(text.width())))
}

/// Breaks `text` between words into lines of at most `columns`; a longer word is broken inside.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let options = Options::new(columns).word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(text, options).into_iter().map(Cow::into_owned).collect()
}
