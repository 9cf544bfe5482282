//! The kernel of the CPU, and its results as nodes of Candle's graph.
//!
//! Candle's operations take three tensors at most and give one; the rule takes six and gives two. Three kinds of nodes
//! are one operation, which copies nothing:
//!
//! ```text
//! q, k, v             -> Inputs, a number -+
//! decay, beta, states -> Inputs, a number -+-> Context -> States
//! ```
//!
//! On the way back `States` puts its gradient down, `Context` runs the backward pass, and `Inputs` take what is theirs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::{CpuStorage, DType, Error, Result, Shape, Tensor, WithDType};

use super::{Call, Dims};
use candle_attention_kernels::delta::{
    self, BackwardProblem, Decay, Gradients, Problem, Saved, gated_delta_rule_backward,
};
use candle_attention_kernels::flash::Strided;
use candle_attention_kernels::{Element, Tier};
use candle_attention_modules::base::executor;
use candle_attention_modules::base::rowwise::{
    Op3, Operand, Read, Ternary, read, to_vec, with_contiguous_rows, with_float,
};

/// What the queries read, (B, H, T, D_v), a view of (B, T, H, D_v), and the states (n, H, D_k, D_v).
pub(super) fn run(mut call: Call, tier: Tier) -> Result<(Tensor, Tensor)> {
    for tensor in call.rows.iter_mut().chain(call.factors.iter_mut().flatten()) {
        *tensor = with_contiguous_rows(tensor)?;
    }
    let (ys, states) = with_float!(call.op, call.dtype(), |E| call.run_kernel::<E>(tier)?);
    Ok((ys.transpose(1, 2)?, states))
}

impl Call {
    /// (B, T, H, D_v), and the states (n, H, D_k, D_v).
    fn run_kernel<E: Element + WithDType>(self, tier: Tier) -> Result<(Tensor, Tensor)> {
        let is_tracked = self.tracks_gradients();
        let delta::Output { context, states, saved } = self.with_problem::<E, _>(|problem| {
            delta::gated_delta_rule(problem, tier, is_tracked).map_err(|error| self.error(error))
        })?;
        if let Some(saved) = saved {
            return track(self, tier, saved, E::to_cpu_storage_owned(context), states);
        }
        let ([context_shape, states_shape], device) = (self.shapes(), self.rows[0].device());
        Ok((Tensor::from_vec(context, &context_shape, device)?, Tensor::from_vec(states, &states_shape, device)?))
    }

    /// Of the context and the states.
    fn shapes(&self) -> [[usize; 4]; 2] {
        let Dims { b, n, t, h, d_k, d_v, .. } = self.dims;
        [[b, t, h, d_v], [n, h, d_k, d_v]]
    }

    fn error(&self, error: impl std::fmt::Display) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Gives the call to a function.
    fn with_problem<E: Element + WithDType, R>(&self, run: impl FnOnce(&Problem<E>) -> Result<R>) -> Result<R> {
        let Dims { b, t, h, d_k, d_v, .. } = self.dims;
        let Self { rows, factors, scale, options, .. } = self;
        // Of the tokens of all entries of the batch.
        let sequences: Vec<_> = match &self.sequences {
            None => (0..b).map(|entry| entry * t..(entry + 1) * t).collect(),
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s)).collect(),
        };
        let [h_q, h_k, h_v] = rows.each_ref().map(|row| row.dims()[1]);
        let [q, k, v] = rows.each_ref().map(read);
        let [decay, beta, states] = factors.each_ref().map(|xs| xs.as_ref().map(read));
        let decay = match &decay {
            Some(decay) if decay.layout.dims()[3] > 1 => Some(Decay::Channels(decay.strided()?)),
            Some(decay) => Some(Decay::Heads(decay.strided()?)),
            None => None,
        };
        let states: Option<Strided<f32, 3>> = states.as_ref().map(Read::strided).transpose()?;
        let count = self.shapes()[1].iter().product();
        run(&Problem {
            dims: delta::Dims { b, t, h, h_q, h_k, h_v, d_k, d_v },
            q: q.strided()?,
            k: k.strided()?,
            v: v.strided()?,
            decay,
            beta: beta.as_ref().map(Read::strided).transpose()?,
            states: states.map(|states| &states.data[..count]),
            sequences: &sequences,
            scale: *scale as f32,
            qk_norm: options.qk_norm.map(|eps| eps as f32),
            executor: executor(),
        })
    }
}

/// The results of a forward pass, (B, T, H, D_v) and states, with gradients for the inputs that are tracked.
fn track(call: Call, tier: Tier, saved: Saved, context: CpuStorage, states: Vec<f32>) -> Result<(Tensor, Tensor)> {
    let ([of_context, of_states], one) = (call.shapes(), CpuStorage::F32(vec![0.0]));
    let absent = Tensor::zeros(1, DType::F32, call.rows[0].device())?;
    let [q, k, v] = call.rows.clone();
    let [decay, beta, before] = call.factors.clone().map(|factor| factor.unwrap_or(absent.clone()));
    let pass = Arc::new(Pass { call, tier, saved, gradients: Mutex::default() });
    let node = |role, [a, b, c]: [&Tensor; 3], result, shape| {
        let result = Mutex::new(Some((result, shape)));
        a.apply_op3(b, c, Op3(Node { pass: pass.clone(), role, result }))
    };
    let rows = node(Role::Inputs([0, 1, 2]), [&q, &k, &v], one.clone(), 1.into())?;
    let factors = node(Role::Inputs([3, 4, 5]), [&decay, &beta, &before], one, 1.into())?;
    let context = node(Role::Context, [&rows, &factors, &absent], context, Shape::from(&of_context))?;
    let states = CpuStorage::F32(states);
    let states = node(Role::States, [&context, &absent, &absent], states, Shape::from(&of_states))?;
    Ok((context, states))
}

/// What the nodes of a call have in common.
struct Pass {
    call: Call,
    tier: Tier,
    saved: Saved,
    /// Between nodes, by the thread whose backward pass it is: those of the six inputs, and that of the last states.
    gradients: Mutex<HashMap<(ThreadId, usize), Tensor>>,
}

const STATES: usize = 6;

impl Pass {
    fn put(&self, of: usize, gradient: Tensor) {
        lock(&self.gradients).insert((thread::current().id(), of), gradient);
    }

    fn take(&self, of: usize) -> Option<Tensor> {
        lock(&self.gradients).remove(&(thread::current().id(), of))
    }

    /// From the gradients of the results, that of (B, T, H, D_v), to those of the inputs that are tracked.
    fn run_backward<E: Element + WithDType>(&self, context: &Tensor) -> Result<()> {
        let Call { rows, factors, dims, .. } = &self.call;
        let context = with_contiguous_rows(&context.transpose(1, 2)?)?;
        let states = self.take(STATES).as_ref().map(to_vec).transpose()?;
        let context = read(&context);
        let Gradients { q, k, v, decay, beta, states } = self.call.with_problem::<E, _>(|&forward| {
            let (context_grad, states_grad) = (context.strided()?, states.as_deref());
            let problem = BackwardProblem { forward, saved: &self.saved, context_grad, states_grad };
            gated_delta_rule_backward(&problem, self.tier).map_err(|error| self.call.error(error))
        })?;
        let inputs = rows.iter().map(Some).chain(factors.iter().map(Option::as_ref));
        for (of, (input, gradient)) in inputs.zip([q, k, v, decay, beta, states]).enumerate() {
            let Some(input) = input.filter(|input| input.track_op()) else { continue };
            // The heads of states that read one head of an input add to its gradient.
            let (b, heads, t, d) = input.dims4()?;
            let gradient = Tensor::from_vec(gradient, (b, heads, dims.h / heads, t, d), input.device())?;
            let gradient = if heads == dims.h { gradient.squeeze(2)? } else { gradient.sum(2)? };
            self.put(of, gradient.to_dtype(input.dtype())?);
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Role {
    /// Which of the six.
    Inputs([usize; 3]),
    Context,
    States,
}

struct Node {
    pass: Arc<Pass>,
    role: Role,
    result: Mutex<Option<(CpuStorage, Shape)>>,
}

impl Ternary for Node {
    const NAME: &'static str = "gated-delta-rule";

    fn forward(&self, _: [Operand; 3]) -> Result<(CpuStorage, Shape)> {
        lock(&self.result).take().ok_or_else(|| self.pass.call.error("a result was asked for twice"))
    }

    fn backward(&self, [a, b, _]: [&Tensor; 3], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        match &self.role {
            Role::Inputs(of) => return Ok(of.map(|of| self.pass.take(of))),
            Role::States => self.pass.put(STATES, gradient.clone()),
            Role::Context => {
                with_float!(self.pass.call.op, gradient.dtype(), |E| self.pass.run_backward::<E>(gradient)?)
            }
        }
        // What comes before is to have its turn.
        Ok([Some(a.zeros_like()?), Some(b.zeros_like()?), None])
    }
}
