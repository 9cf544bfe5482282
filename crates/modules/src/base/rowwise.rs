//! One pass over rows on a CPU, those of queries or keys head by head, whatever their strides: what norms and rotary
//! positions have in common. And the threads of brief calls.

use std::ops::Deref;
use std::sync::Mutex;

use candle_core::utils::barrier_pool;
use candle_core::{CpuStorage, CustomOp3, D, Device, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use candle_attention_kernels::Executor;
use candle_attention_kernels::flash::Strided;

/// The fewest elements that are worth a task of their own.
pub const TASK_ELEMENTS: usize = 1 << 14;

/// The types that tensors hold whose rows are computed in f32. `scratch` belongs to the task.
pub trait Element: Copy + Default + Send + Sync {
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
    /// The rows of a view of one to four dimensions, of all elements of its storage.
    pub fn new(elements: &'a [E], layout: &Layout) -> Result<Self> {
        let ([b, t, h, d], strides) = match (layout.dims(), layout.stride()) {
            (&[b, t, h, d], &[of_b, of_t, of_h, _]) => ([b, t, h, d], [of_b, of_t, of_h]),
            (&[b, t, d], &[of_b, of_t, _]) => ([b, t, 1, d], [of_b, of_t, 0]),
            (&[t, d], &[of_t, _]) => ([1, t, 1, d], [0, of_t, 0]),
            (&[d], _) => ([1, 1, 1, d], [0; 3]),
            (dims, _) => bail!("rows have shape {dims:?}, expected one to four dimensions"),
        };
        Ok(Self { elements, tokens: b * t, h, d, t, start: layout.start_offset(), strides })
    }

    /// Those of a token, by head.
    pub fn of_token(&self, token: usize) -> impl Fn(usize) -> &'a [E] {
        let (&Self { elements, d, t, .. }, [of_b, of_t, of_h]) = (self, self.strides);
        let start = self.start + token / t * of_b + token % t * of_t;
        move |head| &elements[start + head * of_h..][..d]
    }
}

/// The rows of a view, each changed by what `of_token` gives for its token, from 0 to B · T; that is called with the
/// number of the head, the row, and the row to write.
pub fn map_heads<E: Element, F: Fn(usize, &[f32], &mut [f32])>(
    rows: &HeadRows<E>,
    of_token: impl Fn(usize) -> F + Sync,
) -> Vec<E> {
    let width = rows.h * rows.d;
    let count = rows.tokens * width;
    let mut ys = vec![E::default(); count];
    if count == 0 {
        return ys;
    }
    let one_token = |[of_xs, of_ys]: &mut [Vec<f32>; 2], (token, ys): (usize, &mut [E])| {
        let (row, change) = (rows.of_token(token), of_token(token));
        for (head, ys) in ys.chunks_exact_mut(rows.d).enumerate() {
            let xs = E::widen(row(head), of_xs);
            E::write(ys, of_ys, |ys| change(head, xs, ys));
        }
    };
    // Fewer than two tasks run on the thread that calls.
    let least = TASK_ELEMENTS.div_ceil(width);
    ys.par_chunks_mut(width).enumerate().with_min_len(least).for_each_init(Default::default, one_token);
    ys
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
    pub fn contiguous<E: WithDType>(&self) -> Result<&[E]> {
        contiguous(self.elements()?, self.layout)
    }

    /// The tensor with its strides, as kernels take it; its last dimension is contiguous.
    pub fn strided<E: WithDType, const N: usize>(&self) -> Result<Strided<'_, E, N>> {
        Ok(strided(self.elements()?, self.layout))
    }
}

/// The elements of a contiguous view.
///
/// # Errors
/// If it is not contiguous.
pub fn contiguous<'a, E>(elements: &'a [E], layout: &Layout) -> Result<&'a [E]> {
    match layout.contiguous_offsets() {
        // A view of nothing may begin anywhere and have any strides.
        _ if layout.shape().elem_count() == 0 => Ok(&[]),
        Some((start, end)) => Ok(&elements[start..end]),
        None => bail!("expected a contiguous tensor, found strides {:?} of shape {:?}", layout.stride(), layout.dims()),
    }
}

/// A view of the first N dimensions, in which a dimension of 1 in the layout stands for all entries.
pub fn strided<'a, T, const N: usize>(data: &'a [T], layout: &Layout) -> Strided<'a, T, N> {
    let stride = |n: usize| if layout.dims()[n] > 1 { layout.stride()[n] } else { 0 };
    // A view of nothing may begin anywhere.
    Strided { data: &data[layout.start_offset().min(data.len())..], strides: std::array::from_fn(stride) }
}

/// A tensor in memory: its storage, and where it lies there.
pub type Operand<'a> = (&'a CpuStorage, &'a Layout);

/// An operation on three tensors, which is Candle's as an [`Op3`].
pub trait Ternary {
    /// In graphs.
    const NAME: &'static str;

    /// The result of tensors on a CPU, contiguous.
    fn forward(&self, operands: [Operand; 3]) -> Result<(CpuStorage, Shape)>;

    /// The gradients of the operands, as far as these are tracked.
    fn backward(&self, operands: [&Tensor; 3], result: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]>;
}

/// A [`Ternary`] operation for [`apply_op3`](Tensor::apply_op3).
pub struct Op3<O>(pub O);

impl<O: Ternary> CustomOp3 for Op3<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        of_a: &Layout,
        b: &CpuStorage,
        of_b: &Layout,
        c: &CpuStorage,
        of_c: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.0.forward([(a, of_a), (b, of_b), (c, of_c)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok(self.0.backward([a, b, c], result, gradient)?.into())
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
