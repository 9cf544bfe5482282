//! The machine code of programs: from the cache on disk, or by NVRTC.

use crate::disk_cache::{CacheKey, DiskCache};
use crate::failure::Failure;
use crate::nvrtc::Nvrtc;
use crate::program::Program;
use crate::source;

/// Returns the machine code of a program for an architecture such as `sm_90`.
///
/// # Errors
/// If the program does not compile.
pub(crate) fn compile(
    nvrtc: &Nvrtc,
    cache: &DiskCache,
    architecture: &str,
    program: &Program,
) -> Result<Vec<u8>, Failure> {
    compile_source(nvrtc, cache, architecture, &source::assemble(program.root, &program.arguments), program.options())
}

/// Returns the machine code of an empty kernel, by which the compiler and the driver are tried.
///
/// # Errors
/// If it does not compile: then no other kernel would.
#[cfg(feature = "cuda")]
pub(crate) fn compile_empty_kernel(nvrtc: &Nvrtc, cache: &DiskCache, architecture: &str) -> Result<Vec<u8>, Failure> {
    let source = "extern \"C\" __global__ void empty() {}\n";
    compile_source(nvrtc, cache, architecture, source, Vec::new())
}

fn compile_source(
    nvrtc: &Nvrtc,
    cache: &DiskCache,
    architecture: &str,
    source: &str,
    mut options: Vec<String>,
) -> Result<Vec<u8>, Failure> {
    options.push(format!("--gpu-architecture={architecture}"));
    let compiler = nvrtc.name();
    let key = CacheKey { source, options: &options, compiler: &compiler };
    if let Some(code) = cache.read(&key) {
        return Ok(code);
    }
    let code = nvrtc.compile(source, &options)?;
    cache.write(&key, &code);
    Ok(code)
}
