//! Launches on Metal, through Candle's device: compiled programs, bound buffers, and Candle's encoder of commands,
//! which orders launches that use the same buffers.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_attention_cuda::shared::Define;
use candle_attention_device::{Attempts, DiskCache, Failure, FirstUse};
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{Device, Error, MetalDevice, MetalStorage, Result, Storage, Tensor, bail};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use objc2_metal::{MTLCompileOptions, MTLSize};

use crate::bindings::LaunchArguments;
use crate::launch::MetalLaunch;
use crate::operands::{MetalOperands, OperandPlace};
use crate::source;

/// A kernel of a program on a GPU.
#[derive(Debug, PartialEq, Eq, Hash)]
struct PipelineKey {
    /// The number of the GPU in the system's registry.
    gpu: u64,
    kernel: &'static str,
    defines: Vec<Define>,
}

/// A compiled kernel, or the reason why it does not compile, which is the same in every later call.
type CompiledPipeline = std::result::Result<ComputePipeline, String>;

static PIPELINES: LazyLock<Attempts<PipelineKey, ComputePipeline>> = LazyLock::new(Attempts::default);

fn key(launch: &MetalLaunch, device: &MetalDevice) -> PipelineKey {
    let gpu = device.metal_device().registry_id();
    PipelineKey { gpu, kernel: launch.kernel, defines: launch.defines.clone() }
}

/// Returns the reason why an earlier call could not compile a kernel, if one could not. `launch` is called only if any
/// kernel failed.
pub(crate) fn known_failure(device: &Device, launch: impl FnOnce() -> Option<MetalLaunch>) -> Option<String> {
    let Device::Metal(device) = device else { return None };
    PIPELINES.known_failure(|| Some(key(&launch()?, device))).map(|failure| failure.reason)
}

/// Returns the checks of the kernels at their first use on a device: no Mac of ours has run them.
pub(crate) fn first_use(device: &Device, version: impl FnOnce() -> String) -> Option<Arc<FirstUse>> {
    static OF_GPUS: LazyLock<Mutex<HashMap<u64, Arc<FirstUse>>>> = LazyLock::new(Mutex::default);
    let Device::Metal(device) = device else { return None };
    let gpu = device.metal_device();
    let mut of_gpus = OF_GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    let checks = of_gpus.entry(gpu.registry_id()).or_insert_with(|| {
        let name = format!("Metal on {}", gpu.architecture_name());
        Arc::new(FirstUse::new(name, version(), DiskCache::of_user()))
    });
    Some(checks.clone())
}

/// Returns a compiled kernel, which is compiled in the first call.
fn pipeline(launch: &MetalLaunch, device: &MetalDevice) -> CompiledPipeline {
    let compiled = PIPELINES.get_or_make(key(launch, device), || compile(launch, device).map_err(Failure::lasting));
    compiled.map_err(|failure| failure.reason)
}

fn compile(launch: &MetalLaunch, device: &MetalDevice) -> CompiledPipeline {
    let failure = |error: String| format!("the kernel {} does not compile: {error}", launch.kernel);
    let options = MTLCompileOptions::new();
    // Fast maths assume that there are no infinities and no NaN. The newer property needs macOS 15.
    #[allow(deprecated, reason = "for older systems")]
    options.setFastMathEnabled(false);
    let gpu = device.metal_device();
    let library = gpu
        .new_library_with_source(&source::of_program(launch), Some(&options))
        .map_err(|error| failure(error.to_string()))?;
    let function = library.get_function(launch.kernel, None).map_err(|error| failure(error.to_string()))?;
    let pipeline =
        gpu.new_compute_pipeline_state_with_function(&function).map_err(|error| failure(error.to_string()))?;
    let most = pipeline.max_total_threads_per_threadgroup();
    if most < launch.threads {
        return Err(format!("the kernel {} runs with {most} threads, and needs {}", launch.kernel, launch.threads));
    }
    Ok(pipeline)
}

/// Compiles the kernels of some launches.
///
/// # Errors
/// If one does not compile, or the tensors are on another device.
pub(crate) fn prepare(launches: &[MetalLaunch], device: &Device) -> Result<()> {
    let Device::Metal(device) = device else { bail!("the Metal kernels expected tensors on Metal") };
    launches.iter().try_for_each(|launch| pipeline(launch, device).map(|_| ()).map_err(Error::msg))
}

/// Runs kernels one after the other: they are queued, and nothing waits for them.
///
/// # Errors
/// If one does not compile, or an operand is on another device.
pub(crate) fn run<A: LaunchArguments>(
    launches: &[MetalLaunch],
    arguments: &A,
    operands: &MetalOperands,
    device: &Device,
) -> Result<Vec<Tensor>> {
    let Device::Metal(device) = device else { bail!("the Metal kernels expected tensors on Metal") };
    let mut compiled = Vec::new();
    for launch in launches {
        compiled.push(pipeline(launch, device).map_err(Error::msg)?);
    }
    let mut written: Vec<Arc<Buffer>> = Vec::new();
    for output in &operands.outputs {
        let count = output.shape.elem_count();
        let builder = match output.is_zeroed {
            true => device.new_buffer_builder().with_zeros(count * output.dtype.size_in_bytes()),
            false => device.new_buffer_builder().with_size_for(count, output.dtype),
        };
        written.push(builder.with_label(output.name).build()?);
    }
    let locks: Vec<_> = operands.inputs.iter().map(|input| input.tensor.storage_and_layout()).collect();
    let mut read: Vec<&Buffer> = Vec::new();
    for (input, (storage, _)) in operands.inputs.iter().zip(&locks) {
        match &**storage {
            Storage::Metal(storage) if storage.device().id() == device.id() => read.push(storage.buffer()),
            _ => bail!("{} is on another device than the queries", input.name),
        }
    }
    let Some(&any) = read.first() else { bail!("the Metal kernels expected tensors, found none") };

    let commands = device.command_encoder()?;
    let encoder: &ComputeCommandEncoder = commands.as_ref();
    let size = |width| MTLSize { width, height: 1, depth: 1 };
    for (launch, pipeline) in launches.iter().zip(&compiled) {
        encoder.set_compute_pipeline_state(pipeline);
        let own = arguments.of_launch(launch);
        encoder.set_bytes(0, &own);
        // Candle's encoder separates launches of which one writes what the next one is bound to.
        for (index, field) in A::fields_of(launch.kernel).iter().enumerate() {
            match OperandPlace::of_pointer((field.address)(&own)) {
                // Metal's validation asks for a buffer where the kernel names one.
                OperandPlace::Null => encoder.set_input_buffer(index + 1, Some(any), 0),
                OperandPlace::Input { number, first_byte } => {
                    encoder.set_input_buffer(index + 1, Some(read[number]), first_byte);
                }
                OperandPlace::Output { number } => encoder.set_output_buffer(index + 1, Some(&written[number]), 0),
            }
        }
        encoder.dispatch_thread_groups(size(launch.groups), size(launch.threads));
    }
    drop(commands);

    let outputs = operands.outputs.iter().zip(written);
    Ok(outputs
        .map(|(output, buffer)| {
            let count = output.shape.elem_count();
            let storage = MetalStorage::new(buffer, device.clone(), count, output.dtype);
            Tensor::from_storage(Storage::Metal(storage), output.shape.clone(), BackpropOp::none(), false)
        })
        .collect())
}
