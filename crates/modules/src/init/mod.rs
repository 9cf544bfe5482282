//! PyTorch's seeded initialisation on the CPU, as a backend of [`VarBuilder`].
//!
//! `torch.manual_seed(123)` fixes the parameters of a tutorial. [`TorchSeed`] draws the same parameters, bit for bit,
//! on any machine, if they are requested in the order in which PyTorch's modules draw them:
//!
//! ```
//! use candle_attention::init::TorchSeed;
//! use candle_core::{DType, Device};
//!
//! # fn main() -> candle_core::Result<()> {
//! // torch.manual_seed(123); linear = torch.nn.Linear(3, 2)
//! let seed = TorchSeed::new(123);
//! let linear = candle_nn::linear(3, 2, seed.var_builder(DType::F32, &Device::Cpu))?;
//! let weight = [[-0.23542964, 0.019124476, -0.28674594], [0.21772662, -0.4919342, 0.42322308]];
//! assert_eq!(linear.weight().to_vec2::<f32>()?, weight);
//! # Ok(())
//! # }
//! ```
//!
//! The reference is PyTorch 2.15 on x86 with its AVX2 or AVX-512 kernels, which agree. PyTorch's scalar kernels
//! (`ATEN_CPU_CAPABILITY=default`) differ in the last digits.
//!
//! The tensors are constants. To train from them, copy them into a [`VarMap`](candle_nn::VarMap): for each of its
//! variables, `var.set(&vb.get_unchecked(name)?)` with the builder from which a model of the same names was built.

mod generator;

use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use generator::Generator;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::{filled, number, to_device};

/// PyTorch's CPU generator after `torch.manual_seed(seed)`, with the parameters drawn from it so far.
///
/// A clone is another handle to the same generator: a `VarBuilder`, [`rand`](Self::rand) and
/// [`dropout_keep`](Self::dropout_keep) draw in turn from one stream, as in a PyTorch program.
///
/// As a backend it draws Candle's hints as PyTorch's initialisers, in f32 on the CPU, and converts the result:
///
/// | hint | drawn as |
/// | --- | --- |
/// | `Const` | nothing is drawn |
/// | `Uniform { lo, up }` | `uniform_(lo, up)`; equal bounds draw too, and return that bound |
/// | `Randn { mean, stdev }` | `normal_(mean, stdev)` |
/// | [`DEFAULT_KAIMING_NORMAL`](candle_nn::init::DEFAULT_KAIMING_NORMAL) | `torch.nn.Linear`'s weight, uniform within ±1/sqrt(fan in): this is the hint of `candle_nn::linear` and of Candle's convolutions |
/// | other `Kaiming`, uniform | uniform within ±sqrt(3) · gain / sqrt(fan) |
/// | other `Kaiming`, normal | `normal_(0, gain / sqrt(fan))`; with the fan in and gain of the default this is `Randn` |
///
/// A name that was drawn before returns the same tensor again, with any hint, so that tied weights work. The f32
/// originals stay in memory until the last handle and the last `VarBuilder` are dropped.
#[derive(Clone)]
pub struct TorchSeed {
    state: Arc<Mutex<DrawnState>>,
}

struct DrawnState {
    generator: Generator,
    parameters: HashMap<String, DrawnParameter>,
}

/// A drawn parameter, exact and as it was last requested, so that tied weights share one tensor.
struct DrawnParameter {
    exact: Tensor,
    served: Tensor,
}

impl TorchSeed {
    /// Creates the generator of `torch.manual_seed(seed)`. PyTorch uses the low 32 bits.
    pub fn new(seed: u64) -> Self {
        let state = DrawnState { generator: Generator::new(seed), parameters: HashMap::new() };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// Restarts the stream of all handles, as `torch.manual_seed(seed)` does in the middle of a program. Drawn
    /// parameters keep their values.
    pub fn manual_seed(&self, seed: u64) {
        self.lock().generator = Generator::new(seed);
    }

    /// Returns a builder that draws each parameter at its first request and returns it in `dtype` on `device`.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, device.clone())
    }

    /// Draws `torch.rand(shape)`: uniform on [0, 1), in f32 on the CPU.
    ///
    /// # Errors
    ///
    /// If `shape` has more elements than memory can hold.
    pub fn rand<S: Into<Shape>>(&self, shape: S) -> Result<Tensor> {
        self.lock().generator.draw("[rand]", Init::Uniform { lo: 0.0, up: 1.0 }, &shape.into())
    }

    /// Draws `torch.randn(shape)`: mean 0 and standard deviation 1, in f32 on the CPU.
    ///
    /// # Errors
    ///
    /// If `shape` has more elements than memory can hold.
    pub fn randn<S: Into<Shape>>(&self, shape: S) -> Result<Tensor> {
        self.lock().generator.draw("[randn]", Init::Randn { mean: 0.0, stdev: 1.0 }, &shape.into())
    }

    /// Draws the mask of `torch.nn.Dropout(p)` in train mode: u8 on the CPU, 1 = kept. PyTorch divides the kept values
    /// by `1 - p`. For `p` of 0 or 1 all or no elements are kept, and nothing is drawn, as in PyTorch.
    ///
    /// The masks equal PyTorch's Bernoulli kernel, which 2.15 runs on AMD and Intel processors. Older releases with
    /// MKL drew other masks on Intel processors from the same seed.
    ///
    /// # Errors
    ///
    /// If `p` is not between 0 and 1, or if `shape` has more elements than memory can hold.
    pub fn dropout_keep<S: Into<Shape>>(&self, shape: S, p: f64) -> Result<Tensor> {
        number::probability("dropout_keep", "p", p)?;
        let shape = shape.into();
        let mut keep = buffer("[dropout_keep]", &shape, u8::from(p == 0.0))?;
        if p > 0.0 && p < 1.0 {
            let generator = &mut self.lock().generator;
            keep.fill_with(|| generator.bernoulli(1.0 - p));
        }
        Tensor::from_vec(keep, shape, &Device::Cpu)
    }

    /// Locks the state. A thread that panicked while it held the lock had drawn whole numbers, so the
    /// generator is valid.
    fn lock(&self) -> MutexGuard<'_, DrawnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for TorchSeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TorchSeed").finish_non_exhaustive()
    }
}

impl SimpleBackend for TorchSeed {
    fn get(&self, shape: Shape, name: &str, hint: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if !dtype.is_float() {
            bail!("[torch_seed] parameter `{name}` is requested in {dtype:?}, expected a float")
        }
        let mut state = self.lock();
        let DrawnState { generator, parameters } = &mut *state;
        let parameter = match parameters.entry(name.to_string()) {
            Entry::Occupied(entry) => {
                let drawn = entry.get().exact.shape();
                if *drawn != shape {
                    bail!(
                        "[torch_seed] parameter `{name}` is requested with shape {shape:?}, but was drawn with \
                         {drawn:?}"
                    )
                }
                entry.into_mut()
            }
            Entry::Vacant(entry) => {
                let exact = generator.draw(&format!("[torch_seed] parameter `{name}`:"), hint, &shape)?;
                entry.insert(DrawnParameter { served: exact.clone(), exact })
            }
        };
        parameter.serve(dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.lock().parameters.get_mut(name) {
            Some(parameter) => parameter.serve(dtype, device),
            None => bail!("[torch_seed] parameter `{name}` is not drawn yet, expected a `get` with its shape first"),
        }
    }

    /// Returns whether `name` has been drawn.
    fn contains_tensor(&self, name: &str) -> bool {
        self.lock().parameters.contains_key(name)
    }
}

impl DrawnParameter {
    fn serve(&mut self, dtype: DType, device: &Device) -> Result<Tensor> {
        if self.served.dtype() != dtype || !self.served.device().same_device(device) {
            self.served = to_device(&self.exact.to_dtype(dtype)?, device)?;
        }
        Ok(self.served.clone())
    }
}

/// Allocates the numbers of a tensor. `what` begins the error text.
fn buffer<T: Copy>(what: &str, shape: &Shape, value: T) -> Result<Vec<T>> {
    match filled(shape.dims(), value) {
        Some(values) => Ok(values),
        None => bail!("{what} shape {shape:?} has more elements than memory can hold"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torch_seed_after_a_panic_in_another_thread_draws_on() -> Result<()> {
        let seed = TorchSeed::new(1);
        let other = seed.clone();
        let panicked = std::thread::spawn(move || {
            let _state = other.lock();
            panic!("with the lock held");
        });
        assert!(panicked.join().is_err() && seed.state.is_poisoned());
        assert_eq!(seed.rand(3)?.to_vec1::<f32>()?, TorchSeed::new(1).rand(3)?.to_vec1::<f32>()?);
        Ok(())
    }
}
