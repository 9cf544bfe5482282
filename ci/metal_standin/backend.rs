//! A stand-in for Candle's Metal backend on a machine without Metal: the CPU backend behind the limits of
//! `limits.rs`. It replaces `dummy_metal_backend.rs` in a copy of candle-core.
//!
//! As on Metal, devices are equal only to their clones, `try_clone` shares the buffer, memory of `alloc_uninit` is not
//! zero (NaN here), and `affine`, `powf` and `elu` compute in f32 with scalars in f32.
#![allow(dead_code)]
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use crate::backend::{BackendDevice, BackendStorage};
use crate::conv::{ParamsConv1D, ParamsConv2D, ParamsConvTranspose1D, ParamsConvTranspose2D};
use crate::cpu_backend::CpuDevice;
use crate::op::{BinaryOpT, CmpOp, ReduceOp, UnaryOpT};
use crate::{CpuStorage, DType, Layout, Result, Shape};

#[path = "limits.rs"]
pub mod limits;

#[derive(Clone)]
pub struct MetalDevice {
    id: usize,
    seed: Arc<Mutex<(u64, u64)>>,
}

impl std::fmt::Debug for MetalDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MetalDevice(DeviceId({}))", self.id)
    }
}

/// A buffer on the device, which clones and `try_clone` share.
#[derive(Debug, Clone)]
pub struct MetalStorage {
    buffer: Arc<RwLock<Arc<CpuStorage>>>,
    device: MetalDevice,
    dtype: DType,
}

thread_local! {
    static LAUNCHES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl MetalDevice {
    /// Returns the number of kernels that the operations of the current thread would have launched on Metal: one for
    /// each operation and each copy on the device.
    pub fn launches_of_thread() -> usize {
        LAUNCHES.get()
    }
}

#[derive(thiserror::Error, Debug)]
pub enum MetalError {
    #[error("{0}")]
    Message(String),
}

impl From<String> for MetalError {
    fn from(e: String) -> Self {
        MetalError::Message(e)
    }
}

impl MetalStorage {
    /// Returns a new buffer of numbers of the CPU.
    pub fn of_cpu(storage: CpuStorage, device: &MetalDevice) -> Self {
        let dtype = storage.dtype();
        Self { buffer: Arc::new(RwLock::new(Arc::new(storage))), device: device.clone(), dtype }
    }

    /// Returns the numbers of the buffer.
    pub fn numbers(&self) -> Arc<CpuStorage> {
        self.buffer.read().unwrap().clone()
    }

    /// Returns the result of a kernel.
    pub fn launched(storage: CpuStorage, device: &MetalDevice) -> Self {
        LAUNCHES.set(LAUNCHES.get() + 1);
        Self::of_cpu(storage, device)
    }

    fn made(&self, storage: CpuStorage) -> Result<Self> {
        Ok(Self::launched(storage, &self.device))
    }

    /// Changes the buffer by a kernel.
    fn write<R>(&self, f: impl FnOnce(&mut CpuStorage) -> R) -> R {
        LAUNCHES.set(LAUNCHES.get() + 1);
        f(Arc::make_mut(&mut self.buffer.write().unwrap()))
    }

    /// Computes in f32, as the Metal kernels of `affine`, `powf` and `elu` do, and converts back.
    fn in_f32(&self, l: &Layout, f: impl FnOnce(&CpuStorage, &Layout) -> Result<CpuStorage>) -> Result<Self> {
        let numbers = self.numbers();
        if self.dtype == DType::F32 {
            return self.made(f(&numbers, l)?);
        }
        let wide = numbers.to_dtype(l, DType::F32)?;
        let flat = Layout::contiguous(l.shape().clone());
        self.made(f(&wide, &flat)?.to_dtype(&flat, self.dtype)?)
    }
}

impl BackendStorage for MetalStorage {
    type Device = MetalDevice;

    fn try_clone(&self, _: &Layout) -> Result<Self> {
        Ok(self.clone())
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Self::Device {
        &self.device
    }

    fn const_set(&mut self, s: crate::scalar::Scalar, l: &Layout) -> Result<()> {
        limits::const_set(self.dtype)?;
        self.write(|numbers| numbers.const_set(s, l))
    }

    fn to_cpu_storage(&self) -> Result<CpuStorage> {
        match self.dtype {
            DType::F6E2M3 | DType::F6E3M2 | DType::F4 | DType::F8E8M0 => {
                Err(crate::Error::UnsupportedDTypeForOp(self.dtype, "to_cpu_storage").bt())
            }
            _ => Ok(self.numbers().as_ref().clone()),
        }
    }

    fn affine(&self, l: &Layout, mul: f64, add: f64) -> Result<Self> {
        limits::affine(self.dtype, l.is_contiguous())?;
        self.in_f32(l, |numbers, l| numbers.affine(l, mul as f32 as f64, add as f32 as f64))
    }

    fn powf(&self, l: &Layout, pow: f64) -> Result<Self> {
        limits::powf_elu("powf", self.dtype, l.is_contiguous())?;
        self.in_f32(l, |numbers, l| numbers.powf(l, pow as f32 as f64))
    }

    fn elu(&self, l: &Layout, alpha: f64) -> Result<Self> {
        limits::powf_elu("elu", self.dtype, l.is_contiguous())?;
        self.in_f32(l, |numbers, l| numbers.elu(l, alpha as f32 as f64))
    }

    fn reduce_op(&self, op: ReduceOp, l: &Layout, dims: &[usize]) -> Result<Self> {
        limits::reduce(op, self.dtype, l.is_contiguous())?;
        self.made(self.numbers().reduce_op(op, l, dims)?)
    }

    fn cmp(&self, op: CmpOp, rhs: &Self, lhs_l: &Layout, rhs_l: &Layout) -> Result<Self> {
        let name = match op {
            CmpOp::Eq => "eq",
            CmpOp::Ne => "ne",
            CmpOp::Le => "le",
            CmpOp::Ge => "ge",
            CmpOp::Lt => "lt",
            CmpOp::Gt => "gt",
        };
        limits::binary(name, self.dtype)?;
        self.made(self.numbers().cmp(op, &*rhs.numbers(), lhs_l, rhs_l)?)
    }

    fn to_dtype(&self, l: &Layout, dtype: DType) -> Result<Self> {
        limits::cast(self.dtype, dtype, l.is_contiguous())?;
        self.made(self.numbers().to_dtype(l, dtype)?)
    }

    fn unary_impl<B: UnaryOpT>(&self, l: &Layout) -> Result<Self> {
        limits::unary(B::KERNEL, self.dtype, l.is_contiguous())?;
        self.made(self.numbers().unary_impl::<B>(l)?)
    }

    fn binary_impl<B: BinaryOpT>(&self, rhs: &Self, lhs_l: &Layout, rhs_l: &Layout) -> Result<Self> {
        limits::binary(B::KERNEL, self.dtype)?;
        self.made(self.numbers().binary_impl::<B>(&*rhs.numbers(), lhs_l, rhs_l)?)
    }

    fn where_cond(&self, l: &Layout, t: &Self, t_l: &Layout, f: &Self, f_l: &Layout) -> Result<Self> {
        limits::where_cond(self.dtype, t.dtype)?;
        self.made(self.numbers().where_cond(l, &*t.numbers(), t_l, &*f.numbers(), f_l)?)
    }

    fn conv1d(&self, l: &Layout, k: &Self, k_l: &Layout, params: &ParamsConv1D) -> Result<Self> {
        limits::conv("conv1d", self.dtype, k_l)?;
        self.made(self.numbers().conv1d(l, &*k.numbers(), k_l, params)?)
    }

    fn conv_transpose1d(&self, l: &Layout, k: &Self, k_l: &Layout, params: &ParamsConvTranspose1D) -> Result<Self> {
        limits::conv("conv_transpose1d", self.dtype, k_l)?;
        self.made(self.numbers().conv_transpose1d(l, &*k.numbers(), k_l, params)?)
    }

    fn conv2d(&self, l: &Layout, k: &Self, k_l: &Layout, params: &ParamsConv2D) -> Result<Self> {
        limits::conv("conv2d", self.dtype, k_l)?;
        self.made(self.numbers().conv2d(l, &*k.numbers(), k_l, params)?)
    }

    fn conv_transpose2d(&self, l: &Layout, k: &Self, k_l: &Layout, params: &ParamsConvTranspose2D) -> Result<Self> {
        limits::conv("conv_transpose2d", self.dtype, k_l)?;
        self.made(self.numbers().conv_transpose2d(l, &*k.numbers(), k_l, params)?)
    }

    fn index_select(&self, ids: &Self, l: &Layout, ids_l: &Layout, dim: usize) -> Result<Self> {
        limits::index_select(ids.dtype, self.dtype, ids_l, l, dim)?;
        self.made(self.numbers().index_select(&*ids.numbers(), l, ids_l, dim)?)
    }

    fn gather(&self, l: &Layout, ids: &Self, ids_l: &Layout, dim: usize) -> Result<Self> {
        limits::gather(ids.dtype, self.dtype, ids_l, l)?;
        self.made(self.numbers().gather(l, &*ids.numbers(), ids_l, dim)?)
    }

    fn scatter_set(
        &mut self,
        l: &Layout,
        ids: &Self,
        ids_l: &Layout,
        src: &Self,
        src_l: &Layout,
        dim: usize,
    ) -> Result<()> {
        limits::scatter("scatter", ids.dtype, self.dtype, [l, ids_l, src_l])?;
        let (ids, src) = (ids.numbers(), src.numbers());
        self.write(|numbers| numbers.scatter_set(l, &*ids, ids_l, &*src, src_l, dim))
    }

    fn scatter_add_set(
        &mut self,
        l: &Layout,
        ids: &Self,
        ids_l: &Layout,
        src: &Self,
        src_l: &Layout,
        dim: usize,
    ) -> Result<()> {
        limits::scatter("scatter-add", ids.dtype, self.dtype, [l, ids_l, src_l])?;
        let (ids, src) = (ids.numbers(), src.numbers());
        self.write(|numbers| numbers.scatter_add_set(l, &*ids, ids_l, &*src, src_l, dim))
    }

    fn index_add(
        &self,
        l: &Layout,
        ids: &Self,
        ids_l: &Layout,
        src: &Self,
        src_l: &Layout,
        dim: usize,
    ) -> Result<Self> {
        limits::index_add(ids.dtype, self.dtype, ids_l, src_l)?;
        self.made(self.numbers().index_add(l, &*ids.numbers(), ids_l, &*src.numbers(), src_l, dim)?)
    }

    fn matmul(&self, rhs: &Self, bmnk: (usize, usize, usize, usize), lhs_l: &Layout, rhs_l: &Layout) -> Result<Self> {
        let (b, m, n, k) = bmnk;
        limits::matmul(self.dtype)?;
        let factors = (limits::factor(lhs_l.stride(), m, k), limits::factor(rhs_l.stride(), k, n));
        let (Some(left), Some(right)) = factors else {
            let (lhs_stride, rhs_stride, mnk) = (lhs_l.stride(), rhs_l.stride(), (m, n, k));
            let text = format!("Invalid matmul arguments {lhs_stride:?} {rhs_stride:?} {mnk:?}");
            return Err(MetalError::from(text).into());
        };
        let (lhs, rhs) = (self.numbers(), rhs.numbers());
        let is_empty = b * m * n * k == 0;
        let reads_beyond_end = |factor: &limits::Factor, l: &Layout, shape: [usize; 2], len: usize| {
            let [rows, columns] = shape;
            let last_row = (rows - 1) * factor.strides[0] + (columns - 1) * factor.strides[1];
            l.start_offset() + (b - 1) * factor.batch_stride + last_row + 1 > len
        };
        let ends_early = !is_empty
            && (reads_beyond_end(&left, lhs_l, [m, k], len(&lhs))
                || reads_beyond_end(&right, rhs_l, [k, n], len(&rhs)));
        let has_one_stride = |l: &Layout, factor: &limits::Factor| {
            let (dims, stride) = (l.dims(), l.stride());
            let last = dims.len() - 2;
            dims.len() < 4
                || (0..last).all(|i| {
                    dims[i] == 1 || stride[i] == factor.batch_stride * dims[i + 1..last].iter().product::<usize>()
                })
        };
        if ends_early || b > 1 && !(has_one_stride(lhs_l, &left) && has_one_stride(rhs_l, &right)) {
            limits::silent(format!("multiplies wrong numbers, by the last batch stride alone: {lhs_l:?} {rhs_l:?}"))?;
        }
        self.made(lhs.matmul(&*rhs, bmnk, lhs_l, rhs_l)?)
    }

    fn copy_strided_src(&self, dst: &mut Self, dst_offset: usize, src_l: &Layout) -> Result<()> {
        limits::copy_strided(self.dtype, src_l)?;
        let numbers = self.numbers();
        dst.write(|dst| numbers.copy_strided_src(dst, dst_offset, src_l))
    }

    fn copy2d(
        &self,
        dst: &mut Self,
        d1: usize,
        d2: usize,
        src_s: usize,
        dst_s: usize,
        src_o: usize,
        dst_o: usize,
    ) -> Result<()> {
        if self.dtype != dst.dtype {
            crate::bail!("copy2d with inconsistent dtypes {:?} {:?}", self.dtype, dst.dtype)
        }
        if d1 * d2 == 0 {
            return Ok(());
        }
        limits::copy2d(self.dtype, src_s == d2 && dst_s == d2)?;
        let numbers = self.numbers();
        dst.write(|dst| numbers.copy2d(dst, d1, d2, src_s, dst_s, src_o, dst_o))
    }

    fn avg_pool2d(&self, l: &Layout, k: (usize, usize), stride: (usize, usize)) -> Result<Self> {
        limits::image("avg_pool2d", self.dtype)?;
        self.made(self.numbers().avg_pool2d(l, k, stride)?)
    }

    fn max_pool2d(&self, l: &Layout, k: (usize, usize), stride: (usize, usize)) -> Result<Self> {
        limits::image("max_pool2d", self.dtype)?;
        self.made(self.numbers().max_pool2d(l, k, stride)?)
    }

    fn upsample_nearest1d(&self, _: &Layout, _: usize) -> Result<Self> {
        crate::bail!("Metal upsample_nearest1d not implemented")
    }

    fn upsample_nearest2d(&self, l: &Layout, w: usize, h: usize) -> Result<Self> {
        limits::image("upsample_nearest2d", self.dtype)?;
        self.made(self.numbers().upsample_nearest2d(l, w, h)?)
    }

    fn upsample_bilinear2d(
        &self,
        l: &Layout,
        h: usize,
        w: usize,
        align: bool,
        s_h: Option<f64>,
        s_w: Option<f64>,
    ) -> Result<Self> {
        limits::image("upsample_bilinear2d", self.dtype)?;
        self.made(self.numbers().upsample_bilinear2d(l, h, w, align, s_h, s_w)?)
    }
}

fn len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::U8(x) => x.len(),
        CpuStorage::U32(x) => x.len(),
        CpuStorage::I64(x) => x.len(),
        CpuStorage::F16(x) => x.len(),
        CpuStorage::BF16(x) => x.len(),
        CpuStorage::F32(x) => x.len(),
        CpuStorage::F64(x) => x.len(),
        _ => 1,
    }
}

impl MetalDevice {
    /// Draws a number from 0 to 1 by SplitMix64. Metal draws others.
    fn draw(&self) -> f64 {
        let mut seed = self.seed.lock().unwrap();
        seed.1 = seed.1.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = seed.1;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f64 / (1u64 << 24) as f64
    }

    fn drawn(&self, shape: &Shape, dtype: DType, f: impl Fn() -> f64) -> Result<MetalStorage> {
        limits::random(dtype)?;
        let numbers = CpuStorage::F32((0..shape.elem_count()).map(|_| f() as f32).collect());
        let flat = Layout::contiguous(shape.clone());
        let numbers = if dtype == DType::F32 { numbers } else { numbers.to_dtype(&flat, dtype)? };
        Ok(MetalStorage::of_cpu(numbers, self))
    }
}

impl BackendDevice for MetalDevice {
    type Storage = MetalStorage;

    fn new(ordinal: usize) -> Result<Self> {
        static IDS: AtomicUsize = AtomicUsize::new(1);
        assert_eq!(ordinal, 0, "there is one device");
        let seed = 299792458;
        Ok(Self { id: IDS.fetch_add(1, Ordering::Relaxed), seed: Arc::new(Mutex::new((seed, seed))) })
    }

    fn set_seed(&self, seed: u64) -> Result<()> {
        *self.seed.lock().unwrap() = (seed, seed);
        Ok(())
    }

    fn get_current_seed(&self) -> Result<u64> {
        Ok(self.seed.lock().unwrap().0)
    }

    fn location(&self) -> crate::DeviceLocation {
        crate::DeviceLocation::Metal { gpu_id: 1 }
    }

    fn same_device(&self, rhs: &Self) -> bool {
        self.id == rhs.id
    }

    fn zeros_impl(&self, shape: &Shape, dtype: DType) -> Result<Self::Storage> {
        Ok(MetalStorage::of_cpu(CpuDevice.zeros_impl(shape, dtype)?, self))
    }

    unsafe fn alloc_uninit(&self, shape: &Shape, dtype: DType) -> Result<Self::Storage> {
        let mut storage = CpuDevice.zeros_impl(shape, dtype)?;
        match &mut storage {
            CpuStorage::F32(x) => x.fill(f32::NAN),
            CpuStorage::F16(x) => x.fill(half::f16::NAN),
            CpuStorage::BF16(x) => x.fill(half::bf16::NAN),
            CpuStorage::F64(x) => x.fill(f64::NAN),
            CpuStorage::U8(x) => x.fill(0xab),
            CpuStorage::U32(x) => x.fill(0xabab),
            CpuStorage::I64(x) => x.fill(-0xabab),
            _ => {}
        }
        Ok(MetalStorage::of_cpu(storage, self))
    }

    fn storage_from_slice<T: crate::WithDType>(&self, s: &[T]) -> Result<Self::Storage> {
        limits::from_slice(s.len())?;
        Ok(MetalStorage::of_cpu(CpuDevice.storage_from_slice(s)?, self))
    }

    fn storage_from_cpu_storage(&self, s: &CpuStorage) -> Result<Self::Storage> {
        limits::from_slice(len(s))?;
        Ok(MetalStorage::of_cpu(s.clone(), self))
    }

    fn storage_from_cpu_storage_owned(&self, s: CpuStorage) -> Result<Self::Storage> {
        self.storage_from_cpu_storage(&s)
    }

    fn rand_uniform(&self, shape: &Shape, dtype: DType, min: f64, max: f64) -> Result<Self::Storage> {
        self.drawn(shape, dtype, || min + (max - min) * self.draw())
    }

    fn rand_normal(&self, shape: &Shape, dtype: DType, mean: f64, std: f64) -> Result<Self::Storage> {
        self.drawn(shape, dtype, || {
            let (u, v) = (1.0 - self.draw(), self.draw());
            mean + std * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
        })
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
}
