//! The metadata of GGUF files, with values of every type: each is read for what it is, or an error names its key.

use candle_attention::{AlibiConfig, MultiHeadAttentionConfig, RopeScaling, gguf, hf};
use candle_core::Result;
use candle_core::quantized::gguf_file::Value;
use proptest::prelude::*;
use serde_json::{Value as Json, json};

use crate::common::gguf::File;
use crate::common::property::for_all;

const LAYERS: usize = 4;
const PATTERN: &str = "attention.sliding_window_pattern";

/// Returns a file of four layers of an architecture, without tensors.
fn file(architecture: &str) -> File {
    let key_heads = if ["modern-bert", "mpt", "bert", "gptneox"].contains(&architecture) { 2 } else { 1 };
    let metadata = json!({
        "block_count": LAYERS, "embedding_length": 16, "context_length": 64, "attention.head_count": 2,
        "attention.head_count_kv": key_heads, "attention.key_length": 8, "attention.sliding_window": 6,
    });
    let mut file = File::of(architecture, &metadata);
    if !WITH_PATTERN.contains(&architecture) {
        file.metadata.retain(|(key, _)| !key.ends_with("sliding_window"));
    }
    file
}

/// The architectures in which some layers have a window.
const WITH_PATTERN: [&str; 5] = ["gemma2", "gemma3", "gpt-oss", "cohere2", "modern-bert"];

/// Returns whether each layer has a window.
fn windows(file: &File) -> Result<Vec<bool>> {
    let config = gguf::hf_config(&file.open()?.0)?;
    let layer =
        |layer| hf::attention_config(&config, layer).map(|cfg| cfg.window().is_some() || cfg.local_window().is_some());
    (0..LAYERS).map(layer).collect()
}

#[test]
fn gguf_window_pattern_of_integers_is_that_of_flags() -> Result<()> {
    let expected = [true, false, false, true];
    type Entry = fn(bool) -> Value;
    let types: [(&str, Entry); 9] = [
        ("bool", Value::Bool),
        ("u8", |flag| Value::U8(flag.into())),
        ("i8", |flag| Value::I8(flag.into())),
        ("u16", |flag| Value::U16(flag.into())),
        ("i16", |flag| Value::I16(flag.into())),
        ("u32", |flag| Value::U32(flag.into())),
        ("i32", |flag| Value::I32(flag.into())),
        ("u64", |flag| Value::U64(flag.into())),
        ("i64", |flag| Value::I64(flag.into())),
    ];
    for architecture in WITH_PATTERN {
        for (name, entry) in types {
            let mut file = file(architecture);
            file.set(&format!("{architecture}.{PATTERN}"), Value::Array(expected.map(entry).into()));
            assert_eq!(windows(&file)?, expected, "{architecture}, {name}");
        }
    }
    Ok(())
}

#[test]
fn gguf_window_pattern_of_one_number_is_llama_cpps_period() -> Result<()> {
    for architecture in WITH_PATTERN {
        for (period, expected) in [
            (0, [true; 4]),
            (1, [false; 4]),
            (2, [true, false, true, false]),
            (3, [true, true, false, true]),
            (7, [true; 4]),
        ] {
            // ModernBERT's layers without a window come first.
            let expected = match (architecture, period) {
                ("modern-bert", 2) => [false, true, false, true],
                ("modern-bert", 3) => [false, true, true, false],
                ("modern-bert", 7) => [false, true, true, true],
                _ => expected,
            };
            let mut file = file(architecture);
            file.set(&format!("{architecture}.{PATTERN}"), Value::U32(period));
            assert_eq!(windows(&file)?, expected, "{architecture}, one in {period}");
        }
    }
    Ok(())
}

#[test]
fn gguf_window_pattern_without_a_layer_is_rejected() -> Result<()> {
    for architecture in WITH_PATTERN {
        for value in [
            Value::Array(vec![Value::Bool(true); LAYERS - 1]),
            Value::Array(vec![Value::I32(2); LAYERS]),
            Value::Array(vec![Value::I32(-1); LAYERS]),
            Value::Array(vec![Value::F32(1.0); LAYERS]),
            Value::Array(Vec::new()),
            Value::Bool(true),
            Value::String("true".into()),
        ] {
            let mut file = file(architecture);
            file.set(&format!("{architecture}.{PATTERN}"), value.clone());
            let error = gguf::hf_config(&file.open()?.0).expect_err("a pattern").to_string();
            assert!(error.contains(PATTERN), "{architecture}, {value:?}: {error}");
        }
    }
    Ok(())
}

/// The kind of value that a key expects.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// A whole number, or a list of the same number for each layer.
    Size,
    /// A finite number with a fraction.
    Number,
    Flag,
    Text,
}

/// A key, an architecture that reads it, and what the layer or the config.json has for a value of it.
struct Key {
    name: &'static str,
    architecture: &'static str,
    kind: Kind,
    /// Other keys that it depends on.
    beside: fn() -> Vec<(&'static str, Value)>,
    found: fn(&MultiHeadAttentionConfig, &Json) -> Json,
    /// For a number; flags are 0 and 1.
    expected: fn(f64) -> Json,
}

fn yarn() -> Vec<(&'static str, Value)> {
    vec![
        ("rope.scaling.type", Value::String("yarn".into())),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", Value::U32(16)),
    ]
}

fn yarn_numbers(cfg: &MultiHeadAttentionConfig) -> Option<[f64; 4]> {
    match cfg.rope()?.scaling() {
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
            Some([*factor, *original_context as f64, *beta_fast, *beta_slow])
        }
        _ => None,
    }
}

fn same(number: f64) -> Json {
    json!(number)
}

/// Returns a number, or 0 or 1 for a flag; null is none.
fn as_number(json: &Json) -> Option<f64> {
    json.as_bool().map(|flag| f64::from(u8::from(flag))).or(json.as_f64())
}

/// A key of the config.json alone, a number of things or a number.
macro_rules! passed_on {
    ($key:literal, $architecture:literal, $kind:ident, $field:literal) => {
        Key {
            name: $key,
            architecture: $architecture,
            kind: Kind::$kind,
            beside: Vec::new,
            found: |_, config| config[$field].clone(),
            expected: same,
        }
    };
}

const KEYS: &[Key] = &[
    passed_on!("block_count", "llama", Size, "num_hidden_layers"),
    Key { found: |cfg, _| json!(cfg.embed_dim()), ..passed_on!("embedding_length", "llama", Size, "hidden_size") },
    Key { found: |cfg, _| json!(cfg.num_heads()), ..passed_on!("attention.head_count", "gemma2", Size, "") },
    Key { found: |cfg, _| json!(cfg.num_kv_heads()), ..passed_on!("attention.head_count_kv", "qwen3", Size, "") },
    Key { found: |cfg, _| json!(cfg.head_dim()), ..passed_on!("attention.key_length", "llama", Size, "") },
    Key { found: |cfg, _| json!(cfg.value_head_dim()), ..passed_on!("attention.value_length", "llama", Size, "") },
    passed_on!("context_length", "llama", Size, "max_position_embeddings"),
    passed_on!("feed_forward_length", "llama", Size, "intermediate_size"),
    passed_on!("vocab_size", "llama", Size, "vocab_size"),
    passed_on!("expert_count", "llama", Size, "num_local_experts"),
    passed_on!("expert_used_count", "llama", Size, "num_experts_per_tok"),
    passed_on!("attention.layer_norm_rms_epsilon", "llama", Number, "rms_norm_eps"),
    passed_on!("attention.layer_norm_epsilon", "bert", Number, "layer_norm_eps"),
    passed_on!("final_logit_softcapping", "gemma2", Number, "final_logit_softcapping"),
    passed_on!("logit_scale", "command-r", Number, "logit_scale"),
    passed_on!("embedding_scale", "granite", Number, "embedding_multiplier"),
    passed_on!("residual_scale", "granite", Number, "residual_multiplier"),
    passed_on!("use_parallel_residual", "gptneox", Flag, "use_parallel_residual"),
    Key {
        found: |cfg, _| json!(cfg.softcap()),
        expected: same,
        ..passed_on!("attn_logit_softcapping", "gemma2", Number, "")
    },
    Key {
        found: |cfg, _| json!(cfg.scale()),
        // llama.cpp takes 0 for the usual scale.
        expected: |scale| if scale == 0.0 { Json::Null } else { json!(scale) },
        ..passed_on!("attention.scale", "llama", Number, "")
    },
    Key {
        found: |cfg, _| json!(cfg.window()),
        expected: |window| if window == 0.0 { Json::Null } else { json!(window) },
        beside: || vec![("attention.sliding_window_pattern", Value::Array(vec![Value::Bool(true); LAYERS]))],
        ..passed_on!("attention.sliding_window", "cohere2", Size, "")
    },
    Key {
        found: |cfg, _| json!(cfg.causal()),
        expected: |causal| json!(causal != 0.0),
        ..passed_on!("attention.causal", "llama", Flag, "")
    },
    Key {
        found: |cfg, _| json!(cfg.clip_qkv()),
        expected: |clip| if clip == 0.0 { Json::Null } else { json!(clip) },
        ..passed_on!("attention.clamp_kqv", "mpt", Number, "")
    },
    Key {
        found: |cfg, _| {
            json!(cfg.alibi().map_or(0.0, |alibi| if *alibi == AlibiConfig::Standard { 8.0 } else { -1.0 }))
        },
        ..passed_on!("attention.max_alibi_bias", "mpt", Number, "")
    },
    Key {
        found: |cfg, _| json!(cfg.rope().map(|rope| rope.base())),
        ..passed_on!("rope.freq_base", "llama", Number, "")
    },
    Key {
        found: |cfg, _| json!(cfg.rope().map(|rope| rope.base())),
        beside: || vec![("attention.sliding_window_pattern", Value::Array(vec![Value::Bool(true); LAYERS]))],
        ..passed_on!("rope.freq_base_swa", "gemma3", Number, "")
    },
    Key {
        found: |cfg, _| json!(cfg.rope().map(|rope| rope.rotary_dim(cfg.head_dim()))),
        ..passed_on!("rope.dimension_count", "llama", Size, "")
    },
    Key {
        found: |cfg, _| match cfg.rope().map(|rope| rope.scaling()) {
            Some(RopeScaling::Linear { factor }) => json!(factor),
            _ => json!(1.0),
        },
        // llama.cpp takes 0 for no scaling.
        expected: |factor| if factor == 0.0 { json!(1.0) } else { json!(factor) },
        ..passed_on!("rope.scaling.factor", "llama", Number, "")
    },
    Key {
        found: |cfg, _| match cfg.rope().map(|rope| rope.scaling()) {
            Some(RopeScaling::Linear { factor }) => json!(factor),
            _ => json!(1.0),
        },
        expected: |factor| if factor == 0.0 { json!(1.0) } else { json!(factor) },
        ..passed_on!("rope.scale_linear", "llama", Number, "")
    },
    Key {
        found: |cfg, _| json!(yarn_numbers(cfg).map(|numbers| numbers[1] as u64)),
        beside: yarn,
        ..passed_on!("rope.scaling.original_context_length", "llama", Size, "")
    },
    Key {
        found: |cfg, _| json!(yarn_numbers(cfg).map(|numbers| numbers[2])),
        // transformers takes 0 for absent.
        expected: |beta| if beta == 0.0 { json!(32.0) } else { json!(beta) },
        beside: yarn,
        ..passed_on!("rope.scaling.yarn_beta_fast", "llama", Number, "")
    },
    Key {
        found: |cfg, _| json!(yarn_numbers(cfg).map(|numbers| numbers[3])),
        expected: |beta| if beta == 0.0 { json!(1.0) } else { json!(beta) },
        beside: yarn,
        ..passed_on!("rope.scaling.yarn_beta_slow", "llama", Number, "")
    },
    Key { found: |_, _| json!(1.0), ..passed_on!("rope.scaling.attn_factor", "llama", Number, "") },
    Key { found: |_, _| json!(0.0), ..passed_on!("attention.temperature_scale", "llama", Number, "") },
    Key { found: |_, _| json!(1.0), ..passed_on!("attention.output_scale", "llama", Number, "") },
    Key { found: |_, _| json!(0.0), ..passed_on!("rope.scaling.yarn_log_multiplier", "llama", Number, "") },
    Key { found: |_, _| json!(1.0), ..passed_on!("rope.scaling.yarn_attn_factor", "llama", Number, "") },
    Key { found: |_, _| json!(1.0), ..passed_on!("rope.scaling.yarn_ext_factor", "llama", Number, "") },
    passed_on!("rope.scaling.type", "llama", Text, ""),
    passed_on!("tokenizer.ggml.bos_token_id", "llama", Size, "bos_token_id"),
    passed_on!("tokenizer.ggml.eos_token_id", "llama", Size, "eos_token_id"),
];

/// Draws a value of one of the types of the format, except lists.
fn single() -> impl Strategy<Value = Value> {
    const NUMBERS: [f64; 9] = [-1.0, 0.0, 1.0, 2.0, 4.0, 8.0, 100.0, 10_000.0, 4_294_967_295.0];
    const FRACTIONS: [f64; 8] = [0.5, 0.25, 1e-5, 1.5, 3e38, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let number = prop_oneof![3 => prop::sample::select(&NUMBERS[..]), 2 => prop::sample::select(&FRACTIONS[..])];
    (0..13usize, number, prop::sample::select(&["", "none", "linear", "yarn", "longrope", "10000", "true"][..]))
        .prop_map(|(kind, number, text)| match kind {
            0 => Value::U8(number as u8),
            1 => Value::I8(number as i8),
            2 => Value::U16(number as u16),
            3 => Value::I16(number as i16),
            4 => Value::U32(number as u32),
            5 => Value::I32(number as i32),
            6 => Value::U64(number as u64),
            7 => Value::I64(number as i64),
            8 | 9 => Value::F32(number as f32),
            10 => Value::F64(number),
            11 => Value::Bool(number > 0.0),
            _ => Value::String(text.into()),
        })
}

/// Draws any value. Lists have an entry for each layer, or another number of entries.
fn value() -> impl Strategy<Value = Value> {
    let list = (single(), prop::sample::select(&[0, 1, LAYERS, LAYERS, LAYERS + 1][..]));
    let list = list.prop_map(|(entry, count)| Value::Array(vec![entry; count]));
    prop_oneof![4 => single(), 1 => list]
}

/// Returns the number that a value means for a kind of key, or none for a value of another type.
fn meaning(kind: Kind, name: &str, value: &Value) -> Option<f64> {
    let integer = |number: &Value| match number {
        Value::U8(n) => Some(f64::from(*n)),
        Value::I8(n) => Some(f64::from(*n)),
        Value::U16(n) => Some(f64::from(*n)),
        Value::I16(n) => Some(f64::from(*n)),
        Value::U32(n) => Some(f64::from(*n)),
        Value::I32(n) => Some(f64::from(*n)),
        Value::U64(n) => Some(*n as f64),
        Value::I64(n) => Some(*n as f64),
        _ => None,
    };
    match (kind, value) {
        (Kind::Size, Value::Array(list)) if list.len() == LAYERS && !name.starts_with("tokenizer") => {
            integer(&list[0]).filter(|_| name != "block_count")
        }
        (Kind::Size, value) => integer(value),
        (Kind::Number, Value::F64(number)) => Some(*number),
        // The shortest decimal.
        (Kind::Number, Value::F32(number)) => number.to_string().parse().ok(),
        (Kind::Flag, Value::Bool(flag)) => Some(f64::from(u8::from(*flag))),
        _ => None,
    }
}

#[test]
fn gguf_block_count_that_is_too_large_is_named() -> Result<()> {
    for architecture in gguf::architectures() {
        let mut file = file(architecture);
        file.set(&format!("{architecture}.block_count"), Value::U64(u64::MAX));
        let error = gguf::hf_config(&file.open()?.0).expect_err(architecture).to_string();
        assert!(error.contains("block_count is 18446744073709551615, expected at most 65536"), "{error}");
    }
    Ok(())
}

#[test]
fn gguf_metadata_of_every_type_are_read_or_their_key_is_named() {
    for_all(4000, (0..KEYS.len(), value()), |(key, value)| {
        let key = &KEYS[key];
        let mut file = file(key.architecture);
        for (name, other) in (key.beside)() {
            file.set(&format!("{}.{name}", key.architecture), other);
        }
        let is_global = key.name.starts_with("tokenizer");
        let full = if is_global { key.name.to_string() } else { format!("{}.{}", key.architecture, key.name) };
        file.set(&full, value.clone());
        let content = file.open()?.0;
        let read = gguf::hf_config(&content).and_then(|config| Ok((gguf::attention_config(&content)?, config)));
        let what = format!("{full} = {value:?}");
        match (read, meaning(key.kind, key.name, &value)) {
            (Err(error), _) => assert!(error.to_string().contains(key.name), "{what}: {error}"),
            (Ok(_), None) if key.kind == Kind::Text => {
                let known = ["none", "linear", "longrope"];
                assert!(value.to_string().is_ok_and(|text| known.contains(&text.as_str())), "{what} was read");
            }
            (Ok(_), None) => panic!("{what} was read, though it is of another type"),
            (Ok((cfg, config)), Some(number)) => {
                assert_eq!(as_number(&(key.found)(&cfg, &config)), as_number(&(key.expected)(number)), "{what}");
            }
        }
        Ok(())
    });
}

#[test]
fn gguf_rope_base_that_is_not_finite_is_refused() -> Result<()> {
    for value in [Value::F32(f32::NAN), Value::F32(f32::INFINITY), Value::F64(f64::NEG_INFINITY), Value::U32(500_000)] {
        let mut file = file("llama");
        file.set("llama.rope.freq_base", value.clone());
        let error = gguf::attention_config(&file.open()?.0).expect_err("no base").to_string();
        assert!(error.contains("rope.freq_base is"), "{value:?}: {error}");
    }
    Ok(())
}

#[test]
fn gguf_attention_factor_without_frequency_factors_is_refused() -> Result<()> {
    let mut file = file("phi3");
    file.set("phi3.rope.scaling.attn_factor", Value::F32(1.25));
    let error = gguf::attention_config(&file.open()?.0).expect_err("a factor").to_string();
    assert!(error.contains("rope.scaling.attn_factor is 1.25"), "{error}");
    Ok(())
}
