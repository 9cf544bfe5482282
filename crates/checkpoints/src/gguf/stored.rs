//! Tensors as a file stores them: the blocks of their type.

use std::ops::Range;

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor};

use candle_attention_modules::ggml::{GgmlNumbers, GgmlType};
use candle_attention_modules::linear::PackedLinear;

/// The blocks of a tensor. Each row, the numbers of its last dimension, consists of whole blocks.
pub(super) struct StoredTensor {
    pub kind: &'static GgmlType,
    pub dims: Vec<usize>,
    pub data: Vec<u8>,
}

impl StoredTensor {
    /// Returns the numbers of a row.
    pub fn columns(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.dims.split_last().map_or(1, |(_, others)| others.iter().product())
    }

    /// Returns the numbers in f32.
    pub fn dequantize(&self, device: &Device) -> Result<Tensor> {
        // Candle dequantises its own types on their device, to the same numbers.
        if self.kind.block > 1
            && let Some(quantized) = self.in_candle(device)?
        {
            return quantized.dequantize(device);
        }
        let numbers = self.kind.read(&self.data, self.rows(), self.columns())?.dequantize()?;
        numbers.reshape(self.dims.as_slice())?.to_device(device)
    }

    /// Returns the blocks as Candle's tensor; `None` for a type that Candle does not have.
    fn in_candle(&self, device: &Device) -> Result<Option<QTensor>> {
        let Some(dtype) = self.kind.in_candle() else { return Ok(None) };
        let storage = QStorage::from_data(self.data.as_slice().into(), device, dtype)?;
        QTensor::new(storage, self.dims.as_slice()).map(Some)
    }

    /// Packs a weight (out, in) with a bias (out,) in f32.
    pub fn pack(self, bias: Option<&Tensor>, device: &Device) -> Result<PackedLinear> {
        if self.kind.block > 1 && PackedLinear::multiplies_blocks_on(device, self.kind.in_candle()) {
            // The codes are put into the order of the kernels here, not copied to the device and back first.
            if let GgmlNumbers::Codes(weight) = self.kind.read(&self.data, self.rows(), self.columns())? {
                return PackedLinear::from_quantized_on(&weight, bias, DType::F32, device);
            }
        }
        if device.is_cpu() && self.kind.has_codes() {
            return PackedLinear::from_blocks(self.kind, &self.data, (self.rows(), self.columns()), bias);
        }
        match self.in_candle(device)? {
            Some(quantized) => {
                drop(self);
                PackedLinear::from_qtensor(quantized, bias)
            }
            None => {
                let numbers = self.kind.read(&self.data, self.rows(), self.columns())?.dequantize()?;
                PackedLinear::new(&numbers.to_device(device)?, bias)
            }
        }
    }

    /// Returns the number of bytes of a row.
    fn row_bytes(&self) -> usize {
        self.columns() / self.kind.block * self.kind.bytes
    }

    /// Returns some rows of a tensor (rows, columns).
    pub fn with_rows(&self, rows: Range<usize>) -> Self {
        let row = self.row_bytes();
        Self {
            kind: self.kind,
            dims: vec![rows.len(), self.columns()],
            data: self.data[rows.start * row..rows.end * row].to_vec(),
        }
    }

    /// Returns some columns of a tensor (rows, columns), which are whole blocks.
    pub fn with_columns(&self, columns: Range<usize>) -> Self {
        let GgmlType { block, bytes, .. } = self.kind;
        let own = columns.start / block * bytes..columns.end / block * bytes;
        let rows = self.data.chunks_exact(self.row_bytes());
        Self {
            kind: self.kind,
            dims: vec![self.rows(), columns.len()],
            data: rows.flat_map(|row| &row[own.clone()]).copied().collect(),
        }
    }

    /// Joins the rows of tensors of one type and one number of columns; there is at least one.
    pub fn join_rows(all: &[&Self]) -> Self {
        let first = all[0];
        let data: Vec<_> = all.iter().map(|part| part.data.as_slice()).collect();
        let rows = all.iter().map(|part| part.rows()).sum();
        Self { kind: first.kind, dims: vec![rows, first.columns()], data: data.concat() }
    }
}
