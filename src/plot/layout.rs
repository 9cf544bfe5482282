//! Where everything in a picture lies, in pixels.

use super::label::{shorten, width};

/// The largest side of a picture, but for a title and notes beyond the room reserved for them.
pub(super) const MAX_SIDE: i32 = 4000;
/// Kept free above and below the grid for the title and the notes, whose lines are counted once the width is known.
const TEXT_ROOM: i32 = 240;

pub(super) const MARGIN: i32 = 24;
/// Between panels, and between the panels and the colour bar.
pub(super) const GAP: i32 = 20;
pub(super) const TITLE_EM: i32 = 18;
pub(super) const TITLE_LINE: i32 = 26;
pub(super) const CAPTION_EM: i32 = 13;
pub(super) const CAPTION_LINE: i32 = 22;
/// Axis names, the scale and the notes.
pub(super) const SMALL_EM: i32 = 12;
pub(super) const SMALL_LINE: i32 = 18;
/// The room at the left for the name of the query axis.
const AXIS_NAME: i32 = 24;
pub(super) const BAR_WIDTH: i32 = 16;
/// Stands over the colour bar.
pub(super) const BAR_NAME: &str = "weight";
/// Between a panel and its labels.
pub(super) const LABEL_GAP: i32 = 6;

/// The least side of a cell where nothing forces it to be smaller: with tokens there is room for a label each.
const TOKEN_CELL: i32 = 12;
const INDEX_CELL: i32 = 6;
const LARGEST_CELL: i32 = 64;
const LARGEST_LABEL_EM: i32 = 13;
const SMALLEST_LABEL_EM: i32 = 9;
/// A short axis (one query, say) has cells at least this long, so that a strip is more than a line.
const SHORT_AXIS_CELL: i32 = 16;
/// Notes and titles need some room even beside a tiny panel.
const MIN_WIDTH: i32 = 320;
const BAR_HEIGHT: (i32, i32) = (120, 600);
/// Labels take at most this many display columns.
const MAX_LABEL: usize = 20;

/// What a picture has to hold.
pub(super) struct Content {
    pub(super) panels: usize,
    pub(super) queries: Axis,
    pub(super) keys: Axis,
    /// Display columns of the longest caption and of the longest number at the colour bar.
    pub(super) caption_columns: usize,
    pub(super) tick_columns: usize,
}

/// The queries or the keys.
pub(super) struct Axis {
    pub(super) labels: Vec<String>,
    /// Display columns of the longest label.
    columns: usize,
    /// Whether labels are tokens; indices can be thinned to round numbers and need no note.
    pub(super) tokens: bool,
}

impl Axis {
    pub(super) fn new(len: usize, tokens: bool, label: impl Fn(usize) -> String) -> Self {
        let labels: Vec<_> = (0..len).map(|i| shorten(&label(i), MAX_LABEL)).collect();
        Self { columns: labels.iter().map(|label| width(label)).max().unwrap_or(0), labels, tokens }
    }
}

/// How the labels of an axis are written.
pub(super) struct Labels {
    pub(super) em: i32,
    /// Every `stride`-th label is drawn.
    pub(super) stride: usize,
    pub(super) vertical: bool,
    /// The pixels they take beside the panel.
    depth: i32,
}

/// A grid of panels of equal size, with labels at its left and bottom, and a colour bar at its right.
pub(super) struct Layout {
    pub(super) cell: (i32, i32),
    pub(super) columns: usize,
    rows: usize,
    pub(super) panel: (i32, i32),
    /// A panel with its caption.
    slot: (i32, i32),
    pub(super) query_labels: Labels,
    pub(super) key_labels: Labels,
    /// Of the picture.
    pub(super) width: i32,
    /// The left end of the panels.
    left: i32,
    /// The top of the captions of the first row.
    pub(super) top: i32,
}

impl Layout {
    /// The layout whose picture is nearest to a square, with few empty places and cells of a good size; none if the
    /// cells would be smaller than a pixel.
    pub(super) fn fit(content: &Content) -> Option<Self> {
        let preferred = preferred_cell(content);
        let badness = |layout: &Layout| {
            let aspect = (f64::from(layout.width) / f64::from(layout.height(0))).ln();
            // Screens and pages with text around it suit a wide picture more than a tall one.
            let aspect = if aspect < 0.0 { -1.5 * aspect } else { aspect };
            let empty = 1.0 - content.panels as f64 / (layout.columns * layout.rows) as f64;
            let shrunk = (f64::from(preferred) / f64::from(layout.cell.0.min(layout.cell.1))).ln();
            // Weighted so that 8 heads are 4 x 2 and not 3 x 3 with a hole, and 5 heads are 3 x 2.
            aspect + 5.75 * empty + shrunk
        };
        // More columns than this have no room for their captions.
        let most = content.panels.min((MAX_SIDE / (CAPTION_EM + GAP)) as usize);
        let largest = |columns| (1..=preferred).rev().find_map(|cell| Self::new(content, columns, cell));
        (1..=most).filter_map(largest).min_by(|a, b| badness(a).total_cmp(&badness(b)))
    }

    /// None if the picture would be too large.
    fn new(content: &Content, columns: usize, cell: i32) -> Option<Self> {
        let rows = content.panels.div_ceil(columns);
        let [queries, keys] = [&content.queries, &content.keys].map(|axis| i32::try_from(axis.labels.len()));
        let (queries, keys) = (queries.ok()?, keys.ok()?);
        let short = cell.max(SHORT_AXIS_CELL.min(4 * cell));
        let cell = (if keys < queries { short } else { cell }, if queries < keys { short } else { cell });
        let panel = (cell.0.checked_mul(keys)?, cell.1.checked_mul(queries)?);
        if panel.0 > MAX_SIDE || panel.1 > MAX_SIDE || columns.max(rows) > MAX_SIDE as usize {
            return None;
        }
        let slot = (panel.0.max(text_width(content.caption_columns, CAPTION_EM)), CAPTION_LINE + panel.1);
        let query_labels = query_labels(&content.queries, cell.1);
        let key_labels = key_labels(&content.keys, cell.0);

        let left = MARGIN + AXIS_NAME + query_labels.depth;
        let tick_width = text_width(content.tick_columns, SMALL_EM);
        let bar = (BAR_WIDTH + LABEL_GAP + tick_width).max(text_width(BAR_NAME.len(), SMALL_EM));
        let width = left + columns as i32 * (slot.0 + GAP) + bar + MARGIN;
        // The grid stands in the middle of a picture that is wider than what it holds.
        let inset = (MIN_WIDTH - width).max(0) / 2;
        let (width, left) = (width + 2 * inset, left + inset);
        let layout = Self { cell, columns, rows, panel, slot, query_labels, key_labels, width, left, top: MARGIN };
        (width <= MAX_SIDE && layout.height(0) <= MAX_SIDE - TEXT_ROOM).then_some(layout)
    }

    /// Of the picture.
    pub(super) fn height(&self, note_lines: usize) -> i32 {
        self.notes_top() + note_lines as i32 * SMALL_LINE + MARGIN
    }

    /// The middle line of the name beside the query axis.
    pub(super) fn query_name(&self) -> i32 {
        self.left - self.query_labels.depth - AXIS_NAME + SMALL_LINE / 2
    }

    /// The grid's left, top, width and height.
    pub(super) fn grid(&self) -> (i32, i32, i32, i32) {
        let (columns, rows) = (self.columns as i32, self.rows as i32);
        (self.left, self.top, columns * (self.slot.0 + GAP) - GAP, rows * (self.slot.1 + GAP) - GAP)
    }

    /// The upper left corner of a panel's cells.
    pub(super) fn panel_origin(&self, panel: usize) -> (i32, i32) {
        let (column, row) = ((panel % self.columns) as i32, (panel / self.columns) as i32);
        let x = self.left + column * (self.slot.0 + GAP) + (self.slot.0 - self.panel.0) / 2;
        (x, self.top + row * (self.slot.1 + GAP) + CAPTION_LINE)
    }

    /// The colour bar's left, top and height.
    pub(super) fn bar(&self) -> (i32, i32, i32) {
        let (x, y, w, h) = self.grid();
        let (y, h) = (y + CAPTION_LINE, h - CAPTION_LINE);
        let height = h.clamp(BAR_HEIGHT.0, BAR_HEIGHT.1);
        (x + w + GAP, y + (h - height).max(0) / 2, height)
    }

    /// The middle line of the name under the key axis.
    pub(super) fn key_name(&self) -> i32 {
        let (_, y, _, h) = self.grid();
        y + h + self.key_labels.depth + LABEL_GAP + SMALL_LINE / 2
    }

    /// The top of the notes, below the grid and below the colour bar.
    pub(super) fn notes_top(&self) -> i32 {
        let (_, bar, bar_height) = self.bar();
        (self.key_name() + SMALL_LINE).max(bar + bar_height + SMALL_LINE / 2)
    }
}

/// The side of a cell where nothing forces it to be smaller: panels get smaller the more there are.
fn preferred_cell(content: &Content) -> i32 {
    let panel = match content.panels {
        1 => 480,
        2..=4 => 360,
        5..=9 => 280,
        10..=16 => 240,
        _ => 180,
    };
    let tokens = content.queries.labels.len().max(content.keys.labels.len()).clamp(1, panel);
    let least = if content.queries.tokens || content.keys.tokens { TOKEN_CELL } else { INDEX_CELL };
    ((panel / tokens) as i32).clamp(least, LARGEST_CELL)
}

fn query_labels(axis: &Axis, cell: i32) -> Labels {
    let em = (cell - 1).clamp(SMALLEST_LABEL_EM, LARGEST_LABEL_EM);
    // Once numbers are thinned they are read as an axis, with space between; tokens are read one by one.
    let height = if axis.tokens || cell > em { em + 1 } else { 2 * em };
    let depth = text_width(axis.columns, em) + LABEL_GAP;
    Labels { em, stride: stride(height, cell, axis.tokens), vertical: false, depth }
}

fn key_labels(axis: &Axis, cell: i32) -> Labels {
    let em = (cell - 1).clamp(SMALLEST_LABEL_EM, LARGEST_LABEL_EM);
    let length = text_width(axis.columns, em) + LABEL_GAP;
    // Numbers are thinned before they are turned, as a reader can count; tokens are turned before any is left out.
    let vertical = axis.tokens && length > cell;
    let (along, depth) = if vertical { (em + 1, length) } else { (length, em + LABEL_GAP) };
    Labels { em, stride: stride(along, cell, axis.tokens), vertical, depth }
}

/// How many cells apart labels of `length` pixels are; indices at 1, 2, 5, 10, 20 and so on.
fn stride(length: i32, cell: i32, tokens: bool) -> usize {
    let least = length.unsigned_abs().div_ceil(cell.unsigned_abs()) as usize;
    let mut round = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10usize.pow(power)));
    if tokens { least } else { round.find(|&round| round >= least).unwrap_or(least) }
}

/// The width of `columns` terminal columns of the embedded font: each glyph of Hack advances 1233/2048 em.
pub(super) fn text_width(columns: usize, em: i32) -> i32 {
    (columns as f64 * f64::from(em) * 1233.0 / 2048.0).ceil() as i32
}

/// The columns that fit in `pixels`.
pub(super) fn columns_in(pixels: i32, em: i32) -> usize {
    (f64::from(pixels.max(0)) * 2048.0 / 1233.0 / f64::from(em)) as usize
}
