//! Communication between GPUs, one for each rank, over NCCL (<https://docs.nvidia.com/deeplearning/nccl/>) through
//! Candle's `cudarc`.

use std::cell::Cell;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr, ValidAsZeroBits};
use candle_core::cuda_backend::cudarc::nccl::result::NcclError;
use candle_core::cuda_backend::cudarc::nccl::safe::{Comm, Id, NcclType, ReduceOp, group_end, group_start};
use candle_core::cuda_backend::{CudaDType, CudaDevice};
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Device, Error, Result, Storage, Tensor, bail};
use half::{bf16, f16};

use crate::communicator::Communicator;
use crate::communicator::expect_untracked;

/// Communicator of one rank's GPU. Transfers run on a separate CUDA stream. It waits for the device's stream before a
/// transfer, and the device's stream waits for it afterwards. Tensors on the CPU are copied through the GPU's memory.
pub struct Nccl {
    comm: Comm,
    device: CudaDevice,
    bytes_sent: Cell<u64>,
}

impl Nccl {
    /// Connects the GPUs of all ranks. `others`, for example `Mpi`, sends NCCL's id from rank 0 to the other ranks.
    ///
    /// # Errors
    /// If the device is not a GPU, or if NCCL fails, for example because two ranks use one GPU.
    pub fn new(device: &Device, others: &dyn Communicator) -> Result<Self> {
        let Device::Cuda(device) = device else {
            bail!("[nccl] expected a CUDA device, found {:?}", device.location())
        };
        let id = if others.rank() == 0 { *Id::new().map_err(failed)?.internal() } else { [0; 128] };
        let id = Tensor::new(id.map(|byte| byte as u8).as_slice(), &Device::Cpu)?;
        let id = others.all_gather(&id)?[0].to_vec1::<u8>()?;
        let id = Id::uninit(std::array::from_fn(|i| id[i] as std::ffi::c_char));
        let stream = device.cuda_stream().context().new_stream().map_err(Error::wrap)?;
        let comm = Comm::from_rank(stream, others.rank(), others.size(), id).map_err(failed)?;
        Ok(Self { comm, device: device.clone(), bytes_sent: Cell::new(0) })
    }

    /// Returns a tensor as NCCL sends it: on the GPU, and with a storage that has no other numbers.
    fn sent(&self, xs: &Tensor) -> Result<Tensor> {
        expect_untracked("nccl", &[xs])?;
        xs.to_device(&Device::Cuda(self.device.clone()))?.force_contiguous()
    }

    /// Starts `call` on a contiguous tensor after the work that is queued on the device's stream, and returns its
    /// output of `len` numbers. The output is valid for work that is queued after [`finish`](Self::finish).
    fn start<T: CudaDType + DeviceRepr + ValidAsZeroBits>(
        &self,
        xs: &Tensor,
        len: usize,
        call: impl FnOnce(&CudaSlice<T>, &mut CudaSlice<T>) -> std::result::Result<(), NcclError>,
    ) -> Result<Storage> {
        let (storage, layout) = xs.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("[nccl] the tensor is not on a GPU") };
        if layout.start_offset() != 0 || storage.as_cuda_slice::<T>()?.len() != xs.elem_count() {
            bail!("[nccl] expected a tensor that is all of its storage")
        }
        let mut filled = self.device.alloc_zeros::<T>(len)?;
        self.comm.stream().join(&self.device.cuda_stream()).map_err(Error::wrap)?;
        call(storage.as_cuda_slice::<T>()?, &mut filled).map_err(failed)?;
        if self.comm.world_size() > 1 {
            self.bytes_sent.set(self.bytes_sent.get() + (xs.elem_count() * xs.dtype().size_in_bytes()) as u64);
        }
        Ok(Storage::Cuda(CudaStorage::wrap_cuda_slice(filled, self.device.clone())))
    }

    /// Makes later work on the device's stream wait for NCCL's.
    fn finish(&self) -> Result<()> {
        let device: Arc<CudaStream> = self.device.cuda_stream();
        device.join(&self.comm.stream()).map_err(Error::wrap)
    }

    fn gather<T: CudaDType + DeviceRepr + ValidAsZeroBits + NcclType>(&self, xs: &Tensor) -> Result<Storage> {
        let len = xs.elem_count() * self.size();
        self.start::<T>(xs, len, |own, all| self.comm.all_gather(own, all).map(drop))
    }

    fn sum<T: CudaDType + DeviceRepr + ValidAsZeroBits + NcclType>(&self, xs: &Tensor) -> Result<Storage> {
        self.start::<T>(xs, xs.elem_count(), |own, sum| self.comm.all_reduce(own, sum, &ReduceOp::Sum).map(drop))
    }

    fn pass<T: CudaDType + DeviceRepr + ValidAsZeroBits + NcclType>(&self, xs: &Tensor, len: usize) -> Result<Storage> {
        let rank = self.rank();
        let size = self.size();
        self.start::<T>(xs, len, |own, received| {
            group_start()?;
            self.comm.send(own, ((rank + 1) % size) as i32)?;
            self.comm.recv(received, ((rank + size - 1) % size) as i32)?;
            group_end().map(drop)
        })
    }
}

/// Evaluates `$call` with `$T` as the type of a tensor's numbers.
macro_rules! by_dtype {
    ($xs:expr, $T:ident => $call:expr) => {
        crate::communicator::with_dtype!(
            [F32 f32, F64 f64, BF16 bf16, F16 f16, U32 u32, I64 i64],
            "[nccl] no transfer of {:?}, expected F32, F64, BF16, F16, U32 or I64",
            $xs, $T => $call
        )
    };
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.world_size()
    }

    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor> {
        let own = self.sent(xs)?;
        let sum = by_dtype!(xs, T => self.sum::<T>(&own))?;
        self.finish()?;
        Tensor::from_storage(sum, xs.shape(), BackpropOp::none(), false).to_device(xs.device())
    }

    fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        let own = self.sent(xs)?;
        let all = by_dtype!(xs, T => self.gather::<T>(&own))?;
        self.finish()?;
        let shape = [&[self.size()], xs.dims()].concat();
        let all = Tensor::from_storage(all, shape, BackpropOp::none(), false).to_device(xs.device())?;
        (0..self.size()).map(|rank| all.get(rank)).collect()
    }

    fn send_recv(
        &self,
        xs: &[Tensor],
        shapes: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        let own = xs.iter().map(|tensor| self.sent(tensor)).collect::<Result<Vec<_>>>()?;
        let pass =
            |(sent, shape): (&Tensor, &Vec<usize>)| by_dtype!(sent, T => self.pass::<T>(sent, shape.iter().product()));
        let received = own.iter().zip(shapes).map(pass).collect::<Result<Vec<_>>>();
        let computed = meanwhile();
        // The tensors that are being sent may be dropped only after this.
        self.finish()?;
        computed?;
        let mut tensors = Vec::with_capacity(xs.len());
        for ((storage, shape), tensor) in received?.into_iter().zip(shapes).zip(xs) {
            let on_gpu = Tensor::from_storage(storage, shape.as_slice(), BackpropOp::none(), false);
            tensors.push(on_gpu.to_device(tensor.device())?);
        }
        Ok(tensors)
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent.get()
    }
}

fn failed(error: NcclError) -> Error {
    Error::msg(format!("[nccl] {:?}", error.0))
}
