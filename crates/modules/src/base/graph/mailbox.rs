//! Messages between the nodes of one operation in a backward pass.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Error;

/// The number of no message.
pub const NOTHING: f64 = 0.0;

/// The number of the next message of any mailbox. It starts at 1, since [`NOTHING`] is 0, and f64 represents the first
/// 2^53 numbers exactly.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Returns the error of a backward pass that reaches a join without the number of a message.
pub fn no_gradient(name: &str) -> Error {
    Error::msg(format!("[{name}] the backward pass has no gradient of the result"))
}

/// Messages by number. A clone is another handle to the same mailbox.
pub struct Mailbox<T> {
    messages: Arc<Mutex<HashMap<u64, T>>>,
}

impl<T> Mailbox<T> {
    /// Stores a message and returns its number, which no other message has.
    pub fn put(&self, message: T) -> f64 {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).insert(number, message);
        number as f64
    }

    /// Removes the message of a number and returns it; `None` if there is no such message.
    pub fn take(&self, number: f64) -> Option<T> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).remove(&(number as u64))
    }
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone() }
    }
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { messages: Arc::default() }
    }
}
