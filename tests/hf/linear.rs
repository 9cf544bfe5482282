//! Linear attention by the gated delta rule, layer by layer against transformers: `make_linear.py` makes the numbers.

use candle_attention::{
    Backend, DeltaCache, DeltaInput, DeltaLayout, GatedDeltaNet, HeadShard, PackedSequences, hf,
    variables_without_gradient,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;
use std::collections::HashMap;

use crate::common::{assert_close, assert_near, recorded, sharded};
use crate::{DEVICE, Model, TOLERANCE};

/// Returns the tolerance of gradients, which pass twice the number of roundings, in f32 on both sides. Candle's own
/// operations, which other devices compute with, round more often.
fn of_gradients() -> f64 {
    if DEVICE.is_cpu() { 2.0 * TOLERANCE } else { 5.0 * TOLERANCE }
}

const LAYOUTS: [DeltaLayout; 3] = [DeltaLayout::Separate, DeltaLayout::Qwen3Next, DeltaLayout::Qwen3_5];

fn models() -> Vec<Model> {
    let models = Model::all(&recorded("hf/linear_models"));
    assert_eq!(models.len(), 10);
    models
}

impl Model {
    fn net(&self) -> Result<GatedDeltaNet> {
        hf::load_linear_attention(&self.config, 0, self.vb())
    }

    /// Checks that the layer's output for the golden input is the golden output.
    fn assert_golden(&self, net: &GatedDeltaNet, what: &str) -> Result<()> {
        self.assert_close(&net.forward(&self.golden["in"])?, &self.golden["out"], what);
        Ok(())
    }

    /// Returns the layouts that support the layer, one of which is that of the file.
    fn layouts(&self, net: &GatedDeltaNet) -> Vec<DeltaLayout> {
        let layouts: Vec<_> = LAYOUTS.into_iter().filter(|&layout| net.state_dict(layout).is_ok()).collect();
        assert_eq!(layouts.len(), if net.config().gate_rank().is_some() { 1 } else { 3 }, "{}", self.name);
        layouts
    }
}

#[test]
fn linear_attention_layers_match_transformers() -> Result<()> {
    for model in models() {
        let net = model.net()?;
        let xs = &model.golden["in"];
        model.assert_golden(&net, "whole sequences")?;
        let reference = DeltaInput::new(xs).with_backend(Backend::Reference).with_residual(xs);
        model.assert_close(
            &(net.forward_with(reference)? - xs)?,
            &model.golden["out"],
            "the reference path, and a residual",
        );

        let mask = &model.golden["attention_mask"];
        let padded = net.forward_with(DeltaInput::new(xs).with_attention_mask(mask))?;
        model.assert_close(&padded, &model.golden["padded"], "padding on the left");
    }
    Ok(())
}

/// Checks ragged batches, padded on the right and on the left: the outputs of each sequence equal the outputs of its
/// tokens alone.
#[test]
fn linear_attention_cache_ignores_padding() -> Result<()> {
    for model in models() {
        let net = model.net()?;
        let xs = &model.golden["in"];
        let expected = &model.golden["out"];
        let mut cache = DeltaCache::default();
        let mut at = [0, 0];
        for (lens, is_left) in [([4, 2], true), ([0, 3], false), ([1, 1], false), ([3, 0], false), ([1, 3], false)] {
            let t = lens[0].max(lens[1]);
            // Calls without tokens are none.
            net.forward_with(DeltaInput::new(&xs.narrow(1, 0, 0)?).with_cache(&mut cache))?;
            // Any numbers are allowed as padding.
            let row = |n: usize| {
                let own = xs.get(n)?.narrow(0, at[n], lens[n])?;
                let noise = Tensor::full(f32::NAN, (t - lens[n], xs.dim(2)?), &DEVICE)?;
                let parts = if is_left { [noise, own] } else { [own, noise] };
                Tensor::cat(&parts.into_iter().filter(|part| part.elem_count() > 0).collect::<Vec<_>>(), 0)
            };
            let batch = Tensor::stack(&[row(0)?, row(1)?], 0)?;
            let start = lens.map(|len| if is_left { t - len } else { 0 });
            let mask = |n: usize| (0..t).map(move |i| u32::from(i >= start[n] && i < start[n] + lens[n]));
            let mask = Tensor::from_iter(mask(0).chain(mask(1)), &DEVICE)?.reshape((2, t))?;
            let mut other = cache.fork()?;
            let ys = net.forward_with(DeltaInput::new(&batch).with_cache(&mut cache).with_attention_mask(&mask))?;
            if !is_left {
                let same = net.forward_with(DeltaInput::new(&batch).with_cache(&mut other).with_valid_lens(&lens))?;
                assert_eq!(ys.to_vec3::<f32>()?, same.to_vec3::<f32>()?);
            }
            for n in (0..2).filter(|&n| lens[n] > 0) {
                let own = ys.get(n)?.narrow(0, start[n], lens[n])?;
                model.assert_close(
                    &own,
                    &expected.get(n)?.narrow(0, at[n], lens[n])?,
                    &format!("sequence {n} at {}", at[n]),
                );
                at[n] += lens[n];
            }
            assert_eq!(cache.lens(), at);
        }
        assert_eq!((at, cache.len()), ([9, 9], 9));
    }
    Ok(())
}

#[test]
fn linear_attention_packed_sequences_match_separate_calls() -> Result<()> {
    for model in models() {
        let net = model.net()?;
        let xs = model.golden["in"].flatten_to(1)?;
        let lens = [3, 0, 6, 1, 7, 1];
        let sequences = PackedSequences::from_lens(&lens, &lens)?;
        let alone = (0..lens.len()).filter(|&s| lens[s] > 0).map(|s| {
            let range = sequences.queries(s);
            net.forward(&xs.narrow(0, range.start, range.len())?)
        });
        let alone = Tensor::cat(&alone.collect::<Result<Vec<_>>>()?, 0)?;
        model.assert_close(&net.forward_with(DeltaInput::new(&xs).with_packed(&sequences))?, &alone, "packed");
        let tracked = Var::from_tensor(&xs)?;
        let ys = net.forward_with(DeltaInput::new(&tracked).with_packed(&sequences))?;
        model.assert_close(&ys, &alone, "packed and tracked");
        let whole = PackedSequences::self_attention(vec![0, 9, 18])?;
        let joined = net.forward_with(DeltaInput::new(&xs).with_packed(&whole))?;
        model.assert_close(&joined, &model.golden["out"].flatten_to(1)?, "two whole sequences");
    }
    Ok(())
}

/// Compares gradients of the input, with plain weights and with variables, and of all weights.
#[test]
fn linear_attention_gradients_match_pytorch() -> Result<()> {
    for model in models() {
        let vars = VarMap::new();
        for (name, tensor) in &model.weights {
            vars.data().lock().expect("no panic before").insert(name.clone(), Var::from_tensor(tensor)?);
        }
        let learning =
            hf::load_linear_attention(&model.config, 0, VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
        for net in [&model.net()?, &learning] {
            let xs = Var::from_tensor(&model.golden["in"])?;
            let ys = net.forward(&xs)?;
            model.assert_close(&ys, &model.golden["out"], "tracked");
            let gradients = (ys * &model.golden["probe"])?.sum_all()?.backward()?;
            let own = gradients.get(&xs).expect("a gradient");
            assert_near(
                own,
                &model.golden["grad.in"],
                of_gradients(),
                &format!("{}, gradient of the input", model.name),
            );
            if std::ptr::eq(net, &learning) {
                assert_eq!(variables_without_gradient(&gradients, &vars), [""; 0], "{}", model.name);
                for (name, var) in vars.data().lock().expect("no panic before").iter() {
                    if let Some(expected) = model.golden.get(&format!("grad.{name}")) {
                        assert_near(gradients.get(var).expect("a gradient"), expected, of_gradients(), name);
                    }
                }
            }
        }
        let frozen = learning.freeze()?;
        let ys = frozen.forward(&model.golden["in"])?;
        assert!(learning.forward(&model.golden["in"])?.track_op() && !ys.track_op());
        model.assert_close(&ys, &model.golden["out"], "frozen");
        // What was frozen no longer follows its variables.
        for var in vars.all_vars() {
            var.set(&var.zeros_like()?)?;
        }
        model.assert_golden(&frozen, "frozen, after training went on")?;
        assert_eq!(learning.forward(&model.golden["in"])?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
    }
    Ok(())
}

#[test]
fn linear_attention_layers_are_saved_in_every_layout() -> Result<()> {
    for model in models() {
        let net = model.net()?;
        for layout in model.layouts(&net) {
            let tensors: HashMap<_, _> = net.state_dict(layout)?.into_iter().collect();
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &DEVICE);
            assert_eq!(DeltaLayout::detect(&vb), layout);
            let again = GatedDeltaNet::load(net.config(), layout, vb)?;
            model.assert_golden(&again, &format!("saved {layout}"))?;
        }
        // What the file has is what is saved in its layout.
        let layout = DeltaLayout::detect(&model.vb().pp(format!("layers.0.{}", module(&model))));
        let file = tempfile::NamedTempFile::new()?;
        net.save(&file, layout)?;
        let saved = candle_core::safetensors::load(&file, &DEVICE)?;
        assert_eq!(saved.len(), model.weights.len());
        for (name, tensor) in saved {
            let name = if model.name.starts_with("bailing") { name.replace("o_proj", "dense") } else { name };
            let stored = &model.weights[&format!("layers.0.{}.{name}", module(&model))];
            assert_close(&tensor, stored, 0.0, &format!("{}, {name}", model.name));
        }
    }
    Ok(())
}

/// Reads convolutions as transformers 5.23 saves them: as thirds of all rows, for any widths of queries, keys and
/// values.
#[test]
fn linear_attention_convolutions_in_thirds_are_read() -> Result<()> {
    for mut model in models().into_iter().filter(|model| model.name.starts_with("olmo")) {
        let names = ["q", "k", "v"].map(|part| format!("layers.0.linear_attn.{part}_conv1d.weight"));
        let all = Tensor::cat(&names.each_ref().map(|name| model.weights[name].clone()), 0)?;
        let thirds = all.chunk(3, 0)?;
        assert_ne!(thirds[0].dims(), model.weights[&names[0]].dims());
        model.weights.extend(names.into_iter().zip(thirds.iter().map(|third| third.contiguous().expect("a copy"))));
        model.assert_golden(&model.net()?, "thirds")?;
        shares_sum(&model)?;
    }
    Ok(())
}

fn module(model: &Model) -> &str {
    let name = model.weights.keys().next().expect("there are weights");
    name.split('.').nth(2).expect("layers.0.module.name")
}

/// Divides whole key heads among ranks, and parts of one key head.
#[test]
fn linear_attention_shards_sum_to_whole_layer() -> Result<()> {
    models().iter().try_for_each(shares_sum)
}

fn shares_sum(model: &Model) -> Result<()> {
    let vb = sharded(&model.weights)?;
    let whole = model.net()?;
    for world_size in 1..=whole.config().num_value_heads() {
        let mut sum = model.golden["out"].zeros_like()?;
        let mut heads = 0;
        for shard in HeadShard::new(0, world_size)?.all() {
            let net = hf::load_linear_attention_shard(&model.config, 0, shard, &vb)?;
            heads += net.config().num_value_heads();
            sum = (sum + net.forward(&model.golden["in"])?)?;
        }
        assert_eq!(heads, whole.config().num_value_heads());
        model.assert_close(&sum, &model.golden["out"], &format!("{world_size} processes"));
    }
    let shard = HeadShard::new(0, whole.config().num_value_heads() + 1)?;
    assert!(hf::load_linear_attention_shard(&model.config, 0, shard, &vb).is_err());
    Ok(())
}

/// Loads a model of texts and images, as it is published. tests/errors has the errors of configs.
#[test]
fn linear_attention_of_image_text_models_is_found() -> Result<()> {
    for model in models().iter().filter(|model| ["qwen3_5", "qwen3_5_moe"].contains(&model.name.as_str())) {
        let config = json!({"model_type": model.name, "text_config": model.config});
        let renamed =
            model.weights.iter().map(|(name, tensor)| (format!("model.language_model.{name}"), tensor.clone()));
        let net = hf::load_linear_attention(&config, 0, crate::builder(renamed.collect()))?;
        model.assert_golden(&net, "below images")?;
        let whole = json!({"model_type": model.name, "text_config": {"model_type": model.config["model_type"]}});
        assert_eq!(hf::attention_config(&whole, 3)?, hf::attention_config(&whole["text_config"], 3)?);
    }
    Ok(())
}
