//! The layer in plain f64 loops: project, normalise, split, attend by the oracle, merge, project.

use std::collections::{BTreeMap, HashMap};

use candle_attention::{
    AlibiConfig, GateActivation, GateLayout, GateScope, MultiHeadAttention, MultiHeadAttentionConfig,
    MultiHeadLatentAttentionConfig, OutputGate, QkNorm, QkNormKind, QkNormScope, RopeConfig, RopeStyle,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use half::bf16;

use crate::array::{Array, Random};
use crate::oracle::{Alignment, Case, Dims, Mask, Options, Part, exact_linear};

pub type Parameters = HashMap<String, Array>;

/// Draws random numbers for every parameter of a layer with this config.
pub fn parameters(cfg: &MultiHeadAttentionConfig, seed: u64) -> Parameters {
    parameters_of(|vb| MultiHeadAttention::new(cfg, vb), seed)
}

/// Draws random numbers for every variable that is requested, in the order of their names.
pub fn parameters_of<T>(make: impl FnOnce(VarBuilder) -> Result<T>, seed: u64) -> Parameters {
    let asked = VarMap::new();
    let mut random = Random::new(seed);
    make(VarBuilder::from_varmap(&asked, DType::F32, &Device::Cpu)).expect("a valid config");
    let asked: BTreeMap<_, _> = asked.data().lock().expect("one thread").clone().into_iter().collect();
    asked.into_iter().map(|(name, var)| (name, drawn(var.dims(), &mut random))).collect()
}

/// Draws a parameter or an input.
pub fn drawn(shape: &[usize], random: &mut Random) -> Array {
    Array::new(shape).uniform(random, 1.0, DType::F32)
}

pub fn tensors(parameters: &Parameters, dtype: DType, device: &Device) -> Result<HashMap<String, Tensor>> {
    parameters.iter().map(|(name, numbers)| Ok((name.clone(), numbers.tensor(dtype, device)?))).collect()
}

/// The inputs of one call of a layer.
#[derive(Clone)]
pub struct Input {
    /// (B, T_q, E)
    pub queries: Array,
    /// (B, T_kv, kdim)
    pub keys: Array,
    /// (B, T_kv, vdim)
    pub values: Array,
    /// The call's own.
    pub mask: Vec<Mask>,
}

#[derive(Debug, Clone)]
pub struct Output {
    /// (B, T_q, out_dim)
    pub ys: Vec<f64>,
    /// (B, H, T_q, T_kv), or a column more for a learned key and for one of zeros
    pub weights: Vec<f64>,
}

pub fn forward(cfg: &MultiHeadAttentionConfig, parameters: &Parameters, input: &Input) -> Output {
    let h = cfg.num_heads();
    let h_kv = cfg.num_kv_heads();
    let d = cfg.head_dim();
    let d_v = cfg.value_head_dim();
    let b = input.queries.dim(0);
    let t_q = input.queries.dim(1);
    let t_kv = input.keys.dim(1);

    let mut q = project(parameters, "q_proj", &input.queries);
    let gate = cfg.output_gate().map(|gate| match gate.layout {
        GateLayout::FusedWithQuery => {
            let [own, beside] = split(&q, [d, gate_width(gate, d_v)]);
            q = own;
            beside
        }
        _ => project(parameters, "gate_proj", &input.queries),
    });
    let mut k = project(parameters, "k_proj", &input.keys);
    let mut v = project(parameters, "v_proj", &input.values);
    let normed = |queries: &mut Array, keys: &mut Array, now: bool| {
        if let Some(norm) = cfg.qk_norm().filter(|_| now) {
            normalise(parameters, "q_norm", norm, d, queries);
            normalise(parameters, "k_norm", norm, d, keys);
        }
    };
    let of_projections = cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection);
    normed(&mut q, &mut k, of_projections);
    if let Some(clip) = cfg.clip_qkv() {
        [&mut q, &mut k, &mut v].into_iter().flat_map(|xs| &mut xs.data).for_each(|x| *x = x.clamp(-clip, clip));
    }
    normed(&mut q, &mut k, !of_projections && !cfg.norm_after_rope());
    if let Some(rope) = cfg.rope() {
        rotate(rope, d, &mut q);
        rotate(rope, d, &mut k);
    }
    normed(&mut q, &mut k, cfg.norm_after_rope());
    if let Some(scaling) = cfg.attention_temperature() {
        let width = q.width();
        for (n, x) in q.data.iter_mut().enumerate() {
            let intervals = (n / width % t_q + scaling.first) / scaling.interval;
            *x *= 1.0 + scaling.beta * (1.0 + intervals as f64).ln();
        }
    }
    if let Some(eps) = cfg.value_norm() {
        let norm = QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::PerHead, eps };
        normalise(parameters, "v_norm", norm, d_v, &mut v);
    }
    // A learned key, a key of zeros and the learned keys of each head follow the others, without a norm or a position.
    let of_pytorch = usize::from(cfg.bias_kv()) + usize::from(cfg.add_zero_attn());
    let count = cfg.num_mem_kv();
    let more = of_pytorch + count;
    let append = |xs: &Array, name: &str, name_by_heads: &str| {
        let width = xs.width() / h_kv;
        let all = Array::each([1, b, t_kv + more, xs.width()], |[_, b, j, n]| match j.checked_sub(t_kv) {
            None => xs.at([0, b, j, n]),
            Some(0) if cfg.bias_kv() => parameters[name].data[n],
            Some(row) if row < of_pytorch => 0.0,
            Some(row) => parameters[name_by_heads].data[(n / width * count + row - of_pytorch) * width + n % width],
        });
        Array::of(&[b, t_kv + more, xs.width()], all.data)
    };

    let (alibi_slopes, bias) = alibi(cfg, t_q, t_kv);
    let local = cfg.local_window().map(|window| Part::LocalWindow(window.left, window.right));
    let parts = [cfg.window().map(Part::Window), local, cfg.chunk().map(Part::Chunk), bias].into_iter().flatten();
    let own = Mask::new(if cfg.causal() { Alignment::Causal } else { Alignment::Free }, parts.collect::<Vec<_>>());
    let mut case = Case {
        dims: Dims { b, h, h_kv, t_q, t_kv, d, d_v },
        q: heads(&q, h, d),
        k: heads(&append(&k, "bias_k", "mem_k"), h_kv, d),
        v: heads(&append(&v, "bias_v", "mem_v"), h_kv, d_v),
        masks: std::iter::once(own).chain(input.mask.iter().cloned()).collect(),
        uniform_fully_masked_rows: false,
        options: Options {
            scale: cfg.scale(),
            softcap: cfg.softcap(),
            alibi_slopes,
            sinks: cfg.sinks().then(|| parameters["sinks"].data.clone()),
            relative_bias: None,
        },
    };
    if more > 0 {
        case = with_more_keys(case, more);
    }
    let attended = case.attend();

    let mut merged = merged(attended.context, [b, h, t_q, d_v]);
    if let (Some(gate), Some(config)) = (gate, cfg.output_gate()) {
        let each = d_v / gate_width(config, d_v);
        for (n, x) in merged.data.iter_mut().enumerate() {
            let gate = gate.data[n / each];
            *x *= match config.activation {
                GateActivation::Sigmoid => 1.0 / (1.0 + (-gate).exp()),
                GateActivation::Softplus => gate.exp().ln_1p(),
                other => panic!("no numbers of {other:?}"),
            };
        }
    }
    if let Some(norm) = cfg.output_norm() {
        let norm = QkNorm { kind: norm.kind, scope: QkNormScope::Projection, eps: norm.eps };
        normalise(parameters, "output_norm", norm, d_v, &mut merged);
    }
    let ys = if cfg.out_proj() { project(parameters, "o_proj", &merged) } else { merged };
    Output { ys: ys.data, weights: attended.weights }
}

/// Computes latent attention.
pub fn forward_latent(cfg: &MultiHeadLatentAttentionConfig, parameters: &Parameters, input: &Input) -> Output {
    let xs = &input.queries;
    let h = cfg.num_heads();
    let d = cfg.head_dim();
    let d_v = cfg.value_head_dim();
    let b = xs.dim(0);
    let t = xs.dim(1);
    let nope = cfg.nope_head_dim();
    let rope = cfg.rope_head_dim();
    let normalise = |name: &str, mut normed: Array| {
        let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::Projection, eps: cfg.norm_eps() };
        self::normalise(parameters, name, norm, normed.width(), &mut normed);
        normed
    };
    let queries = match cfg.q_lora_rank() {
        None => project(parameters, "q_proj", xs),
        Some(_) => {
            let compressed = project(parameters, "q_a_proj", xs);
            project(parameters, "q_b_proj", &normalise("q_a_layernorm", compressed))
        }
    };
    let [latents, mut k_rope] = split(&project(parameters, "kv_a_proj_with_mqa", xs), [cfg.kv_lora_rank(), rope]);
    let [k_nope, v] = split(&project(parameters, "kv_b_proj", &normalise("kv_a_layernorm", latents)), [nope, d_v]);
    let [q_nope, mut q_rope] = split(&queries, [nope, rope]);
    rotate(cfg.rope(), rope, &mut q_rope);
    rotate(cfg.rope(), rope, &mut k_rope);
    let join = |first: &Array, second: &Array| {
        Array::each([b, h, t, d], |[b, h, i, n]| match n.checked_sub(nope) {
            None => first.at([0, b, i, h * nope + n]),
            // The rotated key is that of every head.
            Some(n) => second.at([0, b, i, (h * rope + n) % second.width()]),
        })
    };
    let own = Mask::new(if cfg.causal() { Alignment::Causal } else { Alignment::Free }, []);
    let attended = Case {
        dims: Dims { b, h, h_kv: h, t_q: t, t_kv: t, d, d_v },
        q: join(&q_nope, &q_rope),
        k: join(&k_nope, &k_rope),
        v: heads(&v, h, d_v),
        masks: std::iter::once(own).chain(input.mask.iter().cloned()).collect(),
        uniform_fully_masked_rows: false,
        options: Options { scale: Some(cfg.scale()), ..Options::default() },
    }
    .attend();
    let ys = project(parameters, "o_proj", &merged(attended.context, [b, h, t, d_v]));
    Output { ys: ys.data, weights: attended.weights }
}

fn gate_width(gate: OutputGate, d_v: usize) -> usize {
    if gate.scope == GateScope::PerHead { 1 } else { d_v }
}

/// Splits each head's columns of (B, T, H · (first + second)) in two.
fn split(xs: &Array, [first, second]: [usize; 2]) -> [Array; 2] {
    let heads = xs.width() / (first + second);
    [0..first, first..first + second].map(|range| {
        let data = xs.data.chunks(first + second).flat_map(|head| head[range.clone()].to_vec()).collect();
        Array::of(&[xs.dim(0), xs.dim(1), heads * range.len()], data)
    })
}

/// Splits (B, T, H · width) into (B, H, T, width).
fn heads(xs: &Array, heads: usize, width: usize) -> Array {
    Array::each([xs.dim(0), heads, xs.dim(1), width], |[b, h, i, d]| xs.at([0, b, i, h * width + d]))
}

/// Merges (B, H, T, D_v) into (B, T, H · D_v).
fn merged(context: Vec<f64>, [b, h, t, d_v]: [usize; 4]) -> Array {
    let context = Array::of(&[b, h, t, d_v], context);
    Array::of(&[b, t, h * d_v], Array::each([b, t, h, d_v], |[b, i, h, d]| context.at([b, h, i, d])).data)
}

/// Returns slopes for the distance of query and key, or Falcon's biases of keys.
fn alibi(cfg: &MultiHeadAttentionConfig, t_q: usize, t_kv: usize) -> (Option<Vec<f64>>, Option<Part>) {
    let Some(alibi) = cfg.alibi() else { return (None, None) };
    let slopes = alibi.slopes(cfg.num_heads()).expect("few heads");
    if *alibi != AlibiConfig::Falcon {
        return (Some(slopes.into_iter().map(f64::from).collect()), None);
    }
    let scale = cfg.scale().unwrap_or(1.0 / (cfg.head_dim() as f64).sqrt());
    let bias = Array::each([1, cfg.num_heads(), t_q, t_kv], |[_, h, _, j]| {
        let product = bf16::from_f32(slopes[h]).to_f32() * bf16::from_f32(j as f32).to_f32();
        bf16::from_f32(product).to_f64() * scale
    });
    (None, Some(Part::Bias(bias)))
}

/// Writes the mask of T_kv keys as a tensor with `more` keys, to which every query attends.
fn with_more_keys(mut case: Case, more: usize) -> Case {
    let Dims { b, h, t_q, t_kv, .. } = case.dims;
    let shape = [b, h, t_q, t_kv + more];
    let keep = Array::each(shape, |index| f64::from(u8::from(index[3] >= t_kv || case.sees(index))));
    let bias = Array::each(shape, |index| if index[3] < t_kv { case.bias(index) } else { 0.0 });
    case.dims.t_kv += more;
    case.masks = vec![Mask::new(Alignment::Free, [Part::BoolMask(keep), Part::Bias(bias)])];
    case
}

fn project(parameters: &Parameters, name: &str, xs: &Array) -> Array {
    let weight = &parameters[&format!("{name}.weight")];
    let zeros = vec![0.0; weight.dim(0)];
    let bias = parameters.get(&format!("{name}.bias")).map_or(&zeros, |bias| &bias.data);
    let data = xs.data.chunks(xs.width()).flat_map(|row| exact_linear(row, &weight.data, bias)).collect();
    Array::of(&[xs.dim(0), xs.dim(1), weight.dim(0)], data)
}

fn normalise(parameters: &Parameters, name: &str, norm: QkNorm, d: usize, xs: &mut Array) {
    let width = xs.width();
    let span = if norm.scope == QkNormScope::Projection { xs.width() } else { d };
    let ones = vec![1.0; width];
    let weight = parameters.get(&format!("{name}.weight")).map_or(&ones, |weight| &weight.data);
    let bias = parameters.get(&format!("{name}.bias"));
    for (row, chunk) in xs.data.chunks_mut(span).enumerate() {
        let first = if norm.scope == QkNormScope::PerHeadWeights { row % (width / d) * d } else { 0 };
        let mean = match norm.kind {
            QkNormKind::Rms | QkNormKind::RmsPlusOne | QkNormKind::RmsNoWeight => 0.0,
            QkNormKind::Layer | QkNormKind::LayerNoBias => chunk.iter().sum::<f64>() / span as f64,
            other => panic!("no mean of {other:?}"),
        };
        let more = if norm.kind == QkNormKind::RmsPlusOne { 1.0 } else { 0.0 };
        let spread = chunk.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / span as f64;
        for (n, x) in chunk.iter_mut().enumerate() {
            let weight = weight[first + n] + more;
            let bias = bias.map_or(0.0, |bias| bias.data[first + n]);
            *x = (*x - mean) / (spread + norm.eps).sqrt() * weight + bias;
        }
    }
}

/// Rotates by positions 0..T, with angles, cosines and sines rounded to f32.
fn rotate(rope: &RopeConfig, d: usize, xs: &mut Array) {
    let t = xs.dim(1);
    let width = xs.width();
    let r = rope.rotary_dim(d);
    for (n, head) in xs.data.chunks_mut(d).enumerate() {
        let position = n / (width / d) % t;
        for i in 0..r / 2 {
            let exponent = f64::from(2.0 * i as f32 / r as f32);
            let angle = f64::from(position as f32 * (1.0 / rope.base().powf(exponent) as f32));
            let cos = f64::from(angle.cos() as f32);
            let sin = f64::from(angle.sin() as f32);
            let (x, y) = match rope.style() {
                RopeStyle::RotateHalf => (i, i + r / 2),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            (head[x], head[y]) = (head[x] * cos - head[y] * sin, head[x] * sin + head[y] * cos);
        }
    }
}
