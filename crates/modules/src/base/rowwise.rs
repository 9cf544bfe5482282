//! One pass over rows on a CPU, those of queries or keys head by head, whatever their strides: what norms, rotary
//! positions and short convolutions have in common. And the threads of brief calls.

use std::ops::Deref;
use std::sync::Mutex;

use candle_core::utils::barrier_pool;
use candle_core::{D, Device, Layout, Result, Storage, Tensor, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use candle_attention_kernels::flash::Strided;
use candle_attention_kernels::{self as kernels, Executor};

/// The fewest elements that are worth a task of their own.
pub const TASK_ELEMENTS: usize = 1 << 14;

/// The types that tensors hold whose rows are computed in f32. `scratch` belongs to the task.
pub trait Element: kernels::Element + WithDType {
    /// A row in f32.
    fn widen<'a>(xs: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// Writes to a row what `compute` writes in f32, all of it.
    fn write(ys: &mut [Self], scratch: &mut Vec<f32>, compute: impl FnOnce(&mut [f32]));
}

impl Element for f32 {
    fn widen<'a>(xs: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        xs
    }

    fn write(ys: &mut [Self], _: &mut Vec<f32>, compute: impl FnOnce(&mut [f32])) {
        compute(ys);
    }
}

macro_rules! widened {
    ($($float:ty),+) => {$(
        impl Element for $float {
            fn widen<'a>(xs: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
                scratch.resize(xs.len(), 0.0);
                xs.convert_to_f32_slice(scratch);
                scratch
            }

            fn write(ys: &mut [Self], scratch: &mut Vec<f32>, compute: impl FnOnce(&mut [f32])) {
                scratch.resize(ys.len(), 0.0);
                compute(scratch);
                ys.convert_from_f32_slice(scratch);
            }
        }
    )+};
}

widened!(bf16, f16);

/// The rows (D,) of a view (B, T, H, D) in memory, each contiguous. A view (B, T, D), (T, D) or (D,) has one head.
pub struct HeadRows<'a, E> {
    elements: &'a [E],
    /// B · T.
    pub tokens: usize,
    /// The heads of a token.
    pub h: usize,
    /// The length of a row.
    pub d: usize,
    t: usize,
    start: usize,
    strides: [usize; 3],
}

impl<'a, E> HeadRows<'a, E> {
    /// Those of a token, from 0 to B · T, by head.
    pub fn of_token(&self, token: usize) -> impl Fn(usize) -> &'a [E] {
        let (&Self { elements, d, t, .. }, [of_b, of_t, of_h]) = (self, self.strides);
        let start = self.start + token / t * of_b + token % t * of_t;
        move |head| &elements[start + head * of_h..][..d]
    }
}

/// Sums over rows.
#[derive(Clone, Copy)]
pub struct Sums {
    /// How many there are.
    pub count: usize,
    /// Over how many tokens a task adds up, on which their bits depend.
    pub tokens_of_task: usize,
}

/// One pass over rows, and sums over them: what is written to each row (D,) of tensors shaped `like` others, from its
/// rows in some views of that shape, which are empty in a view that is not there.
///
/// `of_token` gives for a token, from 0 to B · T, what is called with the number of a head, the rows to read, the row
/// to write, and the sums, which begin with zeros in each task.
pub fn map_rows<E: Element, O: Element, F, const N: usize>(
    like: &HeadRows<E>,
    views: [Option<&HeadRows<E>>; N],
    sums: Option<Sums>,
    of_token: impl Fn(usize) -> F + Sync,
) -> (Vec<O>, Vec<f32>)
where
    F: FnMut(usize, [&[f32]; N], &mut [f32], &mut [f32]),
{
    let &HeadRows { tokens, h, d, .. } = like;
    let (width, count) = ((h * d).max(1), tokens * h * d);
    let mut ys = vec![O::default(); count];
    let none = Sums { count: 0, tokens_of_task: tokens.div_ceil((count / TASK_ELEMENTS).max(1)) };
    let Sums { count: sums, tokens_of_task: of_task } = sums.unwrap_or(none);
    let task = |(task, ys): (usize, &mut [O])| {
        let (mut sums, mut wide, mut scratch) = (vec![0.0; sums], [const { Vec::new() }; N], Vec::new());
        for (token, ys) in (task * of_task..).zip(ys.chunks_exact_mut(width)) {
            let (rows, mut change) = (views.map(|view| view.map(|view| view.of_token(token))), of_token(token));
            for (head, ys) in ys.chunks_exact_mut(d).enumerate() {
                let mut wide = wide.iter_mut();
                let rows = rows.each_ref().map(|row| match (row, wide.next()) {
                    (Some(row), Some(wide)) => E::widen(row(head), wide),
                    _ => &[],
                });
                O::write(ys, &mut scratch, |ys| change(head, rows, ys, &mut sums));
            }
        }
        sums
    };
    if tokens <= of_task {
        let sums = task((0, &mut ys));
        return (ys, sums);
    }
    let of_tasks: Vec<_> = ys.par_chunks_mut(of_task * width).enumerate().map(task).collect();
    let mut total = vec![0.0; sums];
    for sums in of_tasks {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    (ys, total)
}

/// A tensor whose rows, along its last dimension, are contiguous: itself, or a copy.
pub fn with_contiguous_rows(tensor: &Tensor) -> Result<Tensor> {
    let is_row = tensor.dim(D::Minus1)? <= 1 || tensor.stride()[tensor.rank() - 1] == 1;
    // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
    if is_row || tensor.elem_count() == 0 { Ok(tensor.clone()) } else { tensor.contiguous() }
}

/// The result of an expression with the type of a dtype that the CPU kernels compute in; for another dtype an error of
/// the operation, whose caller was to see to that.
#[macro_export]
macro_rules! with_float {
    ($op:expr, $dtype:expr, |$Float:ident| $run:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $Float = f32;
                $run
            }
            candle_core::DType::BF16 => {
                type $Float = half::bf16;
                $run
            }
            candle_core::DType::F16 => {
                type $Float = half::f16;
                $run
            }
            other => candle_core::bail!("[{}] tensors are {other:?}, expected F32, BF16 or F16", $op),
        }
    };
}
pub use with_float;

/// The elements of a tensor in the order of its dimensions, converted to `E`.
pub fn to_vec<E: WithDType>(tensor: &Tensor) -> Result<Vec<E>> {
    // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
    if tensor.elem_count() == 0 {
        return Ok(Vec::new());
    }
    tensor.to_device(&Device::Cpu)?.to_dtype(E::DTYPE)?.flatten_all()?.to_vec1()
}

/// A tensor on the CPU while its storage is read.
pub struct Read<'a, G> {
    storage: G,
    /// Where the tensor lies in its storage.
    pub layout: &'a Layout,
}

/// Locks the storage of a tensor for reading.
pub fn read(tensor: &Tensor) -> Read<'_, impl Deref<Target = Storage>> {
    let (storage, layout) = tensor.storage_and_layout();
    Read { storage, layout }
}

impl<G: Deref<Target = Storage>> Read<'_, G> {
    /// All of its storage, of which the layout tells the tensor's part.
    pub fn elements<E: WithDType>(&self) -> Result<&[E]> {
        match &*self.storage {
            Storage::Cpu(storage) => storage.as_slice(),
            _ => bail!("expected a tensor on the CPU, found one on {:?}", self.storage.device().location()),
        }
    }

    /// Those of the tensor, which is contiguous.
    ///
    /// # Errors
    /// If it is not.
    pub fn contiguous<E: WithDType>(&self) -> Result<&[E]> {
        match self.layout.contiguous_offsets() {
            // A view of nothing may begin anywhere and have any strides.
            _ if self.layout.shape().elem_count() == 0 => Ok(&[]),
            Some((start, end)) => Ok(&self.elements()?[start..end]),
            None => {
                let (strides, shape) = (self.layout.stride(), self.layout.dims());
                bail!("expected a contiguous tensor, found strides {strides:?} of shape {shape:?}")
            }
        }
    }

    /// The tensor with its strides, as kernels take it: its first N dimensions, in which one of 1 stands for all
    /// entries. Its last dimension is contiguous.
    pub fn strided<E: WithDType, const N: usize>(&self) -> Result<Strided<'_, E, N>> {
        let (data, layout) = (self.elements()?, self.layout);
        let stride = |n: usize| if layout.dims()[n] > 1 { layout.stride()[n] } else { 0 };
        // A view of nothing may begin anywhere.
        Ok(Strided { data: &data[layout.start_offset().min(data.len())..], strides: std::array::from_fn(stride) })
    }

    /// The rows of a tensor of one to four dimensions, the last of which is contiguous.
    pub fn rows<E: WithDType>(&self) -> Result<HeadRows<'_, E>> {
        let (layout, elements) = (self.layout, self.elements()?);
        let ([b, t, h, d], strides) = match (layout.dims(), layout.stride()) {
            (&[b, t, h, d], &[of_b, of_t, of_h, _]) => ([b, t, h, d], [of_b, of_t, of_h]),
            (&[b, t, d], &[of_b, of_t, _]) => ([b, t, 1, d], [of_b, of_t, 0]),
            (&[t, d], &[of_t, _]) => ([1, t, 1, d], [0, of_t, 0]),
            (&[d], _) => ([1, 1, 1, d], [0; 3]),
            (dims, _) => bail!("rows have shape {dims:?}, expected one to four dimensions"),
        };
        Ok(HeadRows { elements, tokens: b * t, h, d, t, start: layout.start_offset(), strides })
    }
}

/// Candle's barrier pool, which runs Candle's own brief operations: its threads wait for the next call for a while
/// before they sleep. `None` on a thread of a rayon pool, which the caller chose or is one of many that call.
pub fn executor() -> Option<Executor> {
    if rayon::current_thread_index().is_some() {
        return None;
    }
    Some(Executor { threads: || barrier_pool().n_workers() + 1, run })
}

fn run(work: &(dyn Fn() + Sync)) {
    static IN_USE: Mutex<()> = Mutex::new(());
    // The pool takes one call at a time. Another thread's is left to that thread: several keep the cores busy by
    // themselves.
    if let Ok(_alone) = IN_USE.try_lock() {
        // An item for each thread; one that gets two finds the work done. On a thread of the pool they run there, in
        // turn.
        barrier_pool().execute_chunked(barrier_pool().n_workers() + 1, |_| work());
    }
}
