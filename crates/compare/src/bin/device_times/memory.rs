//! The peak of a device's memory.

use candle_core::{Device, Result};

use super::outcome::Outcome;

/// Measures the MiB that a call adds to the peak of the memory that its process uses on a CUDA device.
#[cfg(feature = "cuda")]
pub fn added_to_peak<T>(device: &Device, call: impl FnOnce() -> Result<T>) -> Result<Outcome> {
    use candle_core::cuda_backend::WrapErr;
    use candle_core::cuda_backend::cudarc::driver::sys;

    let Device::Cuda(cuda) = device else { return Ok(not_measured()) };
    let stream = cuda.cuda_stream();
    if !stream.context().has_async_alloc() {
        return Ok(Outcome::Skipped("the device has no memory pool, whose peak could be read".into()));
    }
    device.synchronize()?;
    let mut pool: sys::CUmemoryPool = std::ptr::null_mut();
    // SAFETY: `pool` is written, and the device exists as long as its stream does.
    unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, stream.context().cu_device()) }.result().w()?;
    let read = |attribute: sys::CUmemPool_attribute| -> Result<u64> {
        let mut bytes = 0u64;
        // SAFETY: the pool is the device's own, and both attributes are of 64 bits.
        unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result().w()?;
        Ok(bytes)
    };
    let high = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
    let mut zero = 0u64;
    // SAFETY: as above. Zero resets the peak to the memory that is used now.
    unsafe { sys::cuMemPoolSetAttribute(pool, high, (&raw mut zero).cast()) }.result().w()?;
    let before = read(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
    call()?;
    device.synchronize()?;
    let bytes = read(high)?.saturating_sub(before);
    Ok(Outcome::Mebibytes(bytes as f64 / f64::from(1 << 20)))
}

/// Runs nothing, since only the memory of a CUDA device is measured.
#[cfg(not(feature = "cuda"))]
pub fn added_to_peak<T>(_: &Device, _: impl FnOnce() -> Result<T>) -> Result<Outcome> {
    Ok(not_measured())
}

fn not_measured() -> Outcome {
    Outcome::Skipped("the peak of memory is measured on CUDA devices only".into())
}
