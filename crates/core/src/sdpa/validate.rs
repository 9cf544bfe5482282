//! Every shape, dtype and device check of a call, once.

use candle_core::{DType, Result, Tensor, bail};

use super::{OutputLayout, PackedSequences, SdpaOptions};
use crate::mask::{AttentionMask, FullyMaskedRows, RowRanges};
pub(super) use candle_attention_kernels::flash::AttentionDims as Dims;
use candle_attention_modules::base::{Dim, Expect, FLOATS, accumulation_dtype, is_addressable, number};

/// Arguments that were found to fit together.
pub(crate) struct Call {
    pub op: &'static str,
    /// (B, H, T_q, D)
    pub q: Tensor,
    /// (B, H_kv, T_kv, D); a batch of one is expanded to B, which copies nothing.
    pub k: Tensor,
    pub v: Tensor,
    /// The scales (B, H_kv, T_kv, 1) of keys and of values that are codes of 8 bits.
    pub scales: Option<[Tensor; 2]>,
    /// What the mask leaves each query: of a batch, or of packed sequences.
    pub rows: RowRanges,
    /// What it hides besides, u8 that broadcasts to (B, H, T_q, T_kv).
    pub keep: Option<Tensor>,
    /// What it adds to scores, in the dtype that these are computed in; broadcasts likewise.
    pub bias: Option<Tensor>,
    pub fully_masked_rows: FullyMaskedRows,
    pub options: SdpaOptions,
    /// Of a packed call, whose q, k and v are (1, H, total, D).
    pub sequences: Option<PackedSequences>,
    pub dims: Dims,
}

impl Call {
    /// A call of a batch, whose tensors may all lack B, or B and H; or of packed sequences, with q (total_q, H, D), k
    /// (total_kv, H_kv, D), v (total_kv, H_kv, D_v).
    pub fn new(
        op: &'static str,
        qkv: [&Tensor; 3],
        sequences: Option<&PackedSequences>,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let rank = if sequences.is_some() { 3 } else { qkv[0].rank() };
        if !(2..=4).contains(&rank) {
            bail!("[{op}] q has shape {:?}, expected (B, H, T_q, D), (H, T_q, D) or (T_q, D)", qkv[0].dims())
        }
        // Of which as many count as the tensors have dimensions.
        let shapes = match sequences {
            None => [["B", "H", "T_q", "D"], ["B", "H_kv", "T_kv", "D"], ["B", "H_kv", "T_kv", "D_v"]],
            Some(_) => [["", "total_q", "H", "D"], ["", "total_kv", "H_kv", "D"], ["", "total_kv", "H_kv", "D_v"]],
        };
        for ((name, tensor), dims) in ["q", "k", "v"].into_iter().zip(qkv).zip(shapes) {
            Expect::one(op, name, tensor).shape(&dims.map(Dim::Any)[4 - rank..])?;
        }
        let [q, k, v] = qkv.map(|tensor| {
            let whole = (rank..4).try_fold(tensor.clone(), |tensor, _| tensor.unsqueeze(0))?;
            if sequences.is_some() { whole.transpose(1, 2) } else { Ok(whole) }
        });
        Self::of(op, [&q?, &k?, &v?], None, sequences, mask, options)
    }

    /// A call of a batch, or of packed sequences with q (1, H, total_q, D), k (1, H_kv, total_kv, D), v (1, H_kv,
    /// total_kv, D_v), and the context (1, H, total_q, D_v), a view of (1, total_q, H, D_v). Keys and values that have
    /// `scales` are codes of 8 bits.
    pub fn of(
        op: &'static str,
        qkv: [&Tensor; 3],
        scales: Option<&[Tensor; 2]>,
        sequences: Option<&PackedSequences>,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let dims = dims(op, qkv)?;
        let Dims { b, h, t_q, t_kv, d, d_v, .. } = dims;
        // The kernels hold no scores of all packed queries with all keys.
        let scores = if sequences.is_some() { [1; 4] } else { [b, h, t_q, t_kv] };
        let shapes = [[b, h, t_q, d], [b, h, t_kv, d], [b, h, t_q.max(t_kv), d_v], scores];
        if shapes.iter().any(|shape| !is_addressable(shape)) {
            let [q, k, v] = qkv.map(Tensor::dims);
            bail!("[{op}] q {q:?}, k {k:?} and v {v:?} are too large to address")
        }
        let expanded = |tensor: &Tensor| -> Result<Tensor> {
            let (own, h_kv, t, d) = tensor.dims4()?;
            if own == b { Ok(tensor.clone()) } else { tensor.broadcast_as((b, h_kv, t, d)) }
        };
        let (q, k, v) = (qkv[0].clone(), expanded(qkv[1])?, expanded(qkv[2])?);
        sequences.map_or(Ok(()), |sequences| check_sequences(op, dims, sequences, mask))?;
        let rows = match sequences {
            None => mask.rows(op, b, t_q, t_kv)?,
            Some(sequences) => mask.packed_rows(op, &sequences.parts().collect::<Vec<_>>())?,
        };
        for (name, tensor) in [("k", &k), ("v", &v)] {
            let tensor = Expect::one(op, name, tensor).same_device("q", q.device())?;
            if scales.is_none() {
                tensor.dtype(q.dtype(), "q's")?;
            }
        }
        Expect::one(op, "q", &q).dtype_of(&FLOATS, "")?;
        let dtype = accumulation_dtype(q.dtype());
        let keep = mask.explicit_keep(scores, q.device())?;
        let bias = mask.bias_tensor(scores, dtype, q.device())?;
        let (scales, sequences, fully_masked_rows) = (scales.cloned(), sequences.cloned(), mask.fully_masked_rows());
        let options = options.clone();
        let call = Self { op, q, k, v, scales, rows, keep, bias, fully_masked_rows, options, sequences, dims };
        call.check_options(dtype)?;
        Ok(call)
    }

    /// T_q and T_kv, or the most queries and the most keys of a packed sequence.
    pub fn longest(&self) -> [usize; 2] {
        self.sequences.as_ref().map_or([self.dims.t_q, self.dims.t_kv], PackedSequences::longest)
    }

    /// In which order the context lies in memory.
    pub fn output_layout(&self) -> OutputLayout {
        if self.sequences.is_some() { OutputLayout::Bthd } else { self.options.output_layout }
    }

    /// A context (B, H, T_q, D_v) that lies in memory in the order of the call.
    pub fn in_output_layout(&self, context: Tensor) -> Result<Tensor> {
        let order = self.output_layout();
        reordered(order, reordered(order, context)?.contiguous()?)
    }

    /// (B, H, T_q, T_kv).
    pub fn score_dims(&self) -> [usize; 4] {
        [self.dims.b, self.dims.h, self.dims.t_q, self.dims.t_kv]
    }

    pub fn scale(&self) -> f64 {
        self.options.scale.unwrap_or(1.0 / (self.dims.d as f64).sqrt())
    }

    /// Whether an input is tracked.
    pub fn tracks_gradients(&self) -> bool {
        let Self { q, k, v, bias, options, .. } = self;
        let SdpaOptions { alibi_slopes, relative_bias, sinks, .. } = options;
        let given = [bias, alibi_slopes, relative_bias, sinks].map(Option::as_ref);
        [q, k, v].map(Some).into_iter().chain(given).flatten().any(Tensor::track_op)
    }

    /// For scores in `dtype`.
    fn check_options(&self, dtype: DType) -> Result<()> {
        let (op, options) = (self.op, &self.options);
        // What the scores are computed in has to hold the factors as well, and one over the softcap.
        let (least, most) = match dtype {
            DType::F64 => (f64::MIN_POSITIVE, f64::MAX),
            _ => (f32::MIN_POSITIVE.into(), f32::MAX.into()),
        };
        let is_finite = |scale: f64| scale.abs() <= most;
        number::expect(op, "scale", options.scale, is_finite, format_args!("a finite number in {dtype:?}"))?;
        let (softcap, is_right) = (options.softcap, |softcap: f64| (least..=most).contains(&softcap));
        number::expect(op, "softcap", softcap, is_right, format_args!("a finite number above zero in {dtype:?}"))?;
        number::probability(op, "dropout", options.dropout)?;
        let distances = self.longest().iter().sum::<usize>().saturating_sub(1);
        let (b, h) = (Dim::Named("B", self.dims.b), Dim::Named("H", self.dims.h));
        let distances = Dim::Named("T_q + T_kv - 1", distances);
        let (by_head, by_distance): (&[&[Dim]], &[&[Dim]]) = (&[&[h]], &[&[h, distances], &[b, h, distances]]);
        for (name, tensor, shapes) in [
            ("alibi_slopes", &options.alibi_slopes, by_head),
            ("sinks", &options.sinks, by_head),
            ("relative_bias", &options.relative_bias, by_distance),
        ] {
            let Some(tensor) = tensor else { continue };
            let tensor = Expect::one(op, name, tensor).same_device("q", self.q.device())?;
            tensor.shape_of(shapes)?.dtype_of(&FLOATS, "")?;
        }
        Ok(())
    }
}

/// A view of (B, H, T, ..) as it lies in memory in an order, and back.
pub(super) fn reordered(order: OutputLayout, xs: Tensor) -> Result<Tensor> {
    if order == OutputLayout::Bhtd { Ok(xs) } else { xs.transpose(1, 2) }
}

/// That the lengths of sequences end with the lengths of q and k, and that the mask has no tensor.
fn check_sequences(op: &str, dims: Dims, sequences: &PackedSequences, mask: &AttentionMask) -> Result<()> {
    let totals = [
        ("q", dims.t_q, "cu_seqlens_q", sequences.total_queries()),
        ("k", dims.t_kv, "cu_seqlens_kv", sequences.total_keys()),
    ];
    for (name, found, lens, expected) in totals {
        if found != expected {
            bail!("[{op}] {name} has {found} positions, expected the {expected} that {lens} ends with")
        }
    }
    if let Some(tensor) = mask.tensor_kind() {
        bail!("[{op}] the mask has a {tensor} tensor, expected none: packed sequences have no (B, H, T_q, T_kv)")
    }
    Ok(())
}

fn dims(op: &str, [q, k, v]: [&Tensor; 3]) -> Result<Dims> {
    let (b, h, t_q, d) = q.dims4()?;
    let (b_k, h_kv, t_kv, d_k) = k.dims4()?;
    let (b_v, h_v, t_v, d_v) = v.dims4()?;
    let fits = |size: usize| size == b || (size == 1 && b > 0);
    if !fits(b_k) || !fits(b_v) {
        bail!("[{op}] q, k and v have batch sizes {b}, {b_k} and {b_v}, expected the same, or 1 for k and v")
    }
    if h_v != h_kv {
        bail!("[{op}] v has {h_v} heads, expected k's {h_kv}")
    }
    if h == 0 || h_kv == 0 {
        bail!("[{op}] q has {h} heads and k has {h_kv}, expected at least one")
    }
    if !h.is_multiple_of(h_kv) {
        bail!("[{op}] k has {h_kv} heads, which does not divide q's {h}")
    }
    if t_v != t_kv {
        bail!("[{op}] v has {t_v} positions, expected k's {t_kv}")
    }
    if d_k != d {
        bail!("[{op}] k has head dimension {d_k}, expected q's {d}")
    }
    number::expect(op, "q's head dimension", d, |d: usize| d > 0, "at least 1")?;
    Ok(Dims { b, h, h_kv, t_q, t_kv, d, d_v })
}
