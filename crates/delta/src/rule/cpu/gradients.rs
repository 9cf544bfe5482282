//! The kernel's results as nodes of Candle's graph.
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

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, WithDType};

use super::{Call, Kernel};
use candle_attention_kernels::Element;
use candle_attention_kernels::delta::{BackwardProblem, Gradients, Saved, gated_delta_rule_backward};
use candle_attention_modules::base::rowwise::{read, with_contiguous_rows, with_float};

/// The results of a forward pass, (B, T, H, D_v) and states, with gradients for the inputs that are tracked.
pub(super) fn track(kernel: Kernel, saved: Saved, context: CpuStorage, states: Vec<f32>) -> Result<(Tensor, Tensor)> {
    let ([of_context, of_states], one) = (kernel.shapes(), CpuStorage::F32(vec![0.0]));
    let absent = Tensor::zeros(1, DType::F32, kernel.call.rows[0].device())?;
    let [q, k, v] = kernel.call.rows.clone();
    let [decay, beta, before] = kernel.call.factors.clone().map(|factor| factor.unwrap_or(absent.clone()));
    let pass = Arc::new(Pass { kernel, saved, gradients: Mutex::default() });
    let node = |role, [a, b, c]: [&Tensor; 3], result, shape| {
        let result = Mutex::new(Some((result, shape)));
        a.apply_op3(b, c, Node { pass: pass.clone(), role, result })
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
    kernel: Kernel,
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
        let (kernel, Call { rows, factors, dims, .. }) = (&self.kernel, &self.kernel.call);
        let context = with_contiguous_rows(&context.transpose(1, 2)?)?;
        let states = self.take(STATES).map(|states| states.flatten_all()?.to_vec1()).transpose()?;
        let context = read(&context);
        let Gradients { q, k, v, decay, beta, states } = kernel.with_problem::<E, _>(|&forward| {
            let (context_grad, states_grad) = (context.strided()?, states.as_deref());
            let problem = BackwardProblem { forward, saved: &self.saved, context_grad, states_grad };
            gated_delta_rule_backward(&problem, kernel.tier).map_err(|error| kernel.error(error))
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

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        "gated-delta-rule"
    }

    #[rustfmt::skip]
    fn cpu_fwd(
        &self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        lock(&self.result).take().ok_or_else(|| self.pass.kernel.error("a result was asked for twice"))
    }

    #[rustfmt::skip]
    fn bwd(
        &self, a: &Tensor, b: &Tensor, _: &Tensor, _: &Tensor, gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let op = self.pass.kernel.call.op;
        match &self.role {
            Role::Inputs(of) => return Ok(of.map(|of| self.pass.take(of)).into()),
            Role::States => self.pass.put(STATES, gradient.clone()),
            Role::Context => with_float!(op, gradient.dtype(), |E| self.pass.run_backward::<E>(gradient)?),
        }
        // What comes before is to have its turn.
        Ok((Some(a.zeros_like()?), Some(b.zeros_like()?), None))
    }
}
