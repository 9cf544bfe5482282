//! Tensors of a checkpoint that contain several projections.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::parameters::{Parameter, Piece, PieceStorage, Reordering};
use super::query_heads::QueryHeadOrder;
use super::reader::ParameterReader;
use super::shard::{HeadShard, Heads, Share};
use super::spec::ParameterSpec;

/// The rows of one projection in a [`FusedTensor`].
#[derive(Debug, Clone, Copy)]
pub struct FusedRows {
    /// The number of rows of all ranks.
    pub count: usize,
    /// The heads that divide the rows among ranks; `None` where each rank has all rows.
    pub heads: Option<Heads>,
}

/// The dimensions of a weight or a bias of projections in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredDims {
    /// A weight (out, in), or a bias (out,).
    OutIn,
    /// A weight (in, out), or a bias (out,).
    InOut,
    /// A weight (in, H, D), or a bias (H, D).
    InHeads,
    /// A weight (H, D, out), or a bias (out,).
    HeadsOut,
}

/// A tensor of a checkpoint that contains the rows of one or more projections, one projection after the other or in
/// several groups with rows of each.
#[derive(Debug, Clone)]
pub struct FusedTensor {
    /// The tensor. It has a share where heads do not divide its rows, as in an output projection: the columns of its
    /// weight belong to heads, and its bias to a sum.
    pub spec: ParameterSpec,
    /// The dimensions of the tensor. Rows are outputs.
    pub dims: StoredDims,
    /// The number of groups.
    pub groups: usize,
    /// The rows of each projection.
    pub parts: Vec<FusedRows>,
    /// The order of the query heads.
    pub query_heads: QueryHeadOrder,
}

impl FusedTensor {
    /// Returns this rank's rows of each projection, (rows, ..); nothing for a tensor that the config does not ask for.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for one that the config does not ask for.
    pub fn read(&self, reader: &ParameterReader) -> Result<Vec<Parameter>> {
        if self.spec.refused.is_some() {
            reader.read_requested(&self.spec)?;
            return Ok(Vec::new());
        }
        if let Some(parameters) = self.read_codes(reader)? {
            return Ok(parameters);
        }
        let is_grouped = self.query_heads == QueryHeadOrder::Grouped;
        if let Some(Share::Heads { heads, .. }) = self.spec.share
            && !is_grouped
        {
            return Ok(vec![self.read_reordered_columns(heads, reader)?]);
        }
        let tensor = self.rows_of(reader.read(&self.spec)?)?;
        let parameters = self.split_rows(&tensor).into_iter().zip(&self.parts);
        parameters.map(|(parameter, part)| parameter.narrow(own_rows(part, reader))).collect()
    }

    /// Returns this rank's rows of each projection in a quantised weight; `None` where the builder has floats, and
    /// where heads have another order than in this crate.
    fn read_codes(&self, reader: &ParameterReader) -> Result<Option<Vec<Parameter>>> {
        let &[first, second] = self.spec.shape.as_slice() else { return Ok(None) };
        // The weight of a quantised layer is (out, in), also of a layer whose plain weight is (in, out).
        let is_transposed = match self.dims {
            StoredDims::OutIn => false,
            StoredDims::InOut => true,
            StoredDims::InHeads | StoredDims::HeadsOut => return Ok(None),
        };
        if self.query_heads != QueryHeadOrder::Grouped {
            return Ok(None);
        }
        let mut spec = self.spec.clone();
        if is_transposed {
            spec.shape = vec![second, first];
            if let Some(Share::Heads { heads, dim }) = spec.share {
                spec.share = Some(Share::Heads { heads, dim: 1 - dim });
            }
        }
        let Some(weight) = reader.read_codes(&spec)? else { return Ok(None) };
        let shared = Arc::new(weight);
        let mut parameters = Vec::new();
        let mut start = 0;
        for part in &self.parts {
            let range = start / self.groups..(start + part.count) / self.groups;
            let vb = &reader.vb;
            let rows = Parameter::of_quantized(shared.clone(), self.groups, range, vb.device(), vb.dtype())?;
            parameters.push(rows.narrow(own_rows(part, reader))?);
            start += part.count;
        }
        Ok(Some(parameters))
    }

    /// Splits a tensor that has the same rows as this one, (rows, ..), into the rows of each projection.
    #[must_use]
    pub fn split_rows(&self, tensor: &Tensor) -> Vec<Parameter> {
        let is_grouped = self.query_heads == QueryHeadOrder::Grouped;
        let mut parameters = Vec::new();
        let mut start = 0;
        for part in &self.parts {
            let range = start / self.groups..(start + part.count) / self.groups;
            let reordered = (part.heads == Some(Heads::Query) && !is_grouped)
                .then_some(Reordering { order: self.query_heads, dim: 0 });
            let stored = PieceStorage::Tensor(tensor.clone());
            let piece = Piece { stored, groups: self.groups, range, reordered, dtype: tensor.dtype() };
            parameters.push(Parameter::from(piece));
            start += part.count;
        }
        parameters
    }

    /// Returns a matrix (.., in) that is multiplied by the inputs of this tensor, with its columns in this crate's
    /// order of heads.
    #[must_use]
    pub fn order_columns(&self, matrix: &Tensor) -> Parameter {
        let is_of_heads = matches!(self.spec.share, Some(Share::Heads { .. }));
        let reordered = (is_of_heads && self.query_heads != QueryHeadOrder::Grouped)
            .then_some(Reordering { order: self.query_heads, dim: 1 });
        Parameter::from(Piece {
            range: 0..matrix.dims()[0],
            groups: 1,
            stored: PieceStorage::Tensor(matrix.clone()),
            reordered,
            dtype: matrix.dtype(),
        })
    }

    /// Returns all rows of this rank's columns, where columns belong to heads in another order.
    fn read_reordered_columns(&self, heads: Heads, reader: &ParameterReader) -> Result<Parameter> {
        let whole = self.rows_of(reader.read(&ParameterSpec { share: None, ..self.spec.clone() })?)?;
        let columns = whole.dim(1)?;
        let parameter = self.reordered_columns(whole)?;
        if reader.shard == HeadShard::WHOLE {
            return Ok(parameter);
        }
        let own = reader.own_range(heads, columns);
        Ok(parameter.tensor()?.narrow(1, own.start, own.len())?.force_contiguous()?.into())
    }

    /// Returns a weight (rows, columns) with its columns in this crate's order of heads.
    fn reordered_columns(&self, weight: Tensor) -> Result<Parameter> {
        let rows = weight.dim(0)?;
        let reordered = Some(Reordering { order: self.query_heads, dim: 1 });
        let dtype = weight.dtype();
        Ok(Parameter::from(Piece { stored: PieceStorage::Tensor(weight), groups: 1, range: 0..rows, reordered, dtype }))
    }

    /// Returns the rows of each projection, in a dtype, of other values of the whole tensor, as stored. A variable is
    /// read whenever a row is read.
    ///
    /// # Errors
    /// If a tensor that is not tracked for gradients cannot be converted.
    pub fn rows_of_values(&self, stored: Tensor, dtype: DType) -> Result<Vec<Parameter>> {
        let rows = self.rows_of(stored)?;
        let all = match self.spec.share {
            Some(Share::Heads { .. }) if self.query_heads != QueryHeadOrder::Grouped && rows.rank() == 2 => {
                vec![self.reordered_columns(rows)?]
            }
            _ => self.split_rows(&rows),
        };
        all.into_iter().map(|parameter| parameter.in_dtype(dtype)).collect()
    }

    /// Returns a stored tensor as (rows, ..).
    fn rows_of(&self, stored: Tensor) -> Result<Tensor> {
        match (self.dims, stored.rank()) {
            (StoredDims::OutIn, _) | (_, 1) => Ok(stored),
            (StoredDims::InOut, _) => stored.t(),
            // A bias.
            (StoredDims::InHeads, 2) => stored.flatten_all(),
            (StoredDims::InHeads, _) => stored.flatten_from(1)?.t(),
            (StoredDims::HeadsOut, _) => stored.flatten_to(1)?.t(),
        }
    }

    /// Returns the tensor as stored, made of the rows of each projection: the inverse of [`read`](Self::read).
    ///
    /// # Errors
    /// For another number of rows than the tensor has.
    pub fn join(&self, parts: &[Tensor]) -> Result<Tensor> {
        let mut grouped = Vec::new();
        for (part, rows) in parts.iter().zip(&self.parts) {
            let part = match (rows.heads, self.spec.share) {
                (Some(Heads::Query), _) => self.query_heads.reorder_from_grouped(part, 0)?,
                (_, Some(Share::Heads { heads: Heads::Query, .. })) => {
                    self.query_heads.reorder_from_grouped(part, 1)?
                }
                _ => part.clone(),
            };
            let count = part.dims()[0];
            let columns = &part.dims()[1..];
            grouped.push(part.reshape([&[self.groups, count / self.groups], columns].concat())?);
        }
        let joined = Tensor::cat(&grouped, 1)?.flatten(0, 1)?;
        let is_transposed = self.dims != StoredDims::OutIn && joined.rank() == 2;
        let stored = if is_transposed { joined.t()?.contiguous()? } else { joined.contiguous()? };
        match self.dims {
            StoredDims::OutIn | StoredDims::InOut => Ok(stored),
            StoredDims::InHeads | StoredDims::HeadsOut => stored.reshape(self.spec.shape.as_slice()),
        }
    }
}

/// Returns this rank's rows of a projection.
fn own_rows(part: &FusedRows, reader: &ParameterReader) -> Range<usize> {
    match part.heads {
        Some(heads) => reader.own_range(heads, part.count),
        None => 0..part.count,
    }
}
