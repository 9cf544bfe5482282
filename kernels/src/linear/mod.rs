//! Products of rows with a packed weight.

mod pack;
mod product;
#[cfg(test)]
mod tests;
mod weight;

pub use product::Projection;
pub use weight::{Packable, PackedWeight};
