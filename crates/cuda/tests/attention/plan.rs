//! The choice of kernels, and the reasons against them.

use candle_attention_cuda::{
    BoundedKeys, CudaCall, FirstPosition, ForwardKernel, OutputLayout, PerInput, RequestedGradients, ScoreModifiers,
};
use candle_attention_cuda::{KvCodeFormat, KvPages, KvScales, is_available};
use candle_core::{DType, Device, Result, Tensor};

use super::case::{FEW_QUERIES, MANY_QUERIES, Sizes, integers, numbers, plan, plan_backward};

/// Checks that a call has no kernel, for a reason that contains a text.
fn check_reason(call: &CudaCall, expected: &str) {
    let reason = plan(call).expect_err("a reason");
    assert!(reason.reason().contains(expected), "{reason}");
}

#[test]
fn kernels_are_named_in_plain_words() -> Result<()> {
    let few = plan(&FEW_QUERIES.call(DType::F32)?).expect("a kernel");
    assert_eq!(few.to_string(), "the CUDA decode kernel with the keys in 2 parts");
    assert_eq!(plan(&MANY_QUERIES.call(DType::F32)?), Ok(ForwardKernel::Forward));
    assert_eq!(ForwardKernel::Forward.to_string(), "the CUDA forward kernel");
    assert_eq!(is_available(&Device::Cpu), Ok(()));
    Ok(())
}

/// Checks tables of pages for a call of two sequences of 90 keys.
fn check_reasons_of_pages(call: &CudaCall) -> Result<()> {
    let pool = |seed, width| numbers(seed, &[12, 2, 16, width], DType::F32);
    let pools = CudaCall { k: pool(2, 16)?, v: pool(3, 32)?, ..call.clone() };
    let with_table = |table: Tensor, page_size| {
        let pages = Some(KvPages { table, page_size });
        CudaCall { pages, ..pools.clone() }
    };
    let table = |dims: (usize, usize), dtype| Tensor::zeros(dims, dtype, &Device::Cpu);
    assert_eq!(plan(&with_table(table((2, 6), DType::I32)?, 16)), plan(call));
    let narrow = with_table(table((2, 5), DType::I32)?, 16);
    check_reason(&narrow, "the table of pages has shape [2, 5], expected (2, 6 or more)");
    check_reason(&with_table(table((2, 6), DType::U32)?, 16), "the table of pages is U32, expected I32");
    check_reason(&with_table(table((2, 6), DType::I32)?, 12), "a page has 12 keys, expected a power of two");
    check_reason(&with_table(table((2, 6), DType::I32)?, 8), "k has shape [12, 2, 16, 16], expected [12, 2, 8, 16]");
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_are_a_reason() -> Result<()> {
    let call = MANY_QUERIES.call(DType::F32)?;
    let narrow = call.k.narrow(3, 0, 8)?;
    check_reason(&CudaCall { k: narrow, ..call.clone() }, "k has shape [2, 2, 90, 8], expected [2, 2, 90, 16]");
    check_reason(&CudaCall { k: call.k.to_dtype(DType::F16)?, ..call.clone() }, "k is F16, expected F32");
    check_reason(&Sizes { d: 300, ..MANY_QUERIES }.call(DType::F32)?, "expected at most 256");
    check_reason(&MANY_QUERIES.call(DType::F64)?, "q is F64, expected f16, bf16 or f32");
    check_reason(&Sizes { t_kv: 0, ..MANY_QUERIES }.call(DType::F32)?, "the call is empty");
    check_reasons_of_pages(&call)?;
    check_reason(&Sizes { h: 3, ..MANY_QUERIES }.call(DType::F32)?, "which does not divide the 3 of q");
    let v = numbers(3, &[2, 2, 32, 90], DType::F32)?.transpose(2, 3)?;
    check_reason(&CudaCall { v, ..call }, "the last dimension of v is not contiguous");
    Ok(())
}

#[test]
fn bounds_of_keys_that_do_not_fit_are_a_reason() -> Result<()> {
    let with_keys = |keys| -> Result<_> { Ok(CudaCall { keys, ..MANY_QUERIES.call(DType::F32)? }) };
    let default = BoundedKeys::default;
    let lengths = Some(integers(&[1, 2, 3])?);
    check_reason(&with_keys(BoundedKeys { lengths, ..default() })?, "lengths has shape [3], expected 2 entries");
    let starts = Some(Tensor::new(&[1u32, 2], &Device::Cpu)?);
    check_reason(&with_keys(BoundedKeys { starts, ..default() })?, "starts is U32, expected I32");
    let first_position = FirstPosition::Same(i32::MIN);
    check_reason(&with_keys(BoundedKeys { first_position, ..default() })?, "the position of query 0 is -2147483648");
    check_reason(
        &with_keys(BoundedKeys { chunk: Some(0), ..default() })?,
        "the chunk has 0 positions, expected at least 1",
    );
    Ok(())
}

#[test]
fn score_modifiers_that_do_not_fit_are_a_reason() -> Result<()> {
    let call = MANY_QUERIES.call(DType::F32)?;
    let with = |scores| CudaCall { scores, ..call.clone() };
    let scores = || call.scores.clone();
    let bias = Some(numbers(6, &[2, 4, 70, 89], DType::F32)?);
    check_reason(&with(ScoreModifiers { bias, ..scores() }), "the bias has shape [2, 4, 70, 89]");
    let relative_bias = Some(numbers(6, &[1, 4, 160], DType::F32)?);
    check_reason(&with(ScoreModifiers { relative_bias, ..scores() }), "expected (2 or 1, 4, 159)");
    let sinks = Some(numbers(6, &[4], DType::F16)?);
    check_reason(&with(ScoreModifiers { sinks, ..scores() }), "sinks is F16, expected F32");
    check_reason(
        &with(ScoreModifiers { softcap: Some(0.0), ..scores() }),
        "softcap is 0.0, expected a finite number above zero in F32",
    );
    check_reason(
        &with(ScoreModifiers { scale: f64::NAN, ..scores() }),
        "scale is NaN, expected a finite number in F32",
    );
    Ok(())
}

#[test]
fn keys_of_codes_have_no_backward_kernel_and_whole_blocks() -> Result<()> {
    let call = MANY_QUERIES.call(DType::F32)?;
    let codes = |tensor: &Tensor| tensor.affine(100.0, 128.0)?.to_dtype(DType::U8);
    let scales = numbers(6, &[2, 2, 90, 1], DType::F32)?;
    let (k, v) = (codes(&call.k)?, codes(&call.v)?);
    let call =
        CudaCall { k, v, kv_scales: Some(KvScales { format: KvCodeFormat::Q8, k: scales.clone(), v: scales }), ..call };
    let of_4_bits = call.kv_scales.clone().map(|of_8_bits| KvScales { format: KvCodeFormat::Q4, ..of_8_bits });
    check_reason(
        &CudaCall { kv_scales: of_4_bits, ..call.clone() },
        "a row has 16 numbers in codes of 4 bits, expected a multiple of 32",
    );
    let reason = plan_backward(
        &call,
        RequestedGradients { layout: OutputLayout::Bhtd, of: PerInput { q: true, ..PerInput::default() } },
    );
    assert_eq!(reason.expect_err("a reason").reason(), "keys and values of 8 bits have no gradients");
    Ok(())
}
