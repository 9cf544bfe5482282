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
    /// The lists of the queries of each sequence, likewise, if their keys are in pages.
    pub(in crate::layer) of_sequences: Option<Vec<Option<KeyLists>>>,
}

impl ChosenKeys {
    /// Returns the most keys of a list; `None` if there are no lists.
    pub(in crate::layer) fn most_keys(&self) -> Option<usize> {
        match &self.of_sequences {
            Some(all) => all.iter().map(|lists| lists.as_ref().map(KeyLists::most_entries)).max().flatten(),
            None => self.lists.as_ref().map(KeyLists::most_entries),
        }
    }
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
        self.0.replace(ChosenKeys { lists: lists.cloned(), of_sequences: None });
    }

    /// Replaces the recorded keys of a sequence in pages.
    pub fn set_of_sequence(&self, sequence: usize, lists: Option<&KeyLists>) {
        if let Some(all) = &mut self.0.borrow_mut().of_sequences {
            all[sequence] = lists.cloned();
        }
    }

    /// Records that no sequence in pages has lists yet.
    pub fn begin_sequences(&self, count: usize) {
        self.0.replace(ChosenKeys { lists: None, of_sequences: Some(vec![None; count]) });
    }

    /// Returns the recorded keys.
    pub fn get(&self) -> ChosenKeys {
        self.0.borrow().clone()
    }
}
