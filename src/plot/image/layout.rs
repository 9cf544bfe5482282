//! Where everything in a picture lies, in pixels.

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

/// What a picture has to hold.
pub(super) struct Content {
    pub(super) panels: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Display columns of the longest query label, key label, caption and number at the colour bar.
    pub(super) query_columns: usize,
    pub(super) key_columns: usize,
    pub(super) caption_columns: usize,
    pub(super) tick_columns: usize,
    /// Whether labels are tokens; indices can be thinned to round numbers and need no note.
    pub(super) query_tokens: bool,
    pub(super) key_tokens: bool,
}

/// The labels of one axis.
pub(super) struct Labels {
    pub(super) em: i32,
    /// Every `stride`-th label is drawn.
    pub(super) stride: usize,
    pub(super) vertical: bool,
    /// The room they take beside the panel.
    pub(super) depth: i32,
}

/// A grid of panels of equal size, with labels at its left and bottom, and a colour bar at its right.
pub(super) struct Layout {
    pub(super) cell: (i32, i32),
    pub(super) columns: usize,
    pub(super) rows: usize,
    pub(super) panels: usize,
    pub(super) panel: (i32, i32),
    slot: (i32, i32),
    pub(super) query_labels: Labels,
    pub(super) key_labels: Labels,
    tick_width: i32,
    /// Moves the grid to the middle of a picture that is wider than what it holds.
    inset: i32,
    pub(super) top: i32,
}

impl Layout {
    /// The layout whose picture is nearest to a square, with few empty places and cells of a good size; none if the
    /// cells would be smaller than a pixel.
    pub(super) fn fit(content: &Content) -> Option<Self> {
        let badness = |layout: &Layout| {
            let (w, h) = layout.size(0);
            let aspect = (f64::from(w) / f64::from(h)).ln();
            // Screens and pages with text around it suit a wide picture more than a tall one.
            let aspect = if aspect < 0.0 { -1.5 * aspect } else { aspect };
            let places = (layout.columns * layout.rows) as f64;
            let empty = 1.0 - content.panels as f64 / places;
            let shrunk = (f64::from(preferred_cell(content)) / f64::from(layout.cell.0.min(layout.cell.1))).ln();
            // Weighted so that 8 heads are 4 x 2 and not 3 x 3 with a hole, and 5 heads are 3 x 2.
            aspect + 5.75 * empty + shrunk
        };
        // More columns than this have no room for their captions.
        let most = content.panels.min((MAX_SIDE / (CAPTION_EM + GAP)) as usize);
        (1..=most)
            .filter_map(|columns| Self::with_columns(content, columns))
            .min_by(|a, b| badness(a).total_cmp(&badness(b)))
    }

    fn with_columns(content: &Content, columns: usize) -> Option<Self> {
        let rows = content.panels.div_ceil(columns);
        (1..=preferred_cell(content)).rev().find_map(|cell| {
            let layout = Self::with_cell(content, (columns, rows), cell)?;
            let (w, h) = layout.size(0);
            (w <= MAX_SIDE && h <= MAX_SIDE - TEXT_ROOM).then_some(layout)
        })
    }

    fn with_cell(content: &Content, (columns, rows): (usize, usize), cell: i32) -> Option<Self> {
        let (queries, keys) = (i32::try_from(content.queries).ok()?, i32::try_from(content.keys).ok()?);
        let short = cell.max(SHORT_AXIS_CELL.min(4 * cell));
        let cell = (if keys < queries { short } else { cell }, if queries < keys { short } else { cell });
        let panel = (cell.0.checked_mul(keys)?, cell.1.checked_mul(queries)?);
        if panel.0 > MAX_SIDE || panel.1 > MAX_SIDE || columns.max(rows) > MAX_SIDE as usize {
            return None;
        }
        let caption = text_width(content.caption_columns, CAPTION_EM);
        let tick_width = text_width(content.tick_columns, SMALL_EM);
        let bar_name = text_width(BAR_NAME.len(), SMALL_EM) - BAR_WIDTH - LABEL_GAP;
        Some(
            Self {
                cell,
                columns,
                rows,
                panels: content.panels,
                panel,
                slot: (panel.0.max(caption), CAPTION_LINE + panel.1),
                query_labels: query_labels(content, cell.1),
                key_labels: key_labels(content, cell.0),
                tick_width: tick_width.max(bar_name),
                inset: 0,
                top: MARGIN,
            }
            .centred(),
        )
    }

    fn centred(mut self) -> Self {
        self.inset = (MIN_WIDTH - self.width()).max(0) / 2;
        self
    }

    pub(super) fn width(&self) -> i32 {
        self.bar().0 + BAR_WIDTH + LABEL_GAP + self.tick_width + MARGIN + self.inset
    }

    /// Width and height of the picture.
    pub(super) fn size(&self, note_lines: usize) -> (i32, i32) {
        (self.width(), self.notes_top() + note_lines as i32 * SMALL_LINE + MARGIN)
    }

    /// The left end of the row labels' room.
    fn left(&self) -> i32 {
        MARGIN + self.inset + AXIS_NAME
    }

    /// The middle line of the name beside the query axis.
    pub(super) fn query_name(&self) -> i32 {
        MARGIN + self.inset + SMALL_LINE / 2
    }

    /// The grid's left, top, width and height.
    pub(super) fn grid(&self) -> (i32, i32, i32, i32) {
        let (columns, rows) = (self.columns as i32, self.rows as i32);
        (
            self.left() + self.query_labels.depth,
            self.top,
            columns * self.slot.0 + (columns - 1) * GAP,
            rows * self.slot.1 + (rows - 1) * GAP,
        )
    }

    /// The upper left corner of a panel's cells.
    pub(super) fn panel_origin(&self, panel: usize) -> (i32, i32) {
        let (x, y, ..) = self.grid();
        let (column, row) = ((panel % self.columns) as i32, (panel / self.columns) as i32);
        (
            x + column * (self.slot.0 + GAP) + (self.slot.0 - self.panel.0) / 2,
            y + row * (self.slot.1 + GAP) + CAPTION_LINE,
        )
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
    let tokens = content.queries.max(content.keys).min(panel);
    let least = if content.query_tokens || content.key_tokens { TOKEN_CELL } else { INDEX_CELL };
    ((panel / tokens.max(1)) as i32).clamp(least, LARGEST_CELL)
}

fn query_labels(content: &Content, cell: i32) -> Labels {
    let em = (cell - 1).clamp(SMALLEST_LABEL_EM, LARGEST_LABEL_EM);
    let depth = text_width(content.query_columns, em) + LABEL_GAP;
    let tokens = content.query_tokens;
    // Once numbers are thinned they are read as an axis, with room between; tokens are read one by one.
    let room = if tokens || cell > em { em + 1 } else { 2 * em };
    Labels { em, stride: stride(room, cell, tokens), vertical: false, depth }
}

fn key_labels(content: &Content, cell: i32) -> Labels {
    let em = (cell - 1).clamp(SMALLEST_LABEL_EM, LARGEST_LABEL_EM);
    let length = text_width(content.key_columns, em);
    // Numbers are thinned before they are turned, as a reader can count; tokens are turned before any is left out.
    if !content.key_tokens || length + LABEL_GAP <= cell {
        let stride = stride(length + LABEL_GAP, cell, content.key_tokens);
        return Labels { em, stride, vertical: false, depth: em + LABEL_GAP };
    }
    Labels { em, stride: stride(em + 1, cell, true), vertical: true, depth: length + LABEL_GAP }
}

/// How many cells apart labels that take `room` pixels are; indices at 1, 2, 5, 10, 20 and so on.
fn stride(room: i32, cell: i32, tokens: bool) -> usize {
    let least = room.max(1).unsigned_abs().div_ceil(cell.max(1).unsigned_abs()) as usize;
    if tokens {
        return least;
    }
    let mut step = 1;
    loop {
        if let Some(round) = [step, 2 * step, 5 * step].into_iter().find(|&round| round >= least) {
            return round;
        }
        step *= 10;
    }
}

/// The width of `columns` terminal columns of the embedded font: each glyph of Hack advances 1233/2048 em.
pub(super) fn text_width(columns: usize, em: i32) -> i32 {
    (columns as f64 * f64::from(em) * 1233.0 / 2048.0).ceil() as i32
}

/// The columns that fit in `pixels`.
pub(super) fn columns_in(pixels: i32, em: i32) -> usize {
    (f64::from(pixels.max(0)) * 2048.0 / 1233.0 / f64::from(em)) as usize
}
