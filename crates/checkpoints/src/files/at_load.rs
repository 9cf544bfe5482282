//! Plain weights that are quantised when a layer reads them.

use candle_core::{DType, Device, Result, bail};

use super::Checkpoint;
use super::layers::is_weight;
use super::stored::{StoredEntry, TensorLocation};
use candle_attention_modules::base::{FLOATS, QuantizationFormat, QuantizedWeight};

/// The number of elements that are in f32 at a time.
const CHUNK: usize = 1 << 22;

impl Checkpoint {
    /// Quantises the plain weights of linear layers when a layer reads them: a smaller model, without another tool and
    /// without a second copy. Layers multiply the codes. Biases, norms, and matrices whose inputs are not whole groups
    /// of the format stay as they are, as do weights that are read as tensors.
    ///
    /// ```no_run
    /// use candle_attention::weights::Checkpoint;
    /// use candle_attention::{QuantizationFormat, hf};
    /// use candle_core::{DType, Device};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let json = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
    /// let checkpoint = Checkpoint::open("model")?.with_quantization(QuantizationFormat::Int8)?;
    /// let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?;
    /// let attention = hf::load_attention(&json, 0, vb)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For a checkpoint with quantised weights, and one without a weight whose inputs are whole groups.
    pub fn with_quantization(self, format: QuantizationFormat) -> Result<Self> {
        let is_quantized = |entry: &StoredEntry| matches!(entry, StoredEntry::Quantized { .. });
        if let Some((name, _)) = self.entries.iter().find(|(_, entry)| is_quantized(entry)) {
            bail!("[weights] {name} is quantised already, expected a checkpoint of plain weights")
        }
        let own = Self { quantization: Some(format), ..self };
        if !own.entries.keys().any(|name| own.quantized_at_load(name).is_some()) {
            bail!("[weights] no weight of the checkpoint has floats and inputs in whole groups of {format:?}")
        }
        Ok(own)
    }

    /// Returns the plain weight of a linear layer that is quantised when it is read.
    pub(super) fn quantized_at_load(&self, name: &str) -> Option<AtLoad<'_>> {
        let format = self.quantization?;
        let Some(StoredEntry::Stored(stored)) = self.entry(name) else { return None };
        let &[_, inputs] = stored.shape.as_slice() else { return None };
        let is_whole = inputs > 0 && inputs.is_multiple_of(format.group(inputs));
        (is_weight(name) && is_whole && FLOATS.contains(&stored.dtype)).then_some(AtLoad { stored, format })
    }
}

/// A plain weight that is quantised when it is read.
pub(super) struct AtLoad<'a> {
    stored: &'a TensorLocation,
    format: QuantizationFormat,
}

impl AtLoad<'_> {
    /// Reads and quantises the weight, some rows at a time.
    pub(super) fn read(&self) -> Result<QuantizedWeight> {
        let [outputs, inputs] = self.stored.shape[..] else { bail!("expected a matrix") };
        let step = (CHUNK / inputs).max(1);
        let mut read = Vec::new();
        for start in (0..outputs).step_by(step) {
            let Some(rows) = self.stored.rows(start..outputs.min(start + step)) else {
                let whole = self.stored.read(None, DType::F32, &Device::Cpu)?;
                return QuantizedWeight::quantize(&whole, self.format);
            };
            read.push(QuantizedWeight::quantize(&rows.read(None, DType::F32, &Device::Cpu)?, self.format)?);
        }
        if read.len() == 1 {
            return Ok(read.remove(0));
        }
        match QuantizedWeight::join(&Vec::from_iter(&read)) {
            Some(weight) => Ok(weight),
            None => bail!("expected a weight with outputs"),
        }
    }
}
