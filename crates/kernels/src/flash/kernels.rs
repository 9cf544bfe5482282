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

/// A pass of a call for a kernel, with keys and values as they are stored.
pub enum KernelTask<'a, 'b, E> {
    Float(&'a ForwardCall<'b, E>, KeysValues<'b, E>),
    Q8(&'a ForwardCall<'b, E>, KeysValues<'b, u8>),
    E4M3(&'a ForwardCall<'b, E>, KeysValues<'b, E4M3Code>),
    Q4(&'a ForwardCall<'b, E>, KeysValues<'b, CodePair>),
    Backward(&'a BackwardCall<'b, E>, KeysValues<'b, E>),
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
                let mut done = None;
                Self::dispatch(instruction_set, RunTask { task, done: &mut done });
                done
            }
        })*
    };
}

run!(f32, bf16, f16);

/// A pass that is compiled for each kernel. `done` takes its result.
struct RunTask<'a, 'b, E> {
    task: KernelTask<'a, 'b, E>,
    done: &'a mut Option<()>,
}

impl<E: Number> SimdTask for RunTask<'_, '_, E> {
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K, by the contract of `SimdTask`.
        *self.done = unsafe {
            match self.task {
                KernelTask::Float(call, keys_values) => forward::run_on::<K, E, E>(call, &keys_values),
                KernelTask::Q8(call, keys_values) => forward::run_on::<K, E, u8>(call, &keys_values),
                KernelTask::E4M3(call, keys_values) => forward::run_on::<K, E, E4M3Code>(call, &keys_values),
                KernelTask::Q4(call, keys_values) => forward::run_on::<K, E, CodePair>(call, &keys_values),
                KernelTask::Backward(call, keys_values) => backward::run_on::<K, E>(call, &keys_values),
            }
        };
    }
}
