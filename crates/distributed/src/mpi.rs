//! Processes that `mpirun` started, over MPI (<https://www.mpi-forum.org/docs/>).

use std::cell::Cell;
use std::convert::identity;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Result, Storage, Tensor, WithDType, bail};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use mpi::Threading;
use mpi::collective::SystemOperation;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, CommunicatorCollectives, Destination, Equivalence, Source};

use crate::communicator::expect_untracked;
use crate::communicator::{Communicator, check_same};

/// Does something with the type of a tensor's numbers.
macro_rules! by_dtype {
    ($xs:expr, $T:ident => $call:expr) => {
        crate::communicator::with_dtype!(
            [F32 f32, F64 f64, BF16 bf16, F16 f16, U8 u8, U32 u32, I64 i64],
            "[mpi] no transfer of {:?}, expected F32, F64, BF16, F16, U8, U32 or I64",
            $xs, $T => $call
        )
    };
}

/// How long a transfer is left alone while the process computes.
const POLL: Duration = Duration::from_micros(100);

/// Numbers that are added up at a time: few enough for the buffers that MPI makes to stay in the cache and in the heap,
/// instead of pages that the system makes anew.
const SUM_CHUNK: usize = 1 << 17;

/// All processes of an `mpirun`. Tensors on other devices than the CPU go through its memory.
pub struct Mpi {
    world: SimpleCommunicator,
    rank: usize,
    size: usize,
    bytes_sent: Cell<u64>,
    /// Ends MPI when it is dropped.
    _universe: Universe,
}

/// Runs a program in each of the processes. If one of them fails or panics, it says so on stderr, by its rank, and all
/// are ended.
pub fn run(main: impl FnOnce(&Rc<Mpi>) -> Result<()>) -> ExitCode {
    let mpi = match Mpi::init() {
        Ok(mpi) => Rc::new(mpi),
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = catch_unwind(AssertUnwindSafe(|| {
        check_same(&*mpi, "the program's version", env!("CARGO_PKG_VERSION").as_bytes())?;
        main(&mpi)
    }));
    let problem = match ended {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) => error.to_string().lines().next().unwrap_or_default().to_string(),
        Err(_) => "it panicked".to_string(),
    };
    mpi.say(&format!("error: {problem}"));
    mpi.world.abort(1)
}

impl Mpi {
    fn init() -> Result<Self> {
        // A thread of its own makes the calls of a transfer, while no other makes any.
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Serialized) else {
            bail!("[mpi] MPI was initialized before")
        };
        if threading < Threading::Serialized {
            bail!("[mpi] the MPI library has {threading:?} threads, expected MPI_THREAD_SERIALIZED")
        }
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        Ok(Self { world, rank, size, bytes_sent: Cell::new(0), _universe: universe })
    }

    /// The number of this process's GPU: the processes on a machine take its GPUs in turn. All processes call it
    /// together.
    pub fn device_number(&self) -> usize {
        let on_this_machine = self.world.split_shared(self.rank as i32).rank() as usize;
        #[cfg(feature = "nccl")]
        if let Ok(gpus @ 1..) = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count() {
            return on_this_machine % gpus as usize;
        }
        on_this_machine
    }

    /// The processes for tensors on `device`: over NCCL where that is a GPU and the crate has the feature `nccl`, else
    /// over MPI. All processes call it together.
    ///
    /// # Errors
    /// If NCCL fails, for example where two processes have one GPU.
    pub fn for_device(self: &Rc<Self>, device: &Device) -> Result<Rc<dyn Communicator>> {
        #[cfg(feature = "nccl")]
        if device.is_cuda() {
            return Ok(Rc::new(crate::nccl::Nccl::new(device, &**self)?));
        }
        let _ = device;
        Ok(self.clone())
    }

    /// A line on stderr that begins with the process's rank, in one piece beside what other processes say.
    pub fn say(&self, text: &str) {
        let line = format!("process {} of {}: {text}\n", self.rank, self.size);
        // There is nobody else to tell.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    /// Checks and counts a tensor that is sent; `copies` of it are one buffer.
    fn count(&self, xs: &Tensor, copies: usize) -> Result<()> {
        expect_untracked("mpi", &[xs])?;
        if i32::try_from(xs.elem_count().saturating_mul(copies)).is_err() {
            bail!("[mpi] {copies} tensors {:?} have more numbers than MPI counts, expected less than 2^31", xs.dims())
        }
        if self.size > 1 {
            self.bytes_sent.set(self.bytes_sent.get() + (xs.elem_count() * xs.dtype().size_in_bytes()) as u64);
        }
        Ok(())
    }

    fn sum<T: Number>(&self, xs: &Tensor) -> Result<Tensor> {
        let mut sum = vec![T::Sent::default(); xs.elem_count()];
        with_numbers::<T, _>(xs, |own| {
            for (own, sum) in own.chunks(SUM_CHUNK).zip(sum.chunks_mut(SUM_CHUNK)) {
                self.world.all_reduce_into(own, sum, SystemOperation::sum());
            }
        })?;
        Tensor::from_vec(T::received(sum), xs.shape(), xs.device())
    }

    fn gather<T: Number>(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        let mut all = vec![T::Sent::default(); self.size * xs.elem_count()];
        with_numbers::<T, _>(xs, |own| self.world.all_gather_into(own, &mut all[..]))?;
        let all = Tensor::from_vec(T::received(all), [&[self.size], xs.dims()].concat(), xs.device())?;
        (0..self.size).map(|rank| all.get(rank)).collect()
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    /// Half precision is added up in f32.
    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor> {
        if matches!(xs.dtype(), DType::BF16 | DType::F16) {
            return self.all_reduce_sum(&xs.to_dtype(DType::F32)?)?.to_dtype(xs.dtype());
        }
        self.count(xs, 1)?;
        match xs.dtype() {
            DType::F32 => self.sum::<f32>(xs),
            DType::F64 => self.sum::<f64>(xs),
            DType::U32 => self.sum::<u32>(xs),
            DType::I64 => self.sum::<i64>(xs),
            other => bail!("[mpi] no sum of {other:?}, expected F32, F64, BF16, F16, U32 or I64"),
        }
    }

    fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        self.count(xs, self.size)?;
        by_dtype!(xs, T => self.gather::<T>(xs))
    }

    /// The transfer goes on in a thread that looks after it ten thousand times a second, until the computation is done.
    fn send_recv(
        &self,
        xs: &[Tensor],
        shapes: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        xs.iter().try_for_each(|xs| self.count(xs, 1))?;
        let (ring, is_urgent) = (Ring { rank: self.rank, size: self.size }, AtomicBool::new(false));
        let pass = |(xs, shape): (&Tensor, &Vec<usize>)| by_dtype!(xs, T => ring.pass::<T>(xs, shape, &is_urgent));
        thread::scope(|scope| {
            let transfer = scope.spawn(|| xs.iter().zip(shapes).map(pass).collect::<Result<Vec<_>>>());
            let computed = meanwhile();
            is_urgent.store(true, Ordering::Relaxed);
            let received = transfer.join().unwrap_or_else(|panic| resume_unwind(panic));
            computed.and(received)
        })
    }

    fn bytes_sent(&self) -> u64 {
        self.bytes_sent.get()
    }
}

/// A process's place in the ring.
#[derive(Clone, Copy)]
struct Ring {
    rank: usize,
    size: usize,
}

impl Ring {
    /// Sends a tensor to the next process, and receives one of this shape from the one before.
    fn pass<T: Number>(self, xs: &Tensor, shape: &[usize], is_urgent: &AtomicBool) -> Result<Tensor> {
        let mut received = vec![T::Sent::default(); shape.iter().product()];
        let (next, previous) = ((self.rank + 1) % self.size, (self.rank + self.size - 1) % self.size);
        with_numbers::<T, _>(xs, |own| {
            let world = SimpleCommunicator::world();
            mpi::request::scope(|scope| {
                let mut pending = vec![
                    world.process_at_rank(previous as i32).immediate_receive_into(scope, &mut received[..]),
                    world.process_at_rank(next as i32).immediate_send(scope, own),
                ];
                // An MPI library moves what is sent while it is called.
                while !pending.is_empty() {
                    pending = pending.into_iter().filter_map(|request| request.test().err()).collect();
                    if is_urgent.load(Ordering::Relaxed) { thread::yield_now() } else { thread::sleep(POLL) }
                }
            });
        })?;
        Tensor::from_vec(T::received(received), shape, xs.device())
    }
}

/// Calls a function with the numbers of a tensor as MPI sends them.
fn with_numbers<T: Number, R>(xs: &Tensor, call: impl FnOnce(&[T::Sent]) -> R) -> Result<R> {
    let xs = xs.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = xs.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("[mpi] the tensor is not in the CPU's memory") };
    let numbers = &storage.as_slice::<T>()?[layout.start_offset()..][..xs.elem_count()];
    Ok(call(T::sent(numbers)))
}

/// A type of Candle's, as one of MPI's.
trait Number: WithDType {
    type Sent: Equivalence + Clone + Default;

    fn sent(numbers: &[Self]) -> &[Self::Sent];

    fn received(numbers: Vec<Self::Sent>) -> Vec<Self>;
}

macro_rules! number {
    ($t:ty, $sent:ty, $to:expr, $from:expr) => {
        impl Number for $t {
            type Sent = $sent;

            fn sent(numbers: &[Self]) -> &[Self::Sent] {
                $to(numbers)
            }

            fn received(numbers: Vec<Self::Sent>) -> Vec<Self> {
                $from(numbers)
            }
        }
    };
}
number!(f32, f32, identity, identity);
number!(f64, f64, identity, identity);
number!(u8, u8, identity, identity);
number!(u32, u32, identity, identity);
number!(i64, i64, identity, identity);
// MPI has no half precision: as bits.
number!(bf16, u16, HalfFloatSliceExt::reinterpret_cast, HalfBitsVecExt::reinterpret_into);
number!(f16, u16, HalfFloatSliceExt::reinterpret_cast, HalfBitsVecExt::reinterpret_into);
