//! Products that give q, k and v, and views of them.

use std::cell::OnceCell;

use candle_core::{DType, Device, Result, Storage, Tensor};
use candle_nn::{VarBuilder, VarMap};

use super::heads::split_heads;
use crate::config::MultiHeadAttentionConfig;
use crate::layer::{AttentionInput, MultiHeadAttention};
use crate::sdpa::{OutputLayout, scaled_dot_product_attention};

const B: usize = 2;
const T: usize = 3;

/// Returns a config of 4 heads of width 3 over 2 key heads with values of width 5, columns 12 + 6 + 10.
fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 4).with_num_kv_heads(2).with_head_dim(3).with_value_head_dim(5)
}

fn layer(cfg: &MultiHeadAttentionConfig) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))
}

fn xs(width: usize) -> Result<Tensor> {
    Tensor::ones((B, T, width), DType::F32, &Device::Cpu)
}

/// Returns the address of a tensor's buffer, the offset of the tensor in it, and its strides.
fn place(tensor: &Tensor) -> (usize, usize, Vec<usize>) {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { panic!("a CPU tensor") };
    let buffer = storage.as_slice::<f32>().expect("f32").as_ptr() as usize;
    (buffer, layout.start_offset(), layout.stride().to_vec())
}

/// Returns q, k and v of a call without a cache.
fn qkv(layer: &MultiHeadAttention, input: AttentionInput) -> Result<[Tensor; 3]> {
    let given = OnceCell::new();
    layer.forward_with(input.with_function(&|q, k, v, mask, options| {
        given.get_or_init(|| [q, k, v].map(Tensor::clone));
        scaled_dot_product_attention(q, k, v, mask, options)
    }))?;
    Ok(given.into_inner().expect("one call"))
}

#[test]
fn self_attention_reads_columns_of_one_product() -> Result<()> {
    for cfg in [config(), config().with_k_bias(true), config().with_sinks(true).with_causal(true)] {
        let xs = xs(8)?;
        let qkv = qkv(&layer(&cfg)?, AttentionInput::new(&xs))?;
        let [q, k, v] = qkv.each_ref().map(place);
        assert_eq!((q.0, q.0), (k.0, v.0), "one buffer");
        assert_eq!((q.1, k.1, v.1), (0, 12, 18));
        assert_eq!((qkv[0].dims(), q.2), ([B, 4, T, 3].as_slice(), vec![T * 28, 3, 28, 1]));
        assert_eq!((qkv[1].dims(), k.2), ([B, 2, T, 3].as_slice(), vec![T * 28, 3, 28, 1]));
        assert_eq!((qkv[2].dims(), v.2), ([B, 2, T, 5].as_slice(), vec![T * 28, 5, 28, 1]));
    }
    Ok(())
}

#[test]
fn keys_and_values_of_one_input_are_columns_of_one_product() -> Result<()> {
    for kdim in [8, 7] {
        let queries = xs(8)?;
        let keys = xs(kdim)?;
        let input = AttentionInput::new(&queries).with_key_value(&keys, &keys);
        let [q, k, v] = qkv(&layer(&config().with_kdim(kdim))?, input)?.each_ref().map(place);
        assert!(q.0 != k.0 && k.0 == v.0, "one buffer for two");
        assert_eq!((k.1, v.1), (0, 6));
        assert_eq!((k.2, v.2), (vec![T * 16, 3, 16, 1], vec![T * 16, 5, 16, 1]));
    }
    Ok(())
}

#[test]
fn other_inputs_and_variables_have_a_product_each() -> Result<()> {
    let queries = xs(8)?;
    let keys = xs(8)?;
    let values = xs(8)?;
    let crossed = AttentionInput::new(&queries).with_key_value(&keys, &values);
    let trained =
        MultiHeadAttention::new(&config(), VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
    for qkv in [qkv(&layer(&config())?, crossed)?, qkv(&trained, AttentionInput::new(&queries))?] {
        let [q, k, v] = qkv.each_ref().map(place);
        assert!(q.0 != k.0 && q.0 != v.0 && k.0 != v.0);
        assert_eq!([q.1, k.1, v.1], [0; 3]);
    }
    Ok(())
}

#[test]
fn heads_are_merged_without_a_copy() -> Result<()> {
    let layer = layer(&config().with_out_proj(false))?;
    let xs = xs(8)?;
    let call = layer.prepare(&AttentionInput::new(&xs))?;
    assert_eq!(call.options.output_layout, OutputLayout::Bthd);
    let context = Tensor::zeros((B, T, 4, 5), DType::F32, &Device::Cpu)?;
    let merged = (call.output)(&context.transpose(1, 2)?)?;
    assert_eq!((merged.dims(), place(&merged).0), ([B, T, 20].as_slice(), place(&context).0));
    Ok(())
}

/// Compares a view and a copy.
#[test]
fn columns_split_into_heads_in_their_order() -> Result<()> {
    let product = Tensor::arange(0f32, 84., &Device::Cpu)?.reshape((2, 3, 14))?;
    for (start, heads, width) in [(0, 7, 2), (0, 1, 14), (2, 4, 3), (3, 1, 5), (13, 1, 1), (4, 10, 1)] {
        let columns = product.narrow(2, start, heads * width)?;
        let expected = columns.contiguous()?.reshape((2, 3, heads, width))?;
        assert_eq!(
            split_heads(&columns, heads)?.flatten_all()?.to_vec1::<f32>()?,
            expected.flatten_all()?.to_vec1::<f32>()?
        );
        assert_eq!(place(&split_heads(&columns, heads)?).0, place(&product).0);
    }
    Ok(())
}
