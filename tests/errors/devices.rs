//! Tensors on different devices.

use candle_attention::cpu::InstructionSet;
use candle_core::Module;

use crate::common::error_text;
use crate::*;

crate::on_each_accelerator!(tensors_on_another_device_are_rejected, f64_on_metal_is_refused_by_name);

/// Checks that the error names both devices, for every tensor that is on the wrong one.
fn tensors_on_another_device_are_rejected(device: &Device) -> Result<()> {
    let here = CPU.location();
    let there = device.location();
    let q = zeros((1, 2, 3, 4)).to_device(device)?;
    let kv = zeros((1, 2, 5, 4));
    let none = AttentionMask::none();
    let k = kv.to_device(device)?;
    let options = SdpaOptions::default;
    let attend = |keys: &Tensor, values: &Tensor, mask: &AttentionMask, with: SdpaOptions| {
        error_text(scaled_dot_product_attention(&q, keys, values, mask, &with))
    };
    let keep = AttentionMask::none().with_bool_mask(&of(DType::U8, (3, 5)));
    let bias = AttentionMask::none().with_bias(&zeros((3, 5)));
    let lse = zeros((1, 2, 3));
    let parts = [(q.clone(), lse.to_device(device)?), (zeros((1, 2, 3, 4)), lse)];
    let layer = MultiHeadAttention::new(&Config::new(8, 2), VarBuilder::zeros(DType::F32, device))?;
    let xs = zeros((1, 3, 8));
    let ys = zeros((1, 3, 8)).to_device(device)?;
    let cross = |keys, values| error_text(layer.forward_with(AttentionInput::new(&ys).with_key_value(keys, values)));
    let sdpa =
        |what| format!("[scaled_dot_product_attention] {what} is on {here:?}, expected the device of q, {there:?}");
    let mask = |what| format!("[attention_mask] {what} is on {here:?}, expected the device of the queries, {there:?}");
    let of_layer =
        |what| format!("[multi_head_attention] {what} are on {here:?}, expected the device of the weights, {there:?}");
    let weight = zeros((3, 4));
    let xs_of_4 = zeros((2, 4));
    let elsewhere = PackedLinear::new(&weight.to_device(device)?, None)?;
    let input =
        |one, other| format!("[packed_linear] input is on {one:?}, expected the device of the weight, {other:?}");
    let merge = format!(
        "[merge_attention] the output of part 1 is on {here:?}, expected the device of the first part, {there:?}"
    );
    for (found, expected) in [
        (attend(&kv, &kv, &none, options()), sdpa("k")),
        (attend(&k, &kv, &none, options()), sdpa("v")),
        (attend(&k, &k, &none, options().with_alibi_slopes(&zeros(2))), sdpa("alibi_slopes")),
        (attend(&k, &k, &none, options().with_sinks(&zeros(2))), sdpa("sinks")),
        (attend(&k, &k, &keep, options()), mask("bool_mask")),
        (attend(&k, &k, &bias, options()), mask("bias")),
        (error_text(merge_attention(&parts)), merge),
        (error_text(layer.forward(&xs)), of_layer("queries")),
        (cross(&xs, &ys), of_layer("keys")),
        (cross(&ys, &xs), of_layer("values")),
        (error_text(elsewhere.forward(&xs_of_4)), input(here, there)),
        (error_text(PackedLinear::new(&weight, None)?.forward(&xs_of_4.to_device(device)?)), input(there, here)),
        (
            error_text(PackedLinear::new(&weight.to_device(device)?, Some(&zeros(3)))),
            format!("[packed_linear] bias is on {here:?}, expected the device of the weight, {there:?}"),
        ),
        (
            error_text(PackedLinear::with_instruction_set(
                &weight.to_device(device)?,
                None,
                Some(InstructionSet::Scalar),
            )),
            format!(
                "[packed_linear] a weight in F32 on {there:?} is not packed, expected no instruction set, found scalar"
            ),
        ),
    ] {
        assert_eq!(found, expected);
    }
    assert!(!elsewhere.is_packed());
    let ones = Tensor::ones((2, 4), DType::F32, device)?;
    let product = PackedLinear::new(&ones, None)?.forward(&ones)?;
    assert_eq!(product.to_vec2::<f32>()?, [[4.0; 2]; 2]);
    Ok(())
}

/// Checks what would compute in f64, which Metal does not have; CUDA does.
fn f64_on_metal_is_refused_by_name(device: &Device) -> Result<()> {
    if !device.is_metal() {
        return Ok(());
    }
    let vb = || VarBuilder::zeros(DType::F64, device);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F64, device);
    let q = zeros(&[1, 2, 3, 4])?;
    let lse = zeros(&[1, 2, 3])?;
    let none = AttentionMask::none();
    let attend = |options: &SdpaOptions| error_text(scaled_dot_product_attention(&q, &q, &q, &none, options));
    let in_f32 = Tensor::zeros((1, 2, 3, 4), DType::F32, device)?;
    let bias = none.clone().with_bias(&zeros(&[3, 3])?);
    let of_bias = error_text(scaled_dot_product_attention(&in_f32, &in_f32, &in_f32, &bias, &SdpaOptions::default()));
    let layer = MultiHeadAttention::new(&Config::new(8, 2), VarBuilder::zeros(DType::F32, device))?;
    let xs = Tensor::zeros((1, 3, 8), DType::F32, device)?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_dtype(DType::F64))?;
    let of_cache = error_text(layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache)));
    let builder = |op| format!("[{op}] the builder returns weights as F64, expected F32, F16 or BF16 on Metal");
    let dtype = |op, what| format!("[{op}] {what} has dtype F64, expected F32, F16 or BF16 on Metal");
    let delta_cfg = GatedDeltaNetConfig::new(8, 2);
    for (found, expected) in [
        (attend(&SdpaOptions::default()), dtype("scaled_dot_product_attention", "q")),
        (error_text(merge_attention(&[(q.clone(), lse)])), dtype("merge_attention", "the output")),
        (error_text(PackedLinear::new(&zeros(&[3, 4])?, None)), dtype("packed_linear", "weight")),
        (error_text(MultiHeadAttention::new(&Config::new(8, 2), vb())), builder("multi_head_attention")),
        (error_text(GatedDeltaNet::load(&delta_cfg, DeltaLayout::Separate, vb())), builder("gated_delta_net")),
        (error_text(rms_norm(8, 1e-6, vb())), builder("rms_norm")),
        (of_cache, "[attention_cache] dtype is F64, expected F32, F16 or BF16 on Metal".into()),
        (
            of_bias,
            "[attention_mask] bias has dtype F64, expected F32, F16 or BF16 on Metal; a mask of ones and zeros is \
             for `with_bool_mask`"
                .into(),
        ),
        (
            error_text(none.to_additive((1, 1, 3, 3), DType::F64, device)),
            "[attention_mask] an additive mask in F64, expected F32, F16 or BF16 on Metal".into(),
        ),
    ] {
        assert_eq!(found, expected);
    }
    Ok(())
}
