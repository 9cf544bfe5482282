//! One call, whose numbers are the same on every device.

use std::fmt;

use candle_attention::init::TorchSeed;
use candle_attention::{AttentionMask, OutputLayout, SdpaOptions, ValidLens};
use candle_core::{DType, Result, Tensor};

use super::operands::Operands;

/// The dimensions, with the letters of the crate's glossary.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { b, h, h_kv, t_q, t_kv, d, d_v } = self;
        write!(f, "b{b} h{h}/{h_kv} t{t_q}/{t_kv} d{d}/{d_v}")
    }
}

/// The memory layout of q, k and v.
#[derive(Debug, Clone, Copy)]
pub enum Layout {
    Contiguous,
    /// (B, T, H, D), the layout after a projection.
    Projection,
    /// The first positions of a longer buffer.
    Cache,
    /// Rows of wider ones, from the second element on.
    OddRows,
    /// (B, H, D, T).
    ColumnMajor,
    /// Keys and values of one sequence, which all sequences attend to.
    OneSequence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    None,
    Causal,
    UpperLeft,
    Offset,
    /// An offset for each sequence.
    Offsets,
    Window,
    LocalWindow,
    Chunk,
    OneLength,
    Lens,
    Starts,
    LensByQuery,
    StartsByQuery,
    Prefix,
    /// (T_q, T_kv).
    Bool,
    /// (B, H, T_q, T_kv).
    BoolByHead,
    /// (T_q, T_kv).
    Bias,
    /// (1, H, T_q, T_kv), with entries of minus infinity.
    BiasByHead,
    /// (B, 1, T_q, T_kv) in f32.
    BiasInF32,
    /// The first sequence has no valid key.
    FullyMasked,
    /// Causal, with a window, starts, lengths, a boolean mask and a bias.
    Everything,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Options {
    Plain,
    Scale,
    Softcap,
    Alibi,
    RelativeBias,
    Sinks,
    Dropout,
    /// The output is (B, T, H, D_v) in memory.
    TokensFirst,
    /// All of the above together.
    Everything,
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Output,
    LogSumExp,
    Weights,
    /// The gradients of the sum of squares of the output with respect to every tensor of the call.
    Gradients,
    /// The gradients of that sum plus the sum of the log-sum-exp.
    GradientsWithLogSumExp,
}

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub dims: Dims,
    pub layout: Layout,
    pub mask: Mask,
    pub options: Options,
    pub want: Want,
}

impl Case {
    /// Draws the tensors from one seed, so that they are the same in every run.
    pub fn operands(&self, dtype: DType) -> Result<Operands> {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let seed = TorchSeed::new(1);
        let draw = |shape: &[usize], to: DType| seed.randn(shape.to_vec())?.to_dtype(to);
        let b_kv = if matches!(self.layout, Layout::OneSequence) { 1 } else { b };
        let q = draw(&self.layout.buffer([b, h, t_q, d]), dtype)?;
        let k = draw(&self.layout.buffer([b_kv, h_kv, t_kv, d]), dtype)?;
        let v = draw(&self.layout.buffer([b_kv, h_kv, t_kv, d_v]), dtype)?;
        let bias = match self.mask {
            Mask::Bias => Some(draw(&[t_q, t_kv], dtype)?),
            Mask::Everything => Some(draw(&[b, h, t_q, t_kv], dtype)?),
            Mask::BiasInF32 => Some(draw(&[b, 1, t_q, t_kv], DType::F32)?),
            Mask::BiasByHead => {
                let drawn = draw(&[1, h, t_q, t_kv], dtype)?;
                let masked = Tensor::full(f32::NEG_INFINITY, drawn.shape(), drawn.device())?.to_dtype(dtype)?;
                Some(drawn.lt(-1.5)?.where_cond(&masked, &drawn)?)
            }
            _ => None,
        };
        let by_head = |least: f32, step: f32| -> Result<Tensor> {
            let heads: Vec<f32> = (0..h).map(|head| least + step * head as f32).collect();
            Tensor::new(heads, q.device())?.to_dtype(dtype)
        };
        let has = |options: Options| self.options == options || self.options == Options::Everything;
        Ok(Operands {
            bias,
            relative_bias: has(Options::RelativeBias).then(|| draw(&[h, t_q + t_kv - 1], dtype)).transpose()?,
            alibi_slopes: has(Options::Alibi).then(|| by_head(0.02, 0.05)).transpose()?,
            sinks: has(Options::Sinks).then(|| by_head(-1.0, 0.3)).transpose()?,
            q,
            k,
            v,
        })
    }

    /// Returns the mask on the device of the operands.
    pub fn mask(&self, operands: &Operands) -> Result<AttentionMask> {
        let Dims { b, h, t_q, t_kv, .. } = self.dims;
        let none = AttentionMask::none;
        let allowed = |shape: &[usize]| -> Result<Tensor> {
            TorchSeed::new(2).randn(shape.to_vec())?.gt(-0.5)?.to_device(operands.q.device())
        };
        // The valid keys of a sequence are a third to all of its keys, a different number in each sequence.
        let lens = |n: usize| -> Vec<usize> { (0..n).map(|i| (t_kv - (i * 5) % (t_kv / 2 + 1)).max(1)).collect() };
        let starts = |n: usize| -> Vec<usize> { lens(n).into_iter().map(|len| t_kv - len).collect() };
        let mask = match self.mask {
            Mask::None | Mask::Bias | Mask::BiasByHead | Mask::BiasInF32 => none(),
            Mask::Causal => AttentionMask::causal(),
            Mask::UpperLeft => AttentionMask::causal_upper_left(),
            Mask::Offset => AttentionMask::causal_with_offset(t_kv / 3),
            Mask::Offsets => {
                let last = t_kv as i64 - t_q as i64;
                AttentionMask::causal_with_offsets((0..b as i64).map(|i| last - 3 * i).collect::<Vec<_>>())
            }
            Mask::Window => AttentionMask::causal().with_window(t_kv / 3 + 1),
            Mask::LocalWindow => none().with_local_window(t_kv / 4, 2),
            Mask::Chunk => AttentionMask::causal().with_chunk(t_kv / 3 + 1),
            Mask::OneLength => none().with_valid_lens(vec![t_kv / 2 + 1; b]),
            Mask::Lens => none().with_valid_lens(lens(b)),
            Mask::Starts => AttentionMask::causal().with_starts(starts(b)),
            Mask::LensByQuery => none().with_valid_lens(ValidLens::from(vec![lens(t_q); b])),
            Mask::StartsByQuery => none().with_starts(ValidLens::from(vec![starts(t_q); b])),
            Mask::Prefix => AttentionMask::causal().with_prefix(vec![t_kv / 2; b]),
            Mask::Bool => none().with_bool_mask(&allowed(&[t_q, t_kv])?),
            Mask::BoolByHead => none().with_bool_mask(&allowed(&[b, h, t_q, t_kv])?),
            Mask::FullyMasked => {
                none().with_valid_lens((0..b).map(|b| if b == 0 { 0 } else { t_kv }).collect::<Vec<_>>())
            }
            Mask::Everything => AttentionMask::causal()
                .with_window(t_kv / 2 + 1)
                .with_starts(starts(b))
                .with_valid_lens(vec![(t_kv - 1).max(1); b])
                .with_bool_mask(&allowed(&[b, 1, t_q, t_kv])?),
        };
        Ok(match &operands.bias {
            Some(bias) => mask.with_bias(bias),
            None => mask,
        })
    }

    /// Returns the options with the tensors of the operands.
    pub fn options(&self, operands: &Operands) -> SdpaOptions {
        let has = |options: Options| self.options == options || self.options == Options::Everything;
        let mut options = SdpaOptions::default()
            .with_alibi_slopes(&operands.alibi_slopes)
            .with_relative_bias(&operands.relative_bias)
            .with_sinks(&operands.sinks);
        if has(Options::Scale) {
            options = options.with_scale(0.3);
        }
        if has(Options::Softcap) {
            options = options.with_softcap(2.0);
        }
        if has(Options::Dropout) {
            // The seed determines the dropped weights on every path.
            options = options.with_dropout(0.3, true).with_dropout_philox_seed(7);
        }
        if has(Options::TokensFirst) {
            options = options.with_output_layout(OutputLayout::Bthd);
        }
        options
    }
}

impl Layout {
    /// Returns the shape of the buffer of which a (B, H, T, D) tensor is a view.
    fn buffer(self, [b, h, t, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Contiguous | Self::OneSequence => [b, h, t, d],
            Self::Projection => [b, t, h, d],
            Self::Cache => [b, h, t + 7, d],
            Self::OddRows => [b, h, t, d + 3],
            Self::ColumnMajor => [b, h, d, t],
        }
    }

    /// Returns the view of a buffer.
    pub fn view(self, buffer: &Tensor) -> Result<Tensor> {
        match self {
            Self::Contiguous | Self::OneSequence => Ok(buffer.clone()),
            Self::Projection => buffer.transpose(1, 2),
            Self::Cache => buffer.narrow(2, 0, buffer.dim(2)? - 7),
            Self::OddRows => buffer.narrow(3, 1, buffer.dim(3)? - 3),
            Self::ColumnMajor => buffer.transpose(2, 3),
        }
    }
}
