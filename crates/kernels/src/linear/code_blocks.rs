//! Packing of a weight of codes some outputs at a time.

use super::code_packing::CodePacking;
use super::codes::Codes;
use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{Format, InstructionSet, SharedPtr, WorkSize, Workers, for_each_index, kernel_layout};
use crate::error::{Error, check_instruction_set};

/// Packs a weight of codes some outputs at a time, so that a byte for each code of a large weight is never in memory at
/// once.
///
/// ```
/// use candle_attention_kernels::{InstructionSet, linear::{CodePacker, Codes, PackedWeight, Scales, Values, WeightShape}};
/// use half::f16;
///
/// let inputs = 32;
/// let scales = vec![f16::from_f32(0.5); 40];
/// let bytes: Vec<u8> = (0..40 * inputs).map(|n| (n % 16) as u8).collect();
/// let rows = |outputs: std::ops::Range<usize>| Codes {
///     bits: 4,
///     codes: &bytes[outputs.start * inputs..outputs.end * inputs],
///     group: 32,
///     values: Values::Signed,
///     scales: Scales::F16(&scales[outputs]),
/// };
///
/// let shape = WeightShape { outputs: 40, inputs };
/// let mut packer = CodePacker::new(shape, InstructionSet::Scalar)?;
/// let step = packer.outputs_step();
/// for start in (0..40).step_by(step) {
///     assert!(packer.push(&rows(start..40.min(start + step)))?);
/// }
/// let packed = packer.finish()?.expect("codes that are packed");
/// let whole = PackedWeight::from_codes(&rows(0..40), shape, InstructionSet::Scalar)?.expect("codes that are packed");
/// assert_eq!(packed.unpack::<f32>()?, whole.unpack::<f32>()?);
/// # Ok::<(), candle_attention_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct CodePacker {
    shape: WeightShape,
    instruction_set: InstructionSet,
    /// The number of outputs of a panel.
    panel: usize,
    /// The weight, in the format of the first outputs.
    weight: Option<PackedWeight>,
    /// The number of outputs that were packed.
    outputs: usize,
}

impl CodePacker {
    /// Creates a packer of a weight for products on an instruction set.
    ///
    /// # Errors
    /// [`Error::InstructionSet`] if the processor lacks the instruction set.
    pub fn new(shape: WeightShape, instruction_set: InstructionSet) -> Result<Self, Error> {
        check_instruction_set(instruction_set)?;
        let panel = kernel_layout(instruction_set, false).panel;
        Ok(Self { shape, instruction_set, panel, weight: None, outputs: 0 })
    }

    /// Returns the number of which [`push`](Self::push) takes a multiple of outputs, except for the last ones.
    pub fn outputs_step(&self) -> usize {
        self.panel
    }

    /// Packs the codes of the next outputs. Returns false where the kernels would not compute their numbers to the
    /// bit ([`PackedWeight::from_codes`]), and where these outputs need another format than those before them, such as
    /// scales in f32 after scales that f16 has to the bit. The weight has to be packed whole then.
    ///
    /// # Errors
    /// As [`PackedWeight::from_codes`], and [`Error::Shape`] for more outputs than are left and for a number of outputs
    /// that is neither all that are left nor a multiple of [`outputs_step`](Self::outputs_step).
    pub fn push(&mut self, codes: &Codes) -> Result<bool, Error> {
        let Self { shape, instruction_set, panel, .. } = *self;
        let outputs = codes.codes.len() / shape.inputs.max(1);
        let left = shape.outputs - self.outputs;
        let part = WeightShape { outputs, inputs: shape.inputs };
        codes.check(part)?;
        if outputs > left || (outputs < left && !outputs.is_multiple_of(panel)) {
            return Err(Error::Shape(format!(
                "expected the codes of a multiple of {panel} outputs or of the {left} that are left, found {outputs}"
            )));
        }
        let Some(packing) = CodePacking::new(codes, part, instruction_set) else { return Ok(false) };
        let format = Format::Codes(packing.format);
        let weight = match &mut self.weight {
            Some(weight) if weight.format == format => weight,
            Some(_) => return Ok(false),
            None => self.weight.insert(PackedWeight::zeros(format, shape, instruction_set)?),
        };
        let panel_bytes = format.bytes(weight.padded) * panel;
        let first = self.outputs / panel * panel_bytes;
        let to = SharedPtr(weight.words.as_mut_ptr().cast::<u8>());
        let work = WorkSize { multiply_adds: outputs.saturating_mul(shape.inputs), bytes: 0 };
        for_each_index(outputs.div_ceil(panel), Workers::for_call(work), &|index| {
            // SAFETY: the panel is this task's, and is within the weight, whose outputs are not exceeded.
            let panel_to = unsafe { to.slice(first + index * panel_bytes, panel_bytes) };
            packing.pack_panel(panel_to, index * panel..outputs.min((index + 1) * panel), panel);
        });
        self.outputs += outputs;
        Ok(true)
    }

    /// Returns the packed weight; `None` for a weight without outputs.
    ///
    /// # Errors
    /// [`Error::Shape`] if some outputs were not packed.
    pub fn finish(self) -> Result<Option<PackedWeight>, Error> {
        if self.outputs != self.shape.outputs {
            let WeightShape { outputs, .. } = self.shape;
            return Err(Error::Shape(format!("expected the codes of {outputs} outputs, found {}", self.outputs)));
        }
        Ok(self.weight)
    }
}
