//! The heat map as SVG and PNG: one layout, drawn on either canvas. All lengths are pixels.

use candle_core::{Result, bail};

use super::axis::{text_width, ticks};
use super::canvas::{self, Anchor, Canvas, Hack, Point, Rectangle, Size, Style};
use super::style::{ColourScale, NOT_FINITE, Rgb, contrasting, count, gradient, short, shorten, wrap};
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

    fn draw(&self, canvas: &mut dyn Canvas, axis: &Axis, anchor: Anchor, at: impl Fn(i32) -> Point) {
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
struct PanelGrid {
    cell: Size,
    columns: usize,
    panel: Size,
    /// The distance from one panel to the next.
    step: Size,
    /// The size of all panels together.
    size: Size,
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

impl PanelGrid {
    /// Returns the grid whose picture is nearest to a square, with few empty places and cells of a good size; `None` if
    /// the cells would be smaller than a pixel.
    fn fit(content: &Content) -> Option<Self> {
        let preferred = preferred_cell(content);
        let badness = |grid: &PanelGrid| {
            let aspect = (f64::from(grid.width) / f64::from(grid.notes + 2 * MARGIN)).ln();
            // Screens and pages with text around it suit a wide picture more than a tall one.
            let aspect = if aspect < 0.0 { -1.5 * aspect } else { aspect };
            let panels = content.panels.len();
            let empty = 1.0 - panels as f64 / panels.next_multiple_of(grid.columns) as f64;
            let shrunk = (f64::from(preferred) / f64::from(grid.cell.width.min(grid.cell.height))).ln();
            // Weighted so that 8 heads are 4 x 2 and not 3 x 3 with a hole, and 5 heads are 3 x 2.
            aspect + 5.75 * empty + shrunk
        };
        // More columns than this have no space for their captions.
        let most = content.panels.len().min((MAX_SIDE / (CAPTION.em + GAP)) as usize);
        let largest = |columns| (1..=preferred).rev().find_map(|cell| Self::new(content, columns, cell));
        (1..=most).filter_map(largest).min_by(|a, b| badness(a).total_cmp(&badness(b)))
    }

    /// Returns the grid with this number of columns and this side of cells; `None` if the picture would be too large.
    fn new(content: &Content, columns: usize, side: i32) -> Option<Self> {
        let rows = content.panels.len().div_ceil(columns);
        // More cells than a picture has pixels are too many in any case.
        let cells = |axis: &Axis| axis.labels.len().min(MAX_SIDE as usize + 1) as i32;
        let queries = cells(&content.queries);
        let keys = cells(&content.keys);
        let short = side.max(SHORT_AXIS_CELL.min(4 * side));
        let cell = Size {
            width: if keys < queries { short } else { side },
            height: if queries < keys { short } else { side },
        };
        let panel = Size { width: cell.width * keys, height: cell.height * queries };
        if panel.width.max(panel.height) > MAX_SIDE || columns.max(rows) > MAX_SIDE as usize {
            return None;
        }
        let step =
            Size { width: panel.width.max(content.caption_width) + GAP, height: CAPTION_LINE + panel.height + GAP };
        let size = Size { width: columns as i32 * step.width - GAP, height: rows as i32 * step.height - GAP };
        let query_labels = Labels::new(&content.queries, cell.height, false);
        let key_labels = Labels::new(&content.keys, cell.width, true);

        let least_left = MARGIN + AXIS_NAME_SPACE + query_labels.depth;
        let least_width = least_left + size.width + GAP + content.bar_width + MARGIN;
        // If the picture is wider than the grid, the grid is in its middle.
        let inset = (MIN_WIDTH - least_width).max(0) / 2;
        let bar_height = (size.height - CAPTION_LINE).clamp(MIN_BAR_HEIGHT, MAX_BAR_HEIGHT);
        let bar_top = CAPTION_LINE + (size.height - CAPTION_LINE - bar_height).max(0) / 2;
        let key_name = size.height + key_labels.depth + LABEL_GAP + SMALL_LINE / 2;
        let notes = (key_name + SMALL_LINE).max(bar_top + bar_height + SMALL_LINE / 2);
        let left = least_left + inset;
        let width = least_width + 2 * inset;
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
    scale: ColourScale,
    content: Content,
    grid: PanelGrid,
    title: Vec<String>,
    notes: Vec<String>,
    size: Size,
}

impl<'a> Picture<'a> {
    /// Lays out a picture. `is_covered` returns whether the font has all characters of a text; missing ones need a
    /// note.
    fn new(map: &'a HeatMap, heads: Heads, is_covered: impl Fn(&str) -> bool) -> Result<Self> {
        let mut panels = map.panels(heads)?;
        let scale = ColourScale::of(map, &panels)?;
        // In a grid the number of heads is obvious.
        if heads != Heads::All {
            panels.iter_mut().for_each(|panel| panel.name += &panel.of);
        }
        let tick_columns = ticks(scale.low, scale.high, 0.0).iter().map(|tick| tick.text.len()).max().unwrap_or(0);
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
        let Some(grid) = PanelGrid::fit(&content) else {
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
        let size = Size { width: grid.width, height: grid.notes + text_height + 2 * MARGIN };
        Ok(Self { map, scale, content, grid, title, notes, size })
    }

    fn draw(&self, canvas: &mut dyn Canvas) -> Result<()> {
        let Size { width, height } = self.size;
        let grid = &self.grid;
        canvas.rect(Rectangle { left: 0, top: 0, width, height }, WHITE);
        for (text, y) in self.title.iter().zip((MARGIN + TITLE.em / 2..).step_by(TITLE_LINE as usize)) {
            canvas.text(text, Point { x: width / 2, y }, TITLE);
        }
        let top = MARGIN + self.title.len() as i32 * TITLE_LINE;
        for index in 0..self.content.panels.len() {
            self.draw_panel(canvas, index, top)?;
        }
        canvas.text("keys", Point { x: grid.left + grid.size.width / 2, y: top + grid.key_name }, AXIS_NAME);
        let left = grid.left - grid.query_labels.depth - AXIS_NAME_SPACE + SMALL_LINE / 2;
        let middle = top + (grid.size.height + CAPTION_LINE) / 2;
        canvas.text("queries", Point { x: left, y: middle }, Style { vertical: true, ..AXIS_NAME });
        self.draw_bar(canvas, top + grid.bar_top);
        let first = top + grid.notes + SMALL_LINE / 2;
        for (text, y) in self.notes.iter().zip((first..).step_by(SMALL_LINE as usize)) {
            canvas.text(text, Point { x: MARGIN, y }, NOTE);
        }
        Ok(())
    }

    fn draw_panel(&self, canvas: &mut dyn Canvas, index: usize, grid_top: i32) -> Result<()> {
        let PanelGrid { cell, columns, panel: Size { width, height }, step, .. } = self.grid;
        let left = self.grid.left + (index % columns) as i32 * step.width + (step.width - GAP - width) / 2;
        let top = grid_top + (index / columns) as i32 * step.height + CAPTION_LINE;
        let panel = &self.content.panels[index];
        canvas.text(&panel.name, Point { x: left + width / 2, y: top - CAPTION_LINE / 2 }, CAPTION);
        canvas.rect(Rectangle { left: left - 1, top: top - 1, width: width + 2, height: height + 2 }, FRAME);

        let numbered = cell.width >= NUMBERED_CELL_WIDTH && cell.height >= NUMBERED_CELL_HEIGHT;
        let weights = self.map.panel(panel)?;
        for (y, row) in (top..).step_by(cell.height as usize).zip(weights.chunks(self.content.keys.labels.len())) {
            for (x, &weight) in (left..).step_by(cell.width as usize).zip(row) {
                let color = self.scale.position(weight).map_or(NOT_FINITE, gradient);
                canvas.rect(Rectangle { left: x, top: y, width: cell.width, height: cell.height }, color);
                let text = short(weight);
                if numbered && text_width(text.len(), NUMBER.em) + 4 <= cell.width {
                    let middle = Point { x: x + cell.width / 2, y: y + cell.height / 2 };
                    canvas.text(&text, middle, Style { color: contrasting(color), ..NUMBER });
                }
            }
        }

        if index.is_multiple_of(columns) {
            let at = |i| Point { x: left - LABEL_GAP, y: top + i * cell.height + cell.height / 2 };
            self.grid.query_labels.draw(canvas, &self.content.queries, Anchor::End, at);
        }
        // The last panel of each column, which in a grid with empty places is not always in the last row.
        if index + columns >= self.content.panels.len() {
            let labels = &self.grid.key_labels;
            let anchor = if labels.vertical { Anchor::End } else { Anchor::Middle };
            let drop = if labels.vertical { 0 } else { labels.em / 2 };
            let y = top + height + LABEL_GAP + drop;
            let at = |j| Point { x: left + j * cell.width + cell.width / 2, y };
            labels.draw(canvas, &self.content.keys, anchor, at);
        }
        Ok(())
    }

    fn draw_bar(&self, canvas: &mut dyn Canvas, y: i32) {
        let x = self.grid.left + self.grid.size.width + GAP;
        let height = self.grid.bar_height;
        canvas.text(BAR_NAME, Point { x, y: y - CAPTION_LINE / 2 }, NOTE);
        canvas.rect(Rectangle { left: x - 1, top: y - 1, width: BAR_WIDTH + 2, height: height + 2 }, FRAME);
        for step in 0..BAR_STEPS {
            let top = y + height * step / BAR_STEPS;
            let bottom = y + height * (step + 1) / BAR_STEPS;
            let color = gradient(1.0 - f64::from(step) / f64::from(BAR_STEPS - 1));
            canvas.rect(Rectangle { left: x, top, width: BAR_WIDTH, height: bottom - top }, color);
        }
        for tick in ticks(self.scale.low, self.scale.high, 1.5 * f64::from(TICK.em) / f64::from(height)) {
            // The numbers at the ends stay within the bar's length, away from its name.
            let up = ((tick.position * f64::from(height)).round() as i32).clamp(TICK.em / 2, height - TICK.em / 2);
            canvas.text(&tick.text, Point { x: x + BAR_WIDTH + LABEL_GAP, y: y + height - up }, TICK);
        }
    }
}
