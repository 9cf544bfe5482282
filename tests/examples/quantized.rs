//! Whole models whose layers quantising libraries wrote, of the folders in `tests/weights/quantized`.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{QuantizationFormat, QuantizedWeight};
use candle_core::{D, DType, Device, Result, Tensor, safetensors};
use candle_nn::VarBuilder;
use serde::Deserialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{assert_near, error_text, listed, read_json, recorded, relative_error, spelled};
use crate::decoder::CausalLm;
use crate::process;

/// The tokens of the tests.
const IDS: [u32; 7] = [3, 17, 8, 30, 1, 22, 9];

/// A whole model in files.
struct Model {
    name: String,
    folder: PathBuf,
    /// The folder, where it is a copy.
    _copy: Option<TempDir>,
    config: Value,
}

/// The logits that a library returned.
#[derive(Deserialize)]
struct LibraryLogits {
    ids: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

fn folders() -> Vec<PathBuf> {
    let all = listed(recorded("weights/quantized"));
    assert!(!all.is_empty());
    all
}

/// Returns the shapes of the parameters of a llama.
fn llama_shapes(config: &Value) -> BTreeMap<String, Vec<usize>> {
    let size = |key: &str| config[key].as_u64().expect(key) as usize;
    let [e, inner, vocabulary] = ["hidden_size", "intermediate_size", "vocab_size"].map(size);
    let mut shapes = BTreeMap::new();
    shapes.insert("model.embed_tokens.weight".to_string(), vec![vocabulary, e]);
    shapes.insert("model.norm.weight".to_string(), vec![e]);
    for layer in 0..size("num_hidden_layers") {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            shapes.insert(format!("model.layers.{layer}.{norm}.weight"), vec![e]);
        }
        for (name, shape) in [("gate_proj", [inner, e]), ("up_proj", [inner, e]), ("down_proj", [e, inner])] {
            shapes.insert(format!("model.layers.{layer}.mlp.{name}.weight"), shape.to_vec());
        }
    }
    shapes
}

/// Returns numbers that are different for each name.
fn numbers(name: &str, shape: &[usize]) -> Result<Tensor> {
    let seed: u32 = name.bytes().map(u32::from).sum();
    let count = shape.iter().product::<usize>();
    let wave = (0..count).map(|n| ((n as f32 + 1.0) * (1.0 + seed as f32 / 1000.0)).sin());
    let tensor = Tensor::from_iter(wave, &Device::Cpu)?.reshape(shape)?;
    // Norms are near 1.
    if shape.len() == 1 { tensor.affine(0.1, 1.0) } else { tensor * 0.2 }
}

/// Returns the model of a folder. Where the folder has attention weights alone, the other weights are added to a copy.
fn model(folder: &Path) -> Result<Model> {
    let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
    let config: Value = read_json(folder.join("config.json"));
    let checkpoint = Checkpoint::open(folder)?;
    let there: Vec<_> = checkpoint.shapes().map(|(own, _)| own).collect();
    let mut added = HashMap::new();
    for (parameter, shape) in llama_shapes(&config) {
        if !there.contains(&parameter.as_str()) {
            added.insert(parameter.clone(), numbers(&parameter, &shape)?);
        }
    }
    if added.is_empty() {
        return Ok(Model { name, folder: folder.to_path_buf(), _copy: None, config });
    }
    let copy = tempfile::tempdir()?;
    let [quantized_file, plain_file] = ["quantized.safetensors", "plain.safetensors"];
    fs::copy(folder.join("model.safetensors"), copy.path().join(quantized_file))?;
    safetensors::save(&added, copy.path().join(plain_file))?;
    let files = json!({"weight_map": {"attention": quantized_file, "the rest": plain_file}});
    fs::write(copy.path().join("model.safetensors.index.json"), files.to_string())?;
    fs::copy(folder.join("config.json"), copy.path().join("config.json"))?;
    Ok(Model { name, folder: copy.path().to_path_buf(), _copy: Some(copy), config })
}

impl Model {
    fn builder(&self) -> Result<VarBuilder<'static>> {
        weights::open(&self.folder, DType::F32, &Device::Cpu)
    }

    /// Returns a builder of the weights in f32, quantised weights dequantised.
    fn dequantized(&self) -> Result<VarBuilder<'static>> {
        let vb = self.builder()?;
        let mut tensors = HashMap::new();
        for (name, shape) in Checkpoint::open(&self.folder)?.shapes() {
            tensors.insert(name.to_string(), vb.get(shape, name)?);
        }
        Ok(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))
    }

    /// Returns the config without what it says of quantisation.
    fn plain_config(&self) -> Value {
        let mut config = self.config.clone();
        config.as_object_mut().expect("an object").retain(|key, _| !key.starts_with("quantization"));
        config
    }
}

/// Computes the logits (T, V) of tokens.
fn logits(model: &CausalLm, ids: &[u32]) -> Result<Tensor> {
    let mut caches = model.caches(|config| config)?;
    model.logits(&model.forward(&Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?, None, &mut caches)?)?.squeeze(0)
}

#[test]
fn quantized_models_match_models_of_dequantized_weights() -> Result<()> {
    for folder in folders() {
        let model = model(&folder)?;
        let quantized = CausalLm::load(&model.config, model.builder()?, |_, _| {})?;
        let plain = CausalLm::load(&model.plain_config(), model.dequantized()?, |_, _| {})?;
        let [own, expected] = [logits(&quantized, &IDS)?, logits(&plain, &IDS)?];
        assert_near(&own, &expected, 1e-5, &model.name);
        let tokens = |logits: &Tensor| logits.argmax(D::Minus1)?.to_vec1::<u32>();
        assert_eq!(tokens(&own)?, tokens(&expected)?, "{}", model.name);
    }
    Ok(())
}

#[test]
fn quantized_models_have_the_logits_of_their_library() -> Result<()> {
    let mut compared = 0;
    for folder in folders() {
        let file = folder.join("logits.json");
        if !file.is_file() {
            continue;
        }
        let LibraryLogits { ids, logits: rows } = read_json(file);
        let model = model(&folder)?;
        let own = logits(&CausalLm::load(&model.config, model.builder()?, |_, _| {})?, &ids)?;
        assert_near(&own, &Tensor::new(rows, &Device::Cpu)?, 1e-5, &model.name);
        compared += 1;
    }
    assert!(compared > 0);
    Ok(())
}

#[test]
fn causal_lm_generates_the_tokens_of_dequantized_weights() -> Result<()> {
    let model = model(&recorded("weights/quantized/mlx_whole_4_bits"))?;
    let plain = CausalLm::load(&model.plain_config(), model.dequantized()?, |_, _| {})?;
    let mut ids = IDS.to_vec();
    for _ in 0..5 {
        let last = logits(&plain, &ids)?.get(ids.len() - 1)?;
        ids.push(last.argmax(0)?.to_scalar()?);
    }
    let checkpoint = process::Checkpoint { example: "causal_lm", path: model.folder.clone() };
    let printed = checkpoint.printed(&["--ids", &spelled(&IDS), "--max-tokens", "5"]);
    assert_eq!(printed.trim(), spelled(&ids[IDS.len()..]));
    Ok(())
}

/// Compares with the same codes as plain numbers, from a file in bf16 whose rows are read in one block.
#[test]
fn plain_weights_that_are_quantized_at_load_match_their_dequantized_codes() -> Result<()> {
    let model = model(&recorded("weights/quantized/mlx_whole_4_bits"))?;
    let vb = model.dequantized()?;
    let mut stored = HashMap::new();
    for (name, shape) in Checkpoint::open(&model.folder)?.shapes() {
        stored.insert(name.to_string(), vb.get(shape, name)?.to_dtype(DType::BF16)?);
    }
    let folder = tempfile::tempdir()?;
    safetensors::save(&stored, folder.path().join("model.safetensors"))?;
    let config = model.plain_config();
    let plain = Checkpoint::open(folder.path())?;
    for format in [QuantizationFormat::Int8, QuantizationFormat::Int4 { group: 32 }, QuantizationFormat::Nf4] {
        let quantized = plain.clone().with_quantization(format)?.var_builder(DType::F32, &Device::Cpu)?;
        let own = logits(&CausalLm::load(&config, quantized, |_, _| {})?, &IDS)?;
        let mut numbers = HashMap::new();
        for (name, tensor) in &stored {
            let wide = tensor.to_dtype(DType::F32)?;
            let number = if wide.rank() == 2 { QuantizedWeight::quantize(&wide, format)?.dequantize()? } else { wide };
            numbers.insert(name.clone(), number);
        }
        let expected = CausalLm::load(&config, VarBuilder::from_tensors(numbers, DType::F32, &Device::Cpu), |_, _| {})?;
        let expected = logits(&expected, &IDS)?;
        assert_near(&own, &expected, 1e-5, &format!("{format:?}"));
        // They are other numbers than the plain weights'.
        let float = plain.var_builder(DType::F32, &Device::Cpu)?;
        let float = logits(&CausalLm::load(&config, float, |_, _| {})?, &IDS)?;
        assert!(relative_error(&own, &float) > 1e-4, "{format:?}");
    }
    let error = error_text(plain.with_quantization(QuantizationFormat::Int4 { group: 128 }));
    assert!(error.contains("no weight of the checkpoint has floats and inputs in whole groups"), "{error}");
    let twice = Checkpoint::open(&model.folder)?.with_quantization(QuantizationFormat::Int8);
    let of_twice = error_text(twice);
    assert!(of_twice.contains("is quantised already, expected a checkpoint of plain weights"), "{of_twice}");
    Ok(())
}
