//! The forward pass.

use candle_core::{DType, Result};

use super::arguments::DeltaArguments;
use super::call::{DeltaCall, DeltaChunks, DeltaKernel, DeltaReadings, DeltaResults};
use crate::device::{Buffer, KernelDevice, Operands, Reading};

impl DeltaCall {
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
        {
            let readings = DeltaReadings::new(self);
            let sequences = SequenceReadings::new(&chunks);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(&sizes, &readings, chunks.count);
            add_inputs(&mut arguments, &mut operands, &readings, &sequences)?;
            arguments.output = operands.write("output", &mut output)?;
            arguments.final_states = operands.write("final_states", &mut states)?;
            let grid = self.grid(&sizes, chunks.count);
            if let Some(ChunkScratch { tiles, recurrent_heads }) = &mut scratch {
                arguments.tiles = operands.write("tiles", tiles)?;
                arguments.recurrent_heads = operands.write("recurrent_heads", recurrent_heads)?;
                operands.launch(&program, &specialization.prepare("delta_prepare", grid), &arguments)?;
                operands.launch(&program, &specialization.scan("delta_scan", grid), &arguments)?;
                arguments.only_recurrent_heads = 1;
            }
            operands.launch(&program, &specialization.step(grid), &arguments)?;
        }
        Ok(DeltaResults { output: output.into_storage(), states: states.into_storage() })
    }
}

/// The memory between the kernels over chunks.
struct ChunkScratch {
    tiles: Buffer,
    recurrent_heads: Buffer,
}

/// The tensors of packed sequences while launches read them.
pub(super) struct SequenceReadings<'t> {
    tokens: Option<Reading<'t>>,
    chunks: Option<Reading<'t>>,
}

impl<'t> SequenceReadings<'t> {
    pub fn new(chunks: &'t DeltaChunks) -> Self {
        Self {
            tokens: chunks.cumulative_tokens.as_ref().map(Reading::new),
            chunks: chunks.cumulative_chunks.as_ref().map(Reading::new),
        }
    }
}

/// Sets the addresses of the inputs.
pub(super) fn add_inputs<'a>(
    arguments: &mut DeltaArguments,
    operands: &mut Operands<'a>,
    readings: &'a DeltaReadings,
    sequences: &'a SequenceReadings,
) -> Result<()> {
    arguments.queries = operands.read("queries", &readings.q)?;
    arguments.keys = operands.read("keys", &readings.k)?;
    arguments.values = operands.read("values", &readings.v)?;
    let optional = [
        ("decays", &readings.decay, &mut arguments.decays),
        ("betas", &readings.beta, &mut arguments.betas),
        ("initial_states", &readings.states, &mut arguments.initial_states),
        ("cumulative_tokens", &sequences.tokens, &mut arguments.cumulative_tokens),
        ("cumulative_chunks", &sequences.chunks, &mut arguments.cumulative_chunks),
    ];
    for (name, reading, address) in optional {
        if let Some(reading) = reading {
            *address = operands.read(name, reading)?;
        }
    }
    Ok(())
}
