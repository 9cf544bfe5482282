//! T5's biases of relative positions: transformers' numbers, and what the layer makes of them.

use serde::Deserialize;

use super::numbers;
use crate::seeded::layer;
use crate::*;

#[derive(Deserialize)]
struct Recorded {
    buckets: Vec<(usize, usize, bool)>,
    calls: Vec<(usize, usize, usize)>,
}

fn read() -> Recorded {
    let text = std::fs::read_to_string(recorded("attention/options/numbers.json")).expect("the numbers are there");
    serde_json::from_str(&text).expect("they are JSON")
}

fn buckets((num_buckets, max_distance, bidirectional): (usize, usize, bool)) -> RelativeBiasConfig {
    RelativeBiasConfig::new(bidirectional).with_num_buckets(num_buckets).with_max_distance(max_distance)
}

#[test]
fn relative_bias_matches_transformers() -> Result<()> {
    let Recorded { buckets: all, calls } = read();
    for (n, case) in all.into_iter().enumerate() {
        let numbers = numbers(&format!("t5.{n}."));
        let bias = RelativeBias::new(&buckets(case), 3, builder(numbers.clone()))?;
        for (call, &(t_q, t_kv, offset)) in calls.iter().enumerate() {
            let found = bias.forward(t_q, t_kv, offset)?;
            assert_close(&found, &numbers[&format!("bias.{call}")], 0.0, &format!("{case:?}, call {call}"));
        }
    }
    Ok(())
}

/// Compares the borders between buckets, which follow the f32 arithmetic of transformers.
#[test]
fn relative_bias_buckets_match_transformers_for_every_distance() -> Result<()> {
    for (n, case) in read().buckets.into_iter().enumerate() {
        let expected = &numbers(&format!("t5.{n}."))["buckets"];
        // A bias that is its bucket's number, for a query at 900 and keys from 0 on.
        let weight = Tensor::arange(0f32, case.0 as f32, &CPU)?.unsqueeze(1)?;
        let tensors = [("relative_attention_bias.weight".to_string(), weight)].into();
        let bias = RelativeBias::new(&buckets(case), 1, builder(tensors))?.forward(1, 1801, 900)?;
        let found: Vec<_> = values(&bias).into_iter().rev().collect();
        assert_eq!(found, values(expected), "{case:?}");
    }
    Ok(())
}

const HEADS: usize = 4;

fn config() -> Config {
    Config::new(12, HEADS).with_scale(1.0).with_relative_bias(few(true))
}

fn few(bidirectional: bool) -> RelativeBiasConfig {
    RelativeBiasConfig::new(bidirectional).with_num_buckets(8).with_max_distance(6)
}

fn bias(config: &RelativeBiasConfig, dtype: DType, device: &Device) -> Result<RelativeBias> {
    let random = &mut Random::new(11);
    let weight: Vec<f32> = (0..8 * HEADS).map(|_| random.between(-2.0, 2.0) as f32).collect();
    let weight = Tensor::from_vec(weight, (8, HEADS), &CPU)?.to_dtype(dtype)?.to_device(device)?;
    let tensors = [("relative_attention_bias.weight".to_string(), weight)].into();
    RelativeBias::new(config, HEADS, VarBuilder::from_tensors(tensors, dtype, device))
}

fn relative_bias_of_layer_matches_bias_mask(device: &Device) -> Result<()> {
    let dtypes = [DType::F32, DType::BF16, DType::F64];
    for dtype in dtypes.into_iter().filter(|dtype| device.is_cpu() || *dtype == DType::F32) {
        let bias = bias(&few(true), dtype, device)?;
        let own = layer(&config(), dtype, device)?.with_relative_bias(bias.clone())?;
        let plain = layer(&Config::new(12, HEADS).with_scale(1.0), dtype, device)?;
        let xs = Tensor::randn(0f32, 1.0, (2, 9, 12), device)?.to_dtype(dtype)?;
        let memory = Tensor::randn(0f32, 1.0, (2, 5, 12), device)?.to_dtype(dtype)?;
        let positions = Tensor::new(&[[3u32, 4, 5, 6, 7, 8, 9, 10, 11], [0, 0, 0, 1, 2, 3, 4, 5, 6]], device)?;
        let mask = AttentionMask::none().with_bias(&bias.forward(9, 9, 0)?);
        let expected = plain.forward_with(AttentionInput::new(&xs).with_mask(&mask))?;
        assert_close(&own.forward(&xs)?, &expected, 0.0, "self-attention");
        let given = own.forward_with(AttentionInput::new(&xs).with_positions(&positions))?;
        assert_close(&given.get(0)?, &expected.get(0)?, 1e-6, "moved together");
        assert!(max_error(&given.get(1)?, &expected.get(1)?) > 1e-2, "the second has other distances");
        let cross_mask = AttentionMask::none().with_bias(&bias.forward(9, 5, 3)?);
        let cross = || AttentionInput::new(&xs).with_key_value(&memory, &memory);
        let of_cross = plain.forward_with(cross().with_mask(&cross_mask))?;
        let found = own.forward_with(cross().with_positions(&positions.get(0)?))?;
        assert_close(&found, &of_cross, 0.0, "cross-attention");
    }
    Ok(())
}

crate::on_each_device!(relative_bias_of_layer_matches_bias_mask);

/// Checks calls without tokens or sequences. An empty batch has no positions, while keys are counted for all sequences.
#[test]
fn positions_of_empty_calls_are_accepted() -> Result<()> {
    let scaling = AttentionTemperature { beta: 0.5, interval: 1, first: 3 };
    let layers = [
        layer(&config(), DType::F32, &CPU)?.with_relative_bias(bias(&few(true), DType::F32, &CPU)?)?,
        layer(&Config::new(12, HEADS).with_alibi(AlibiConfig::Falcon), DType::F32, &CPU)?,
        layer(
            &Config::new(12, 2).with_rope(RopeConfig::new(100.0)).with_attention_temperature(scaling),
            DType::F32,
            &CPU,
        )?,
    ];
    for (b, t_q, t_kv) in [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)] {
        let empty = |t: usize| Tensor::zeros((b, t, 12), DType::F32, &CPU);
        let at = |t: usize| Tensor::zeros((b, t), DType::U32, &CPU);
        let xs = empty(t_q)?;
        let keys = empty(t_kv)?;
        let positions = at(t_q)?;
        let key_positions = at(t_kv)?;
        for (layer, backend) in layers.iter().flat_map(|layer| [(layer, Backend::Auto), (layer, Backend::Reference)]) {
            let own = || AttentionInput::new(&xs).with_backend(backend);
            let cross = || own().with_key_value(&keys, &keys);
            let mut cache = AttentionCache::default();
            for input in [
                own().with_positions(&positions),
                cross(),
                cross().with_positions(&positions),
                cross().with_key_positions(&key_positions),
                cross().with_positions(&positions).with_key_positions(&key_positions),
                own().with_positions(&positions).with_cache(&mut cache),
            ] {
                assert_eq!(layer.forward_with(input)?.dims(), [b, t_q, 12]);
            }
            let input = own().with_positions(&positions).with_cache(&mut cache);
            assert_eq!(layer.forward_with_weights(input)?.output.dims(), [b, t_q, 12]);
        }
    }
    Ok(())
}

/// Trains the variable, and compares the heads of one rank.
#[test]
fn relative_bias_shard_follows_its_variable() -> Result<()> {
    let weight = Var::from_tensor(bias(&few(true), DType::F32, &CPU)?.weight())?;
    let tensors = [("relative_attention_bias.weight".to_string(), weight.as_tensor().clone())].into();
    let whole = RelativeBias::new(&few(true), HEADS, VarBuilder::from_tensors(tensors, DType::F32, &CPU))?;
    let share = whole.shard(HeadShard::new(1, 2)?)?;
    for _ in 0..2 {
        assert_close(&share.forward(5, 6, 1)?, &whole.forward(5, 6, 1)?.narrow(1, 2, 2)?, 0.0, "its heads");
        let gradients = share.forward(5, 6, 1)?.sum_all()?.backward()?;
        assert!(gradients.get(&weight).is_some());
        weight.set(&(weight.as_tensor() * 3.0)?.detach())?;
    }
    Ok(())
}
