#![doc = include_str!("../README.md")]

pub mod base;
mod cuda_gate;
pub mod gate;
pub mod ggml;
pub mod init;
pub mod linear;
mod metal_rows;
pub mod norm;
#[cfg(test)]
mod tests;

/// Internals that other packages of the workspace use. They are not covered by semantic versioning.
#[doc(hidden)]
pub mod internal {
    use crate::base::first_use::FirstUseCase;
    use crate::cuda_gate::GATE_CASE;
    use crate::linear::{CODES_CASE, METAL_CODES_CASE, METAL_LINEAR_CASE, ROWS_CASE};
    use crate::metal_rows::METAL_GATE_CASE;
    use crate::norm::{GATED_NORM_CASE, METAL_GATED_NORM_CASE, METAL_NORM_CASE, NORM_CASE};

    pub use crate::metal_rows::run_checked;

    /// The cases that check this package's kernels.
    pub const FIRST_USE_CASES: [FirstUseCase; 5] = [NORM_CASE, GATED_NORM_CASE, GATE_CASE, ROWS_CASE, CODES_CASE];

    /// The cases that check this package's Metal kernels.
    pub const METAL_CASES: [FirstUseCase; 5] =
        [METAL_NORM_CASE, METAL_GATE_CASE, METAL_LINEAR_CASE, METAL_CODES_CASE, METAL_GATED_NORM_CASE];
}

/// Logs a warning the first time that this place is reached. The caller depends on `log`.
#[macro_export]
macro_rules! warn_once {
    ($($message:tt)+) => {{
        static LOGGED: std::sync::Once = std::sync::Once::new();
        LOGGED.call_once(|| log::warn!($($message)+));
    }};
}
