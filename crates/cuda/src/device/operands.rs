//! The memory that launches read and write, and the launches.

use std::cell::OnceCell;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, StorageRef, Tensor, bail};

#[cfg(feature = "emulator")]
use super::emulator::{EmulatedLaunch, Region};
#[cfg(feature = "emulator")]
use super::launch::launches_of_thread;
use super::launch::{KernelArguments, Launch, count_launch};
use super::{DeviceBuffer, KernelDevice, LoadedProgram};
use crate::kernel_pointers::{InputPointer, OutputPointer, Pointee};

/// The locks on the storages of tensors that launches read: a list that grows while its entries are borrowed.
#[derive(Default)]
pub(crate) struct TensorLocks<'t> {
    first: OnceCell<Box<TensorLock<'t>>>,
}

/// The lock on the storage of a tensor.
struct TensorLock<'t> {
    storage: StorageRef<'t>,
    layout: &'t Layout,
    next: TensorLocks<'t>,
}

impl<'t> TensorLocks<'t> {
    /// Locks a tensor.
    fn lock(&self, tensor: &'t Tensor) -> &TensorLock<'t> {
        let mut end = self;
        while let Some(lock) = end.first.get() {
            end = &lock.next;
        }
        end.first.get_or_init(|| {
            let (storage, layout) = tensor.storage_and_layout();
            Box::new(TensorLock { storage, layout, next: TensorLocks::default() })
        })
    }
}

/// The memory that launches read and write. It is kept, and known to Candle's streams as used, until the launches are
/// queued and this value is dropped.
pub(crate) struct Operands<'a, 't> {
    device: &'a KernelDevice,
    locks: &'a TensorLocks<'t>,
    #[cfg(feature = "cuda")]
    uses: Vec<super::cuda::Use<'a>>,
    #[cfg(feature = "emulator")]
    regions: Vec<Region>,
}

impl<'a, 't> Operands<'a, 't> {
    /// Makes an empty list. `locks` is empty too.
    pub fn new(device: &'a KernelDevice, locks: &'a TensorLocks<'t>) -> Self {
        Self {
            device,
            locks,
            #[cfg(feature = "cuda")]
            uses: Vec::new(),
            #[cfg(feature = "emulator")]
            regions: Vec::new(),
        }
    }

    /// Adds a tensor that launches read, and returns the address of its first element.
    ///
    /// # Errors
    /// If it is on another device, or has another dtype than the kernels read there.
    pub fn input<T: Pointee>(&mut self, name: &'static str, tensor: &'t Tensor) -> Result<InputPointer<T>> {
        check_dtype::<T>(name, tensor.dtype())?;
        let lock = self.locks.lock(tensor);
        let bytes_before = lock.layout.start_offset() * tensor.dtype().size_in_bytes();
        let start = match (self.device, &*lock.storage) {
            (KernelDevice::Emulator, Storage::Cpu(storage)) => self.add_region(name, cpu_memory(storage)?, true),
            #[cfg(feature = "cuda")]
            (KernelDevice::Cuda(runner), Storage::Cuda(storage)) => {
                let used = runner.read(storage)?;
                let address = used.address();
                self.uses.push(used);
                address
            }
            _ => bail!("{name} is on another device than the queries"),
        };
        Ok(InputPointer::new(start + bytes_before as u64))
    }

    /// Adds a tensor if there is one, and returns its address or null.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn optional_input<T: Pointee>(
        &mut self,
        name: &'static str,
        tensor: Option<&'t Tensor>,
    ) -> Result<InputPointer<T>> {
        match tensor {
            Some(tensor) => self.input(name, tensor),
            None => Ok(InputPointer::new(0)),
        }
    }

    /// Adds a buffer if there is one, and returns its address or null.
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn optional_output<T: Pointee>(
        &mut self,
        name: &'static str,
        buffer: Option<&'a mut DeviceBuffer>,
    ) -> Result<OutputPointer<T>> {
        match buffer {
            Some(buffer) => self.output(name, buffer),
            None => Ok(OutputPointer::new(0)),
        }
    }

    /// Adds a buffer that launches write, and returns its address.
    ///
    /// # Errors
    /// If it is on another device, or has another dtype than the kernels write there.
    pub fn output<T: Pointee>(&mut self, name: &'static str, buffer: &'a mut DeviceBuffer) -> Result<OutputPointer<T>> {
        let storage = buffer.storage_mut();
        check_dtype::<T>(name, storage.dtype())?;
        let address = match (self.device, storage) {
            (KernelDevice::Emulator, Storage::Cpu(storage)) => self.add_region(name, cpu_memory(storage)?, false),
            #[cfg(feature = "cuda")]
            (KernelDevice::Cuda(runner), Storage::Cuda(storage)) => {
                let used = runner.write(storage)?;
                let address = used.address();
                self.uses.push(used);
                address
            }
            _ => bail!("{name} is on another device than the queries"),
        };
        Ok(OutputPointer::new(address))
    }

    /// Ends the use of the memory, after the last launch.
    pub fn finish(self) {}

    /// Adds memory of the CPU, which kernels may only read if it is an input, and returns its address.
    fn add_region(&mut self, name: &'static str, memory: CpuMemory, is_input: bool) -> u64 {
        #[cfg(feature = "emulator")]
        self.regions.push(Region { name, address: memory.address, bytes: memory.bytes, is_input });
        #[cfg(not(feature = "emulator"))]
        log::trace!("{name} has {} bytes; an input: {is_input}", memory.bytes);
        memory.address
    }

    /// Queues a kernel of a program that was loaded for the operands' device.
    ///
    /// # Errors
    /// If the launch fails; on the emulator also for an access outside of the operands.
    pub fn launch<A: KernelArguments>(&self, program: &LoadedProgram, launch: &Launch, arguments: &A) -> Result<()> {
        let blocks = launch.grid.blocks(launch.kernel)?;
        if blocks == 0 {
            return Ok(());
        }
        count_launch();
        match (self.device, program) {
            #[cfg(feature = "emulator")]
            (KernelDevice::Emulator, LoadedProgram::Emulator(program)) => {
                let emulated = EmulatedLaunch {
                    kernel: launch.kernel,
                    blocks: blocks.into(),
                    threads: launch.threads as u32,
                    shared_bytes: launch.shared_bytes as u32,
                    regions: &self.regions,
                    constants: &[],
                    // The launches of a thread run in each of the three orders in turn.
                    order: (launches_of_thread() % 3) as u32,
                };
                program.launch(&emulated, arguments)
            }
            #[cfg(feature = "cuda")]
            (KernelDevice::Cuda(runner), LoadedProgram::Cuda(program)) => {
                runner.launch(program, launch, blocks, arguments)
            }
            #[allow(unreachable_patterns, reason = "with one of the features there is one pair")]
            _ => bail!("[{}] the program was loaded for another device: {:?}", launch.kernel, arguments as *const A),
        }
    }
}

/// Checks the dtype of memory that a pointer in a kernel's argument points to.
///
/// # Errors
/// If the pointer is for another dtype.
pub fn check_dtype<T: Pointee>(name: &str, dtype: DType) -> Result<()> {
    match T::DTYPE {
        Some(expected) if dtype != expected => bail!("{name} has the dtype {dtype:?}, expected {expected:?}"),
        _ => Ok(()),
    }
}

/// Memory of the CPU.
pub struct CpuMemory {
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// Returns the memory of a storage.
///
/// # Errors
/// For a dtype that no kernel reads.
pub fn cpu_memory(storage: &CpuStorage) -> Result<CpuMemory> {
    fn of<T>(numbers: &[T]) -> CpuMemory {
        CpuMemory { address: numbers.as_ptr() as u64, bytes: size_of_val(numbers) }
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
