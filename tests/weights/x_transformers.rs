//! Layers of x-transformers (`make_x_transformers.py`), with fewer key heads too: there query head h reads key head
//! h % H_kv.

use std::collections::{BTreeMap, HashMap};

use candle_attention::{HeadShard, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor, Var, safetensors};
use candle_nn::VarBuilder;

use crate::common::{assert_near, read_json, recorded};
use crate::{DEVICE, bits, load};

const LAYOUT: WeightLayout = WeightLayout::XTransformers;

struct Recorded {
    name: &'static str,
    config: MultiHeadAttentionConfig,
    tensors: Vec<(String, Tensor)>,
    input: Tensor,
    output: Tensor,
}

fn recorded_layers() -> Result<Vec<Recorded>> {
    let config = |num_heads, num_kv_heads, head_dim| {
        MultiHeadAttentionConfig::new(16, num_heads).with_num_kv_heads(num_kv_heads).with_head_dim(head_dim)
    };
    let layers = [
        ("a_key_head_for_each", config(4, 4, 4)),
        ("two_key_heads", config(4, 2, 4)),
        ("three_key_heads", config(6, 3, 4).with_causal(true)),
        ("two_of_six_key_heads", config(6, 2, 8)),
        ("wide_values", config(8, 4, 2).with_value_head_dim(5)),
        ("one_key_head", config(4, 1, 4)),
        ("other_output", config(4, 2, 4).with_out_dim(10)),
    ];
    let all = safetensors::load(recorded("weights/x_transformers.safetensors"), &DEVICE)?;
    let layer = |(name, cfg): (&'static str, MultiHeadAttentionConfig)| {
        let own = all.iter().filter_map(|(full, tensor)| Some((full.strip_prefix(name)?.strip_prefix('.')?, tensor)));
        let mut own: HashMap<_, _> = own.map(|(part, tensor)| (part.to_string(), tensor.clone())).collect();
        let [input, output] = ["in", "out"].map(|end| own.remove(end).expect(end));
        Recorded { name, config: cfg.with_bias(false), tensors: own.into_iter().collect(), input, output }
    };
    Ok(layers.map(layer).into())
}

#[test]
fn x_transformers_layer_with_gqa_matches_its_library() -> Result<()> {
    for layer in recorded_layers()? {
        let mha = load(&layer.config, LAYOUT, &layer.tensors)?;
        assert_near(&mha.forward(&layer.input)?, &layer.output, 1e-5, layer.name);
    }
    Ok(())
}

#[test]
fn x_transformers_layer_with_gqa_comes_back_after_saving() -> Result<()> {
    for layer in recorded_layers()? {
        let mha = load(&layer.config, LAYOUT, &layer.tensors)?;
        crate::assert_same_tensors(&mha.state_dict(LAYOUT)?, &layer.tensors.iter().cloned().collect(), layer.name);
        // In a layout that orders heads by their key heads, they are in another order.
        let saved = mha.state_dict(WeightLayout::Canonical)?;
        let again = load(&layer.config, WeightLayout::Canonical, &saved)?;
        assert_eq!(bits(&again)?, bits(&mha)?, "{}", layer.name);
    }
    Ok(())
}

#[test]
fn x_transformers_layer_with_gqa_learns_from_its_variables() -> Result<()> {
    for layer in recorded_layers()? {
        let vars: HashMap<String, Var> = layer
            .tensors
            .iter()
            .map(|(name, tensor)| Ok((name.clone(), Var::from_tensor(&tensor.zeros_like()?)?)))
            .collect::<Result<_>>()?;
        let tensors: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let mha = load(&layer.config, LAYOUT, &tensors)?;
        // The current values of variables at the call are used.
        for (name, tensor) in &layer.tensors {
            vars[name].set(tensor)?;
        }
        let ys = mha.forward(&layer.input)?;
        assert_near(&ys, &layer.output, 1e-5, layer.name);
        let gradients = ys.sqr()?.sum_all()?.backward()?;
        for (name, var) in &vars {
            assert!(gradients.get(var).is_some(), "{}: {name} has no gradient", layer.name);
        }
        let frozen = mha.freeze()?;
        assert_near(&frozen.forward(&layer.input)?, &layer.output, 1e-5, layer.name);
    }
    Ok(())
}

#[test]
fn x_transformers_layer_with_gqa_is_the_sum_of_its_shards() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for layer in recorded_layers()? {
        let path = folder.path().join(format!("{}.safetensors", layer.name));
        safetensors::save(&layer.tensors.iter().cloned().collect::<HashMap<_, _>>(), &path)?;
        for world_size in [2, 4] {
            // SAFETY: nobody writes to the file while it is mapped.
            let vb = unsafe { candle_nn::var_builder::ShardedSafeTensors::var_builder(&[&path], DType::F32, &DEVICE)? };
            let mut sum = layer.output.zeros_like()?;
            for rank in 0..world_size {
                let shard = HeadShard::new(rank, world_size)?;
                let mha = MultiHeadAttention::load_shard(&layer.config, LAYOUT, shard, &vb)?;
                sum = (sum + mha.forward(&layer.input)?)?;
            }
            assert_near(&sum, &layer.output, 1e-5, &format!("{}, {world_size} ranks", layer.name));
        }
    }
    Ok(())
}

#[test]
fn x_transformers_options_with_parameters_of_their_own_are_refused() -> Result<()> {
    let options: BTreeMap<String, BTreeMap<String, Vec<usize>>> = read_json(recorded("weights/x_transformers.json"));
    let layer = recorded_layers()?.swap_remove(0);
    assert!(options.len() >= 18);
    for (option, added) in options {
        assert!(!added.is_empty(), "{option}");
        let mut tensors = layer.tensors.clone();
        for (name, shape) in &added {
            tensors.push((name.clone(), Tensor::ones(shape.as_slice(), DType::F32, &DEVICE)?));
        }
        let vb = VarBuilder::from_tensors(tensors.into_iter().collect(), DType::F32, &DEVICE);
        let error = MultiHeadAttention::load(&layer.config, LAYOUT, vb).err().map(|error| error.to_string());
        let error = error.unwrap_or_else(|| panic!("{option} was passed over"));
        assert!(added.keys().any(|name| error.contains(name.as_str())), "{option}: {error}");
    }
    Ok(())
}
