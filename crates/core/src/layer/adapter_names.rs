//! Adapters by name, of which each sequence of a call chooses one.

use candle_core::{Result, bail};

use super::input::AttentionInput;
use super::{MultiHeadAttention, OP};
use crate::params::{AdaptableModule, AdapterMatrices, WeightLayout, module_weights};
use candle_attention_modules::base::check_entries;
use candle_attention_modules::linear::{UpdatedRows, UpdatesOfCall};

/// The rows of a call that have an adapter by name.
#[derive(Default)]
pub(super) struct ChosenAdapters {
    /// The rows of the queries (B·T_q).
    pub queries: Vec<UpdatedRows>,
    /// The rows of the inputs of keys and values (B·T_kv).
    keys: Vec<UpdatedRows>,
}

impl ChosenAdapters {
    /// Returns the facts of the call on which low-rank updates depend.
    pub fn updates(&self, train: bool) -> UpdatesOfCall<'_> {
        UpdatesOfCall { train, queries: &self.queries, keys: &self.keys }
    }
}

impl MultiHeadAttention {
    /// Adds an adapter by name to modules of a layout: `read` returns the matrices of a module, if the adapter has
    /// some. Calls choose it with [`AttentionInput::with_adapters`].
    ///
    /// # Errors
    /// As [`adaptable_modules`](Self::adaptable_modules), for a name that the layer has already, for a layer with
    /// content-based positions or merged weights, and the errors of `read`.
    #[doc(hidden)]
    pub fn with_named_adapter(
        &self,
        name: &str,
        layout: WeightLayout,
        mut read: impl FnMut(&AdaptableModule) -> Result<Option<AdapterMatrices>>,
    ) -> Result<Self> {
        if self.config.content_positions().is_some() {
            bail!(
                "[{OP}] the layer has content-based positions, which all sequences share, expected a layer without them \
                 for adapters by name"
            )
        }
        let mut layer = self.unmerge_adapter()?;
        let mut updates = Vec::new();
        for weight in module_weights(OP, &self.config, layout)? {
            if let Some(matrices) = read(&weight.module)? {
                updates.push(weight.split(&matrices));
            }
        }
        let mut named = layer.projections.named_updates().clone();
        named.add(OP, name, &updates)?;
        layer.start_adapter();
        layer.projections = layer.projections.with_named_updates(named);
        Ok(layer)
    }

    /// Returns the names of the adapters that sequences choose with [`AttentionInput::with_adapters`].
    #[doc(alias = "lora")]
    pub fn adapter_names(&self) -> Vec<&str> {
        self.projections.named_updates().names().collect()
    }

    /// Returns the rows of a call that have an adapter by name, for queries (b, t_q, ..) and keys (b, t_kv, ..).
    ///
    /// # Errors
    /// For another number of names than of sequences, for a name that the layer does not have, and for a memory.
    pub(super) fn chosen_adapters(
        &self,
        input: &AttentionInput,
        b: usize,
        t_q: usize,
        t_kv: usize,
    ) -> Result<ChosenAdapters> {
        let Some(chosen) = input.adapters else { return Ok(ChosenAdapters::default()) };
        let sequences = input.packed_queries();
        check_entries(OP, "adapters", chosen.len(), sequences.map_or(b, |packed| packed.len()), "sequences")?;
        if input.memory.is_some() && chosen.iter().any(Option::is_some) {
            bail!("[{OP}] adapters were given with a memory, which has its keys already, expected `with_key_value`")
        }
        let named = self.projections.named_updates();
        let queries = named.rows(OP, chosen, |s| match sequences {
            Some(packed) => packed.queries(s),
            None => s * t_q..(s + 1) * t_q,
        })?;
        let keys = match (input.packed, input.is_cross()) {
            (Some(packed), true) => named.rows(OP, chosen, |s| packed.keys(s))?,
            (None, true) => named.rows(OP, chosen, |s| s * t_kv..(s + 1) * t_kv)?,
            (_, false) => queries.clone(),
        };
        Ok(ChosenAdapters { queries, keys })
    }
}
