//! GGUF files against the checkpoints that they are made of, as llama.cpp's converter makes them.

use std::io::Cursor;

use candle_attention::text::SpecialTokens;
use candle_attention::{
    MultiHeadAttention, MultiHeadAttentionConfig, PackedLinear, ProjectionModules, QkNorm, QkNormKind, RopeScaling,
    RopeStyle, WeightLayout, gguf, hf,
};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QMatMul};
use candle_core::{DType, IndexOp, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use serde_json::{Value as Json, json};

use crate::common::gguf::File;
use crate::common::{assert_close, error_text, relative_error, values};
use crate::{CPU, Model};

/// What the converter does to an architecture.
struct Converted {
    name: &'static str,
    model: &'static str,
    packs: bool,
    permutes: bool,
    /// Fields of the configuration that differ, where a file cannot say what the model does.
    edits: fn() -> Json,
}

const fn of(name: &'static str, model: &'static str) -> Converted {
    Converted { name, model, packs: false, permutes: false, edits: || json!({}) }
}

impl Converted {
    const fn packs(self) -> Self {
        Self { packs: true, ..self }
    }

    const fn permutes(self) -> Self {
        Self { permutes: true, ..self }
    }

    const fn edits(self, edits: fn() -> Json) -> Self {
        Self { edits, ..self }
    }
}

const NO_WINDOW: fn() -> Json = || json!({"use_sliding_window": false, "sliding_window": null, "layer_types": null});

const CONVERTED: &[Converted] = &[
    of("bert", "bert"),
    of("bloom", "bloom").packs(),
    of("chatglm", "glm").packs(),
    of("chatglm", "glm_full_rotary"),
    of("cohere2", "cohere2"),
    of("command-r", "cohere"),
    of("command-r", "cohere_qk_norm"),
    of("falcon", "falcon_every_head").packs(),
    of("falcon", "falcon_grouped").packs(),
    of("falcon", "falcon_multi_query").packs(),
    of("gemma", "gemma"),
    of("gemma2", "gemma2").edits(|| json!({"query_pre_attn_scalar": 12})),
    of("gemma3", "gemma3").edits(|| json!({"query_pre_attn_scalar": 12})),
    of("glm4", "glm4"),
    of("gpt-oss", "gpt_oss"),
    of("gpt2", "gpt2").packs(),
    of("gptneox", "gpt_neox").packs(),
    of("granite", "granite").permutes(),
    of("llama", "llama").permutes(),
    of("llama", "llama_linear").permutes(),
    of("llama", "llama_llama3").permutes(),
    of("llama", "llama_yarn").permutes(),
    of("llama", "mistral").permutes(),
    of("llama", "mistral_full").permutes(),
    of("llama", "mixtral").permutes(),
    of("modern-bert", "modernbert").packs(),
    of("mpt", "mpt").packs(),
    of("nomic-bert", "nomic_bert").packs(),
    of("olmo2", "olmo2"),
    of("olmo2", "olmo2_bias"),
    of("phi2", "phi"),
    of("phi3", "phi3").packs(),
    of("phi3", "phi3_longrope_long").packs(),
    of("phi3", "phi3_longrope_short").packs(),
    of("qwen2", "qwen2").edits(NO_WINDOW),
    of("qwen3", "qwen3").edits(NO_WINDOW),
    of("qwen3", "qwen3_bias"),
    of("smollm3", "smollm3").permutes().edits(
        || json!({"use_sliding_window": false, "sliding_window": null, "layer_types": null, "no_rope_layers": null}),
    ),
    of("stablelm", "stablelm"),
    of("stablelm", "stablelm_qk_layernorm"),
    of("starcoder", "gpt_bigcode").packs(),
    of("starcoder2", "starcoder2"),
    of("starcoder2", "starcoder2_no_bias"),
];

impl Converted {
    fn model(&self) -> Model {
        let mut model = Model::named(self.model);
        for (name, value) in (self.edits)().as_object().expect("edits are an object") {
            model.config[name] = value.clone();
        }
        model
    }

    /// A layer's config as a file has it.
    fn config(&self, model: &Model, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let mut cfg = hf::attention_config(&model.config, layer)?;
        if let Some(norm @ QkNorm { kind: QkNormKind::RmsPlusOne, .. }) = cfg.qk_norm() {
            cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::Rms, ..norm });
        }
        if let Some(rope) = cfg.rope().cloned().filter(|_| self.permutes) {
            cfg = cfg.with_rope(rope.with_style(RopeStyle::Interleaved));
        }
        Ok(cfg)
    }

    fn write(&self, model: &Model, dtype: GgmlDType) -> Result<File> {
        let mut file = File::default();
        file.set("general.architecture", Value::String(self.name.into()));
        let layers = (0..model.layers()).map(|i| hf::attention_config(&model.config, i)).collect::<Result<Vec<_>>>()?;
        self.metadata(model, &layers, &mut file)?;
        for i in 0..model.layers() {
            self.tensors(&hf::load_attention(&model.config, i, model.vb())?, i, dtype, &mut file)?;
        }
        Ok(file)
    }

    fn metadata(&self, model: &Model, layers: &[MultiHeadAttentionConfig], file: &mut File) -> Result<()> {
        let cfg = &layers[layers.len() - 1];
        let mut size = |key: &str, size: usize| file.set(&format!("{}.{key}", self.name), Value::U32(size as u32));
        size("block_count", layers.len());
        size("embedding_length", cfg.embed_dim());
        size("attention.head_count", cfg.num_heads());
        size("attention.head_count_kv", cfg.num_kv_heads());
        size("attention.key_length", cfg.head_dim());
        size("attention.value_length", cfg.value_head_dim());
        let context = model.config.get("max_position_embeddings").and_then(Json::as_u64).unwrap_or(64) as usize;
        size("context_length", context);
        let windows: Vec<_> = layers.iter().map(|cfg| cfg.window().or(cfg.band().map(|(side, _)| 2 * side))).collect();
        if let Some(window) = windows.iter().flatten().next() {
            size("attention.sliding_window", *window);
        }
        let windowed: Vec<_> = windows.iter().map(Option::is_some).collect();
        if windowed.contains(&true) && windowed.contains(&false) {
            let pattern = windowed.iter().map(|&windowed| Value::Bool(windowed)).collect();
            file.set(&format!("{}.attention.sliding_window_pattern", self.name), Value::Array(pattern));
        }
        let mut number = |key: &str, number: f64| {
            file.set(&format!("{}.{key}", self.name), Value::F32(number as f32));
        };
        for (field, key) in [
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("attention_multiplier", "attention.scale"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
        ] {
            if let Some(value) = model.config.get(field).and_then(Json::as_f64) {
                number(key, value);
            }
        }
        if self.name == "mpt" {
            number("attention.scale", cfg.scale().expect("the model has one"));
            number("attention.clamp_kqv", cfg.clip_qkv().expect("the model has one"));
            number("attention.max_alibi_bias", 8.0);
        }
        let ropes: Vec<_> = layers.iter().map(|cfg| cfg.rope().cloned()).collect();
        let Some(rope) = ropes.iter().flatten().last() else { return Ok(()) };
        number("rope.freq_base", rope.base());
        if let Some(other) = ropes.iter().flatten().find(|other| other.base() != rope.base()) {
            number("rope.freq_base_swa", other.base());
        }
        if self.name == "modern-bert" {
            number("rope.freq_base", 160_000.0);
            number("rope.freq_base_swa", 10_000.0);
        }
        let mut factors = |name: &str, list: Vec<f32>| {
            let len = list.len();
            file.add(name, &Tensor::from_vec(list, len, &CPU)?, GgmlDType::F32)
        };
        match rope.scaling() {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => {
                file.set(&format!("{}.rope.scaling.type", self.name), Value::String("linear".into()));
                file.set(&format!("{}.rope.scaling.factor", self.name), Value::F32(*factor as f32));
            }
            RopeScaling::Yarn { factor, original_context, .. } => {
                file.set(&format!("{}.rope.scaling.type", self.name), Value::String("yarn".into()));
                file.set(&format!("{}.rope.scaling.factor", self.name), Value::F32(*factor as f32));
                let original = Value::U32(*original_context as u32);
                file.set(&format!("{}.rope.scaling.original_context_length", self.name), original);
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                // The converter's own loop.
                let (r, context) = (rope.rotary_dim(cfg.head_dim()), *original_context as f64);
                let divisor = |i: usize| {
                    let wavelength = std::f64::consts::TAU * rope.base().powf(i as f64 / r as f64);
                    if wavelength < context / high_freq_factor {
                        return 1.0;
                    }
                    if wavelength > context / low_freq_factor {
                        return *factor as f32;
                    }
                    let smooth = (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
                };
                factors("rope_freqs.weight", (0..r).step_by(2).map(divisor).collect())?;
            }
            RopeScaling::LongRope { short_factor, long_factor, original_context, factor, .. } => {
                let single = |list: &[f64]| list.iter().map(|&factor| factor as f32).collect();
                factors("rope_factors_short.weight", single(short_factor))?;
                factors("rope_factors_long.weight", single(long_factor))?;
                let (original, scale) = (*original_context as f64, factor.expect("the context is longer"));
                let attention = (1.0 + scale.ln() / original.ln()).sqrt();
                let original = Value::U32(*original_context as u32);
                file.set(&format!("{}.rope.scaling.original_context_length", self.name), original);
                file.set(&format!("{}.rope.scaling.attn_factor", self.name), Value::F32(attention as f32));
            }
            other => panic!("the converter knows no {other:?}"),
        }
        let rotary_dim = rope.rotary_dim(cfg.head_dim()) as u32;
        file.set(&format!("{}.rope.dimension_count", self.name), Value::U32(rotary_dim));
        Ok(())
    }

    fn tensors(&self, layer: &MultiHeadAttention, i: usize, dtype: GgmlDType, file: &mut File) -> Result<()> {
        let cfg = layer.config();
        let (q, k, v, o) = layer.projections()?;
        // (H, 2, D/2, ..) to (H, D/2, 2, ..).
        let permuted = |tensor: &Tensor, heads: usize| {
            let rest = &tensor.dims()[1..];
            let pairs = tensor.reshape([&[heads, 2, cfg.head_dim() / 2], rest].concat())?.transpose(1, 2)?;
            pairs.contiguous()?.reshape(tensor.dims())
        };
        let rows = |linear: &Linear, heads: usize| {
            let own = |tensor: &Tensor| if self.permutes { permuted(tensor, heads) } else { tensor.contiguous() };
            Ok::<_, candle_core::Error>(Linear::new(own(linear.weight())?, linear.bias().map(own).transpose()?))
        };
        let (q, k) = (rows(&q, cfg.num_heads())?, rows(&k, cfg.num_kv_heads())?);
        let o = o.expect("every model has an output projection");
        let mut add = |name: &str, linear: &Linear| {
            file.add(&format!("blk.{i}.{name}.weight"), linear.weight(), dtype)?;
            match linear.bias() {
                Some(bias) => file.add(&format!("blk.{i}.{name}.bias"), bias, GgmlDType::F32),
                None => Ok(()),
            }
        };
        if self.packs {
            let cat = |part: fn(&Linear) -> Option<&Tensor>| match [&q, &k, &v].map(part) {
                [Some(q), Some(k), Some(v)] => Tensor::cat(&[q, k, v], 0).map(Some),
                _ => Ok(None),
            };
            let weight = cat(|linear| Some(linear.weight()))?.expect("there are weights");
            add("attn_qkv", &Linear::new(weight, cat(Linear::bias)?))?;
        } else {
            [("attn_q", &q), ("attn_k", &k), ("attn_v", &v)].into_iter().try_for_each(|(name, own)| add(name, own))?;
        }
        add("attn_output", &o)?;
        let gemma = matches!(cfg.qk_norm(), Some(QkNorm { kind: QkNormKind::RmsPlusOne, .. }));
        for (name, tensor) in layer.state_dict(WeightLayout::Canonical)? {
            let (name, tensor) = match name.as_str() {
                "q_norm.weight" | "k_norm.weight" if gemma => (format!("attn_{name}"), (tensor + 1.0)?),
                "q_norm.weight" | "k_norm.weight" => (format!("attn_{name}"), tensor),
                "sinks" => ("attn_sinks.weight".to_string(), tensor),
                _ => continue,
            };
            file.add(&format!("blk.{i}.{name}"), &tensor, GgmlDType::F32)?;
        }
        Ok(())
    }
}

fn load((content, reader): &mut (Content, Cursor<Vec<u8>>), layer: usize) -> Result<MultiHeadAttention> {
    gguf::load_attention(content, reader, layer, &CPU)
}

#[test]
fn every_architecture_is_shown() {
    let mut shown: Vec<_> = CONVERTED.iter().map(|converted| converted.name).collect();
    shown.dedup();
    assert_eq!(gguf::architectures().collect::<Vec<_>>(), shown);
    assert!(shown.is_sorted());
}

#[test]
fn layers_compute_what_the_checkpoint_does() -> Result<()> {
    for converted in CONVERTED {
        let model = converted.model();
        let mut file = converted.write(&model, GgmlDType::F32)?.open()?;
        for i in 0..model.layers() {
            let layer = load(&mut file, i).unwrap_or_else(|error| panic!("{}: {error}", converted.model));
            let mut expected = converted.config(&model, i)?;
            if let Some(rope) =
                layer.config().rope().filter(|rope| matches!(rope.scaling(), RopeScaling::LongRope { .. }))
            {
                // The factors of a file are f32, and say nothing of where they come from.
                expected = expected.with_rope(rope.clone());
            }
            assert_eq!(*layer.config(), expected, "{}, layer {i}", converted.model);
            let xs = &model.golden[&format!("layer{i}.in")];
            let ys = hf::load_attention(&model.config, i, model.vb())?.forward(xs)?;
            let error = relative_error(&layer.forward(xs)?, &ys);
            assert!(error <= 1e-5, "{}, layer {i}: off by {error:e}", converted.model);
        }
        let has_factors = file.0.tensor_infos.keys().any(|name| name.starts_with("rope_"));
        match gguf::attention_config(&file.0) {
            Ok(cfg) => assert_eq!((has_factors, &cfg), (false, load(&mut file, 0)?.config()), "{}", converted.model),
            Err(error) => assert!(has_factors, "{}: {error}", converted.model),
        }
    }
    Ok(())
}

/// 4 heads over 2 of 64, with weights of every type that a file may have.
fn wide(packs: bool) -> (Converted, Model) {
    let mut model = Model::named(if packs { "phi3" } else { "llama" });
    for (name, size) in [("hidden_size", 256), ("head_dim", 64), ("num_attention_heads", 4), ("num_key_value_heads", 2)]
    {
        model.config[name] = json!(size);
    }
    let edits = json!({"num_hidden_layers": 1, "attention_bias": !packs, "rope_parameters": {"rope_theta": 10_000.0}});
    edits.as_object().expect("an object").iter().for_each(|(name, value)| model.config[name] = value.clone());
    let numbers = |shape: &[usize], seed: f64| {
        let count = shape.iter().product::<usize>();
        (Tensor::arange(0f32, count as f32, &CPU)?.affine(0.731, seed)?.sin()? * 0.1)?.reshape(shape)
    };
    let mut weights = vec![("o_proj", 256)];
    weights.extend(if packs {
        vec![("qkv_proj", 512)]
    } else {
        vec![("q_proj", 256), ("k_proj", 128), ("v_proj", 128)]
    });
    model.weights = weights
        .iter()
        .enumerate()
        .flat_map(|(i, (name, rows))| {
            let name = format!("model.layers.0.self_attn.{name}");
            let bias = (!packs).then(|| (format!("{name}.bias"), numbers(&[*rows], 3.0 + i as f64)));
            bias.into_iter().chain([(format!("{name}.weight"), numbers(&[*rows, 256], i as f64))])
        })
        .map(|(name, tensor)| (name, tensor.expect("numbers")))
        .collect();
    model.golden = [("layer0.in".to_string(), numbers(&[2, 7, 256], 0.5).expect("numbers"))].into();
    (if packs { of("phi3", "phi3").packs() } else { of("llama", "llama").permutes() }, model)
}

/// Beside a layer of modules that are the file's own weights: dequantised, or Candle's product for K-quants.
#[test]
fn every_type_of_weight_loads() -> Result<()> {
    use GgmlDType::*;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        for packs in [false, true] {
            let (converted, model) = wide(packs);
            let (content, mut reader) = converted.write(&model, dtype)?.open()?;
            let layer = gguf::load_attention(&content, &mut reader, 0, &CPU)?;
            let is_k_quant = matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K);
            let mut module = |name: &str, rows: Option<std::ops::Range<usize>>| {
                let tensor = content.tensor(&mut reader, &format!("blk.0.{name}.weight"), &CPU)?;
                let bias = content.tensor(&mut reader, &format!("blk.0.{name}.bias"), &CPU).ok();
                let bias = bias.map(|bias| bias.dequantize(&CPU)).transpose()?;
                let product = QMatMul::from_arc(tensor.into())?;
                let exact = Linear::new(product.dequantize_f16()?.to_dtype(DType::F32)?, None);
                let exact = if is_k_quant { exact } else { Linear::new(product_weight(&product)?, None) };
                Ok::<_, candle_core::Error>(move |xs: &Tensor| {
                    let ys = if is_k_quant { product.forward(xs)? } else { exact.forward(xs)? };
                    let ys = match &bias {
                        Some(bias) => ys.broadcast_add(bias)?,
                        None => ys,
                    };
                    match &rows {
                        Some(rows) => ys.i((.., .., rows.clone()))?.contiguous(),
                        None => Ok(ys),
                    }
                })
            };
            let [q, k, v] = match packs {
                true => [0..256, 256..384, 384..512].map(|rows| module("attn_qkv", Some(rows))),
                false => ["attn_q", "attn_k", "attn_v"].map(|name| module(name, None)),
            };
            let modules = ProjectionModules::new(q?, k?, v?).with_output(module("attn_output", None)?);
            let expected =
                MultiHeadAttention::from_modules(layer.config(), modules, VarBuilder::zeros(DType::F32, &CPU))?;
            let xs = &model.golden["layer0.in"];
            let (ys, expected) = (layer.forward(xs)?, expected.forward(xs)?);
            match is_k_quant {
                true => assert_eq!(values(&ys), values(&expected), "{dtype:?}"),
                false => assert!(relative_error(&ys, &expected) < 1e-5, "{dtype:?}"),
            }
        }
    }
    Ok(())
}

fn product_weight(product: &QMatMul) -> Result<Tensor> {
    match product {
        QMatMul::QTensor(tensor) => tensor.dequantize(&CPU),
        QMatMul::Tensor(tensor) | QMatMul::TensorF16(tensor) => tensor.to_dtype(DType::F32),
    }
}

#[test]
fn linear_layers_load_with_their_biases() -> Result<()> {
    let (converted, model) = wide(false);
    let xs = &model.golden["layer0.in"];
    for dtype in [GgmlDType::F32, GgmlDType::BF16, GgmlDType::Q8_0] {
        let (content, mut reader) = converted.write(&model, dtype)?.open()?;
        let weight = content.tensor(&mut reader, "blk.0.attn_v.weight", &CPU)?.dequantize(&CPU)?;
        let bias = content.tensor(&mut reader, "blk.0.attn_v.bias", &CPU)?.dequantize(&CPU)?;
        let expected = PackedLinear::new(&weight, Some(&bias))?.forward(xs)?;
        let ys = gguf::load_linear(&content, &mut reader, "blk.0.attn_v", &CPU)?.forward(xs)?;
        assert_close(&ys, &expected, 1e-5, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn configs_say_what_the_metadata_do() -> Result<()> {
    let mut file = File::llama()?;
    file.set("llama.feed_forward_length", Value::U32(24));
    file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    file.set("llama.rope.freq_base", Value::F32(500_000.0));
    let config = gguf::hf_config(&file.open()?.0)?;
    let expected = json!({
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 1, "intermediate_size": 24, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    });
    for (name, value) in expected.as_object().expect("an object") {
        assert_eq!(config[name], *value, "{name}");
    }
    Ok(())
}

/// A file of this vocabulary, whose first three tokens are the unknown one, that of the beginning and that of the end.
fn vocabulary(model: &str, tokens: &[&str]) -> File {
    let tokens: Vec<_> = ["<unk>", "<s>", "</s>"].iter().chain(tokens).collect();
    let list = tokens.iter().map(|token| Value::String(token.to_string())).collect();
    let types = [2, 3, 3].into_iter().chain(tokens[3..].iter().map(|token| match token.starts_with("<0x") {
        true => 6,
        false => 1,
    }));
    let mut file = File::default();
    for (key, value) in [
        ("model", Value::String(model.into())),
        ("tokens", Value::Array(list)),
        ("token_type", Value::Array(types.map(Value::I32).collect())),
        ("scores", Value::Array((0..tokens.len()).map(|i| Value::F32(-(i as f32))).collect())),
        ("bos_token_id", Value::U32(1)),
        ("eos_token_id", Value::U32(2)),
    ] {
        file.set(&format!("tokenizer.ggml.{key}"), value);
    }
    file
}

fn tokens(file: &File, text: &str) -> Result<(Vec<String>, String)> {
    let tokenizer = gguf::tokenizer(&file.open()?.0)?;
    let encoding = tokenizer.encode(text)?;
    Ok((encoding.tokens, tokenizer.decode_with(&encoding.ids, SpecialTokens::Without)?))
}

/// The token of the highest score is made first: "he" before "el", and "▁he" of them. What no token has goes by its
/// bytes.
#[test]
fn sentencepiece_merges_by_score() -> Result<()> {
    let pieces = ["<0xC3>", "<0xA9>", "he", "el", "▁he", "ll", "▁", "h", "e", "l", "o"];
    let mut file = vocabulary("llama", &pieces);
    let (found, text) = tokens(&file, "hello é")?;
    assert_eq!(found, ["<s>", "▁he", "ll", "o", "▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(text, "hello é");
    assert_eq!(tokens(&file, "hel")?.0, ["<s>", "▁he", "l"]);
    for (key, flag) in [("add_space_prefix", false), ("add_bos_token", false), ("add_eos_token", true)] {
        file.set(&format!("tokenizer.ggml.{key}"), Value::Bool(flag));
    }
    assert_eq!(tokens(&file, "hello")?.0, ["he", "ll", "o", "</s>"]);
    Ok(())
}

/// A token of some megabytes beside short ones: as many places to split it.
#[test]
fn long_tokens_take_no_more_than_their_length() -> Result<()> {
    let long = "ab".repeat(1 << 21);
    let file = vocabulary("llama", &["a", "b", "▁", "ab", &long, &long[1..], "abc", "c"]);
    assert_eq!(tokens(&file, "abc")?.0, ["<s>", "▁", "abc"]);
    Ok(())
}

/// Candle divides by it, and takes it from an integer of any of these types.
#[test]
fn an_alignment_of_zero_is_refused_and_others_are_read() -> Result<()> {
    let of = |value: Value, key: &str| {
        let mut file = File::llama()?;
        file.set("note", Value::Array(vec![Value::String("general.alignment".into()), Value::String(String::new())]));
        file.set(key, value);
        file.set("zero", Value::U32(0));
        file.open().map(|(content, _)| content.tensor_data_offset)
    };
    let (zeros, ones): (Vec<_>, Vec<_>) = [0, 1]
        .map(|n| [Value::U8(n), Value::I8(n as i8), Value::U16(n.into()), Value::I16(n.into()), Value::U32(n.into())])
        .map(|values| values.to_vec())
        .into();
    for (zero, one) in zeros.into_iter().zip(ones) {
        for key in ["general.alignment", "general.alignment\0"] {
            assert_eq!(error_text(of(zero.clone(), key)), "[gguf] general.alignment is 0, expected at least 1");
            assert!(of(one.clone(), key).is_ok());
        }
    }
    Ok(())
}

#[test]
fn bytes_merge_within_the_pieces_of_a_text() -> Result<()> {
    let pieces =
        ["h", "e", "l", "o", "1", "2", "3", "4", "Ġ", "he", "ll", "llo", "12", "123", "Ġhe", "e\u{301}", "Ã", "©"];
    let mut file = vocabulary("gpt2", &pieces);
    let merges = ["h e", "l l", "ll o", "1 2", "12 3", "Ġ he"].map(|merge| Value::String(merge.into()));
    file.set("tokenizer.ggml.merges", Value::Array(merges.into()));
    let expected: [(&str, &[&str]); 5] = [
        ("gpt-2", &["he", "llo", "Ġhe", "123", "4"]),
        ("smollm", &["he", "llo", "Ġhe", "1", "2", "3", "4"]),
        ("llama-bpe", &["<s>", "he", "llo", "Ġhe", "123", "4"]),
        ("stablelm2", &["he", "llo", "Ġhe", "1", "2", "3", "4"]),
        ("qwen2", &["he", "llo", "Ġhe", "1", "2", "3", "4"]),
    ];
    for (pre, expected) in expected {
        file.set("tokenizer.ggml.pre", Value::String(pre.into()));
        let (found, text) = tokens(&file, "hello he1234")?;
        assert_eq!(
            (found, text.as_str()),
            (expected.iter().map(ToString::to_string).collect(), "hello he1234"),
            "{pre}"
        );
    }
    // Composed first: one letter of two bytes.
    assert_eq!(tokens(&file, "e\u{301}")?.0, ["Ã", "©"]);
    Ok(())
}
