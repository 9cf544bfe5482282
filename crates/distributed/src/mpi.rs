//! Communication over MPI between the ranks that `mpirun` started (<https://www.mpi-forum.org/docs/>).

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

/// Evaluates `$call` with `$T` as the type of a tensor's numbers.
macro_rules! by_dtype {
    ($xs:expr, $T:ident => $call:expr) => {
        crate::communicator::with_dtype!(
            [F32 f32, F64 f64, BF16 bf16, F16 f16, U8 u8, U32 u32, I64 i64],
            "[mpi] no transfer of {:?}, expected F32, F64, BF16, F16, U8, U32 or I64",
            $xs, $T => $call
        )
    };
}

/// Time between two calls of MPI for a transfer while this rank computes.
const POLL: Duration = Duration::from_micros(100);

/// Numbers of one call of MPI's all-reduce. MPI allocates buffers of this size: they are small enough to stay in the
/// cache, and the allocator reuses them. Larger buffers would be new pages from the system in each call.
const SUM_CHUNK: usize = 1 << 17;

/// Ranks of an `mpirun`. Tensors on devices other than the CPU are copied through the CPU's memory.
pub struct Mpi {
    world: SimpleCommunicator,
    rank: usize,
    size: usize,
    bytes_sent: Cell<u64>,
    /// Guard that finalizes MPI when it is dropped.
    _universe: Universe,
}

/// Runs `main` on each rank. A rank that fails or panics prints the error and its rank to stderr, and all ranks end.
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
        // A separate thread calls MPI during a transfer, and no other thread does at that time.
        let Some((universe, threading)) = mpi::initialize_with_threading(Threading::Serialized) else {
            bail!("[mpi] MPI was initialized before")
        };
        if threading < Threading::Serialized {
            bail!("[mpi] the MPI library has {threading:?} threads, expected MPI_THREAD_SERIALIZED")
        }
        let world = universe.world();
        let rank = world.rank() as usize;
        let size = world.size() as usize;
        Ok(Self { world, rank, size, bytes_sent: Cell::new(0), _universe: universe })
    }

    /// Returns the number of this rank's GPU. The ranks on a machine use its GPUs in turn. All ranks call this function
    /// together.
    pub fn device_number(&self) -> usize {
        let on_this_machine = self.world.split_shared(self.rank as i32).rank() as usize;
        #[cfg(feature = "nccl")]
        if let Ok(gpus @ 1..) = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count() {
            return on_this_machine % gpus as usize;
        }
        on_this_machine
    }

    /// Returns the communicator for tensors on `device`: NCCL's if the device is a GPU and the crate has the feature
    /// `nccl`, otherwise MPI's. All ranks call this function together.
    ///
    /// # Errors
    /// If NCCL fails, for example because two ranks use one GPU.
    pub fn for_device(self: &Rc<Self>, device: &Device) -> Result<Rc<dyn Communicator>> {
        #[cfg(feature = "nccl")]
        if device.is_cuda() {
            return Ok(Rc::new(crate::nccl::Nccl::new(device, &**self)?));
        }
        let _ = device;
        Ok(self.clone())
    }

    /// Prints a line that begins with the rank to stderr. One write keeps it apart from the lines of other ranks.
    pub fn say(&self, text: &str) {
        let line = format!("rank {} of {}: {text}\n", self.rank, self.size);
        // An error of stderr cannot be reported.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    /// Checks a tensor before it is sent, and counts its bytes. MPI's buffer has the size of `copies` such tensors.
    fn count(&self, xs: &Tensor, copies: usize) -> Result<()> {
        expect_untracked("mpi", &[xs])?;
        if i32::try_from(xs.elem_count().saturating_mul(copies)).is_err() {
            bail!("[mpi] {copies} tensors {:?} exceed the limit of MPI, expected fewer than 2^31 numbers", xs.dims())
        }
        if self.size > 1 {
            self.bytes_sent.set(self.bytes_sent.get() + (xs.elem_count() * xs.dtype().size_in_bytes()) as u64);
        }
        Ok(())
    }

    fn sum<T: MpiNumber>(&self, xs: &Tensor) -> Result<Tensor> {
        let mut sum = vec![T::Sent::default(); xs.elem_count()];
        with_numbers::<T, _>(xs, |own| {
            for (own_chunk, sum_chunk) in own.chunks(SUM_CHUNK).zip(sum.chunks_mut(SUM_CHUNK)) {
                self.world.all_reduce_into(own_chunk, sum_chunk, SystemOperation::sum());
            }
        })?;
        Tensor::from_vec(T::received(sum), xs.shape(), xs.device())
    }

    fn gather<T: MpiNumber>(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
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

    /// Adds half precision in f32.
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

    /// Transfers in a thread that calls MPI every [`POLL`] while this rank computes, and continuously afterwards.
    fn send_recv(
        &self,
        xs: &[Tensor],
        shapes: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        xs.iter().try_for_each(|xs| self.count(xs, 1))?;
        let ring = Ring { rank: self.rank, size: self.size };
        let is_urgent = AtomicBool::new(false);
        let pass =
            |(sent, shape): (&Tensor, &Vec<usize>)| by_dtype!(sent, T => ring.pass::<T>(sent, shape, &is_urgent));
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

/// Position of a rank in the ring.
#[derive(Clone, Copy)]
struct Ring {
    rank: usize,
    size: usize,
}

impl Ring {
    /// Sends a tensor to the next rank, and receives a tensor of `shape` from the previous rank.
    fn pass<T: MpiNumber>(self, xs: &Tensor, shape: &[usize], is_urgent: &AtomicBool) -> Result<Tensor> {
        let mut received = vec![T::Sent::default(); shape.iter().product()];
        let next = (self.rank + 1) % self.size;
        let previous = (self.rank + self.size - 1) % self.size;
        with_numbers::<T, _>(xs, |own| {
            let world = SimpleCommunicator::world();
            mpi::request::scope(|scope| {
                let mut pending = vec![
                    world.process_at_rank(previous as i32).immediate_receive_into(scope, &mut received[..]),
                    world.process_at_rank(next as i32).immediate_send(scope, own),
                ];
                // MPI may transfer data only during its calls.
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
fn with_numbers<T: MpiNumber, R>(xs: &Tensor, call: impl FnOnce(&[T::Sent]) -> R) -> Result<R> {
    let xs = xs.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = xs.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("[mpi] the tensor is not in the CPU's memory") };
    let numbers = &storage.as_slice::<T>()?[layout.start_offset()..][..xs.elem_count()];
    Ok(call(T::sent(numbers)))
}

/// Number type of Candle with the type that MPI sends for it.
trait MpiNumber: WithDType {
    type Sent: Equivalence + Clone + Default;

    fn sent(numbers: &[Self]) -> &[Self::Sent];

    fn received(numbers: Vec<Self::Sent>) -> Vec<Self>;
}

macro_rules! number {
    ($t:ty, $sent:ty, $to:expr, $from:expr) => {
        impl MpiNumber for $t {
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
// MPI has no half precision: the bits are sent as u16.
number!(bf16, u16, HalfFloatSliceExt::reinterpret_cast, HalfBitsVecExt::reinterpret_into);
number!(f16, u16, HalfFloatSliceExt::reinterpret_cast, HalfBitsVecExt::reinterpret_into);
