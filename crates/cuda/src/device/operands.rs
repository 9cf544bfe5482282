//! The memory that launches read and write, and the launches.

use candle_core::{CpuStorage, DType, Layout, Result, Storage, StorageRef, Tensor, bail};

use super::{Buffer, KernelDevice, LoadedProgram};

/// A struct that is the only argument of a kernel.
///
/// # Safety
/// The type is `#[repr(C)]` without padding and has the fields of the struct in the kernels' source. Its addresses are
/// null or come from the operands of the same launch, and sizes and strides stay within the memory there.
pub(crate) unsafe trait KernelArguments: Copy {}

/// The shape of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub kernel: &'static str,
    pub grid: Grid,
    /// The threads of a block.
    pub threads: usize,
    /// The bytes of shared memory of a block.
    pub shared_bytes: usize,
}

/// The number of blocks of a launch, by dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}

impl Grid {
    /// Returns a grid of one dimension.
    pub fn linear(x: usize) -> Self {
        Self { x, y: 1, z: 1 }
    }

    /// Checks the largest sizes that CUDA launches.
    pub fn check(&self, kernel: &str) -> Result<GridDimensions> {
        let Self { x, y, z } = *self;
        if x > i32::MAX as usize || y > u16::MAX.into() || z > u16::MAX.into() {
            bail!("[{kernel}] the grid is {x} by {y} by {z} blocks, expected at most 2147483647 by 65535 by 65535")
        }
        Ok(GridDimensions { x: x as u32, y: y as u32, z: z as u32 })
    }
}

/// A grid that CUDA can launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GridDimensions {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

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

    /// Returns the strides in elements, of dimensions of one element too.
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
            (KernelDevice::Emulator, Storage::Cpu(storage)) => self.add_region(name, cpu_memory(storage)?),
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

    /// Adds a buffer and returns its address.
    ///
    /// # Errors
    /// If it is on another device.
    pub fn write(&mut self, name: &'static str, buffer: &'a mut Buffer) -> Result<u64> {
        match (self.device, buffer.storage_mut()) {
            (KernelDevice::Emulator, Storage::Cpu(storage)) => Ok(self.add_region(name, cpu_memory(storage)?)),
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

    /// Adds memory of the CPU and returns its address.
    fn add_region(&mut self, name: &'static str, memory: CpuMemory) -> u64 {
        #[cfg(feature = "emulator")]
        self.regions.push(super::emulator::Region { name, address: memory.address, bytes: memory.bytes });
        #[cfg(not(feature = "emulator"))]
        log::trace!("{name} has {} bytes", memory.bytes);
        memory.address
    }

    /// Queues a kernel of a program that was loaded for the operands' device.
    ///
    /// # Errors
    /// If the launch fails; on the emulator also for an access outside of the operands.
    pub fn launch<A: KernelArguments>(&self, program: &LoadedProgram, launch: &Launch, arguments: &A) -> Result<()> {
        let grid = launch.grid.check(launch.kernel)?;
        if [grid.x, grid.y, grid.z].contains(&0) {
            return Ok(());
        }
        match (self.device, program) {
            #[cfg(feature = "emulator")]
            (KernelDevice::Emulator, LoadedProgram::Emulator(program)) => {
                program.launch(launch, grid, &self.regions, arguments)
            }
            #[cfg(feature = "cuda")]
            (KernelDevice::Cuda(runner), LoadedProgram::Cuda(program)) => {
                runner.launch(program, launch, grid, arguments)
            }
            #[allow(unreachable_patterns, reason = "with one of the features there is one pair")]
            _ => bail!("[{}] the program was loaded for another device: {:?}", launch.kernel, arguments as *const A),
        }
    }
}

/// Memory of the CPU.
struct CpuMemory {
    address: u64,
    #[cfg_attr(not(feature = "emulator"), expect(dead_code, reason = "the emulator checks accesses"))]
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
