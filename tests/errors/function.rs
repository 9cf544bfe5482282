//! `scaled_dot_product_attention` and what goes with it, for batches and for packed sequences.

use candle_attention::{scaled_dot_product_attention as sdpa, scaled_dot_product_attention_varlen as varlen};

use crate::wrong::Fitting;
use crate::*;

const F32: DType = DType::F32;

fn none() -> AttentionMask {
    AttentionMask::none()
}

fn options() -> SdpaOptions {
    SdpaOptions::default()
}

#[test]
fn tensors() {
    let dims: [Fitting; 3] = [("q", F32, "B H T D"), ("k", F32, "B K S D"), ("v", F32, "B K S V")];
    let wrong = wrong::tensors("B 2 H 4 K 2 T 3 S 5 D 8 V 6", &dims, |tensors| {
        sdpa(&tensors[0], &tensors[1], &tensors[2], &none(), &options())
    });
    let (q, kv) = (zeros((1, 8, 3, 4)), zeros((1, 3, 5, 4)));
    let entrances = cases! {
        "three key heads, with the weights" =>
            scaled_dot_product_attention_with_weights(&q, &kv, &kv, &none(), &options()),
        "three key heads, with the log-sum-exp" =>
            scaled_dot_product_attention_with_lse(&q, &kv, &kv, &none(), &options()),
        "three key heads in the plan" => plan(&q, &kv, &kv, &none(), &options()),
        "(B, T, H, D) in place of (B, H, T, D)" => {
            let kv = zeros((2, 7, 4, 8));
            sdpa(&zeros((2, 6, 4, 8)), &kv, &kv, &none(), &options())
        },
    };
    let dtypes = each("all in", [DType::I64, DType::F8E4M3], |dtype| {
        let xs = of(dtype, (1, 2, 5, 4));
        sdpa(&xs, &xs, &xs, &none(), &options())
    });
    assert_reviewed("sdpa_tensors", &[wrong, entrances, dtypes]);
}

#[test]
fn options_of_a_call() {
    // q (1, 4, 3, 8) and k, v (1, 2, 5, 8).
    let with = |options: SdpaOptions| {
        let (q, kv) = (zeros((1, 4, 3, 8)), zeros((1, 2, 5, 8)));
        sdpa(&q, &kv, &kv, &none(), &options)
    };
    let dropouts = [(10.0, true), (-0.1, false), (f64::NAN, true), (1.1, true), (f64::INFINITY, false)];
    let tensors = [
        wrong::tensors("H 4", &[("slopes", F32, "H")], |slopes| with(options().with_alibi_slopes(&slopes[0]))),
        wrong::tensors("H 4", &[("sinks", F32, "H")], |sinks| with(options().with_sinks(&sinks[0]))),
    ];
    let fused = each("a fused kernel for", [DType::F64], |dtype| {
        let q = of(dtype, (1, 1, 2, 4));
        sdpa(&q, &q, &q, &none(), &options().with_backend(Backend::Fused))
    });
    assert_reviewed(
        "sdpa_options",
        &[
            each("a scale of", [f64::NAN, f64::NEG_INFINITY, 1e300], |scale| with(options().with_scale(scale))),
            each("a softcap of", [0.0, -30.0, f64::NAN, 1e-40], |softcap| with(options().with_softcap(softcap))),
            each("dropout, in training or not, of", dropouts, |(p, train)| with(options().with_dropout(p, train))),
            tensors.concat(),
            fused,
        ],
    );
}

#[test]
fn parts_and_scores() {
    let parts: [Fitting; 4] = [
        ("a context", F32, "B H T V"),
        ("a lse", F32, "B H T"),
        ("another context", F32, "B H T V"),
        ("another lse", F32, "B H T"),
    ];
    let parts = wrong::tensors("B 1 H 2 T 3 V 4", &parts, |parts| {
        merge_attention(&[(parts[0].clone(), parts[1].clone()), (parts[2].clone(), parts[3].clone())])
    });
    let cases = cases! {
        "no parts" => merge_attention(&[]),
        "integer parts" => merge_attention(&[(of(DType::I64, (1, 2, 3, 4)), of(DType::I64, (1, 2, 3)))]),
        "lengths for another batch, with no queries" =>
            masked_softmax(&zeros((2, 0, 4)), Some(&vec![1, 2, 3].into()), EmptyRows::Zero),
    };
    let scores = wrong::tensors("B 2 T 3 S 4", &[("scores", F32, "B T S")], |scores| {
        masked_softmax(&scores[0], Some(&vec![1, 2].into()), EmptyRows::Zero)
    });
    assert_reviewed("sdpa_parts", &[parts, cases, scores]);
}

/// Two sequences, of 2 and 1 queries and 4 and 2 keys.
fn sequences() -> Result<PackedSequences> {
    PackedSequences::new(vec![0, 2, 3], vec![0, 4, 6])
}

#[test]
fn packed_sequences() {
    let new = |q: &[usize], kv: &[usize]| PackedSequences::new(q.to_vec(), kv.to_vec());
    let from_tensor = |cu_seqlens: Tensor| PackedSequences::from_tensors(&cu_seqlens, &cu_seqlens);
    let cases = cases! {
        "no entry" => new(&[], &[0]),
        "lengths in place of their sums" => new(&[0, 2, 5], &[4, 2]),
        "lengths after a zero" => new(&[0, 5, 3], &[0, 5, 8]),
        "more sequences of keys" => new(&[0, 2], &[0, 4, 6]),
        "self-attention that decreases" => PackedSequences::self_attention(vec![0, 1, 0]),
        "more lengths of queries" => PackedSequences::from_lens(&[1, 2], &[3]),
        "lengths without a sum" => PackedSequences::from_lens(&[1, 2], &[1, usize::MAX]),
        "floats" => from_tensor(zeros(3)),
        "a batch of lengths" => from_tensor(of(DType::I64, (2, 3))),
        "an empty tensor" => from_tensor(of(DType::I64, 3).narrow(0, 3, 0)?),
        "a negative entry" => from_tensor(Tensor::new(&[0i64, 3, -1], &CPU)?),
    };
    assert_reviewed("packed_sequences", &[cases]);
}

#[test]
fn tensors_and_masks_of_packed_sequences() {
    let dims: [Fitting; 3] = [("q", F32, "3 H D"), ("k", F32, "6 K D"), ("v", F32, "6 K V")];
    let wrong = wrong::tensors("H 4 K 2 D 8 V 6", &dims, |tensors| {
        varlen(&tensors[0], &tensors[1], &tensors[2], &sequences()?, &none(), &options())
    });
    let (q, kv) = (zeros((3, 4, 8)), zeros((6, 2, 8)));
    let with = |options: SdpaOptions| varlen(&q, &kv, &kv, &sequences()?, &none(), &options);
    let tensors = cases! {
        "more queries than any memory holds" => {
            let (sequences, queries) = (PackedSequences::from_lens(&[1 << 59], &[1])?, zeros(1));
            let (queries, kv) = (queries.broadcast_as((1 << 59, 1, 1))?, zeros((1, 1, 1)));
            varlen(&queries, &kv, &kv, &sequences, &none(), &options())
        },
        "no sequences for some queries" => {
            let (sequences, kv) = (PackedSequences::from_lens(&[], &[])?, zeros((0, 2, 8)));
            varlen(&zeros((1, 4, 8)), &kv, &kv, &sequences, &none(), &options())
        },
        "more queries, with the log-sum-exp" => {
            let (q, sequences) = (zeros((4, 4, 8)), sequences()?);
            scaled_dot_product_attention_varlen_with_lse(&q, &kv, &kv, &sequences, &none(), &options())
        },
        "a softcap of zero" => with(options().with_softcap(0.0)),
        "slopes for the key heads" => with(options().with_alibi_slopes(&zeros(2))),
    };
    let masked = |mask: AttentionMask| varlen(&q, &kv, &kv, &sequences()?, &mask, &options());
    let masks = cases! {
        "a tensor of what to keep" => masked(none().with_keep(&of(DType::U8, (3, 6)))),
        "a bias beside other constraints" => masked(AttentionMask::causal().and(&none().with_bias(&zeros((3, 6))))),
        "padding with holes" => masked(AttentionMask::from_attention_mask(&Tensor::new(&[[1u8, 0, 1]], &CPU)?)?),
        "padding of a batch" => masked(AttentionMask::from_attention_mask(&of(DType::U8, (2, 4)))?),
        "lengths for another number of sequences" => masked(none().with_valid_lens(vec![1])),
        "prefixes for another number of sequences" => masked(AttentionMask::causal().with_prefix(vec![1, 2, 3])),
        "rows for another number of sequences" => masked(none().with_starts(vec![vec![0, 0]])),
        "a row for another number of queries" => masked(none().with_valid_lens(vec![vec![1, 1], vec![1, 1]])),
        "lengths for no sequences" => {
            let (sequences, q, kv) = (PackedSequences::from_lens(&[], &[])?, zeros((0, 4, 8)), zeros((0, 2, 8)));
            varlen(&q, &kv, &kv, &sequences, &none().with_valid_lens(vec![1]), &options())
        },
        "a window of zero" => masked(AttentionMask::causal().with_window(0)),
    };
    assert_reviewed("packed_tensors", &[wrong, tensors, masks]);
}
