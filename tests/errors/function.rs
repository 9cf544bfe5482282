//! `scaled_dot_product_attention` and what goes with it.

use candle_attention::{
    AttentionMask, Backend, EmptyRows, SdpaOptions, ValidLens, masked_softmax, merge_attention, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Result, Shape, Tensor};

use crate::{Case, of, zeros};

fn attend(q: impl Into<Shape>, k: impl Into<Shape>, v: impl Into<Shape>) -> Result<()> {
    attend_to(&zeros(q), &zeros(k), &zeros(v))
}

fn attend_to(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    scaled_dot_product_attention(q, k, v, &AttentionMask::none(), &SdpaOptions::default()).map(drop)
}

/// q (1, 4, 3, 8) and k, v (1, 2, 5, 8).
fn with(options: SdpaOptions) -> Result<()> {
    let (q, kv) = (zeros((1, 4, 3, 8)), zeros((1, 2, 5, 8)));
    scaled_dot_product_attention(&q, &kv, &kv, &AttentionMask::none(), &options).map(drop)
}

fn part(context: impl Into<Shape>, lse: impl Into<Shape>) -> (Tensor, Tensor) {
    (zeros(context), zeros(lse))
}

fn softmax(scores: &Tensor, lens: Option<ValidLens>) -> Result<()> {
    masked_softmax(scores, lens.as_ref(), EmptyRows::Zero).map(drop)
}

pub const SHAPES: &[Case] = cases! {
    "queries without heads" => attend((2, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
    "keys without heads" => attend((2, 4, 3, 8), (2, 5, 8), (2, 4, 5, 8)),
    "values with five dimensions" => attend((2, 4, 3, 8), (2, 4, 5, 8), (1, 2, 4, 5, 8)),
    "a scalar" => attend((), (2, 4, 5, 8), (2, 4, 5, 8)),
    "three key heads for eight query heads" => attend((1, 8, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4)),
    "more key heads than query heads" => attend((1, 2, 3, 4), (1, 4, 5, 4), (1, 4, 5, 4)),
    "value heads unlike key heads" => attend((1, 8, 3, 4), (1, 4, 5, 4), (1, 2, 5, 4)),
    "no query heads" => attend((1, 0, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
    "no key heads" => attend((1, 2, 3, 4), (1, 0, 5, 4), (1, 0, 5, 4)),
    "a batch of keys for one of queries" => attend((1, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    "fewer values than keys" => attend((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 4, 4)),
    "keys of another width" => attend((1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 4)),
    "heads of no width" => attend((1, 2, 3, 0), (1, 2, 5, 0), (1, 2, 5, 4)),
    "(B, T, H, D) in place of (B, H, T, D)" => attend((2, 6, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
    "the same through the weights" => {
        let (none, options) = (AttentionMask::none(), SdpaOptions::default());
        let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
        scaled_dot_product_attention_with_weights(&q, &kv, &kv, &none, &options)
    },
    "the same through the log-sum-exp" => {
        let (none, options) = (AttentionMask::none(), SdpaOptions::default());
        let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
        scaled_dot_product_attention_with_lse(&q, &kv, &kv, &none, &options)
    },
    "the same through the plan" => {
        let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
        plan(&q, &kv, &kv, &AttentionMask::none(), &SdpaOptions::default())
    },
};

pub const DTYPES: &[Case] = cases! {
    "keys in half precision" => attend_to(&zeros((1, 2, 3, 4)), &of(DType::F16, (1, 2, 5, 4)), &zeros((1, 2, 5, 4))),
    "values in double precision" =>
        attend_to(&zeros((1, 2, 3, 4)), &zeros((1, 2, 5, 4)), &of(DType::F64, (1, 2, 5, 4))),
    "integers" => {
        let ids = of(DType::I64, (1, 2, 5, 4));
        attend_to(&ids, &ids, &ids)
    },
    "eight bits" => {
        let xs = of(DType::F8E4M3, (1, 2, 5, 4));
        attend_to(&xs, &xs, &xs)
    },
};

pub const OPTIONS: &[Case] = cases! {
    "a scale that is no number" => with(SdpaOptions::default().with_scale(f64::NAN)),
    "an infinite scale" => with(SdpaOptions::default().with_scale(f64::NEG_INFINITY)),
    "a scale that f32 does not hold" => with(SdpaOptions::default().with_scale(1e300)),
    "a softcap of zero" => with(SdpaOptions::default().with_softcap(0.0)),
    "a softcap below zero" => with(SdpaOptions::default().with_softcap(-30.0)),
    "a softcap that is no number" => with(SdpaOptions::default().with_softcap(f64::NAN)),
    "a softcap whose inverse f32 does not hold" => with(SdpaOptions::default().with_softcap(1e-40)),
    "dropout in percent" => with(SdpaOptions::default().with_dropout(10.0, true)),
    "dropout below zero, though not in training" => with(SdpaOptions::default().with_dropout(-0.1, false)),
    "dropout that is no number" => with(SdpaOptions::default().with_dropout(f64::NAN, true)),
    "dropout above one" => with(SdpaOptions::default().with_dropout(1.1, true)),
    "dropout without end" => with(SdpaOptions::default().with_dropout(f64::INFINITY, false)),
    "slopes for the key heads" => with(SdpaOptions::default().with_alibi_slopes(&zeros(2))),
    "slopes with a batch" => with(SdpaOptions::default().with_alibi_slopes(&zeros((1, 4)))),
    "integer slopes" => with(SdpaOptions::default().with_alibi_slopes(&of(DType::I64, 4))),
    "one sink for all heads" => with(SdpaOptions::default().with_sinks(&zeros(1))),
    "integer sinks" => with(SdpaOptions::default().with_sinks(&of(DType::U8, 4))),
    "a fused kernel for F64" => {
        let q = of(DType::F64, (1, 1, 2, 4));
        let options = SdpaOptions::default().with_backend(Backend::Fused);
        scaled_dot_product_attention(&q, &q, &q, &AttentionMask::none(), &options)
    },
};

pub const PIECES: &[Case] = cases! {
    "no parts" => merge_attention(&[]),
    "a context without heads" => merge_attention(&[part((1, 3, 4), (1, 3))]),
    "a log-sum-exp of another shape" => merge_attention(&[part((1, 2, 3, 4), (1, 2, 3, 1))]),
    "parts of different widths" => merge_attention(&[part((1, 2, 3, 4), (1, 2, 3)), part((1, 2, 3, 5), (1, 2, 3))]),
    "parts of different dtypes" =>
        merge_attention(&[part((1, 2, 3, 4), (1, 2, 3)), (of(DType::F16, (1, 2, 3, 4)), zeros((1, 2, 3)))]),
    "integer parts" => merge_attention(&[(of(DType::I64, (1, 2, 3, 4)), of(DType::I64, (1, 2, 3)))]),
    "scores with heads" => softmax(&zeros((1, 2, 3, 4)), None),
    "scores without a batch" => softmax(&zeros((3, 4)), None),
    "integer scores" => softmax(&of(DType::U32, (1, 3, 4)), None),
    "lengths for another batch" => softmax(&zeros((2, 3, 4)), Some(vec![1, 2, 3].into())),
    "lengths for another batch, with no queries" => softmax(&zeros((2, 0, 4)), Some(vec![1, 2, 3].into())),
};
