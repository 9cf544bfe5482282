//! The tensors that a launch reads, and the memory that it writes.
//!
//! A pointer in the arguments has the number of its tensor or buffer in the upper bits, and the first byte in the lower
//! ones: Candle binds buffers to indices, and Metal adds the addresses. On the emulator, it is an address of a copy.

use candle_attention_cuda::shared::{InputAddresses, InputPointer, OutputPointer, Pointee, check_dtype};
#[cfg(feature = "emulator")]
use candle_core::CpuStorage;
use candle_core::{DType, Result, Shape, Tensor};

/// The place of a number in a pointer.
const NUMBER_SHIFT: u32 = 48;

/// The bit of the numbers of buffers that kernels write.
const OUTPUT_BIT: u64 = 1 << 14;

/// A tensor that a launch reads.
pub(crate) struct ReadTensor<'t> {
    pub name: &'static str,
    pub tensor: &'t Tensor,
    #[cfg(feature = "emulator")]
    pub copy: CpuStorage,
}

/// Memory that a launch writes.
pub(crate) struct WrittenBuffer {
    pub name: &'static str,
    pub dtype: DType,
    pub shape: Shape,
    /// Whether it has zeros before.
    pub is_zeroed: bool,
    #[cfg(feature = "emulator")]
    pub copy: CpuStorage,
}

/// The operands of a launch.
#[derive(Default)]
pub(crate) struct MetalOperands<'t> {
    pub inputs: Vec<ReadTensor<'t>>,
    pub outputs: Vec<WrittenBuffer>,
}

/// The operand that a pointer in the arguments belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandPlace {
    /// Nothing: the call does not have it.
    Null,
    /// A tensor by its number, and its first byte in its buffer.
    Input { number: usize, first_byte: usize },
    /// A written buffer by its number.
    Output { number: usize },
}

impl OperandPlace {
    /// Returns the place of a pointer.
    pub fn of_pointer(address: u64) -> Self {
        let number = address >> NUMBER_SHIFT;
        match number {
            0 => Self::Null,
            _ if number & OUTPUT_BIT != 0 => Self::Output { number: (number & (OUTPUT_BIT - 1)) as usize },
            _ => {
                Self::Input { number: number as usize - 1, first_byte: (address & ((1 << NUMBER_SHIFT) - 1)) as usize }
            }
        }
    }

    /// Returns the pointer.
    fn pointer(self) -> u64 {
        match self {
            Self::Null => 0,
            Self::Input { number, first_byte } => (number as u64 + 1) << NUMBER_SHIFT | first_byte as u64,
            Self::Output { number } => (number as u64 | OUTPUT_BIT) << NUMBER_SHIFT,
        }
    }
}

impl MetalOperands<'_> {
    /// Adds memory that a launch writes, and returns its pointer.
    ///
    /// # Errors
    /// If the emulator cannot allocate it.
    pub fn output<T: Pointee>(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<OutputPointer<T>> {
        self.written(name, dtype, shape.into(), false)
    }

    /// Adds memory of zeros that a launch writes, and returns its pointer.
    ///
    /// # Errors
    /// If the emulator cannot allocate it.
    pub fn zeroed<T: Pointee>(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<OutputPointer<T>> {
        self.written(name, dtype, shape.into(), true)
    }

    fn written<T: Pointee>(
        &mut self,
        name: &'static str,
        dtype: DType,
        shape: Shape,
        is_zeroed: bool,
    ) -> Result<OutputPointer<T>> {
        #[cfg(feature = "emulator")]
        let copy = crate::copies::filled(dtype, shape.elem_count(), if is_zeroed { 0.0 } else { f32::NAN })?;
        #[cfg(feature = "emulator")]
        let address = crate::copies::address_of(&copy)?;
        #[cfg(not(feature = "emulator"))]
        let address = OperandPlace::Output { number: self.outputs.len() }.pointer();
        self.outputs.push(WrittenBuffer {
            name,
            dtype,
            shape,
            is_zeroed,
            #[cfg(feature = "emulator")]
            copy,
        });
        Ok(OutputPointer::new(address))
    }
}

impl<'t> InputAddresses<'t> for MetalOperands<'t> {
    fn input<T: Pointee>(&mut self, name: &'static str, tensor: &'t Tensor) -> Result<InputPointer<T>> {
        check_dtype::<T>(name, tensor.dtype())?;
        let first_byte = tensor.layout().start_offset() * tensor.dtype().size_in_bytes();
        #[cfg(feature = "emulator")]
        let copy = crate::copies::copy_of(tensor)?;
        #[cfg(feature = "emulator")]
        let address = crate::copies::address_of(&copy)? + first_byte as u64;
        #[cfg(not(feature = "emulator"))]
        let address = OperandPlace::Input { number: self.inputs.len(), first_byte }.pointer();
        self.inputs.push(ReadTensor {
            name,
            tensor,
            #[cfg(feature = "emulator")]
            copy,
        });
        Ok(InputPointer::new(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_of_operands_have_their_numbers_and_bytes() {
        for place in [
            OperandPlace::Null,
            OperandPlace::Input { number: 0, first_byte: 0 },
            OperandPlace::Input { number: 18, first_byte: (1 << 40) + 6 },
            OperandPlace::Output { number: 0 },
            OperandPlace::Output { number: 1 },
        ] {
            assert_eq!(OperandPlace::of_pointer(place.pointer()), place);
        }
    }
}
