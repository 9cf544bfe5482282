#![doc = include_str!("../README.md")]

mod net;
mod rule;

pub use net::{DeltaCache, DeltaInput, DeltaLayout, GatedDeltaNet, GatedDeltaNetConfig};
pub use rule::{DeltaOptions, gated_delta_rule, gated_delta_rule_varlen};
