//! Text that came from outside, made safe to print and measured in terminal columns.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Marks that may stack on one character: no script needs more, and a pile of them runs over the lines around it.
const MAX_MARKS: usize = 3;

/// `text` with everything written out that would not print as itself.
pub(super) fn safe(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Marks on the character before, or none where there is no character that could carry one.
    let mut marks = None;
    for c in text.chars() {
        if c == '\\' || is_unprintable(c) {
            out.extend(c.escape_default());
            marks = None;
        } else if c.width() != Some(0) {
            out.push(c);
            marks = Some(0);
        } else {
            // A dotted circle carries a mark that stands alone, as is the custom.
            let stacked = marks.unwrap_or_else(|| {
                out.push('◌');
                0
            });
            if stacked < MAX_MARKS {
                out.push(c);
                marks = Some(stacked + 1);
            } else {
                out.extend(c.escape_default());
            }
        }
    }
    out
}

/// A token as it labels an axis: [`safe`], and with what is invisible made visible.
pub(super) fn token(text: &str) -> String {
    if text.is_empty() {
        return String::from("\"\"");
    }
    let inner = text.trim_matches(' ');
    let before = text.len() - text.trim_start_matches(' ').len();
    let after = text.len() - inner.len() - before;
    format!("{}{}{}", "␣".repeat(before), safe(inner), "␣".repeat(after))
}

/// Whether `c` moves the cursor, changes the direction of writing, is invisible, or is no character at all.
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

/// The columns that `text` takes in a terminal.
pub(super) fn width(text: &str) -> usize {
    text.width()
}

/// `text`, or as much of it as fits in `columns` with a `…` at the end.
pub(super) fn shorten(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_string();
    }
    let mut end = 0;
    for (start, c) in text.char_indices() {
        let next = start + c.len_utf8();
        if width(&text[..next]) + 1 > columns {
            break;
        }
        end = next;
    }
    format!("{}…", &text[..end])
}

/// `text` in the middle of `columns`; what is left over by an odd number goes to the right.
pub(super) fn centre(text: &str, columns: usize) -> String {
    let space = columns.saturating_sub(width(text));
    format!("{}{text}{}", " ".repeat(space / 2), " ".repeat(space - space / 2))
}

/// `text` at the right of `columns`.
pub(super) fn right(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))))
}

/// `text` broken between words into lines of at most `columns`; a word that is longer by itself is broken inside.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(2);
    let mut lines = Vec::new();
    let (mut line, mut used) = (String::new(), 0);
    for word in text.split(' ') {
        if used > 0 && columns - used < 1 + width(word) {
            lines.push(std::mem::take(&mut line));
            used = 0;
        } else if used > 0 {
            line.push(' ');
            used += 1;
        }
        for c in word.chars() {
            let c_width = c.width().unwrap_or(0);
            if used + c_width > columns {
                lines.push(std::mem::take(&mut line));
                used = 0;
            }
            line.push(c);
            used += c_width;
        }
    }
    lines.push(line);
    lines
}
