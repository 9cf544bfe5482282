//! Tensors on different devices.

use candle_attention::cpu::InstructionSet;
use candle_core::Module;

use crate::common::error_text;
use crate::*;

crate::on_each_accelerator!(tensors_on_another_device_are_rejected);

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
    for (found, expected) in [
        (attend(&kv, &kv, &none, options()), sdpa("k")),
        (attend(&k, &kv, &none, options()), sdpa("v")),
        (attend(&k, &k, &none, options().with_alibi_slopes(&zeros(2))), sdpa("alibi_slopes")),
        (attend(&k, &k, &none, options().with_sinks(&zeros(2))), sdpa("sinks")),
        (attend(&k, &k, &keep, options()), mask("bool_mask")),
        (attend(&k, &k, &bias, options()), mask("bias")),
        (error_text(merge_attention(&parts)), format!("[merge_attention] part 1 is not on {there:?} with the first")),
        (error_text(layer.forward(&xs)), of_layer("queries")),
        (cross(&xs, &ys), of_layer("keys")),
        (cross(&ys, &xs), of_layer("values")),
        (error_text(elsewhere.forward(&xs_of_4)), input(here, there)),
        (error_text(PackedLinear::new(&weight, None)?.forward(&xs_of_4.to_device(device)?)), input(there, here)),
        (
            error_text(PackedLinear::new(&weight.to_device(device)?, Some(&zeros(3)))),
            format!("[packed_linear] bias is F32 on {here:?}, expected the weight's F32 on {there:?}"),
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
