//! Packing of a weight of codes panel by panel.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::code_packing::CodePacking;
use super::codes::Codes;
use super::weight::{PackedWeight, WeightShape};
use crate::cpu::{CodeFormat, Format, InstructionSet, kernel_layout};
use crate::error::{Error, check_instruction_set};

/// A function that reads the codes of the outputs of a panel, as [`PackedWeight::from_panels`] says.
pub type PanelReader<'a, E> = dyn for<'p> Fn(Range<usize>, PanelPacker<'p>) -> Result<bool, E> + Sync + 'a;

impl PackedWeight {
    /// Packs a weight of codes one panel at a time on several threads, so that a byte for each code of a large weight
    /// is never in memory at once.
    ///
    /// `read` gets the outputs of a panel, calls [`PanelPacker::pack`] with their codes, and returns what that call
    /// returns. It is called on several threads at once, in any order, and twice for the first panel.
    ///
    /// Returns `None` where the kernels would not compute the numbers of a panel to the bit
    /// ([`from_codes`](Self::from_codes)), and where panels need different formats, such as scales in f32 after scales
    /// that f16 has to the bit. The weight has to be packed whole then.
    ///
    /// ```
    /// use candle_attention_kernels::{Error, InstructionSet};
    /// use candle_attention_kernels::linear::{Codes, PackedWeight, Scales, Values, WeightShape};
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
    /// let packed = PackedWeight::from_panels::<Error>(shape, InstructionSet::Scalar, &|outputs, packer| {
    ///     packer.pack(&rows(outputs))
    /// })?;
    /// let whole = PackedWeight::from_codes(&rows(0..40), shape, InstructionSet::Scalar)?;
    /// let numbers = packed.expect("codes that are packed").unpack::<f32>()?;
    /// assert_eq!(numbers, whole.expect("codes that are packed").unpack::<f32>()?);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_codes`](Self::from_codes), and the first error that `read` returns.
    pub fn from_panels<E: From<Error> + Send>(
        shape: WeightShape,
        instruction_set: InstructionSet,
        read: &PanelReader<'_, E>,
    ) -> Result<Option<Self>, E> {
        check_instruction_set(instruction_set)?;
        let WeightShape { outputs, inputs } = shape;
        let width = kernel_layout(instruction_set, false).panel;
        let outputs_of = |index: usize| index * width..outputs.min((index + 1) * width);
        let panel_shape = |index: usize| WeightShape { outputs: outputs_of(index).len(), inputs };

        let mut first = None;
        let of_format = PanelPacker { shape: panel_shape(0), instruction_set, to: PackedTo::Format(&mut first) };
        let is_packed = read(outputs_of(0), of_format)?;
        let Some(format) = first.filter(|_| is_packed) else { return Ok(None) };

        // The first panel that was not packed, and the error if there was one.
        let failed: Mutex<Option<FailedPanel<E>>> = Mutex::new(None);
        // SAFETY: a task clears its whole panel first.
        let packed = unsafe {
            Self::filled_by(Format::Codes(format), shape, instruction_set, &|weight, index, to| {
                let bytes = Format::Codes(format).bytes(weight.padded) * width;
                to.cast::<u8>().write_bytes(0, bytes);
                let panel = PackedTo::Panel { bytes: std::slice::from_raw_parts_mut(to.cast(), bytes), width, format };
                let packer = PanelPacker { shape: panel_shape(index), instruction_set, to: panel };
                let error = match read(outputs_of(index), packer) {
                    Ok(true) => return,
                    Ok(false) => None,
                    Err(error) => Some(error),
                };
                let mut earliest = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if earliest.as_ref().is_none_or(|earlier| index < earlier.index) {
                    *earliest = Some(FailedPanel { index, error });
                }
            })
        };
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(Some(packed?)),
            Some(FailedPanel { error: None, .. }) => Ok(None),
            Some(FailedPanel { error: Some(error), .. }) => Err(error),
        }
    }
}

/// A panel that was not packed.
struct FailedPanel<E> {
    index: usize,
    error: Option<E>,
}

/// The packer of the codes of one panel of [`PackedWeight::from_panels`].
#[derive(Debug)]
pub struct PanelPacker<'a> {
    /// The outputs of the panel, and the inputs.
    shape: WeightShape,
    instruction_set: InstructionSet,
    to: PackedTo<'a>,
}

/// The use of the codes of a panel.
enum PackedTo<'a> {
    /// Their format alone is found.
    Format(&'a mut Option<CodeFormat>),
    /// They are packed, if they have this format.
    Panel {
        /// The bytes of the panel, which are 0.
        bytes: &'a mut [u8],
        /// The number of columns of the panel.
        width: usize,
        format: CodeFormat,
    },
}

impl std::fmt::Debug for PackedTo<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Format(_) => f.write_str("a format"),
            Self::Panel { format, .. } => write!(f, "a panel of {format}"),
        }
    }
}

impl PanelPacker<'_> {
    /// Packs the codes of the panel's outputs. Returns false where they cannot be packed as the first panel was.
    ///
    /// # Errors
    /// As [`PackedWeight::from_codes`].
    pub fn pack(self, codes: &Codes) -> Result<bool, Error> {
        let Self { shape, instruction_set, to } = self;
        codes.check(shape)?;
        let Some(packing) = CodePacking::new(codes, shape, instruction_set) else { return Ok(false) };
        match to {
            PackedTo::Format(found) => *found = Some(packing.format),
            PackedTo::Panel { format, .. } if format != packing.format => return Ok(false),
            PackedTo::Panel { bytes, width, .. } => packing.pack_panel(bytes, 0..shape.outputs, width),
        }
        Ok(true)
    }
}
