//! Tensors on different devices. On a machine with one device these tests say that they were skipped.

use candle_attention::weights::{Naming, Orientation};

use crate::common::{error_text, present};
use crate::*;

/// Everything that meets the tensors of a call is checked for its device, which the error names.
fn check(device: &Device) -> Result<()> {
    let (here, there) = (CPU.location(), device.location());
    let (q, mask, options) = (zeros((1, 2, 3, 4)).to_device(device)?, AttentionMask::none(), SdpaOptions::default());
    let attend = |k, v, mask: &AttentionMask, options: &SdpaOptions| {
        error_text(scaled_dot_product_attention(&q, k, v, mask, options))
    };
    let beside =
        |what: &str| format!("[scaled_dot_product_attention] {what} is on {here:?}, expected it beside q on {there:?}");
    let kv = zeros((1, 2, 5, 4));
    assert_eq!(attend(&kv, &kv, &mask, &options), beside("k"));
    let k = kv.to_device(device)?;
    assert_eq!(attend(&k, &kv, &mask, &options), beside("v"));
    assert_eq!(attend(&k, &k, &mask, &options.clone().with_alibi_slopes(&zeros(2))), beside("alibi_slopes"));
    assert_eq!(attend(&k, &k, &mask, &options.clone().with_sinks(&zeros(2))), beside("sinks"));

    let of_mask =
        |what: &str| format!("[attention_mask] {what} is on {here:?}, expected it beside the queries on {there:?}");
    let keep = AttentionMask::none().with_keep(&of(DType::U8, (3, 5)));
    assert_eq!(attend(&k, &k, &keep, &options), of_mask("keep"));
    let bias = AttentionMask::none().with_bias(&zeros((3, 5)));
    assert_eq!(attend(&k, &k, &bias, &options), of_mask("bias"));

    let lse = zeros((1, 2, 3));
    let parts = [(q.clone(), lse.to_device(device)?), (zeros((1, 2, 3, 4)), lse)];
    let expected = format!("[merge_attention] part 1 is not on {there:?} with the first");
    assert_eq!(error_text(merge_attention(&parts)), expected);

    let layout = WeightLayout::Raw(Naming::Book, Orientation::OutIn);
    let vb = VarBuilder::zeros(DType::F32, device);
    let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::new(8, 2), layout, vb)?;
    let (xs, ys) = (zeros((1, 3, 8)), zeros((1, 3, 8)).to_device(device)?);
    let of_layer = |what: &str| {
        format!("[multi_head_attention] {what} are on {here:?}, expected them beside the weights on {there:?}")
    };
    assert_eq!(error_text(layer.forward(&xs)), of_layer("queries"));
    assert_eq!(error_text(layer.forward_with(AttentionInput::new(&ys).with_key_value(&xs, &ys))), of_layer("keys"));
    assert_eq!(error_text(layer.forward_with(AttentionInput::new(&ys).with_key_value(&ys, &xs))), of_layer("values"));
    Ok(())
}

#[test]
fn tensors_beside_those_on_cuda_are_named() -> Result<()> {
    present("CUDA", Device::new_cuda(0)).map_or(Ok(()), |device| check(&device))
}

#[test]
fn tensors_beside_those_on_metal_are_named() -> Result<()> {
    present("Metal", Device::new_metal(0)).map_or(Ok(()), |device| check(&device))
}
