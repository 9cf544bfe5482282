//! The machine code of programs: from the cache on disk, or by NVRTC.

use crate::disk_cache::{CacheKey, DiskCache};
use crate::nvrtc::Nvrtc;
use crate::program::Program;
use crate::source;

/// Returns the machine code of a program for an architecture such as `sm_90`.
///
/// # Errors
/// If the program does not compile; the text is the compiler's log.
pub(crate) fn compile(
    nvrtc: &Nvrtc,
    cache: &DiskCache,
    architecture: &str,
    program: &Program,
) -> Result<Vec<u8>, String> {
    let source = source::assemble(program.root);
    let mut options = program.options();
    options.push(format!("--gpu-architecture={architecture}"));
    let compiler = nvrtc.name();
    let key = CacheKey { source: &source, options: &options, compiler: &compiler };
    if let Some(code) = cache.read(&key) {
        return Ok(code);
    }
    let code = nvrtc.compile(&source, &options)?;
    cache.write(&key, &code);
    Ok(code)
}
