//! No rows, no inputs, no outputs, no columns.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{Module, Result, Tensor};

use crate::common::values;
use crate::linear::case::{CPU, TYPES};

#[test]
fn sums_of_nothing_are_the_bias_or_zeros() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let bias = Tensor::arange(1f32, 6., &CPU)?.to_dtype(of_weight)?;
        for dims in [vec![0], vec![3, 0], vec![2, 3, 0], vec![2, 0, 4, 0]] {
            let xs = Tensor::zeros(dims.as_slice(), of_input, &CPU)?;
            let rows = dims[..dims.len() - 1].iter().product();
            let mut out = dims.clone();
            out[dims.len() - 1] = 5;
            for tier in Tier::available() {
                for bias in [None, Some(&bias)] {
                    let packed = PackedLinear::with_tier(&Tensor::zeros((5, 0), of_weight, &CPU)?, bias, Some(tier))?;
                    let ys = packed.forward(&xs)?;
                    let row: Vec<f64> = (1..=5).map(|n| if bias.is_some() { f64::from(n) } else { 0.0 }).collect();
                    assert_eq!((ys.dims(), ys.dtype()), (out.as_slice(), of_input), "{tier}");
                    assert_eq!(values(&ys), vec![row; rows].concat(), "{tier}: {dims:?}");
                    assert_eq!(packed.to_linear()?.weight().dims(), [5, 0]);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn no_rows_no_outputs_and_no_columns_give_nothing() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        for tier in Tier::available() {
            let packed = PackedLinear::with_tier(&Tensor::ones((5, 4), of_weight, &CPU)?, None, Some(tier))?;
            for dims in [vec![0, 4], vec![0, 3, 4], vec![2, 0, 4]] {
                let ys = packed.forward(&Tensor::ones(dims.as_slice(), of_input, &CPU)?)?;
                let mut out = dims.clone();
                out[dims.len() - 1] = 5;
                assert_eq!((ys.dims(), ys.dtype()), (out.as_slice(), of_input), "{tier}");
            }
            for at in [0, 2, 5] {
                let none = packed.forward_columns(&Tensor::ones((2, 3, 4), of_input, &CPU)?, at..at)?;
                assert_eq!((none.dims(), none.dtype()), ([2, 3, 0].as_slice(), of_input), "{tier}: {at}..{at}");
            }
            let bias = Tensor::ones(0, of_weight, &CPU)?;
            let packed = PackedLinear::with_tier(&Tensor::ones((0, 4), of_weight, &CPU)?, Some(&bias), Some(tier))?;
            assert_eq!(packed.forward(&Tensor::ones((3, 4), of_input, &CPU)?)?.dims(), [3, 0], "{tier}");
            assert_eq!(packed.to_linear()?.weight().dims(), [0, 4]);
        }
    }
    Ok(())
}

/// Views of nothing, whose strides and offsets mean nothing: some begin past the end of their buffers.
#[test]
fn views_of_nothing() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let nothing = |dims: (usize, usize)| Tensor::zeros(dims, of_input, &CPU);
        let beyond = |dtype| Tensor::ones((3, 5), dtype, &CPU)?.narrow(1, 5, 0)?.narrow(0, 3, 0);
        let wide = Tensor::ones((3, 5), of_input, &CPU)?;
        for tier in Tier::available() {
            let pack = |weight: &Tensor| PackedLinear::with_tier(weight, None, Some(tier));
            let packed = pack(&Tensor::zeros((2, 0), of_weight, &CPU)?)?;
            for xs in [nothing((0, 7))?.t()?, wide.narrow(1, 5, 0)?, nothing((0, 1))?.broadcast_as((0, 7))?.t()?] {
                let ys = packed.forward(&xs)?;
                assert_eq!((ys.dims()[1], values(&ys)), (2, vec![0.0; 2 * xs.dims()[0]]), "{tier}");
            }
            assert_eq!(packed.forward(&beyond(of_input)?)?.dims(), [0, 2]);
            assert_eq!(pack(&Tensor::ones((2, 5), of_weight, &CPU)?)?.forward(&wide.narrow(0, 3, 0)?)?.dims(), [0, 2]);
            let none = pack(&beyond(of_weight)?)?;
            assert_eq!((none.out_dim(), none.in_dim()), (0, 0));
            let of_transposed = pack(&Tensor::zeros((0, 4), of_weight, &CPU)?.t()?)?;
            assert_eq!(of_transposed.forward(&nothing((3, 0))?)?.dims(), [3, 4]);
        }
    }
    Ok(())
}
