//! Linear attention on a device, compared with the CPU's reference path in f64.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::{
    Backend, DeltaCache, DeltaInput, DeltaLayout, DeltaOptions, GatedDeltaNet, GatedDeltaNetConfig, PackedSequences,
    gated_delta_rule, gated_delta_rule_varlen,
};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;

use super::check::{Checked, DTYPES, allowed, gradients, largest_error, relative_error};
use super::table::Row;

const BATCH: usize = 2;
const KEY_HEADS: usize = 2;
const HEADS: usize = 4;

/// The number of single tokens after a prompt.
const TOKENS: usize = 3;

/// A call of the gated delta rule.
#[derive(Clone, Copy)]
struct Rule {
    t: usize,
    d_k: usize,
    d_v: usize,
    /// Whether every channel has its own decay.
    by_channel: bool,
    /// The ends of packed sequences, if the tokens are no batch.
    packed: Option<[usize; 3]>,
}

/// The tensors of a call.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
}

/// Checks outputs and states, and gradients.
pub fn check(device: &Device, short: bool, tolerance: f64) -> Result<[Row; 2]> {
    let lengths: &[usize] = if short { &[1, 5, 70] } else { &[1, 5, 70, 64, 200, 515] };
    let mut rules = Vec::new();
    for &t in lengths {
        for (d_k, d_v, by_channel) in [(64, 64, false), (32, 64, true), (128, 128, false)] {
            rules.push(Rule { t, d_k, d_v, by_channel, packed: None });
        }
    }
    rules.push(Rule { t: 70, d_k: 64, d_v: 64, by_channel: false, packed: Some([1, 30, 70]) });
    let mut outputs = Row::new("gated delta rule");
    let mut with_gradients = Row::new("delta rule, gradients");
    for dtype in DTYPES {
        for rule in &rules {
            let Rule { t, d_k, d_v, by_channel, packed } = rule;
            let name = format!("t{t} d{d_k}/{d_v}, decay by channel {by_channel}, packed {}", packed.is_some());
            outputs.add(dtype, rule.compare(false, dtype, device), tolerance * allowed(dtype), &name);
            with_gradients.add(dtype, rule.compare(true, dtype, device), tolerance * allowed(dtype), &name);
        }
    }
    Ok([outputs, with_gradients])
}

impl Rule {
    fn compare(&self, with_gradients: bool, dtype: DType, device: &Device) -> Result<Checked> {
        let operands = self.operands(dtype)?;
        let exact = operands.map(|tensor| tensor.to_dtype(DType::F64))?;
        let here = operands.map(|tensor| tensor.to_device(device))?;
        let expected = self.run(&exact, with_gradients, Backend::Reference)?;
        let found = self.run(&here, with_gradients, Backend::Auto)?;
        Ok(Checked { error: largest_error(&found, &expected)?, plan: None })
    }

    fn operands(&self, dtype: DType) -> Result<Operands> {
        let Self { t, d_k, d_v, by_channel, packed } = *self;
        let seed = TorchSeed::new(6);
        let shape = |heads: usize, width: Option<usize>| -> Vec<usize> {
            let mut dims = if packed.is_some() { vec![t, heads] } else { vec![BATCH, heads, t] };
            dims.extend(width);
            dims
        };
        let normal = |dims: Vec<usize>| seed.randn(dims);
        let uniform = |dims: Vec<usize>| seed.rand(dims);
        let states = packed.map_or(BATCH, |ends| ends.len());
        // Keys of length 1, as the models have them.
        let k = normal(shape(KEY_HEADS, Some(d_k)))?;
        let k = k.broadcast_div(&k.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)?;
        Ok(Operands {
            q: normal(shape(KEY_HEADS, Some(d_k)))?.to_dtype(dtype)?,
            k: k.to_dtype(dtype)?,
            v: normal(shape(HEADS, Some(d_v)))?.to_dtype(dtype)?,
            decay: uniform(shape(HEADS, by_channel.then_some(d_k)))?.neg()?.to_dtype(dtype)?,
            beta: uniform(shape(HEADS, None))?.to_dtype(dtype)?,
            state: normal(vec![states, HEADS, d_k, d_v])?,
        })
    }

    /// Returns the output and the state, or the gradients of the sum of their squares.
    fn run(&self, operands: &Operands, with_gradients: bool, backend: Backend) -> Result<Vec<Tensor>> {
        let operands = match with_gradients {
            true => &operands.map(|tensor| Ok(Var::from_tensor(tensor)?.into_inner()))?,
            false => operands,
        };
        let Operands { q, k, v, decay, beta, state } = operands;
        let options = DeltaOptions::default().with_backend(backend);
        let (decay, beta, state) = (Some(decay), Some(beta), Some(state));
        let (y, last_state) = match self.packed {
            None => gated_delta_rule(q, k, v, decay, beta, state, &options)?,
            Some(ends) => {
                let sequences = PackedSequences::self_attention([&[0], ends.as_slice()].concat())?;
                gated_delta_rule_varlen(q, k, v, decay, beta, state, &sequences, &options)?
            }
        };
        if !with_gradients {
            return Ok(vec![y, last_state]);
        }
        let y_sum = y.to_dtype(last_state.dtype())?.sqr()?.sum_all()?;
        gradients(&(y_sum + last_state.sqr()?.sum_all()?)?, &operands.all())
    }
}

impl Operands {
    /// Applies `change` to each tensor.
    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            q: change(&self.q)?,
            k: change(&self.k)?,
            v: change(&self.v)?,
            decay: change(&self.decay)?,
            beta: change(&self.beta)?,
            state: change(&self.state)?,
        })
    }

    /// Returns all tensors.
    fn all(&self) -> [&Tensor; 6] {
        [&self.q, &self.k, &self.v, &self.decay, &self.beta, &self.state]
    }
}

/// Checks a layer of linear attention, with its short convolution and its gated norm: a prompt, then single tokens
/// through a cache.
pub fn check_layer(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("a layer, linear");
    for dtype in DTYPES {
        for t in [1, 5, 70] {
            let checked = compare_layer(t, dtype, device);
            row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("a prompt of {t}"));
        }
    }
    Ok(row)
}

fn compare_layer(t: usize, dtype: DType, device: &Device) -> Result<Checked> {
    let cfg =
        GatedDeltaNetConfig::new(64, HEADS).with_num_key_heads(KEY_HEADS).with_key_head_dim(32).with_value_head_dim(64);
    let drawn = GatedDeltaNet::new(&cfg, TorchSeed::new(8).var_builder(dtype, &Device::Cpu))?;
    let weights: HashMap<_, _> = drawn.state_dict(DeltaLayout::Separate)?.into_iter().collect();
    let xs = TorchSeed::new(9).randn((BATCH, t + TOKENS, 64))?.to_dtype(dtype)?;
    let exact_net = GatedDeltaNet::new(&cfg, VarBuilder::from_tensors(weights.clone(), DType::F64, &Device::Cpu))?;
    let expected = exact_net.forward(&xs.to_dtype(DType::F64)?)?;

    let net = GatedDeltaNet::new(&cfg, VarBuilder::from_tensors(weights, dtype, device))?;
    let here = xs.to_device(device)?;
    let mut cache = DeltaCache::default();
    let prompt = here.narrow(1, 0, t)?;
    let mut calls = vec![net.forward_with(DeltaInput::new(&prompt).with_cache(&mut cache))?];
    for at in t..t + TOKENS {
        let token = here.narrow(1, at, 1)?;
        calls.push(net.forward_with(DeltaInput::new(&token).with_cache(&mut cache))?);
    }
    Ok(Checked { error: relative_error(&Tensor::cat(&calls, 1)?, &expected)?, plan: None })
}
