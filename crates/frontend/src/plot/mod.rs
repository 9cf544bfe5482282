//! Pages of the attention of a whole model, and heat maps of weights: always in the terminal, and with the feature
//! `plot` as SVG and PNG files. The feature also has a line chart, for example for the loss of a training. Without the
//! feature, drawing a heat map into a file is an error that names it.
//!
//! ```
//! use candle_attention::plot::{HeatMap, Heads, TerminalOptions};
//! use candle_core::{Device, Tensor};
//!
//! let weights = Tensor::new(&[[[1f32, 0.0], [0.25, 0.75]]], &Device::Cpu)?; // (H, T_q, T_kv)
//! let map = HeatMap::new(&weights)?.with_tokens(&["hello", "world"])?;
//! println!("{}", map.to_terminal(Heads::Mean, &TerminalOptions::detect())?);
//! # Ok::<(), candle_core::Error>(())
//! ```

#[cfg(feature = "plot")]
mod axis;
#[cfg(feature = "plot")]
mod canvas;
#[cfg(feature = "plot")]
mod chart;
mod page;
#[cfg(feature = "plot")]
mod picture;
mod style;
mod terminal;

use std::ops::Range;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use unicode_width::UnicodeWidthStr;

#[cfg(feature = "plot")]
pub use chart::LineChart;
pub use page::Page;
pub use terminal::{Color, TerminalOptions};

/// The attention weights of one sequence, with labels on both axes and a title.
///
/// Rows are queries, columns are keys. The colour scale is linear, runs from 0 to the largest weight drawn (see
/// [`HeatMap::with_scale_max`]) and is the same for all heads of a drawing. Weights outside \[0, 1\] are drawn as they
/// are: the scale is stretched to them and the legend says so, since dropout in training makes weights above 1. Weights
/// that are not finite are drawn in grey and counted in the legend. A weight that is exactly 0 (a masked key) is
/// written `0`, a weight that rounds to 0 is written `.00`.
///
/// Tokens and the title are treated as untrusted text: control, format and invisible characters are written as in a
/// Rust string (`\n`, `\u{1b}`), a backslash as `\\`; spaces at either end of a token are written `␣`, an empty token
/// `""`.
#[derive(Debug, Clone)]
pub struct HeatMap {
    /// The weights (H, T_q, T_kv) on the CPU, in their original dtype.
    weights: Tensor,
    queries: Axis,
    keys: Axis,
    title: Option<String>,
    scale_max: Option<f64>,
}

/// The heads to draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Heads {
    /// One panel: the mean over all heads.
    Mean,
    /// One panel: the head of this index, from 0.
    One(usize),
    /// A panel for each head.
    All,
}

impl HeatMap {
    /// Makes a heat map of `weights`: (T_q, T_kv), (H, T_q, T_kv) or (1, H, T_q, T_kv), of any float dtype, on any
    /// device, with any strides. The axes are labelled by index until tokens are given.
    ///
    /// # Errors
    ///
    /// If the rank is another, the batch is larger than one (see [`HeatMap::from_batch`]), a dimension is 0, or the
    /// dtype is not a float.
    pub fn new(weights: &Tensor) -> Result<Self> {
        let dims = weights.dims();
        let weights = match *dims {
            _ if weights.elem_count() == 0 => bail!("[heat_map] nothing to draw: the weights have shape {dims:?}"),
            [_, _] => weights.unsqueeze(0)?,
            [_, _, _] => weights.clone(),
            [1, _, _, _] => weights.squeeze(0)?,
            [batch, _, _, _] => bail!(
                "[heat_map] the weights have a batch of {batch}: choose one sequence, as \
                 HeatMap::from_batch(&weights, 0) does"
            ),
            _ => bail!(
                "[heat_map] the weights have shape {dims:?}; expected (T_q, T_kv), (H, T_q, T_kv) or (1, H, T_q, T_kv)"
            ),
        };
        if !weights.dtype().is_float() {
            bail!("[heat_map] the weights are {}; expected a float dtype", weights.dtype().as_str());
        }
        let (_, queries, keys) = weights.dims3()?;
        Ok(Self {
            weights: weights.detach().to_device(&Device::Cpu)?,
            queries: Axis::indices(Noun { one: "query", many: "queries" }, queries),
            keys: Axis::indices(Noun { one: "key", many: "keys" }, keys),
            title: None,
            scale_max: None,
        })
    }

    /// Makes a heat map of sequence `b` of a batch: `weights` is (B, H, T_q, T_kv).
    ///
    /// # Errors
    ///
    /// If the rank is not 4, `b` is not below B, or as in [`HeatMap::new`].
    pub fn from_batch(weights: &Tensor, b: usize) -> Result<Self> {
        let [batch, _, _, _] = *weights.dims() else {
            bail!("[heat_map] the weights have shape {:?}; expected (B, H, T_q, T_kv)", weights.dims());
        };
        if b >= batch {
            bail!("[heat_map] sequence {b} is not below the batch size {batch}");
        }
        Self::new(&weights.narrow(0, b, 1)?)
    }

    /// Labels both axes with the same tokens, for self-attention.
    ///
    /// # Errors
    ///
    /// If T_q and T_kv differ, or are not the number of tokens.
    pub fn with_tokens<S: AsRef<str>>(self, tokens: &[S]) -> Result<Self> {
        let queries = self.queries.labels.len();
        let keys = self.keys.labels.len();
        if queries != keys {
            bail!(
                "[heat_map] one list of {} tokens cannot label both {queries} queries and {keys} keys: \
                 use with_query_tokens and with_key_tokens",
                tokens.len()
            );
        }
        self.with_query_tokens(tokens)?.with_key_tokens(tokens)
    }

    /// Labels the rows: T_q tokens.
    ///
    /// # Errors
    ///
    /// If the number of tokens is not T_q.
    pub fn with_query_tokens<S: AsRef<str>>(self, tokens: &[S]) -> Result<Self> {
        Ok(Self { queries: self.queries.with_tokens(tokens)?, ..self })
    }

    /// Labels the columns: T_kv tokens.
    ///
    /// # Errors
    ///
    /// If the number of tokens is not T_kv.
    pub fn with_key_tokens<S: AsRef<str>>(self, tokens: &[S]) -> Result<Self> {
        Ok(Self { keys: self.keys.with_tokens(tokens)?, ..self })
    }

    /// Sets a title above the map.
    #[must_use]
    pub fn with_title(self, title: impl AsRef<str>) -> Self {
        Self { title: Some(style::safe(title.as_ref())), ..self }
    }

    /// Ends the colour scale at `max` instead of the largest weight drawn, so that maps can be compared with each
    /// other. The legend counts the weights above it, which have the colour of the scale's end.
    ///
    /// # Errors
    ///
    /// If `max` is not a finite number above 0.
    pub fn with_scale_max(self, max: f64) -> Result<Self> {
        if !(max.is_finite() && max > 0.0) {
            bail!("[heat_map] the scale cannot end at {max}; expected a finite number above 0");
        }
        Ok(Self { scale_max: Some(max), ..self })
    }

    /// Writes the map to `path` as SVG or PNG, by the extension. See [`HeatMap::to_svg`] and [`HeatMap::to_png`].
    ///
    /// # Errors
    ///
    /// If the extension is neither, the file cannot be written, or the picture cannot be made.
    pub fn save(&self, path: impl AsRef<Path>, heads: Heads) -> Result<()> {
        save("heat_map", path.as_ref(), || self.to_svg(heads), || self.to_png(heads))
    }

    /// Draws the map as an SVG document: the title, a grid of panels (one for each head drawn) of T_q rows and T_kv
    /// columns, labels at the left and below, and one colour bar for all panels. Text stays text, in a monospaced font
    /// of the viewer; the layout is that of [`HeatMap::to_png`].
    ///
    /// # Errors
    ///
    /// As in [`HeatMap::to_png`], and if the panels have more than 300,000 weights, which viewers are slow to show.
    pub fn to_svg(&self, heads: Heads) -> Result<String> {
        picture::to_svg(self, heads)
    }

    /// Draws the map as a PNG file: the same picture as [`HeatMap::to_svg`], with no side much over 4000 pixels.
    ///
    /// Cells shrink as the numbers of heads and tokens grow. Cells of at least 30 x 20 pixels show their weight as a
    /// number. If cells are too small for a label each, every n-th is labelled, and a note in the picture says so.
    /// Labels over 20 columns end in `…`. Characters that the embedded font (Hack: Latin, Greek, Cyrillic, symbols)
    /// lacks are drawn as empty boxes, with a note; the SVG shows them.
    ///
    /// # Errors
    ///
    /// In a build without the feature `plot`, if a head is out of range, or if the panels do not fit at one pixel a
    /// weight.
    pub fn to_png(&self, heads: Heads) -> Result<Vec<u8>> {
        picture::to_png(self, heads)
    }

    fn panels(&self, heads: Heads) -> Result<Vec<Panel>> {
        let count = self.weights.dim(0)?;
        let one = |h| Panel { name: format!("head {h}"), of: format!(" of {count}"), heads: h..h + 1 };
        Ok(match heads {
            Heads::All => (0..count).map(one).collect(),
            Heads::One(h) if h >= count => bail!("[heat_map] head {h} is not below the number of heads {count}"),
            Heads::One(h) => vec![one(h)],
            Heads::Mean => {
                let of = format!(" of {}", style::count(count, "head"));
                vec![Panel { name: String::from("mean"), of, heads: 0..count }]
            }
        })
    }

    /// Returns the weights of a panel, (T_q, T_kv) in row-major order. Only one panel at a time is converted to f64, so
    /// that a long sequence does not need the memory of all its heads.
    fn panel(&self, Panel { heads, .. }: &Panel) -> Result<Vec<f64>> {
        let mut sum = self.head(heads.start)?;
        for h in heads.clone().skip(1) {
            sum.iter_mut().zip(self.head(h)?).for_each(|(sum, weight)| *sum += weight);
        }
        sum.iter_mut().for_each(|sum| *sum /= heads.len() as f64);
        Ok(sum)
    }

    fn head(&self, h: usize) -> Result<Vec<f64>> {
        let weights = self.weights.get(h)?.flatten_all()?;
        match weights.dtype() {
            DType::F64 => weights.to_vec1(),
            // Candle 0.11.1 does not return from the conversion of F8E4M3 straight to f64.
            _ => weights.to_dtype(DType::F32)?.to_dtype(DType::F64)?.to_vec1(),
        }
    }
}

/// One matrix of a drawing: a head, or the mean of several.
struct Panel {
    /// `mean` or `head 3`.
    name: String,
    /// ` of 16 heads`, which is obvious in a grid of all heads.
    of: String,
    heads: Range<usize>,
}

/// A noun in both numbers.
#[derive(Debug, Clone, Copy)]
struct Noun {
    one: &'static str,
    many: &'static str,
}

/// The labels of the queries or of the keys.
#[derive(Debug, Clone)]
struct Axis {
    noun: Noun,
    labels: Vec<String>,
    /// Display columns of the longest label.
    columns: usize,
    /// Whether the labels are tokens. Indices can be thinned to round numbers and need no note.
    #[cfg_attr(not(feature = "plot"), expect(dead_code, reason = "labels of a terminal are not thinned"))]
    has_tokens: bool,
}

impl Axis {
    fn new(noun: Noun, labels: Vec<String>, has_tokens: bool) -> Self {
        Self { noun, columns: labels.iter().map(|label| label.width()).max().unwrap_or(0), labels, has_tokens }
    }

    fn indices(noun: Noun, len: usize) -> Self {
        Self::new(noun, (0..len).map(|i| i.to_string()).collect(), false)
    }

    /// Returns the axis with a token for each label.
    fn with_tokens<S: AsRef<str>>(&self, tokens: &[S]) -> Result<Self> {
        if tokens.len() != self.labels.len() {
            let Noun { one, many } = self.noun;
            bail!("[heat_map] {} {one} tokens for {} {many}", tokens.len(), self.labels.len());
        }
        Ok(Self::new(self.noun, style::tokens(tokens), true))
    }
}

/// Writes a picture in the format that the file's extension names.
fn save(
    op: &str,
    path: &Path,
    to_svg: impl FnOnce() -> Result<String>,
    to_png: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<()> {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    let bytes = match extension.to_ascii_lowercase().as_str() {
        "svg" => to_svg()?.into_bytes(),
        "png" => to_png()?,
        _ => bail!("[{op}] the extension of {} is {extension:?}; expected svg or png", path.display()),
    };
    std::fs::write(path, bytes).map_err(|error| Error::Msg(format!("[{op}] cannot write {}: {error}", path.display())))
}

#[cfg(not(feature = "plot"))]
mod picture {
    //! The replacement for pictures of heat maps in a build without the feature `plot`: an error that names it.

    use candle_core::{Result, bail};

    use crate::plot::{Heads, HeatMap};

    pub(super) use without_feature as to_png;
    pub(super) use without_feature as to_svg;

    pub(super) fn without_feature<T>(_: &HeatMap, _: Heads) -> Result<T> {
        bail!(
            "[heat_map] pictures need the feature `plot` of candle-attention, as `cargo run --features plot` or `features \
             = [\"plot\"]` in Cargo.toml gives it; `to_terminal` needs none"
        )
    }
}
