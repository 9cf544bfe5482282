//! The programs that continuous integration compiles, since it has no GPU: the ones that users get, by the same
//! functions.

use crate::kernel_struct::{StructDefinition, StructHeader};
use crate::program::{KernelShape, Program};
use crate::source;

/// A program that a device of some compute capability runs.
#[derive(Debug, Clone)]
pub struct CiProgram {
    /// The name of the source.
    pub source: &'static str,
    /// The name of the program, which no other program of the capability has.
    pub name: String,
    /// The options of NVRTC but the architecture.
    pub options: Vec<String>,
    /// Whether it is one of the few that have every kernel and every element type.
    pub is_quick: bool,
    /// The kernels.
    pub kernels: Vec<CiKernel>,
    arguments: StructDefinition,
}

/// A kernel of a program.
#[derive(Debug, Clone)]
pub struct CiKernel {
    /// The name in the source.
    pub name: &'static str,
    /// The number of threads of a block.
    pub threads: usize,
    /// The dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl CiProgram {
    pub(crate) fn new(program: &Program, name: String, is_quick: bool, kernels: Vec<KernelShape>) -> Self {
        let kernels = kernels.into_iter().map(|kernel| CiKernel {
            name: kernel.name,
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
        });
        Self {
            source: program.root,
            name,
            options: program.options(),
            is_quick,
            kernels: kernels.collect(),
            arguments: program.arguments,
        }
    }

    /// Returns the text of the source, as NVRTC compiles it.
    pub fn source_text(&self) -> String {
        source::assemble(self.source, &self.arguments)
    }

    /// Returns the headers that are printed from structs in Rust.
    pub(crate) fn headers(&self) -> Vec<StructHeader> {
        self.arguments.headers()
    }
}
