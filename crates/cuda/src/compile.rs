//! The machine code of programs: from the cache on disk, or by NVRTC.

use candle_attention_device::{DiskCache, Failure, Fnv};

use crate::nvrtc::Nvrtc;
use crate::program::Program;
use crate::source;

/// Everything on which a compiled program depends.
struct CacheKey<'a> {
    /// The source as the compiler reads it.
    source: &'a str,
    /// The compiler's options, with the architecture.
    options: &'a [String],
    /// The name and the version of the compiler.
    compiler: &'a str,
}

impl CacheKey<'_> {
    /// Returns the name of the program's file.
    fn file_name(&self) -> String {
        let mut hash = Fnv::new();
        hash.add_text(self.compiler);
        for option in self.options {
            hash.add_text(option);
        }
        hash.add_text(self.source);
        format!("{:032x}.cubin", hash.value())
    }
}

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
    let name = CacheKey { source, options: &options, compiler: &compiler }.file_name();
    cache.read_or_make(&name, || nvrtc.compile(source, &options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_name_of_compiled_program_depends_on_source_options_and_compiler() {
        let options = ["-DA=1".to_string(), "-DB=2".to_string()];
        let key = CacheKey { source: "source", options: &options, compiler: "test 1.0" };
        let others = [
            CacheKey { source: "source ", ..key },
            CacheKey { options: &options[..1], ..key },
            CacheKey { compiler: "test 1.1", ..key },
        ];
        for other in others {
            assert_ne!(other.file_name(), key.file_name());
        }
    }
}
