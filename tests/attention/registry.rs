//! The layers that tests of layers go over: of either kind, one for each thing that a config can say.

use candle_attention::GateActivation::{Sigmoid, Softplus};
use candle_attention::QkNormKind::{Layer as LayerNorm, LayerNoBias, Rms, RmsNoWeight, RmsPlusOne};
use candle_attention::QkNormScope::{PerHead, PerHeadWeights, Projection};
use candle_attention::{
    AlibiConfig, AttentionTemperature, ContentPositions, DisentangledConfig, GateLayout, GateScope,
    MultiHeadAttentionConfig as Config, MultiHeadLatentAttentionConfig as LatentConfig, OutputGate, OutputNorm, QkNorm,
    QkNormKind, QkNormScope, RelativeBiasConfig, RopeConfig, RopeStyle,
};

use crate::array::Random;
use crate::layer_kind::LayerKind;

/// Returns layers with a relative bias, which plain loops do not compute.
pub fn relative() -> [(&'static str, LayerKind); 2] {
    let buckets = RelativeBiasConfig::new(true).with_num_buckets(8).with_max_distance(6);
    let relative = Config::new(12, 4).with_relative_bias(buckets).with_sinks(true);
    let crossed = relative.clone().with_kdim(7);
    [("relative bias", LayerKind::MultiHead(relative)), ("crossed relative bias", LayerKind::MultiHead(crossed))]
}

/// Returns every kind of content-based relative positions, in layers of grouped heads where these are allowed. Plain
/// loops do not compute them.
pub fn content() -> Vec<Config> {
    let height = 3;
    let width = 5;
    let buckets = || DisentangledConfig::new(9).with_num_buckets(6);
    let disentangled = [
        DisentangledConfig::new(8),
        buckets().with_terms(true, false),
        buckets().with_terms(false, true).with_layer_norm(1e-5),
        buckets().with_shared_projections(true).with_layer_norm(1e-5),
    ];
    let disentangled = disentangled.map(|positions| {
        let scale = 1.0 / ((6 * positions.num_terms()) as f64).sqrt();
        let positions = ContentPositions::Disentangled(positions);
        Config::new(24, 4).with_bias(true).with_scale(scale).with_content_positions(positions)
    });
    let others = [
        ContentPositions::Grid { height, width },
        ContentPositions::TransformerXl,
        ContentPositions::Clipped { left: 4, right: 2 },
        ContentPositions::Window { height, width },
        ContentPositions::CosineWindow { height, width, trained: None },
        ContentPositions::CosineWindow { height, width, trained: Some([6, 4]) },
    ];
    let grouped = || Config::new(24, 4).with_num_kv_heads(2).with_bias(true);
    let others = others.map(|positions| grouped().with_content_positions(positions));
    others.into_iter().chain(disentangled).collect()
}

/// Draws latent attention with small, uneven widths.
pub fn latent_of(embed_dim: usize, random: &mut Random) -> LatentConfig {
    let style = if random.chance(0.5) { RopeStyle::RotateHalf } else { RopeStyle::Interleaved };
    let mut cfg = LatentConfig::new(embed_dim, 1 + random.up_to(3))
        .with_kv_lora_rank(1 + random.up_to(17))
        .with_nope_head_dim(1 + random.up_to(7))
        .with_rope_head_dim(2 + 2 * random.up_to(2))
        .with_value_head_dim(1 + random.up_to(7))
        .with_bias(random.chance(0.5))
        .with_rope(RopeConfig::new(100.0).with_style(style));
    if random.chance(0.6) {
        cfg = cfg.with_q_lora_rank(1 + random.up_to(7));
    }
    if random.chance(0.3) {
        cfg = cfg.with_scale(random.between(0.1, 2.0)).with_norm_eps(0.1);
    }
    cfg
}

/// The subject of a layer of the registry. Tests of layers run once for each feature, so that their names have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    Plain,
    Gqa,
    Causal,
    Window,
    Softcap,
    Sinks,
    Norms,
    Clip,
    Alibi,
    Rope,
    Gate,
    LearnedKeys,
    Cross,
    AllAtOnce,
    Latent,
}

impl Feature {
    pub const ALL: [Self; 15] = {
        use Feature::*;
        [
            Plain,
            Gqa,
            Causal,
            Window,
            Softcap,
            Sinks,
            Norms,
            Clip,
            Alibi,
            Rope,
            Gate,
            LearnedKeys,
            Cross,
            AllAtOnce,
            Latent,
        ]
    };

    /// Returns layers that have the feature, each with a name for messages.
    pub fn configs(self) -> Vec<(&'static str, LayerKind)> {
        let multi_head = match self {
            Self::Latent => return latent(),
            Self::Plain => plain(),
            Self::Gqa => gqa(),
            Self::Causal => vec![("causal", four_heads().with_causal(true))],
            Self::Window => windows(),
            Self::Softcap => softcap(),
            Self::Sinks => vec![("sinks", grouped().with_sinks(true).with_causal(true))],
            Self::Norms => norms(),
            Self::Clip => clip(),
            Self::Alibi => alibi(),
            Self::Rope => rope(),
            Self::Gate => gates(),
            Self::LearnedKeys => learned_keys(),
            Self::Cross => cross(),
            Self::AllAtOnce => vec![("all at once", all_at_once())],
        };
        multi_head.into_iter().map(|(name, cfg)| (name, LayerKind::MultiHead(cfg))).collect()
    }
}

/// Returns the layers of all features.
pub fn configs() -> Vec<(&'static str, LayerKind)> {
    Feature::ALL.into_iter().flat_map(Feature::configs).collect()
}

type Configs = Vec<(&'static str, Config)>;

fn four_heads() -> Config {
    Config::new(12, 4)
}

fn grouped() -> Config {
    four_heads().with_num_kv_heads(2)
}

fn qk_norm(kind: QkNormKind, scope: QkNormScope) -> Config {
    four_heads().with_causal(true).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 })
}

fn output_norm(kind: QkNormKind) -> OutputNorm {
    OutputNorm { kind, eps: 1e-5 }
}

fn interleaved_rope() -> RopeConfig {
    RopeConfig::new(100.0).with_style(RopeStyle::Interleaved).with_rotary_dim(4)
}

fn latent() -> Vec<(&'static str, LayerKind)> {
    let cfg = LatentConfig::new(5, 2).with_kv_lora_rank(6).with_nope_head_dim(3).with_rope_head_dim(2);
    let cfg = cfg.with_value_head_dim(3).with_bias(true);
    vec![
        ("latents", LayerKind::Latent(cfg.clone())),
        ("latents of compressed queries", LayerKind::Latent(cfg.with_q_lora_rank(4))),
    ]
}

/// Returns layers with other numbers of heads, biases, widths and scales.
fn plain() -> Configs {
    vec![
        ("plain", four_heads()),
        ("one head", Config::new(5, 1)),
        ("biases", four_heads().with_bias(true)),
        ("query bias", four_heads().with_q_bias(true)),
        ("key bias", four_heads().with_k_bias(true)),
        ("value bias", four_heads().with_v_bias(true)),
        ("out bias", four_heads().with_out_bias(true)),
        ("no out projection", grouped().with_out_proj(false).with_qkv_bias(true)),
        ("head_dim", grouped().with_head_dim(5)),
        ("value_head_dim", grouped().with_value_head_dim(7)),
        ("value_head_dim without out projection", four_heads().with_value_head_dim(2).with_out_proj(false)),
        ("out_dim", four_heads().with_out_dim(8).with_bias(true)),
        ("scale", four_heads().with_scale(-1.3)),
    ]
}

fn gqa() -> Configs {
    vec![("grouped", grouped()), ("one key head", four_heads().with_num_kv_heads(1))]
}

/// Returns layers with windows, local windows and chunks.
fn windows() -> Configs {
    vec![
        ("window", four_heads().with_window(2)),
        ("causal window", grouped().with_causal(true).with_window(2)),
        ("local window", grouped().with_local_window(1, 2)),
        ("causal local window", four_heads().with_causal(true).with_local_window(2, 9).with_window(2)),
        ("chunk", grouped().with_chunk(2)),
        ("causal chunk", four_heads().with_causal(true).with_chunk(3)),
    ]
}

fn softcap() -> Configs {
    vec![("softcap", four_heads().with_softcap(0.7)), ("causal softcap", grouped().with_causal(true).with_softcap(0.4))]
}

/// Returns layers with norms of queries, keys, values and the attention output.
fn norms() -> Configs {
    vec![
        ("rms norm of heads", qk_norm(Rms, PerHead)),
        ("rms norm of projections", qk_norm(Rms, Projection).with_num_kv_heads(2)),
        ("layer norm of heads", qk_norm(LayerNorm, PerHead).with_num_kv_heads(2)),
        ("layer norm of projections", qk_norm(LayerNorm, Projection)),
        ("norm of heads, 1 + weight", qk_norm(RmsPlusOne, PerHead)),
        ("norm of projections, 1 + weight", qk_norm(RmsPlusOne, Projection)),
        ("layer norm without bias", qk_norm(LayerNoBias, PerHead)),
        ("a layer norm for each head", qk_norm(LayerNoBias, PerHeadWeights).with_num_kv_heads(2)),
        ("a biased layer norm for each head", qk_norm(LayerNorm, PerHeadWeights).with_num_kv_heads(1)),
        ("norm without a weight", qk_norm(RmsNoWeight, PerHead)),
        ("norm of projections without a weight", qk_norm(RmsNoWeight, Projection)),
        ("norm of values", grouped().with_value_head_dim(5).with_value_norm(1e-5).with_v_bias(true)),
        ("norm of the output", grouped().with_value_head_dim(5).with_output_norm(output_norm(Rms))),
    ]
}

fn clip() -> Configs {
    vec![
        ("clip", four_heads().with_bias(true).with_clip_qkv(0.4)),
        ("clip after a norm", qk_norm(Rms, Projection).with_clip_qkv(0.3)),
        ("clip before a norm", qk_norm(Rms, PerHead).with_clip_qkv(0.3)),
        ("clip and a learned key", four_heads().with_bias_kv(true).with_clip_qkv(0.3)),
    ]
}

fn alibi() -> Configs {
    let slopes = AlibiConfig::Slopes(vec![0.5, 0.0, -0.25, 2.0]);
    vec![
        ("alibi", Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Standard)),
        ("alibi on both sides", Config::new(12, 3).with_alibi(AlibiConfig::BiasMax(3.0))),
        ("alibi in a window", grouped().with_alibi(slopes).with_window(2)),
        ("alibi of Falcon", Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Falcon)),
        ("alibi of Falcon, scaled", grouped().with_alibi(AlibiConfig::Falcon).with_scale(0.9).with_softcap(2.0)),
    ]
}

/// Returns layers with rotary positions, and with the temperature of queries, which depends on positions too.
fn rope() -> Configs {
    let temperature = |first| AttentionTemperature { beta: 0.7, interval: 2, first };
    let normed = || qk_norm(Rms, PerHead).with_head_dim(4).with_rope(interleaved_rope());
    let wide = || four_heads().with_head_dim(6).with_rope(interleaved_rope());
    let cross = four_heads().with_head_dim(6).with_kdim(7).with_causal(true).with_rope(RopeConfig::new(100.0));
    vec![
        ("rope", grouped().with_head_dim(6).with_causal(true).with_rope(RopeConfig::new(10_000.0))),
        ("rope, cross", cross),
        ("rope of pairs", wide()),
        ("rope before norms", normed().with_norm_after_rope(true)),
        ("rope after norms", normed()),
        ("temperature", grouped().with_causal(true).with_attention_temperature(temperature(0))),
        ("rope and temperature", wide().with_attention_temperature(temperature(1))),
    ]
}

fn gates() -> Configs {
    let gate = |activation, layout| OutputGate { activation, scope: GateScope::Elementwise, layout };
    let gate_of_heads = |layout| OutputGate { activation: Softplus, scope: GateScope::PerHead, layout };
    let separate = GateLayout::Separate { bias: false };
    let biased = GateLayout::Separate { bias: true };
    let fused = gate(Sigmoid, GateLayout::FusedWithQuery);
    vec![
        ("gate", grouped().with_output_gate(gate(Sigmoid, separate))),
        ("gate of heads", four_heads().with_value_head_dim(5).with_output_gate(gate_of_heads(biased))),
        (
            "gate and norm",
            four_heads().with_output_gate(gate(Sigmoid, biased)).with_output_norm(output_norm(LayerNorm)),
        ),
        ("gate fused with the query", grouped().with_value_head_dim(5).with_bias(true).with_output_gate(fused)),
        (
            "gate of heads fused with the query",
            four_heads().with_out_proj(false).with_output_gate(gate_of_heads(GateLayout::FusedWithQuery)),
        ),
        ("gate, cross", four_heads().with_kdim(7).with_vdim(5).with_output_gate(gate(Softplus, separate))),
    ]
}

fn learned_keys() -> Configs {
    vec![
        ("learned key", grouped().with_bias_kv(true)),
        ("key of zeros", grouped().with_add_zero_attn(true).with_bias(true).with_softcap(3.0)),
        ("learned key and one of zeros", four_heads().with_bias_kv(true).with_add_zero_attn(true)),
        ("learned keys of each head", grouped().with_head_dim(6).with_num_mem_kv(3).with_rope(RopeConfig::new(100.0))),
        ("learned keys of each head, causal", grouped().with_num_mem_kv(2).with_causal(true).with_bias_kv(true)),
        ("learned key, causal", four_heads().with_bias_kv(true).with_causal(true).with_value_head_dim(5)),
    ]
}

fn cross() -> Configs {
    vec![
        ("cross", four_heads().with_kdim(7).with_vdim(5).with_bias(true)),
        ("cross with the width of keys", grouped().with_kdim(7)),
        ("cross with the width of values", four_heads().with_vdim(9).with_bias_kv(true)),
    ]
}

fn all_at_once() -> Config {
    Config::new(10, 6)
        .with_num_kv_heads(3)
        .with_head_dim(4)
        .with_value_head_dim(3)
        .with_out_dim(11)
        .with_bias(true)
        .with_causal(true)
        .with_window(3)
        .with_softcap(2.0)
        .with_scale(0.8)
        .with_sinks(true)
        .with_qk_norm(QkNorm { kind: Rms, scope: PerHead, eps: 1e-6 })
        .with_rope(RopeConfig::new(5_000.0).with_rotary_dim(2))
}
