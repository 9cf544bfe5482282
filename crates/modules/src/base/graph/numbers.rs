//! The numbers of a kernel's result, on any device.

use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, WithDType};

/// Numbers that a tensor can own without a copy: a vector of the CPU, or the storage of any device.
pub trait IntoStorage {
    /// Returns the numbers as Candle stores them.
    fn into_storage(self) -> Storage;
}

impl<E: WithDType> IntoStorage for Vec<E> {
    fn into_storage(self) -> Storage {
        Storage::Cpu(E::to_cpu_storage_owned(self))
    }
}

impl IntoStorage for Storage {
    fn into_storage(self) -> Storage {
        self
    }
}

/// The numbers of a result and their shape. They are contiguous.
pub struct Computed {
    pub storage: Storage,
    pub shape: Shape,
}

impl Computed {
    /// Returns a storage of one number with the shape of the result, for a node whose numbers nobody reads.
    pub fn without_numbers(&self, device: &Device) -> Result<Self> {
        let one = Shape::from(1);
        let dtype = self.storage.dtype();
        let storage = match device {
            Device::Cpu => Storage::Cpu(CpuDevice.zeros_impl(&one, dtype)?),
            Device::Cuda(cuda) => Storage::Cuda(cuda.zeros_impl(&one, dtype)?),
            Device::Metal(metal) => Storage::Metal(metal.zeros_impl(&one, dtype)?),
        };
        Ok(Self { storage, shape: self.shape.clone() })
    }

    /// Returns the numbers as a tensor without gradients.
    pub fn untracked(self) -> Tensor {
        Tensor::from_storage(self.storage, self.shape, BackpropOp::none(), false)
    }
}

/// Returns the numbers of a join of `len` entries. f32, which every device has, represents the numbers of messages
/// exactly.
pub fn join(len: usize, device: &Device) -> Result<Computed> {
    let shape = Shape::from(len);
    let storage = match device {
        Device::Cpu => Storage::Cpu(CpuStorage::F32(vec![0.0; len])),
        Device::Cuda(cuda) => Storage::Cuda(cuda.zeros_impl(&shape, DType::F32)?),
        Device::Metal(metal) => Storage::Metal(metal.zeros_impl(&shape, DType::F32)?),
    };
    Ok(Computed { storage, shape })
}
