//! The tensors of a module, as they are in files.

use std::collections::BTreeMap;

use candle_core::{Result, bail};
use half::{bf16, f16};
use safetensors::Dtype;

use super::floats::{e8m0_number, float8_of};
use crate::files::raw::RawTensor;
use candle_attention_modules::base::GroupNumbers;

/// Tensors by their names below a module.
#[derive(Debug, Clone, Default)]
pub(super) struct Tensors(BTreeMap<String, RawTensor>);

impl Tensors {
    pub(super) fn insert(&mut self, name: &str, tensor: RawTensor) {
        self.0.insert(name.to_string(), tensor);
    }

    /// Returns some of the tensors.
    pub(super) fn only(&self, names: &[&str]) -> Self {
        Self(
            self.0
                .iter()
                .filter(|(name, _)| names.contains(&name.as_str()))
                .map(|(n, t)| (n.clone(), t.clone()))
                .collect(),
        )
    }

    /// Returns a tensor that is there.
    pub(super) fn get(&self, name: &str) -> Option<&RawTensor> {
        self.0.get(name)
    }

    /// Returns the shape of a matrix; `None` where it is not there or has other dimensions.
    pub(super) fn matrix(&self, name: &str) -> Option<[usize; 2]> {
        <[usize; 2]>::try_from(self.0.get(name)?.shape.as_slice()).ok()
    }

    fn find(&self, name: &str) -> Result<&RawTensor> {
        match self.0.get(name) {
            Some(tensor) => Ok(tensor),
            None => bail!("expected the tensor {name} of a quantised layer, found none"),
        }
    }

    /// Checks the number of elements of a tensor.
    pub(super) fn expect_count(&self, name: &str, count: usize) -> Result<()> {
        let shape = &self.find(name)?.shape;
        if shape.iter().product::<usize>() != count {
            bail!("{name} has {shape:?} numbers, expected {count}")
        }
        Ok(())
    }

    /// Checks the number of bytes of a tensor.
    pub(super) fn expect_bytes(&self, name: &str, count: usize) -> Result<()> {
        let found = self.find(name)?.len;
        if found != count {
            bail!("{name} has {found} bytes, expected {count}")
        }
        Ok(())
    }

    /// Returns the dtype of a tensor.
    pub(super) fn dtype(&self, name: &str) -> Result<Dtype> {
        Ok(self.find(name)?.dtype)
    }

    /// Returns the names, dtypes and shapes, for errors.
    pub(super) fn described(&self) -> String {
        let all = self.0.iter().map(|(name, tensor)| format!("`{name}` {:?} {:?}", tensor.dtype, tensor.shape));
        all.collect::<Vec<_>>().join(", ")
    }

    /// Reads a list of whole numbers.
    pub(super) fn whole(&self, name: &str) -> Result<Vec<i64>> {
        let tensor = self.find(name)?;
        let bytes = tensor.read()?;
        Ok(match tensor.dtype {
            Dtype::I32 => {
                bytes.chunks_exact(4).map(|own| i32::from_le_bytes([own[0], own[1], own[2], own[3]]).into()).collect()
            }
            Dtype::I64 => bytes
                .chunks_exact(8)
                .map(|own| i64::from_le_bytes([own[0], own[1], own[2], own[3], own[4], own[5], own[6], own[7]]))
                .collect(),
            other => bail!("{name} has dtype {other:?}, expected I32 or I64"),
        })
    }

    /// Reads the bytes of a tensor.
    pub(super) fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        self.find(name)?.read()
    }

    /// Reads a tensor of whole numbers from 0 on.
    pub(super) fn integers(&self, name: &str) -> Result<Vec<usize>> {
        let tensor = self.find(name)?;
        let bytes = tensor.read()?;
        let mut numbers = Vec::new();
        let size = match tensor.dtype {
            Dtype::U8 => 1,
            Dtype::I32 => 4,
            Dtype::I64 => 8,
            other => bail!("{name} has dtype {other:?}, expected U8, I32 or I64"),
        };
        for own in bytes.chunks_exact(size) {
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(own);
            // A negative number is too large.
            match usize::try_from(i64::from_le_bytes(wide)) {
                Ok(number) if size == 8 || number < 1 << 31 => numbers.push(number),
                _ => bail!("{name} has a number below 0, expected whole numbers from 0 on"),
            }
        }
        Ok(numbers)
    }

    /// Reads a tensor of one whole number.
    pub(super) fn integer(&self, name: &str) -> Result<usize> {
        match self.integers(name)?[..] {
            [number] => Ok(number),
            ref other => bail!("{name} has {} numbers, expected one", other.len()),
        }
    }

    /// Reads a tensor of floats as numbers of groups, in the order in which they are stored.
    pub(super) fn numbers(&self, name: &str) -> Result<GroupNumbers> {
        let tensor = self.find(name)?;
        let bytes = tensor.read()?;
        let pairs = || bytes.chunks_exact(2).map(|own| [own[0], own[1]]);
        Ok(match tensor.dtype {
            Dtype::F16 => GroupNumbers::F16(pairs().map(f16::from_le_bytes).collect()),
            Dtype::BF16 => GroupNumbers::BF16(pairs().map(bf16::from_le_bytes).collect()),
            Dtype::F32 => GroupNumbers::F32(self.f32(name)?),
            other => bail!("{name} has dtype {other:?}, expected F16, BF16 or F32"),
        })
    }

    /// Reads a tensor of floats as f32.
    pub(super) fn f32(&self, name: &str) -> Result<Vec<f32>> {
        let tensor = self.find(name)?;
        let bytes = tensor.read()?;
        let pairs = || bytes.chunks_exact(2).map(|own| [own[0], own[1]]);
        Ok(match tensor.dtype {
            Dtype::F32 => {
                bytes.chunks_exact(4).map(|own| f32::from_le_bytes([own[0], own[1], own[2], own[3]])).collect()
            }
            Dtype::F16 => pairs().map(|own| f16::from_le_bytes(own).to_f32()).collect(),
            Dtype::BF16 => pairs().map(|own| bf16::from_le_bytes(own).to_f32()).collect(),
            Dtype::F8_E8M0 => bytes.into_iter().map(e8m0_number).collect(),
            other => match float8_of(other) {
                Some(float) => bytes.into_iter().map(|code| float.number(code)).collect(),
                None => bail!("{name} has dtype {other:?}, expected F16, BF16 or F32"),
            },
        })
    }
}
