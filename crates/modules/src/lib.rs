#![doc = include_str!("../README.md")]

pub mod base;
mod cuda_gate;
pub mod gate;
pub mod ggml;
pub mod init;
pub mod linear;
pub mod norm;

/// Logs a warning the first time that this place is reached. The caller depends on `log`.
#[macro_export]
macro_rules! warn_once {
    ($($message:tt)+) => {{
        static LOGGED: std::sync::Once = std::sync::Once::new();
        LOGGED.call_once(|| log::warn!($($message)+));
    }};
}
