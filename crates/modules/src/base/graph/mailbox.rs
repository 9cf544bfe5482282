//! Messages between the nodes of one operation in a backward pass.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::Error;

/// The number of no message.
pub const NOTHING: f32 = 0.0;

/// Returns the error of a backward pass that reaches a join without the number of a message.
pub fn no_gradient(name: &str) -> Error {
    Error::msg(format!("[{name}] the backward pass has no gradient of the result"))
}

/// Messages by number. A clone is another handle to the same mailbox.
pub struct Mailbox<T> {
    messages: Arc<Mutex<Messages<T>>>,
}

struct Messages<T> {
    by_number: HashMap<u32, T>,
    /// The number of the last message. The first one has 1, since [`NOTHING`] is 0. f32 represents the first 2^24
    /// numbers exactly, and a mailbox lives as long as one graph.
    last: u32,
}

impl<T> Mailbox<T> {
    /// Stores a message and returns its number, which no other message of the mailbox has.
    pub fn put(&self, message: T) -> f32 {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.last += 1;
        let number = messages.last;
        messages.by_number.insert(number, message);
        number as f32
    }

    /// Removes the message of a number and returns it; `None` if there is no such message.
    pub fn take(&self, number: f32) -> Option<T> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).by_number.remove(&(number as u32))
    }
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone() }
    }
}

impl<T> Default for Mailbox<T> {
    fn default() -> Self {
        Self { messages: Arc::new(Mutex::new(Messages { by_number: HashMap::new(), last: 0 })) }
    }
}
