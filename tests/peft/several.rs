//! Several adapters of one layer, of which each sequence of a batch chooses one: each sequence has the numbers that it
//! has with its adapter alone.

use std::collections::HashMap;

use candle_attention::peft::{Adapter, AdapterConfig, Adapters};
use candle_attention::{
    AttentionCache, AttentionInput, KvPool, KvPoolConfig, MultiHeadAttention, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig, PackedLinear, PackedSequences, PageTable, WeightLayout, hf,
};
use candle_core::{DType, IndexOp, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;

use crate::common::{Model, assert_near, bits, error_text, listed, recorded, relative_error};
use crate::models::{Drawn, input};
use crate::{Case, DEVICE, TOLERANCE, drawn, in_folder};

const CROSS: &str = "expected `with_key_value`";
const MODULE: &str = "model.layers.0.self_attn";

fn builder(tensors: &HashMap<String, Tensor>) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE)
}

/// Returns the folder of a drawn adapter with a factor of the update.
fn folder_of(drawn_model: &Drawn, alpha: f64) -> Result<tempfile::TempDir> {
    let mut json = AdapterConfig::new(2, alpha, ["q"])?.to_json();
    json["target_modules"] = json!("all-linear");
    in_folder(&json, &drawn_model.file)
}

/// Checks numbers: the same bits on a CPU, whose products do not depend on the other rows.
#[track_caller]
fn assert_same(found: &Tensor, expected: &Tensor, what: &str) {
    if DEVICE.is_cpu() {
        assert_eq!(bits(found), bits(expected), "{what}");
    } else {
        assert_near(found, expected, TOLERANCE, what);
    }
}

/// Checks the first layer of every model: a batch with two adapters and without one, against layers with one adapter.
#[test]
fn lora_chosen_by_sequences_of_each_model_matches_each_adapter_alone() -> Result<()> {
    let mut compared = 0;
    for (seed, folder) in listed(recorded("hf/models")).into_iter().enumerate() {
        let model = Model::open(&folder);
        let Ok(base) = hf::load_attention(&model.config, 0, builder(&model.weights)) else { continue };
        let Ok(one) = input(&base) else { continue };
        if base.config().content_positions().is_some() || base.forward(&one).is_err() {
            continue;
        }
        let first = Drawn::new(&model, seed as u64, 1.5)?;
        let second = Drawn::new(&model, seed as u64 + 1000, 0.5)?;
        let folders = [folder_of(&first, 3.0)?, folder_of(&second, 1.0)?];
        let [one_adapter, other_adapter] = folders.each_ref().map(|own| Adapter::open(own.path(), DType::F32, &DEVICE));
        let adapters = Adapters::new().with("first", one_adapter?)?.with("second", other_adapter?)?;
        let layer = adapters.load_attention(&model.config, 0, builder(&model.weights))?;
        assert_eq!(layer.adapter_names(), ["first", "second"]);
        let alone = |name: &str| {
            let adapter = adapters.get(name).expect("the adapter was added");
            adapter.load_attention(&model.config, 0, builder(&model.weights))
        };
        let (_, t, width) = one.dims3()?;
        let xs = drawn(7, &[3, t, width], 1.0)?.to_dtype(DType::F32)?;
        let names = [Some("second"), None, Some("first")];
        let ys = layer.forward_with(AttentionInput::new(&xs).with_adapters(&names))?;
        for (sequence, name) in names.into_iter().enumerate() {
            let own = xs.i(sequence..sequence + 1)?;
            let found = ys.i(sequence..sequence + 1)?;
            let without = base.forward(&own)?;
            let expected = match name {
                Some(name) => alone(name)?.forward(&own)?,
                None => without.clone(),
            };
            let what = format!("{}, sequence {sequence} with {name:?}", model.name);
            assert_same(&found, &expected, &what);
            assert!(name.is_none() || relative_error(&found, &without) > 1e-3, "{what}");
        }
        assert_same(&layer.forward(&xs)?, &base.forward(&xs)?, &format!("{}, no names", model.name));
        assert_same(&layer.unload_adapter()?.forward(&xs)?, &base.forward(&xs)?, &model.name);
        compared += 1;
    }
    assert!(compared > 60, "{compared}");
    Ok(())
}

/// A causal layer, two adapters on it, and the layers with one of them.
struct Layers {
    both: MultiHeadAttention,
    base: MultiHeadAttention,
    first: MultiHeadAttention,
    second: MultiHeadAttention,
}

/// Returns an adapter of a rank on some projections of a layer of width 32.
fn adapter(seed: u64, rank: usize, targets: &[&str], widths: &HashMap<&str, usize>) -> Result<Adapter> {
    let mut tensors = HashMap::new();
    for (n, &target) in targets.iter().enumerate() {
        let name = |matrix: &str| format!("base_model.model.{MODULE}.{target}.{matrix}.weight");
        let seed = seed + 10 * n as u64;
        tensors.insert(name("lora_A"), drawn(seed, &[rank, 32], 0.5)?.to_dtype(DType::F32)?);
        tensors.insert(name("lora_B"), drawn(seed + 1, &[widths[target], rank], 0.5)?.to_dtype(DType::F32)?);
    }
    let config = AdapterConfig::new(rank, 4.0, targets.iter().copied())?;
    Ok(Adapter::from_builder(config, builder(&tensors)))
}

impl Layers {
    fn new() -> Result<Self> {
        let widths = HashMap::from([("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)]);
        let mut weights = HashMap::new();
        for (n, (&name, &width)) in widths.iter().enumerate() {
            weights.insert(format!("{name}.weight"), drawn(n as u64, &[width, 32], 0.4)?.to_dtype(DType::F32)?);
        }
        let config = candle_attention::MultiHeadAttentionConfig::new(32, 4)
            .with_num_kv_heads(2)
            .with_causal(true)
            .with_rope(candle_attention::RopeConfig::new(1e4));
        let base = MultiHeadAttention::new(&config, builder(&weights))?;
        let one = adapter(50, 4, &["q_proj", "v_proj", "o_proj"], &widths)?;
        let other = adapter(90, 2, &["k_proj", "o_proj"], &widths)?;
        let adapters = Adapters::new().with("first", one.clone())?.with("second", other.clone())?;
        let layout = WeightLayout::Canonical;
        Ok(Self {
            both: adapters.load_onto(&base, layout, MODULE)?,
            first: one.load_onto(&base, layout, MODULE)?,
            second: other.load_onto(&base, layout, MODULE)?,
            base,
        })
    }

    fn alone(&self, name: Option<&str>) -> &MultiHeadAttention {
        match name {
            None => &self.base,
            Some("first") => &self.first,
            Some(_) => &self.second,
        }
    }
}

/// Decodes a batch in a cache, and the same sequences in pages, of which some bring a chunk and others a token.
#[test]
fn lora_chosen_by_sequences_with_cache_and_pages_matches_each_adapter_alone() -> Result<()> {
    let layers = Layers::new()?;
    let names = [Some("first"), Some("second"), None, Some("first")];
    let mut cache = AttentionCache::default();
    let mut alone = names.map(|_| AttentionCache::default());
    let mut table = PageTable::new(16, 16)?;
    let pool = KvPool::new(&KvPoolConfig::for_layer(layers.base.config(), &table), &DEVICE)?;
    let sequences = names.map(|_| table.add());
    for (call, t) in [7, 1, 3, 1].into_iter().enumerate() {
        let xs = drawn(call as u64, &[4, t, 32], 1.0)?.to_dtype(DType::F32)?;
        let input = AttentionInput::new(&xs).with_cache(&mut cache).with_adapters(&names);
        let ys = layers.both.freeze()?.forward_with(input)?;
        let step = table.step(&sequences.map(|sequence| sequence.tokens(t)))?;
        let rows = xs.flatten(0, 1)?;
        let in_pages = AttentionInput::new(&rows).with_pages(&pool, &step).with_adapters(&names);
        let paged = layers.both.forward_with(in_pages)?.reshape((4, t, 32))?;
        step.commit();
        for (sequence, name) in names.into_iter().enumerate() {
            let own = xs.i(sequence..sequence + 1)?;
            let layer = layers.alone(name);
            let expected = layer.forward_with(AttentionInput::new(&own).with_cache(&mut alone[sequence]))?;
            let what = format!("sequence {sequence} in call {call}");
            assert_same(&ys.i(sequence..sequence + 1)?, &expected, &what);
            assert_near(&paged.i(sequence..sequence + 1)?, &expected, TOLERANCE, &what);
        }
    }
    Ok(())
}

#[test]
fn lora_chosen_by_packed_sequences_and_in_cross_attention_matches_each_adapter_alone() -> Result<()> {
    let layers = Layers::new()?;
    let names = [Some("second"), Some("first"), None];
    let lens = [5, 2, 4];
    let packed = PackedSequences::from_lens(&lens, &lens)?;
    let xs = drawn(1, &[11, 32], 1.0)?.to_dtype(DType::F32)?;
    let ys = layers.both.forward_with(AttentionInput::new(&xs).with_packed(&packed).with_adapters(&names))?;
    let keys = drawn(2, &[3, 6, 32], 1.0)?.to_dtype(DType::F32)?;
    let queries = xs.narrow(0, 0, 6)?.reshape((3, 2, 32))?;
    let input = AttentionInput::new(&queries).with_key_value(&keys, &keys).with_adapters(&names);
    let crossed = layers.both.forward_with(input)?;
    for (sequence, name) in names.into_iter().enumerate() {
        let layer = layers.alone(name);
        let own = xs.i(packed.queries(sequence))?;
        let what = format!("sequence {sequence}");
        assert_near(&ys.i(packed.queries(sequence))?, &layer.forward(&own)?, TOLERANCE, &what);
        // An input without a batch has one name.
        let found = layers.both.forward_with(AttentionInput::new(&own).with_adapters(&[name]))?;
        assert_same(&found, &layer.forward(&own)?, &what);
        let (q, kv) = (queries.i(sequence)?, keys.i(sequence)?);
        let expected = layer.forward_with(AttentionInput::new(&q).with_key_value(&kv, &kv))?;
        assert_same(&crossed.i(sequence)?, &expected, &format!("{what}, keys of others"));
    }
    Ok(())
}

/// Checks gradients of matrices: each adapter has the gradients of the sequences that chose it.
#[test]
fn lora_chosen_by_sequences_in_training_has_gradients_of_its_sequences() -> Result<()> {
    let layers = Layers::new()?;
    let all_vars = [VarMap::new(), VarMap::new()];
    let mut adapters = Adapters::new();
    for (name, vars) in ["first", "second"].into_iter().zip(&all_vars) {
        let config = AdapterConfig::new(2, 4.0, ["q_proj", "o_proj"])?;
        adapters = adapters.with(name, Adapter::new(config, vars, DType::F32, &DEVICE))?;
    }
    let layer = adapters.load_onto(&layers.base, WeightLayout::Canonical, MODULE)?;
    for vars in &all_vars {
        for (name, var) in vars.data().lock().expect("one thread").iter() {
            let seed = name.len() as u64 + u64::from(name.contains("lora_A"));
            var.set(&drawn(seed, var.dims(), 0.4)?.to_dtype(DType::F32)?)?;
        }
    }
    let xs = drawn(3, &[3, 4, 32], 1.0)?.to_dtype(DType::F32)?;
    let names = [Some("second"), Some("first"), Some("second")];
    let gradients = |own: &Tensor, chosen: &[Option<&str>]| {
        let input = AttentionInput::new(own).with_adapters(chosen).with_train(true);
        layer.forward_with(input)?.sqr()?.sum_all()?.backward()
    };
    let found = gradients(&xs, &names)?;
    let of_first = gradients(&xs.i(1..2)?, &names[1..2])?;
    let rows_of_second = Tensor::cat(&[xs.i(0..1)?, xs.i(2..3)?], 0)?;
    let of_second = gradients(&rows_of_second, &[Some("second"); 2])?;
    for (vars, expected) in all_vars.iter().zip([&of_first, &of_second]) {
        let mut largest = 0f32;
        for var in vars.all_vars() {
            let (own, alone) = (found.get(&var).expect("a gradient"), expected.get(&var).expect("a gradient"));
            assert_near(own, alone, 2e-5, "a matrix");
            largest = largest.max(own.abs()?.max_all()?.to_scalar()?);
        }
        assert!(vars.all_vars().len() == 4 && largest > 1e-3, "{largest}");
    }
    Ok(())
}

/// Checks a linear layer that is none of attention.
#[test]
fn linear_layer_with_adapters_chosen_by_sequences_matches_products_by_hand() -> Result<()> {
    let module = "model.layers.0.mlp.up_proj";
    let matrix = |seed: u64, dims: &[usize]| drawn(seed, dims, 0.5)?.to_dtype(DType::F32);
    let (weight, bias) = (matrix(1, &[20, 12])?, matrix(2, &[20])?);
    let (a, b) = (matrix(3, &[3, 12])?, matrix(4, &[20, 3])?);
    let stored = |of: &str| format!("base_model.model.{module}.{of}.weight");
    let tensors = HashMap::from([(stored("lora_A"), a.clone()), (stored("lora_B"), b.clone())]);
    let one = Adapter::from_builder(AdapterConfig::new(3, 6.0, ["up_proj"])?, builder(&tensors));
    let other = Adapter::from_builder(AdapterConfig::new(3, 6.0, ["q_proj"])?, builder(&HashMap::new()));
    let adapters = Adapters::new().with("first", one)?.with("attention alone", other)?;
    let linear = PackedLinear::new(&weight, Some(&bias))?;
    let adapted = adapters.load_linear(linear.clone(), module)?;
    assert_eq!(adapted.adapter_names(), ["first", "attention alone"]);
    let xs = matrix(5, &[4, 3, 12])?;
    let names = [None, Some("first"), Some("attention alone"), Some("first")];
    let ys = adapted.forward_with_adapters(&xs, &names)?;
    let merged = (&weight + (b.matmul(&a)? * 2.0)?)?;
    for (sequence, name) in names.into_iter().enumerate() {
        let own_weight = if name == Some("first") { &merged } else { &weight };
        let own = xs.i(sequence)?;
        let expected = own.matmul(&own_weight.t()?)?.broadcast_add(&bias)?;
        assert_near(&ys.i(sequence)?, &expected, TOLERANCE, &format!("sequence {sequence}"));
        let rows = adapted.forward_with_adapters(&own, &[name; 3])?;
        assert_same(&rows, &ys.i(sequence)?, "an adapter for each row");
    }
    assert_same(&adapted.forward(&xs)?, &linear.forward(&xs)?, "without adapters");

    let text = |chosen: &[Option<&str>]| error_text(adapted.forward_with_adapters(&xs, chosen));
    assert_eq!(text(&names[1..]), "[adapted_linear] names has 3 entries, expected one for each of 4 sequences");
    let known = "expected one of [\"first\", \"attention alone\"]";
    let unknown = text(&[None, None, Some("third"), None]);
    assert_eq!(unknown, format!("[adapted_linear] sequence 2 has the adapter \"third\", {known}"));
    let with_activation = linear.with_activation(candle_nn::Activation::Silu)?;
    assert_eq!(
        error_text(adapters.load_linear(with_activation, module)),
        "[adapted_linear] the linear layer has the activation Silu, expected one without"
    );
    Ok(())
}

#[track_caller]
fn assert_error<T>(outcome: Result<T>, expected: &str) {
    let found = error_text(outcome);
    assert!(found.contains(expected), "{found}");
}

#[test]
fn adapters_by_name_that_do_not_fit_are_errors_that_name_the_cause() -> Result<()> {
    let layers = Layers::new()?;
    let xs = drawn(1, &[2, 3, 32], 1.0)?.to_dtype(DType::F32)?;
    let text = |layer: &MultiHeadAttention, names: &[Option<&str>]| {
        error_text(layer.forward_with(AttentionInput::new(&xs).with_adapters(names)))
    };
    let op = "[multi_head_attention]";
    assert_eq!(
        text(&layers.both, &[None]),
        format!("{op} adapters has 1 entries, expected one for each of 2 sequences")
    );
    assert_eq!(
        text(&layers.both, &[None, Some("third")]),
        format!("{op} sequence 1 has the adapter \"third\", expected one of [\"first\", \"second\"]")
    );
    // A layer with a single adapter has no name for it.
    assert_eq!(
        text(&layers.first, &[Some("first"), None]),
        format!("{op} sequence 0 has the adapter \"first\", expected one of []")
    );
    let memory = layers.both.project_memory(&xs, &xs)?;
    let input = AttentionInput::new(&xs).with_memory(&memory).with_adapters(&[None, Some("first")]);
    assert_eq!(
        error_text(layers.both.forward_with(input)),
        format!("{op} adapters were given with a memory, which has its keys already, {CROSS}")
    );
    assert_error(
        layers.both.merge_adapter(),
        "of which each sequence of a call chooses one, expected a layer with a single",
    );

    let own = Case::named("dropout");
    let twice = Adapters::new().with("one", own.adapter()?)?.with("one", own.adapter()?);
    assert_eq!(error_text(twice), "[peft] there are two adapters with the name \"one\", expected different names");
    for name in ["bias_all", "bias_lora_only", "modules_to_save"] {
        let case = Case::named(name);
        let adapters = Adapters::new().with("one", case.adapter()?)?;
        assert_error(
            adapters.load_attention(&case.model.config, 0, case.vb()),
            "which sequences of a batch share, expected low-rank matrices alone",
        );
    }

    let config = MultiHeadLatentAttentionConfig::new(32, 2);
    let latent = MultiHeadLatentAttention::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE))?;
    assert_error(
        latent.forward_with(AttentionInput::new(&xs).with_adapters(&[None, Some("first")])),
        "adapters by name were given, which latent attention does not have",
    );
    Ok(())
}
