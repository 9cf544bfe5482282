//! Packed sequences against each sequence by itself.

use candle_attention::{
    AttentionMask, Backend, EmptyRows, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse, scaled_dot_product_attention_with_lse,
};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::call::attention_mask;
use crate::common::{assert_close, error_text, values};
use crate::oracle::Alignment::{Causal, Offset, UpperLeft};
use crate::oracle::{Lens, Mask, Part};
use crate::recipe::dtypes;

crate::on_each_device!(
    every_structural_mask_holds_for_each_sequence_by_itself,
    every_option_holds_for_each_sequence_by_itself,
    any_strides_are_read,
    no_sequences_and_empty_ones_give_what_there_is,
    a_sequence_that_is_no_number_reaches_no_other,
    gradients_flow_to_the_sequences_that_are_read,
    a_fused_kernel_that_is_not_there_is_an_error,
);

const H: usize = 4;
const H_KV: usize = 2;
const D: usize = 3;
const D_V: usize = 5;

/// Queries and keys of each sequence, with empty ones of either kind and of both.
const LENS: [(usize, usize); 7] = [(3, 6), (4, 4), (0, 2), (1, 1), (2, 0), (0, 0), (5, 3)];

fn sequences() -> PackedSequences {
    let (lens_q, lens_kv): (Vec<_>, Vec<_>) = LENS.into_iter().unzip();
    PackedSequences::from_lens(&lens_q, &lens_kv).expect("as many of each")
}

fn random(shape: (usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, device)?.to_dtype(dtype)
}

fn qkv(dtype: DType, device: &Device) -> Result<[Tensor; 3]> {
    let (total_q, total_kv) = (sequences().total_queries(), sequences().total_keys());
    Ok([
        random((total_q, H, D), dtype, device)?,
        random((total_kv, H_KV, D), dtype, device)?,
        random((total_kv, H_KV, D_V), dtype, device)?,
    ])
}

/// A mask of all sequences, of which the oracle makes that of one.
struct Packed {
    masks: Vec<Mask>,
    empty_rows: EmptyRows,
}

impl Packed {
    fn mask(&self, sequence: Option<usize>) -> Result<AttentionMask> {
        let own = |mask: &Mask| sequence.map_or(mask.clone(), |s| mask.of_sequence(s));
        let masks: Vec<_> = self.masks.iter().map(own).collect();
        let mask = attention_mask(&masks, &Device::Cpu, |_, _, _| unreachable!("packed sequences have no bias"))?;
        Ok(mask.with_empty_rows(self.empty_rows))
    }
}

fn masks() -> Vec<Packed> {
    let lens = || Lens::PerSequence(vec![4, 9, 1, 1, 0, 2, 2]);
    let starts = Lens::PerSequence(vec![1, 0, 0, 0, 3, 0, 2]);
    let rows = || {
        let rows = LENS.into_iter().enumerate().map(|(s, (t_q, _))| (0..t_q).map(|i| (s + 2 * i) % 5).collect());
        Lens::PerQuery(rows.collect())
    };
    let causal = |part: Part| Mask::new(Causal, [part]);
    let of = |masks: Vec<Mask>| Packed { masks, empty_rows: EmptyRows::Zero };
    vec![
        of(vec![]),
        of(vec![Mask::new(Causal, [])]),
        of(vec![Mask::new(UpperLeft, [])]),
        of(vec![Mask::new(Offset(2), [])]),
        of(vec![causal(Part::Window(2))]),
        of(vec![Mask::of(Part::Band(1, 2))]),
        of(vec![causal(Part::Window(3)), Mask::new(UpperLeft, [Part::Band(4, 1)])]),
        of(vec![Mask::of(Part::ValidLens(lens()))]),
        of(vec![causal(Part::Starts(starts))]),
        of(vec![Mask::of(Part::ValidLens(rows()))]),
        of(vec![causal(Part::Prefix(lens()))]),
        Packed { empty_rows: EmptyRows::Uniform, ..of(vec![causal(Part::ValidLens(lens()))]) },
        of(vec![causal(Part::ValidLens(lens())), Mask::of(Part::Starts(rows()))]),
    ]
}

/// Each sequence by itself, put together: (total_q, H, D_v) and (H, total_q).
fn one_by_one(
    [q, k, v]: &[Tensor; 3],
    sequences: &PackedSequences,
    mask: &Packed,
    options: &SdpaOptions,
) -> Result<(Tensor, Tensor)> {
    let (mut contexts, mut lses) = (Vec::new(), Vec::new());
    for s in 0..sequences.len() {
        let own = |tensor: &Tensor, range: std::ops::Range<usize>| {
            tensor.narrow(0, range.start, range.len())?.transpose(0, 1)?.unsqueeze(0)
        };
        if sequences.queries(s).is_empty() {
            continue;
        }
        let (q, k, v) = (own(q, sequences.queries(s))?, own(k, sequences.keys(s))?, own(v, sequences.keys(s))?);
        let (context, lse) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask.mask(Some(s))?, options)?;
        contexts.push(context.squeeze(0)?.transpose(0, 1)?);
        lses.push(lse.squeeze(0)?);
    }
    Ok((Tensor::cat(&contexts, 0)?, Tensor::cat(&lses, 1)?))
}

/// The reference path, to the bit.
fn check(qkv: &[Tensor; 3], packed: &Packed, options: &SdpaOptions) -> Result<()> {
    let (sequences, options) = (sequences(), options.clone().with_backend(Backend::Reference));
    let ([q, k, v], mask) = (qkv, &packed.mask(None)?);
    let (context, lse) = scaled_dot_product_attention_varlen_with_lse(q, k, v, &sequences, mask, &options)?;
    let (expected, expected_lse) = one_by_one(qkv, &sequences, packed, &options)?;
    let what = format!("{mask:?}, {:?}", q.dtype());
    assert!(context.is_contiguous() && lse.is_contiguous(), "{what}");
    assert_eq!((context.dtype(), lse.dtype()), (q.dtype(), expected_lse.dtype()), "{what}");
    assert_close(&context, &expected, 0.0, &what);
    assert_close(&lse, &expected_lse, 0.0, &what);
    assert_close(&scaled_dot_product_attention_varlen(q, k, v, &sequences, mask, &options)?, &expected, 0.0, &what);
    Ok(())
}

fn every_structural_mask_holds_for_each_sequence_by_itself(device: &Device) -> Result<()> {
    for &dtype in dtypes(device) {
        let qkv = qkv(dtype, device)?;
        for mask in masks() {
            check(&qkv, &mask, &SdpaOptions::default())?;
        }
    }
    Ok(())
}

fn every_option_holds_for_each_sequence_by_itself(device: &Device) -> Result<()> {
    let heads = Tensor::new(&[0.5f32, 0.25, -1.0, 2.0], device)?;
    let plain = SdpaOptions::default;
    let options = [
        plain().with_scale(-0.7),
        plain().with_softcap(0.8),
        plain().with_alibi_slopes(&heads),
        plain().with_sinks(&heads),
        plain().with_scale(2.0).with_softcap(1.5).with_alibi_slopes(&heads).with_sinks(&heads),
        plain().with_dropout(1.0, true),
    ];
    for &dtype in dtypes(device) {
        let qkv = qkv(dtype, device)?;
        for (n, options) in options.iter().enumerate() {
            // Joined masks that count from different positions leave ALiBi none.
            let agree = |mask: &Packed| {
                ![2, 4].contains(&n)
                    || !mask.masks.iter().any(|mask| mask.alignment == UpperLeft && mask.parts.len() == 1)
            };
            for mask in masks().into_iter().filter(agree) {
                check(&qkv, &mask, options)?;
            }
        }
    }
    Ok(())
}

/// Every query sees every key of its sequence.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, sequences: &PackedSequences) -> Result<Tensor> {
    scaled_dot_product_attention_varlen(q, k, v, sequences, &AttentionMask::none(), &SdpaOptions::default())
}

/// Columns of one product, and heads before positions.
fn any_strides_are_read(device: &Device) -> Result<()> {
    let lens = [2, 4, 1];
    let sequences = PackedSequences::from_lens(&lens, &lens)?;
    let product = random((7, H + 2 * H_KV, D), DType::F32, device)?;
    let (q, k) = (product.narrow(1, 0, H)?, product.narrow(1, H, H_KV)?);
    let v = random((H_KV, 7, D_V), DType::F32, device)?.transpose(0, 1)?;
    let got = plain(&q, &k, &v, &sequences)?;
    let copies = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let expected = plain(&copies[0], &copies[1], &copies[2], &sequences)?;
    // Products of sums of three, which another layout may take in another order.
    assert_close(&got, &expected, 1e-5, "strides");
    Ok(())
}

fn no_sequences_and_empty_ones_give_what_there_is(device: &Device) -> Result<()> {
    for (lens_q, lens_kv) in [(vec![], vec![]), (vec![0], vec![0]), (vec![0, 0], vec![2, 1]), (vec![2, 1], vec![0, 0])]
    {
        let sequences = PackedSequences::from_lens(&lens_q, &lens_kv)?;
        let (total_q, total_kv) = (sequences.total_queries(), sequences.total_keys());
        let q = random((total_q, H, D), DType::F32, device)?;
        let k = random((total_kv, H_KV, D), DType::F32, device)?;
        let v = random((total_kv, H_KV, D_V), DType::F32, device)?;
        let (context, lse) = {
            let (mask, options) = (AttentionMask::none(), SdpaOptions::default());
            scaled_dot_product_attention_varlen_with_lse(&q, &k, &v, &sequences, &mask, &options)?
        };
        assert_eq!((context.dims(), lse.dims()), ([total_q, H, D_V].as_slice(), [H, total_q].as_slice()));
        assert!(values(&context).iter().all(|&x| x == 0.0) && values(&lse).iter().all(|&x| x == f64::NEG_INFINITY));
    }
    Ok(())
}

fn a_sequence_that_is_no_number_reaches_no_other(device: &Device) -> Result<()> {
    let sequences = PackedSequences::self_attention(vec![0, 2, 5, 6])?;
    let qkv = random((6, H, D), DType::F32, device)?;
    let nan = Tensor::full(f32::NAN, (3, H, D), device)?;
    let mixed = Tensor::cat(&[&qkv.narrow(0, 0, 2)?, &nan, &qkv.narrow(0, 5, 1)?], 0)?;
    let expected = plain(&qkv, &qkv, &qkv, &sequences)?;
    let got = plain(&mixed, &mixed, &mixed, &sequences)?;
    for (start, len) in [(0, 2), (5, 1)] {
        assert_close(&got.narrow(0, start, len)?, &expected.narrow(0, start, len)?, 0.0, "the others");
    }
    assert!(values(&got.narrow(0, 2, 3)?).iter().all(|x| x.is_nan()));
    Ok(())
}

fn gradients_flow_to_the_sequences_that_are_read(device: &Device) -> Result<()> {
    let dtype = if device.is_metal() { DType::F32 } else { DType::F64 };
    let plain = qkv(dtype, device)?;
    let vars = [Var::from_tensor(&plain[0])?, Var::from_tensor(&plain[1])?, Var::from_tensor(&plain[2])?];
    let heads = Var::from_tensor(&Tensor::new(&[0.5f32, 0.25, -1.0, 2.0], device)?)?;
    let options = SdpaOptions::default().with_alibi_slopes(&heads).with_sinks(&heads);
    let tracked: [Tensor; 3] = std::array::from_fn(|n| vars[n].as_tensor().clone());
    let (sequences, causal) = (sequences(), AttentionMask::causal());
    let factors = random((sequences.total_queries(), H, D_V), dtype, device)?;
    let [q, k, v] = &tracked;
    let packed = scaled_dot_product_attention_varlen(q, k, v, &sequences, &causal, &options)?;
    let packed = (packed * &factors)?.sum_all()?.backward()?;
    let of_each = Packed { masks: vec![Mask::new(Causal, [])], empty_rows: EmptyRows::Zero };
    let (apart, _) = one_by_one(&tracked, &sequences, &of_each, &options)?;
    let apart = (apart * &factors)?.sum_all()?.backward()?;
    let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-4 };
    for (name, var) in ["q", "k", "v", "heads"].into_iter().zip(vars.iter().chain([&heads])) {
        let (got, expected) = (packed.get(var).expect("a gradient"), apart.get(var).expect("a gradient"));
        assert!(values(expected).iter().any(|&x| x != 0.0), "{name}");
        assert_close(got, expected, tolerance, name);
    }
    // Keys that no query is packed with have none.
    let unseen = sequences.keys(2);
    let gradient = packed.get(&vars[1]).expect("a gradient").narrow(0, unseen.start, unseen.len())?;
    assert!(values(&gradient).iter().all(|&x| x == 0.0));
    Ok(())
}

/// f64 has the reference path only.
fn a_fused_kernel_that_is_not_there_is_an_error(device: &Device) -> Result<()> {
    // Metal has no f64.
    let [q, k, v] = if device.is_metal() { return Ok(()) } else { qkv(DType::F64, device)? };
    let (sequences, options) = (sequences(), SdpaOptions::default().with_backend(Backend::Fused));
    let error =
        error_text(scaled_dot_product_attention_varlen(&q, &k, &v, &sequences, &AttentionMask::none(), &options));
    assert!(error.starts_with("[scaled_dot_product_attention_varlen] no fused path: "), "{error}");
    assert!(error.contains("F64"), "{error}");
    Ok(())
}
