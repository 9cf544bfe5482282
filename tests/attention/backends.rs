//! Differences between Candle's backends: strides that Metal misreads without an error, copies that share the memory of
//! a variable there, and tensors without entries.

use std::collections::HashMap;

use candle_core::quantized::{GgmlDType, QTensor};

use crate::layer_kind::LayerKind;
use crate::registry::content;
use crate::*;

crate::on_each_device!(
    layer_of_one_key_head_in_a_batch_matches_each_sequence,
    additive_attention_in_a_batch_matches_each_sequence,
    gated_delta_net_of_one_head_in_a_batch_matches_each_sequence,
    linear_layers_of_views_match_copies,
    sdpa_of_last_query_of_a_view_matches_reference,
    frozen_layers_keep_their_values_while_variables_change,
    calls_without_entries_return_tensors_without_entries,
);

/// The number of tokens: an image of 3 by 5.
const T: usize = 15;

/// Draws inputs (B, T, E).
fn inputs(b: usize, e: usize, random: &mut Random, device: &Device) -> Result<Tensor> {
    Array::new(&[b, T, e]).uniform(random, 1.0, DType::F32).tensor(DType::F32, device)
}

/// Compares outputs and gradients of a batch with the outputs and gradients of each sequence alone. `run` computes
/// outputs (1 or B, T, ..) from inputs (1 or B, T, E).
fn assert_batch_matches_each_sequence(
    what: &str,
    xs: &Tensor,
    variables: &HashMap<String, Var>,
    run: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let xs = Var::from_tensor(xs)?;
    let ys = run(&xs)?;
    let factors = (Tensor::arange(0f32, ys.elem_count() as f32, ys.device())? * 0.37)?.sin()?.reshape(ys.shape())?;
    let gradients = (&ys * &factors)?.sum_all()?.backward()?;
    let mut sums: HashMap<&String, Tensor> = HashMap::new();
    for i in 0..xs.dim(0)? {
        let of_sequence = |tensor: &Tensor| tensor.narrow(0, i, 1)?.contiguous();
        let alone = Var::from_tensor(&of_sequence(&xs)?)?;
        let expected = run(&alone)?;
        assert_close(&of_sequence(&ys)?, &expected, 2e-5, &format!("{what}, sequence {i}"));
        let own = (expected * of_sequence(&factors)?)?.sum_all()?.backward()?;
        let gradient = of_sequence(gradients.get(&xs).expect("a gradient of the batch"))?;
        let gradient_alone = own.get(&alone).expect("a gradient of the sequence");
        assert_close(&gradient, gradient_alone, 1e-4, &format!("{what}, gradient of sequence {i}"));
        for (name, variable) in variables {
            let Some(of_variable) = own.get(variable) else { continue };
            let sum = match sums.get(name) {
                Some(before) => (before + of_variable)?,
                None => of_variable.clone(),
            };
            sums.insert(name, sum);
        }
    }
    for (name, sum) in sums {
        let of_batch = gradients.get(&variables[name]).expect("a gradient of the batch");
        assert_close(of_batch, &sum, 1e-3, &format!("{what}, gradient of {name}"));
    }
    Ok(())
}

/// Draws configs of layers with one head of keys and values.
fn configs_of_one_key_head(random: &mut Random) -> Vec<LayerKind> {
    let of_several = Config::new(24, 1 + random.up_to(5)).with_num_kv_heads(1).with_head_dim(4);
    let mut configs = vec![Config::new(24, 1), of_several.clone()];
    configs.push(of_several.with_value_head_dim(1 + random.up_to(8)).with_causal(true));
    configs.push(configs[0].clone().with_bias(true).with_softcap(2.0).with_sinks(true));
    for cfg in content() {
        let of_one = Config::new(24, 1).with_head_dim(6).with_bias(true).with_scale(cfg.scale());
        configs.push(of_one.with_content_positions(cfg.content_positions().cloned()));
    }
    let latent = registry::latent_of(24, random);
    configs.into_iter().map(LayerKind::MultiHead).chain([LayerKind::Latent(latent)]).collect()
}

fn layer_of_one_key_head_in_a_batch_matches_each_sequence(device: &Device) -> Result<()> {
    for seed in 0..3 {
        let random = &mut Random::new(seed);
        for kind in configs_of_one_key_head(random) {
            let mut variables = HashMap::new();
            let layer = kind.of_leaves(&kind.parameters(seed), DType::F32, device, &mut |name, tensor| {
                let variable = Var::from_tensor(&tensor)?;
                variables.insert(name.to_string(), variable.clone());
                Ok(variable.into_inner())
            })?;
            let xs = (inputs(2 + random.up_to(1), 24, random, device)? * 0.2)?;
            for backend in [Backend::Auto, Backend::Reference] {
                let run = |rows: &Tensor| layer.run(AttentionInput::new(rows).with_backend(backend));
                assert_batch_matches_each_sequence(&format!("{kind:?}"), &xs, &variables, run)?;
            }
        }
    }
    Ok(())
}

fn additive_attention_in_a_batch_matches_each_sequence(device: &Device) -> Result<()> {
    let random = &mut Random::new(7);
    let vars = VarMap::new();
    let cfg = AdditiveAttentionConfig::new(6, 6, 9);
    let layer = AdditiveAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F32, device))?;
    let mask = AttentionMask::none();
    let xs = inputs(3, 6, random, device)?;
    let run = |rows: &Tensor| layer.forward(rows, rows, rows, &mask);
    assert_batch_matches_each_sequence("additive attention", &xs, &named(&vars), run)
}

fn gated_delta_net_of_one_head_in_a_batch_matches_each_sequence(device: &Device) -> Result<()> {
    let random = &mut Random::new(8);
    let vars = VarMap::new();
    let cfg = GatedDeltaNetConfig::new(6, 1).with_key_head_dim(4).with_value_head_dim(5);
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let net = GatedDeltaNet::load(&cfg, DeltaLayout::Separate, vb)?;
    let xs = inputs(3, 6, random, device)?;
    assert_batch_matches_each_sequence("gated delta net", &xs, &named(&vars), |xs| net.forward(xs))
}

/// Compares inputs and weights that are parts of other tensors with copies of them.
fn linear_layers_of_views_match_copies(device: &Device) -> Result<()> {
    let random = &mut Random::new(5);
    let mut draw = |shape: &[usize]| Array::new(shape).uniform(random, 1.0, DType::F32).tensor(DType::F32, device);
    let wide = draw(&[64, 96])?;
    let inputs = draw(&[3, 4, 64])?;
    let part = inputs.narrow(0, 1, 2)?;
    let fused = draw(&[96, 64])?;
    // The weight of some outputs: rows of a fused weight, and columns of a transposed one.
    for weight in [fused.narrow(0, 32, 32)?, wide.narrow(1, 32, 32)?.t()?, wide.t()?.narrow(0, 64, 32)?] {
        let expected = part.force_contiguous()?.flatten_to(1)?.matmul(&weight.force_contiguous()?.t()?)?;
        let tracked = Var::from_tensor(&weight.force_contiguous()?)?;
        let layers = [PackedLinear::new(&weight, None)?, PackedLinear::new(&tracked, None)?];
        for layer in layers {
            let found = layer.forward(&part)?.flatten_to(1)?;
            assert_close(&found, &expected, 1e-5, &format!("{:?}", weight.layout()));
        }
    }
    let quantized = QTensor::quantize(&fused, GgmlDType::Q4_0)?;
    let layer = PackedLinear::from_qtensor(quantized, None)?;
    for rows in [2, 1] {
        let xs = inputs.flatten_to(1)?.narrow(0, 3, rows)?;
        assert_close(&layer.forward(&xs)?, &layer.forward(&xs.force_contiguous()?)?, 1e-5, &format!("{rows} rows"));
    }
    Ok(())
}

/// Compares the last query of a longer tensor with the reference path, in widths of which Metal has kernels.
fn sdpa_of_last_query_of_a_view_matches_reference(device: &Device) -> Result<()> {
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let mut draw =
            |shape: [usize; 4]| Array::new(&shape).uniform(random, 1.0, DType::F32).tensor(DType::F32, device);
        let b = 1 + seed as usize % 3;
        let d = [32, 64, 80][seed as usize / 3 % 3];
        let k = draw([b, 2, 9, d])?;
        let v = draw([b, 9, 2, d])?.transpose(1, 2)?;
        for queries in [draw([b, 4, 6, d])?, draw([b, 6, 4, d])?.transpose(1, 2)?, draw([b, 6, 6, d])?.narrow(1, 2, 4)?]
        {
            let q = queries.narrow(2, 5, 1)?;
            let none = AttentionMask::none();
            let call = |query: &Tensor, backend| {
                scaled_dot_product_attention(query, &k, &v, &none, &SdpaOptions::default().with_backend(backend))
            };
            let expected = call(&q.force_contiguous()?, Backend::Reference)?;
            assert_close(&call(&q, Backend::Auto)?, &expected, 1e-5, &format!("{:?}", q.layout()));
        }
    }
    Ok(())
}

fn frozen_layers_keep_their_values_while_variables_change(device: &Device) -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let buckets = RelativeBiasConfig::new(true).with_num_buckets(8);
    let cfg = Config::new(8, 2).with_bias(true).with_sinks(true).with_qk_norm(QkNorm::rms(1e-6));
    let layer = MultiHeadAttention::new(&cfg.clone().with_relative_bias(buckets.clone()), vb.pp("layer"))?;
    let layer = layer.with_relative_bias(RelativeBias::new(&buckets, 2, vb.pp("bias"))?)?;
    let latent = LatentConfig::new(8, 2).with_kv_lora_rank(6).with_rope_head_dim(2);
    let latent = MultiHeadLatentAttention::new(&latent, vb.pp("latent"))?;
    let net = GatedDeltaNet::load(&GatedDeltaNetConfig::new(8, 2), DeltaLayout::Separate, vb.pp("net"))?;
    let linear = packed_linear(8, 8, vb.pp("linear"))?;
    let norm = rms_norm(8, 1e-6, vb.pp("norm"))?;

    let state = layer.freeze()?.state_dict(WeightLayout::Canonical)?;
    let stored: Vec<_> = state.iter().map(|(_, tensor)| bits(tensor)).collect();
    let frozen_layer = layer.freeze()?;
    let frozen_latent = latent.freeze()?;
    let frozen_net = net.freeze()?;
    let frozen_linear = linear.freeze()?;
    let frozen_norm = norm.freeze()?;
    let outputs = |xs: &Tensor| -> Result<Vec<Tensor>> {
        let of_attention = [frozen_layer.forward(xs)?, frozen_latent.forward(xs)?, frozen_net.forward(xs)?];
        Ok(of_attention.into_iter().chain([frozen_linear.forward(xs)?, frozen_norm.forward(xs)?]).collect())
    };
    let xs = inputs(2, 8, &mut Random::new(3), device)?;
    let before = outputs(&xs)?;
    for variable in vars.all_vars() {
        variable.set(&variable.affine(-3.0, 0.5)?)?;
    }
    for (n, after) in outputs(&xs)?.iter().enumerate() {
        assert_eq!(bits(after), bits(&before[n]), "output {n}");
    }
    for ((name, tensor), own) in state.iter().zip(stored) {
        assert_eq!(bits(tensor), own, "{name}");
    }
    Ok(())
}

fn calls_without_entries_return_tensors_without_entries(device: &Device) -> Result<()> {
    if device.is_cuda() {
        // Candle has no empty tensors there.
        return Ok(());
    }
    let zeros = |shape: [usize; 4]| Tensor::zeros(&shape, DType::F32, device);
    let none = AttentionMask::none();
    for (t_q, t_kv, top_keys) in [(0, 5, 2), (3, 0, 2), (0, 0, 2), (3, 5, 0)] {
        let (q, k) = (zeros([2, 4, t_q, 8])?, zeros([2, 2, t_kv, 8])?);
        let wanted = StatisticsOptions::default().with_top_keys(top_keys).with_weights_of(0..t_q, 0..t_kv);
        let options = SdpaOptions::default();
        let (output, found) = scaled_dot_product_attention_with_statistics(&q, &k, &k, &none, &options, &wanted)?;
        assert_eq!(output.dims(), q.dims());
        let of_top_keys = [2, 4, t_q, top_keys.min(t_kv)];
        assert_eq!((found.top_keys.dims(), found.top_weights.dims()), (&of_top_keys[..], &of_top_keys[..]));
        assert_eq!((found.entropy.dims(), found.key_weight_sums.dims()), (&[2, 4, t_q][..], &[2, 4, t_kv][..]));
        assert_eq!(found.weights.expect("it is requested").dims(), [2, 4, t_q, t_kv]);
    }
    let plain = Config::new(8, 2).with_causal(true);
    let temperature = AttentionTemperature { beta: 0.1, interval: 1, first: 1 };
    for cfg in [
        plain.clone().with_alibi(AlibiConfig::Standard),
        plain.clone().with_alibi(AlibiConfig::Falcon),
        plain.clone().with_rope(RopeConfig::new(100.0)),
        plain.clone().with_attention_temperature(temperature),
    ] {
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, device))?;
        for (b, t) in [(2, 0), (0, 3), (0, 0)] {
            let xs = Tensor::zeros((b, t, 8), DType::F32, device)?;
            assert_eq!(layer.forward(&xs)?.dims(), xs.dims(), "{cfg:?}");
        }
    }
    let cross = MultiHeadAttention::new(&Config::new(8, 2), VarBuilder::zeros(DType::F32, device))?;
    let encoded = Tensor::zeros((2, 3, 8), DType::F32, device)?;
    let mut memory = cross.project_memory(&encoded, &encoded)?;
    memory.reorder(&[])?;
    assert_eq!(memory.batch_size(), 0);
    Ok(())
}
