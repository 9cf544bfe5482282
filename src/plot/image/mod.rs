//! The heat map as SVG and PNG.

mod canvas;
mod layout;

use std::path::Path;

use candle_core::{Error, Result, bail};

use super::label::{shorten, width, wrap};
use super::scale::{NOT_FINITE, Rgb, Scale, contrasting, count, gradient, short, tick};
use super::{Heads, HeatMap};
use canvas::{Anchor, Bitmap, Canvas, Svg, Text, font, is_covered};
use layout::{
    BAR_NAME, BAR_WIDTH, CAPTION_EM, CAPTION_LINE, Content, LABEL_GAP, Labels, Layout, MARGIN, MAX_SIDE, SMALL_EM,
    SMALL_LINE, TITLE_EM, TITLE_LINE, columns_in, text_width,
};

/// Labels take at most this many display columns.
const MAX_LABEL: usize = 20;
const MAX_TITLE_LINES: usize = 4;
/// Viewers take long over more elements than this; it holds 64 heads of 64 x 64 weights.
const MAX_SVG_WEIGHTS: usize = 300_000;
/// Numbers are written into cells of at least this width and height.
const NUMBERED_CELL: (i32, i32) = (30, 20);
const NUMBER_EM: i32 = 12;

const WHITE: Rgb = [255; 3];
const INK: Rgb = [34; 3];
/// For what is read second: axis names, notes.
const FAINT: Rgb = [96; 3];
const FRAME: Rgb = [150; 3];

impl HeatMap {
    /// Writes the map to `path` as SVG or PNG, by the extension. See [`HeatMap::to_svg`] and [`HeatMap::to_png`].
    ///
    /// # Errors
    ///
    /// If the extension is neither, the file cannot be written, or the picture cannot be made.
    pub fn save(&self, path: impl AsRef<Path>, heads: Heads) -> Result<()> {
        let path = path.as_ref();
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        let bytes = match extension.to_ascii_lowercase().as_str() {
            "svg" => self.to_svg(heads)?.into_bytes(),
            "png" => self.to_png(heads)?,
            _ => bail!("[heat_map] the extension of {} is {extension:?}; expected svg or png", path.display()),
        };
        std::fs::write(path, bytes)
            .map_err(|error| Error::Msg(format!("[heat_map] cannot write {}: {error}", path.display())))
    }

    /// The map as an SVG document: the title, a grid of panels (one for each head drawn) of T_q rows and T_kv columns,
    /// labels at the left and below, and one colour bar for all panels. Text stays text, in a monospaced font of the
    /// viewer's; the layout is that of [`HeatMap::to_png`].
    ///
    /// # Errors
    ///
    /// As in [`HeatMap::to_png`], and if the panels have more than 300,000 weights, which viewers are slow to show.
    pub fn to_svg(&self, heads: Heads) -> Result<String> {
        let (_, queries, keys) = self.weights.dims3()?;
        let weights = self.panel_count(heads)? * queries * keys;
        if weights > MAX_SVG_WEIGHTS {
            bail!("[heat_map] {weights} weights are too many for an SVG, which may hold {MAX_SVG_WEIGHTS}: make a PNG");
        }
        let figure = Figure::new(self, heads, false)?;
        let mut document = String::new();
        let mut canvas = Svg::new(&mut document, figure.size());
        figure.draw(&mut canvas)?;
        canvas.finish()?;
        // Without it the edges of cells are blurred where the picture is scaled, and the ground shines through.
        Ok(document.replacen("<svg ", "<svg shape-rendering=\"crispEdges\" ", 1))
    }

    /// The map as a PNG file: the same picture as [`HeatMap::to_svg`], with no side much over 4000 pixels.
    ///
    /// Cells shrink as heads and tokens grow in number. Cells of at least 30 x 20 pixels have their weight written in.
    /// Where cells are too small for a label each, every n-th is labelled, and a note in the picture says so. Labels
    /// over 20 columns end in `…`. Characters that the embedded font (Hack: Latin, Greek, Cyrillic, symbols) lacks are
    /// drawn as empty boxes, with a note; the SVG shows them.
    ///
    /// # Errors
    ///
    /// If a head is out of range, or the panels do not fit at one pixel a weight.
    pub fn to_png(&self, heads: Heads) -> Result<Vec<u8>> {
        let figure = Figure::new(self, heads, true)?;
        let (w, h) = figure.size();
        let mut pixels = vec![0; 3 * w as usize * h as usize];
        figure.draw(&mut Bitmap::new(&mut pixels, (w, h))?)?;

        let failed = |error| Error::Msg(format!("[heat_map] the PNG cannot be encoded: {error}"));
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, w, h);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&pixels).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(bytes)
    }
}

/// A picture before it is drawn.
struct Figure<'a> {
    map: &'a HeatMap,
    heads: Heads,
    scale: Scale,
    layout: Layout,
    query_labels: Vec<String>,
    key_labels: Vec<String>,
    title: Vec<String>,
    notes: Vec<String>,
}

impl<'a> Figure<'a> {
    /// `embedded_font`: whether text is set in it, so that characters it lacks need a note.
    fn new(map: &'a HeatMap, heads: Heads, embedded_font: bool) -> Result<Self> {
        let panels = map.panel_count(heads)?;
        let (_, queries, keys) = map.weights.dims3()?;
        let scale = map.scale(heads)?;
        let query_labels: Vec<_> = (0..queries).map(|i| shorten(&map.query_label(i), MAX_LABEL)).collect();
        let key_labels: Vec<_> = (0..keys).map(|i| shorten(&map.key_label(i), MAX_LABEL)).collect();
        let columns = |labels: &[String]| labels.iter().map(|label| width(label)).max().unwrap_or(0);
        let content = Content {
            panels,
            queries,
            keys,
            query_columns: columns(&query_labels),
            key_columns: columns(&key_labels),
            caption_columns: caption(map, heads, panels - 1)?.len(),
            tick_columns: ticks(&scale, 0.0).iter().map(|(_, tick)| tick.len()).max().unwrap_or(0),
            query_tokens: map.query_labels.is_some(),
            key_tokens: map.key_labels.is_some(),
        };
        let Some(mut layout) = Layout::fit(&content) else {
            bail!(
                "[heat_map] {} of {queries} x {keys} weights do not fit in {MAX_SIDE} x {MAX_SIDE} pixels: \
                 draw fewer heads, or fewer tokens",
                count(panels, "panel")
            );
        };

        let inner = layout.width() - 2 * MARGIN;
        let room = columns_in(inner, TITLE_EM);
        let title = map.title.as_deref().map(|title| wrap(&shorten(title, room * MAX_TITLE_LINES), room));
        let title = title.unwrap_or_default();
        layout.top += title.len() as i32 * TITLE_LINE;

        let mut notes = Vec::new();
        let font = font()?;
        let mut all = query_labels.iter().chain(&key_labels).chain(&title);
        if embedded_font && !all.all(|text| is_covered(&font, text)) {
            notes.push(String::from("empty boxes: characters that the picture's font lacks; the SVG shows them"));
        }
        let thinned =
            [("queries", &layout.query_labels, content.query_tokens), ("keys", &layout.key_labels, content.key_tokens)];
        for (axis, labels, tokens) in thinned {
            if tokens && labels.stride > 1 {
                notes.push(format!("{axis}: 1 token in {} is labelled", labels.stride));
            }
        }
        if scale.not_finite > 0 {
            notes.push(format!("{} not finite, in grey", count(scale.not_finite, "weight")));
        }
        notes.extend(scale.notes.iter().cloned());
        let notes = notes.iter().flat_map(|note| wrap(note, columns_in(inner, SMALL_EM))).collect();
        Ok(Self { map, heads, scale, layout, query_labels, key_labels, title, notes })
    }

    fn size(&self) -> (u32, u32) {
        let (w, h) = self.layout.size(self.notes.len());
        (w.unsigned_abs(), h.unsigned_abs())
    }

    fn draw(&self, canvas: &mut impl Canvas) -> Result<()> {
        let (w, h) = self.layout.size(self.notes.len());
        canvas.rect((0, 0, w, h), WHITE)?;
        for (i, line) in self.title.iter().enumerate() {
            let at = (w / 2, MARGIN + i as i32 * TITLE_LINE + TITLE_EM / 2);
            canvas.text(&Text { text: line, at, em: TITLE_EM, anchor: Anchor::Middle, color: INK, vertical: false })?;
        }
        for panel in 0..self.layout.panels {
            self.draw_panel(canvas, panel)?;
        }
        self.draw_axis_names(canvas)?;
        self.draw_bar(canvas)?;
        for (i, note) in self.notes.iter().enumerate() {
            let at = (MARGIN, self.layout.notes_top() + i as i32 * SMALL_LINE + SMALL_LINE / 2);
            canvas.text(&Text {
                text: note,
                at,
                em: SMALL_EM,
                anchor: Anchor::Start,
                color: FAINT,
                vertical: false,
            })?;
        }
        Ok(())
    }

    fn draw_panel(&self, canvas: &mut impl Canvas, panel: usize) -> Result<()> {
        let (x, y) = self.layout.panel_origin(panel);
        let (w, h) = self.layout.panel;
        let text = caption(self.map, self.heads, panel)?;
        let at = (x + w / 2, y - CAPTION_LINE / 2);
        canvas.text(&Text { text: &text, at, em: CAPTION_EM, anchor: Anchor::Middle, color: INK, vertical: false })?;
        canvas.rect((x - 1, y - 1, w + 2, h + 2), FRAME)?;

        let (cell_w, cell_h) = self.layout.cell;
        let weights = self.map.panel(self.heads, panel)?;
        for (i, row) in weights.chunks(self.key_labels.len()).enumerate() {
            for (j, &weight) in row.iter().enumerate() {
                let (x, y) = (x + j as i32 * cell_w, y + i as i32 * cell_h);
                let color = self.scale.position(weight).map_or(NOT_FINITE, gradient);
                canvas.rect((x, y, cell_w, cell_h), color)?;
                self.draw_number(canvas, (x + cell_w / 2, y + cell_h / 2), weight, contrasting(color))?;
            }
        }
        if panel.is_multiple_of(self.layout.columns) {
            self.draw_query_labels(canvas, (x, y))?;
        }
        // The last panel of each column, which in a grid with empty places is not always in the last row.
        if panel + self.layout.columns >= self.layout.panels {
            self.draw_key_labels(canvas, (x, y + h))?;
        }
        Ok(())
    }

    fn draw_number(&self, canvas: &mut impl Canvas, at: (i32, i32), weight: f64, color: Rgb) -> Result<()> {
        let (cell_w, cell_h) = self.layout.cell;
        let text = short(weight);
        let fits = text_width(text.len(), NUMBER_EM) + 4 <= cell_w;
        if cell_w < NUMBERED_CELL.0 || cell_h < NUMBERED_CELL.1 || !fits {
            return Ok(());
        }
        canvas.text(&Text { text: &text, at, em: NUMBER_EM, anchor: Anchor::Middle, color, vertical: false })
    }

    fn draw_query_labels(&self, canvas: &mut impl Canvas, (x, y): (i32, i32)) -> Result<()> {
        let Labels { em, stride, vertical, .. } = self.layout.query_labels;
        let cell = self.layout.cell.1;
        for (i, text) in self.query_labels.iter().enumerate().step_by(stride) {
            let at = (x - LABEL_GAP, y + i as i32 * cell + cell / 2);
            canvas.text(&Text { text, at, em, anchor: Anchor::End, color: INK, vertical })?;
        }
        Ok(())
    }

    fn draw_key_labels(&self, canvas: &mut impl Canvas, (x, y): (i32, i32)) -> Result<()> {
        let Labels { em, stride, vertical, .. } = self.layout.key_labels;
        let cell = self.layout.cell.0;
        for (j, text) in self.key_labels.iter().enumerate().step_by(stride) {
            let x = x + j as i32 * cell + cell / 2;
            let (at, anchor) = match vertical {
                true => ((x, y + LABEL_GAP), Anchor::End),
                false => ((x, y + LABEL_GAP + em / 2), Anchor::Middle),
            };
            canvas.text(&Text { text, at, em, anchor, color: INK, vertical })?;
        }
        Ok(())
    }

    fn draw_axis_names(&self, canvas: &mut impl Canvas) -> Result<()> {
        let (x, y, w, h) = self.layout.grid();
        let (anchor, em, color) = (Anchor::Middle, SMALL_EM, FAINT);
        let keys = (x + w / 2, self.layout.key_name());
        canvas.text(&Text { text: "keys", at: keys, em, anchor, color, vertical: false })?;
        let queries = (self.layout.query_name(), y + (h + CAPTION_LINE) / 2);
        canvas.text(&Text { text: "queries", at: queries, em, anchor, color, vertical: true })
    }

    fn draw_bar(&self, canvas: &mut impl Canvas) -> Result<()> {
        const STEPS: i32 = 120;
        let (x, y, height) = self.layout.bar();
        let color = FAINT;
        let at = (x, y - CAPTION_LINE / 2);
        canvas.text(&Text { text: BAR_NAME, at, em: SMALL_EM, anchor: Anchor::Start, color, vertical: false })?;
        canvas.rect((x - 1, y - 1, BAR_WIDTH + 2, height + 2), FRAME)?;
        for step in 0..STEPS {
            let (top, bottom) = (y + height * step / STEPS, y + height * (step + 1) / STEPS);
            let position = 1.0 - f64::from(step) / f64::from(STEPS - 1);
            canvas.rect((x, top, BAR_WIDTH, bottom - top), gradient(position))?;
        }
        for (position, text) in ticks(&self.scale, 1.5 * f64::from(SMALL_EM) / f64::from(height)) {
            let up = (position * f64::from(height)).round() as i32;
            // The numbers at the ends stay within the bar's length, out of the way of its name.
            let up = up.clamp(SMALL_EM / 2, height - SMALL_EM / 2);
            let at = (x + BAR_WIDTH + LABEL_GAP, y + height - up);
            let color = INK;
            canvas.text(&Text { text: &text, at, em: SMALL_EM, anchor: Anchor::Start, color, vertical: false })?;
        }
        Ok(())
    }
}

/// In a grid the number of heads is plain to see.
fn caption(map: &HeatMap, heads: Heads, panel: usize) -> Result<String> {
    match heads {
        Heads::All => Ok(format!("head {panel}")),
        Heads::Mean | Heads::One(_) => map.caption(heads, panel),
    }
}

/// The positions and texts of the numbers beside the colour bar: its ends, and round numbers between that are more than
/// `clear` from them.
fn ticks(scale: &Scale, clear: f64) -> Vec<(f64, String)> {
    let mut ticks = vec![(0.0, tick(scale.low))];
    let length = scale.high - scale.low;
    let magnitude = 10f64.powf((length / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|round| round * magnitude).into_iter().find(|step| length / step <= 5.0);
    if let Some(step) = step.filter(|step| step.is_normal()) {
        let first = (scale.low / step).ceil();
        // At most 6 lie between the ends, however the quotient rounds.
        for value in (0..7).map(|i| (first + f64::from(i)) * step) {
            let position = (value - scale.low) / length;
            if position > clear && position < 1.0 - clear {
                ticks.push((position, tick(value)));
            }
        }
    }
    ticks.push((1.0, tick(scale.high)));
    ticks
}
