//! The way of a quantised weight through a builder, which returns tensors and nothing else: one tensor of bytes, which
//! are the codes, a small safetensors file of the other parts, and the length of that file.

use std::collections::HashMap;
use std::fmt::Display;

use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};
use candle_nn::VarBuilder;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use super::facts::{is_claimed_by_all, name_of_codes};
use super::group_numbers::GroupNumbers;
use super::quantized_weight::{CodeValues, Float8, QuantizedWeight};

const OP: &str = "quantized_weight";

/// The number of bytes of the length at the end.
const LENGTH_BYTES: usize = size_of::<u64>();

/// Parts by name.
#[derive(Default)]
struct Parts {
    tensors: Vec<TensorPart>,
    /// Words that are no tensors, such as the kind of the values.
    words: HashMap<String, String>,
}

struct TensorPart {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Parts {
    fn push(&mut self, name: impl ToString, dtype: Dtype, count: usize, bytes: Vec<u8>) {
        self.tensors.push(TensorPart { name: name.to_string(), dtype, shape: vec![count], bytes });
    }

    fn say(&mut self, word: &str, value: impl ToString) {
        self.words.insert(word.to_string(), value.to_string());
    }

    fn push_f32(&mut self, name: &str, numbers: &[f32]) {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.push(name, Dtype::F32, numbers.len(), bytes);
    }

    fn push_f16(&mut self, name: &str, numbers: &[f16]) {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.push(name, Dtype::F16, numbers.len(), bytes);
    }

    /// Adds a number for each group.
    fn push_numbers(&mut self, name: &str, numbers: &GroupNumbers) {
        match numbers {
            GroupNumbers::F16(own) => self.push_f16(name, own),
            GroupNumbers::BF16(own) => {
                let bytes = own.iter().flat_map(|number| number.to_le_bytes()).collect();
                self.push(name, Dtype::BF16, own.len(), bytes);
            }
            GroupNumbers::F32(own) => self.push_f32(name, own),
            GroupNumbers::Whole(own) => self.push(name, Dtype::U8, own.len(), own.clone()),
            GroupNumbers::Bytes { bytes, table } => {
                self.push(name, Dtype::U8, bytes.len(), bytes.clone());
                self.push_f32(&format!("{name}.table"), table);
            }
            GroupNumbers::Nested { numbers: own, middle, factors, groups_of_factor } => {
                self.push(name, Dtype::U8, own.len(), own.clone());
                self.push_f16(&format!("{name}.factors"), factors);
                self.say(&format!("{name}.middle"), middle);
                self.say(&format!("{name}.groups_of_factor"), groups_of_factor);
            }
        }
    }
}

/// The parts in a file.
struct StoredParts<'a> {
    file: SafeTensors<'a>,
    words: HashMap<String, String>,
}

impl StoredParts<'_> {
    fn word<T: std::str::FromStr>(&self, word: &str) -> Result<T> {
        let value = self.words.get(word).and_then(|value| value.parse().ok());
        value.ok_or_else(|| Error::msg(format!("[{OP}] the bytes of a quantised weight have no valid {word}")))
    }

    fn bytes(&self, name: &str) -> Result<TensorView<'_>> {
        self.file.tensor(name).map_err(|error| Error::msg(format!("[{OP}] {name}: {error}")))
    }

    fn f32(&self, name: &str) -> Result<Vec<f32>> {
        let bytes = self.bytes(name)?;
        Ok(bytes.data().chunks_exact(4).map(|own| f32::from_le_bytes([own[0], own[1], own[2], own[3]])).collect())
    }

    fn f16(&self, name: &str) -> Result<Vec<f16>> {
        Ok(self.bytes(name)?.data().chunks_exact(2).map(|own| f16::from_le_bytes([own[0], own[1]])).collect())
    }

    fn numbers(&self, name: &str) -> Result<GroupNumbers> {
        let view = self.bytes(name)?;
        Ok(match view.dtype() {
            Dtype::F16 => GroupNumbers::F16(self.f16(name)?),
            Dtype::BF16 => {
                let halves = view.data().chunks_exact(2).map(|own| bf16::from_le_bytes([own[0], own[1]]));
                GroupNumbers::BF16(halves.collect())
            }
            Dtype::F32 => GroupNumbers::F32(self.f32(name)?),
            _ if self.words.contains_key(&format!("{name}.middle")) => GroupNumbers::Nested {
                numbers: view.data().to_vec(),
                middle: self.word(&format!("{name}.middle"))?,
                factors: self.f16(&format!("{name}.factors"))?,
                groups_of_factor: self.word(&format!("{name}.groups_of_factor"))?,
            },
            _ if self.file.tensor(&format!("{name}.table")).is_ok() => {
                GroupNumbers::Bytes { bytes: view.data().to_vec(), table: self.f32(&format!("{name}.table"))? }
            }
            _ => GroupNumbers::Whole(view.data().to_vec()),
        })
    }
}

impl QuantizedWeight {
    /// Returns the weight as a tensor of bytes, for [`from_tensor`](Self::from_tensor). The codes are not copied.
    ///
    /// # Errors
    /// If the other parts cannot be written.
    pub fn into_tensor(self) -> Result<Tensor> {
        let mut parts = Parts::default();
        for (word, number) in
            [("outputs", self.outputs), ("inputs", self.inputs), ("bits", self.bits), ("group", self.group)]
        {
            parts.say(word, number);
        }
        parts.push_numbers("scales", &self.scales);
        match &self.values {
            CodeValues::Signed => parts.say("values", "signed"),
            CodeValues::Zeros(zeros) => {
                parts.say("values", "zeros");
                parts.push_numbers("zeros", zeros);
            }
            CodeValues::Minimums(minimums) => {
                parts.say("values", "minimums");
                parts.push_numbers("minimums", minimums);
            }
            CodeValues::Table(table) => {
                parts.say("values", "table");
                parts.push_f32("table", table);
            }
            CodeValues::Float8(Float8::E4M3) => parts.say("values", "e4m3"),
            CodeValues::Float8(Float8::E5M2) => parts.say("values", "e5m2"),
        }
        if let Some(order) = &self.input_order {
            let bytes = order.iter().flat_map(|input| input.to_le_bytes()).collect();
            parts.push("input_order", Dtype::U32, order.len(), bytes);
        }
        let mut views = Vec::new();
        for TensorPart { name, dtype, shape, bytes } in &parts.tensors {
            let view = TensorView::new(*dtype, shape.clone(), bytes);
            views.push((name, view.map_err(|error| Error::msg(format!("[{OP}] {name}: {error}")))?));
        }
        let file =
            safetensors::serialize(views, Some(parts.words)).map_err(|error| Error::msg(format!("[{OP}] {error}")))?;
        let mut bytes = self.codes;
        bytes.reserve_exact(file.len() + LENGTH_BYTES);
        bytes.extend_from_slice(&file);
        bytes.extend_from_slice(&(file.len() as u64).to_le_bytes());
        let len = bytes.len();
        Tensor::from_vec(bytes, len, &Device::Cpu)
    }

    /// Returns the weight whose bytes a tensor has.
    ///
    /// # Errors
    /// If the tensor does not come from [`into_tensor`](Self::into_tensor).
    pub fn from_tensor(tensor: &Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(CpuStorage::U8(all)) = &*storage else {
            bail!("[{OP}] expected bytes on the CPU, found {:?} on {:?}", tensor.dtype(), tensor.device())
        };
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("[{OP}] expected contiguous bytes, found strides {:?}", layout.stride())
        };
        Self::from_bytes(&all[start..end])
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let invalid =
            |problem: &dyn Display| Error::msg(format!("[{OP}] expected the bytes of a quantised weight: {problem}"));
        let Some((before, length)) = bytes.split_last_chunk::<LENGTH_BYTES>() else {
            return Err(invalid(&"there are too few"));
        };
        let file_len = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
        let Some(start) = before.len().checked_sub(file_len) else { return Err(invalid(&"there are too few")) };
        let (codes, file) = before.split_at(start);
        let (_, header) = SafeTensors::read_metadata(file).map_err(|error| invalid(&error))?;
        let words = header.metadata().clone().unwrap_or_default();
        let parts = StoredParts { file: SafeTensors::deserialize(file).map_err(|error| invalid(&error))?, words };
        let values = match parts.word::<String>("values")?.as_str() {
            "signed" => CodeValues::Signed,
            "zeros" => CodeValues::Zeros(parts.numbers("zeros")?),
            "minimums" => CodeValues::Minimums(parts.numbers("minimums")?),
            "table" => match <[f32; 16]>::try_from(parts.f32("table")?) {
                Ok(table) => CodeValues::Table(table),
                Err(table) => bail!("[{OP}] expected a table of 16 numbers, found {}", table.len()),
            },
            "e4m3" => CodeValues::Float8(Float8::E4M3),
            "e5m2" => CodeValues::Float8(Float8::E5M2),
            other => bail!("[{OP}] expected a kind of values, found {other:?}"),
        };
        let input_order = match parts.file.tensor("input_order") {
            Ok(view) => {
                let read = |own: &[u8]| u32::from_le_bytes([own[0], own[1], own[2], own[3]]);
                Some(view.data().chunks_exact(4).map(read).collect())
            }
            Err(_) => None,
        };
        let weight = Self {
            outputs: parts.word("outputs")?,
            inputs: parts.word("inputs")?,
            bits: parts.word("bits")?,
            codes: codes.to_vec(),
            group: parts.word("group")?,
            values,
            scales: parts.numbers("scales")?,
            input_order,
        };
        weight.checked()
    }

    /// Returns the weight of a builder with its codes; `None` where the builder has floats, or does not know codes. The
    /// builder of `weights::open` knows them. `name` is relative to the builder's prefix.
    ///
    /// # Errors
    /// If the weight cannot be read.
    pub fn of_builder(vb: &VarBuilder, name: &str) -> Result<Option<Self>> {
        let prefix = vb.prefix();
        let full_name = if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") };
        let root = vb.root();
        let codes = name_of_codes(&full_name);
        if !root.contains_tensor(&codes) || is_claimed_by_all(&root) {
            return Ok(None);
        }
        let bytes = root.set_device(Device::Cpu).get_unchecked_dtype(&codes, DType::U8)?;
        Self::from_tensor(&bytes).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_weights_come_back_from_their_bytes() -> Result<()> {
        let halves = |len: usize| (0..len).map(|n| f16::from_f32(n as f32 / 8.0)).collect::<Vec<_>>();
        let numbers = [
            GroupNumbers::F16(halves(4)),
            GroupNumbers::BF16((0..4).map(|n| bf16::from_f32(n as f32)).collect()),
            GroupNumbers::F32(vec![1.0, -2.0, 0.1, 3.0]),
            GroupNumbers::Whole(vec![1, 2, 3, 255]),
            GroupNumbers::Bytes { bytes: vec![0, 1, 2, 9], table: (0..256).map(|n| n as f32).collect() },
            GroupNumbers::Nested { numbers: vec![1, 2, 3, 4], middle: 128, factors: halves(2), groups_of_factor: 2 },
        ];
        for own in numbers {
            for values in [
                CodeValues::Signed,
                CodeValues::Zeros(own.clone()),
                CodeValues::Minimums(own.clone()),
                CodeValues::Table(std::array::from_fn(|n| n as f32)),
                CodeValues::Float8(Float8::E5M2),
            ] {
                let bits = if let CodeValues::Float8(_) = values { 8 } else { 4 };
                let weight = QuantizedWeight {
                    outputs: 2,
                    inputs: 4,
                    bits,
                    codes: (0..8).collect(),
                    group: 2,
                    values,
                    scales: own.clone(),
                    input_order: Some(vec![1, 0, 3, 2]),
                };
                assert_eq!(QuantizedWeight::from_tensor(&weight.clone().into_tensor()?)?, weight);
            }
        }
        let others = [vec![1u8, 2, 3], vec![0; 9], vec![255; 20]];
        for other in others {
            let len = other.len();
            assert!(QuantizedWeight::from_tensor(&Tensor::from_vec(other, len, &Device::Cpu)?).is_err());
        }
        Ok(())
    }
}
