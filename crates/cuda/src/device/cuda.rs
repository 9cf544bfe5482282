//! Kernels on a GPU, through Candle's device and its stream.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_attention_device::{Attempt, DiskCache, Failure, FirstUse, warn_of_each_text};
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUfunction_attribute, CUresult};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, DriverError,
    LaunchConfig, PushKernelArg, SyncOnDrop, ValidAsZeroBits,
};
use candle_core::cuda_backend::cudarc::nvrtc::Ptx;
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result, Storage, bail};
use half::{bf16, f16};

use super::DeviceBuffer;
use super::checks::{DeviceChecks, kernels_version};
use super::launch::{KernelArguments, Launch};
use super::programs::{LoadResult, Programs};
use crate::capability::{Capability, Limits};
use crate::compile::{compile, compile_empty_kernel};
use crate::nvrtc::Nvrtc;
use crate::program::Program;
use crate::unsupported::Unsupported;

/// The oldest device that has the instructions of the kernels.
const OLDEST: Capability = Capability { major: 8, minor: 0 };

/// The devices on which the kernels have been run and compared with the CPU (docs/cuda.md).
const DEVICES_THAT_RAN: [Capability; 1] = [Capability { major: 9, minor: 0 }];

/// The devices, by their number, whose checks at first use are found without a lock.
const QUICK_DEVICES: usize = 16;

/// The errors of the driver for code that it will never load.
const LASTING_ERRORS: [CUresult; 4] = [
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_INVALID_SOURCE,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
];

/// The shared memory that a kernel may have without a change of its attributes.
const DEFAULT_SHARED_BYTES: usize = 48 * 1024;

/// The kernels' side of a device of Candle.
pub(crate) struct CudaRunner {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    context: Arc<ContextPrograms>,
}

/// The programs of a context, or the reason why it has none.
struct ContextAttempt {
    programs: Attempt<Arc<ContextPrograms>>,
    /// Stays alive, so that no other context gets its address.
    _context: Arc<CudaContext>,
}

impl ContextAttempt {
    fn new(context: &Arc<CudaContext>) -> Self {
        Self { programs: Attempt::default(), _context: context.clone() }
    }
}

/// The programs of a context of the driver, which all devices of Candle on the same GPU share.
struct ContextPrograms {
    context: Arc<CudaContext>,
    limits: Limits,
    nvrtc: &'static Nvrtc,
    architecture: String,
    programs: Programs<CudaProgram>,
    /// The name of the device, its compute capability and the compiler.
    name: String,
    /// The checks of kernels at their first use.
    first_use: DeviceChecks,
}

/// Returns the checks of kernels at their first use on a device, unless there are no kernels for it.
pub(super) fn first_use(device: &CudaDevice) -> Option<DeviceChecks> {
    static OF_DEVICES: [OnceLock<DeviceChecks>; QUICK_DEVICES] = [const { OnceLock::new() }; QUICK_DEVICES];
    let slot = OF_DEVICES.get(device.cuda_stream().context().ordinal());
    if let Some(known) = slot.and_then(OnceLock::get) {
        return Some(known.clone());
    }
    let checks = CudaRunner::new(device).ok()?.context.first_use.clone();
    if let Some(slot) = slot {
        slot.get_or_init(|| checks.clone());
    }
    Some(checks)
}

/// A compiled program in a context.
pub(crate) struct CudaProgram {
    module: Arc<CudaModule>,
    functions: Mutex<HashMap<&'static str, SizedFunction>>,
}

/// A kernel that may be launched with some shared memory.
#[derive(Clone)]
struct SizedFunction {
    function: CudaFunction,
    shared_bytes: usize,
}

/// The use of memory by launches: dropped after them, it tells Candle's streams.
pub(crate) struct Use<'a> {
    address: u64,
    _guard: SyncOnDrop<'a>,
}

impl Use<'_> {
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl CudaRunner {
    /// Returns the kernels' side of a device.
    ///
    /// # Errors
    /// If the device is too old, or there is no NVRTC for it.
    pub fn new(device: &CudaDevice) -> std::result::Result<Self, Unsupported> {
        type Contexts = HashMap<usize, Arc<ContextAttempt>>;
        static CONTEXTS: OnceLock<Mutex<Contexts>> = OnceLock::new();
        let stream = device.cuda_stream();
        let context = stream.context();
        let attempt = {
            let mut contexts = CONTEXTS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
            let key = context.cu_ctx() as usize;
            contexts.entry(key).or_insert_with(|| Arc::new(ContextAttempt::new(context))).clone()
        };
        let programs = attempt.programs.get_or_make(|| ContextPrograms::new(context).map(Arc::new));
        let programs = programs.inspect_err(|failure| {
            warn_of_each_text(&format!("other operations run instead of the CUDA kernels: {}", failure.reason));
        })?;
        Ok(Self { device: device.clone(), stream, context: programs })
    }

    /// Returns the name of the device, its compute capability and the compiler.
    pub fn name(&self) -> &str {
        &self.context.name
    }

    /// Returns what a kernel may use of the device.
    pub fn limits(&self) -> Limits {
        self.context.limits
    }

    /// Allocates memory whose content is undefined.
    pub fn uninitialized(&self, dtype: DType, count: usize) -> Result<DeviceBuffer> {
        // SAFETY: kernels write the memory before they or others read it.
        self.allocate(dtype, count, Memory { is_zero: false })
    }

    /// Allocates zeros.
    pub fn zeros(&self, dtype: DType, count: usize) -> Result<DeviceBuffer> {
        self.allocate(dtype, count, Memory { is_zero: true })
    }

    fn allocate(&self, dtype: DType, count: usize, memory: Memory) -> Result<DeviceBuffer> {
        let storage = match dtype {
            DType::F32 => memory.of::<f32>(&self.device, count)?,
            DType::F16 => memory.of::<f16>(&self.device, count)?,
            DType::BF16 => memory.of::<bf16>(&self.device, count)?,
            DType::I32 => memory.of::<i32>(&self.device, count)?,
            DType::U8 => memory.of::<u8>(&self.device, count)?,
            other => bail!("kernels write no {other:?}"),
        };
        Ok(DeviceBuffer::new(Storage::Cuda(storage), count))
    }

    /// Returns a compiled program.
    ///
    /// # Errors
    /// If it does not compile or load.
    pub fn load(&self, program: &Program) -> LoadResult<CudaProgram> {
        self.context.programs.get_or_make(program.clone(), || self.context.compile(program))
    }

    /// Returns the failure of a program that an earlier call could not load. `program` is called only if there is any.
    pub fn known_failure(&self, program: impl FnOnce() -> Option<Program>) -> Option<Failure> {
        self.context.programs.known_failure(program)
    }

    /// Takes a storage that launches read.
    pub fn read<'a>(&'a self, storage: &'a CudaStorage) -> Result<Use<'a>> {
        self.check(storage)?;
        match &storage.slice {
            CudaStorageSlice::U8(slice) => Ok(self.read_slice(slice)),
            CudaStorageSlice::U32(slice) => Ok(self.read_slice(slice)),
            CudaStorageSlice::I32(slice) => Ok(self.read_slice(slice)),
            CudaStorageSlice::F16(slice) => Ok(self.read_slice(slice)),
            CudaStorageSlice::BF16(slice) => Ok(self.read_slice(slice)),
            CudaStorageSlice::F32(slice) => Ok(self.read_slice(slice)),
            _ => bail!("kernels read no {:?}", storage.dtype()),
        }
    }

    fn read_slice<'a, T>(&'a self, slice: &'a CudaSlice<T>) -> Use<'a> {
        let (address, guard) = slice.device_ptr(&self.stream);
        Use { address, _guard: guard }
    }

    /// Takes a storage that launches write.
    pub fn write<'a>(&'a self, storage: &'a mut CudaStorage) -> Result<Use<'a>> {
        self.check(storage)?;
        match &mut storage.slice {
            CudaStorageSlice::U8(slice) => Ok(self.write_slice(slice)),
            CudaStorageSlice::I32(slice) => Ok(self.write_slice(slice)),
            CudaStorageSlice::F16(slice) => Ok(self.write_slice(slice)),
            CudaStorageSlice::BF16(slice) => Ok(self.write_slice(slice)),
            CudaStorageSlice::F32(slice) => Ok(self.write_slice(slice)),
            _ => bail!("kernels write no such memory"),
        }
    }

    fn write_slice<'a, T>(&'a self, slice: &'a mut CudaSlice<T>) -> Use<'a> {
        let (address, guard) = slice.device_ptr_mut(&self.stream);
        Use { address, _guard: guard }
    }

    /// Checks that memory is on the device.
    fn check(&self, storage: &CudaStorage) -> Result<()> {
        let ordinal = storage.device.cuda_stream().context().ordinal();
        let expected = self.context.context.ordinal();
        if ordinal != expected {
            bail!("a tensor is on CUDA device {ordinal}, expected {expected}, where the queries are")
        }
        Ok(())
    }

    /// Queues a kernel on the stream of the device.
    pub fn launch<A: KernelArguments>(
        &self,
        program: &CudaProgram,
        launch: &Launch,
        blocks: u32,
        arguments: &A,
    ) -> Result<()> {
        self.context.context.bind_to_thread().w()?;
        let function = program.function(launch.kernel, launch.shared_bytes)?;
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (launch.threads as u32, 1, 1),
            shared_mem_bytes: launch.shared_bytes as u32,
        };
        let parameter = KernelArgument(*arguments);
        let mut builder = self.stream.launch_builder(&function);
        builder.arg(&parameter);
        // SAFETY: the kernel has one argument of this type, whose implementor promises that addresses and sizes fit;
        // the caller locks the operands until the launch is queued.
        unsafe { builder.launch(config) }.w()?;
        Ok(())
    }
}

/// The content of new memory.
#[derive(Clone, Copy)]
struct Memory {
    is_zero: bool,
}

impl Memory {
    fn of<T>(self, device: &CudaDevice, count: usize) -> Result<CudaStorage>
    where
        T: CudaDType + DeviceRepr + ValidAsZeroBits,
    {
        let slice = if self.is_zero {
            device.alloc_zeros::<T>(count)?
        } else {
            // SAFETY: kernels write the memory before anything reads it.
            unsafe { device.alloc::<T>(count)? }
        };
        Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
    }
}

/// An argument of a kernel by value.
#[repr(transparent)]
struct KernelArgument<A>(A);

// SAFETY: a kernel's argument is a C struct of numbers.
unsafe impl<A: KernelArguments> DeviceRepr for KernelArgument<A> {}

impl ContextPrograms {
    fn new(context: &Arc<CudaContext>) -> std::result::Result<Self, Failure> {
        let failed = |error: DriverError| Failure::passing(format!("the device does not answer: {error}"));
        let attribute = |attribute: CUdevice_attribute| context.attribute(attribute).map_err(failed);
        let (major, minor) = context.compute_capability().map_err(failed)?;
        let capability = Capability { major: major as u32, minor: minor as u32 };
        if capability < OLDEST {
            let reason = format!("the device has compute capability {capability}, expected at least {OLDEST}");
            return Err(Failure::lasting(reason));
        }
        let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let nvrtc = Nvrtc::of_process(driver_major())?;
        let architecture = nvrtc.architecture(capability).map_err(|reason| Failure::lasting(reason.reason()))?;
        // The compiler may lack a file, and the driver may be older than the compiler.
        let code = compile_empty_kernel(nvrtc, &DiskCache::of_user(), &architecture)?;
        load_module(context, nvrtc, code)?;
        let device_name = context.name().map_err(failed)?;
        let name = format!("{device_name}, compute capability {capability}, {}", nvrtc.name());
        let first_use = DeviceChecks {
            checks: Arc::new(FirstUse::new(name.clone(), kernels_version(), DiskCache::of_user())),
            have_run: DEVICES_THAT_RAN.contains(&capability),
        };
        Ok(Self {
            context: context.clone(),
            limits: Limits {
                capability,
                multiprocessors: multiprocessors as usize,
                shared_bytes: shared_bytes as usize,
            },
            nvrtc,
            architecture,
            programs: Programs::default(),
            name,
            first_use,
        })
    }

    /// Compiles a program and loads it.
    fn compile(&self, program: &Program) -> LoadResult<CudaProgram> {
        let code = compile(self.nvrtc, &DiskCache::of_user(), &self.architecture, program)?;
        let module = load_module(&self.context, self.nvrtc, code)?;
        Ok(Arc::new(CudaProgram { module, functions: Mutex::default() }))
    }
}

impl CudaProgram {
    /// Returns a kernel that may be launched with this much shared memory.
    fn function(&self, kernel: &'static str, shared_bytes: usize) -> Result<CudaFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = functions.get(kernel)
            && known.shared_bytes >= shared_bytes
        {
            return Ok(known.function.clone());
        }
        let function = self.module.load_function(kernel).w()?;
        let shared_bytes = shared_bytes.max(DEFAULT_SHARED_BYTES);
        if shared_bytes > DEFAULT_SHARED_BYTES {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared_bytes as i32).w()?;
        }
        functions.insert(kernel, SizedFunction { function: function.clone(), shared_bytes });
        Ok(function)
    }
}

/// Loads compiled kernels.
fn load_module(
    context: &Arc<CudaContext>,
    nvrtc: &Nvrtc,
    code: Vec<u8>,
) -> std::result::Result<Arc<CudaModule>, Failure> {
    context.load_module(Ptx::from_binary(code)).map_err(|DriverError(error)| Failure {
        reason: format!(
            "the driver, of CUDA {}, does not load what {} compiles: {}",
            driver_major(),
            nvrtc.name(),
            DriverError(error)
        ),
        is_lasting: LASTING_ERRORS.contains(&error),
    })
}

/// Returns the major version of CUDA that the driver supports; 0 if it does not say.
fn driver_major() -> i32 {
    let mut version = 0;
    // SAFETY: a valid pointer.
    let code = unsafe { candle_core::cuda_backend::cudarc::driver::sys::cuDriverGetVersion(&raw mut version) };
    if code.result().is_ok() { version / 1000 } else { 0 }
}
