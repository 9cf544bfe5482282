//! The kernels of each type of elements, compiled in this package.

use half::{bf16, f16};

use super::backward::call::BackwardCall;
use super::backward::run as backward;
use super::call::ForwardCall;
use super::forward;
use super::kv_rows::KeysValues;
use crate::cpu::{InstructionSet, Kernel, SimdTask};
use crate::kv_codes::{CodePair, E4M3Code};
use crate::number::Number;

/// A pass of a call, which is compiled for each kernel: forward with keys and values as they are stored, or backward.
pub enum KernelTask<'a, 'b, E> {
    Float(&'a ForwardCall<'b, E>, KeysValues<'b, E>),
    Q8(&'a ForwardCall<'b, E>, KeysValues<'b, u8>),
    E4M3(&'a ForwardCall<'b, E>, KeysValues<'b, E4M3Code>),
    Q4(&'a ForwardCall<'b, E>, KeysValues<'b, CodePair>),
    Backward(&'a BackwardCall<'b, E>),
}

/// An element type whose kernels are compiled here, in this package: generic code would be compiled again, and perhaps
/// without optimisation, wherever it is used. Calls are checked before they are made, and no other package can make
/// one.
pub trait AttentionKernels: Number {
    /// Runs a pass on the kernel of an instruction set, which the processor has. `None` if memory is short.
    fn run(task: KernelTask<Self>, instruction_set: InstructionSet) -> Option<()>;
}

macro_rules! run {
    ($($type:ty),*) => {
        $(impl AttentionKernels for $type {
            fn run(task: KernelTask<Self>, instruction_set: InstructionSet) -> Option<()> {
                Self::dispatch(instruction_set, task)
            }
        })*
    };
}

run!(f32, bf16, f16);

impl<E: Number> SimdTask for KernelTask<'_, '_, E> {
    /// `None` if memory is short.
    type Output = Option<()>;

    unsafe fn run<K: Kernel>(self) -> Option<()> {
        // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
        unsafe {
            match self {
                Self::Float(call, keys_values) => forward::run_on::<K, E, E>(call, &keys_values),
                Self::Q8(call, keys_values) => forward::run_on::<K, E, u8>(call, &keys_values),
                Self::E4M3(call, keys_values) => forward::run_on::<K, E, E4M3Code>(call, &keys_values),
                Self::Q4(call, keys_values) => forward::run_on::<K, E, CodePair>(call, &keys_values),
                Self::Backward(call) => backward::run_on::<K, E>(call),
            }
        }
    }
}
