//! Calls that are allowed, since somebody may intend them, and that are usually mistakes. Each kind is logged once in a
//! process, so each is tested in a separate process.

use std::process::Command;
use std::sync::Mutex;

use crate::*;

#[path = "warnings/loading.rs"]
mod loading;

/// The environment variable that names the misuse that a subprocess tries.
const MISUSE: &str = "CACHE_TEST_MISUSE";

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Recorder;

impl log::Log for Recorder {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() == log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            WARNINGS.lock().expect("no panic before").push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// Returns the warnings so far.
fn warnings() -> Vec<String> {
    WARNINGS.lock().expect("no panic before").clone()
}

/// Checks that the uses before this call were not warned about.
pub(crate) fn assert_silent(uses: &str) {
    assert!(warnings().is_empty(), "{uses}: {:?}", warnings());
}

fn xs(b: usize, t: usize) -> Result<Tensor> {
    wave(b, t, 8, 0.1)
}

fn decoder() -> Result<MultiHeadAttention> {
    layer(&Config::new(8, 2).with_causal(true).with_rope(RopeConfig::new(100.0)))
}

/// The inputs of a call other than its tokens and its cache.
#[derive(Clone, Copy, Default)]
struct Given<'a> {
    mask: Option<&'a AttentionMask>,
    starts: Option<&'a [usize]>,
    valid_lens: Option<&'a [usize]>,
    positions: Option<&'a Tensor>,
}

const NOTHING: Given = Given { mask: None, starts: None, valid_lens: None, positions: None };

fn masked(mask: &AttentionMask) -> Given<'_> {
    Given { mask: Some(mask), ..NOTHING }
}

fn left_padded(starts: &[usize]) -> Given<'_> {
    Given { starts: Some(starts), ..NOTHING }
}

fn at(positions: &Tensor) -> Given<'_> {
    Given { positions: Some(positions), ..NOTHING }
}

fn call<'a>(layer: &MultiHeadAttention, xs: &'a Tensor, cache: &'a mut AttentionCache, given: Given<'a>) -> Result<()> {
    let input = AttentionInput::new(xs).with_cache(cache).with_mask(given.mask).with_positions(given.positions);
    layer.forward_with(input.with_starts(given.starts).with_valid_lens(given.valid_lens))?;
    Ok(())
}

/// Calls a layer with a prompt of two sequences of 4 positions, and then with a token.
fn prompt_and_step(prompt: Given, step: Given) -> Result<()> {
    let layer = decoder()?;
    let mut cache = AttentionCache::default();
    call(&layer, &xs(2, 4)?, &mut cache, prompt)?;
    call(&layer, &xs(2, 1)?, &mut cache, step)
}

fn two_calls(layer: &dyn Layer, mask: &AttentionMask) -> Result<()> {
    let mut cache = AttentionCache::default();
    for _ in 0..2 {
        layer.run(AttentionInput::new(&xs(1, 2)?).with_mask(mask).with_cache(&mut cache))?;
    }
    Ok(())
}

/// Makes two calls of a layer that is not causal.
fn not_causal(kind: impl Fn(bool) -> LayerKind) -> Result<()> {
    let layer = |causal| kind(causal).layer(TorchSeed::new(1).var_builder(DType::F32, &DEVICE));
    let none = AttentionMask::none();
    two_calls(&*layer(true)?, &none)?;
    let layer = layer(false)?;
    layer.run(AttentionInput::new(&xs(1, 4)?).with_cache(&mut AttentionCache::default()))?;
    two_calls(&*layer, &AttentionMask::causal())?;
    two_calls(&*layer, &none.clone().with_local_window(3, 0))?;
    two_calls(&*layer, &none.clone().with_bias(&Tensor::zeros((1, 1, 1, 1), DType::F32, &DEVICE)?))?;
    assert_silent("a causal layer or mask, a window that ends at the query, a bias, one call");
    two_calls(&*layer, &none)?;
    two_calls(&*layer, &none.with_local_window(3, 1))
}

/// Stores left padding in the cache, since only the mask of the prompt names it.
fn stored_left_padding() -> Result<()> {
    let padding = AttentionMask::none().with_starts(vec![2, 0]);
    prompt_and_step(masked(&padding), masked(&padding))?;
    prompt_and_step(left_padded(&[2, 0]), NOTHING)?;
    let tensor = AttentionMask::none().with_bool_mask(&Tensor::ones((2, 1, 1, 5), DType::U8, &DEVICE)?);
    prompt_and_step(masked(&padding), masked(&tensor))?;
    let none = AttentionMask::none().with_starts(vec![0, 0]);
    prompt_and_step(masked(&none), NOTHING)?;
    assert_silent("padding in every mask, or left out");
    for _ in 0..2 {
        prompt_and_step(masked(&padding), NOTHING)?;
    }
    Ok(())
}

fn stored_right_padding() -> Result<()> {
    let padding = AttentionMask::none().with_valid_lens(vec![4, 3]);
    prompt_and_step(Given { valid_lens: Some(&[4, 3]), ..NOTHING }, NOTHING)?;
    prompt_and_step(masked(&AttentionMask::none().with_valid_lens(vec![4, 9])), NOTHING)?;
    assert_silent("padding that is left out, and lengths of the whole prompt");
    prompt_and_step(masked(&padding), NOTHING)
}

fn stored_padding_of_attention_mask() -> Result<()> {
    let rows = |rows: &[[u32; 4]; 2]| AttentionMask::from_attention_mask(&Tensor::new(rows, &DEVICE)?);
    let full = rows(&[[1; 4]; 2])?;
    prompt_and_step(masked(&full), NOTHING)?;
    assert_silent("an attention mask of ones");
    // One run of ones in each row, and several.
    let padded = rows(&[[0, 1, 1, 1], [1; 4]])?;
    let torn = rows(&[[1, 0, 1, 1], [1; 4]])?;
    prompt_and_step(masked(&torn), NOTHING)?;
    prompt_and_step(masked(&padded), NOTHING)
}

/// Makes a step whose mask counts padding that the cache has removed.
fn left_padding_counted_twice() -> Result<()> {
    let starts = [2, 0];
    let none = AttentionMask::none;
    let window = none().with_window(3);
    prompt_and_step(left_padded(&starts), masked(&window))?;
    prompt_and_step(NOTHING, masked(&none().with_starts(vec![2, 0])))?;
    assert_silent("no mask that counts padding, or nothing left out");
    let bias = Tensor::zeros((2, 1, 1, 5), DType::F32, &DEVICE)?;
    prompt_and_step(left_padded(&starts), masked(&none().with_bias(&bias)))?;
    prompt_and_step(left_padded(&starts), masked(&none().with_starts(vec![2, 0])))
}

/// Calls a causal layer with keys and values of another sequence.
fn causal_cross_attention() -> Result<()> {
    let queries = xs(2, 3)?;
    let others = xs(2, 5)?;
    let cfg = Config::new(8, 2);
    let cross = |own: &Config| -> Result<()> {
        let layer = layer(own)?;
        let memory = layer.project_memory(&others, &others)?;
        layer.forward_with(AttentionInput::new(&queries).with_memory(&memory))?;
        layer.forward_with(AttentionInput::new(&queries).with_key_value(&others, &others))?;
        Ok(())
    };
    cross(&cfg)?;
    let causal = cfg.clone().with_causal(true);
    layer(&causal)?.forward_with(AttentionInput::new(&queries).with_key_value(&queries, &queries))?;
    let reader = layer(&causal.clone().with_kv_sharing(KvSharing::EarlierLayer))?;
    let same = &queries;
    let memory = layer(&causal)?.project_memory(same, same)?;
    reader.forward_with(AttentionInput::new(&queries).with_memory(&memory))?;
    let mask = AttentionMask::causal();
    let input = AttentionInput::new(&queries).with_key_value(same, same).with_mask(&mask);
    layer(&cfg)?.forward_with(input)?;
    assert_silent("a layer that is not causal, the queries' own keys, an earlier layer's, a causal mask of the call");
    cross(&causal)?;
    cross(&cfg.with_window(2))
}

fn dropout_with_cache() -> Result<()> {
    let run = |p: f64, cache: &AttentionCacheConfig, train: bool| -> Result<()> {
        let layer = layer(&Config::new(8, 2).with_causal(true).with_dropout(p))?;
        let mut cache = AttentionCache::new(cache)?;
        layer.forward_with(AttentionInput::new(&xs(1, 3)?).with_cache(&mut cache).with_train(train))?;
        layer.forward_with(AttentionInput::new(&xs(1, 3)?).with_train(train))?;
        Ok(())
    };
    let plain = AttentionCacheConfig::new();
    let detached = AttentionCacheConfig::new().with_detached(true);
    run(0.5, &plain, false)?;
    run(0.0, &plain, true)?;
    run(0.5, &detached, true)?;
    assert_silent("no dropout, and a cache made for training");
    run(0.5, &plain, true)?;
    run(0.5, &plain, true)
}

fn positions_that_go_back() -> Result<()> {
    let tensor = |positions: &[u32]| Tensor::new(positions, &DEVICE);
    let next = tensor(&[4])?;
    let first = tensor(&[0])?;
    prompt_and_step(NOTHING, at(&next))?;
    let far = tensor(&[10, 11, 12, 13])?;
    let after = tensor(&[14])?;
    prompt_and_step(at(&far), at(&after))?;
    // A layer that has no use for positions.
    let layer = layer(&Config::new(8, 2).with_causal(true))?;
    let mut cache = AttentionCache::default();
    layer.forward_with(AttentionInput::new(&xs(1, 4)?).with_cache(&mut cache))?;
    layer.forward_with(AttentionInput::new(&xs(1, 1)?).with_cache(&mut cache).with_positions(&first))?;
    assert_silent("positions that go on, and those that the layer does not use");
    prompt_and_step(NOTHING, at(&first))?;
    prompt_and_step(at(&far), NOTHING)
}

/// Calls a layer with positions on several axes that begin anew.
fn axis_positions_that_go_back() -> Result<()> {
    let axes = RopeAxes::new(vec![1, 1], RopeAxisLayout::Sections);
    let layer = layer(&Config::new(8, 2).with_causal(true).with_rope(RopeConfig::new(100.0).with_axes(axes)))?;
    let prompt = Tensor::new(&[[0u32, 1, 2, 3]; 2], &DEVICE)?;
    let token = |at: u32| Tensor::new(&[[at]; 2], &DEVICE);
    let run = |at: &Tensor| -> Result<()> {
        let mut cache = AttentionCache::default();
        layer.forward_with(AttentionInput::new(&xs(1, 4)?).with_cache(&mut cache).with_axis_positions(&prompt))?;
        layer.forward_with(AttentionInput::new(&xs(1, 1)?).with_cache(&mut cache).with_axis_positions(at))?;
        Ok(())
    };
    run(&token(4)?)?;
    assert_silent("axis positions that go on");
    run(&token(0)?)
}

/// Makes a call with a causal offset other than the number of positions in the cache.
fn causal_offset_other_than_the_cache() -> Result<()> {
    let right = AttentionMask::causal_with_offset(4);
    prompt_and_step(NOTHING, masked(&right))?;
    assert_silent("the offset of the cache");
    let other = AttentionMask::causal_with_offset(1);
    prompt_and_step(NOTHING, masked(&other))
}

/// transformers reads `attention_factor` alone.
fn other_factor_of_yarn() -> Result<()> {
    let config = |name: &str, factor: f64| {
        let mut config = serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        });
        config["rope_scaling"][name] = factor.into();
        candle_attention::hf::attention_config(&config, 0)
    };
    let plain = config("attn_factor", 1.0)?;
    assert_ne!(config("attention_factor", 1.5)?, plain);
    assert_silent("a factor of 1, and transformers' factor");
    assert_eq!(config("attn_factor", 1.5)?, plain);
    config("attn_factor", 1.5).map(drop)
}

/// A kind of misuse: its name, what the one warning contains, and calls of which some are right and the last ones are
/// misuse.
type Misuse = (&'static str, &'static str, fn() -> Result<()>);

const MISUSES: [Misuse; 18] = [
    ("not causal", "a layer that is not causal continues a cache", || {
        not_causal(|causal| LayerKind::MultiHead(Config::new(8, 2).with_causal(causal)))
    }),
    ("not causal, latent", "a layer that is not causal continues a cache", || {
        let latent = || LatentConfig::new(8, 2).with_kv_lora_rank(4).with_rope_head_dim(2);
        not_causal(|causal| LayerKind::Latent(latent().with_causal(causal)))
    }),
    ("stored left padding", "attends to padding", stored_left_padding),
    ("stored right padding", "attends to padding", stored_right_padding),
    ("stored padding of an attention mask", "attends to padding", stored_padding_of_attention_mask),
    ("left padding counted twice", "the cache does not store the padding", left_padding_counted_twice),
    ("causal cross-attention", "in cross-attention", causal_cross_attention),
    ("dropout with a cache", "dropout", dropout_with_cache),
    ("another factor of YaRN", "attn_factor", other_factor_of_yarn),
    ("positions that go back", "positions", positions_that_go_back),
    ("axis positions that go back", "positions", axis_positions_that_go_back),
    ("causal offset", "offset", causal_offset_other_than_the_cache),
    ("inverted attention mask", "row 1 of the attention mask is all zeros", loading::inverted_attention_mask),
    ("length above the keys", "the mask has a length of 9, and there are 6 keys", loading::length_above_the_keys),
    ("layout of Meta", "the layout meta is loaded with `RopeStyle::RotateHalf`", || {
        loading::halves(WeightLayout::Meta)
    }),
    ("layout of torchtune", "expected `RopeStyle::Interleaved`", || loading::halves(WeightLayout::Torchtune)),
    ("config without sizes", "the config has no sizes", loading::config_without_sizes),
    ("optimizer before the adapter", "unchanged after 64 calls of training", loading::optimizer_before_the_adapter),
];

/// Runs one misuse in a subprocess of `misuse_is_logged_once`, where nothing else has logged a warning.
#[test]
#[ignore = "runs in a process that another test starts"]
fn child_tries_one_misuse() -> Result<()> {
    let name = std::env::var(MISUSE).expect("the test that starts this one names a misuse");
    log::set_logger(&Recorder).expect("no other test has a logger");
    log::set_max_level(log::LevelFilter::Warn);
    let (_, expected, run) = MISUSES.into_iter().find(|(known, ..)| *known == name).expect("a known misuse");
    run()?;
    let warnings = warnings();
    assert!(warnings.len() == 1 && warnings[0].contains(expected), "{name}: {warnings:?}");
    Ok(())
}

#[test]
fn misuse_is_logged_once() {
    for (name, ..) in MISUSES {
        let mut child = Command::new(std::env::current_exe().expect("a path to this test"));
        child.args(["warnings::child_tries_one_misuse", "--exact", "--ignored"]).env(MISUSE, name);
        let output = child.output().expect("the subprocess runs");
        let text = [&output.stdout[..], &output.stderr].concat();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&text));
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{name}: {output:?}");
    }
}

/// Checks that a mask with columns for padding is an error: transformers' attention mask of a step has them, and a
/// cache stores no padding.
#[test]
fn attention_mask_with_columns_for_padding_not_in_cache_is_rejected() -> Result<()> {
    let mask = |rows: &[[u32; 5]; 2]| AttentionMask::from_attention_mask(&Tensor::new(rows, &DEVICE)?);
    let right_padded = Given { valid_lens: Some(&[2, 4]), ..NOTHING };
    for (prompt, wrong, right) in [
        (left_padded(&[2, 0]), [[0, 0, 1, 1, 1], [1; 5]], [[1, 1, 1, 0, 0], [1; 5]]),
        (right_padded, [[1, 1, 0, 0, 1], [1; 5]], [[1, 1, 1, 0, 0], [1; 5]]),
    ] {
        let error = prompt_and_step(prompt, masked(&mask(&wrong)?)).expect_err("a column for padding").to_string();
        let expected = "[attention_mask] the attention mask has a token in column 4 of sequence 0, expected none after \
                        its 3 positions: a cache stores no padding";
        assert!(error.starts_with(expected), "{error}");
        prompt_and_step(prompt, masked(&mask(&right)?))?;
    }
    Ok(())
}
