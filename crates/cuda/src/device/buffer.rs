//! Memory that kernels write.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};

/// Memory that a launch writes: a result or scratch.
pub(crate) struct DeviceBuffer {
    storage: Storage,
    count: usize,
}

impl DeviceBuffer {
    pub(super) fn new(storage: Storage, count: usize) -> Self {
        Self { storage, count }
    }

    pub(super) fn storage_mut(&mut self) -> &mut Storage {
        &mut self.storage
    }

    /// Returns the memory as a storage of Candle.
    pub fn into_storage(self) -> Storage {
        self.storage
    }

    /// Returns the memory as a tensor.
    ///
    /// # Errors
    /// If the shape has another number of elements.
    pub fn into_tensor(self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.elem_count() != self.count {
            bail!("a buffer has {} elements, expected those of {shape:?}", self.count)
        }
        Ok(Tensor::from_storage(self.storage, shape, BackpropOp::none(), false))
    }
}

/// Allocates zeros on the CPU.
pub(super) fn zeros(dtype: DType, count: usize) -> Result<DeviceBuffer> {
    filled(dtype, count, 0.0, 0)
}

/// Allocates memory on the CPU with numbers that no result may depend on: NaN, and an index of nothing.
pub(super) fn poisoned(dtype: DType, count: usize) -> Result<DeviceBuffer> {
    filled(dtype, count, f32::NAN, -0x5555_5556)
}

/// Allocates memory on the CPU with copies of a number.
fn filled(dtype: DType, count: usize, float: f32, integer: i32) -> Result<DeviceBuffer> {
    let storage = match dtype {
        DType::F32 => CpuStorage::F32(vec![float; count]),
        DType::F16 => CpuStorage::F16(vec![f16::from_f32(float); count]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::from_f32(float); count]),
        DType::I32 => CpuStorage::I32(vec![integer; count]),
        DType::U8 => CpuStorage::U8(vec![integer as u8; count]),
        other => bail!("kernels write no {other:?}"),
    };
    Ok(DeviceBuffer::new(Storage::Cpu(storage), count))
}
