//! The heat map as SVG and PNG: one drawing, of rectangles and texts, that each format writes in its own way.

use std::path::Path;

use ab_glyph::{Font, FontRef, GlyphId, PxScale, ScaleFont, point};
use candle_core::{Error, Result, bail};

use super::label::{shorten, wrap};
use super::layout::{
    Axis, BAR_NAME, BAR_WIDTH, CAPTION_EM, CAPTION_LINE, Content, LABEL_GAP, Layout, MARGIN, MAX_SIDE, SMALL_EM,
    SMALL_LINE, TITLE_EM, TITLE_LINE, columns_in, text_width,
};
use super::scale::{NOT_FINITE, Rgb, Scale, contrasting, count, gradient, short, tick};
use super::{Heads, HeatMap};

const MAX_TITLE_LINES: usize = 4;
/// Viewers take long over more elements than this; it holds 64 heads of 64 x 64 weights.
const MAX_SVG_WEIGHTS: usize = 300_000;
/// Numbers are written into cells of at least this width and height.
const NUMBERED_CELL: (i32, i32) = (30, 20);
const NUMBER_EM: i32 = 12;
/// Rectangles of the colour bar.
const BAR_STEPS: i32 = 120;

const WHITE: Rgb = [255; 3];
const INK: Rgb = [34; 3];
/// For what is read second: axis names, notes.
const FAINT: Rgb = [96; 3];
const FRAME: Rgb = [150; 3];

/// Monospaced, so that a label's width is known whichever of these the viewer has.
const FAMILIES: &str = "Hack, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
/// Half the height of a capital or digit of Hack, in em: text is centred on it.
const HALF_CAPITAL: f32 = 0.36;

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
        let figure = Figure::new(self, heads, |_| true)?;
        let (w, h) = figure.size();
        // Without crisp edges, cells are blurred where the picture is scaled, and the ground shines through.
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
             shape-rendering=\"crispEdges\" font-family=\"{FAMILIES}\">\n"
        );
        figure.draw(&mut |shape| svg.push_str(&element(&shape)))?;
        svg.push_str("</svg>\n");
        Ok(svg)
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
        let failed = |error| Error::Msg(format!("[heat_map] the font cannot be read: {error}"));
        let font = FontRef::try_from_slice(epaint_default_fonts::HACK_REGULAR).map_err(failed)?;
        let figure = Figure::new(self, heads, |text| text.chars().all(|c| glyph_id(&font, c).0 != 0))?;
        let (w, h) = figure.size();
        let mut bitmap = Bitmap { w, h, pixels: vec![0; 3 * w as usize * h as usize] };
        figure.draw(&mut |shape| bitmap.draw(&shape, &font))?;

        let failed = |error| Error::Msg(format!("[heat_map] the PNG cannot be encoded: {error}"));
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, w.unsigned_abs(), h.unsigned_abs());
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header().map_err(failed)?;
        writer.write_image_data(&bitmap.pixels).map_err(failed)?;
        writer.finish().map_err(failed)?;
        Ok(bytes)
    }
}

/// What a picture is made of, in pixels.
enum Shape<'a> {
    Rect {
        x: i32,
        y: i32,
        w: i32,
        h: i32,
        color: Rgb,
    },
    /// A line of text; (x, y) lies halfway up its capitals, at its anchor.
    Text {
        text: &'a str,
        x: i32,
        y: i32,
        style: Style,
    },
}

#[derive(Clone, Copy)]
struct Style {
    em: i32,
    anchor: Anchor,
    color: Rgb,
    /// Written upwards.
    vertical: bool,
}

/// Which end of a text its point marks.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

const TITLE: Style = Style { em: TITLE_EM, anchor: Anchor::Middle, color: INK, vertical: false };
const CAPTION: Style = Style { em: CAPTION_EM, ..TITLE };
const AXIS_NAME: Style = Style { em: SMALL_EM, color: FAINT, ..TITLE };
const NOTE: Style = Style { anchor: Anchor::Start, ..AXIS_NAME };
const TICK: Style = Style { color: INK, ..NOTE };

/// A picture before it is drawn.
struct Figure<'a> {
    map: &'a HeatMap,
    heads: Heads,
    scale: Scale,
    content: Content,
    layout: Layout,
    title: Vec<String>,
    notes: Vec<String>,
}

impl<'a> Figure<'a> {
    /// `is_covered`: whether the font can write all of a text; what it cannot write needs a note.
    fn new(map: &'a HeatMap, heads: Heads, is_covered: impl Fn(&str) -> bool) -> Result<Self> {
        let panels = map.panel_count(heads)?;
        let (_, queries, keys) = map.weights.dims3()?;
        let scale = map.scale(heads)?;
        let content = Content {
            panels,
            queries: Axis::new(queries, map.query_labels.is_some(), |i| map.query_label(i)),
            keys: Axis::new(keys, map.key_labels.is_some(), |i| map.key_label(i)),
            caption_columns: caption(map, heads, panels - 1)?.len(),
            tick_columns: ticks(&scale, 0.0).iter().map(|(_, tick)| tick.len()).max().unwrap_or(0),
        };
        let Some(mut layout) = Layout::fit(&content) else {
            bail!(
                "[heat_map] {} of {queries} x {keys} weights do not fit in {MAX_SIDE} x {MAX_SIDE} pixels: \
                 draw fewer heads, or fewer tokens",
                count(panels, "panel")
            );
        };

        let inner = layout.width - 2 * MARGIN;
        let columns = columns_in(inner, TITLE_EM);
        let title = map.title.iter().flat_map(|title| wrap(&shorten(title, columns * MAX_TITLE_LINES), columns));
        let title: Vec<_> = title.collect();
        layout.top += title.len() as i32 * TITLE_LINE;

        let Content { queries, keys, .. } = &content;
        let mut notes = Vec::new();
        if !queries.labels.iter().chain(&keys.labels).chain(&title).all(|text| is_covered(text)) {
            notes.push(String::from("empty boxes: characters that the picture's font lacks; the SVG shows them"));
        }
        for (name, axis, labels) in [("queries", queries, &layout.query_labels), ("keys", keys, &layout.key_labels)] {
            if axis.tokens && labels.stride > 1 {
                notes.push(format!("{name}: 1 token in {} is labelled", labels.stride));
            }
        }
        if scale.not_finite > 0 {
            notes.push(format!("{} not finite, in grey", count(scale.not_finite, "weight")));
        }
        notes.extend(scale.notes.iter().cloned());
        let notes = notes.iter().flat_map(|note| wrap(note, columns_in(inner, SMALL_EM))).collect();
        Ok(Self { map, heads, scale, content, layout, title, notes })
    }

    fn size(&self) -> (i32, i32) {
        (self.layout.width, self.layout.height(self.notes.len()))
    }

    /// Hands on one shape at a time: a list of them would take far more memory than the picture.
    fn draw(&self, put: &mut dyn FnMut(Shape<'_>)) -> Result<()> {
        let (w, h) = self.size();
        put(Shape::Rect { x: 0, y: 0, w, h, color: WHITE });
        for (text, y) in self.title.iter().zip((MARGIN + TITLE_EM / 2..).step_by(TITLE_LINE as usize)) {
            put(Shape::Text { text, x: w / 2, y, style: TITLE });
        }
        for panel in 0..self.content.panels {
            self.draw_panel(put, panel)?;
        }
        let (x, y, w, h) = self.layout.grid();
        put(Shape::Text { text: "keys", x: x + w / 2, y: self.layout.key_name(), style: AXIS_NAME });
        let style = Style { vertical: true, ..AXIS_NAME };
        put(Shape::Text { text: "queries", x: self.layout.query_name(), y: y + (h + CAPTION_LINE) / 2, style });
        self.draw_bar(put);
        let first = self.layout.notes_top() + SMALL_LINE / 2;
        for (text, y) in self.notes.iter().zip((first..).step_by(SMALL_LINE as usize)) {
            put(Shape::Text { text, x: MARGIN, y, style: NOTE });
        }
        Ok(())
    }

    fn draw_panel(&self, put: &mut dyn FnMut(Shape<'_>), panel: usize) -> Result<()> {
        let (left, top) = self.layout.panel_origin(panel);
        let (w, h) = self.layout.panel;
        let text = &caption(self.map, self.heads, panel)?;
        put(Shape::Text { text, x: left + w / 2, y: top - CAPTION_LINE / 2, style: CAPTION });
        put(Shape::Rect { x: left - 1, y: top - 1, w: w + 2, h: h + 2, color: FRAME });

        let (w, h) = self.layout.cell;
        let numbered = w >= NUMBERED_CELL.0 && h >= NUMBERED_CELL.1;
        let weights = self.map.panel(self.heads, panel)?;
        for (y, row) in (top..).step_by(h as usize).zip(weights.chunks(self.content.keys.labels.len())) {
            for (x, &weight) in (left..).step_by(w as usize).zip(row) {
                let color = self.scale.position(weight).map_or(NOT_FINITE, gradient);
                put(Shape::Rect { x, y, w, h, color });
                let text = &short(weight);
                if numbered && text_width(text.len(), NUMBER_EM) + 4 <= w {
                    let style = Style { em: NUMBER_EM, color: contrasting(color), ..TITLE };
                    put(Shape::Text { text, x: x + w / 2, y: y + h / 2, style });
                }
            }
        }

        if panel.is_multiple_of(self.layout.columns) {
            let labels = &self.layout.query_labels;
            let style = Style { em: labels.em, anchor: Anchor::End, ..TITLE };
            for (i, text) in self.content.queries.labels.iter().enumerate().step_by(labels.stride) {
                put(Shape::Text { text, x: left - LABEL_GAP, y: top + i as i32 * h + h / 2, style });
            }
        }
        // The last panel of each column, which in a grid with empty places is not always in the last row.
        if panel + self.layout.columns >= self.content.panels {
            let labels = &self.layout.key_labels;
            let (anchor, drop) = if labels.vertical { (Anchor::End, 0) } else { (Anchor::Middle, labels.em / 2) };
            let style = Style { em: labels.em, anchor, vertical: labels.vertical, ..TITLE };
            let y = top + self.layout.panel.1 + LABEL_GAP + drop;
            for (j, text) in self.content.keys.labels.iter().enumerate().step_by(labels.stride) {
                put(Shape::Text { text, x: left + j as i32 * w + w / 2, y, style });
            }
        }
        Ok(())
    }

    fn draw_bar(&self, put: &mut dyn FnMut(Shape<'_>)) {
        let (x, y, height) = self.layout.bar();
        put(Shape::Text { text: BAR_NAME, x, y: y - CAPTION_LINE / 2, style: NOTE });
        put(Shape::Rect { x: x - 1, y: y - 1, w: BAR_WIDTH + 2, h: height + 2, color: FRAME });
        for step in 0..BAR_STEPS {
            let (top, bottom) = (y + height * step / BAR_STEPS, y + height * (step + 1) / BAR_STEPS);
            let color = gradient(1.0 - f64::from(step) / f64::from(BAR_STEPS - 1));
            put(Shape::Rect { x, y: top, w: BAR_WIDTH, h: bottom - top, color });
        }
        for (position, text) in &ticks(&self.scale, 1.5 * f64::from(SMALL_EM) / f64::from(height)) {
            // The numbers at the ends stay within the bar's length, out of the way of its name.
            let up = ((position * f64::from(height)).round() as i32).clamp(SMALL_EM / 2, height - SMALL_EM / 2);
            put(Shape::Text { text, x: x + BAR_WIDTH + LABEL_GAP, y: y + height - up, style: TICK });
        }
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
    let mut ticks = vec![(0.0, tick(scale.low)), (1.0, tick(scale.high))];
    let length = scale.high - scale.low;
    let magnitude = 10f64.powf((length / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|round| round * magnitude).into_iter().find(|step| length / step <= 5.0);
    if let Some(step) = step.filter(|step| step.is_normal()) {
        let first = (scale.low / step).ceil();
        // At most 6 lie between the ends, however the quotient rounds.
        let values = (0..7).map(|i| (first + f64::from(i)) * step);
        let inner = values.map(|value| ((value - scale.low) / length, tick(value)));
        ticks.extend(inner.filter(|(position, _)| *position > clear && *position < 1.0 - clear));
    }
    ticks
}

/// A shape as an element of an SVG document.
fn element(shape: &Shape<'_>) -> String {
    let hex = |[r, g, b]: Rgb| format!("#{r:02X}{g:02X}{b:02X}");
    match *shape {
        Shape::Rect { x, y, w, h, color } => {
            format!("<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" fill=\"{}\"/>\n", hex(color))
        }
        Shape::Text { text, x, y, style: Style { em, anchor, color, vertical } } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            let turn = if vertical { format!(" transform=\"rotate(270 {x} {y})\"") } else { String::new() };
            let baseline = y + (HALF_CAPITAL * em as f32).round() as i32;
            let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            format!(
                "<text x=\"{x}\" y=\"{baseline}\" font-size=\"{em}\" text-anchor=\"{anchor}\" fill=\"{}\"{turn}>{text}</text>\n",
                hex(color)
            )
        }
    }
}

/// Hack has no open box, which labels show a space by; the undertie comes near.
fn glyph_id(font: &FontRef<'_>, c: char) -> GlyphId {
    font.glyph_id(if c == '␣' { '‿' } else { c })
}

/// A picture of pixels, three bytes each.
struct Bitmap {
    w: i32,
    h: i32,
    pixels: Vec<u8>,
}

impl Bitmap {
    fn draw(&mut self, shape: &Shape<'_>, font: &FontRef<'_>) {
        match *shape {
            Shape::Rect { x, y, w, h, color } => {
                for y in y..y + h {
                    self.row(x, y, w).chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&color));
                }
            }
            Shape::Text { text, x, y, style } => self.draw_text(text, (x, y), style, font),
        }
    }

    /// The bytes of `w` pixels from (x, y), without those outside of the picture.
    fn row(&mut self, x: i32, y: i32, w: i32) -> &mut [u8] {
        if !(0..self.h).contains(&y) {
            return &mut [];
        }
        let [start, end] = [x, x + w].map(|x| 3 * (y as usize * self.w as usize + x.clamp(0, self.w) as usize));
        &mut self.pixels[start..end]
    }

    fn draw_text(&mut self, text: &str, at: (i32, i32), style: Style, font: &FontRef<'_>) {
        let em = style.em as f32;
        // A scale is the height of the font's line; an em is what the SVG calls the font size.
        let units = font.units_per_em().unwrap_or(2048.0);
        let scale = PxScale::from(em * font.height_unscaled() / units);
        let glyphs: Vec<_> = text.chars().map(|c| glyph_id(font, c)).collect();
        let font = font.as_scaled(scale);
        let advance: f32 = glyphs.iter().map(|&id| font.h_advance(id)).sum();
        let mut pen = match style.anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => -(advance / 2.0).round(),
            Anchor::End => -advance.round(),
        };
        let baseline = (HALF_CAPITAL * em).round();
        for id in glyphs {
            let outline = font.outline_glyph(id.with_scale_and_position(scale, point(pen, baseline)));
            pen += font.h_advance(id);
            let Some(outline) = outline else { continue };
            let corner = outline.px_bounds().min;
            outline.draw(|x, y, coverage| {
                let (x, y) = (x as i32 + corner.x as i32, y as i32 + corner.y as i32);
                // A quarter turn anticlockwise takes the pixel from x to x + 1 to the one from -x - 1 to -x.
                let (x, y) = if style.vertical { (y, -x - 1) } else { (x, y) };
                let alpha = (256.0 * coverage.clamp(0.0, 1.0)).round() as i32;
                for (byte, ink) in self.row(at.0 + x, at.1 + y, 1).iter_mut().zip(style.color) {
                    let old = i32::from(*byte);
                    *byte = (old + (i32::from(ink) - old) * alpha / 256) as u8;
                }
            });
        }
    }
}
