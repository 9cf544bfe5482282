//! The memory that launches read and write, and the launches.

use candle_core::{CpuStorage, DType, Layout, Result, Storage, StorageRef, Tensor, bail};

use super::launch::{KernelArguments, Launch, count_launch};
use super::{Buffer, KernelDevice, LoadedProgram};

/// A tensor that launches read. Its storage is locked.
pub(crate) struct Reading<'t> {
    storage: StorageRef<'t>,
    layout: &'t Layout,
    dtype: DType,
}

impl<'t> Reading<'t> {
    /// Locks a tensor.
    pub fn new(tensor: &'t Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout, dtype: tensor.dtype() }
    }

    /// Returns the dimensions.
    pub fn dims(&self) -> &[usize] {
        self.layout.dims()
    }

    /// Returns the strides in elements.
    pub fn strides(&self) -> &[usize] {
        self.layout.stride()
    }
}

/// The memory that launches read and write. It is kept, and known to Candle's streams as used, until the launches are
/// queued and this value is dropped.
pub(crate) struct Operands<'a> {
    device: &'a KernelDevice,
    #[cfg(feature = "cuda")]
    uses: Vec<super::cuda::Use<'a>>,
    #[cfg(feature = "emulator")]
    regions: Vec<super::emulator::Region>,
}

impl<'a> Operands<'a> {
    /// Makes an empty list.
    pub fn new(device: &'a KernelDevice) -> Self {
        Self {
            device,
            #[cfg(feature = "cuda")]
            uses: Vec::new(),
            #[cfg(feature = "emulator")]
            regions: Vec::new(),
        }
    }

    /// Adds a tensor and returns the address of its first element.
    ///
    /// # Errors
    /// If it is on another device.
    pub fn read(&mut self, name: &'static str, reading: &'a Reading) -> Result<u64> {
        let bytes_before = reading.layout.start_offset() * reading.dtype.size_in_bytes();
        let start = match (self.device, &*reading.storage) {
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
        Ok(start + bytes_before as u64)
    }

    /// Adds a tensor if there is one, and returns its address or 0.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_optional(&mut self, name: &'static str, reading: Option<&'a Reading>) -> Result<u64> {
        match reading {
            Some(reading) => self.read(name, reading),
            None => Ok(0),
        }
    }

    /// Adds a buffer if there is one, and returns its address or 0.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_optional(&mut self, name: &'static str, buffer: Option<&'a mut Buffer>) -> Result<u64> {
        match buffer {
            Some(buffer) => self.write(name, buffer),
            None => Ok(0),
        }
    }

    /// Adds a buffer and returns its address.
    ///
    /// # Errors
    /// If it is on another device.
    pub fn write(&mut self, name: &'static str, buffer: &'a mut Buffer) -> Result<u64> {
        match (self.device, buffer.storage_mut()) {
            (KernelDevice::Emulator, Storage::Cpu(storage)) => Ok(self.add_region(name, cpu_memory(storage)?, false)),
            #[cfg(feature = "cuda")]
            (KernelDevice::Cuda(runner), Storage::Cuda(storage)) => {
                let used = runner.write(storage)?;
                let address = used.address();
                self.uses.push(used);
                Ok(address)
            }
            _ => bail!("{name} is on another device than the queries"),
        }
    }

    /// Ends the use of the memory, after the last launch.
    pub fn finish(self) {}

    /// Adds memory of the CPU, which kernels may only read if it is an input, and returns its address.
    fn add_region(&mut self, name: &'static str, memory: CpuMemory, is_input: bool) -> u64 {
        #[cfg(feature = "emulator")]
        self.regions.push(super::emulator::Region { name, address: memory.address, bytes: memory.bytes, is_input });
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
                program.launch(launch, blocks, &self.regions, arguments)
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

/// Memory of the CPU.
struct CpuMemory {
    address: u64,
    bytes: usize,
}

/// Returns the memory of a storage.
fn cpu_memory(storage: &CpuStorage) -> Result<CpuMemory> {
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
