//! Copies of tensors on the CPU, for the emulator.

use candle_attention_cuda::shared::cpu_memory;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor};

/// Returns a copy of the whole buffer of a tensor.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<CpuStorage> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(storage.clone()),
        Storage::Cuda(storage) => storage.to_cpu_storage(),
        Storage::Metal(storage) => storage.to_cpu_storage(),
    }
}

/// Returns memory of one number: NaN where no result may depend on it.
pub(crate) fn filled(dtype: DType, count: usize, number: f32) -> Result<CpuStorage> {
    copy_of(&Tensor::full(number, count, &Device::Cpu)?.to_dtype(dtype)?)
}

/// Returns the address of the first byte of a copy.
pub(crate) fn address_of(storage: &CpuStorage) -> Result<u64> {
    Ok(cpu_memory(storage)?.address)
}
