//! The parameters of a layer, listed once: loading, freezing, saving and tensor parallelism go by this list.

use candle_core::{Error, Result, Tensor, bail};

use super::low_rank::LowRankUpdate;
use super::parameters::Parameter;
use super::reader::ParameterReader;
use super::shard::Share;
use super::spec::ParameterSpec;

/// Reads a parameter; `None` for one that the config does not ask for.
fn load(spec: &ParameterSpec, reader: &ParameterReader) -> Result<Option<ListedParameter>> {
    let entry = |parameter: Parameter, stored: StoredNames| {
        Some(ListedParameter { name: spec.name.clone(), stored, parameter, updates: Vec::new() })
    };
    let Some((before, after)) = spec.stored.split_once("{}") else {
        let Some(tensor) = reader.read_requested(spec)? else { return Ok(None) };
        return Ok(entry(tensor.into(), StoredNames::Whole(spec.stored.clone())));
    };
    // The entries of the first dimension are separate tensors.
    let name = |row: usize| format!("{before}{row}{after}");
    let count = spec.shape[0];
    if let Some(why) = spec.refused {
        reader.refuse((0..count).map(name), why)?;
        return Ok(None);
    }
    let own = match spec.share {
        Some(Share::Heads { heads, dim: 0 }) => reader.own_range(heads, count),
        _ => 0..count,
    };
    let names: Vec<_> = own.map(name).collect();
    let mut rows = Vec::new();
    for stored in &names {
        rows.push(Parameter::from(reader.get(&spec.shape[1..], stored, spec.init)?.unsqueeze(0)?));
    }
    let parameter: Parameter = rows.into_iter().collect();
    let parameter = if parameter.is_tracked() { parameter } else { parameter.tensor()?.into() };
    Ok(entry(parameter, StoredNames::EachRow(names)))
}

/// Parameters by name, in the order in which they were listed.
#[derive(Debug, Clone, Default)]
pub struct ParameterList(Vec<ListedParameter>);

/// A parameter in a list.
#[derive(Debug, Clone)]
struct ListedParameter {
    name: String,
    stored: StoredNames,
    parameter: Parameter,
    /// Low-rank updates of a weight, in the order in which they were added.
    updates: Vec<LowRankUpdate>,
}

/// The names of a parameter in the file that it was read from.
#[derive(Debug, Clone)]
enum StoredNames {
    /// The name of one tensor.
    Whole(String),
    /// The names of a tensor for each entry of the first dimension.
    EachRow(Vec<String>),
}

/// A tensor of a file: a listed parameter, or an entry of its first dimension.
#[derive(Debug, Clone)]
pub struct StoredParameter {
    /// This crate's name of the parameter.
    pub name: String,
    /// The entry of the first dimension, where each is a tensor of the file.
    pub row: Option<usize>,
    /// The name in the file.
    pub stored: String,
    /// The current values, without low-rank updates.
    pub tensor: Tensor,
}

impl ParameterList {
    /// Reads each parameter that the config asks for, or this rank's shard of it.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for one that the config does not ask for.
    pub fn load(specs: &[ParameterSpec], reader: &ParameterReader) -> Result<Self> {
        let mut entries = Vec::new();
        for spec in specs {
            entries.extend(load(spec, reader)?);
        }
        Ok(Self(entries))
    }

    fn entry(&self, name: &str) -> Option<&ListedParameter> {
        self.0.iter().find(|entry| entry.name == name)
    }

    /// Returns the parameter of this name, if the layer has one.
    pub fn get(&self, name: &str) -> Option<&Parameter> {
        self.entry(name).map(|entry| &entry.parameter)
    }

    /// Returns the current values of the parameter of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        self.get(name).map(Parameter::tensor).transpose()
    }

    /// Returns the current values of a parameter that was listed.
    ///
    /// # Errors
    /// If it was not listed.
    pub fn expect(&self, name: &str) -> Result<Tensor> {
        let missing = || Error::msg(format!("[parameters] {name} is not among those that were listed"));
        self.tensor(name)?.ok_or_else(missing)
    }

    /// Adds the low-rank updates of a weight to the product of `xs` (N, in) with it, (N, out). Entries of `xs` are
    /// dropped if it is a call of training.
    pub fn add_updates(&self, weight: &str, product: Tensor, xs: &Tensor, train: bool) -> Result<Tensor> {
        let mut updated = product;
        for update in self.entry(weight).iter().flat_map(|entry| &entry.updates) {
            updated = update.add_to(&updated, xs, train)?;
        }
        Ok(updated)
    }

    /// Returns whether the product with one of the weights is a random number in training.
    pub fn has_dropout(&self) -> bool {
        self.0.iter().flat_map(|entry| &entry.updates).any(|update| update.dropout > 0.0)
    }

    /// Adds a low-rank update to a weight that was listed.
    ///
    /// # Errors
    /// If it was not listed.
    pub fn with_update(mut self, weight: &str, update: LowRankUpdate) -> Result<Self> {
        let Some(entry) = self.0.iter_mut().find(|entry| entry.name == weight) else {
            bail!("[parameters] {weight} is not among those that were listed")
        };
        entry.updates.push(update);
        Ok(self)
    }

    /// Replaces the values of a parameter that was listed, or of one of its entries. The parameter keeps its dtype; the
    /// new values may be a variable of another dtype.
    ///
    /// # Errors
    /// If values that are not tracked for gradients cannot be converted.
    pub fn replace(&mut self, name: &str, row: Option<usize>, tensor: Tensor) -> Result<()> {
        let Some(entry) = self.0.iter_mut().find(|entry| entry.name == name) else { return Ok(()) };
        let dtype = entry.parameter.dtype();
        entry.parameter = match row {
            None => Parameter::from(tensor).in_dtype(dtype)?,
            Some(row) => {
                let mut rows = entry.parameter.rows()?;
                rows[row] = Parameter::from(tensor.unsqueeze(0)?).in_dtype(dtype)?;
                rows.into_iter().collect()
            }
        };
        Ok(())
    }

    /// Returns a copy with the current values of variables.
    pub fn freeze(&self) -> Result<Self> {
        let mut frozen = Vec::with_capacity(self.0.len());
        for entry in &self.0 {
            let updates = entry.updates.iter().map(LowRankUpdate::freeze).collect::<Result<_>>()?;
            frozen.push(ListedParameter { parameter: entry.parameter.freeze()?, updates, ..entry.clone() });
        }
        Ok(Self(frozen))
    }

    /// Returns a copy with the current values of variables, which has the current values of low-rank updates in its
    /// weights.
    pub fn merge(&self) -> Result<Self> {
        let mut merged = self.freeze()?;
        for entry in &mut merged.0 {
            if entry.updates.is_empty() {
                continue;
            }
            let mut weight = entry.parameter.tensor()?;
            for update in std::mem::take(&mut entry.updates) {
                weight = update.merged_into(&weight)?;
            }
            entry.parameter = weight.into();
        }
        Ok(merged)
    }

    /// Returns the current values of all parameters, by name.
    pub fn named(&self) -> Result<Vec<(String, Tensor)>> {
        self.0.iter().map(|entry| Ok((entry.name.clone(), entry.parameter.tensor()?))).collect()
    }

    /// Returns the tensors of the file that the parameters were read from, with their current values.
    pub fn stored(&self) -> Result<Vec<StoredParameter>> {
        let mut all = Vec::new();
        for ListedParameter { name, stored, parameter, .. } in &self.0 {
            let values = parameter.tensor()?;
            let mut add = |row, in_file: &str, tensor| {
                all.push(StoredParameter { name: name.clone(), row, stored: in_file.to_string(), tensor });
            };
            match stored {
                StoredNames::Whole(whole) => add(None, whole, values),
                StoredNames::EachRow(rows) => {
                    for (row, of_row) in rows.iter().enumerate() {
                        add(Some(row), of_row, values.get(row)?);
                    }
                }
            }
        }
        Ok(all)
    }

    /// Returns the name in the file of a parameter, if the layer has it as one tensor.
    pub fn stored_name(&self, name: &str) -> Option<&str> {
        match &self.entry(name)?.stored {
            StoredNames::Whole(stored) => Some(stored),
            StoredNames::EachRow(_) => None,
        }
    }
}
