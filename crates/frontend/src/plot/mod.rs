//! Heat maps of attention weights: in the terminal always, as SVG and PNG under the feature `plot`, which has a line
//! chart for the numbers of a training as well. Without it, what draws a heat map into a file is an error that says so.
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
mod canvas;
#[cfg(feature = "plot")]
mod chart;
#[cfg(not(feature = "plot"))]
mod no_picture;
#[cfg(feature = "plot")]
mod picture;
mod style;
mod terminal;

use candle_core::{DType, Device, Result, Tensor, bail};

#[cfg(feature = "plot")]
pub use chart::LineChart;
pub use terminal::{Color, TerminalOptions};

/// The attention weights of one sequence with what is needed to read them: labels on both axes and a title.
///
/// Rows are queries, columns are keys. The colour scale is linear, runs from 0 to the largest weight drawn (see
/// [`HeatMap::with_scale_max`]) and is one for all heads of a drawing. Weights that leave \[0, 1\] are drawn as they
/// are: the scale is stretched over them and the legend says so, since dropout in training leaves weights above 1.
/// Weights that are not finite are drawn in grey and counted in the legend. A weight that is exactly 0 (a hidden key)
/// is written `0`, one that rounds to 0 is written `.00`.
///
/// Tokens and the title are taken as untrusted text: control, format and invisible characters are written as in a Rust
/// string (`\n`, `\u{1b}`), a backslash as `\\`; spaces at either end of a token are written `␣`, an empty token `""`.
#[derive(Debug, Clone)]
pub struct HeatMap {
    /// (H, T_q, T_kv), on the CPU, in the dtype it came in.
    weights: Tensor,
    query_labels: Option<Vec<String>>,
    key_labels: Option<Vec<String>>,
    title: Option<String>,
    scale_max: Option<f64>,
}

/// Which heads are drawn.
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
    /// A heat map of `weights`: (T_q, T_kv), (H, T_q, T_kv) or (1, H, T_q, T_kv), of any float dtype, on any device,
    /// with any strides. The axes are labelled by index until tokens are given.
    ///
    /// # Errors
    ///
    /// If the rank is another, the batch is larger than one (see [`HeatMap::from_batch`]), a dimension is 0, or the
    /// dtype is no float.
    pub fn new(weights: &Tensor) -> Result<Self> {
        let weights = match *weights.dims() {
            _ if weights.elem_count() == 0 => {
                bail!("[heat_map] nothing to draw: the weights have shape {:?}", weights.dims())
            }
            [_, _] => weights.unsqueeze(0)?,
            [_, _, _] => weights.clone(),
            [1, _, _, _] => weights.squeeze(0)?,
            [batch, _, _, _] => bail!(
                "[heat_map] the weights have a batch of {batch}: choose one sequence, as HeatMap::from_batch(&weights, 0) does"
            ),
            _ => bail!(
                "[heat_map] the weights have shape {:?}; expected (T_q, T_kv), (H, T_q, T_kv) or (1, H, T_q, T_kv)",
                weights.dims()
            ),
        };
        if !weights.dtype().is_float() {
            bail!("[heat_map] the weights are {}; expected a float dtype", weights.dtype().as_str());
        }
        Ok(Self {
            weights: weights.detach().to_device(&Device::Cpu)?,
            query_labels: None,
            key_labels: None,
            title: None,
            scale_max: None,
        })
    }

    /// A heat map of sequence `b` of a batch: `weights` is (B, H, T_q, T_kv).
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

    /// Labels both axes with the same tokens, as self-attention has them.
    ///
    /// # Errors
    ///
    /// If T_q and T_kv differ, or are not the number of tokens.
    pub fn with_tokens<S: AsRef<str>>(self, tokens: &[S]) -> Result<Self> {
        let (_, queries, keys) = self.weights.dims3()?;
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
    pub fn with_query_tokens<S: AsRef<str>>(mut self, tokens: &[S]) -> Result<Self> {
        self.query_labels = Some(labels(tokens, self.weights.dim(1)?, "query", "queries")?);
        Ok(self)
    }

    /// Labels the columns: T_kv tokens.
    ///
    /// # Errors
    ///
    /// If the number of tokens is not T_kv.
    pub fn with_key_tokens<S: AsRef<str>>(mut self, tokens: &[S]) -> Result<Self> {
        self.key_labels = Some(labels(tokens, self.weights.dim(2)?, "key", "keys")?);
        Ok(self)
    }

    /// A title above the map.
    #[must_use]
    pub fn with_title(mut self, title: impl AsRef<str>) -> Self {
        self.title = Some(style::safe(title.as_ref()));
        self
    }

    /// Ends the colour scale at `max` in place of the largest weight drawn, so that maps can be compared with each
    /// other. The legend counts the weights above it, which take the colour of the scale's end.
    ///
    /// # Errors
    ///
    /// If `max` is not a finite number above 0.
    pub fn with_scale_max(mut self, max: f64) -> Result<Self> {
        if !(max.is_finite() && max > 0.0) {
            bail!("[heat_map] the scale cannot end at {max}; expected a finite number above 0");
        }
        self.scale_max = Some(max);
        Ok(self)
    }

    /// The number of panels that `heads` makes.
    fn panel_count(&self, heads: Heads) -> Result<usize> {
        let count = self.weights.dim(0)?;
        match heads {
            Heads::All => Ok(count),
            Heads::One(h) if h >= count => {
                bail!("[heat_map] head {h} is not below the number of heads {count}")
            }
            Heads::Mean | Heads::One(_) => Ok(1),
        }
    }

    /// The weights of a panel, (T_q, T_kv) in row-major order. One panel at a time is held in f64, so that a long
    /// sequence does not cost the memory of all its heads.
    fn panel(&self, heads: Heads, panel: usize) -> Result<Vec<f64>> {
        let heads = match heads {
            Heads::One(h) => h..h + 1,
            Heads::All => panel..panel + 1,
            Heads::Mean => 0..self.weights.dim(0)?,
        };
        let count = heads.len() as f64;
        let mut sum = self.head(heads.start)?;
        for h in heads.skip(1) {
            sum.iter_mut().zip(self.head(h)?).for_each(|(sum, weight)| *sum += weight);
        }
        sum.iter_mut().for_each(|sum| *sum /= count);
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

    /// What a panel shows, as `mean of 16 heads` or `head 3 of 16`.
    fn caption(&self, heads: Heads, panel: usize) -> Result<String> {
        let count = self.weights.dim(0)?;
        Ok(match heads {
            Heads::Mean => format!("mean of {}", style::count(count, "head")),
            Heads::One(h) => format!("head {h} of {count}"),
            Heads::All => format!("head {panel} of {count}"),
        })
    }

    fn query_label(&self, i: usize) -> String {
        label_or_index(self.query_labels.as_deref(), i)
    }

    fn key_label(&self, i: usize) -> String {
        label_or_index(self.key_labels.as_deref(), i)
    }
}

fn label_or_index(labels: Option<&[String]>, i: usize) -> String {
    labels.and_then(|labels| labels.get(i)).cloned().unwrap_or_else(|| i.to_string())
}

fn labels<S: AsRef<str>>(tokens: &[S], len: usize, one: &str, many: &str) -> Result<Vec<String>> {
    if tokens.len() != len {
        bail!("[heat_map] {} {one} tokens for {len} {many}", tokens.len());
    }
    Ok(tokens.iter().map(|token| style::token(token.as_ref())).collect())
}
