//! The backward pass. It computes the states before all chunks anew, so that a forward pass keeps nothing.

use candle_core::{DType, Result, Tensor};

use super::call::{DeltaCall, DeltaGradients, DeltaReadings, DeltaSizes, row_strides};
use super::forward::{SequenceReadings, add_inputs};
use super::specialization::DeltaSpecialization;
use crate::device::{Buffer, KernelDevice, Operands, Reading};

/// The memory that the kernels write: the gradients and scratch.
struct BackwardBuffers {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    decay: Option<Buffer>,
    beta: Option<Buffer>,
    states: Buffer,
    tiles: Buffer,
    recurrent_heads: Buffer,
    chunk_states: Buffer,
    chunk_state_gradients: Buffer,
    errors: Buffer,
    error_gradients: Buffer,
}

impl BackwardBuffers {
    fn new(
        call: &DeltaCall,
        device: &KernelDevice,
        specialization: &DeltaSpecialization,
        sizes: &DeltaSizes,
        chunks: usize,
    ) -> Result<Self> {
        let rows = sizes.b * sizes.t * call.heads;
        let tiles = chunks * call.heads;
        let (key_columns, value_columns) = (specialization.key_columns(), specialization.value_columns());
        let numbers = |count: usize| device.uninitialized(DType::F32, count);
        Ok(Self {
            q: numbers(rows * sizes.d_k)?,
            k: numbers(rows * sizes.d_k)?,
            v: numbers(rows * sizes.d_v)?,
            decay: call.decay.as_ref().map(|decay| numbers(decay.elem_count())).transpose()?,
            beta: call.beta.as_ref().map(|beta| numbers(beta.elem_count())).transpose()?,
            states: numbers(sizes.n * call.heads * sizes.d_k * sizes.d_v)?,
            tiles: numbers(tiles * specialization.tile_len())?,
            recurrent_heads: device.zeros(DType::I32, sizes.n * call.heads)?,
            chunk_states: numbers(tiles * key_columns * value_columns)?,
            chunk_state_gradients: numbers(tiles * key_columns * value_columns)?,
            errors: numbers(tiles * specialization.chunk * value_columns)?,
            error_gradients: numbers(tiles * specialization.chunk * value_columns)?,
        })
    }

    fn into_gradients(self, call: &DeltaCall, sizes: &DeltaSizes) -> Result<DeltaGradients> {
        let DeltaSizes { b, t, n, d_k, d_v, .. } = *sizes;
        let h = call.heads;
        let like = |buffer: Option<Buffer>, input: &Option<Tensor>| match (buffer, input) {
            (Some(buffer), Some(input)) => buffer.into_tensor(input.shape()).map(Some),
            _ => Ok(None),
        };
        Ok(DeltaGradients {
            q: self.q.into_tensor((b, h, t, d_k))?,
            k: self.k.into_tensor((b, h, t, d_k))?,
            v: self.v.into_tensor((b, h, t, d_v))?,
            decay: like(self.decay, &call.decay)?,
            beta: like(self.beta, &call.beta)?,
            states: self.states.into_tensor((n, h, d_k, d_v))?,
        })
    }
}

impl DeltaCall {
    /// Computes the gradients of all inputs from the gradient of the output, (B, H, T, D_v) in q's dtype with
    /// contiguous rows, and from that of the states after the last tokens, (N, H, D_k, D_v), contiguous, f32, if a loss
    /// depends on them. Memory is O(T) for a head.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn backward(&self, output_gradient: &Tensor, states_gradient: Option<&Tensor>) -> Result<DeltaGradients> {
        let sizes = self.sizes()?;
        self.check_gradients(&sizes, output_gradient, states_gradient)?;
        self.plan_backward()?;
        let device = KernelDevice::of(self.q.device())?;
        let specialization = self.specialization(&device, true)?;
        let program = device.load(&specialization.program())?;
        let chunks = self.chunks(&sizes, specialization.chunk)?;
        let mut buffers = BackwardBuffers::new(self, &device, &specialization, &sizes, chunks.count)?;
        {
            let readings = DeltaReadings::new(self);
            let sequences = SequenceReadings::new(&chunks);
            let output_reading = Reading::new(output_gradient);
            let states_reading = states_gradient.map(Reading::new);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(&sizes, &readings, chunks.count);
            add_inputs(&mut arguments, &mut operands, &readings, &sequences)?;
            arguments.output_gradient = operands.read("output_gradient", &output_reading)?;
            arguments.output_gradient_strides = row_strides(&output_reading);
            if let Some(reading) = &states_reading {
                arguments.final_state_gradient = operands.read("final_state_gradient", reading)?;
            }
            arguments.query_gradient = operands.write("query_gradient", &mut buffers.q)?;
            arguments.key_gradient = operands.write("key_gradient", &mut buffers.k)?;
            arguments.value_gradient = operands.write("value_gradient", &mut buffers.v)?;
            if let Some(decay) = &mut buffers.decay {
                arguments.decay_gradient = operands.write("decay_gradient", decay)?;
            }
            if let Some(beta) = &mut buffers.beta {
                arguments.beta_gradient = operands.write("beta_gradient", beta)?;
            }
            arguments.initial_state_gradient = operands.write("initial_state_gradient", &mut buffers.states)?;
            arguments.tiles = operands.write("tiles", &mut buffers.tiles)?;
            arguments.recurrent_heads = operands.write("recurrent_heads", &mut buffers.recurrent_heads)?;
            arguments.chunk_states = operands.write("chunk_states", &mut buffers.chunk_states)?;
            let of_states = operands.write("chunk_state_gradients", &mut buffers.chunk_state_gradients)?;
            arguments.chunk_state_gradients = of_states;
            arguments.errors = operands.write("errors", &mut buffers.errors)?;
            arguments.error_gradients = operands.write("error_gradients", &mut buffers.error_gradients)?;

            arguments.only_recurrent_heads = 1;
            let grid = self.grid(&sizes, chunks.count);
            for launch in [
                specialization.prepare("delta_prepare", grid),
                specialization.scan("delta_scan", grid),
                specialization.step(grid),
                specialization.prepare("delta_prepare_backward", grid),
                specialization.scan("delta_scan_backward", grid),
                specialization.gradients(grid),
                specialization.step_backward(grid),
            ] {
                operands.launch(&program, &launch, &arguments)?;
            }
        }
        buffers.into_gradients(self, &sizes)
    }

    fn check_gradients(
        &self,
        sizes: &DeltaSizes,
        output_gradient: &Tensor,
        states_gradient: Option<&Tensor>,
    ) -> Result<()> {
        let DeltaSizes { b, t, n, d_k, d_v, .. } = *sizes;
        super::call::check_tensor("the output's gradient", output_gradient, &[b, self.heads, t, d_v], self.q.dtype())?;
        let Some(states_gradient) = states_gradient else { return Ok(()) };
        super::call::check_tensor("the states' gradient", states_gradient, &[n, self.heads, d_k, d_v], DType::F32)?;
        if !states_gradient.is_contiguous() {
            let strides = states_gradient.stride();
            candle_core::bail!(
                "[gated_delta_rule] the states' gradient has the strides {strides:?}, expected contiguous ones"
            )
        }
        Ok(())
    }
}
