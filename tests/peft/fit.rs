//! Files and layers that do not fit together: every tensor of a file is used or named in an error.

use std::collections::{BTreeMap, HashMap};

use candle_attention::peft::{Adapter, AdapterConfig};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::property::for_all;
use crate::common::{assert_near, bits, error_text, relative_error};
use crate::{DEVICE, drawn, in_folder};

const E: usize = 8;
const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

/// A model of attention and an MLP in two layers, and an adapter in its file.
#[derive(Debug, Clone)]
struct Draw {
    /// The prefix of the model's names.
    prefix: &'static str,
    /// The modules that are adapted.
    targets: Vec<&'static str>,
    /// How `target_modules` names them.
    is_pattern: bool,
    /// `bias`.
    bias: &'static str,
    /// Whether the output projection is a saved module, where it is no target.
    saves: bool,
    rank: usize,
    /// The prefix of the file's names.
    file_prefix: &'static str,
    adapter_name: &'static str,
    dtype: DType,
    seed: u64,
}

impl Draw {
    fn any() -> impl Strategy<Value = Self> {
        let prefixes = ["model.", "", "model.language_model.", "transformer."];
        let names = (
            prop::sample::select(prefixes.to_vec()),
            prop::sample::subsequence(["q_proj", "k_proj", "v_proj", "up_proj"].to_vec(), 1..4),
            any::<bool>(),
        );
        let options = (prop::sample::select(["none", "all", "lora_only"].to_vec()), any::<bool>(), 1..4usize);
        let files = (
            prop::sample::select(["base_model.model.", ""].to_vec()),
            prop::sample::select(["", ".default"].to_vec()),
            prop::sample::select([DType::F32, DType::BF16, DType::F64][..3 - usize::from(DEVICE.is_metal())].to_vec()),
            any::<u64>(),
        );
        let all = (names, options, files).prop_map(
            |((prefix, targets, is_pattern), (bias, saves, rank), (file_prefix, adapter_name, dtype, seed))| Self {
                prefix,
                targets,
                is_pattern,
                bias,
                saves,
                rank,
                file_prefix,
                adapter_name,
                dtype,
                seed,
            },
        );
        all.prop_filter("attention is adapted", |draw| draw.targets != ["up_proj"])
    }

    fn module(&self, layer: usize) -> String {
        format!("{}layers.{layer}.self_attn", self.prefix)
    }

    /// Returns the full name of a linear layer.
    fn full(&self, layer: usize, name: &str) -> String {
        let parent = if ATTENTION.contains(&name) { "self_attn" } else { "mlp" };
        format!("{}layers.{layer}.{parent}.{name}", self.prefix)
    }

    fn weights(&self) -> Result<HashMap<String, Tensor>> {
        let mut weights = HashMap::new();
        for layer in 0..2 {
            for (n, name) in ATTENTION.into_iter().chain(["up_proj"]).enumerate() {
                let full = self.full(layer, name);
                let seed = self.seed.wrapping_add((10 * layer + n) as u64);
                weights.insert(format!("{full}.weight"), drawn(seed, &[E, E], 0.5)?.to_dtype(DType::F32)?);
                weights.insert(format!("{full}.bias"), drawn(!seed, &[E], 0.5)?.to_dtype(DType::F32)?);
            }
        }
        Ok(weights)
    }

    fn json(&self) -> Result<Value> {
        let mut json = AdapterConfig::new(self.rank, 2.0, self.targets.iter().copied())?.to_json();
        if self.is_pattern {
            let prefix = self.prefix.replace('.', "\\.");
            json["target_modules"] = json!(format!("{prefix}layers\\..*\\.({})", self.targets.join("|")));
        }
        json["bias"] = json!(self.bias);
        if self.saves {
            json["modules_to_save"] = json!(["o_proj"]);
        }
        Ok(json)
    }

    /// Returns the adapter's file.
    fn file(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut file = BTreeMap::new();
        let mut add = |name: String, dims: &[usize]| -> Result<()> {
            let seed = self.seed.wrapping_mul(31).wrapping_add(file.len() as u64);
            file.insert(format!("{}{name}", self.file_prefix), drawn(seed, dims, 0.4)?.to_dtype(self.dtype)?);
            Ok(())
        };
        for layer in 0..2 {
            for name in ATTENTION.into_iter().chain(["up_proj"]) {
                let full = self.full(layer, name);
                let is_adapted = self.targets.contains(&name);
                let is_saved = self.saves && name == "o_proj";
                if is_adapted {
                    add(format!("{full}.lora_A{}.weight", self.adapter_name), &[self.rank, E])?;
                    add(format!("{full}.lora_B{}.weight", self.adapter_name), &[E, self.rank])?;
                }
                if is_saved {
                    add(format!("{full}.weight"), &[E, E])?;
                }
                if is_saved || self.bias == "all" || (self.bias == "lora_only" && is_adapted) {
                    let middle = if is_adapted { ".base_layer" } else { "" };
                    add(format!("{full}{middle}.bias"), &[E])?;
                }
            }
        }
        Ok(file)
    }

    /// Returns the weights of the model with the adapter.
    fn merged(&self) -> Result<HashMap<String, Tensor>> {
        let file = self.file()?;
        let stored = |name: &str| file.get(&format!("{}{name}", self.file_prefix));
        let mut merged = self.weights()?;
        for (name, values) in &mut merged {
            let (module, leaf) = name.rsplit_once('.').expect("a module");
            if let Some(own) = stored(name).or_else(|| stored(&format!("{module}.base_layer.{leaf}"))) {
                *values = own.to_dtype(DType::F32)?;
            }
            let matrix = |matrix: &str| stored(&format!("{module}.{matrix}{}.weight", self.adapter_name));
            if let (Some(a), Some(b), "weight") = (matrix("lora_A"), matrix("lora_B"), leaf) {
                let delta = b.to_dtype(DType::F32)?.matmul(&a.to_dtype(DType::F32)?)?;
                *values = (&*values + (delta * (2.0 / self.rank as f64))?)?;
            }
        }
        Ok(merged)
    }

    fn layer(&self, weights: &HashMap<String, Tensor>, module: &str) -> Result<MultiHeadAttention> {
        load(VarBuilder::from_tensors(weights.clone(), DType::F32, &DEVICE), module)
    }

    fn folder(&self, file: &BTreeMap<String, Tensor>) -> Result<tempfile::TempDir> {
        in_folder(&self.json()?, &file.clone().into_iter().collect())
    }
}

fn load(vb: VarBuilder, module: &str) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(&MultiHeadAttentionConfig::new(E, 2).with_bias(true), vb.pp(module))
}

fn builder(tensors: &BTreeMap<String, Tensor>) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors.clone().into_iter().collect(), DType::F32, &DEVICE)
}

/// Opens an adapter for inference and for training.
fn opened_both_ways(folder: &std::path::Path) -> [Result<Adapter>; 2] {
    let vars = VarMap::new();
    [Adapter::open(folder, DType::F32, &DEVICE), Adapter::open_trainable(folder, &vars, DType::F32, &DEVICE)]
}

fn input() -> Result<Tensor> {
    drawn(9, &[1, 4, E], 1.0)?.to_dtype(DType::F32)
}

/// Checks that each tensor of a file is used by a layer or by the builder of merged weights.
#[test]
fn lora_with_any_names_options_and_dtypes_matches_merged_weights() {
    for_all(16, Draw::any(), |draw| {
        let (weights, merged) = (draw.weights()?, draw.merged()?);
        let folder = draw.folder(&draw.file()?)?;
        let xs = input()?;
        for adapter in opened_both_ways(folder.path()) {
            let adapter = adapter?;
            for layer in 0..2 {
                let module = draw.module(layer);
                let found = adapter.load_onto(&draw.layer(&weights, &module)?, WeightLayout::Canonical, &module)?;
                let expected = draw.layer(&merged, &module)?.forward(&xs)?;
                assert_near(&found.forward(&xs)?, &expected, 1e-5, &format!("{draw:?}"));
            }
            assert_eq!(adapter.new_tensors(), [""; 0]);
            let unused = adapter.unused_tensors()?;
            assert!(unused.iter().all(|name| name.contains(".mlp.")), "{unused:?}");
            let is_mlp_adapted = draw.targets.contains(&"up_proj") || draw.bias == "all";
            assert_eq!(adapter.check_all_used().is_err(), is_mlp_adapted, "{draw:?}");
            let vb = adapter.merged_builder(VarBuilder::from_tensors(weights.clone(), DType::F32, &DEVICE));
            for (name, expected) in &merged {
                assert_near(&vb.get(expected.dims(), name)?, expected, 1e-5, &format!("{draw:?}, {name}"));
            }
            adapter.check_all_used()?;
        }
        let from_builder = Adapter::from_builder(AdapterConfig::from_json(&draw.json()?)?, builder(&draw.file()?));
        let module = draw.module(1);
        let found = from_builder.load_onto(&draw.layer(&weights, &module)?, WeightLayout::Canonical, &module)?;
        assert_near(&found.forward(&xs)?, &draw.layer(&merged, &module)?.forward(&xs)?, 1e-5, "from a builder");
        assert!(from_builder.unused_tensors().is_err());
        Ok(())
    });
}

/// Checks that biases and saved modules are used where the options do not name them, as PEFT uses what it finds.
#[test]
fn lora_parameters_of_a_file_are_used_without_their_options() {
    for_all(10, Draw::any(), |draw| {
        let mut json = draw.json()?;
        json["bias"] = json!("none");
        json["modules_to_save"] = json!(null);
        let file = draw.file()?;
        let folder = in_folder(&json, &file.clone().into_iter().collect())?;
        let from_builder = Adapter::from_builder(AdapterConfig::from_json(&json)?, builder(&file));
        let module = draw.module(0);
        let base = draw.layer(&draw.weights()?, &module)?;
        let expected = draw.layer(&draw.merged()?, &module)?.forward(&input()?)?;
        for adapter in opened_both_ways(folder.path()).into_iter().chain([Ok(from_builder)]) {
            let found = adapter?.load_onto(&base, WeightLayout::Canonical, &module)?;
            assert_near(&found.forward(&input()?)?, &expected, 1e-5, &format!("{draw:?}"));
        }
        Ok(())
    });
}

/// Checks a file without one of its tensors, which an error names.
#[test]
fn lora_file_without_a_tensor_is_an_error_that_names_it() {
    for_all(20, (Draw::any(), any::<prop::sample::Index>()), |(draw, index)| {
        let mut file = draw.file()?;
        let lost = file.keys().nth(index.index(file.len())).expect("a tensor").clone();
        file.remove(&lost);
        let folder = draw.folder(&file)?;
        let weights = draw.weights()?;
        let is_read = |adapter: &Adapter| -> Result<()> {
            for layer in 0..2 {
                let module = draw.module(layer);
                adapter.load_onto(&draw.layer(&weights, &module)?, WeightLayout::Canonical, &module)?;
            }
            let vb = adapter.merged_builder(VarBuilder::from_tensors(weights.clone(), DType::F32, &DEVICE));
            for (name, values) in &weights {
                vb.get(values.dims(), name)?;
            }
            Ok(())
        };
        let name = lost.strip_prefix("base_model.model.").unwrap_or(&lost).replace(".default", "");
        for adapter in opened_both_ways(folder.path()) {
            let error = error_text(adapter.and_then(|adapter| is_read(&adapter)));
            let without_name = error.replace(".default", "");
            assert!(without_name.contains(&name), "{draw:?}, without {name}: {error}");
        }
        let from_builder = Adapter::from_builder(AdapterConfig::from_json(&draw.json()?)?, builder(&file));
        let error = error_text(is_read(&from_builder)).replace(".default", "");
        assert!(error.contains(&name), "{draw:?}, without {name}: {error}");
        Ok(())
    });
}

/// Checks a file with a tensor that LoRA does not have, or that is of no module of the layer.
#[test]
fn lora_file_with_another_tensor_is_an_error_that_names_it() {
    let endings = [
        "q_proj.lora_magnitude_vector",
        "q_proj.lora_B.bias",
        "q_proj.lora_A.mine.weight",
        "q_proj.lora_diag",
        "embedding.lora_embedding_A",
        "embedding.token_adapter.trainable_tokens_delta",
        "gate.lora_A.weight",
        "q_proj.second.bias",
        "q_proj.lora_E",
    ];
    for_all(30, (Draw::any(), prop::sample::select(endings.to_vec())), |(draw, ending)| {
        let mut file = draw.file()?;
        let module = draw.module(1);
        let name = format!("{}{module}.{ending}", draw.file_prefix);
        file.insert(name.clone(), Tensor::zeros((draw.rank, E), DType::F32, &DEVICE)?);
        if ending == "gate.lora_A.weight" {
            let other = name.replace("lora_A", "lora_B");
            file.insert(other, Tensor::zeros((E, draw.rank), DType::F32, &DEVICE)?);
        }
        let folder = draw.folder(&file)?;
        let base = draw.layer(&draw.weights()?, &module)?;
        for adapter in opened_both_ways(folder.path()) {
            let error =
                error_text(adapter.and_then(|adapter| adapter.load_onto(&base, WeightLayout::Canonical, &module)));
            assert!(error.contains(&format!("{module}.{ending}")), "{ending}: {error}");
        }
        if ["q_proj.lora_magnitude_vector", "q_proj.lora_B.bias"].contains(&ending) {
            let from_builder = Adapter::from_builder(AdapterConfig::from_json(&draw.json()?)?, builder(&file));
            let error = error_text(from_builder.load_onto(&base, WeightLayout::Canonical, &module));
            assert!(error.contains(&name), "{error}");
        }
        Ok(())
    });
}

/// Checks a model whose names have another prefix than the file's: an error shows a name of each side.
#[test]
fn lora_of_another_prefix_is_an_error_with_a_name_of_each_side() {
    let prefixes = ["model.", "", "model.language_model.", "model.text_model.", "transformer."];
    for_all(20, (Draw::any(), prop::sample::select(prefixes.to_vec())), |(draw, other)| {
        if other == draw.prefix {
            return Ok(());
        }
        let file = draw.file()?;
        let folder = draw.folder(&file)?;
        let model = Draw { prefix: other, ..draw.clone() };
        let module = model.module(0);
        let weights = model.weights()?;
        let base = model.layer(&weights, &module)?;
        let target = draw.targets.iter().find(|target| ATTENTION.contains(target)).expect("one of attention");
        let from_file = format!("{}layers.0.self_attn.{target}", draw.prefix);
        for adapter in opened_both_ways(folder.path()) {
            let adapter = adapter?;
            let error = error_text(adapter.load_onto(&base, WeightLayout::Canonical, &module));
            assert!(error.contains(&module), "{draw:?}: {error}");
            // A missing bias or saved module is compared with one of the file.
            assert!(error.contains(&format!("{}layers.", draw.prefix)), "{draw:?}, {from_file}: {error}");
            let vb = adapter.merged_builder(VarBuilder::from_tensors(weights.clone(), DType::F32, &DEVICE));
            assert!(load(vb, &module).is_err(), "{draw:?}");
        }
        let from_builder = Adapter::from_builder(AdapterConfig::from_json(&draw.json()?)?, builder(&file));
        let error = error_text(from_builder.load_onto(&base, WeightLayout::Canonical, &module));
        assert!(error.contains(&module), "{draw:?}: {error}");
        let vb = from_builder.merged_builder(VarBuilder::from_tensors(weights.clone(), DType::F32, &DEVICE));
        assert!(load(vb, &module).is_err(), "{draw:?}");
        Ok(())
    });
}

/// Checks a module that was added to the options of an adapter of a file: its variables are new, next to the file's.
#[test]
fn lora_opened_for_training_makes_only_modules_that_the_file_does_not_mention() -> Result<()> {
    let draw = Draw {
        prefix: "model.",
        targets: vec!["q_proj"],
        is_pattern: false,
        bias: "none",
        saves: false,
        rank: 2,
        file_prefix: "base_model.model.",
        adapter_name: "",
        dtype: DType::F32,
        seed: 4,
    };
    let more = Draw { targets: vec!["q_proj", "k_proj"], ..draw.clone() };
    let folder = more.folder(&draw.file()?)?;
    let module = draw.module(0);
    let base = draw.layer(&draw.weights()?, &module)?;
    let opened = Adapter::open(folder.path(), DType::F32, &DEVICE)?;
    let error = error_text(opened.load_onto(&base, WeightLayout::Canonical, &module));
    assert_eq!(
        error,
        "[peft] base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight is missing, expected shape [2, 8] \
         (layout PEFT); the file has base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    );
    let vars = VarMap::new();
    let trainable = Adapter::open_trainable(folder.path(), &vars, DType::F32, &DEVICE)?;
    let found = trainable.load_onto(&base, WeightLayout::Canonical, &module)?;
    assert_eq!(
        trainable.new_tensors(),
        ["lora_A", "lora_B"].map(|matrix| format!("base_model.model.{module}.k_proj.{matrix}.weight"))
    );
    let expected = draw.layer(&draw.merged()?, &module)?.forward(&input()?)?;
    assert_near(&found.forward(&input()?)?, &expected, 1e-5, "new matrices change nothing at first");

    // A wrong module name has no matrices in the file.
    for wrong in ["model.layer.0.self_attn", "model.layers.7.self_attn", "layers.0.self_attn"] {
        let text = error_text(trainable.load_onto(&base, WeightLayout::Canonical, wrong));
        assert!(text.contains(&format!("{wrong}.q_proj.lora_A.weight is missing")), "{text}");
        assert!(text.contains("the file has base_model.model.model.layers."), "{text}");
    }
    assert_eq!(vars.all_vars().len(), 6);
    Ok(())
}

/// Checks a pattern that excludes a layer, and one that excludes all.
#[test]
fn lora_pattern_that_excludes_one_layer_leaves_it_and_one_that_excludes_all_is_an_error() -> Result<()> {
    let config = |pattern: &str| -> Result<AdapterConfig> {
        let mut json = AdapterConfig::new(2, 2.0, ["q"])?.to_json();
        json["target_modules"] = json!(pattern);
        AdapterConfig::from_json(&json)
    };
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE);
    let base = load(vb, "a")?.freeze()?;
    let new = |pattern: &str, module: &str| -> Result<MultiHeadAttention> {
        let adapter = Adapter::new(config(pattern)?, &VarMap::new(), DType::F32, &DEVICE);
        adapter.load_onto(&base, WeightLayout::Canonical, module)
    };
    let excluded = new(r".*layers\.1\..*q_proj", "model.layers.0.self_attn")?;
    assert!(!excluded.has_adapter());
    assert_eq!(bits(&excluded.forward(&input()?)?), bits(&base.forward(&input()?)?));
    assert!(new(r".*layers\.1\..*q_proj", "model.layers.1.self_attn")?.has_adapter());
    assert_eq!(
        error_text(new(r"model\.language_model\..*q_proj", "model.layers.0.self_attn")),
        "[peft] target_modules is \"model\\\\.language_model\\\\..*q_proj\", and the adapter changes nothing in \
         \"model.layers.0.self_attn\" with q_proj, k_proj, v_proj, o_proj (layout canonical)"
    );
    Ok(())
}

/// Checks a head that was saved, in a model whose names have another prefix, and in a model without a head.
#[test]
fn lora_saved_head_is_read_by_its_name_or_is_an_error() -> Result<()> {
    let head = drawn(1, &[5, E], 1.0)?.to_dtype(DType::F32)?;
    let other = drawn(2, &[5, E], 1.0)?.to_dtype(DType::F32)?;
    let file = HashMap::from([("base_model.model.lm_head.weight".to_string(), head.clone())]);
    let mut json = AdapterConfig::new(2, 2.0, ["q_proj"])?.to_json();
    json["modules_to_save"] = json!(["lm_head"]);
    let folder = in_folder(&json, &file)?;
    let adapter = Adapter::open(folder.path(), DType::F32, &DEVICE)?;
    let merged = |name: &str| {
        let model = HashMap::from([(name.to_string(), other.clone())]);
        adapter.merged_builder(VarBuilder::from_tensors(model, DType::F32, &DEVICE))
    };
    for name in ["lm_head.weight", "model.embed_tokens.weight"] {
        assert_eq!(bits(&merged(name).get((5, E), "lm_head.weight")?), bits(&head), "{name}");
    }
    let error = error_text(merged("language_model.lm_head.weight").get((5, E), "language_model.lm_head.weight"));
    assert_eq!(
        error,
        "[peft] modules_to_save names \"lm_head\", expected base_model.model.language_model.lm_head.weight of shape \
         [5, 8], which is missing; the file has base_model.model.lm_head.weight"
    );
    Ok(())
}

/// Checks matrices of an embedding, which the builder of merged weights adds, also to an embedding of more rows than
/// the model's, which is stored whole.
#[test]
fn lora_merged_builder_adds_matrices_of_an_embedding() -> Result<()> {
    let rows = drawn(1, &[6, E], 1.0)?.to_dtype(DType::F32)?;
    let more = drawn(5, &[6, E], 1.0)?.to_dtype(DType::F32)?;
    let a = drawn(2, &[2, 6], 1.0)?.to_dtype(DType::F32)?;
    let b = drawn(3, &[E, 2], 1.0)?.to_dtype(DType::F32)?;
    let delta = (b.matmul(&a)?.t()? * 1.5)?;
    for has_more in [false, true] {
        let mut file = HashMap::from([
            ("base_model.model.wte.lora_embedding_A".to_string(), a.clone()),
            ("base_model.model.wte.lora_embedding_B".to_string(), b.clone()),
        ]);
        let mut of_model = rows.clone();
        let mut expected = (&rows + &delta)?;
        if has_more {
            file.insert("base_model.model.wte.base_layer.weight".to_string(), more.clone());
            of_model = rows.narrow(0, 0, 4)?;
            expected = (&more + &delta)?;
        }
        let folder = in_folder(&AdapterConfig::new(2, 3.0, ["wte"])?.to_json(), &file)?;
        for opened in opened_both_ways(folder.path()) {
            let adapter = opened?;
            let model = HashMap::from([("wte.weight".to_string(), of_model.clone())]);
            let vb = adapter.merged_builder(VarBuilder::from_tensors(model, DType::F32, &DEVICE));
            assert_near(&vb.get((6, E), "wte.weight")?, &expected, 1e-6, "an embedding");
            assert_near(&vb.get_unchecked("wte.weight")?, &expected, 1e-6, "an embedding");
            adapter.check_all_used()?;
        }
        assert!(relative_error(&rows, &expected) > 0.1);
    }
    Ok(())
}
