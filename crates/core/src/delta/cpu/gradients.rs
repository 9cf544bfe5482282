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
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, WithDType};
use half::{bf16, f16};

use super::{Kernel, strided};
use crate::base::rowwise::with_contiguous_rows;
use candle_attention_kernels::Element;
use candle_attention_kernels::delta::{BackwardProblem, Gradients, Saved, gated_delta_rule_backward};

/// The results of a forward pass, (B, T, H, D_v) and states, with gradients for the inputs that are tracked.
pub(super) fn track(kernel: Kernel, saved: Saved, context: CpuStorage, states: Vec<f32>) -> Result<(Tensor, Tensor)> {
    let absent = Tensor::zeros(1, DType::F32, kernel.rows[0].device())?;
    let [q, k, v] = kernel.rows.clone();
    let [decay, beta, before] = kernel.factors.clone().map(|factor| factor.unwrap_or(absent.clone()));
    let pass = Arc::new(Pass { kernel, saved, gradients: Mutex::default() });
    let rows = q.apply_op3(&k, &v, Inputs(pass.clone(), [0, 1, 2]))?;
    let factors = decay.apply_op3(&beta, &before, Inputs(pass.clone(), [3, 4, 5]))?;
    let context = rows.apply_op2(&factors, Context(pass.clone(), Mutex::new(Some(context))))?;
    let states = context.apply_op1(States(pass, Mutex::new(Some(CpuStorage::F32(states)))))?;
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
        let mut gradients = self.gradients.lock().unwrap_or_else(PoisonError::into_inner);
        gradients.insert((thread::current().id(), of), gradient);
    }

    fn take(&self, of: usize) -> Option<Tensor> {
        let mut gradients = self.gradients.lock().unwrap_or_else(PoisonError::into_inner);
        gradients.remove(&(thread::current().id(), of))
    }

    /// From the gradients of the results, that of (B, T, H, D_v), to those of the inputs that are tracked.
    fn run_backward<E: Element + WithDType>(&self, context: &Tensor) -> Result<()> {
        let (kernel, h) = (&self.kernel, self.kernel.dims.h);
        let context = with_contiguous_rows(&context.transpose(1, 2)?)?;
        let states = self.take(STATES).map(|states| states.flatten_all()?.to_vec1()).transpose()?;
        let (storage, layout) = context.storage_and_layout();
        let Gradients { q, k, v, decay, beta, states } = kernel.with_problem::<E, _>(|&forward| {
            let (context_grad, states_grad) = (strided(&storage, layout)?, states.as_deref());
            let problem = BackwardProblem { forward, saved: &self.saved, context_grad, states_grad };
            gated_delta_rule_backward(&problem, kernel.tier).map_err(|error| kernel.error(error))
        })?;
        let inputs = kernel.rows.iter().map(Some).chain(kernel.factors.iter().map(Option::as_ref));
        for (of, (input, gradient)) in inputs.zip([q, k, v, decay, beta, states]).enumerate() {
            let Some(input) = input.filter(|input| input.track_op()) else { continue };
            // The heads of states that read one head of an input add to its gradient.
            let (b, heads, t, d) = input.dims4()?;
            let gradient = Tensor::from_vec(gradient, (b, heads, h / heads, t, d), input.device())?;
            let gradient = if heads == h { gradient.squeeze(2)? } else { gradient.sum(2)? };
            self.put(of, gradient.to_dtype(input.dtype())?);
        }
        Ok(())
    }

    fn result(&self, result: &Mutex<Option<CpuStorage>>, shape: [usize; 4]) -> Result<(CpuStorage, Shape)> {
        let result = result.lock().unwrap_or_else(PoisonError::into_inner).take();
        Ok((result.ok_or_else(|| self.kernel.error("a result was asked for twice"))?, Shape::from(&shape)))
    }
}

struct Inputs(Arc<Pass>, [usize; 3]);

impl CustomOp3 for Inputs {
    fn name(&self) -> &'static str {
        "gated-delta-rule-inputs"
    }

    #[rustfmt::skip]
    fn cpu_fwd(
        &self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), 1.into()))
    }

    #[rustfmt::skip]
    fn bwd(
        &self, _: &Tensor, _: &Tensor, _: &Tensor, _: &Tensor, _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.1.map(|of| self.0.take(of)).into())
    }
}

struct Context(Arc<Pass>, Mutex<Option<CpuStorage>>);

impl CustomOp2 for Context {
    fn name(&self) -> &'static str {
        "gated-delta-rule"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.result(&self.1, self.0.kernel.shapes()[0])
    }

    #[rustfmt::skip]
    fn bwd(
        &self, rows: &Tensor, factors: &Tensor, _: &Tensor, gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        match gradient.dtype() {
            DType::BF16 => self.0.run_backward::<bf16>(gradient)?,
            DType::F16 => self.0.run_backward::<f16>(gradient)?,
            _ => self.0.run_backward::<f32>(gradient)?,
        }
        Ok((Some(rows.zeros_like()?), Some(factors.zeros_like()?)))
    }
}

struct States(Arc<Pass>, Mutex<Option<CpuStorage>>);

impl CustomOp1 for States {
    fn name(&self) -> &'static str {
        "gated-delta-rule-states"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.0.result(&self.1, self.0.kernel.shapes()[1])
    }

    fn bwd(&self, context: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.0.put(STATES, gradient.clone());
        Ok(Some(context.zeros_like()?))
    }
}
