//! GGUF files against the checkpoints that they are made of, as llama.cpp's converter makes them: those of `gguf.txt`,
//! an architecture as files name it, a model, and its rows.

use std::io::Cursor;

use candle_attention::{
    MultiHeadAttention, MultiHeadAttentionConfig, PackedLinear, QkNorm, QkNormKind, RopeScaling, RopeStyle,
    WeightLayout, gguf, hf,
};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;
use serde_json::{Value as Json, json};

use crate::common::gguf::File;
use crate::common::{recorded, relative_error};
use crate::{CPU, Model};

/// What the converter does to the rows of queries, keys and values.
#[derive(Clone, Copy, PartialEq)]
enum Rows {
    Kept,
    Packed,
    Permuted,
}

use Rows::{Kept, Packed, Permuted};

/// An architecture as files name it, one of the models, and its rows.
struct Converted {
    name: String,
    model: String,
    rows: Rows,
}

/// Those of `gguf.txt`.
fn converted() -> Vec<Converted> {
    let of = |line: &str| {
        let [name, model, rows] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let rows = match rows {
            "kept" => Kept,
            "packed" => Packed,
            _ => Permuted,
        };
        Converted { name: name.into(), model: model.into(), rows }
    };
    std::fs::read_to_string(recorded("hf/gguf.txt")).expect("the file is there").lines().map(of).collect()
}

impl Converted {
    /// With other fields where a file cannot say what the model does.
    fn model(&self) -> Model {
        let mut model = Model::named(&self.model);
        let absent: &[&str] = match self.model.as_str() {
            "qwen2" | "qwen3" => &["sliding_window", "layer_types"],
            "smollm3" => &["sliding_window", "layer_types", "no_rope_layers"],
            _ => &[],
        };
        absent.iter().for_each(|name| model.config[*name] = Json::Null);
        match self.model.as_str() {
            "gemma2" | "gemma3" => model.config["query_pre_attn_scalar"] = json!(12),
            "qwen2" | "qwen3" | "smollm3" => model.config["use_sliding_window"] = json!(false),
            _ => {}
        }
        model
    }

    /// A layer's config as a file has it.
    fn config(&self, model: &Model, layer: usize) -> Result<MultiHeadAttentionConfig> {
        let mut cfg = hf::attention_config(&model.config, layer)?;
        if let Some(norm @ QkNorm { kind: QkNormKind::RmsPlusOne, .. }) = cfg.qk_norm() {
            cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::Rms, ..norm });
        }
        if let Some(rope) = cfg.rope().cloned().filter(|_| self.rows == Permuted) {
            cfg = cfg.with_rope(rope.with_style(RopeStyle::Interleaved));
        }
        Ok(cfg)
    }

    fn write(&self, model: &Model) -> Result<File> {
        let mut file = File::default();
        file.set("general.architecture", Value::String(self.name.clone()));
        let layers = (0..model.layers()).map(|i| hf::attention_config(&model.config, i)).collect::<Result<Vec<_>>>()?;
        for (key, value) in self.metadata(model, &layers) {
            file.set(&format!("{}.{key}", self.name), value);
        }
        for (name, list) in factors(&layers[layers.len() - 1]) {
            file.add(name, &Tensor::new(list, &CPU)?, GgmlDType::F32)?;
        }
        for i in 0..model.layers() {
            self.tensors(&hf::load_attention(&model.config, i, model.vb())?, i, &mut file)?;
        }
        Ok(file)
    }

    /// Later ones replace earlier ones.
    fn metadata(&self, model: &Model, layers: &[MultiHeadAttentionConfig]) -> Vec<(&'static str, Value)> {
        let size = |size: usize| Value::U32(size as u32);
        let number = |number: f64| Value::F32(number as f32);
        let cfg = &layers[layers.len() - 1];
        let context = model.config.get("max_position_embeddings").and_then(Json::as_u64).unwrap_or(64);
        let mut found = vec![
            ("block_count", size(layers.len())),
            ("embedding_length", size(cfg.embed_dim())),
            ("attention.head_count", size(cfg.num_heads())),
            ("attention.head_count_kv", size(cfg.num_kv_heads())),
            ("attention.key_length", size(cfg.head_dim())),
            ("attention.value_length", size(cfg.value_head_dim())),
            ("context_length", size(context as usize)),
        ];
        let windows: Vec<_> = layers.iter().map(|cfg| cfg.window().or(cfg.band().map(|(side, _)| 2 * side))).collect();
        found.extend(windows.iter().flatten().next().map(|window| ("attention.sliding_window", size(*window))));
        let windowed: Vec<_> = windows.iter().map(Option::is_some).collect();
        if windowed.contains(&true) && windowed.contains(&false) {
            let pattern = windowed.into_iter().map(Value::Bool).collect();
            found.push(("attention.sliding_window_pattern", Value::Array(pattern)));
        }
        let fields = [
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("layer_norm_eps", "attention.layer_norm_epsilon"),
            ("attention_multiplier", "attention.scale"),
            ("attn_logit_softcapping", "attn_logit_softcapping"),
        ];
        found.extend(fields.iter().filter_map(|(field, key)| Some((*key, number(model.config.get(field)?.as_f64()?)))));
        if self.name == "mpt" {
            found.extend([
                ("attention.scale", number(cfg.scale().expect("the model has one"))),
                ("attention.clamp_kqv", number(cfg.clip_qkv().expect("the model has one"))),
                ("attention.max_alibi_bias", number(8.0)),
            ]);
        }
        let ropes: Vec<_> = layers.iter().filter_map(MultiHeadAttentionConfig::rope).collect();
        let Some(rope) = ropes.last() else { return found };
        found.push(("rope.freq_base", number(rope.base())));
        let other = ropes.iter().find(|other| other.base() != rope.base());
        found.extend(other.map(|other| ("rope.freq_base_swa", number(other.base()))));
        if self.name == "modern-bert" {
            found.extend([("rope.freq_base", number(160_000.0)), ("rope.freq_base_swa", number(10_000.0))]);
        }
        let kind = |name: &str| ("rope.scaling.type", Value::String(name.into()));
        let original = |context: usize| ("rope.scaling.original_context_length", size(context));
        match rope.scaling() {
            RopeScaling::None | RopeScaling::Llama3 { .. } => {}
            RopeScaling::Linear { factor } => found.extend([kind("linear"), ("rope.scaling.factor", number(*factor))]),
            RopeScaling::Yarn { factor, original_context, .. } => {
                found.extend([kind("yarn"), ("rope.scaling.factor", number(*factor)), original(*original_context)]);
            }
            RopeScaling::LongRope { original_context, factor, .. } => {
                let scale = factor.expect("the context is longer");
                let attention = (1.0 + scale.ln() / (*original_context as f64).ln()).sqrt();
                found.extend([original(*original_context), ("rope.scaling.attn_factor", number(attention))]);
            }
            other => panic!("the converter knows no {other:?}"),
        }
        found.push(("rope.dimension_count", size(rope.rotary_dim(cfg.head_dim()))));
        found
    }

    fn tensors(&self, layer: &MultiHeadAttention, i: usize, file: &mut File) -> Result<()> {
        let cfg = layer.config();
        let (q, k, v, o) = layer.projections()?;
        // (H, 2, D/2, ..) to (H, D/2, 2, ..).
        let permuted = |tensor: &Tensor, heads: usize| {
            let rest = &tensor.dims()[1..];
            let pairs = tensor.reshape([&[heads, 2, cfg.head_dim() / 2], rest].concat())?.transpose(1, 2)?;
            pairs.contiguous()?.reshape(tensor.dims())
        };
        let rows = |linear: &Linear, heads: usize| {
            let own =
                |tensor: &Tensor| if self.rows == Permuted { permuted(tensor, heads) } else { tensor.contiguous() };
            Ok::<_, candle_core::Error>(Linear::new(own(linear.weight())?, linear.bias().map(own).transpose()?))
        };
        let (q, k) = (rows(&q, cfg.num_heads())?, rows(&k, cfg.num_kv_heads())?);
        let o = o.expect("every model has an output projection");
        let mut add = |name: &str, linear: &Linear| {
            file.add(&format!("blk.{i}.{name}.weight"), linear.weight(), GgmlDType::F32)?;
            match linear.bias() {
                Some(bias) => file.add(&format!("blk.{i}.{name}.bias"), bias, GgmlDType::F32),
                None => Ok(()),
            }
        };
        if self.rows == Packed {
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

/// The tensors of a file that divide the frequencies of its positions.
fn factors(cfg: &MultiHeadAttentionConfig) -> Vec<(&'static str, Vec<f32>)> {
    let Some(rope) = cfg.rope() else { return Vec::new() };
    match rope.scaling() {
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
            vec![("rope_freqs.weight", (0..r).step_by(2).map(divisor).collect())]
        }
        RopeScaling::LongRope { short_factor, long_factor, .. } => {
            let single = |list: &[f64]| list.iter().map(|&factor| factor as f32).collect();
            vec![("rope_factors_short.weight", single(short_factor)), ("rope_factors_long.weight", single(long_factor))]
        }
        _ => Vec::new(),
    }
}

fn load((content, reader): &mut (Content, Cursor<Vec<u8>>), layer: usize) -> Result<MultiHeadAttention> {
    gguf::load_attention(content, reader, layer, &CPU)
}

#[test]
fn every_architecture_is_shown() {
    let mut shown: Vec<_> = converted().into_iter().map(|converted| converted.name).collect();
    shown.dedup();
    assert_eq!(gguf::architectures().collect::<Vec<_>>(), shown);
    assert!(shown.is_sorted());
}

#[test]
fn layers_compute_what_the_checkpoint_does() -> Result<()> {
    for converted in converted() {
        let model = converted.model();
        let mut file = converted.write(&model)?.open()?;
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
            model.assert_close(&layer.forward(xs)?, &ys, &format!("layer {i}"));
        }
        let has_factors = file.0.tensor_infos.keys().any(|name| name.starts_with("rope_"));
        match gguf::attention_config(&file.0) {
            Ok(cfg) => assert_eq!((has_factors, &cfg), (false, load(&mut file, 0)?.config()), "{}", converted.model),
            Err(error) => assert!(has_factors, "{}: {error}", converted.model),
        }
    }
    Ok(())
}

fn numbers(shape: &[usize], seed: f64) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    (Tensor::arange(0f32, count as f32, &CPU)?.affine(0.731, seed)?.sin()? * 0.1)?.reshape(shape)
}

/// 4 heads over 2 of 64, as wide as blocks of every type are.
fn wide(name: &str, dtype: GgmlDType) -> Result<File> {
    let mut file = File::default();
    file.set("general.architecture", Value::String(name.into()));
    let heads = [("attention.head_count", 4), ("attention.head_count_kv", 2), ("rope.dimension_count", 64)];
    for (key, size) in [("block_count", 1), ("embedding_length", 256), ("context_length", 64)].into_iter().chain(heads)
    {
        file.set(&format!("{name}.{key}"), Value::U32(size));
    }
    let projections: &[_] = match name {
        "phi3" => &[("attn_output", 256), ("attn_qkv", 512)],
        _ => &[("attn_output", 256), ("attn_q", 256), ("attn_k", 128), ("attn_v", 128)],
    };
    for (i, &(part, rows)) in projections.iter().enumerate() {
        file.add(&format!("blk.0.{part}.weight"), &numbers(&[rows, 256], i as f64)?, dtype)?;
        if name == "llama" {
            file.add(&format!("blk.0.{part}.bias"), &numbers(&[rows], 3.0 + i as f64)?, GgmlDType::F32)?;
        }
    }
    Ok(file)
}

/// Beside the same file with the numbers that its weights stand for. Products with K-quants are Candle's, which rounds
/// inputs to 8 bits too.
#[test]
fn every_type_of_weight_loads() -> Result<()> {
    use GgmlDType::*;
    let xs = numbers(&[2, 7, 256], 0.5)?;
    for dtype in [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let check = |ys: &Tensor, expected: &Tensor| {
            let error = relative_error(ys, expected);
            let is_k_quant = matches!(dtype, Q2K | Q3K | Q4K | Q5K | Q6K);
            assert!(error < 0.05 && (error > 1e-5) == is_k_quant, "{dtype:?}: off by {error:e}");
        };
        for name in ["llama", "phi3"] {
            let file = wide(name, dtype)?;
            let mut plain = File { metadata: file.metadata.clone(), tensors: Vec::new() };
            for (name, tensor) in &file.tensors {
                plain.add(name, &tensor.dequantize(&CPU)?, F32)?;
            }
            let (mut file, mut plain) = (file.open()?, plain.open()?);
            check(&load(&mut file, 0)?.forward(&xs)?, &load(&mut plain, 0)?.forward(&xs)?);
            if name == "llama" {
                let (content, reader) = &mut plain;
                let [weight, bias] = ["weight", "bias"]
                    .map(|part| content.tensor(reader, &format!("blk.0.attn_v.{part}"), &CPU)?.dequantize(&CPU));
                let expected = PackedLinear::new(&weight?, Some(&bias?))?.forward(&xs)?;
                let linear = gguf::load_linear(&file.0, &mut file.1, "blk.0.attn_v", &CPU)?;
                check(&linear.forward(&xs)?, &expected);
            }
        }
    }
    Ok(())
}
