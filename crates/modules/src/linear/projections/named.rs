//! Low-rank updates by name, of which each sequence of a batch chooses one.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::lora::{LoraMatrices, LoraUpdate};
use super::modules::Projection;

/// The low-rank updates of one name.
#[derive(Debug, Clone)]
struct NamedUpdate {
    name: String,
    updates: Vec<LoraUpdate>,
}

/// Low-rank updates by name.
#[derive(Debug, Clone, Default)]
pub struct NamedUpdates(Vec<NamedUpdate>);

/// The rows of an input that have the update of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdatedRows {
    /// The index of the name.
    named: usize,
    /// The rows among all of the input, in increasing order.
    rows: Vec<u32>,
}

/// The facts of a call on which low-rank updates depend.
#[derive(Debug, Clone, Copy, Default)]
pub struct UpdatesOfCall<'a> {
    /// Whether it is a call of training, in which updates drop entries of their inputs.
    pub train: bool,
    /// The rows of the queries' input that have the update of a name.
    pub queries: &'a [UpdatedRows],
    /// The rows of the input of keys and values that have the update of a name.
    pub keys: &'a [UpdatedRows],
}

impl UpdatesOfCall<'_> {
    /// Returns the facts of a call whose sequences choose no updates.
    pub fn without_names(train: bool) -> Self {
        Self { train, ..Self::default() }
    }
}

impl NamedUpdates {
    /// Returns whether there is no name.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|named| named.name.as_str())
    }

    /// Adds a name with the updates that it has, which are none where an adapter changes nothing.
    ///
    /// # Errors
    /// In the name of the operation `op`, if the name is there already, and if a packed matrix cannot be allocated.
    pub fn add(&mut self, op: &str, name: &str, updates: &[LoraMatrices]) -> Result<()> {
        if self.names().any(|own| own == name) {
            bail!("[{op}] there are two adapters with the name {name:?}, expected different names")
        }
        let updates = updates.iter().map(LoraUpdate::new).collect::<Result<_>>()?;
        self.0.push(NamedUpdate { name: name.to_string(), updates });
        Ok(())
    }

    /// Returns a copy with the current values of variables, packed.
    ///
    /// # Errors
    /// If a packed matrix cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        let mut all = Vec::with_capacity(self.0.len());
        for NamedUpdate { name, updates } in &self.0 {
            let updates = updates.iter().map(LoraUpdate::freeze).collect::<Result<_>>()?;
            all.push(NamedUpdate { name: name.clone(), updates });
        }
        Ok(Self(all))
    }

    /// Returns the rows of each name that is chosen: sequence s has the rows `rows(s)` and the name `chosen[s]`, or no
    /// update.
    ///
    /// # Errors
    /// In the name of the operation `op`, for a name that is not there.
    pub fn rows(
        &self,
        op: &str,
        chosen: &[Option<&str>],
        rows: impl Fn(usize) -> Range<usize>,
    ) -> Result<Vec<UpdatedRows>> {
        let mut all: Vec<UpdatedRows> = Vec::new();
        for (sequence, name) in chosen.iter().enumerate() {
            let Some(name) = name else { continue };
            let Some(named) = self.names().position(|own| own == *name) else {
                let names: Vec<_> = self.names().collect();
                bail!("[{op}] sequence {sequence} has the adapter {name:?}, expected one of {names:?}")
            };
            let own = rows(sequence).map(|row| row as u32);
            match all.iter_mut().find(|group| group.named == named) {
                Some(group) => group.rows.extend(own),
                None => all.push(UpdatedRows { named, rows: own.collect() }),
            }
        }
        Ok(all)
    }

    /// Adds the chosen updates to the outputs (B, T, out) of projections of `xs` (B, T, in).
    pub fn add_to(
        &self,
        kinds: &[Projection],
        outputs: &mut [Tensor],
        xs: &Tensor,
        chosen: &[UpdatedRows],
        train: bool,
    ) -> Result<()> {
        for UpdatedRows { named, rows } in chosen {
            for update in &self.0[*named].updates {
                update.add_to_rows(kinds, outputs, xs, rows, train)?;
            }
        }
        Ok(())
    }
}
