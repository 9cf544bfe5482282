//! What a CPU's kernel computed, as an operation in Candle's graph.
//!
//! Candle's operations have three operands at most and one result. Here an operation has any number of operands and one
//! result or two, which are computed before they are in the graph. More than three operands, and a second result, are
//! nodes of their own, which copy nothing:
//!
//! ```text
//! a, b ------------------+
//! c, d, .. -> a number --+-> first result -> second result
//! ```
//!
//! On the way back the node of a second result puts its gradient down, that of the first runs the backward pass, and
//! those before it take what is theirs. After a pass that failed between two nodes, results are to be computed anew
//! before another: what was put down then is still there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp3, Error, Layout, Result, Shape, Storage, Tensor, WithDType};

/// From a result and its gradient to the gradients of the operands.
type Backward = dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// The result of an operation, contiguous numbers on the CPU, with gradients for the operands that are tracked.
///
/// `backward` is given the result and its gradient, and gives those of the operands in their order, at least of all
/// that are tracked.
pub fn record<E: WithDType>(
    name: &'static str,
    operands: &[Option<&Tensor>],
    numbers: Vec<E>,
    shape: impl Into<Shape>,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let (numbers, shape) = (E::to_cpu_storage_owned(numbers), shape.into());
    let tracked: Vec<_> = operands.iter().flatten().filter(|operand| operand.track_op()).copied().cloned().collect();
    if tracked.is_empty() {
        return Ok(Tensor::from_storage(Storage::Cpu(numbers), shape, BackpropOp::none(), false));
    }
    let is_tracked: Vec<_> = operands.iter().map(|operand| operand.is_some_and(Tensor::track_op)).collect();
    let of_tracked = move |result: &Tensor, gradient: &Tensor| {
        let gradients = backward(result, gradient)?.into_iter().zip(&is_tracked);
        Ok(gradients.filter(|(_, is_tracked)| **is_tracked).map(|(gradient, _)| gradient).collect())
    };
    node(name, &tracked, numbers, shape, Box::new(of_tracked))
}

/// [`record`] of two results, the second of which is f32. `backward` is given the gradient of the second too, if there
/// is one.
pub fn record_two<E: WithDType>(
    name: &'static str,
    operands: &[Option<&Tensor>],
    [of_first, of_second]: [impl Into<Shape>; 2],
    first: Vec<E>,
    second: Vec<f32>,
    backward: impl Fn(&Tensor, &Tensor, Option<Tensor>) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<[Tensor; 2]> {
    let handed = Handed::default();
    let own = handed.clone();
    let both = move |result: &Tensor, gradient: &Tensor| backward(result, gradient, take(&own));
    let first = record(name, operands, first, of_first, both)?;
    let before = first.clone();
    let second = record(name, &[Some(&first)], second, of_second, move |_, gradient| {
        put(&handed, gradient.detach());
        // The first result is to have its turn.
        Ok(vec![Some(before.zeros_like()?)])
    })?;
    Ok([first, second])
}

/// The gradient of an operand that is tracked, of the numbers that were computed for it.
pub fn gradient_of<E: WithDType>(operand: Option<&Tensor>, numbers: Option<Vec<E>>) -> Result<Option<Tensor>> {
    let tracked = operand.filter(|operand| operand.track_op()).zip(numbers);
    tracked.map(|(operand, numbers)| Tensor::from_vec(numbers, operand.shape(), operand.device())).transpose()
}

fn node(
    name: &'static str,
    operands: &[Tensor],
    numbers: CpuStorage,
    shape: Shape,
    backward: Box<Backward>,
) -> Result<Tensor> {
    if let [a, b, more @ ..] = operands
        && more.len() > 1
    {
        let handed = Handed::default();
        let own = handed.clone();
        let number = CpuStorage::F32(vec![0.0]);
        let joined =
            node(name, more, number, Shape::from(1), Box::new(move |_, _| Ok(take(&own).unwrap_or_default())))?;
        let zero = joined.zeros_like()?;
        let with_joined = move |result: &Tensor, gradient: &Tensor| {
            let mut gradients = backward(result, gradient)?;
            put(&handed, gradients.split_off(2));
            // What comes before is to have its turn.
            gradients.push(Some(zero.clone()));
            Ok(gradients)
        };
        return node(name, &[a.clone(), b.clone(), joined], numbers, shape, Box::new(with_joined));
    }
    let [a, b, c] = [0, 1, 2].map(|n| &operands[n.min(operands.len() - 1)]);
    a.apply_op3(b, c, Node { name, result: Mutex::new(Some((numbers, shape))), backward })
}

/// Gradients between nodes, by the thread whose backward pass it is.
type Handed<T> = Arc<Mutex<HashMap<ThreadId, T>>>;

fn put<T>(handed: &Handed<T>, gradient: T) {
    handed.lock().unwrap_or_else(PoisonError::into_inner).insert(thread::current().id(), gradient);
}

fn take<T>(handed: &Handed<T>) -> Option<T> {
    handed.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id())
}

/// An operation with three operands at most. Where it has fewer, the last one stands for the others too, without a
/// gradient from there.
struct Node {
    name: &'static str,
    /// Until it is in the graph.
    result: Mutex<Option<(CpuStorage, Shape)>>,
    backward: Box<Backward>,
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.ok_or_else(|| Error::msg(format!("[{}] the operation is in a graph already", self.name)))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let mut gradients = (self.backward)(result, gradient)?.into_iter();
        let mut next = || gradients.next().flatten();
        Ok((next(), next(), next()))
    }
}
