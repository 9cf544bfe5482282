//! Modules in the places of projections.

use std::sync::Arc;

use candle_core::Error;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};

use super::weights;
use crate::layer_kind::LayerKind;
use crate::*;

const PLACES: [Projection; 5] =
    [Projection::Query, Projection::Key, Projection::Value, Projection::Output, Projection::Gate];
const NAMES: [&str; 5] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"];

fn gate() -> OutputGate {
    let place = GateLayout::Separate { bias: false };
    OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::Elementwise, layout: place }
}

fn configs() -> Vec<Config> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    let grouped = || Config::new(64, 4).with_num_kv_heads(2).with_head_dim(32);
    vec![
        grouped().with_causal(true).with_qk_norm(norm).with_rope(RopeConfig::new(100.0)),
        grouped().with_sinks(true).with_value_head_dim(64).with_causal(true),
        grouped().with_kdim(32).with_vdim(32),
        grouped().with_kdim(32).with_vdim(96).with_bias_kv(true),
        grouped().with_out_proj(false).with_causal(true),
        grouped().with_causal(true).with_output_gate(gate()),
    ]
}

/// Draws small numbers, so that softmax does not select one key.
fn random(dims: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 0.1, dims, &CPU)
}

/// Builds a layer over quantised weights, and the layer over their dequantised numbers.
fn quantized(cfg: &Config, dtype: GgmlDType) -> Result<[MultiHeadAttention; 2]> {
    let mut plain = weights(cfg)?;
    let mut module = |name: &str| {
        let name = format!("{name}.weight");
        let quantized = QTensor::quantize(&plain[&name], dtype)?;
        plain.insert(name, quantized.dequantize(&CPU)?);
        QMatMul::from_qtensor(quantized)
    };
    let modules = ProjectionModules::new(module("q_proj")?, module("k_proj")?, module("v_proj")?);
    let modules = if cfg.out_proj() { modules.with_output(module("o_proj")?) } else { modules };
    let modules = if cfg.output_gate().is_some() { modules.with_gate(module("gate_proj")?) } else { modules };
    let others: Tensors =
        plain.iter().filter(|(name, _)| !name.contains("_proj")).map(|(n, t)| (n.clone(), t.clone())).collect();
    Ok([
        MultiHeadAttention::from_modules(cfg, modules, builder(others))?,
        MultiHeadAttention::new(cfg, builder(plain))?,
    ])
}

/// Compares with a tolerance, since Candle rounds the inputs of a product with a quantised weight to 8 bits too.
#[test]
fn gguf_weights_in_layer_match_dequantised_layer() -> Result<()> {
    for cfg in configs() {
        for (dtype, tolerance) in [(GgmlDType::F32, 1e-5), (GgmlDType::Q8_0, 0.03), (GgmlDType::Q4_0, 0.03)] {
            let [layer, plain] = quantized(&cfg, dtype)?;
            let kind = LayerKind::MultiHead(cfg.clone());
            let what = format!("{cfg:?} in {dtype:?}");
            let [width, of_keys, of_values, _] = kind.widths();
            let xs = &random(&[2, 7, width])?;
            let keys = random(&[2, 7, of_keys])?;
            let vs = if of_keys == of_values { keys.clone() } else { random(&[2, 7, of_values])? };
            let is_self = kind.is_self(7, 7);
            let call = || {
                let own = AttentionInput::new(xs);
                if is_self { own } else { own.with_key_value(&keys, &vs) }
            };
            let expected = plain.forward_with_weights(call())?.output;
            assert_near(&layer.forward_with_weights(call())?.output, &expected, tolerance, &what);
            assert_near(&layer.forward_with(call())?, &expected, tolerance, &what);
            if !is_self {
                let memory = layer.project_memory(&keys, &vs)?;
                let found = layer.forward_with(AttentionInput::new(xs).with_memory(&memory))?;
                assert_near(&found, &expected, tolerance, &what);
            }
            let mut cache = AttentionCache::default();
            for (start, t) in [(0, 3), (3, 1), (4, 3)].into_iter().filter(|_| cfg.causal()) {
                let own = |all: &Tensor| all.narrow(1, start, t)?.force_contiguous();
                let found = layer.forward_with(AttentionInput::new(&own(xs)?).with_cache(&mut cache))?;
                assert_near(&found, &own(&layer.forward(xs)?)?, 1e-5, &format!("{what} with a cache, at {start}"));
            }
        }
    }
    Ok(())
}

struct Adapter {
    own: Arc<dyn Module + Send + Sync>,
    down: Tensor,
    up: Tensor,
}

impl Module for Adapter {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.own.forward(xs)? + xs.broadcast_matmul(&self.down.t()?)?.broadcast_matmul(&self.up.t()?)?
    }
}

/// Wraps packed weights, variables, and variables of one weight in PyTorch's layout.
#[test]
fn adapter_matches_merged_weights_and_gets_gradients() -> Result<()> {
    let cfg = Config::new(16, 4).with_bias(true).with_causal(true);
    adapted(&cfg, Some(WeightLayout::Torch), &[&[0], &[1], &[2], &[3], &[0, 2], &[1, 2], &[0, 1, 2, 3], &[2, 2]])?;
    adapted(&cfg.with_output_gate(gate()), None, &[&[4], &[0], &[0, 4], &[0, 1, 2, 4]])
}

/// Checks adapters around each set of projections; `joint` is a layout of one weight, if the config has one.
fn adapted(cfg: &Config, joint: Option<WeightLayout>, all_places: &[&[usize]]) -> Result<()> {
    let xs = Var::from_tensor(&random(&[2, 5, 16])?)?;
    let plain = weights(cfg)?;
    let variables = |tensors: &Tensors| -> Result<VarMap> {
        let vars = VarMap::new();
        for (name, tensor) in tensors {
            vars.data().lock().expect("one thread").insert(name.clone(), Var::from_tensor(tensor)?);
        }
        Ok(vars)
    };
    let of = |vars: &VarMap| VarBuilder::from_varmap(vars, DType::F32, &CPU);
    let whole = MultiHeadAttention::new(cfg, builder(plain.clone()))?;
    let mut layers = vec![whole.clone(), MultiHeadAttention::new(cfg, of(&variables(&plain)?))?];
    if let Some(joint) = joint {
        let vars = variables(&whole.state_dict(joint)?.into_iter().collect())?;
        layers.push(MultiHeadAttention::load(cfg, joint, of(&vars))?);
    }
    for &places in all_places {
        let mut merged = plain.clone();
        let adapters: Vec<_> = places
            .iter()
            .map(|&place| {
                let down = Var::from_tensor(&random(&[3, 16])?)?;
                let up = Var::from_tensor(&random(&[16, 3])?)?;
                let name = format!("{}.weight", NAMES[place]);
                let weight = (&merged[&name] + up.matmul(&down)?)?.detach();
                merged.insert(name, weight);
                Ok::<_, Error>((place, down, up))
            })
            .collect::<Result<_>>()?;
        let expected = MultiHeadAttention::new(cfg, builder(merged))?.forward(&xs)?;
        for (n, layer) in layers.iter().enumerate() {
            let mut layer = layer.clone();
            for (place, down, up) in &adapters {
                let down = down.as_tensor().clone();
                let up = up.as_tensor().clone();
                layer = layer.map_projection(PLACES[*place], |own| Ok(Arc::new(Adapter { own, down, up })))?;
            }
            let found = layer.forward(&xs)?;
            assert_near(&found, &expected, 1e-5, &format!("layer {n}, places {places:?}"));
            let gradients = found.sqr()?.sum_all()?.backward()?;
            for (place, down, up) in &adapters {
                for var in [down, up, &xs] {
                    let gradient = gradients.get(var).expect("a gradient");
                    assert!(values(gradient).iter().any(|&x| x != 0.0), "layer {n}, place {place}");
                }
            }
            assert_eq!(
                error_text(layer.state_dict(WeightLayout::Canonical)),
                format!(
                    "[multi_head_attention] the {} projection is a module of the caller, whose weights are unknown",
                    PLACES[*places.iter().min().expect("a place")]
                )
            );
        }
    }
    Ok(())
}

#[test]
fn projection_modules_are_not_called_for_empty_inputs() -> Result<()> {
    let linear = || Linear::new(Tensor::zeros((8, 8), DType::F32, &CPU).expect("memory"), None);
    let double = |xs: &Tensor| xs.to_dtype(DType::F64);
    let modules = ProjectionModules::new(linear(), linear(), linear()).with_output(double);
    let layer = MultiHeadAttention::from_modules(&Config::new(8, 2), modules, VarBuilder::zeros(DType::F32, &CPU))?;
    let none = Tensor::zeros((2, 0, 8), DType::F32, &CPU)?;
    let mask = AttentionMask::causal();
    assert_eq!(layer.forward_with(AttentionInput::new(&none).with_mask(&mask))?.dims(), [2, 0, 8]);
    Ok(())
}
