//! Systems with a layout: drawn from their seed, and loaded in f32, f16 and bf16.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{
    AdditiveAttention, AdditiveAttentionConfig, AdditiveInput, AttentionInput, AttentionMask, FullyMaskedRows,
    MultiHeadAttention, ValidLens, weights,
};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::common::{Golden, assert_close, max_error, systems};
use crate::{TOLERANCE, on_each_device};

/// The folder of training, which has a separate test.
const TRAINED: &str = "frontend_48_train";

fn all() -> Vec<Golden> {
    let has_layout = |name: &String| name != TRAINED && Golden::open_config(name)["layout"].is_string();
    let all: Vec<_> = systems().into_iter().filter(has_layout).map(|name| Golden::open(&name)).collect();
    assert!(all.len() >= 32, "{} systems", all.len());
    all
}

/// An embedding, a layer, or an embedding in front of a layer.
struct System<'a> {
    golden: &'a Golden,
    vb: VarBuilder<'static>,
    embedding: Option<EmbeddingLayer>,
    layer: Layer,
}

enum Layer {
    None,
    Additive(AdditiveAttention),
    Attention(Box<MultiHeadAttention>),
}

impl<'a> System<'a> {
    /// Opens the system from its file, or from its seed if the file would be large.
    fn open(golden: &'a Golden, dtype: DType, device: &Device) -> Result<Self> {
        let file = golden.file("model.safetensors");
        match golden.config["manual_seed"].as_u64() {
            Some(seed) if !file.is_file() => Self::load(golden, TorchSeed::new(seed).var_builder(dtype, device)),
            _ => Self::load(golden, weights::open(file, dtype, device)?),
        }
    }

    /// Loads parameters in the order in which they are drawn.
    fn load(golden: &'a Golden, vb: VarBuilder<'static>) -> Result<Self> {
        let layout = layout(golden);
        let table = &golden.config[if layout == "embedding" { "layer" } else { "embedding" }];
        let size = |key: &str| table[key].as_u64().expect("a size") as usize;
        let embedding = || EmbeddingConfig::new(size("vocab_size"), size("embed_dim"));
        let embedding = table.is_object().then(|| EmbeddingLayer::new(&embedding(), vb.clone())).transpose()?;
        let layer = match layout {
            "embedding" => Layer::None,
            "additive" => Layer::Additive(AdditiveAttention::new(&config(golden), vb.clone())?),
            layout => {
                let layer = MultiHeadAttention::load(&config(golden), layout.parse()?, vb.clone())?;
                Layer::Attention(Box::new(layer))
            }
        };
        Ok(Self { golden, vb, embedding, layer })
    }

    /// Returns the output of a case, and the weights. Outside of training, a seed drops nothing.
    fn run(&self, case: &str, train: bool) -> Result<(Tensor, Option<Tensor>)> {
        let golden = self.golden;
        let device = self.vb.device();
        let find = |name: &str| {
            let tensor = golden.find(case, name);
            tensor.map(|tensor| tensor.to_dtype(self.vb.dtype())?.to_device(device)).transpose()
        };
        let xs = match &self.embedding {
            Some(embedding) => Some(embedding.forward(&golden.get(case, "ids").to_device(device)?)?),
            None => find("x")?,
        };
        let mask = mask(golden, case, device)?;
        let [q, k, v] = match find("q")? {
            Some(q) => [Some(q), find("k")?, find("v")?],
            None => [find("queries")?, find("keys")?, find("values")?],
        };
        let input = match (&self.layer, &xs, (&q, &k, &v)) {
            (Layer::None, Some(xs), _) => return Ok((xs.clone(), None)),
            (Layer::Additive(layer), _, (Some(q), Some(k), Some(v))) => {
                let output = layer.forward_with_weights(q, k, v, &mask)?;
                assert_close(&layer.forward(q, k, v, &mask)?, &output.output, 0.0, case);
                return Ok((output.output, Some(output.weights)));
            }
            (_, Some(xs), _) => AttentionInput::new(xs),
            (_, None, (Some(q), Some(k), Some(v))) => AttentionInput::new(q).with_key_value(k, v),
            _ => panic!("{}, {case} lacks inputs", golden.name),
        };
        let Layer::Attention(layer) = &self.layer else { panic!("{} has no layer", golden.name) };
        let seed = TorchSeed::new(1);
        let input = input.with_mask(&mask).with_train(train).with_dropout_seed(&seed);
        let output = layer.forward_with_weights(input)?;
        Ok((output.output, Some(output.weights)))
    }
}

fn layout(golden: &Golden) -> &str {
    golden.config["layout"].as_str().expect("a layout")
}

/// Reads the config of the crate's layer.
fn config<T: DeserializeOwned>(golden: &Golden) -> T {
    serde_json::from_value(golden.config["layer"].clone()).expect("`layer` is a config")
}

/// Returns the mask of a case: d2l's lengths, or PyTorch's tensors in which 1 means masked.
pub fn mask(golden: &Golden, case: &str, device: &Device) -> Result<AttentionMask> {
    let mut mask = AttentionMask::none();
    if let Some(lens) = golden.find(case, "valid_lens") {
        mask = mask.with_valid_lens(ValidLens::from_tensor(lens)?).with_fully_masked_rows(FullyMaskedRows::Uniform);
    }
    if let Some(hidden) = golden.find(case, "attn_mask") {
        mask = mask.with_bool_mask(&hidden.eq(0u8)?.to_device(device)?);
    }
    if let Some(hidden) = golden.find(case, "key_padding_mask") {
        mask = mask.and(&AttentionMask::from_attention_mask(&hidden.eq(0u8)?.to_device(device)?)?);
    }
    Ok(mask)
}

fn systems_match_pytorch(device: &Device) -> Result<()> {
    for golden in &all() {
        let system = System::open(golden, DType::F32, device)?;
        for case in golden.cases() {
            let (output, weights) = system.run(&case, false)?;
            assert_eq!(output.dims(), golden.get(&case, "output").dims(), "{}, {case}", golden.name);
            golden.check(&case, "expected_f64", &output)?;
            golden.check(&case, "output", &output)?;
            weights.map(|weights| golden.check(&case, "attn_weights_f64", &weights)).transpose()?;
        }
    }
    Ok(())
}

on_each_device!(systems_match_pytorch);

/// Compares both with f64, over all cases of a system: in one case of a single token, a few roundings decide.
#[test]
fn half_precision_error_is_at_most_twice_pytorchs() -> Result<()> {
    let all = all();
    for (golden, dtype) in all.iter().flat_map(|golden| [(golden, DType::F16), (golden, DType::BF16)]) {
        let system = System::open(golden, dtype, &Device::Cpu)?;
        let mut ours = 0f64;
        let mut pytorchs = 0f64;
        for case in golden.cases() {
            let Some(pytorch) = golden.find(&case, &format!("output_{}", dtype.as_str())) else {
                let elsewhere = std::env::var_os("CANDLE_ATTENTION_MODELS").is_some();
                assert!(elsewhere, "{}, {case}: PyTorch's result in {dtype:?} is missing", golden.name);
                continue;
            };
            let (output, _) = system.run(&case, false)?;
            assert_eq!(output.dtype(), dtype);
            let exact = golden.get(&case, "expected_f64");
            ours = ours.max(max_error(&output, exact));
            pytorchs = pytorchs.max(max_error(pytorch, exact));
        }
        assert!(ours <= 2.0 * pytorchs, "{} in {dtype:?} is off by {ours:e}, PyTorch by {pytorchs:e}", golden.name);
    }
    Ok(())
}

#[test]
fn systems_with_seed_are_drawn_bit_for_bit() -> Result<()> {
    let mut drawn = 0;
    for golden in &all() {
        let (Some(_), Some(seed)) = (golden.config.get("draw_order"), golden.config["manual_seed"].as_u64()) else {
            continue;
        };
        let system = System::load(golden, TorchSeed::new(seed).var_builder(DType::F32, &Device::Cpu))?;
        let mut own = HashMap::new();
        if let Layer::Attention(layer) = &system.layer {
            own.extend(layer.state_dict(layout(golden).parse()?)?);
        }
        own.extend(system.embedding.map(|table| ("embedding.weight".to_string(), table.embeddings().clone())));
        for (name, facts) in golden.config["parameters"].as_object().expect("parameters") {
            let tensor = own.remove(name).map_or_else(|| system.vb.get_unchecked(name), Ok)?;
            assert_eq!(serde_json::json!(tensor.dims()), facts["shape"], "{}, {name}", golden.name);
            let mut bytes = Vec::new();
            tensor.write_bytes(&mut bytes)?;
            let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, facts["sha256_f32_le"], "{}, {name}", golden.name);
        }
        assert!(own.is_empty(), "{} has no {own:?}", golden.name);
        drawn += 1;
    }
    assert!(drawn >= 23, "{drawn}");
    Ok(())
}

/// Checks too that a probability of 1 drops everything.
#[test]
fn dropout_in_additive_attention_matches_dropped_weights() -> Result<()> {
    let golden = Golden::open("d2l_additive");
    let [queries, keys, values] = ["queries", "keys", "values"].map(|name| golden.get("none", name));
    let input = || AdditiveInput::new(queries, keys, values);
    let layer = |dropout: f64| {
        let cfg = AdditiveAttentionConfig::new(5, 6, 8).with_dropout(dropout);
        AdditiveAttention::new(&cfg, weights::open(golden.file("model.safetensors"), DType::F32, &Device::Cpu)?)
    };
    let evaluated = layer(0.5)?.forward_with(input())?;
    assert_close(&evaluated.output, golden.get("none", "expected_f64"), TOLERANCE, "no dropout outside training");
    let seed = TorchSeed::new(3);
    let trained = layer(0.5)?.forward_with(input().with_train(true).with_dropout_seed(&seed))?;
    let keep = TorchSeed::new(3).dropout_keep((3, 1, 4, 6), 0.5)?.squeeze(1)?.to_dtype(DType::F32)?;
    let expected = (evaluated.weights.mul(&keep)? / 0.5)?;
    assert_close(&trained.weights, &expected, 1e-6, "weights after dropout");
    assert_close(&trained.output, &expected.matmul(values)?, 1e-6, "context after dropout");
    let nothing = layer(1.0)?.forward_with(input().with_train(true))?;
    assert_close(&nothing.output, &nothing.output.zeros_like()?, 0.0, "everything dropped");
    Ok(())
}

/// Draws PyTorch's dropout mask: the generator is seeded just before the forward pass, as in the tutorial.
#[test]
fn dropout_in_frontend_48_train_matches_pytorch() -> Result<()> {
    let golden = Golden::open(TRAINED);
    let plain = Golden::open("frontend_48");
    let system = System { golden: &golden, ..System::open(&plain, DType::F32, &Device::Cpu)? };
    let (output, weights) = system.run("main", true)?;
    let weights = weights.expect("a layer");
    golden.check("main", "output", &output)?;
    golden.check("main", "attn_weights", &weights)?;
    assert_close(&weights.ne(0f32)?, golden.get("main", "keep"), 0.0, "what is kept");
    Ok(())
}
