//! The backward pass. It computes the states before all chunks anew, so that a forward pass keeps nothing.

use candle_core::{DType, Result, Tensor};

use super::arguments::DeltaArguments;
use super::call::{CudaDeltaCall, CudaDeltaGradients, DeltaSizes, row_strides};
use super::specialization::DeltaSpecialization;
use crate::device::{DeviceBuffer, KernelDevice, Operands, TensorLocks};

/// The memory that the kernels write: the gradients and scratch.
struct BackwardBuffers {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    decay: Option<DeviceBuffer>,
    beta: Option<DeviceBuffer>,
    states: DeviceBuffer,
    tiles: DeviceBuffer,
    recurrent_heads: DeviceBuffer,
    chunk_states: DeviceBuffer,
    chunk_state_gradients: DeviceBuffer,
    errors: DeviceBuffer,
    error_gradients: DeviceBuffer,
}

impl BackwardBuffers {
    fn new(
        call: &CudaDeltaCall,
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

    /// Sets the addresses of the memory.
    fn set_arguments<'a>(&'a mut self, operands: &mut Operands<'a, '_>, arguments: &mut DeltaArguments) -> Result<()> {
        arguments.query_gradient = operands.output("query_gradient", &mut self.q)?;
        arguments.key_gradient = operands.output("key_gradient", &mut self.k)?;
        arguments.value_gradient = operands.output("value_gradient", &mut self.v)?;
        arguments.decay_gradient = operands.optional_output("decay_gradient", self.decay.as_mut())?;
        arguments.beta_gradient = operands.optional_output("beta_gradient", self.beta.as_mut())?;
        arguments.initial_state_gradient = operands.output("initial_state_gradient", &mut self.states)?;
        arguments.tiles = operands.output("tiles", &mut self.tiles)?;
        arguments.recurrent_heads = operands.output("recurrent_heads", &mut self.recurrent_heads)?;
        arguments.chunk_states = operands.output("chunk_states", &mut self.chunk_states)?;
        arguments.chunk_state_gradients = operands.output("chunk_state_gradients", &mut self.chunk_state_gradients)?;
        arguments.errors = operands.output("errors", &mut self.errors)?;
        arguments.error_gradients = operands.output("error_gradients", &mut self.error_gradients)?;
        Ok(())
    }

    fn into_gradients(self, call: &CudaDeltaCall, sizes: &DeltaSizes) -> Result<CudaDeltaGradients> {
        let DeltaSizes { b, t, n, d_k, d_v, .. } = *sizes;
        let h = call.heads;
        let like = |buffer: Option<DeviceBuffer>, input: &Option<Tensor>| match (buffer, input) {
            (Some(buffer), Some(input)) => buffer.into_tensor(input.shape()).map(Some),
            _ => Ok(None),
        };
        Ok(CudaDeltaGradients {
            q: self.q.into_tensor((b, h, t, d_k))?,
            k: self.k.into_tensor((b, h, t, d_k))?,
            v: self.v.into_tensor((b, h, t, d_v))?,
            decay: like(self.decay, &call.decay)?,
            beta: like(self.beta, &call.beta)?,
            states: self.states.into_tensor((n, h, d_k, d_v))?,
        })
    }
}

impl CudaDeltaCall {
    /// Computes the gradients of all inputs from the gradient of the output, (B, H, T, D_v) in q's dtype with
    /// contiguous rows, and from that of the states after the last tokens, (N, H, D_k, D_v), contiguous, f32, if a loss
    /// depends on them. Memory is O(T) for a head.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn backward(&self, output_gradient: &Tensor, states_gradient: Option<&Tensor>) -> Result<CudaDeltaGradients> {
        let sizes = self.sizes()?;
        self.check_gradients(&sizes, output_gradient, states_gradient)?;
        self.plan_backward()?;
        let device = KernelDevice::of(self.q.device())?;
        let specialization = self.specialization(&device, true)?;
        let program = device.load(&specialization.program())?;
        let chunks = self.chunks(&sizes, specialization.chunk)?;
        let mut buffers = BackwardBuffers::new(self, &device, &specialization, &sizes, chunks.count)?;

        let locks = TensorLocks::default();
        let mut operands = Operands::new(&device, &locks);
        let mut arguments = self.arguments(&sizes, &chunks, &mut operands)?;
        arguments.output_gradient = operands.input("output_gradient", output_gradient)?;
        arguments.output_gradient_strides = row_strides(output_gradient);
        arguments.final_state_gradient = operands.optional_input("final_state_gradient", states_gradient)?;
        buffers.set_arguments(&mut operands, &mut arguments)?;

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
        operands.finish();
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
