//! Copies of tensors on the CPU, for the emulator.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};

/// Returns a copy of the whole buffer of a tensor.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<CpuStorage> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(storage.clone()),
        Storage::Cuda(storage) => storage.to_cpu_storage(),
        Storage::Metal(storage) => storage.to_cpu_storage(),
    }
}

/// Returns memory whose numbers no result may depend on.
pub(crate) fn poisoned(dtype: DType, count: usize) -> Result<CpuStorage> {
    let nan = Tensor::full(f32::NAN, count, &Device::Cpu)?.to_dtype(dtype)?;
    copy_of(&nan)
}

/// Memory of a copy.
pub(crate) struct CopiedMemory {
    pub address: u64,
    pub bytes: usize,
}

/// Returns the memory of a copy.
pub(crate) fn memory_of(storage: &CpuStorage) -> Result<CopiedMemory> {
    fn of<T>(numbers: &[T]) -> CopiedMemory {
        CopiedMemory { address: numbers.as_ptr() as u64, bytes: size_of_val(numbers) }
    }
    Ok(match storage {
        CpuStorage::U8(numbers) => of(numbers),
        CpuStorage::U32(numbers) => of(numbers),
        CpuStorage::I32(numbers) => of(numbers),
        CpuStorage::F16(numbers) => of(numbers),
        CpuStorage::BF16(numbers) => of(numbers),
        CpuStorage::F32(numbers) => of(numbers),
        _ => bail!("kernels read tensors of u8, u32, i32, f16, bf16 and f32"),
    })
}

/// Returns the address of the first byte of a copy.
pub(crate) fn address_of(storage: &CpuStorage) -> Result<u64> {
    Ok(memory_of(storage)?.address)
}
