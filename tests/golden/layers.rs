//! Systems that are layers: loaded in their own layout, in f32, f16 and bf16.

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::weights;
use candle_attention::{
    AdditiveAttention, AdditiveAttentionConfig, AdditiveInput, AttentionInput, AttentionMask, EmptyRows, LayerOutput,
    MultiHeadAttention, MultiHeadAttentionConfig, ValidLens, WeightLayout,
};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;

use crate::common::{Golden, assert_close, max_error, systems};
use crate::{TOLERANCE, on_each_device};

/// Folders of one layer each: those whose layout is one of the crate's.
fn layers() -> Vec<String> {
    let is_layer = |name: &String| {
        let layout = &Golden::open_config(name)["layout"];
        name != "frontend_48_train" && layout.as_str().is_some_and(|layout| layout.parse::<WeightLayout>().is_ok())
    };
    let layers: Vec<_> = systems().into_iter().filter(is_layer).collect();
    assert!(layers.len() >= 30, "{layers:?}");
    layers
}

/// Folders that a test of this file reads.
pub fn tested() -> Vec<String> {
    let others = ["d2l_additive", "frontend_48_train", "frontend_embedding"].map(String::from);
    layers().into_iter().chain(others).collect()
}

/// A layer, and the embedding in front of it where the system starts from ids.
struct System {
    golden: Golden,
    embedding: Option<EmbeddingLayer>,
    layer: MultiHeadAttention,
    dtype: DType,
    device: Device,
}

impl System {
    fn open(name: &str, dtype: DType, device: &Device) -> Result<Self> {
        let golden = Golden::open(name);
        let layout: WeightLayout = golden.config["layout"].as_str().expect("a layout").parse()?;
        let cfg: MultiHeadAttentionConfig = config(&golden);
        let vb = vb(&golden, dtype, device)?;
        let embedding = match &golden.config["embedding"] {
            serde_json::Value::Null => None,
            table => {
                let size = |key: &str| table[key].as_u64().expect("a size") as usize;
                let cfg = EmbeddingConfig::new(size("vocab_size"), size("embed_dim"));
                Some(EmbeddingLayer::new(&cfg, vb.clone())?)
            }
        };
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        Ok(Self { golden, embedding, layer, dtype, device: device.clone() })
    }

    fn run(&self, case: &str) -> Result<LayerOutput> {
        let input = |name: &str| match self.golden.find(case, name) {
            Some(tensor) => Ok(Some(tensor.to_dtype(self.dtype)?.to_device(&self.device)?)),
            None => Ok::<_, candle_core::Error>(None),
        };
        let mask = mask(&self.golden, case, &self.device)?;
        let xs = match &self.embedding {
            Some(embedding) => Some(embedding.forward(&self.golden.get(case, "ids").to_device(&self.device)?)?),
            None => input("x")?,
        };
        if let Some(xs) = xs {
            return self.layer.forward_with_weights(AttentionInput::new(&xs).with_mask(&mask));
        }
        let [q, k, v] = match input("q")? {
            Some(q) => [Some(q), input("k")?, input("v")?],
            None => [input("queries")?, input("keys")?, input("values")?],
        }
        .map(|tensor| tensor.expect("the case has queries, keys and values"));
        self.layer.forward_with_weights(AttentionInput::new(&q).with_key_value(&k, &v).with_mask(&mask))
    }
}

/// The config of the crate's layer.
fn config<T: serde::de::DeserializeOwned>(golden: &Golden) -> T {
    serde_json::from_value(golden.config["layer"].clone()).expect("`layer` is a config")
}

/// The builder over a system's weights: its file, or its seed where the file would be large.
fn vb(golden: &Golden, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let file = golden.file("model.safetensors");
    if file.is_file() {
        return weights::open(file, dtype, device);
    }
    Ok(TorchSeed::new(golden.config["manual_seed"].as_u64().expect("a seed")).var_builder(dtype, device))
}

/// The mask of a case: d2l's lengths, or PyTorch's tensors in which 1 hides.
fn mask(golden: &Golden, case: &str, device: &Device) -> Result<AttentionMask> {
    let mut mask = AttentionMask::none();
    if let Some(lens) = golden.find(case, "valid_lens") {
        mask = mask.with_valid_lens(ValidLens::from_tensor(lens)?).with_empty_rows(EmptyRows::Uniform);
    }
    if let Some(hidden) = golden.find(case, "attn_mask") {
        mask = mask.with_keep(&hidden.eq(0u8)?.to_device(device)?);
    }
    if let Some(hidden) = golden.find(case, "key_padding_mask") {
        mask = mask.and(&AttentionMask::from_attention_mask(&hidden.eq(0u8)?.to_device(device)?)?);
    }
    Ok(mask)
}

/// Loading, masks and layer.
fn every_layer_gives_pytorchs_numbers(device: &Device) -> Result<()> {
    for name in layers() {
        let system = System::open(&name, DType::F32, device)?;
        for case in system.golden.cases() {
            let what = format!("{name}, {case}");
            let LayerOutput { output, weights } = system.run(&case)?;
            assert_close(&output, system.golden.get(&case, "expected_f64"), TOLERANCE, &what);
            assert_close(&output, system.golden.get(&case, "output"), TOLERANCE, &what);
            let expected = system.golden.get(&case, "attn_weights_f64");
            // Single heads come without the head dimension, d2l with (batch · heads).
            assert_close(&weights.reshape(expected.dims())?, expected, TOLERANCE, &format!("{what}, weights"));
        }
    }
    Ok(())
}

on_each_device!(every_layer_gives_pytorchs_numbers);

#[test]
fn half_precision_errs_at_most_twice_as_much_as_pytorchs() -> Result<()> {
    for (name, dtype) in layers().iter().flat_map(|name| [(name, DType::F16), (name, DType::BF16)]) {
        let system = System::open(name, dtype, &Device::Cpu)?;
        assert_half(&system.golden, dtype, |case| Ok(system.run(case)?.output))?;
    }
    Ok(())
}

/// The error in half precision is at most twice that of PyTorch's own, both against f64. Over all cases of a system: in
/// one case of a single token a few roundings decide, which is luck.
fn assert_half(golden: &Golden, dtype: DType, run: impl Fn(&str) -> Result<Tensor>) -> Result<()> {
    let (mut ours, mut pytorchs) = (0f64, 0f64);
    for case in golden.cases() {
        let Some(pytorch) = golden.find(&case, &format!("output_{}", dtype.as_str())) else {
            let elsewhere = std::env::var_os("CANDLE_ATTENTION_MODELS").is_some();
            assert!(elsewhere, "{}, {case}: PyTorch's result in {dtype:?} is missing", golden.name);
            continue;
        };
        let context = run(&case)?;
        assert_eq!(context.dtype(), dtype);
        let exact = golden.get(&case, "expected_f64");
        ours = ours.max(max_error(&context, exact));
        pytorchs = pytorchs.max(max_error(pytorch, exact));
    }
    assert!(ours <= 2.0 * pytorchs, "{} in {dtype:?} is off by {ours:e}, PyTorch by {pytorchs:e}", golden.name);
    Ok(())
}

#[test]
fn d2l_additive_gives_pytorch_numbers() -> Result<()> {
    let golden = Golden::open("d2l_additive");
    let layer = |dtype: DType| AdditiveAttention::new(&config(&golden), vb(&golden, dtype, &Device::Cpu)?);
    let exact = layer(DType::F32)?;
    for case in golden.cases() {
        let [queries, keys, values] = ["queries", "keys", "values"].map(|name| golden.get(&case, name));
        let mask = mask(&golden, &case, &Device::Cpu)?;
        let output = exact.forward_with_weights(queries, keys, values, &mask)?;
        assert_close(&output.context, golden.get(&case, "expected_f64"), TOLERANCE, &case);
        assert_close(&output.weights, golden.get(&case, "attn_weights_f64"), TOLERANCE, &case);
        assert_close(&exact.forward(queries, keys, values, &mask)?, &output.context, 0.0, &case);
    }
    for dtype in [DType::F16, DType::BF16] {
        let layer = layer(dtype)?;
        assert_half(&golden, dtype, |case| {
            let [queries, keys, values] =
                ["queries", "keys", "values"].map(|name| golden.get(case, name).to_dtype(dtype));
            layer.forward(&queries?, &keys?, &values?, &mask(&golden, case, &Device::Cpu)?)
        })?;
    }
    Ok(())
}

/// Training drops weights as the function does, and dropping all leaves nothing.
#[test]
fn additive_attention_trains_with_dropout() -> Result<()> {
    let golden = Golden::open("d2l_additive");
    let [queries, keys, values] = ["queries", "keys", "values"].map(|name| golden.get("none", name));
    let input = || AdditiveInput::new(queries, keys, values);
    let layer = |dropout: f64| {
        let cfg = AdditiveAttentionConfig::new(5, 6, 8).with_dropout(dropout);
        AdditiveAttention::new(&cfg, vb(&golden, DType::F32, &Device::Cpu)?)
    };
    let evaluated = layer(0.5)?.forward_with(input())?;
    assert_close(&evaluated.context, golden.get("none", "expected_f64"), TOLERANCE, "no dropout outside training");
    let seed = TorchSeed::new(3);
    let trained = layer(0.5)?.forward_with(input().with_train(true).with_dropout_seed(&seed))?;
    let keep = TorchSeed::new(3).dropout_keep((3, 1, 4, 6), 0.5)?.squeeze(1)?.to_dtype(DType::F32)?;
    let expected = (evaluated.weights.mul(&keep)? / 0.5)?;
    assert_close(&trained.weights, &expected, 1e-6, "weights after dropout");
    assert_close(&trained.context, &expected.matmul(values)?, 1e-6, "context after dropout");
    let nothing = layer(1.0)?.forward_with(input().with_train(true))?;
    assert_close(&nothing.context, &nothing.context.zeros_like()?, 0.0, "everything dropped");
    Ok(())
}

#[test]
fn frontend_embedding_gives_pytorch_numbers() -> Result<()> {
    let golden = Golden::open("frontend_embedding");
    let cfg: EmbeddingConfig = config(&golden);
    let layer = EmbeddingLayer::new(&cfg, vb(&golden, DType::F32, &Device::Cpu)?)?;
    assert_close(&layer.forward(golden.get("main", "ids"))?, golden.get("main", "output"), 0.0, "from the file");
    Ok(())
}

/// Training with PyTorch's own dropout mask: seeded just before the forward pass, as the tutorial would.
#[test]
fn frontend_48_train_drops_what_pytorch_drops() -> Result<()> {
    let golden = Golden::open("frontend_48_train");
    let system = System::open("frontend_48", DType::F32, &Device::Cpu)?;
    let xs = system.embedding.as_ref().expect("an embedding").forward(golden.get("main", "ids"))?;
    let input = AttentionInput::new(&xs).with_train(true);
    let seed = TorchSeed::new(1);
    let output = system.layer.forward_with_weights(input.with_dropout_seed(&seed))?;
    assert_close(&output.output, golden.get("main", "output"), TOLERANCE, "output");
    assert_close(&output.weights, golden.get("main", "attn_weights"), TOLERANCE, "weights");
    let kept = output.weights.ne(0f32)?;
    assert_close(&kept, golden.get("main", "keep"), 0.0, "what is kept");

    let evaluated = system.layer.forward_with(AttentionInput::new(&xs).with_dropout_seed(&seed))?;
    assert_close(
        &evaluated,
        Golden::open("frontend_48").get("main", "output"),
        TOLERANCE,
        "no dropout outside training",
    );
    Ok(())
}
