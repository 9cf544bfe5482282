//! Outputs of the attention modules of each model, architecture by architecture.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, CompressedKeyInput, HeadShard, QkNormScope, Windows, hf,
};
use candle_core::{Result, Tensor};

use crate::common::root;
use crate::{DEVICE, LATENT, Model, all_models};

/// Reads `docs/architectures.md`, which `compare/census` writes.
#[test]
fn census_page_lists_every_architecture_as_equal() {
    let page = std::fs::read_to_string(root().join("docs/architectures.md")).expect("a page");
    let (_, equal) = page.split_once("## Equal").expect("a part of the page");
    // Rows may be for layers of linear attention alone.
    let (equal, _) = equal.split_once("## Refused").expect("parts after it");
    assert!(equal.contains("## Linear attention"));
    assert!(hf::architectures().is_sorted());
    // transformers has no model of this name: `spellings.json` compares it with DeepSeek V3.
    for name in hf::architectures().filter(|&name| name != "kimi_k2") {
        assert!(equal.contains(&format!("| `{name}` |")), "{name} is not in the census");
    }
    assert!(!page.contains("## Wrong"));
}

/// Returns the model types in backquotes in a part of the page.
fn names_in(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn refused_model_types_give_the_reason_of_the_census_page() {
    let page = std::fs::read_to_string(root().join("docs/architectures.md")).expect("a page");
    let part = |heading: &str| {
        let (_, after) = page.split_once(&format!("\n## {heading}\n")).expect("a part of the page");
        after.split("\n## ").next().expect("the part")
    };
    let error_of = |name: &str| {
        let config = serde_json::json!({"model_type": name});
        hf::attention_config(&config, 0).expect_err("a refused model type").to_string()
    };
    let rows = |heading: &str| part(heading).lines().filter(|line| line.starts_with("| ")).skip(2).collect::<Vec<_>>();
    let mut missing = 0;
    for line in rows("Refused") {
        let (reason, names) = line.trim_matches(['|', ' ']).split_once(" | ").expect("two cells");
        for name in names_in(names).filter(|&name| !hf::architectures().any(|known| known == name)) {
            let error = error_of(name);
            assert!(error.contains(&format!("is not supported: it needs {reason}")), "{error}");
            missing += 1;
        }
    }
    assert!(missing > 50, "{missing} refused model types were found on the page");
    for name in names_in(part("Without softmax attention")) {
        assert!(error_of(name).contains("the model has no softmax attention"), "{name}");
    }
    for line in rows("Models of several parts") {
        let name = names_in(line).next().expect("a name");
        assert!(error_of(name).contains("it combines models of other types"), "{name}");
    }
    for line in rows("Not made") {
        let name = names_in(line).next().expect("a name");
        let error = error_of(name);
        let reasons = ["its attention was not compared", "transformers registers the name and has no code for it"];
        assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
    }
}

/// Compares both backends.
#[test]
fn hf_layers_match_transformers() -> Result<()> {
    for model in all_models() {
        if hf::compressed_key_attention_config(&model.config, 0).is_ok() {
            compressed(&model)?;
            continue;
        }
        for i in 0..model.layers() {
            let shifts = model.model_type().starts_with("swin") && i == 1;
            let mask = if shifts { Windows::new([4, 4], 2)?.with_shift(1)?.mask(2, &DEVICE)? } else { mask(&model)? };
            for backend in [Backend::Auto, Backend::Reference] {
                let input = AttentionInput::new(&model.golden[&format!("layer{i}.in")]);
                let input = separate(&model, &format!("layer{i}"), input.with_mask(&mask).with_backend(backend));
                let input = on_axes(&model, input);
                let ys = forward(&model, i, input)?;
                let expected = tokens(&model, &model.golden[&format!("layer{i}.out")])?;
                model.assert_close(&tokens(&model, &ys)?, &expected, &format!("layer {i}, {backend:?}"));
            }
        }
        decoder(&model)?;
        named(&model)?;
    }
    Ok(())
}

/// Checks attention to compressed keys.
fn compressed(model: &Model) -> Result<()> {
    for i in 0..model.layers() {
        for backend in [Backend::Auto, Backend::Reference] {
            let layer = hf::load_compressed_key_attention(&model.config, i, model.vb())?;
            let input = CompressedKeyInput::new(&model.golden[&format!("layer{i}.in")]).with_backend(backend);
            let expected = &model.golden[&format!("layer{i}.out")];
            model.assert_close(&layer.forward_with(input)?, expected, &format!("layer {i}, {backend:?}"));
        }
    }
    Ok(())
}

/// Checks the attention of a model that has a name.
fn named(model: &Model) -> Result<()> {
    for name in hf::attention_names(&model.config)? {
        let layers = (0..).take_while(|i| model.golden.contains_key(&format!("{name}.layer{i}.in"))).count();
        assert!(layers > 0, "{}: {name} is not recorded", model.name);
        for i in 0..layers {
            let key = format!("{name}.layer{i}");
            for backend in [Backend::Auto, Backend::Reference] {
                let input = AttentionInput::new(&model.golden[&format!("{key}.in")]).with_backend(backend);
                let layer = hf::load_named_attention(&model.config, name, i, model.vb())?;
                let ys = layer.forward_with(separate(model, &key, input))?;
                model.assert_close(&ys, &model.golden[&format!("{key}.out")], &key);
            }
        }
    }
    Ok(())
}

/// Adds the inputs of keys and values of a layer, if they are others than that of queries.
fn separate<'a>(model: &'a Model, layer: &str, input: AttentionInput<'a>) -> AttentionInput<'a> {
    match (model.golden.get(&format!("{layer}.keys")), model.golden.get(&format!("{layer}.values"))) {
        (Some(keys), Some(values)) => input.with_key_value(keys, values),
        _ => input,
    }
}

/// Checks the decoder layers of a model with an encoder. The encoder's outputs are projected in each call, or once.
fn decoder(model: &Model) -> Result<()> {
    for i in (0..).take_while(|i| model.golden.contains_key(&format!("decoder.layer{i}.in"))) {
        let golden = |name: &str| &model.golden[&name.replace("{i}", &i.to_string())];
        let close = |ys: &Tensor, name: &str, kind: &str| {
            model.assert_close(ys, golden(name), &format!("{kind} of layer {i}"));
        };
        // Padding of the encoder's inputs.
        let mask = mask(model)?;
        for backend in [Backend::Auto, Backend::Reference] {
            let layer = hf::load_decoder_attention(&model.config, i, model.vb())?;
            let input = AttentionInput::new(golden("decoder.layer{i}.in")).with_backend(backend);
            close(&layer.forward_with(input)?, "decoder.layer{i}.out", "decoder");

            let cross = hf::load_cross_attention(&model.config, i, model.vb())?;
            let encoded = golden("cross.layer{i}.memory");
            let cross_input =
                || AttentionInput::new(golden("cross.layer{i}.in")).with_mask(&mask).with_backend(backend);
            close(&cross.forward_with(cross_input().with_key_value(encoded, encoded))?, "cross.layer{i}.out", "cross");
            let memory = cross.project_memory(encoded, encoded)?;
            close(&cross.forward_with(cross_input().with_memory(&memory))?, "cross.layer{i}.out", "memory");
        }
    }
    Ok(())
}

/// Checks every model whose heads can be divided between two ranks.
#[test]
fn hf_layer_shards_sum_to_whole_layer() -> Result<()> {
    let mut shown = std::collections::BTreeSet::new();
    for model in all_models() {
        let Ok(cfg) = hf::attention_config(&model.config, 0) else { continue };
        let spans =
            cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection) || cfg.output_norm().is_some();
        if cfg.indexer().is_some()
            || cfg.num_heads() % 2 > 0
            || (cfg.num_kv_heads() % 2 > 0 && cfg.num_kv_heads() > 1)
            || spans
        {
            continue;
        }
        let vb = crate::common::sharded(&model.weights)?;
        let mask = mask(&model)?;
        let input = || on_axes(&model, AttentionInput::new(&model.golden["layer0.in"]).with_mask(&mask));
        let of =
            |rank| hf::load_attention_shard(&model.config, 0, HeadShard::new(rank, 2)?, &vb)?.forward_with(input());
        let expected = hf::load_attention(&model.config, 0, model.vb())?.forward_with(input())?;
        model.assert_close(&(of(0)? + of(1)?)?, &expected, "two shares");
        shown.insert(model.model_type().to_string());
    }
    assert!(shown.len() > 25, "{shown:?}");
    Ok(())
}

/// Calls layer `i`. Layers that share the keys of earlier layers read them from a memory; `tests/cache` has the same
/// numbers with a shared cache.
pub fn forward(model: &Model, i: usize, input: AttentionInput) -> Result<Tensor> {
    if LATENT.contains(&model.model_type()) {
        hf::load_latent_attention(&model.config, i, model.vb())?.forward_with(input)
    } else {
        let layer = hf::load_attention(&model.config, i, model.vb())?;
        match hf::kv_shared_layer(&model.config, i)? {
            Some(earlier) => {
                let xs = &model.golden[&format!("layer{earlier}.in")];
                let memory = hf::load_attention(&model.config, earlier, model.vb())?.project_memory(xs, xs)?;
                layer.forward_with(input.with_memory(&memory))
            }
            None => layer.forward_with(input),
        }
    }
}

/// Adds the inputs that a caller provides: positions on the axes of an image.
pub fn on_axes<'a>(model: &'a Model, input: AttentionInput<'a>) -> AttentionInput<'a> {
    match model.golden.get("positions") {
        Some(positions) => input.with_axis_positions(positions),
        None => input,
    }
}

/// Returns the mask of a model, with an encoder's padding.
pub fn mask(model: &Model) -> Result<AttentionMask> {
    match model.golden.get("attention_mask") {
        Some(mask) => AttentionMask::from_attention_mask(mask),
        None => Ok(AttentionMask::none()),
    }
}

/// Returns the rows without padding: transformers averages all values where a window masks all but padding.
pub fn tokens(model: &Model, ys: &Tensor) -> Result<Tensor> {
    match model.golden.get("attention_mask") {
        Some(mask) => ys.broadcast_mul(&mask.to_dtype(ys.dtype())?.unsqueeze(2)?),
        None => Ok(ys.clone()),
    }
}

#[test]
fn hf_stack_with_shared_relative_bias_matches_transformers() -> Result<()> {
    let model = Model::named("t5");
    let bias = hf::load_relative_bias(&model.config, model.vb())?;
    let mask = mask(&model)?;
    for i in 0..model.layers() {
        let layer = hf::load_attention(&model.config, i, model.vb())?.with_relative_bias(bias.clone())?;
        let ys = layer.forward_with(AttentionInput::new(&model.golden[&format!("layer{i}.in")]).with_mask(&mask))?;
        model.assert_close(&ys, &model.golden[&format!("layer{i}.out")], &format!("layer {i}"));
    }
    Ok(())
}
