//! One call, whose numbers are the same on every device.

use std::fmt;

use candle_attention::init::TorchSeed;
use candle_attention::{AttentionMask, SdpaOptions, ValidLens};
use candle_core::{DType, Device, Result, Tensor};

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
}

#[derive(Debug, Clone, Copy)]
pub enum Mask {
    None,
    Causal,
    UpperLeft,
    Offset,
    Window,
    Band,
    OneLength,
    Lens,
    Starts,
    LensByQuery,
    Prefix,
    Bool,
    Bias,
    /// The first sequence has no valid key.
    FullyMasked,
}

#[derive(Debug, Clone, Copy)]
pub enum Options {
    Plain,
    Scale,
    Softcap,
    Alibi,
    Sinks,
}

/// The result of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    Output,
    LogSumExp,
    Weights,
    /// The gradients of the sum of squares of the output with respect to q, k and v.
    Gradients,
}

#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub dims: Dims,
    pub layout: Layout,
    pub mask: Mask,
    pub options: Options,
    pub want: Want,
}

/// q, k and v as numbers of a dtype, each of which is a view of a buffer.
pub struct Buffers([Tensor; 3]);

impl Case {
    /// Draws the buffers from one seed, so that they are the same in every run.
    pub fn buffers(&self, dtype: DType) -> Result<Buffers> {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let seed = TorchSeed::new(1);
        let draw = |dims: [usize; 4]| seed.randn(self.layout.buffer(dims).to_vec())?.to_dtype(dtype);
        Ok(Buffers([draw([b, h, t_q, d])?, draw([b, h_kv, t_kv, d])?, draw([b, h_kv, t_kv, d_v])?]))
    }

    pub fn mask(&self, device: &Device) -> Result<AttentionMask> {
        let Dims { b, t_q, t_kv, .. } = self.dims;
        let none = AttentionMask::none;
        let drawn = |shape: [usize; 2]| TorchSeed::new(2).randn(shape.to_vec())?.to_device(device);
        // The valid keys of a sequence are a third to all of its keys, a different number in each sequence.
        let lens = |n: usize| -> Vec<usize> { (0..n).map(|i| (t_kv - (i * 5) % (t_kv / 2 + 1)).max(1)).collect() };
        Ok(match self.mask {
            Mask::None => none(),
            Mask::Causal => AttentionMask::causal(),
            Mask::UpperLeft => AttentionMask::causal_upper_left(),
            Mask::Offset => AttentionMask::causal_with_offset(t_kv / 3),
            Mask::Window => AttentionMask::causal().with_window(t_kv / 3 + 1),
            Mask::Band => none().with_local_window(t_kv / 4, 2),
            Mask::OneLength => none().with_valid_lens(vec![t_kv / 2 + 1; b]),
            Mask::Lens => none().with_valid_lens(lens(b)),
            Mask::Starts => {
                AttentionMask::causal().with_starts(lens(b).into_iter().map(|len| t_kv - len).collect::<Vec<_>>())
            }
            Mask::LensByQuery => none().with_valid_lens(ValidLens::from(vec![lens(t_q); b])),
            Mask::Prefix => AttentionMask::causal().with_prefix(vec![t_kv / 2; b]),
            Mask::Bool => none().with_bool_mask(&drawn([t_q, t_kv])?.gt(-0.5)?),
            Mask::Bias => none().with_bias(&drawn([t_q, t_kv])?),
            Mask::FullyMasked => {
                none().with_valid_lens((0..b).map(|b| if b == 0 { 0 } else { t_kv }).collect::<Vec<_>>())
            }
        })
    }

    pub fn options(&self, device: &Device) -> Result<SdpaOptions> {
        let heads = |least: f32, step: f32| {
            let heads: Vec<f32> = (0..self.dims.h).map(|head| least + step * head as f32).collect();
            Tensor::new(heads, device)
        };
        let options = SdpaOptions::default();
        Ok(match self.options {
            Options::Plain => options,
            Options::Scale => options.with_scale(0.3),
            Options::Softcap => options.with_softcap(2.0),
            Options::Alibi => options.with_alibi_slopes(&heads(0.02, 0.05)?),
            Options::Sinks => options.with_sinks(&heads(-1.0, 0.3)?),
        })
    }
}

impl Layout {
    /// Returns the shape of the buffer of which a (B, H, T, D) tensor is a view.
    fn buffer(self, [b, h, t, d]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Contiguous => [b, h, t, d],
            Self::Projection => [b, t, h, d],
            Self::Cache => [b, h, t + 7, d],
            Self::OddRows => [b, h, t, d + 3],
            Self::ColumnMajor => [b, h, d, t],
        }
    }

    fn view(self, buffer: &Tensor) -> Result<Tensor> {
        match self {
            Self::Contiguous => Ok(buffer.clone()),
            Self::Projection => buffer.transpose(1, 2),
            Self::Cache => buffer.narrow(2, 0, buffer.dim(2)? - 7),
            Self::OddRows => buffer.narrow(3, 1, buffer.dim(3)? - 3),
            Self::ColumnMajor => buffer.transpose(2, 3),
        }
    }
}

impl Buffers {
    /// Applies `change` to each buffer, for example a conversion or a move.
    pub fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let [q, k, v] = &self.0;
        Ok(Self([change(q)?, change(k)?, change(v)?]))
    }

    pub fn views(&self, layout: Layout) -> Result<[Tensor; 3]> {
        let [q, k, v] = &self.0;
        Ok([layout.view(q)?, layout.view(k)?, layout.view(v)?])
    }
}
