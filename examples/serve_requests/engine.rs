//! A model with a pool of pages for each layer.

use candle_attention::{KvCodeFormat, KvPoolConfig, PageTable};
use candle_core::{D, DType, Result, Tensor, bail};

use crate::common::EXAMPLE;
use crate::model::CausalLm;
use crate::model::attention::Pool;
use crate::scheduler::StepInput;

/// A model and its pools.
pub struct Engine<'m> {
    model: &'m CausalLm,
    pools: Vec<Pool>,
}

impl<'m> Engine<'m> {
    /// Allocates the pools of a table. `kv_cache` names the type of stored keys and values, that of the activations if
    /// it is not given.
    ///
    /// # Errors
    /// If a layer cannot use pages, and if a pool does not fit in memory.
    pub fn new(model: &'m CausalLm, table: &PageTable, kv_cache: Option<&str>) -> Result<Self> {
        let config = |own: KvPoolConfig| match kv_cache {
            None => own.with_dtype(model.dtype()),
            Some(name) => match name.parse::<DType>() {
                Ok(dtype) => own.with_dtype(dtype),
                // The other names are of codes.
                Err(_) => own.with_codes(KvCodeFormat::of_name(name)),
            },
        };
        Ok(Self { model, pools: model.pools(table, config)? })
    }

    /// Returns the size of all pools in bytes.
    pub fn memory(&self) -> usize {
        self.pools.iter().map(Pool::memory).sum()
    }

    /// Checks that a request of token ids, with `max_tokens` to generate, is possible for the model.
    pub fn check(&self, ids: &[u32], max_tokens: usize) -> Result<()> {
        let vocab_size = self.model.vocab_size();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
            bail!("[{EXAMPLE}] token {id} is not one of the vocabulary of {vocab_size}")
        }
        let positions = ids.len().saturating_add(max_tokens) - 1; // the last token gets none
        if let Some(most) = self.model.max_positions()?.filter(|&most| positions > most) {
            bail!("[{EXAMPLE}] the request has {positions} positions, expected at most the model's {most}")
        }
        if self.model.frequencies_differ(1, positions) {
            bail!(
                "[{EXAMPLE}] the request has {positions} positions, for which the rotary frequencies would change, \
                 expected positions within the original context"
            )
        }
        Ok(())
    }

    /// Stores the keys and values of the tokens of a step, and returns the most likely token after each of its rows.
    pub fn next_tokens(&self, input: &StepInput) -> Result<Vec<u32>> {
        let hidden = self.model.forward_paged(input.ids, input.tokens, &self.pools)?;
        if input.rows.is_empty() {
            return Ok(Vec::new());
        }
        let rows = Tensor::new(input.rows, self.model.device())?;
        self.model.logits(&hidden.index_select(&rows, 0)?)?.argmax(D::Minus1)?.to_vec1()
    }
}
