//! `scaled_dot_product_attention` and what goes with it.

use candle_attention::{
    AttentionMask, Backend, EmptyRows, SdpaOptions, ValidLens, masked_softmax, merge_attention, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Result, Shape, Tensor};

use crate::{Misuse, check, of, zeros};

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

const SHAPES: &[Misuse] = &[
    (
        "queries without heads",
        || attend((2, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
        "[scaled_dot_product_attention] q has shape [2, 3, 8], expected (B, H, T_q, D)",
    ),
    (
        "keys without heads",
        || attend((2, 4, 3, 8), (2, 5, 8), (2, 4, 5, 8)),
        "[scaled_dot_product_attention] k has shape [2, 5, 8], expected (B, H_kv, T_kv, D)",
    ),
    (
        "values with five dimensions",
        || attend((2, 4, 3, 8), (2, 4, 5, 8), (1, 2, 4, 5, 8)),
        "[scaled_dot_product_attention] v has shape [1, 2, 4, 5, 8], expected (B, H_kv, T_kv, D_v)",
    ),
    (
        "a scalar",
        || attend((), (2, 4, 5, 8), (2, 4, 5, 8)),
        "[scaled_dot_product_attention] q has shape [], expected (B, H, T_q, D)",
    ),
    (
        "three key heads for eight query heads",
        || attend((1, 8, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4)),
        "[scaled_dot_product_attention] k has 3 heads, which does not divide q's 8",
    ),
    (
        "more key heads than query heads",
        || attend((1, 2, 3, 4), (1, 4, 5, 4), (1, 4, 5, 4)),
        "[scaled_dot_product_attention] k has 4 heads, which does not divide q's 2",
    ),
    (
        "value heads unlike key heads",
        || attend((1, 8, 3, 4), (1, 4, 5, 4), (1, 2, 5, 4)),
        "[scaled_dot_product_attention] v has 2 heads, expected k's 4",
    ),
    (
        "no query heads",
        || attend((1, 0, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
        "[scaled_dot_product_attention] q has 0 heads and k has 2, expected at least one",
    ),
    (
        "no key heads",
        || attend((1, 2, 3, 4), (1, 0, 5, 4), (1, 0, 5, 4)),
        "[scaled_dot_product_attention] q has 2 heads and k has 0, expected at least one",
    ),
    (
        "a batch of keys for one of queries",
        || attend((1, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
        "[scaled_dot_product_attention] q, k and v have batch sizes 1, 2 and 2, expected the same",
    ),
    (
        "fewer values than keys",
        || attend((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 4, 4)),
        "[scaled_dot_product_attention] v has 4 positions, expected k's 5",
    ),
    (
        "keys of another width",
        || attend((1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 4)),
        "[scaled_dot_product_attention] k has head dimension 6, expected q's 4",
    ),
    (
        "heads of no width",
        || attend((1, 2, 3, 0), (1, 2, 5, 0), (1, 2, 5, 4)),
        "[scaled_dot_product_attention] q has head dimension 0, expected at least 1",
    ),
    (
        "(B, T, H, D) in place of (B, H, T, D)",
        || attend((2, 6, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8)),
        "[scaled_dot_product_attention] k has 7 heads, which does not divide q's 6",
    ),
    (
        "the same through the weights",
        || {
            let (none, options) = (AttentionMask::none(), SdpaOptions::default());
            let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
            scaled_dot_product_attention_with_weights(&q, &kv, &kv, &none, &options).map(drop)
        },
        "[scaled_dot_product_attention_with_weights] k has 3 heads, which does not divide q's 8",
    ),
    (
        "the same through the log-sum-exp",
        || {
            let (none, options) = (AttentionMask::none(), SdpaOptions::default());
            let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
            scaled_dot_product_attention_with_lse(&q, &kv, &kv, &none, &options).map(drop)
        },
        "[scaled_dot_product_attention_with_lse] k has 3 heads, which does not divide q's 8",
    ),
    (
        "the same through the plan",
        || {
            let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
            plan(&q, &kv, &kv, &AttentionMask::none(), &SdpaOptions::default()).map(drop)
        },
        "[plan] k has 3 heads, which does not divide q's 8",
    ),
];

const DTYPES: &[Misuse] = &[
    (
        "keys in half precision",
        || attend_to(&zeros((1, 2, 3, 4)), &of(DType::F16, (1, 2, 5, 4)), &zeros((1, 2, 5, 4))),
        "[scaled_dot_product_attention] k has dtype F16, expected q's F32",
    ),
    (
        "values in double precision",
        || attend_to(&zeros((1, 2, 3, 4)), &zeros((1, 2, 5, 4)), &of(DType::F64, (1, 2, 5, 4))),
        "[scaled_dot_product_attention] v has dtype F64, expected q's F32",
    ),
    (
        "integers",
        || {
            let ids = of(DType::I64, (1, 2, 5, 4));
            attend_to(&ids, &ids, &ids)
        },
        "[scaled_dot_product_attention] q has dtype I64, expected F32, F16, BF16 or F64",
    ),
    (
        "eight bits",
        || {
            let xs = of(DType::F8E4M3, (1, 2, 5, 4));
            attend_to(&xs, &xs, &xs)
        },
        "[scaled_dot_product_attention] q has dtype F8E4M3, expected F32, F16, BF16 or F64",
    ),
];

const OPTIONS: &[Misuse] = &[
    (
        "a scale that is no number",
        || with(SdpaOptions::default().with_scale(f64::NAN)),
        "[scaled_dot_product_attention] scale is NaN, expected a finite number in F32",
    ),
    (
        "an infinite scale",
        || with(SdpaOptions::default().with_scale(f64::NEG_INFINITY)),
        "[scaled_dot_product_attention] scale is -inf, expected a finite number in F32",
    ),
    (
        "a scale that f32 does not hold",
        || with(SdpaOptions::default().with_scale(1e300)),
        "[scaled_dot_product_attention] scale is 1e300, expected a finite number in F32",
    ),
    (
        "a softcap of zero",
        || with(SdpaOptions::default().with_softcap(0.0)),
        "[scaled_dot_product_attention] softcap is 0.0, expected a finite number above zero in F32",
    ),
    (
        "a softcap below zero",
        || with(SdpaOptions::default().with_softcap(-30.0)),
        "[scaled_dot_product_attention] softcap is -30.0, expected a finite number above zero in F32",
    ),
    (
        "a softcap that is no number",
        || with(SdpaOptions::default().with_softcap(f64::NAN)),
        "[scaled_dot_product_attention] softcap is NaN, expected a finite number above zero in F32",
    ),
    (
        "a softcap whose inverse f32 does not hold",
        || with(SdpaOptions::default().with_softcap(1e-40)),
        "[scaled_dot_product_attention] softcap is 1e-40, expected a finite number above zero in F32",
    ),
    (
        "dropout in percent",
        || with(SdpaOptions::default().with_dropout(10.0, true)),
        "[scaled_dot_product_attention] dropout is 10, expected a probability from 0 to 1",
    ),
    (
        "dropout below zero, though not in training",
        || with(SdpaOptions::default().with_dropout(-0.1, false)),
        "[scaled_dot_product_attention] dropout is -0.1, expected a probability from 0 to 1",
    ),
    (
        "dropout that is no number",
        || with(SdpaOptions::default().with_dropout(f64::NAN, true)),
        "[scaled_dot_product_attention] dropout is NaN, expected a probability from 0 to 1",
    ),
    (
        "slopes for the key heads",
        || with(SdpaOptions::default().with_alibi_slopes(&zeros(2))),
        "[scaled_dot_product_attention] alibi_slopes has shape [2], expected one entry for each of 4 heads",
    ),
    (
        "slopes with a batch",
        || with(SdpaOptions::default().with_alibi_slopes(&zeros((1, 4)))),
        "[scaled_dot_product_attention] alibi_slopes has shape [1, 4], expected one entry for each of 4 heads",
    ),
    (
        "integer slopes",
        || with(SdpaOptions::default().with_alibi_slopes(&of(DType::I64, 4))),
        "[scaled_dot_product_attention] alibi_slopes has dtype I64, expected a float",
    ),
    (
        "one sink for all heads",
        || with(SdpaOptions::default().with_sinks(&zeros(1))),
        "[scaled_dot_product_attention] sinks has shape [1], expected one entry for each of 4 heads",
    ),
    (
        "integer sinks",
        || with(SdpaOptions::default().with_sinks(&of(DType::U8, 4))),
        "[scaled_dot_product_attention] sinks has dtype U8, expected a float",
    ),
    (
        "a fused kernel for tracked inputs",
        || {
            let q = candle_core::Var::from_tensor(&zeros((1, 1, 2, 4)))?;
            let options = SdpaOptions::default().with_backend(Backend::Fused);
            scaled_dot_product_attention(&q, &q, &q, &AttentionMask::none(), &options).map(drop)
        },
        "[scaled_dot_product_attention] no fused path: an input is tracked for gradients, which only the reference path has",
    ),
];

const PIECES: &[Misuse] = &[
    ("no parts", || merge_attention(&[]).map(drop), "[merge_attention] expected at least one part, found none"),
    (
        "a context without heads",
        || merge_attention(&[part((1, 3, 4), (1, 3))]).map(drop),
        "[merge_attention] context has shape [1, 3, 4], expected (B, H, T_q, D_v)",
    ),
    (
        "a log-sum-exp of another shape",
        || merge_attention(&[part((1, 2, 3, 4), (1, 2, 3, 1))]).map(drop),
        "[merge_attention] part 0 has context [1, 2, 3, 4] and log-sum-exp [1, 2, 3, 1], expected [1, 2, 3, 4] and [1, 2, 3]",
    ),
    (
        "parts of different widths",
        || merge_attention(&[part((1, 2, 3, 4), (1, 2, 3)), part((1, 2, 3, 5), (1, 2, 3))]).map(drop),
        "[merge_attention] part 1 has context [1, 2, 3, 5] and log-sum-exp [1, 2, 3], expected [1, 2, 3, 4] and [1, 2, 3]",
    ),
    (
        "parts of different dtypes",
        || {
            let half = (of(DType::F16, (1, 2, 3, 4)), zeros((1, 2, 3)));
            merge_attention(&[part((1, 2, 3, 4), (1, 2, 3)), half]).map(drop)
        },
        "[merge_attention] part 1 has dtypes F16 and F32, expected F32 and F32",
    ),
    (
        "integer parts",
        || {
            let integers = (of(DType::I64, (1, 2, 3, 4)), of(DType::I64, (1, 2, 3)));
            merge_attention(&[integers]).map(drop)
        },
        "[merge_attention] part 0 has dtypes I64 and I64, expected floats",
    ),
    (
        "scores with heads",
        || softmax(&zeros((1, 2, 3, 4)), None),
        "[masked_softmax] scores have shape [1, 2, 3, 4], expected (B, T_q, T_kv)",
    ),
    (
        "scores without a batch",
        || softmax(&zeros((3, 4)), None),
        "[masked_softmax] scores have shape [3, 4], expected (B, T_q, T_kv)",
    ),
    (
        "integer scores",
        || softmax(&of(DType::U32, (1, 3, 4)), None),
        "[masked_softmax] scores have dtype U32, expected a float",
    ),
    (
        "lengths for another batch",
        || softmax(&zeros((2, 3, 4)), Some(vec![1, 2, 3].into())),
        "[attention_mask] valid_lens has 3 entries, expected one for each of 2 sequences",
    ),
    (
        "lengths for another batch, with no queries",
        || softmax(&zeros((2, 0, 4)), Some(vec![1, 2, 3].into())),
        "[attention_mask] valid_lens has 3 entries, expected one for each of 2 sequences",
    ),
];

#[test]
fn shapes_that_do_not_fit_are_named() {
    check(SHAPES);
}

#[test]
fn dtypes_that_do_not_fit_are_named() {
    check(DTYPES);
}

#[test]
fn options_out_of_range_are_named() {
    check(OPTIONS);
}

#[test]
fn pieces_that_do_not_fit_are_named() {
    check(PIECES);
}
