//! The heat map as SVG and PNG: one layout, drawn on either canvas. All lengths are pixels.

use candle_core::{Result, bail};

use super::canvas::{self, Anchor, Canvas, Hack, Style};
use super::style::{NOT_FINITE, Rgb, Scale, contrasting, count, gradient, short, shorten, tick, wrap};
use super::{Axis, Heads, HeatMap, Panel};

/// The largest side of a picture, except for a title and notes beyond `TEXT_SPACE`.
const MAX_SIDE: i32 = 4000;
/// The space for the title and the notes, whose lines are counted once the width is known.
const TEXT_SPACE: i32 = 240;
const MAX_TITLE_LINES: usize = 4;
/// The most weights of an SVG: 64 heads of 64 x 64. Viewers are slow with more elements.
const MAX_SVG_WEIGHTS: usize = 300_000;

const MARGIN: i32 = 24;
/// The space between panels, and between the panels and the colour bar.
const GAP: i32 = 20;
const TITLE_LINE: i32 = 26;
const CAPTION_LINE: i32 = 22;
/// The line height of axis names, the scale and the notes.
const SMALL_LINE: i32 = 18;
/// The space for the name of the query axis, at the left.
const AXIS_NAME_SPACE: i32 = 24;
/// The space between a panel and its labels.
const LABEL_GAP: i32 = 6;
/// The least width of a picture, for notes and titles of a tiny panel.
const MIN_WIDTH: i32 = 320;

const BAR_NAME: &str = "weight";
const BAR_WIDTH: i32 = 16;
const MIN_BAR_HEIGHT: i32 = 120;
const MAX_BAR_HEIGHT: i32 = 600;
/// The number of rectangles of the colour bar.
const BAR_STEPS: i32 = 120;

/// The least side of a cell if nothing forces it to be smaller: with tokens there is space for a label each.
const TOKEN_CELL: i32 = 12;
const INDEX_CELL: i32 = 6;
const LARGEST_CELL: i32 = 64;
/// The least length of the cells of a short axis (one query, for example), so that a strip is more than a line.
const SHORT_AXIS_CELL: i32 = 16;
/// The least width and height of cells that have their weight written in.
const NUMBERED_CELL_WIDTH: i32 = 30;
const NUMBERED_CELL_HEIGHT: i32 = 20;
/// The most display columns of a label.
const MAX_LABEL: usize = 20;
const MIN_LABEL_EM: i32 = 9;
const MAX_LABEL_EM: i32 = 13;

pub(super) const WHITE: Rgb = [255; 3];
const INK: Rgb = [34; 3];
/// The colour of less important text: axis names, notes.
const FAINT: Rgb = [96; 3];
pub(super) const FRAME: Rgb = [150; 3];

pub(super) const TITLE: Style = Style { em: 18, anchor: Anchor::Middle, color: INK, vertical: false };
const CAPTION: Style = Style { em: 13, ..TITLE };
pub(super) const AXIS_NAME: Style = Style { em: 12, color: FAINT, ..TITLE };
const NOTE: Style = Style { anchor: Anchor::Start, ..AXIS_NAME };
pub(super) const TICK: Style = Style { color: INK, ..NOTE };
const NUMBER: Style = Style { em: 12, ..TITLE };

pub(super) fn to_svg(map: &HeatMap, heads: Heads) -> Result<String> {
    let weights = map.panels(heads)?.len() * map.queries.labels.len() * map.keys.labels.len();
    if weights > MAX_SVG_WEIGHTS {
        bail!("[heat_map] {weights} weights are too many for an SVG, which may hold {MAX_SVG_WEIGHTS}: make a PNG");
    }
    let picture = Picture::new(map, heads, |_| true)?;
    canvas::to_svg(picture.size, |svg| picture.draw(svg))
}

pub(super) fn to_png(map: &HeatMap, heads: Heads) -> Result<Vec<u8>> {
    let font = Hack::new()?;
    let picture = Picture::new(map, heads, |text| font.covers(text))?;
    canvas::to_png(font, picture.size, |bitmap| picture.draw(bitmap))
}

/// The layout of the labels of an axis.
struct Labels {
    em: i32,
    /// Every `stride`-th label is drawn.
    stride: usize,
    vertical: bool,
    /// Their extent in the picture, from the panel on.
    depth: i32,
}

impl Labels {
    fn new(axis: &Axis, cell: i32, is_key: bool) -> Self {
        let em = (cell - 1).clamp(MIN_LABEL_EM, MAX_LABEL_EM);
        let length = text_width(axis.columns, em) + LABEL_GAP;
        // Numbers are thinned before they are turned, as a reader can count; tokens are turned before any is omitted.
        let vertical = is_key && axis.has_tokens && length > cell;
        let along = match is_key && !vertical {
            true => length,
            // Thinned numbers are read as an axis, with space between; tokens are read one by one.
            false if !axis.has_tokens && cell <= em => 2 * em,
            false => em + 1,
        };
        let least = along.unsigned_abs().div_ceil(cell.unsigned_abs()) as usize;
        // Indices at 1, 2, 5, 10, 20 and so on.
        let mut round = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10usize.pow(power)));
        let stride = if axis.has_tokens { least } else { round.find(|&round| round >= least).unwrap_or(least) };
        Self { em, stride, vertical, depth: if is_key && !vertical { em + LABEL_GAP } else { length } }
    }

    fn draw(&self, canvas: &mut dyn Canvas, axis: &Axis, anchor: Anchor, at: impl Fn(i32) -> [i32; 2]) {
        let style = Style { em: self.em, anchor, vertical: self.vertical, ..TITLE };
        for (i, text) in (0..).zip(&axis.labels).step_by(self.stride) {
            canvas.text(text, at(i), style);
        }
    }
}

/// The content of a picture, which determines its grid.
struct Content {
    panels: Vec<Panel>,
    queries: Axis,
    keys: Axis,
    caption_width: i32,
    /// The width of the colour bar with its name and numbers.
    bar_width: i32,
}

/// A grid of panels of equal size, with labels at its left and bottom, and a colour bar at its right.
struct Grid {
    cell: [i32; 2],
    columns: usize,
    panel: [i32; 2],
    /// The distance from one panel to the next.
    step: [i32; 2],
    /// The size of all panels together.
    size: [i32; 2],
    query_labels: Labels,
    key_labels: Labels,
    /// The left end of the panels in the picture, and the picture's width.
    left: i32,
    width: i32,
    /// The top of the colour bar, measured from the top of the grid.
    bar_top: i32,
    bar_height: i32,
    /// From the top of the grid: the middle line of the name under the key axis, and where the notes begin.
    key_name: i32,
    notes: i32,
}

impl Grid {
    /// Returns the grid whose picture is nearest to a square, with few empty places and cells of a good size; `None` if
    /// the cells would be smaller than a pixel.
    fn fit(content: &Content) -> Option<Self> {
        let preferred = preferred_cell(content);
        let badness = |grid: &Grid| {
            let aspect = (f64::from(grid.width) / f64::from(grid.notes + 2 * MARGIN)).ln();
            // Screens and pages with text around it suit a wide picture more than a tall one.
            let aspect = if aspect < 0.0 { -1.5 * aspect } else { aspect };
            let panels = content.panels.len();
            let empty = 1.0 - panels as f64 / panels.next_multiple_of(grid.columns) as f64;
            let shrunk = (f64::from(preferred) / f64::from(grid.cell[0].min(grid.cell[1]))).ln();
            // Weighted so that 8 heads are 4 x 2 and not 3 x 3 with a hole, and 5 heads are 3 x 2.
            aspect + 5.75 * empty + shrunk
        };
        // More columns than this have no space for their captions.
        let most = content.panels.len().min((MAX_SIDE / (CAPTION.em + GAP)) as usize);
        let largest = |columns| (1..=preferred).rev().find_map(|cell| Self::new(content, columns, cell));
        (1..=most).filter_map(largest).min_by(|a, b| badness(a).total_cmp(&badness(b)))
    }

    /// Returns the grid with this number of columns and size of cells; `None` if the picture would be too large.
    fn new(content: &Content, columns: usize, cell: i32) -> Option<Self> {
        let rows = content.panels.len().div_ceil(columns);
        // More cells than a picture has pixels are too many in any case.
        let [queries, keys] =
            [&content.queries, &content.keys].map(|axis| axis.labels.len().min(MAX_SIDE as usize + 1));
        let (queries, keys) = (queries as i32, keys as i32);
        let short = cell.max(SHORT_AXIS_CELL.min(4 * cell));
        let cell = [if keys < queries { short } else { cell }, if queries < keys { short } else { cell }];
        let panel = [cell[0] * keys, cell[1] * queries];
        if panel[0].max(panel[1]) > MAX_SIDE || columns.max(rows) > MAX_SIDE as usize {
            return None;
        }
        let step = [panel[0].max(content.caption_width) + GAP, CAPTION_LINE + panel[1] + GAP];
        let size = [columns as i32 * step[0] - GAP, rows as i32 * step[1] - GAP];
        let query_labels = Labels::new(&content.queries, cell[1], false);
        let key_labels = Labels::new(&content.keys, cell[0], true);

        let left = MARGIN + AXIS_NAME_SPACE + query_labels.depth;
        let width = left + size[0] + GAP + content.bar_width + MARGIN;
        // If the picture is wider than the grid, the grid is in its middle.
        let inset = (MIN_WIDTH - width).max(0) / 2;
        let bar_height = (size[1] - CAPTION_LINE).clamp(MIN_BAR_HEIGHT, MAX_BAR_HEIGHT);
        let bar_top = CAPTION_LINE + (size[1] - CAPTION_LINE - bar_height).max(0) / 2;
        let key_name = size[1] + key_labels.depth + LABEL_GAP + SMALL_LINE / 2;
        let notes = (key_name + SMALL_LINE).max(bar_top + bar_height + SMALL_LINE / 2);
        let (left, width) = (left + inset, width + 2 * inset);
        if width > MAX_SIDE || notes + 2 * MARGIN > MAX_SIDE - TEXT_SPACE {
            return None;
        }
        Some(Self {
            cell,
            columns,
            panel,
            step,
            size,
            query_labels,
            key_labels,
            left,
            width,
            bar_top,
            bar_height,
            key_name,
            notes,
        })
    }
}

/// Returns the side of a cell if nothing forces it to be smaller: panels get smaller the more there are.
fn preferred_cell(content: &Content) -> i32 {
    let panel = match content.panels.len() {
        1 => 480,
        2..=4 => 360,
        5..=9 => 280,
        10..=16 => 240,
        _ => 180,
    };
    let tokens = content.queries.labels.len().max(content.keys.labels.len()).clamp(1, panel);
    let least = if content.queries.has_tokens || content.keys.has_tokens { TOKEN_CELL } else { INDEX_CELL };
    ((panel / tokens) as i32).clamp(least, LARGEST_CELL)
}

/// A picture before it is drawn.
struct Picture<'a> {
    map: &'a HeatMap,
    scale: Scale,
    content: Content,
    grid: Grid,
    title: Vec<String>,
    notes: Vec<String>,
    size: [i32; 2],
}

impl<'a> Picture<'a> {
    /// Lays out a picture. `is_covered` returns whether the font has all characters of a text; missing ones need a
    /// note.
    fn new(map: &'a HeatMap, heads: Heads, is_covered: impl Fn(&str) -> bool) -> Result<Self> {
        let mut panels = map.panels(heads)?;
        let scale = Scale::of(map, &panels)?;
        // In a grid the number of heads is obvious.
        if heads != Heads::All {
            panels.iter_mut().for_each(|panel| panel.name += &panel.of);
        }
        let tick_columns = ticks(scale.low, scale.high, 0.0).iter().map(|(_, tick)| tick.len()).max().unwrap_or(0);
        let shortened = |axis: &Axis| {
            Axis::new(axis.noun, axis.labels.iter().map(|label| shorten(label, MAX_LABEL)).collect(), axis.has_tokens)
        };
        let content = Content {
            queries: shortened(&map.queries),
            keys: shortened(&map.keys),
            caption_width: text_width(panels.last().map_or(0, |panel| panel.name.len()), CAPTION.em),
            bar_width: (BAR_WIDTH + LABEL_GAP + text_width(tick_columns, TICK.em))
                .max(text_width(BAR_NAME.len(), NOTE.em)),
            panels,
        };
        let Some(grid) = Grid::fit(&content) else {
            bail!(
                "[heat_map] {} of {} x {} weights do not fit in {MAX_SIDE} x {MAX_SIDE} pixels: draw fewer heads, or \
                 fewer tokens",
                count(content.panels.len(), "panel"),
                map.queries.labels.len(),
                map.keys.labels.len()
            );
        };

        // The terminal columns that fit between the margins: see `text_width`.
        let columns = |em| (f64::from(grid.width - 2 * MARGIN) * 2048.0 / 1233.0 / f64::from(em)) as usize;
        let lines = |title: &String| wrap(&shorten(title, columns(TITLE.em) * MAX_TITLE_LINES), columns(TITLE.em));
        let title = map.title.as_ref().map_or(Vec::new(), lines);
        let Content { queries, keys, .. } = &content;
        let mut notes = Vec::new();
        if !queries.labels.iter().chain(&keys.labels).chain(&title).all(|text| is_covered(text)) {
            notes.push(String::from("empty boxes: characters that the picture's font lacks; the SVG shows them"));
        }
        for (axis, labels) in [(queries, &grid.query_labels), (keys, &grid.key_labels)] {
            if axis.has_tokens && labels.stride > 1 {
                notes.push(format!("{}: 1 token in {} is labelled", axis.noun.many, labels.stride));
            }
        }
        if scale.not_finite > 0 {
            notes.push(format!("{} not finite, in grey", count(scale.not_finite, "weight")));
        }
        let notes: Vec<_> = notes.iter().chain(&scale.notes).flat_map(|note| wrap(note, columns(NOTE.em))).collect();
        let text_height = title.len() as i32 * TITLE_LINE + notes.len() as i32 * SMALL_LINE;
        let size = [grid.width, grid.notes + text_height + 2 * MARGIN];
        Ok(Self { map, scale, content, grid, title, notes, size })
    }

    fn draw(&self, canvas: &mut dyn Canvas) -> Result<()> {
        let ([w, h], grid) = (self.size, &self.grid);
        canvas.rect([0, 0, w, h], WHITE);
        for (text, y) in self.title.iter().zip((MARGIN + TITLE.em / 2..).step_by(TITLE_LINE as usize)) {
            canvas.text(text, [w / 2, y], TITLE);
        }
        let top = MARGIN + self.title.len() as i32 * TITLE_LINE;
        for index in 0..self.content.panels.len() {
            self.draw_panel(canvas, index, top)?;
        }
        canvas.text("keys", [grid.left + grid.size[0] / 2, top + grid.key_name], AXIS_NAME);
        let left = grid.left - grid.query_labels.depth - AXIS_NAME_SPACE + SMALL_LINE / 2;
        let middle = top + (grid.size[1] + CAPTION_LINE) / 2;
        canvas.text("queries", [left, middle], Style { vertical: true, ..AXIS_NAME });
        self.draw_bar(canvas, top + grid.bar_top);
        let first = top + grid.notes + SMALL_LINE / 2;
        for (text, y) in self.notes.iter().zip((first..).step_by(SMALL_LINE as usize)) {
            canvas.text(text, [MARGIN, y], NOTE);
        }
        Ok(())
    }

    fn draw_panel(&self, canvas: &mut dyn Canvas, index: usize, top: i32) -> Result<()> {
        let Grid { cell: [w, h], columns, panel: [width, height], step, .. } = self.grid;
        let left = self.grid.left + (index % columns) as i32 * step[0] + (step[0] - GAP - width) / 2;
        let top = top + (index / columns) as i32 * step[1] + CAPTION_LINE;
        let panel = &self.content.panels[index];
        canvas.text(&panel.name, [left + width / 2, top - CAPTION_LINE / 2], CAPTION);
        canvas.rect([left - 1, top - 1, width + 2, height + 2], FRAME);

        let numbered = w >= NUMBERED_CELL_WIDTH && h >= NUMBERED_CELL_HEIGHT;
        let weights = self.map.panel(panel)?;
        for (y, row) in (top..).step_by(h as usize).zip(weights.chunks(self.content.keys.labels.len())) {
            for (x, &weight) in (left..).step_by(w as usize).zip(row) {
                let color = self.scale.position(weight).map_or(NOT_FINITE, gradient);
                canvas.rect([x, y, w, h], color);
                let text = short(weight);
                if numbered && text_width(text.len(), NUMBER.em) + 4 <= w {
                    canvas.text(&text, [x + w / 2, y + h / 2], Style { color: contrasting(color), ..NUMBER });
                }
            }
        }

        if index.is_multiple_of(columns) {
            let at = |i| [left - LABEL_GAP, top + i * h + h / 2];
            self.grid.query_labels.draw(canvas, &self.content.queries, Anchor::End, at);
        }
        // The last panel of each column, which in a grid with empty places is not always in the last row.
        if index + columns >= self.content.panels.len() {
            let labels = &self.grid.key_labels;
            let (anchor, drop) = if labels.vertical { (Anchor::End, 0) } else { (Anchor::Middle, labels.em / 2) };
            labels
                .draw(canvas, &self.content.keys, anchor, |j| [left + j * w + w / 2, top + height + LABEL_GAP + drop]);
        }
        Ok(())
    }

    fn draw_bar(&self, canvas: &mut dyn Canvas, y: i32) {
        let (x, height) = (self.grid.left + self.grid.size[0] + GAP, self.grid.bar_height);
        canvas.text(BAR_NAME, [x, y - CAPTION_LINE / 2], NOTE);
        canvas.rect([x - 1, y - 1, BAR_WIDTH + 2, height + 2], FRAME);
        for step in 0..BAR_STEPS {
            let [top, bottom] = [step, step + 1].map(|step| y + height * step / BAR_STEPS);
            let color = gradient(1.0 - f64::from(step) / f64::from(BAR_STEPS - 1));
            canvas.rect([x, top, BAR_WIDTH, bottom - top], color);
        }
        for (position, text) in &ticks(self.scale.low, self.scale.high, 1.5 * f64::from(TICK.em) / f64::from(height)) {
            // The numbers at the ends stay within the bar's length, away from its name.
            let up = ((position * f64::from(height)).round() as i32).clamp(TICK.em / 2, height - TICK.em / 2);
            canvas.text(text, [x + BAR_WIDTH + LABEL_GAP, y + height - up], TICK);
        }
    }
}

/// Returns the positions and texts of the numbers along a scale: its ends, and round numbers between that are more than
/// `clear` from them.
pub(super) fn ticks(low: f64, high: f64, clear: f64) -> Vec<(f64, String)> {
    let mut ticks = vec![(0.0, tick(low)), (1.0, tick(high))];
    let length = high - low;
    let magnitude = 10f64.powf((length / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|round| round * magnitude).into_iter().find(|step| length / step <= 5.0);
    if let Some(step) = step.filter(|step| step.is_normal()) {
        let first = (low / step).ceil();
        // At most 6 are between the ends, even if the quotient rounds.
        let values = (0..7).map(|i| (first + f64::from(i)) * step);
        let inner = values.map(|value| ((value - low) / length, tick(value)));
        ticks.extend(inner.filter(|(position, _)| *position > clear && *position < 1.0 - clear));
    }
    ticks
}

/// Returns the width of `columns` terminal columns of the embedded font: each glyph of Hack advances 1233/2048 em.
pub(super) fn text_width(columns: usize, em: i32) -> i32 {
    (columns as f64 * f64::from(em) * 1233.0 / 2048.0).ceil() as i32
}
