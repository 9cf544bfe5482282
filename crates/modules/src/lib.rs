#![doc = include_str!("../README.md")]

pub mod base;
mod cuda_gate;
pub mod gate;
pub mod init;
pub mod linear;
pub mod norm;
