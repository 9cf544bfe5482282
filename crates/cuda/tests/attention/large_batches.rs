//! More sequences, and more queries with a broadcast bias, than CUDA has blocks in the second and third dimension of a
//! grid.

use candle_attention_cuda::{
    AttentionDims, ConvolutionCall, CudaCall, OutputLayout, PerInput, RequestedGradients, ScoreModifiers,
};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Tensor};

use super::case::{ALL, FEW_QUERIES, plan, plan_backward};

/// More than the 65,535 blocks of the second and third dimension.
const MANY: usize = 65_600;

/// Returns a call whose tensors repeat one row.
fn call_of_repeated_rows(batch: usize, queries: usize, keys: usize) -> Result<CudaCall> {
    let row = Tensor::zeros((1, 1, 1, 16), DType::F32, &Device::Cpu)?;
    let call = FEW_QUERIES.call(DType::F32)?;
    Ok(CudaCall {
        dims: AttentionDims { b: batch, h: 2, h_kv: 1, t_q: queries, t_kv: keys, d: 16, d_v: 16 },
        q: row.broadcast_as((batch, 2, queries, 16))?,
        k: row.broadcast_as((batch, 1, keys, 16))?,
        v: row.broadcast_as((batch, 1, keys, 16))?,
        ..call
    })
}

#[test]
fn calls_of_many_sequences_or_biases_have_kernels() -> Result<()> {
    for (batch, queries, keys) in [(MANY, 1, 9), (MANY, 70, 90), (1, 30 * MANY, 3), (4 * MANY, 3, 600)] {
        let call = call_of_repeated_rows(batch, queries, keys)?;
        let bias = Tensor::zeros((1, 1, 1, keys), DType::F32, &Device::Cpu)?.broadcast_as((1, 2, queries, keys))?;
        let scores = ScoreModifiers { bias: Some(bias), ..call.scores.clone() };
        let call = CudaCall { scores, ..call };
        let what = format!("{batch} sequences of {queries} queries and {keys} keys");
        assert!(plan(&call).is_ok(), "{what}: {:?}", plan(&call));
        assert!(plan_backward(&call, ALL).is_ok(), "{what}: {:?}", plan_backward(&call, ALL));
    }
    Ok(())
}

#[test]
fn call_of_more_blocks_than_a_grid_has_is_a_reason() -> Result<()> {
    let call = call_of_repeated_rows(1 << 20, 1 << 18, 1 << 18)?;
    let reason = plan(&call).expect_err("a reason");
    assert!(reason.reason().contains("blocks, expected at most 2147483647 in all"), "{reason}");
    let wanted = RequestedGradients { layout: OutputLayout::Bhtd, of: PerInput { q: true, ..PerInput::default() } };
    let backward_reason = plan_backward(&call, wanted).expect_err("a reason");
    assert!(backward_reason.reason().contains("blocks, expected at most 2147483647 in all"), "{backward_reason}");
    Ok(())
}

/// Runs the kernel with the fewest threads of an entry.
#[test]
fn convolution_of_65600_entries_matches_taps() -> Result<()> {
    let xs: Vec<f32> = (0..MANY).map(|entry| (entry % 1000) as f32 / 100.0 - 5.0).collect();
    let call = ConvolutionCall {
        xs: Tensor::new(xs.as_slice(), &Device::Cpu)?.reshape((MANY, 1, 1))?,
        taps: Tensor::new(&[[3f32], [0.5]], &Device::Cpu)?,
        state: None,
        cumulative_tokens: None,
    };
    let output = Tensor::from_storage(call.forward(false)?.output, (MANY,), BackpropOp::none(), false);
    for (entry, (found, x)) in output.to_vec1::<f32>()?.into_iter().zip(xs).enumerate() {
        let sum = x * 0.5;
        let expected = sum / (1.0 + (-sum).exp());
        assert!((found - expected).abs() < 1e-5, "entry {entry}: {found}, expected {expected}");
    }
    Ok(())
}
