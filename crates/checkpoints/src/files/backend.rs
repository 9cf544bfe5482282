//! A builder's source of tensors over a checkpoint.

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;

use super::Checkpoint;
use super::layers::{OF_MLX, is_weight};
use super::quantized::QuantizedEntry;
use super::quantized::float8::ScaleBlock;
use super::stored::{StoredEntry, TensorLocation};
use candle_attention_modules::base::{FLOATS, Fact, QuantizedWeight, SCALES, floats_text, root};

/// Reads a checkpoint's tensors for a `VarBuilder`.
pub(super) struct CheckpointBackend {
    pub checkpoint: Checkpoint,
    /// The safetensors files, if they are mapped into memory.
    pub mapped: Option<MmapedSafetensors>,
}

impl CheckpointBackend {
    /// Reads a tensor in a dtype, floats of a quantised weight dequantised.
    fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.checkpoint.entry(name) {
            Some(StoredEntry::Quantized { weight, unscaled }) => match unscaled {
                Some(stored) if dtype == DType::F8E4M3 => self.read_stored(name, stored, dtype, device),
                _ => {
                    let numbers = read_quantized(name, weight)?.dequantize()?;
                    numbers.reshape(weight.shape.as_slice())?.to_dtype(dtype)?.to_device(device)
                }
            },
            Some(entry) if entry.is_float8() && dtype != DType::F8E4M3 => {
                Err(Error::msg(self.float8_problem(name, entry)))
            }
            _ => self.read_stored(name, self.find(name)?, dtype, device),
        }
    }

    fn find(&self, name: &str) -> Result<&TensorLocation> {
        match self.checkpoint.entry(name) {
            Some(StoredEntry::Stored(stored)) => Ok(stored),
            Some(StoredEntry::Quantized { .. }) => bail!("{name} is quantised, expected a tensor of numbers"),
            Some(StoredEntry::Unreadable { problem, .. }) => Err(Error::msg(format!("{name}: {problem}"))),
            None => {
                // The reader of a layer finds the hint as the context of the cause.
                let missing = Error::CannotFindTensor { path: name.to_string() };
                Err(missing.context(self.checkpoint.hint(name)).context(format!("[weights] {name} is missing")))
            }
        }
    }

    /// Refuses the weight of a quantised layer, and integers, where the builder returns floats.
    fn refuse_quantized(&self, name: &str, dtype: DType) -> Result<()> {
        if !FLOATS.contains(&dtype) {
            return Ok(());
        }
        if let Some(entry) = self.checkpoint.entry(name).filter(|entry| entry.is_float8())
            && SCALES.iter().any(|suffix| self.checkpoint.entry(&format!("{name}{suffix}")).is_some())
        {
            return Err(Error::msg(self.float8_problem(name, entry)));
        }
        if let Some(found) = self.checkpoint.quantized(name) {
            bail!("{name} {found}")
        }
        match self.checkpoint.entry(name) {
            Some(StoredEntry::Stored(stored)) if is_weight(name) && self.checkpoint.has_integers(name) => {
                let own = stored.dtype;
                bail!("{name} has dtype {own:?}, expected a weight of floats; a builder of {own:?} returns integers")
            }
            _ => Ok(()),
        }
    }

    fn read_stored(&self, name: &str, stored: &TensorLocation, dtype: DType, device: &Device) -> Result<Tensor> {
        if dtype == DType::F64 && device.is_metal() {
            bail!("{name} is read as F64, expected {}", floats_text(device))
        }
        let view = self.mapped.as_ref().and_then(|mapped| mapped.get(name).ok());
        stored.read(view.as_ref().map(|view| view.data()), dtype, device)
    }

    /// Returns why floats of 8 bits without a scale, or with one that does not fit, are not read as other floats.
    fn float8_problem(&self, name: &str, entry: &StoredEntry) -> String {
        let named = SCALES.map(|suffix| format!("{name}{suffix}"));
        let scale = named.iter().find_map(|scale| Some((scale, self.checkpoint.entry(scale)?.shape()?)));
        match (scale, entry) {
            (Some((scale, shape)), _) => {
                let ScaleBlock { rows, columns } = self.checkpoint.block();
                format!(
                    "{name} is float8 of shape {:?} and {scale} has shape {shape:?}, expected one number, one for each \
                     row, or one for each block of {rows} by {columns}",
                    entry.shape().unwrap_or_default()
                )
            }
            (None, StoredEntry::Unreadable { problem, .. }) => format!("{name}: {problem}"),
            (None, _) => format!(
                "{name} is float8, and the file has no {} for it; a builder of F8E4M3 returns weights as stored",
                named.join(" or ")
            ),
        }
    }
}

fn read_quantized(name: &str, entry: &QuantizedEntry) -> Result<QuantizedWeight> {
    entry.read().map_err(|error| Error::msg(format!("{name} is quantised, and cannot be read: {}", root(&error))))
}

impl SimpleBackend for CheckpointBackend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.refuse_quantized(name, dtype)?;
        if let Some(got) = self.checkpoint.entry(name).and_then(StoredEntry::shape)
            && got != shape.dims()
        {
            let msg = format!("shape mismatch for {name}");
            let mismatch = Error::UnexpectedShape { msg, expected: shape, got: got.into() }.bt();
            return Err(if self.checkpoint.origin.is_of_mlx { mismatch.context(OF_MLX) } else { mismatch });
        }
        self.read(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(weight) = Fact::weight_of_codes(name) {
            return match (self.checkpoint.entry(weight), self.checkpoint.quantized_at_load(weight)) {
                (Some(StoredEntry::Quantized { weight: entry, .. }), _) => read_quantized(weight, entry)?.into_tensor(),
                (_, Some(plain)) => plain.read()?.into_tensor(),
                _ => bail!("{weight} is not quantised"),
            };
        }
        self.refuse_quantized(name, dtype)?;
        self.read(name, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let origin = self.checkpoint.origin;
        if let Some(weight) = Fact::weight_of_codes(name) {
            return match self.checkpoint.entry(weight) {
                Some(StoredEntry::Quantized { weight: own, .. }) => own.shape.len() == 2,
                _ => self.checkpoint.quantized_at_load(weight).is_some(),
            };
        }
        if let Some(tensor) = Fact::tensor_of_integers(name) {
            return self.checkpoint.has_integers(tensor);
        }
        match Fact::ALL.into_iter().find(|fact| fact.name() == name) {
            None => self.checkpoint.contains(name),
            Some(Fact::Opened) => true,
            Some(Fact::WrittenByMlx) => origin.is_of_mlx,
            Some(Fact::NormsAsInPyTorch) => origin.norms_as_in_pytorch,
        }
    }
}
