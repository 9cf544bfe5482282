//! Configs whose numbers do not fit together, and configs in JSON.

use candle_core::Error;

use crate::*;

fn cfg() -> Config {
    Config::new(8, 4)
}

fn norm(eps: f64) -> QkNorm {
    QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps }
}

fn learned() -> Config {
    cfg().with_bias_kv(true)
}

type Setter<T> = (&'static str, fn(Config, T) -> Config);

/// Every option that is a size, with sizes that are too small, too large, or do not divide.
#[test]
fn sizes() {
    let options: [Setter<usize>; 9] = [
        ("num_kv_heads", Config::with_num_kv_heads),
        ("head_dim", Config::with_head_dim),
        ("value_head_dim", Config::with_value_head_dim),
        ("out_dim", Config::with_out_dim),
        ("key_size", Config::with_key_size),
        ("value_size", Config::with_value_size),
        ("context_length", Config::with_context_length),
        ("window", Config::with_window),
        ("chunk", Config::with_chunk),
    ];
    let of_option = |(name, with): Setter<usize>| {
        sweep(name, [0, 3, 8, 1 << 31, u32::MAX as usize, usize::MAX], |size| with(cfg(), size).validate())
    };
    let (sizes, no_output) = ([(0, 4), (8, 0), (usize::MAX, 1), (10, 4), (2, 4)], || cfg().with_out_proj(false));
    let outputs = cases! {
        "an output width that the heads do not give" => no_output().with_out_dim(12).with_head_dim(2).validate(),
        "an output bias without an output projection" => no_output().with_bias(true).validate(),
    };
    assert_reviewed(
        "config_sizes",
        &[
            each("a width and heads of", sizes, |(width, heads)| Config::new(width, heads).validate()),
            options.map(of_option).concat(),
            outputs,
        ],
    );
}

/// Every option that is a number, with numbers that mean nothing or that f32 does not hold.
#[test]
fn numbers() {
    let options: [Setter<f64>; 8] = [
        ("dropout", Config::with_dropout),
        ("softcap", Config::with_softcap),
        ("scale", Config::with_scale),
        ("clip_qkv", Config::with_clip_qkv),
        ("value_norm", Config::with_value_norm),
        ("qk_norm", |cfg, eps| cfg.with_qk_norm(norm(eps))),
        ("context_norm", |cfg, eps| cfg.with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps })),
        ("the largest exponent", |cfg, most| cfg.with_alibi(AlibiConfig::BiasMax(most))),
    ];
    let of_option = |(name, with): Setter<f64>| {
        sweep(name, [-1.0, 0.0, 10.0, 1e60, f64::NAN, f64::INFINITY], |number| with(cfg(), number).validate())
    };
    let scalings = [(f64::NAN, 4), (1e60, 4), (0.1, 0)];
    let buckets = |both: bool| RelativeBiasConfig::new(both);
    assert_reviewed(
        "config_numbers",
        &[
            options.map(of_option).concat(),
            each("queries scaled by", scalings, |(beta, interval)| {
                cfg().with_query_scaling(QueryScaling { beta, interval, first: 0 }).validate()
            }),
            each("slopes", [vec![0.5; 3], vec![0.5, 0.5, f32::NAN, 0.5]], |slopes| {
                cfg().with_alibi(AlibiConfig::Slopes(slopes)).validate()
            }),
            each("buckets for two directions", [3], |n| {
                cfg().with_relative_bias(buckets(true).with_num_buckets(n)).validate()
            }),
            each("buckets", [1], |n| buckets(false).with_num_buckets(n).validate()),
            each("distances with buckets of their own", [16], |n| buckets(false).with_max_distance(n).validate()),
        ],
    );
}

#[test]
fn rotary_positions() {
    let rope = || RopeConfig::new(10_000.0);
    let scalings = [
        RopeScaling::Linear { factor: 0.0 },
        RopeScaling::Dynamic { factor: 0.5, original_context: 8 },
        RopeScaling::Dynamic { factor: 2.0, original_context: 0 },
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 1.0, original_context: 8192 },
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096,
            beta_fast: 1.0,
            beta_slow: 32.0,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        },
        RopeScaling::LongRope {
            short_factor: vec![1.0; 2],
            long_factor: vec![1.0; 3],
            original_context: 4096,
            factor: None,
            attention_factor: None,
        },
        RopeScaling::Proportional { factor: 1.0, proportion: 1.5 },
    ];
    let scalings =
        each("", scalings, |scaling| cfg().with_head_dim(4).with_rope(rope().with_scaling(scaling)).validate());
    let widths = each("so much of heads of two", [4, 0], |r| cfg().with_rope(rope().with_rotary_dim(r)).validate());
    let bases = each("a base of", [0.0, f64::NAN, 1e60], |base| cfg().with_rope(RopeConfig::new(base)).validate());
    let others = cases! {
        "odd heads" => cfg().with_head_dim(3).with_rope(rope()).validate(),
        "dynamic scaling of one pair" => {
            let scaling = RopeScaling::Dynamic { factor: 2.0, original_context: 8 };
            cfg().with_rope(rope().with_scaling(scaling)).validate()
        },
        "a part of the pairs of a part" => {
            let scaling = RopeScaling::Proportional { factor: 1.0, proportion: 0.5 };
            cfg().with_head_dim(4).with_rope(rope().with_rotary_dim(2).with_scaling(scaling)).validate()
        },
    };
    assert_reviewed("config_rope", &[scalings, widths, bases, others]);
}

#[test]
fn options_that_exclude_each_other() {
    let rope = RopeConfig::new(10_000.0);
    let combinations = cases! {
        "a norm of learned values" => learned().with_value_norm(1e-6).validate(),
        "a norm of learned keys" => learned().with_qk_norm(norm(1e-6)).validate(),
        "a position of learned keys" => learned().with_rope(rope.clone()).validate(),
        "slopes of learned keys" => learned().with_alibi(AlibiConfig::Standard).validate(),
        "relative positions of learned keys" => learned().with_relative_bias(RelativeBiasConfig::new(true)).validate(),
        "a norm of keys of zeros" => cfg().with_add_zero_attn(true).with_qk_norm(norm(1e-6)).validate(),
        "a position of keys of zeros" => cfg().with_add_zero_attn(true).with_rope(rope.clone()).validate(),
        "norms after no rotation" => cfg().with_qk_norm(norm(1e-6)).with_norm_after_rope(true).validate(),
        "norms of projections after rotation" => {
            let norm = QkNorm { scope: QkNormScope::Projection, ..norm(1e-6) };
            cfg().with_rope(rope.clone()).with_qk_norm(norm).with_norm_after_rope(true).validate()
        },
        "keys as values in a packed weight" => {
            let cfg = cfg().with_kv_source(KvSource::KeysAsValues);
            MultiHeadAttention::load(&cfg, "packed:qkv".parse()?, any_weights())
        },
    };
    let validate = |source| move |cfg: &Config| cfg.clone().with_kv_source(source).validate();
    let earlier = validate(KvSource::EarlierLayer);
    let one = validate(KvSource::KeysAsValues);
    let sources = cases! {
        "a bias of keys that are not there" => earlier(&cfg().with_bias(true)),
        "a learned key beside an earlier layer's" => earlier(&learned()),
        "a norm of an earlier layer's values" => earlier(&cfg().with_value_norm(1e-6)),
        "wider values that are keys" => one(&cfg().with_value_head_dim(3)),
        "a bias of values that are keys" => one(&cfg().with_v_bias(true)),
        "another input of values that are keys" => one(&cfg().with_value_size(6)),
    };
    assert_reviewed("config_options", &[combinations, sources]);
}

#[test]
fn configs_in_json() {
    let fields = [
        r#""alibi": "bloom""#,
        r#""rope": {"base": 1e4, "scaling": {"ntk": {"factor": 2}}}"#,
        r#""rope": {"base": 1e4, "scaling": {"linear": {"factor": 2, "rope_type": "linear"}}}"#,
        r#""num_attention_heads": 4"#,
        r#""num_heads": 2"#,
        r#""output_gate": {"activation": "sigmoid", "scope": "per_head", "place": "query", "bias": true}"#,
        r#""qk_norm": {"kind": "l2", "scope": "per_head", "eps": 0}"#,
        r#""qk_norm": {"kind": "rms", "scope": "per_head", "eps": 0, "bias": true}"#,
    ];
    let whole =
        [r#"{"embed_dim": 8}"#, r#"{"embed_dim": -8, "num_heads": 4}"#, r#"{"embed_dim": 8.5, "num_heads": 4}"#];
    let with_sizes = fields.map(|field| format!(r#"{{"embed_dim": 8, "num_heads": 4, {field}}}"#));
    let all = with_sizes.iter().map(String::as_str).chain(whole);
    let read = |text: &str| serde_json::from_str::<Config>(text).map(drop).map_err(Error::wrap);
    assert_reviewed("config_json", &[all.map(|text| case(text, || read(text))).collect()]);
}

/// The same errors come from the constructors, in any layout.
#[test]
fn layers_validate_their_config_first() {
    let cfg = cfg().with_num_kv_heads(3);
    let expected = cfg.validate().expect_err("3 does not divide 4").to_string();
    for layout in WeightLayout::all() {
        let error = MultiHeadAttention::load(&cfg, layout, any_weights()).expect_err("no layer");
        assert_eq!(error.to_string().lines().next(), expected.lines().next(), "{layout}");
    }
}
