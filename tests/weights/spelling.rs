//! The spellings of weight layouts: each is unique and parses back.

use std::collections::HashSet;

use candle_attention::WeightLayout;
use candle_core::Result;

/// The spellings in the documentation of [`WeightLayout`].
const DOCUMENTED: &str = "canonical book short d2l bert vit distilbert opt phi t5 meta diffusers x-transformers mingpt \
    raw:book raw:short raw:d2l raw:canonical raw-transposed:book stacked:book stacked-raw:short \
    stacked-raw-transposed:short torch conv1d packed:qkv_proj packed:Wqkv packed:Wqkv-Wo packed:query_key_value \
    packed:query_key_value:by-head packed:c_attn packed:c_attn:by-head packed:qkv packed:to_qkv packed:to_qkv-to_out.0 \
    packed:qkv_proj:by-head mlx torchtune flax keras keras-h5 dense:canonical dense:t5 in-out:book raw:mingpt \
    stacked:mingpt";

#[test]
fn layout_names_are_unique_and_parse_back() -> Result<()> {
    let all = WeightLayout::all();
    let spellings: HashSet<_> = all.iter().map(ToString::to_string).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    assert_eq!(spellings.len(), all.len());
    for spelling in spellings.iter().map(String::as_str).chain(DOCUMENTED.split_whitespace()) {
        assert_eq!(spelling.parse::<WeightLayout>()?.to_string(), spelling);
    }
    Ok(())
}

#[test]
fn layout_named_after_a_model_is_refused_with_the_layout_of_the_model() {
    for (model, layout) in [
        ("llama", "`canonical`"),
        ("Mistral", "`canonical`"),
        ("gpt2", "`conv1d`"),
        ("nanogpt", "`packed:c_attn`"),
        ("jax", "`flax`"),
        ("pytorch", "`torch`"),
    ] {
        let error = model.parse::<WeightLayout>().expect_err(model).to_string();
        assert!(error.contains(model) && error.contains(layout), "{error}");
    }
}
