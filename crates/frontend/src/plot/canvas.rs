//! The canvases that pictures are drawn on: rectangles and lines of text, in pixels, as SVG or as a bitmap.

use ab_glyph::{Font, FontRef, GlyphId, PxScale, ScaleFont};
use candle_core::{Error, Result};

use super::style::Rgb;

/// Monospaced fonts, so that the width of a label is known whichever of them the viewer has.
const FAMILIES: &str = "Hack, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
/// Half the height of a capital or digit of Hack, in em: text is centred on it.
const HALF_CAPITAL: f32 = 0.36;

/// A point in a picture, counted from the top left corner.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub(super) x: i32,
    pub(super) y: i32,
}

/// A size in pixels.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) width: i32,
    pub(super) height: i32,
}

/// A rectangle in a picture.
#[derive(Clone, Copy)]
pub(super) struct Rectangle {
    pub(super) left: i32,
    pub(super) top: i32,
    pub(super) width: i32,
    pub(super) height: i32,
}

/// The operations that pictures are drawn with.
pub(super) trait Canvas {
    /// Fills a rectangle.
    fn rect(&mut self, rectangle: Rectangle, color: Rgb);
    /// Draws a line of text. The point is halfway up its capitals, at its anchor.
    fn text(&mut self, text: &str, point: Point, style: Style);
}

/// The style of a line of text.
#[derive(Clone, Copy)]
pub(super) struct Style {
    pub(super) em: i32,
    pub(super) anchor: Anchor,
    pub(super) color: Rgb,
    /// Whether the text is written upwards.
    pub(super) vertical: bool,
}

/// The part of a text that is at its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

impl Anchor {
    /// Returns the name in SVG.
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Middle => "middle",
            Self::End => "end",
        }
    }

    /// Returns the share of a text that is before its point.
    fn share(self) -> f32 {
        match self {
            Self::Start => 0.0,
            Self::Middle => 0.5,
            Self::End => 1.0,
        }
    }
}

/// Draws an SVG document by `draw`.
pub(super) fn to_svg(size: Size, draw: impl FnOnce(&mut dyn Canvas) -> Result<()>) -> Result<String> {
    let Size { width, height } = size;
    // Without crisp edges, cells are blurred where the picture is scaled, and the background shows between them.
    let mut svg = Svg(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" \
         shape-rendering=\"crispEdges\" font-family=\"{FAMILIES}\">\n"
    ));
    draw(&mut svg)?;
    Ok(svg.0 + "</svg>\n")
}

/// Draws a PNG file by `draw`.
pub(super) fn to_png(font: Hack, size: Size, draw: impl FnOnce(&mut dyn Canvas) -> Result<()>) -> Result<Vec<u8>> {
    let mut bitmap = Bitmap { font, size, pixels: vec![0; 3 * size.width as usize * size.height as usize] };
    draw(&mut bitmap)?;
    let failed = |error| Error::Msg(format!("[plot] the PNG cannot be encoded: {error}"));
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, size.width.unsigned_abs(), size.height.unsigned_abs());
    encoder.set_color(png::ColorType::Rgb);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&bitmap.pixels).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(bytes)
}

/// The elements of an SVG document.
struct Svg(String);

fn hex([r, g, b]: Rgb) -> String {
    format!("#{r:02X}{g:02X}{b:02X}")
}

impl Canvas for Svg {
    fn rect(&mut self, rectangle: Rectangle, color: Rgb) {
        let Rectangle { left, top, width, height } = rectangle;
        let fill = hex(color);
        self.0 += &format!("<rect x=\"{left}\" y=\"{top}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>\n");
    }

    fn text(&mut self, text: &str, point: Point, style: Style) {
        let Point { x, y } = point;
        let Style { em, anchor, color, vertical } = style;
        let anchor_name = anchor.name();
        let fill = hex(color);
        let baseline = y + (HALF_CAPITAL * em as f32).round() as i32;
        let turn = if vertical { format!(" transform=\"rotate(270 {x} {y})\"") } else { String::new() };
        let escaped = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        self.0 += &format!(
            "<text x=\"{x}\" y=\"{baseline}\" font-size=\"{em}\" text-anchor=\"{anchor_name}\" \
             fill=\"{fill}\"{turn}>{escaped}</text>\n"
        );
    }
}

/// The embedded font (Hack: Latin, Greek, Cyrillic, symbols).
pub(super) struct Hack(FontRef<'static>);

impl Hack {
    pub(super) fn new() -> Result<Self> {
        let failed = |error| Error::Msg(format!("[plot] the font cannot be read: {error}"));
        FontRef::try_from_slice(epaint_default_fonts::HACK_REGULAR).map_err(failed).map(Self)
    }

    /// Returns whether the font has all characters of a text.
    pub(super) fn covers(&self, text: &str) -> bool {
        text.chars().all(|c| self.glyph_id(c).0 != 0)
    }

    /// Returns the glyph of a character. Hack has no open box, which marks spaces in labels; the undertie looks
    /// similar.
    fn glyph_id(&self, c: char) -> GlyphId {
        self.0.glyph_id(if c == '␣' { '‿' } else { c })
    }
}

/// A bitmap, three bytes for each pixel.
struct Bitmap {
    font: Hack,
    size: Size,
    pixels: Vec<u8>,
}

impl Bitmap {
    /// Returns the bytes of `w` pixels from (x, y), without those outside of the picture.
    fn row(&mut self, x: i32, y: i32, w: i32) -> &mut [u8] {
        let Size { width, height } = self.size;
        if !(0..height).contains(&y) {
            return &mut [];
        }
        let byte = |column: i32| 3 * (y as usize * width as usize + column.clamp(0, width) as usize);
        &mut self.pixels[byte(x)..byte(x + w)]
    }
}

impl Canvas for Bitmap {
    fn rect(&mut self, rectangle: Rectangle, color: Rgb) {
        let Rectangle { left, top, width, height } = rectangle;
        for row in top..top + height {
            self.row(left, row, width).chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&color));
        }
    }

    fn text(&mut self, text: &str, point: Point, style: Style) {
        let Point { x, y } = point;
        let Style { em, anchor, color, vertical } = style;
        let em = em as f32;
        let glyphs: Vec<_> = text.chars().map(|c| self.font.glyph_id(c)).collect();
        // A scale is the height of the font's line; an em is what the SVG calls the font size.
        let font = self.font.0.clone();
        let scale = PxScale::from(em * font.height_unscaled() / font.units_per_em().unwrap_or(2048.0));
        let font = font.as_scaled(scale);
        let advance: f32 = glyphs.iter().map(|&id| font.h_advance(id)).sum();
        let mut pen = -(advance * anchor.share()).round();
        let baseline = (HALF_CAPITAL * em).round();
        for id in glyphs {
            let outline = font.outline_glyph(id.with_scale_and_position(scale, ab_glyph::point(pen, baseline)));
            pen += font.h_advance(id);
            let Some(outline) = outline else { continue };
            let corner = outline.px_bounds().min;
            outline.draw(|dx, dy, coverage| {
                let right = dx as i32 + corner.x as i32;
                let down = dy as i32 + corner.y as i32;
                // A quarter turn anticlockwise moves the pixel from x to x + 1 to the one from -x - 1 to -x.
                let pixel_x = x + if vertical { down } else { right };
                let pixel_y = y + if vertical { -right - 1 } else { down };
                let alpha = (256.0 * coverage.clamp(0.0, 1.0)).round() as i32;
                for (byte, ink) in self.row(pixel_x, pixel_y, 1).iter_mut().zip(color) {
                    *byte = (i32::from(*byte) + (i32::from(ink) - i32::from(*byte)) * alpha / 256) as u8;
                }
            });
        }
    }
}
