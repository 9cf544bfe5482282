//! Intel's and AMD's instruction sets.

pub(crate) mod amx;
pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod avx512bf16;
