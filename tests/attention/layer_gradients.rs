//! Every parameter of a layer gets a gradient, and it is the right one.

use crate::by_hand::{Input, Parameters};
use crate::layer_kind::LayerKind;
use crate::registry::{Feature, content, relative};
use crate::*;

/// Returns lengths under which the first sequence is padded and its first query is fully masked, and a bias.
fn padding_and_bias(kind: &LayerKind) -> Vec<Mask> {
    let mut random = Random::new(29);
    let t = kind.tokens().unwrap_or(4);
    let bias = Array::new(&[t, t]).filled(|| random.between(-1.0, 1.0));
    let padded = (0..t).map(|i| if i == 0 { 0 } else { (i + 1).min(t - 1) }).collect();
    vec![Mask::of(Part::ValidLens(Lens::PerQuery(vec![padded, vec![t; t]]))), Mask::of(Part::Bias(bias))]
}

/// A call of a layer.
#[derive(Clone)]
struct Call {
    kind: LayerKind,
    parameters: Parameters,
    input: Input,
}

impl Call {
    fn new(kind: &LayerKind, masks: Vec<Mask>) -> Self {
        let t = kind.tokens().unwrap_or(4);
        Self { kind: kind.clone(), parameters: kind.parameters(3), input: kind.input([2, t, t], masks) }
    }

    fn is_self(&self) -> bool {
        self.kind.is_self(1, 1)
    }
}

impl Operation for Call {
    /// In which dtype, and whether keys and values come in a memory.
    type Way = (DType, bool);

    fn run(&self, &(dtype, in_memory): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let layer = self.kind.of_leaves(&self.parameters, dtype, &CPU, leaf)?;
        let Input { queries, keys, values, mask } = &self.input;
        let xs = leaf("queries", queries.tensor(dtype, &CPU)?)?;
        let mask = attention_mask(mask, &CPU, |_, _, bias| leaf("bias", bias.tensor(dtype, &CPU)?))?;
        let (keys, vs) = match self.is_self() {
            true => (xs.clone(), xs.clone()),
            false => (leaf("keys", keys.tensor(dtype, &CPU)?)?, leaf("values", values.tensor(dtype, &CPU)?)?),
        };
        let memory = layer.as_multi_head().filter(|_| in_memory);
        let memory = memory.map(|attention| attention.project_memory(&keys, &vs)).transpose()?;
        let call = AttentionInput::new(&xs).with_mask(&mask);
        Ok(vec![layer.run(match &memory {
            Some(memory) => call.with_memory(memory),
            None if self.is_self() => call,
            None => call.with_key_value(&keys, &vs),
        })?])
    }
}

impl Exact for Call {
    fn buffers(&mut self) -> Vec<(String, &mut Vec<f64>)> {
        let is_self = self.is_self();
        let Input { queries, keys, values, mask } = &mut self.input;
        let inputs = [("queries", queries), ("keys", keys), ("values", values)].into_iter();
        let inputs = inputs.take(if is_self { 1 } else { 3 }).map(|(name, x)| (name.to_string(), &mut x.data));
        let biases = mask.iter_mut().flat_map(|mask| &mut mask.parts).filter_map(|part| match part {
            Part::Bias(bias) => Some(("bias".to_string(), &mut bias.data)),
            _ => None,
        });
        self.parameters.iter_mut().map(|(name, x)| (name.clone(), &mut x.data)).chain(inputs).chain(biases).collect()
    }

    /// Returns the numbers of plain loops, or of the layer in f64 where loops have none.
    fn exact(&self) -> Vec<f64> {
        if !self.kind.has_loops() {
            let own = self.run(&EXACT, &mut |_, tensor| Ok(tensor));
            return own.expect("the call runs").iter().flat_map(values).collect();
        }
        let mut input = self.input.clone();
        if self.is_self() {
            input.keys = input.queries.clone();
            input.values = input.queries.clone();
        }
        self.kind.by_hand(&self.parameters, &input).ys
    }
}

const EXACT: (DType, bool) = (DType::F64, false);

/// Calls `check` with each layer of a feature, and adds the layer's name to an error.
fn for_each_layer(
    layers: impl IntoIterator<Item = (&'static str, LayerKind)>,
    check: impl Fn(&str, &LayerKind) -> Result<()>,
) -> Result<()> {
    layers.into_iter().try_for_each(|(name, kind)| check(name, &kind).map_err(|error| error.context(name)))
}

/// Returns layers with relative positions, which plain loops do not compute.
fn with_relative_positions() -> Vec<(&'static str, LayerKind)> {
    relative().into_iter().chain(content().into_iter().map(|cfg| ("content", LayerKind::MultiHead(cfg)))).collect()
}

/// Checks gradients of every parameter and input in f64 against finite differences, and that no fused step swallows
/// the gradient of what is tracked alone: neither a kernel nor the one product for q, k and v.
fn gradients_match_finite_differences(feature: Feature) -> Result<()> {
    check_gradients(feature.configs())
}

fn check_gradients(layers: Vec<(&'static str, LayerKind)>) -> Result<()> {
    for_each_layer(layers.clone(), |_, kind| {
        [vec![], padding_and_bias(kind)].into_iter().try_for_each(|masks| {
            let call = Call::new(kind, masks);
            has_slopes(&call, &EXACT, 1e-6, 4)?;
            // Positions by content are between the tokens of a call.
            let ways = if kind.has_loops() { [EXACT, (DType::F64, true)] } else { return Ok(()) };
            let [plain, of_memory] = ways.map(|way| backward(&call, &way, |_| true));
            are_near(&of_memory?, &plain?, |_, _| 1e-9)
        })
    })?;
    for_each_layer(layers, |_, kind| {
        let call = Call::new(kind, padding_and_bias(kind));
        is_tracked_alone(&call, &EXACT, [1e-13, 1e-11])?;
        is_tracked_alone(&call, &(DType::F32, false), [1e-5, 2e-4])
    })
}

test_each_feature!(
    gradients_match_finite_differences:
    layer_gradients_with_heads_biases_and_widths_match_finite_differences => Plain,
    layer_gradients_with_gqa_match_finite_differences => Gqa,
    layer_gradients_with_causal_mask_match_finite_differences => Causal,
    layer_gradients_with_window_match_finite_differences => Window,
    layer_gradients_with_softcap_match_finite_differences => Softcap,
    layer_gradients_with_sinks_match_finite_differences => Sinks,
    layer_gradients_with_norms_match_finite_differences => Norms,
    layer_gradients_with_clip_match_finite_differences => Clip,
    layer_gradients_with_alibi_match_finite_differences => Alibi,
    layer_gradients_with_rope_match_finite_differences => Rope,
    layer_gradients_with_gate_match_finite_differences => Gate,
    layer_gradients_with_learned_keys_match_finite_differences => LearnedKeys,
    layer_gradients_with_cross_attention_match_finite_differences => Cross,
    layer_gradients_with_all_options_match_finite_differences => AllAtOnce,
    latent_attention_gradients_match_finite_differences => Latent,
);

#[test]
fn layer_gradients_with_relative_positions_match_finite_differences() -> Result<()> {
    check_gradients(with_relative_positions())
}

/// Checks too that only a bias of keys has a zero gradient: it moves all scores of a query together.
#[test]
fn layer_gradients_in_every_dtype_reach_every_parameter() -> Result<()> {
    let layers = Feature::ALL.into_iter().flat_map(Feature::configs).chain(with_relative_positions());
    for_each_layer(layers, |name, kind| {
        let call = Call::new(kind, vec![]);
        let exact = backward(&call, &EXACT, |_| true)?;
        // Small networks of positions turn other units off where they round.
        let dtypes = [(DType::F32, 1e-4), (DType::F16, 0.05), (DType::BF16, 0.4)].into_iter();
        for (dtype, tolerance) in dtypes.take(if kind.has_loops() { 3 } else { 1 }) {
            let found = backward(&call, &(dtype, false), |_| true)?;
            are_near(&found, &exact, |_, largest| tolerance * largest.max(1.0))?;
            let zeros = found.iter().filter(|(_, found)| values(found).iter().all(|&entry| entry == 0.0));
            assert!(zeros.into_iter().all(|(parameter, _)| parameter == "k_proj.bias"), "{name} in {dtype:?}");
        }
        Ok(())
    })
}

/// Returns the gradients of the input and of all variables, for a loss of a layer's output.
fn gradients_of_layer(layer: &MultiHeadAttention, variables: &VarMap, xs: &Tensor) -> Result<Vec<(String, Tensor)>> {
    let xs = Var::from_tensor(xs)?;
    let found = layer.forward(&xs)?.sqr()?.sum_all()?.backward()?;
    let mut gradients = vec![("the input".to_string(), found.get(&xs).expect("a gradient of the input").clone())];
    for (name, var) in variables.data().lock().expect("no panic").iter() {
        gradients.push((name.clone(), found.get(var).expect("a gradient of each variable").clone()));
    }
    gradients[1..].sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(gradients)
}

/// Compares a batch, whose results are so large that they send their gradients to each other, with its sequences, whose
/// gradients are summed by Candle.
#[test]
fn gradients_of_a_large_batch_are_those_of_its_sequences() -> Result<()> {
    let (b, t, e) = (9, 40, 64);
    let plain = Config::new(e, 4).with_causal(true);
    let rotated = plain.clone().with_num_kv_heads(2).with_rope(RopeConfig::new(100.0)).with_qk_norm(QkNorm::rms(1e-6));
    let gate = OutputGate {
        activation: GateActivation::Sigmoid,
        scope: GateScope::Elementwise,
        layout: GateLayout::FusedWithQuery,
    };
    for cfg in [plain.clone(), rotated, plain.with_output_gate(gate)] {
        let variables = VarMap::new();
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
        let xs = Tensor::randn(0f32, 1., (b, t, e), &CPU)?;
        let whole = gradients_of_layer(&layer, &variables, &xs)?;
        let mut sequences = Vec::new();
        for sequence in 0..b {
            sequences.push(gradients_of_layer(&layer, &variables, &xs.narrow(0, sequence, 1)?)?);
        }
        for (n, (name, found)) in whole.iter().enumerate() {
            let parts: Vec<&Tensor> = sequences.iter().map(|gradients| &gradients[n].1).collect();
            let expected = if n == 0 { Tensor::cat(&parts, 0)? } else { Tensor::stack(&parts, 0)?.sum(0)? };
            assert_near(found, &expected, 1e-5, name);
        }
    }
    Ok(())
}
