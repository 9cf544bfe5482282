//! The keys that the indexer of one layer chooses for another.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::Tensor;

use crate::mask::KeyLists;

/// The keys that a layer's indexer chose for the queries of a call, for later layers of the same tokens
/// ([`AttentionInput::with_chosen_keys`](crate::AttentionInput::with_chosen_keys)).
#[derive(Debug, Clone, Default)]
pub struct ChosenKeys {
    /// The lists of the queries; `None` if they attend to all keys that the mask allows.
    pub(in crate::layer) lists: Option<KeyLists>,
}

/// The output of a layer, and the keys that its queries attended to.
#[derive(Debug, Clone)]
pub struct OutputWithChoice {
    /// The output, (B, T, E), or (T, E) for an input (T, E).
    pub output: Tensor,
    /// The keys that the indexer of the layer chose, or those that the call was given.
    pub chosen: ChosenKeys,
}

/// A record of the keys that the indexer of a call chooses.
#[derive(Debug, Clone, Default)]
pub(in crate::layer) struct ChoiceRecord(Rc<RefCell<ChosenKeys>>);

impl ChoiceRecord {
    /// Replaces the recorded keys.
    pub fn set(&self, lists: Option<&KeyLists>) {
        self.0.replace(ChosenKeys { lists: lists.cloned() });
    }

    /// Returns the recorded keys.
    pub fn get(&self) -> ChosenKeys {
        self.0.borrow().clone()
    }
}
