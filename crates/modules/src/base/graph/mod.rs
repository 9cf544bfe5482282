//! Results of kernels, on any device, as operations of Candle's graph, with gradients.
//!
//! A custom operation of Candle has at most three operands and exactly one result, and its backward pass is given
//! nothing but the gradient of that result. The kernels need more: fused attention has up to seven operands, and
//! attention with its log-sum-exp and the gated delta rule have two results. [`record`] and [`record_two`] build such
//! an operation from several nodes of at most three operands each. The kernel has run before the nodes are made; no
//! node copies its numbers.
//!
//! # More than three operands
//!
//! ```text
//! a, b ------------------+
//!                        +--> result
//! c, d, .. --> join -----+
//! ```
//!
//! `join` is a tensor of one number. In a backward pass, `result` computes the gradients of all operands and returns
//! the gradients of `a` and `b`. `join` returns the gradients of `c, d, ..` when its turn comes.
//!
//! # Two results
//!
//! ```text
//!                        +--> first
//! a, b, .. --> join -----+
//!                        +--> second
//! ```
//!
//! `join` is a tensor of two numbers, one for each result. In a backward pass, `first` and `second` send their
//! gradients to `join`, which runs the backward pass of the kernel once, with both.
//!
//! # How gradients travel between nodes
//!
//! The only thing that Candle carries from a node to its operand is a gradient of the operand's shape, and `join` is
//! too small to carry the gradients of whole tensors. So a node puts them into a [`Mailbox`], and the gradient that it
//! returns for `join` is the number of the message. Candle adds up the gradients of an operand. Nothing else
//! contributes to that entry of `join`, so the sum is the number of the message.
//!
//! `join` is on the device of the operands. On a GPU its turn in a backward pass therefore begins with reading one or
//! two numbers back: the host waits until the device has done what was launched before, and launches nothing meanwhile.
//! There, operations with at most three tracked operands and one result have no `join` and never wait. A large result
//! also has a [`link`], to which other operations of this crate send its gradients.
//!
//! The number is new for every message of an operation and travels with the gradients of one backward pass. Passes over
//! one graph can therefore run at the same time, in any threads: each finds its own messages. The messages of a pass
//! that fails on the way are never taken. They are freed with the graph.

mod link;
mod mailbox;
mod numbers;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_core::{
    CpuStorage, CudaStorage, CustomOp3, Device, Error, Layout, MetalStorage, Result, Shape, Storage, Tensor, WithDType,
};

use link::{Destination, MessageLink};
use mailbox::{Mailbox, NOTHING, no_gradient};
use numbers::Computed;

pub use link::{is_linked, reshape_linked, transpose_linked};
pub use numbers::IntoStorage;

/// Computes the gradients of a node's operands, in their order, from the node's result and its gradient.
type Backward = dyn Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

/// Returns the result of an operation that a kernel has computed: contiguous `numbers` on the device of the operands,
/// with gradients for the operands that are tracked.
///
/// `backward` is called with the result and its gradient. It returns the gradients of the operands in their order, at
/// least of all that are tracked.
///
/// # Errors
/// If Candle cannot add the operation to its graph.
pub fn record(
    name: &'static str,
    operands: &[Option<&Tensor>],
    numbers: impl IntoStorage,
    shape: impl Into<Shape>,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let result = Computed { storage: numbers.into_storage(), shape: shape.into() };
    let TrackedOperands { nodes, senders } = TrackedOperands::new(operands);
    let Some(first) = nodes.first() else { return Ok(result.untracked()) };
    let of_nodes = move |stored: &Tensor, gradient: &Tensor| senders.send(backward(stored, gradient)?);
    if result.shape.elem_count() < link::MIN_ELEMENTS {
        return node(name, &nodes, result, Box::new(of_nodes));
    }
    match first.device() {
        Device::Cpu => with_messages(name, &nodes, result, of_nodes),
        _ => with_placeholder(name, &nodes, result, of_nodes),
    }
}

/// Adds a result to Candle's graph, with a link that takes messages.
fn with_messages(
    name: &'static str,
    operands: &[Tensor],
    result: Computed,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let mailbox = Mailbox::default();
    let received = mailbox.clone();
    let stored = StoredResult::default();
    let result_of_forward = stored.clone();
    let backward_of_link = move |_: &Tensor, numbers: &Tensor| {
        let gradient = link::receive(name, &received, numbers)?;
        backward(result_of_forward.get(name)?, &gradient)
    };
    let numbers = numbers::join(link::ENTRIES, operands[0].device())?;
    let link = Arc::new(MessageLink::new(node(name, operands, numbers, Box::new(backward_of_link))?, mailbox));
    let own = link.clone();
    let send_own = move |_: &Tensor, gradient: &Tensor| Ok(vec![Some(own.send(0, gradient)?)]);
    let result = node(name, std::slice::from_ref(&link.numbers), result, Box::new(send_own))?;
    stored.set(&result);
    link::set_messages(&result, &link);
    Ok(result)
}

/// Adds a result to Candle's graph, with a placeholder of its shape for the operations of this crate that use it.
fn with_placeholder(
    name: &'static str,
    operands: &[Tensor],
    result: Computed,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let backward = Arc::new(backward);
    let backward_of_placeholder = backward.clone();
    let stored = StoredResult::default();
    let result_of_forward = stored.clone();
    let of_placeholder =
        move |_: &Tensor, gradient: &Tensor| backward_of_placeholder(result_of_forward.get(name)?, gradient);
    let without_numbers = result.without_numbers(operands[0].device())?;
    let placeholder = Arc::new(node(name, operands, without_numbers, Box::new(of_placeholder))?);
    let own = placeholder.clone();
    let of_result = move |own_numbers: &Tensor, gradient: &Tensor| {
        // The node of the result owns the placeholder, which lives as long as the result.
        let _owned = &own;
        backward(own_numbers, gradient)
    };
    let result = node(name, operands, result, Box::new(of_result))?;
    stored.set(&result);
    link::set_placeholder(&result, &placeholder);
    Ok(result)
}

/// A copy of the result, without its node, for the backward pass of the link. The link is made before the result, so
/// that the copy is set later.
#[derive(Clone, Default)]
struct StoredResult(Arc<OnceLock<Tensor>>);

impl StoredResult {
    fn set(&self, result: &Tensor) {
        self.0.get_or_init(|| result.detach());
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        let not_yet = || Error::msg(format!("[{name}] the backward pass began before the operation was in the graph"));
        self.0.get().ok_or_else(not_yet)
    }
}

/// Returns the two results of an operation that a kernel has computed; see [`record`].
///
/// `backward` is called with the first result, its gradient, and the gradient of the second result if there is one. The
/// gradient of a first result that the loss does not depend on is zeros.
///
/// # Errors
/// If Candle cannot add the operation to its graph.
pub fn record_two(
    name: &'static str,
    operands: &[Option<&Tensor>],
    [first_shape, second_shape]: [impl Into<Shape>; 2],
    first: impl IntoStorage,
    second: impl IntoStorage,
    backward: impl Fn(&Tensor, &Tensor, Option<Tensor>) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<[Tensor; 2]> {
    let first = Computed { storage: first.into_storage(), shape: first_shape.into() };
    let second = Computed { storage: second.into_storage(), shape: second_shape.into() };
    let TrackedOperands { nodes, senders } = TrackedOperands::new(operands);
    let Some(tracked) = nodes.first() else { return Ok([first.untracked(), second.untracked()]) };
    let join_numbers = numbers::join(2, tracked.device())?;

    let mailbox = Mailbox::<ResultGradient>::default();
    let received = mailbox.clone();
    let backward_of_both = move |_: &Tensor, tickets: &Tensor| {
        let tickets = tickets.to_vec1::<f32>()?;
        let of_first = received.take(tickets[0]);
        let of_second = received.take(tickets[1]);
        let Some(result) = of_first.as_ref().or(of_second.as_ref()).map(|message| &message.first_result) else {
            return Err(Error::msg(format!("[{name}] the backward pass has no gradient of either result")));
        };
        let first_gradient = match &of_first {
            Some(message) => message.gradient.clone(),
            None => result.zeros_like()?,
        };
        let gradients = backward(result, &first_gradient, of_second.as_ref().map(|message| message.gradient.clone()))?;
        senders.send(gradients)
    };
    let join = node(name, &nodes, join_numbers, Box::new(backward_of_both))?;

    let sent = mailbox.clone();
    let send_first = move |result: &Tensor, gradient: &Tensor| {
        let message = ResultGradient { first_result: result.detach(), gradient: gradient.detach() };
        Ok(vec![Some(Tensor::new(&[sent.put(message), NOTHING], gradient.device())?)])
    };
    let joined = std::slice::from_ref(&join);
    let first = node(name, joined, first, Box::new(send_first))?;

    let first_result = first.detach();
    let send_second = move |_: &Tensor, gradient: &Tensor| {
        let message = ResultGradient { first_result: first_result.clone(), gradient: gradient.detach() };
        Ok(vec![Some(Tensor::new(&[NOTHING, mailbox.put(message)], gradient.device())?)])
    };
    let second = node(name, joined, second, Box::new(send_second))?;
    Ok([first, second])
}

/// Returns the gradient of an operand from the numbers that were computed for it; `None` if the operand is not tracked.
///
/// # Errors
/// If the number of entries is not that of the operand.
pub fn gradient_of<E: WithDType>(operand: Option<&Tensor>, numbers: Option<Vec<E>>) -> Result<Option<Tensor>> {
    let (Some(operand), Some(numbers)) = (operand, numbers) else { return Ok(None) };
    if !operand.track_op() {
        return Ok(None);
    }
    Ok(Some(Tensor::from_vec(numbers, operand.shape(), operand.device())?))
}

/// The operands of an operation that are tracked for gradients.
struct TrackedOperands {
    /// The tensors in Candle's graph to which gradients are returned: the tracked operands, or their links.
    nodes: Vec<Tensor>,
    senders: Senders,
}

/// For each operand, in the order in which they were given: where to send its gradient, if it is tracked.
struct Senders {
    by_operand: Vec<Option<Destination>>,
}

impl TrackedOperands {
    fn new(operands: &[Option<&Tensor>]) -> Self {
        let mut nodes = Vec::new();
        let mut by_operand = Vec::with_capacity(operands.len());
        for operand in operands {
            let Some(operand) = operand.filter(|operand| operand.track_op()) else {
                by_operand.push(None);
                continue;
            };
            let destination = Destination::of(operand);
            nodes.push(destination.node(operand));
            by_operand.push(Some(destination));
        }
        Self { nodes, senders: Senders { by_operand } }
    }
}

impl Senders {
    /// Sends the gradients of all operands, and returns the gradients of the tensors in Candle's graph.
    fn send(&self, gradients: Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> {
        let mut sent = Vec::with_capacity(gradients.len());
        for (gradient, destination) in gradients.into_iter().zip(&self.by_operand) {
            let Some(destination) = destination else { continue };
            sent.push(match gradient {
                Some(gradient) => Some(destination.send(gradient)?),
                None => None,
            });
        }
        Ok(sent)
    }
}

/// The gradient of one result of an operation with two.
struct ResultGradient {
    /// The first result, which the backward pass of the kernel reads.
    first_result: Tensor,
    gradient: Tensor,
}

/// Adds a node with any number of operands, all of them tracked, to Candle's graph.
fn node(name: &'static str, operands: &[Tensor], result: Computed, backward: Box<Backward>) -> Result<Tensor> {
    let [a, b, rest @ ..] = operands else {
        // Candle asks for three operands. The only one is given three times and has its gradient once.
        let operand = &operands[0];
        return operand.apply_op3(operand, operand, Node::new(name, result, backward));
    };
    match rest {
        [] => a.apply_op3(b, b, Node::new(name, result, backward)),
        [c] => a.apply_op3(b, c, Node::new(name, result, backward)),
        _ => {
            let mailbox = Mailbox::<Vec<Option<Tensor>>>::default();
            let received = mailbox.clone();
            let backward_of_rest = move |_: &Tensor, ticket: &Tensor| {
                let message = received.take(ticket.to_vec1::<f32>()?[0]);
                message.ok_or_else(|| no_gradient(name))
            };
            let join_numbers = numbers::join(1, a.device())?;
            let join = node(name, rest, join_numbers, Box::new(backward_of_rest))?;
            let backward_of_all = move |numbers: &Tensor, gradient: &Tensor| {
                let mut gradients = backward(numbers, gradient)?;
                let message = gradients.split_off(2);
                gradients.push(Some(Tensor::new(&[mailbox.put(message)], gradient.device())?));
                Ok(gradients)
            };
            a.apply_op3(b, &join, Node::new(name, result, Box::new(backward_of_all)))
        }
    }
}

/// A node with at most three operands. A node with fewer repeats the last one, which has no gradient from there.
struct Node {
    name: &'static str,
    /// The result, until Candle takes it into the graph.
    result: Mutex<Option<Computed>>,
    backward: Box<Backward>,
}

impl Node {
    fn new(name: &'static str, result: Computed, backward: Box<Backward>) -> Self {
        Self { name, result: Mutex::new(Some(result)), backward }
    }

    /// Returns the result. There is one call for each node.
    fn take(&self) -> Result<Computed> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.ok_or_else(|| Error::msg(format!("[{}] the operation is already in a graph", self.name)))
    }

    /// Returns the error of a result that is on another device than the operands.
    fn other_device(&self, expected: &str) -> Error {
        Error::msg(format!("[{}] the result is on another device than the operands, expected {expected}", self.name))
    }
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
        let Computed { storage, shape } = self.take()?;
        let Storage::Cpu(numbers) = storage else { return Err(self.other_device("the CPU")) };
        Ok((numbers, shape))
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let Computed { storage, shape } = self.take()?;
        let Storage::Cuda(numbers) = storage else { return Err(self.other_device("CUDA")) };
        Ok((numbers, shape))
    }

    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let Computed { storage, shape } = self.take()?;
        let Storage::Metal(numbers) = storage else { return Err(self.other_device("Metal")) };
        Ok((numbers, shape))
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
        let first = gradients.next().flatten();
        let second = gradients.next().flatten();
        let third = gradients.next().flatten();
        Ok((first, second, third))
    }
}

#[cfg(test)]
mod tests;
