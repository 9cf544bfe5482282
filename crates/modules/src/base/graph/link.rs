//! Gradients that go from one operation of this crate straight to another.
//!
//! Candle adds every gradient of an operand to a tensor of zeros, also if there is only one, and each view between two
//! operations is an operand as well. A training step of an attention layer has 17 large sums of this kind, which take
//! 11 % of its time on the CPU and half of it on an H200 (docs/speed.md, docs/cuda.md). So [`record`](super::record)
//! gives a large result a second node, its link. Another operation whose operand is the result, or a view of it, has
//! the link as its operand instead.
//!
//! This file goes when Candle stores the first gradient of a tensor instead of adding it to zeros: the patch and its
//! gain are in docs/candle-first-gradient.md.
//!
//! Operations find the link of an operand by the id of the tensor. A view has the link of its base if it was made by
//! [`reshape_linked`] or [`transpose_linked`].
//!
//! # On the CPU: messages
//!
//! ```text
//! operands --> link --> result
//! ```
//!
//! `link` is a tensor of a few numbers, whose backward pass computes the gradients of the operands. In a backward pass,
//! a user of the result puts the gradient of the result into a mailbox, and the gradient that it returns for `link` is
//! the number of the message. Each user has an entry of `link`, so that Candle's sum of their gradients contains the
//! numbers of all their messages. The result itself has the first entry, for the gradients that come from Candle's
//! operations.
//!
//! # On a GPU: a placeholder
//!
//! ```text
//! operands --> result
//!         \
//!          --> placeholder
//! ```
//!
//! The host would have to wait for the number of a message. So the link is a tensor of the result's shape, which has no
//! numbers and the same backward pass. Candle adds the gradients that users return for it, once and not for each view.
//! If Candle's operations use the result as well, the backward pass runs twice, and the gradients of the operands are
//! added.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{Result, Shape, Tensor, TensorId};

use super::mailbox::{Mailbox, NOTHING, no_gradient};

/// The number of entries of a link: one for the result itself, and one for each operation of this crate that uses the
/// result. Operations past that number have the result as their operand, as Candle's operations do.
pub(super) const ENTRIES: usize = 8;

/// The number of elements from which a result has a link. For a smaller result, the sums of its gradients take less
/// time than another node.
pub(super) const MIN_ELEMENTS: usize = 1 << 14;

/// The link of a result on the CPU: a node of Candle's graph that operations of this crate have as an operand instead
/// of the result.
pub(super) struct MessageLink {
    /// The tensor of the node, ([`ENTRIES`],). Its gradients are the numbers of messages.
    pub numbers: Tensor,
    mailbox: Mailbox<Tensor>,
    /// The number of entries that have a user.
    taken: AtomicUsize,
}

impl MessageLink {
    /// Creates the link of a result that has the first entry.
    pub fn new(numbers: Tensor, mailbox: Mailbox<Tensor>) -> Self {
        Self { numbers, mailbox, taken: AtomicUsize::new(1) }
    }

    /// Puts a gradient of the result into the mailbox, and returns the gradient of the link.
    pub fn send(&self, entry: usize, gradient: &Tensor) -> Result<Tensor> {
        let mut numbers = [NOTHING; ENTRIES];
        numbers[entry] = self.mailbox.put(gradient.detach());
        Tensor::new(&numbers, self.numbers.device())
    }
}

/// Takes the gradients of a result from a mailbox, and returns their sum. `numbers` is the gradient of the link.
pub(super) fn receive(name: &str, mailbox: &Mailbox<Tensor>, numbers: &Tensor) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for number in numbers.to_vec1::<f32>()?.into_iter().filter(|&number| number != NOTHING) {
        let gradient = mailbox.take(number).ok_or_else(|| no_gradient(name))?;
        sum = Some(match sum {
            Some(sum) => (sum + gradient)?,
            None => gradient,
        });
    }
    sum.ok_or_else(|| no_gradient(name))
}

/// How a view was made of another tensor.
#[derive(Clone)]
pub(super) enum ViewKind {
    Reshaped { from: Shape },
    Transposed { dims: [usize; 2] },
}

impl ViewKind {
    /// Returns the gradient of the tensor of which the view was made, from the gradient of the view.
    fn undo(&self, gradient: &Tensor) -> Result<Tensor> {
        match self {
            Self::Reshaped { from } => gradient.reshape(from),
            &Self::Transposed { dims: [first, second] } => gradient.transpose(first, second),
        }
    }
}

/// The link of a result. The result's node owns it.
#[derive(Clone)]
enum Link {
    Messages(Weak<MessageLink>),
    /// A tensor of the result's shape and dtype, whose storage has no numbers for it.
    Placeholder(Weak<Tensor>),
}

impl Link {
    fn is_alive(&self) -> bool {
        match self {
            Self::Messages(link) => link.strong_count() > 0,
            Self::Placeholder(tensor) => tensor.strong_count() > 0,
        }
    }
}

/// The link of a tensor that is a result or a view of it.
#[derive(Clone)]
struct Linked {
    link: Link,
    /// The views that lead from the result to the tensor.
    views: Vec<ViewKind>,
}

/// The tensors that have a link.
#[derive(Default)]
struct LinkedTensors {
    by_id: HashMap<TensorId, Linked>,
    /// The number of tensors at which those without a link any more are removed.
    most: usize,
}

static LINKED: LazyLock<Mutex<LinkedTensors>> = LazyLock::new(Mutex::default);

fn linked() -> MutexGuard<'static, LinkedTensors> {
    LINKED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkedTensors {
    fn insert(&mut self, tensor: &Tensor, linked: Linked) {
        const FEWEST: usize = 1 << 10;
        if self.by_id.len() >= self.most.max(FEWEST) {
            self.by_id.retain(|_, old| old.link.is_alive());
            self.most = 2 * self.by_id.len();
        }
        self.by_id.insert(tensor.id(), linked);
    }
}

/// Sets the link of a result to one that takes messages.
pub(super) fn set_messages(result: &Tensor, link: &Arc<MessageLink>) {
    linked().insert(result, Linked { link: Link::Messages(Arc::downgrade(link)), views: Vec::new() });
}

/// Sets the link of a result to a placeholder.
pub(super) fn set_placeholder(result: &Tensor, placeholder: &Arc<Tensor>) {
    linked().insert(result, Linked { link: Link::Placeholder(Arc::downgrade(placeholder)), views: Vec::new() });
}

/// Returns `xs.reshape(shape)`, whose gradient goes where the gradient of `xs` goes.
///
/// # Errors
/// As [`Tensor::reshape`].
pub fn reshape_linked(xs: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let view = xs.reshape(shape.into())?;
    set_view(xs, &view, ViewKind::Reshaped { from: xs.shape().clone() });
    Ok(view)
}

/// Returns `xs.transpose(first, second)`, whose gradient goes where the gradient of `xs` goes.
///
/// # Errors
/// As [`Tensor::transpose`].
pub fn transpose_linked(xs: &Tensor, first: usize, second: usize) -> Result<Tensor> {
    let view = xs.transpose(first, second)?;
    set_view(xs, &view, ViewKind::Transposed { dims: [first, second] });
    Ok(view)
}

fn set_view(xs: &Tensor, view: &Tensor, made_by: ViewKind) {
    if !xs.track_op() || xs.id() == view.id() {
        return;
    }
    let mut all = linked();
    if let Some(mut linked) = all.by_id.get(&xs.id()).cloned() {
        linked.views.push(made_by);
        all.insert(view, linked);
    }
}

/// Returns whether a tensor is a result with a link, or a view of one: its gradient is sent to the result, and no sum
/// is computed for each view.
pub fn is_linked(xs: &Tensor) -> bool {
    linked().by_id.get(&xs.id()).is_some_and(|linked| linked.link.is_alive())
}

/// The receiver of an operand's gradient in a backward pass.
pub(super) enum Destination {
    /// To Candle, which adds it to the operand's.
    Candle,
    /// To the link of the result from which these views lead to the operand.
    Link { receiver: Receiver, views: Vec<ViewKind> },
}

/// The part of a link that takes the gradients of one user.
pub(super) enum Receiver {
    /// An entry of a link of messages.
    Entry {
        link: Arc<MessageLink>,
        entry: usize,
    },
    Placeholder(Arc<Tensor>),
}

impl Destination {
    /// Chooses where to send the gradient of an operand.
    pub fn of(operand: &Tensor) -> Self {
        let Some(Linked { link, views }) = linked().by_id.get(&operand.id()).cloned() else { return Self::Candle };
        let receiver = match link {
            Link::Placeholder(tensor) => tensor.upgrade().map(Receiver::Placeholder),
            Link::Messages(link) => link.upgrade().and_then(Receiver::next_entry),
        };
        receiver.map_or(Self::Candle, |receiver| Self::Link { receiver, views })
    }

    /// Returns the tensor that takes the place of the operand in Candle's graph.
    pub fn node(&self, operand: &Tensor) -> Tensor {
        match self {
            Self::Candle => operand.clone(),
            Self::Link { receiver: Receiver::Placeholder(tensor), .. } => Tensor::clone(tensor),
            Self::Link { receiver: Receiver::Entry { link, .. }, .. } => link.numbers.clone(),
        }
    }

    /// Sends a gradient of the operand, and returns the gradient of the tensor that takes its place.
    pub fn send(&self, gradient: Tensor) -> Result<Tensor> {
        let Self::Link { receiver, views } = self else { return Ok(gradient) };
        let mut of_result = gradient.detach();
        for view in views.iter().rev() {
            of_result = view.undo(&of_result)?;
        }
        match receiver {
            Receiver::Placeholder(_) => Ok(of_result),
            Receiver::Entry { link, entry } => link.send(*entry, &of_result),
        }
    }
}

impl Receiver {
    /// Takes an entry of a link of messages, if one is left.
    fn next_entry(link: Arc<MessageLink>) -> Option<Self> {
        let entry = link.taken.fetch_add(1, Ordering::Relaxed);
        (entry < ENTRIES).then_some(Self::Entry { link, entry })
    }
}

#[cfg(test)]
mod tests;
