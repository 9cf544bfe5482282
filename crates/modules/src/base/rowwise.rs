//! Passes over the rows of tensors on a CPU, of any strides: the common part of norms, rotary positions and short
//! convolutions.

use std::ops::Deref;
use std::sync::OnceLock;

use candle_core::{CpuStorage, D, Device, Layout, Result, Storage, Tensor, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use candle_attention_kernels::flash::{Numbers, Strided, View};
use candle_attention_kernels::{self as kernels, Workers, for_each_chunk};

/// The smallest number of elements for which a separate task pays.
pub const TASK_ELEMENTS: usize = 1 << 14;

/// Element types of tensors whose rows are computed in f32. The `scratch` of the methods is a buffer of the task.
pub trait TensorElement: kernels::Element + WithDType {
    /// Returns a row in f32.
    fn widen<'a>(xs: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// Computes a row in f32 and writes it in this type. `compute` writes every entry.
    fn write(ys: &mut [Self], scratch: &mut Vec<f32>, compute: impl FnOnce(&mut [f32]));
}

impl TensorElement for f32 {
    fn widen<'a>(xs: &'a [Self], _: &'a mut Vec<f32>) -> &'a [f32] {
        xs
    }

    fn write(ys: &mut [Self], _: &mut Vec<f32>, compute: impl FnOnce(&mut [f32])) {
        compute(ys);
    }
}

macro_rules! widened {
    ($($float:ty),+) => {$(
        impl TensorElement for $float {
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
    /// The number of heads of a token.
    pub h: usize,
    /// The length of a row.
    pub d: usize,
    t: usize,
    start: usize,
    strides: HeadStrides,
}

/// The strides of B, T and H.
#[derive(Clone, Copy)]
struct HeadStrides {
    b: usize,
    t: usize,
    h: usize,
}

impl<'a, E> HeadRows<'a, E> {
    /// Returns the rows of a token, from 0 to B · T.
    pub fn of_token(&self, token: usize) -> TokenRows<'a, E> {
        let start = self.start + token / self.t * self.strides.b + token % self.t * self.strides.t;
        TokenRows { elements: self.elements, start, stride: self.strides.h, d: self.d }
    }
}

/// The rows of the heads of one token.
#[derive(Clone, Copy)]
pub struct TokenRows<'a, E> {
    elements: &'a [E],
    start: usize,
    stride: usize,
    d: usize,
}

impl<'a, E> TokenRows<'a, E> {
    /// Returns the row of a head.
    pub fn head(&self, head: usize) -> &'a [E] {
        &self.elements[self.start + head * self.stride..][..self.d]
    }
}

/// Sums over rows that a pass computes with the rows.
#[derive(Clone, Copy)]
pub struct Sums {
    /// The number of sums.
    pub count: usize,
    /// The number of tokens of a task. Each task adds up its own tokens, so the bits of the sums depend on it.
    pub tokens_of_task: usize,
}

/// One row of a pass: the rows that it is computed from, and where the results go.
pub struct Row<'a, const N: usize> {
    /// The token, from 0 to B · T.
    pub token: usize,
    /// The head of the token.
    pub head: usize,
    /// The row of each view in f32.
    pub inputs: [&'a [f32]; N],
    /// The row to write, all of it.
    pub output: &'a mut [f32],
    /// The sums of the task, which begin with zeros.
    pub sums: &'a mut [f32],
}

/// A computation over rows of `N` views of elements `E`, row by row.
pub trait RowPass<E, const N: usize>: Sync {
    /// The memory of a task.
    type Scratch: Default;

    /// Prepares for the rows of a token.
    fn begin_token(&self, _token: usize, _scratch: &mut Self::Scratch) {}

    /// Computes one row.
    fn compute(&self, row: Row<N>, scratch: &mut Self::Scratch);
}

/// The results of a pass.
pub struct Mapped<O> {
    /// The rows of a contiguous tensor (B, T, H, D).
    pub rows: Vec<O>,
    /// The sums over all tasks.
    pub sums: Vec<f32>,
}

/// Runs a pass over the rows of `views`, which all have the shape of `like`, on the threads that pay for it.
pub fn map_rows<E: TensorElement, O: TensorElement, P: RowPass<E, N>, const N: usize>(
    like: &HeadRows<E>,
    views: [&HeadRows<E>; N],
    sums: Option<Sums>,
    pass: &P,
) -> Mapped<O> {
    let &HeadRows { tokens, h, d, .. } = like;
    let count = tokens * h * d;
    let tokens_without_sums = tokens.div_ceil((count / TASK_ELEMENTS).max(1));
    let split = sums.unwrap_or(Sums { count: 0, tokens_of_task: tokens_without_sums });
    let width = (h * d).max(1);
    let mut rows = vec![O::default(); count];
    let run = |task: usize, outputs: &mut [O]| {
        let first_token = task * split.tokens_of_task;
        let mut own_sums = vec![0.0; split.count];
        run_task(first_token, outputs.chunks_exact_mut(width), d, views, &mut own_sums, pass);
        own_sums
    };
    if tokens <= split.tokens_of_task {
        let sums_of_task = run(0, &mut rows);
        return Mapped { rows, sums: sums_of_task };
    }
    let tasks = tokens.div_ceil(split.tokens_of_task);
    let sums_of_tasks: Vec<_> = (0..tasks).map(|_| OnceLock::new()).collect();
    for_each_chunk(&mut rows, split.tokens_of_task * width, Workers::for_tasks(tasks), &|task, outputs| {
        sums_of_tasks[task].get_or_init(|| run(task, outputs));
    });
    let mut total = vec![0.0; split.count];
    for own_sums in sums_of_tasks.into_iter().filter_map(OnceLock::into_inner) {
        for (sum, own) in total.iter_mut().zip(own_sums) {
            *sum += own;
        }
    }
    Mapped { rows, sums: total }
}

/// Runs a pass over the tokens from `first_token` on, one for each of `token_outputs`, which are H · D numbers each.
fn run_task<'o, E: TensorElement, O: TensorElement + 'o, P: RowPass<E, N>, const N: usize>(
    first_token: usize,
    token_outputs: impl Iterator<Item = &'o mut [O]>,
    d: usize,
    views: [&HeadRows<E>; N],
    sums: &mut [f32],
    pass: &P,
) {
    let mut pass_scratch = P::Scratch::default();
    let mut input_scratch = [const { Vec::new() }; N];
    let mut output_scratch = Vec::new();
    for (n, heads) in token_outputs.enumerate() {
        let token = first_token + n;
        let token_rows = views.map(|view| view.of_token(token));
        pass.begin_token(token, &mut pass_scratch);
        for (head, row) in heads.chunks_exact_mut(d).enumerate() {
            let mut scratch = input_scratch.iter_mut();
            let inputs = token_rows.each_ref().map(|rows| match scratch.next() {
                Some(wide) => E::widen(rows.head(head), wide),
                None => &[],
            });
            O::write(row, &mut output_scratch, |output| {
                pass.compute(Row { token, head, inputs, output, sums }, &mut pass_scratch);
            });
        }
    }
}

/// Returns the tensor, or a copy if its rows, along the last dimension, are not contiguous.
pub fn with_contiguous_rows(tensor: &Tensor) -> Result<Tensor> {
    let is_row = tensor.dim(D::Minus1)? <= 1 || tensor.stride()[tensor.rank() - 1] == 1;
    // An empty view may begin past the end of its buffer, where Candle's copies panic.
    if is_row || tensor.elem_count() == 0 { Ok(tensor.clone()) } else { tensor.contiguous() }
}

/// Returns a view (B, T, H, D) of rows (D,), (T, D), (B, T, D) or (B, T, H, D). Missing dimensions are 1.
pub fn with_four_dimensions(rows: &Tensor) -> Result<Tensor> {
    match rows.rank() {
        1 => rows.unsqueeze(0)?.unsqueeze(0)?.unsqueeze(0),
        2 => rows.unsqueeze(0)?.unsqueeze(2),
        3 => rows.unsqueeze(2),
        _ => Ok(rows.clone()),
    }
}

/// Evaluates an expression with the Rust type of a dtype that the CPU kernels compute: f32, bf16 or f16. Any other
/// dtype is an error of the operation, whose caller should have checked it.
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

/// Returns the elements of a tensor in the order of its dimensions, converted to `E`.
pub fn to_vec<E: WithDType>(tensor: &Tensor) -> Result<Vec<E>> {
    // An empty view may begin past the end of its buffer, where Candle's copies panic.
    if tensor.elem_count() == 0 {
        return Ok(Vec::new());
    }
    tensor.to_device(&Device::Cpu)?.to_dtype(E::DTYPE)?.flatten_all()?.to_vec1()
}

/// A tensor on the CPU while its storage is read.
pub struct Read<'a, G> {
    storage: G,
    /// The position of the tensor in its storage.
    pub layout: &'a Layout,
}

/// Locks the storage of a tensor for reading.
pub fn read(tensor: &Tensor) -> Read<'_, impl Deref<Target = Storage>> {
    let (storage, layout) = tensor.storage_and_layout();
    Read { storage, layout }
}

impl<G: Deref<Target = Storage>> Read<'_, G> {
    /// Returns all elements of the storage. The layout tells which of them are the tensor's.
    pub fn elements<E: WithDType>(&self) -> Result<&[E]> {
        match &*self.storage {
            Storage::Cpu(storage) => storage.as_slice(),
            _ => bail!("expected a tensor on the CPU, found one on {:?}", self.storage.device().location()),
        }
    }

    /// Returns the elements of a contiguous tensor.
    ///
    /// # Errors
    /// If the tensor is not contiguous.
    pub fn contiguous<E: WithDType>(&self) -> Result<&[E]> {
        match self.layout.contiguous_offsets() {
            // An empty view may begin anywhere and have any strides.
            _ if self.layout.shape().elem_count() == 0 => Ok(&[]),
            Some((start, end)) => Ok(&self.elements()?[start..end]),
            None => {
                let strides = self.layout.stride();
                let shape = self.layout.dims();
                bail!("expected a contiguous tensor, found strides {strides:?} of shape {shape:?}")
            }
        }
    }

    /// Returns the tensor with the strides of its first N dimensions, as the kernels read it. A dimension of size 1 is
    /// broadcast. The last dimension is contiguous.
    pub fn strided<E: WithDType, const N: usize>(&self) -> Result<Strided<'_, E, N>> {
        let data = self.elements()?;
        let layout = self.layout;
        let stride = |n: usize| if layout.dims()[n] > 1 { layout.stride()[n] } else { 0 };
        // An empty view may begin anywhere.
        Ok(Strided { data: &data[layout.start_offset().min(data.len())..], strides: std::array::from_fn(stride) })
    }

    /// Returns a tensor (B, H, T, D), (B, H, D), (B, D) or (D,) as the attention kernels read it. A dimension of size 1
    /// is broadcast.
    ///
    /// # Errors
    /// For a list that is not contiguous, and for another rank, dtype or device.
    pub fn view(&self) -> Result<View<'_>> {
        let numbers = match &*self.storage {
            Storage::Cpu(CpuStorage::F32(numbers)) => Numbers::F32(self.numbers_from_start(numbers)?),
            Storage::Cpu(CpuStorage::BF16(numbers)) => Numbers::BF16(self.numbers_from_start(numbers)?),
            Storage::Cpu(CpuStorage::F16(numbers)) => Numbers::F16(self.numbers_from_start(numbers)?),
            Storage::Cpu(CpuStorage::U8(numbers)) => Numbers::U8(self.numbers_from_start(numbers)?),
            Storage::Cpu(CpuStorage::U32(numbers)) => Numbers::U32(self.numbers_from_start(numbers)?),
            Storage::Cpu(_) => {
                bail!("expected a tensor in F32, BF16, F16, U8 or U32, found {:?}", self.storage.dtype())
            }
            _ => bail!("expected a tensor on the CPU, found one on {:?}", self.storage.device().location()),
        };
        let layout = self.layout;
        if layout.shape().elem_count() == 0 {
            // An empty view may have any strides.
            return Ok(View { numbers, strides: [0, 0, 0, 1] });
        }
        let stride = |n: usize| if layout.dims()[n] > 1 { layout.stride()[n] } else { 0 };
        let strides = match layout.dims().len() {
            4 => std::array::from_fn(stride),
            3 => [stride(0), stride(1), 0, stride(2)],
            2 => [stride(0), 0, 0, stride(1)],
            1 => [0, 0, 0, stride(0)],
            _ => bail!("expected a tensor of one to four dimensions, found {:?}", layout.dims()),
        };
        Ok(View { numbers, strides })
    }

    /// Returns the numbers from the first of the tensor on; of a list, its own numbers alone.
    fn numbers_from_start<'s, E: WithDType>(&'s self, numbers: &'s [E]) -> Result<&'s [E]> {
        if self.layout.dims().len() == 1 {
            return self.contiguous();
        }
        // An empty view may begin anywhere.
        Ok(&numbers[self.layout.start_offset().min(numbers.len())..])
    }

    /// Returns the rows of a tensor of one to four dimensions, the last of which is contiguous.
    ///
    /// # Errors
    /// For a tensor of another rank or on another device.
    pub fn rows<E: WithDType>(&self) -> Result<HeadRows<'_, E>> {
        let elements = self.elements()?;
        let start = self.layout.start_offset();
        let rows = |tokens, t, h, d, strides| HeadRows { elements, tokens, h, d, t, start, strides };
        match (self.layout.dims(), self.layout.stride()) {
            (&[b, t, h, d], &[of_b, of_t, of_h, _]) => {
                Ok(rows(b * t, t, h, d, HeadStrides { b: of_b, t: of_t, h: of_h }))
            }
            (&[b, t, d], &[of_b, of_t, _]) => Ok(rows(b * t, t, 1, d, HeadStrides { b: of_b, t: of_t, h: 0 })),
            (&[t, d], &[of_t, _]) => Ok(rows(t, t, 1, d, HeadStrides { b: 0, t: of_t, h: 0 })),
            (&[d], _) => Ok(rows(1, 1, 1, d, HeadStrides { b: 0, t: 0, h: 0 })),
            (dims, _) => bail!("rows have shape {dims:?}, expected one to four dimensions"),
        }
    }
}
