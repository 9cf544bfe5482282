//! Biases by distance against the same numbers as a mask's bias (B, H, T_q, T_kv), on both paths.

use candle_attention::{
    AttentionMask, Backend, PackedSequences, SdpaOptions, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_varlen, scaled_dot_product_attention_with_lse,
};
use candle_core::{D, DType, Device, Result, Tensor, Var};

use crate::common::{assert_close, error_text};

/// The bias of every pair of (.., H, T_q + T_kv - 1) biases by distance.
fn by_pair(biases: &Tensor, t_q: usize, t_kv: usize) -> Result<Tensor> {
    let rows = (0..t_q).map(|i| biases.narrow(D::Minus1, t_q - 1 - i, t_kv)).collect::<Result<Vec<_>>>()?;
    let bias = Tensor::stack(&rows, biases.rank() - 1)?;
    if bias.rank() == 3 { bias.unsqueeze(0) } else { Ok(bias) }
}

fn normal(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)
}

#[test]
fn a_distance_bias_is_a_bias_of_the_same_numbers() -> Result<()> {
    let causal = AttentionMask::causal().with_window(30);
    for (b, h, h_kv, t_q, t_kv) in [(2, 4, 2, 70, 90), (1, 3, 3, 64, 64), (3, 2, 1, 1, 50), (2, 2, 2, 5, 3)] {
        for (shared, mask) in [(true, AttentionMask::none()), (false, causal.clone())] {
            let [q, k] = [normal(&[b, h, t_q, 8])?, normal(&[b, h_kv, t_kv, 8])?];
            let batch = if shared { vec![] } else { vec![b] };
            let biases = normal(&[batch, vec![h, t_q + t_kv - 1]].concat())?;
            let expected_mask = mask.clone().with_bias(&by_pair(&biases, t_q, t_kv)?);
            for backend in [Backend::Fused, Backend::Reference] {
                let options = SdpaOptions::default().with_backend(backend).with_softcap(3.0);
                let (expected, expected_lse) =
                    scaled_dot_product_attention_with_lse(&q, &k, &k, &expected_mask, &options)?;
                let options = options.with_distance_bias(&biases);
                let (found, lse) = scaled_dot_product_attention_with_lse(&q, &k, &k, &mask, &options)?;
                assert_close(&found, &expected, 1e-5, &format!("{backend:?}"));
                assert_close(&lse, &expected_lse, 1e-5, &format!("{backend:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_of_a_distance_bias_are_sums_along_diagonals() -> Result<()> {
    let (b, h, t_q, t_kv) = (2, 4, 33, 40);
    let [q, k] = [normal(&[b, h, t_q, 8])?, normal(&[b, 2, t_kv, 8])?];
    for shape in [vec![h, t_q + t_kv - 1], vec![b, h, t_q + t_kv - 1]] {
        let biases = Var::from_tensor(&normal(&shape)?)?;
        let (q, k) = (Var::from_tensor(&q)?, Var::from_tensor(&k)?);
        let mask = AttentionMask::causal();
        let run = |options: &SdpaOptions, mask: &AttentionMask| -> Result<[Tensor; 3]> {
            let context = scaled_dot_product_attention(&q, &k, &k, mask, options)?;
            let gradients = context.sqr()?.sum_all()?.backward()?;
            let of = |var: &Var| gradients.get(var).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"));
            Ok([of(&biases)?, of(&q)?, of(&k)?])
        };
        let by_pair = mask.clone().with_bias(&by_pair(&biases, t_q, t_kv)?);
        let expected = run(&SdpaOptions::default().with_backend(Backend::Reference), &by_pair)?;
        for backend in [Backend::Fused, Backend::Reference] {
            let options = SdpaOptions::default().with_backend(backend).with_distance_bias(&biases);
            assert_eq!(plan(&q, &k, &k, &mask, &options)?.backend, backend);
            for (found, expected) in run(&options, &mask)?.iter().zip(&expected) {
                assert_close(found, expected, 1e-4, &format!("{backend:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn packed_sequences_read_their_part_of_a_distance_bias() -> Result<()> {
    let (h, mask) = (2, AttentionMask::causal());
    for (lens_q, lens_kv) in [([5, 0, 9, 1], [5, 0, 9, 1]), ([3, 2, 4, 20], [7, 2, 1, 20])] {
        let sequences = PackedSequences::from_lens(&lens_q, &lens_kv)?;
        let (t_q, t_kv) = (*lens_q.iter().max().expect("four"), *lens_kv.iter().max().expect("four"));
        let biases = normal(&[h, t_q + t_kv - 1])?;
        let [q, k] = [normal(&[sequences.total_queries(), h, 8])?, normal(&[sequences.total_keys(), h, 8])?];
        for backend in [Backend::Fused, Backend::Reference] {
            let options = SdpaOptions::default().with_backend(backend);
            let whole = options.clone().with_distance_bias(&biases);
            let found = scaled_dot_product_attention_varlen(&q, &k, &k, &sequences, &mask, &whole)?;
            for s in (0..4).filter(|&s| lens_q[s] > 0) {
                let of = |xs: &Tensor, rows: std::ops::Range<usize>| xs.narrow(0, rows.start, rows.len());
                let [own_q, own_k] = [of(&q, sequences.queries(s))?, of(&k, sequences.keys(s))?];
                let [own_q, own_k] = [own_q.transpose(0, 1)?, own_k.transpose(0, 1)?];
                let part = biases.narrow(1, t_q - lens_q[s], lens_q[s] + lens_kv[s] - 1)?;
                let options = options.clone().with_distance_bias(&part);
                let expected = scaled_dot_product_attention(&own_q, &own_k, &own_k, &mask, &options)?;
                assert_close(
                    &of(&found, sequences.queries(s))?,
                    &expected.transpose(0, 1)?,
                    1e-5,
                    &format!("{backend:?}"),
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_distance_bias_that_does_not_fit_is_an_error() -> Result<()> {
    let (q, mask) = (normal(&[2, 3, 4, 8])?, AttentionMask::none());
    let text = |biases: &Tensor| {
        error_text(scaled_dot_product_attention(&q, &q, &q, &mask, &SdpaOptions::default().with_distance_bias(biases)))
    };
    let found = text(&normal(&[3, 8])?);
    assert!(found.contains("distance_bias has shape [3, 8], expected (H = 3, T_q + T_kv - 1 = 7)"), "{found}");
    let found = text(&Tensor::zeros((3, 7), DType::U32, &Device::Cpu)?);
    assert!(found.contains("distance_bias has dtype U32, expected F32, F16, BF16 or F64"), "{found}");
    Ok(())
}
