//! `TorchSeed` against PyTorch 2.15: literals with the snippet that made them. `tests/golden` draws whole layers.

mod backend;
mod draws;

use candle_nn::Init;
use sha2::{Digest, Sha256};

use crate::*;

const STANDARD_NORMAL: Init = Init::Randn { mean: 0.0, stdev: 1.0 };

/// Hashes the elements in row-major order as little-endian f32 with SHA-256.
fn sha256(tensor: &Tensor) -> Result<String> {
    let values = tensor.flatten_all()?.to_vec1::<f32>()?;
    Ok(sha256_of_bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()))
}

fn sha256_of_bytes(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
