//! Rectangles and text, as SVG elements or pixels.

use std::fmt::Display;

use ab_glyph::{Font, FontRef, GlyphId, PxScale, ScaleFont, point};
use candle_core::{Error, Result};
use plotters::backend::{BitMapBackend, DrawingBackend, SVGBackend};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontTransform, IntoFont, RGBColor};

use super::super::scale::Rgb;

/// Monospaced, so that a label's width is known whichever of these the viewer has.
const FAMILIES: &str = "Hack, 'DejaVu Sans Mono', Menlo, Consolas, monospace";
/// Half the height of a capital or digit of Hack, in em: text is centred on it.
const HALF_CAPITAL: f64 = 0.36;
/// Where plotters' SVG puts the baseline below the top of a text, in em.
const SVG_ASCENT: f64 = 0.76;
/// Plotters divides the size of a text by this before it writes it as an SVG font size.
const PLOTTERS_EM: f64 = 1.24;

/// Which end of a text its point marks.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A line of text whose point lies halfway up its capitals.
pub(super) struct Text<'a> {
    pub(super) text: &'a str,
    pub(super) at: (i32, i32),
    pub(super) em: i32,
    pub(super) anchor: Anchor,
    pub(super) color: Rgb,
    /// Written upwards.
    pub(super) vertical: bool,
}

/// A left, a top, a width and a height.
pub(super) type Rect = (i32, i32, i32, i32);

/// What a figure is drawn on.
pub(super) trait Canvas {
    fn rect(&mut self, rect: Rect, color: Rgb) -> Result<()>;
    fn text(&mut self, text: &Text<'_>) -> Result<()>;
}

fn failed(error: impl Display) -> Error {
    Error::Msg(format!("[heat_map] drawing failed: {error}"))
}

fn ink([r, g, b]: Rgb) -> RGBColor {
    RGBColor(r, g, b)
}

fn fill<B: DrawingBackend>(backend: &mut B, (x, y, w, h): Rect, color: Rgb) -> Result<()> {
    backend.draw_rect((x, y), (x + w, y + h), &ink(color).to_backend_color(), true).map_err(failed)
}

/// An SVG document.
pub(super) struct Svg<'a>(SVGBackend<'a>);

impl<'a> Svg<'a> {
    pub(super) fn new(document: &'a mut String, (w, h): (u32, u32)) -> Self {
        Self(SVGBackend::with_string(document, (w, h)))
    }

    /// Writes the end of the document.
    pub(super) fn finish(mut self) -> Result<()> {
        self.0.present().map_err(failed)
    }
}

impl Canvas for Svg<'_> {
    fn rect(&mut self, rect: Rect, color: Rgb) -> Result<()> {
        fill(&mut self.0, rect, color)
    }

    fn text(&mut self, text: &Text<'_>) -> Result<()> {
        let em = f64::from(text.em);
        let rise = ((SVG_ASCENT - HALF_CAPITAL) * em).round() as i32;
        let (x, y) = text.at;
        let (transform, at) = match text.vertical {
            true => (FontTransform::Rotate270, (x - rise, y)),
            false => (FontTransform::None, (x, y - rise)),
        };
        let horizontal = match text.anchor {
            Anchor::Start => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::End => HPos::Right,
        };
        let style = (FAMILIES, em * PLOTTERS_EM).into_font().transform(transform);
        let style = style.color(&ink(text.color)).pos(Pos::new(horizontal, VPos::Top));
        self.0.draw_text(text.text, &style, at).map_err(failed)
    }
}

/// A picture of pixels. Text is set from the outlines of the embedded font: plotters' own setting of them drops the
/// space before each glyph, which shows as `0. 27`, and a `ttf` feature enabled elsewhere would look for system fonts.
pub(super) struct Bitmap<'a> {
    backend: BitMapBackend<'a>,
    font: FontRef<'static>,
}

impl<'a> Bitmap<'a> {
    /// On a buffer of 3 x w x h bytes.
    pub(super) fn new(pixels: &'a mut [u8], size: (u32, u32)) -> Result<Self> {
        Ok(Self { backend: BitMapBackend::with_buffer_and_format(pixels, size).map_err(failed)?, font: font()? })
    }
}

/// The embedded font.
pub(super) fn font() -> Result<FontRef<'static>> {
    FontRef::try_from_slice(epaint_default_fonts::HACK_REGULAR).map_err(failed)
}

/// Whether the embedded font can write all of `text`.
pub(super) fn is_covered(font: &FontRef<'_>, text: &str) -> bool {
    text.chars().all(|c| glyph_id(font, c).0 != 0)
}

/// Hack has no open box, which labels show a space by; the undertie comes near.
fn glyph_id(font: &FontRef<'_>, c: char) -> GlyphId {
    font.glyph_id(if c == '␣' { '‿' } else { c })
}

impl Canvas for Bitmap<'_> {
    fn rect(&mut self, rect: Rect, color: Rgb) -> Result<()> {
        fill(&mut self.backend, rect, color)
    }

    fn text(&mut self, text: &Text<'_>) -> Result<()> {
        let em = text.em as f32;
        // A scale is the height of the font's line; an em is what the SVG calls the font size.
        let units = self.font.units_per_em().unwrap_or(2048.0);
        let scale = PxScale::from(em * self.font.height_unscaled() / units);
        let font = self.font.as_scaled(scale);
        let advance: f32 = text.text.chars().map(|c| font.h_advance(glyph_id(&self.font, c))).sum();
        let mut pen = match text.anchor {
            Anchor::Start => 0.0,
            Anchor::Middle => -(advance / 2.0).round(),
            Anchor::End => -advance.round(),
        };
        let baseline = (HALF_CAPITAL as f32 * em).round();
        let color = ink(text.color);
        for c in text.text.chars() {
            let id = glyph_id(&self.font, c);
            let glyph = id.with_scale_and_position(scale, point(pen, baseline));
            pen += font.h_advance(id);
            let Some(outline) = font.outline_glyph(glyph) else {
                continue;
            };
            let corner = outline.px_bounds().min;
            let mut pixels = Vec::new();
            outline.draw(|x, y, coverage| pixels.push((x as i32, y as i32, coverage)));
            for (x, y, coverage) in pixels {
                let (x, y) = (x + corner.x as i32, y + corner.y as i32);
                // A quarter turn anticlockwise takes the pixel from x to x + 1 to the one from -x - 1 to -x.
                let (x, y) = if text.vertical { (y, -x - 1) } else { (x, y) };
                let color = color.mix(f64::from(coverage.clamp(0.0, 1.0))).to_backend_color();
                self.backend.draw_pixel((text.at.0 + x, text.at.1 + y), color).map_err(failed)?;
            }
        }
        Ok(())
    }
}
