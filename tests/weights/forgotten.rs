//! A config that lacks an option which the file has.

use std::collections::HashMap;

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use proptest::prelude::*;

use crate::DEVICE;
use crate::common::error_text;

type Config = MultiHeadAttentionConfig;

/// The options of a config that shapes tell, each present or not.
#[derive(Debug, Clone, Default)]
struct Options {
    num_kv_heads: Option<usize>,
    head_dim: Option<usize>,
    value_head_dim: Option<usize>,
    kdim: Option<usize>,
    vdim: Option<usize>,
    out_dim: Option<usize>,
}

impl Options {
    fn config(&self) -> Config {
        Config::new(24, 4)
            .with_num_kv_heads(self.num_kv_heads)
            .with_head_dim(self.head_dim.or(Some(6)))
            .with_value_head_dim(self.value_head_dim)
            .with_kdim(self.kdim)
            .with_vdim(self.vdim)
            .with_out_dim(self.out_dim.or(Some(24)))
    }
}

fn load(
    cfg: &Config,
    tensors: &HashMap<String, Tensor>,
    layout: WeightLayout,
) -> candle_core::Result<MultiHeadAttention> {
    MultiHeadAttention::load(cfg, layout, VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE))
}

/// Returns whether two configs have the same sizes, whether an option was set or is a default.
fn are_equal(a: &Config, b: &Config) -> bool {
    let sizes = |cfg: &Config| {
        [cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim(), cfg.kdim(), cfg.vdim(), cfg.out_dim()]
    };
    sizes(a) == sizes(b)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn shape_error_without_an_option_names_the_option_and_its_value(
        forgotten in 0..6usize,
        num_kv_heads in prop::sample::select(vec![1usize, 2]),
        odd in prop::sample::select(vec![5usize, 7, 11, 13]),
    ) {
        let mut options = Options::default();
        let expected = match forgotten {
            0 => {
                options.num_kv_heads = Some(num_kv_heads);
                format!("with_num_kv_heads({num_kv_heads})")
            }
            1 => {
                options.head_dim = Some(odd);
                format!("with_head_dim({odd})")
            }
            2 => {
                options.value_head_dim = Some(odd);
                format!("with_value_head_dim({odd})")
            }
            3 => {
                options.kdim = Some(odd);
                format!("with_kdim({odd})")
            }
            4 => {
                options.vdim = Some(odd);
                format!("with_vdim({odd})")
            }
            _ => {
                options.out_dim = Some(odd);
                format!("with_out_dim({odd})")
            }
        };
        let whole = options.config();
        prop_assert!(!are_equal(&whole, &Options::default().config()));
        let layout = WeightLayout::Canonical;
        let vb = VarBuilder::zeros(DType::F32, &DEVICE);
        let tensors = MultiHeadAttention::new(&whole, vb).unwrap().state_dict(layout).unwrap().into_iter().collect();
        load(&whole, &tensors, layout).unwrap();
        let text = error_text(load(&Options::default().config(), &tensors, layout));
        prop_assert!(text.ends_with(&format!("; it fits `{expected}`")), "{}", text);
    }

    #[test]
    fn shape_error_of_transposed_weights_names_their_layout(width in 2..9usize, is_packed in any::<bool>()) {
        let cfg = Config::new(2 * width, 2).with_head_dim(width).with_out_dim(2 * width + 1);
        let [stored, wrong] = match is_packed {
            true => ["conv1d", "packed:c_attn"],
            false => ["in-out:canonical", "canonical"],
        }
        .map(|name| name.parse::<WeightLayout>().unwrap());
        for (file, layout) in [(stored, wrong), (wrong, stored)] {
            let vb = VarBuilder::zeros(DType::F32, &DEVICE);
            let tensors = MultiHeadAttention::new(&cfg, vb).unwrap().state_dict(file).unwrap().into_iter().collect();
            let text = error_text(load(&cfg, &tensors, layout));
            let named = format!("; it is transposed, as in the layout `{file}`");
            prop_assert!(text.ends_with(&named), "{}", text);
        }
    }
}
