//! Kernels that are compiled together for one set of constants.

use crate::kernel_struct::StructDefinition;

/// The value of a macro of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Define {
    /// The name of the macro.
    pub name: &'static str,
    /// The value of the macro.
    pub value: i64,
}

/// A kernel of a program, and the threads and the shared memory of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelShape {
    pub name: &'static str,
    pub threads: usize,
    pub shared_bytes: usize,
}

/// A source with the values of its macros.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    /// The file of `kernels/` that includes all others.
    pub root: &'static str,
    /// The struct that is the only argument of each kernel.
    pub arguments: StructDefinition,
    pub defines: Vec<Define>,
}

impl Program {
    /// Returns the options of NVRTC but the architecture.
    pub fn options(&self) -> Vec<String> {
        // 177: a function that a specialisation does not call.
        let mut options = vec!["--std=c++17".to_string(), "--diag-suppress=177".to_string()];
        options.extend(self.define_options());
        options
    }

    /// Returns the options that define the macros.
    pub fn define_options(&self) -> impl Iterator<Item = String> {
        self.defines.iter().map(|define| format!("-D{}={}", define.name, define.value))
    }
}
