//! `GatedDeltaNet`: its config, its tensors, its inputs and its cache.

use crate::wrong::{Fitting, Shapes};
use crate::*;

fn base() -> GatedDeltaNetConfig {
    GatedDeltaNetConfig::new(6, 4).with_num_key_heads(2).with_key_head_dim(3).with_value_head_dim(5)
}

fn net(cfg: &GatedDeltaNetConfig) -> Result<GatedDeltaNet> {
    GatedDeltaNet::new(cfg, any_weights())
}

#[test]
fn configs() {
    let beyond = u32::MAX as usize + 1;
    let configs = cases! {
        "no width" => net(&GatedDeltaNetConfig::new(0, 2)),
        "no heads" => net(&GatedDeltaNetConfig::new(6, 0)),
        "no key heads" => net(&base().with_num_key_heads(0)),
        "key heads that do not divide" => net(&base().with_num_key_heads(3)),
        "more key heads than value heads" => net(&base().with_num_key_heads(8)),
        "no width of keys" => net(&base().with_key_head_dim(0)),
        "values beyond u32" => net(&base().with_value_head_dim(beyond)),
        "heads beyond u32" => net(&base().with_value_head_dim(beyond - 1)),
        "one tap" => net(&base().with_conv_kernel(1)),
        "no rank of decays" => net(&base().with_decay_rank(0)),
        "no rank of gates" => net(&base().with_gate_rank(0)),
        "decays that grow" => net(&base().with_decay_lower_bound(0.5)),
        "decays that are no number" => net(&base().with_decay_lower_bound(f64::NAN)),
        "a negative eps" => net(&base().with_norm_eps(-1.0)),
        "ranks in a layout without" => GatedDeltaNet::load(&base().with_gate_rank(2), DeltaLayout::ByPart, any_weights()),
        "ranks saved in a layout without" => net(&base().with_decay_rank(2))?.state_dict(DeltaLayout::ByKeyHead),
    };
    assert_reviewed("delta_net_configs", &[configs]);
}

#[test]
fn weights() -> Result<()> {
    let mut cases = vec![cases! {
        "weights of integers" => GatedDeltaNet::new(&base(), VarBuilder::zeros(DType::U8, &CPU)),
    }];
    for layout in [DeltaLayout::Separate, DeltaLayout::ByKeyHead, DeltaLayout::ByPart] {
        let shapes = wrong::shapes_of_variables(|vb| GatedDeltaNet::load(&base(), layout, vb))?;
        let biased = shapes.iter().filter(|(name, _)| name.ends_with(".weight") && !name.contains("norm"));
        let more = biased.map(|(name, shape)| (name.replace(".weight", ".bias"), vec![shape[0]])).collect();
        let load = |shapes: &Shapes| GatedDeltaNet::load(&base(), layout, wrong::builder(shapes));
        cases.push(wrong::weights(&shapes, load));
        cases.push(wrong::surplus(&shapes, &more, load));
    }
    assert_reviewed("delta_net_weights", &cases);
    Ok(())
}

/// A call with a cache that holds two sequences of three tokens of a layer.
fn with_cache(cfg: &GatedDeltaNetConfig, input: impl FnOnce(DeltaInput) -> Result<Tensor>) -> Result<()> {
    let (xs, mut cache) = (zeros((2, 3, 6)), DeltaCache::default());
    net(cfg)?.forward_with(DeltaInput::new(&xs).with_cache(&mut cache))?;
    let outcome = input(DeltaInput::new(&xs).with_cache(&mut cache)).map(drop);
    assert_eq!(cache.lens(), [3, 3]);
    outcome
}

#[test]
fn inputs() -> Result<()> {
    let (xs, flat) = (zeros((2, 3, 6)), zeros((6, 6)));
    let run = |input: DeltaInput| net(&base())?.forward_with(input);
    let mask = |rows: [[u8; 3]; 2]| Tensor::new(&rows, &CPU);
    let masked = |rows| run(DeltaInput::new(&xs).with_attention_mask(&mask(rows)?));
    let packed =
        |lens: &[usize], xs: &Tensor| run(DeltaInput::new(xs).with_packed(&PackedSequences::from_lens(lens, lens)?));
    let six = PackedSequences::from_lens(&[6], &[6])?;
    let huge = zeros(6).broadcast_as((1 << 40, 1 << 20, 6))?;
    let others = cases! {
        "one dimension" => run(DeltaInput::new(&zeros(6))),
        "more than fits in memory" => run(DeltaInput::new(&huge)),
        "more sequences without tokens" => run(DeltaInput::new(&zeros(6).broadcast_as((1 << 50, 0, 6))?)),
        "twos in a mask" => masked([[1, 1, 1], [2, 1, 1]]),
        "a hole in a mask" => masked([[1, 1, 1], [1, 0, 1]]),
        "a mask and lengths" =>
            run(DeltaInput::new(&xs).with_attention_mask(&mask([[1; 3]; 2])?).with_valid_lens(&[3, 3])),
        "fewer lengths" => run(DeltaInput::new(&xs).with_valid_lens(&[3])),
        "longer lengths" => run(DeltaInput::new(&xs).with_valid_lens(&[3, 4])),
        "padding after the cache's tokens" =>
            with_cache(&base(), |input| run(input.with_attention_mask(&mask([[1, 1, 1], [0, 1, 1]])?))),
        "fewer packed tokens" => packed(&[3, 2], &flat),
        "packed batches" => packed(&[3, 3], &xs),
        "packed padding" => run(DeltaInput::new(&flat).with_packed(&six).with_valid_lens(&[6])),
        "packed sequences with a cache" =>
            run(DeltaInput::new(&flat).with_packed(&six).with_cache(&mut DeltaCache::default())),
        "packed keys of their own" =>
            run(DeltaInput::new(&flat).with_packed(&PackedSequences::from_lens(&[6], &[5])?)),
        "a cache of other states" => with_cache(&base().with_value_head_dim(4), run),
        "a cache of other channels" => with_cache(&base().with_key_head_dim(4), run),
        "a cache of other sequences" => {
            let mut cache = DeltaCache::default();
            run(DeltaInput::new(&zeros((1, 3, 6))).with_cache(&mut cache))?;
            run(DeltaInput::new(&xs).with_cache(&mut cache))
        },
        "a cache of another dtype" => {
            let (half, mut cache) = (VarBuilder::zeros(DType::BF16, &CPU), DeltaCache::default());
            let half_xs = of(DType::BF16, (2, 3, 6));
            GatedDeltaNet::new(&base(), half)?.forward_with(DeltaInput::new(&half_xs).with_cache(&mut cache))?;
            run(DeltaInput::new(&xs).with_cache(&mut cache))
        },
    };
    let dims: [Fitting; 2] = [("xs", DType::F32, "B T 6"), ("residual", DType::F32, "B T 6")];
    let tensors =
        wrong::tensors("B 2 T 3", &dims, |tensors| run(DeltaInput::new(&tensors[0]).with_residual(&tensors[1])));
    let masks = each("a mask of shape", [vec![2], vec![2, 4], vec![1, 3], vec![2, 3, 1]], |shape| {
        run(DeltaInput::new(&xs).with_attention_mask(&of(DType::U8, shape)))
    });
    assert_reviewed("delta_net_inputs", &[tensors, masks, others]);
    Ok(())
}

#[test]
fn caches() -> Result<()> {
    let mut cache = DeltaCache::default();
    let net = net(&base())?;
    let call = |cache: &mut DeltaCache, t| net.forward_with(DeltaInput::new(&zeros((2, t, 6))).with_cache(cache));
    let empty = cases! {
        "truncating what is empty" => DeltaCache::default().truncate(1),
        "reordering what is empty" => DeltaCache::default().reorder(&[0]),
    };
    call(&mut cache, 3)?;
    cache.snapshot();
    call(&mut cache, 2)?;
    let edits = cases! {
        "truncating without a snapshot" => cache.truncate(4),
        "truncating to more" => cache.truncate(6),
        "another sequence" => cache.reorder(&[0, 2]),
    };
    assert_eq!(cache.lens(), [5, 5]);
    let tracked = candle_core::Var::zeros((2, 3, 6), DType::F32, &Device::Cpu)?;
    let gradients = cases! {
        "an input with gradients" => net.forward_with(DeltaInput::new(&tracked).with_cache(&mut cache)).map(drop),
    };
    assert_eq!(cache.lens(), [5, 5]);
    assert_reviewed("delta_net_caches", &[empty, edits, gradients]);
    Ok(())
}
