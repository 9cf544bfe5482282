//! The forward pass.

use candle_core::{DType, Result};

use super::call::{CudaDeltaCall, DeltaKernel, DeltaResults};
use crate::device::{DeviceBuffer, KernelDevice, Operands, TensorLocks};

impl CudaDeltaCall {
    /// Computes the attention output and the states after the last tokens.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self) -> Result<DeltaResults> {
        let sizes = self.sizes()?;
        let kernel = self.plan()?;
        let device = KernelDevice::of(self.q.device())?;
        let specialization = self.specialization(&device, false)?;
        let program = device.load(&specialization.program())?;
        let chunks = self.chunks(&sizes, specialization.chunk)?;
        let rows = sizes.b * sizes.t * self.heads;
        let state_len = sizes.n * self.heads * sizes.d_k * sizes.d_v;
        let mut output = device.uninitialized(self.q.dtype(), rows * sizes.d_v)?;
        let mut states = device.uninitialized(DType::F32, state_len)?;
        let mut scratch = match kernel {
            DeltaKernel::Steps => None,
            DeltaKernel::Chunks => Some(ChunkScratch {
                tiles: device.uninitialized(DType::F32, chunks.count * self.heads * specialization.tile_len())?,
                recurrent_heads: device.zeros(DType::I32, sizes.n * self.heads)?,
            }),
        };

        let locks = TensorLocks::default();
        let mut operands = Operands::new(&device, &locks);
        let mut arguments = self.arguments(&sizes, &chunks, &mut operands)?;
        arguments.output = operands.output("output", &mut output)?;
        arguments.final_states = operands.output("final_states", &mut states)?;
        let grid = self.grid(&sizes, chunks.count);
        if let Some(ChunkScratch { tiles, recurrent_heads }) = &mut scratch {
            arguments.tiles = operands.output("tiles", tiles)?;
            arguments.recurrent_heads = operands.output("recurrent_heads", recurrent_heads)?;
            operands.launch(&program, &specialization.prepare("delta_prepare", grid), &arguments)?;
            operands.launch(&program, &specialization.scan("delta_scan", grid), &arguments)?;
            arguments.only_recurrent_heads = 1;
        }
        operands.launch(&program, &specialization.step(grid), &arguments)?;
        operands.finish();
        Ok(DeltaResults { output: output.into_storage(), states: states.into_storage() })
    }
}

/// The memory between the kernels over chunks.
struct ChunkScratch {
    tiles: DeviceBuffer,
    recurrent_heads: DeviceBuffer,
}
