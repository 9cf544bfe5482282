//! A cell of the table: one shape, dtype and mask.

use std::fmt;

use candle_attention::{AttentionMask, KvCodeFormat};
use candle_core::{DType, Result};
use serde_json::{Value, json};

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mask {
    None,
    Causal,
    /// Causal, and no further back than this many keys with the query's own.
    Window(usize),
    /// The number of valid keys of each sequence.
    Lens(Vec<usize>),
}

impl Mask {
    /// Returns the mask for `t_q` queries, the last of which is at the position of the last key.
    pub fn attention(&self) -> AttentionMask {
        match self {
            Self::None => AttentionMask::none(),
            Self::Causal => AttentionMask::causal(),
            Self::Window(window) => AttentionMask::causal().with_window(*window),
            Self::Lens(lens) => AttentionMask::none().with_valid_lens(lens.clone()),
        }
    }

    /// Returns the mask for queries of which the first is at the position of key `position`.
    pub fn at(&self, position: usize) -> AttentionMask {
        match self {
            Self::Causal => AttentionMask::causal_with_offset(position),
            Self::Window(window) => AttentionMask::causal_with_offset(position).with_window(*window),
            Self::None | Self::Lens(_) => self.attention(),
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Causal => f.write_str("causal"),
            Self::Window(window) => write!(f, "causal window {window}"),
            Self::Lens(_) => f.write_str("lens"),
        }
    }
}

/// The description of a cell, which every bench needs.
pub trait Describe {
    /// Returns the name of the cell on the command line and in tables.
    fn name(&self) -> String;
    fn dtype(&self) -> DType;
    /// Returns the fields that describe the cell in every line of JSON.
    fn to_json(&self) -> Value;
    fn work(&self) -> Result<Work>;
}

/// The work of a call.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Floating point operations.
    pub flops: f64,
    /// The bytes that a call has to read: keys and values, or a weight.
    pub bytes: f64,
    /// The number of (query, key) pairs in which the query attends to the key, over all heads; none in a product.
    pub pairs: Option<f64>,
}

/// q (B, H, T_q, D), k and v (B, H_kv, T_kv, D) under a mask.
#[derive(Debug, Clone)]
pub struct Cell {
    pub dtype: DType,
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub mask: Mask,
    /// E of a whole layer, whose projections count as work too.
    pub embed_dim: Option<usize>,
    /// The format of keys and values that are codes.
    pub codes: Option<KvCodeFormat>,
    /// The number of positions of a page, if keys and values are in pages.
    pub page_size: Option<usize>,
}

impl Cell {
    /// Returns a cell of one sequence of `t` tokens and 16 heads, which most other cells vary.
    pub fn square(t: usize, d: usize, mask: Mask, dtype: DType) -> Self {
        Self { dtype, b: 1, h: 16, h_kv: 16, t_q: t, t_kv: t, d, mask, embed_dim: None, codes: None, page_size: None }
    }

    /// Returns the number of (query, key) pairs in which the query attends to the key, over all sequences. Heads are
    /// not counted.
    pub fn visible_pairs(&self) -> Result<u64> {
        let ranges = self.mask.attention().resolve(self.b, self.t_q, self.t_kv)?;
        let of_query = |b: usize, i: usize| ranges.kv_range(b, i).len() as u64;
        Ok((0..self.b).map(|b| (0..self.t_q).map(|i| of_query(b, i)).sum::<u64>()).sum())
    }

    /// Returns the floating point operations: 4 · D for each pair and head (2 · D for q kᵀ, 2 · D for the values), and
    /// 2 · B · T · E for each row of the four projections of a layer.
    pub fn flops(&self) -> Result<f64> {
        let attention = 4.0 * self.d as f64 * self.visible_pairs()? as f64 * self.h as f64;
        let e = self.embed_dim.unwrap_or(0) as f64;
        Ok(attention + 8.0 * self.b as f64 * self.t_q as f64 * e * e)
    }

    /// Returns the bytes of k and v.
    pub fn kv_bytes(&self) -> usize {
        let row = match self.codes {
            Some(format) => format.bytes(self.d) + format.scales(self.d) * size_of::<f32>(),
            None => self.d * self.dtype.size_in_bytes(),
        };
        2 * self.b * self.h_kv * self.t_kv * row
    }
}

impl Describe for Cell {
    fn name(&self) -> String {
        let mut name = format!("b{} t{}", self.b, self.t_q);
        if self.t_kv != self.t_q {
            name += &format!(" of {}", self.t_kv);
        }
        name += &format!(" h{}", self.h);
        if self.h_kv != self.h {
            name += &format!("/{}", self.h_kv);
        }
        name += &format!(" d{} {} {}", self.d, self.mask, dtype_name(self.dtype));
        if let Some(format) = self.codes {
            name += &format!(", cache of {format}");
        }
        if let Some(size) = self.page_size {
            name += &format!(", pages of {size}");
        }
        name
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_json(&self) -> Value {
        let mut line = json!({
            "cell": self.name(), "dtype": dtype_name(self.dtype), "b": self.b, "h": self.h, "h_kv": self.h_kv,
            "t_q": self.t_q, "t_kv": self.t_kv, "d": self.d, "mask": self.mask.to_string(),
        });
        match &self.mask {
            Mask::Window(window) => line["window"] = json!(window),
            Mask::Lens(lens) => line["lens"] = json!(lens),
            Mask::None | Mask::Causal => {}
        }
        if let Some(e) = self.embed_dim {
            line["e"] = json!(e);
        }
        if let Some(format) = self.codes {
            line[format.name()] = json!(true);
        }
        if let Some(size) = self.page_size {
            line["page_size"] = json!(size);
        }
        line
    }

    fn work(&self) -> Result<Work> {
        let pairs = Some(self.visible_pairs()? as f64 * self.h as f64);
        Ok(Work { flops: self.flops()?, bytes: self.kv_bytes() as f64, pairs })
    }
}

/// Returns the name of a dtype: f32, bf16, f16.
pub fn dtype_name(dtype: DType) -> &'static str {
    dtype.as_str()
}
