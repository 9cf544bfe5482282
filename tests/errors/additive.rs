//! `AdditiveAttention`.

use candle_attention::AdditiveAttentionConfig as Config;
use candle_attention::weights;

use crate::common::models;
use crate::wrong::{Fitting, Shapes};
use crate::*;

/// Queries of width 4, keys of width 3, 5 hidden units.
fn base() -> Config {
    Config::new(4, 3, 5)
}

fn new(cfg: Config) -> Result<AdditiveAttention> {
    AdditiveAttention::new(&cfg, any_weights())
}

fn masked(t_q: usize, mask: AttentionMask) -> Result<Tensor> {
    new(base())?.forward(&zeros((1, t_q, 4)), &zeros((1, 6, 3)), &zeros((1, 6, 7)), &mask)
}

#[test]
fn additive_attention() {
    let cases = cases! {
        "lengths for another batch, with no queries" => masked(0, AttentionMask::none().with_valid_lens(vec![1, 2])),
        "a keep for several heads" => masked(2, AttentionMask::none().with_keep(&of(DType::U8, (1, 4, 2, 6)))),
        "more scores than fit in memory" => {
            let wide = |width| zeros((1, 1, width)).broadcast_as((1, 1 << 20, width));
            new(base())?.forward(&wide(4)?, &wide(3)?, &wide(7)?, &AttentionMask::causal())
        },
        "queries of no width" => new(Config::new(0, 3, 5)),
        "no hidden units" => new(Config::new(4, 3, 0)),
        "sizes beyond memory" => new(Config::new(4, u32::MAX as usize, u32::MAX as usize)),
        "a size beyond a shape" => new(Config::new(4, usize::MAX, 5)),
        "dropout in percent" => new(base().with_dropout(10.0)),
        "integer weights" => AdditiveAttention::new(&base(), VarBuilder::zeros(DType::U8, &CPU)),
        "the weights of a multi-head layer" => {
            let vb = weights::open(models().join("d2l_mha_100/model.safetensors"), DType::F32, &CPU)?;
            AdditiveAttention::new(&Config::new(100, 100, 100), vb)
        },
        "an unknown field" =>
            serde_json::from_str::<Config>(r#"{"query_size": 4, "key_size": 3, "hidden_size": 5, "bias": true}"#)
                .map_err(candle_core::Error::wrap),
    };
    let f32 = DType::F32;
    let dims: [Fitting; 3] = [("queries", f32, "B T 4"), ("keys", f32, "B S 3"), ("values", f32, "B S V")];
    let inputs = wrong::tensors("B 2 T 2 S 6 V 7", &dims, |tensors| {
        new(base())?.forward(&tensors[0], &tensors[1], &tensors[2], &AttentionMask::none())
    });
    let tensors: [(&str, &[usize]); 3] = [("W_k.weight", &[5, 3]), ("W_q.weight", &[5, 4]), ("w_v.weight", &[1, 5])];
    let (shapes, bias) = (wrong::shapes(&tensors), wrong::shapes(&[("W_q.bias", &[5])]));
    let load = |shapes: &Shapes| AdditiveAttention::new(&base(), wrong::builder(shapes));
    assert_reviewed("additive", &[cases, inputs, wrong::weights(&shapes, load), wrong::surplus(&shapes, &bias, load)]);
}
