//! Communication between ranks.

use candle_core::{Device, Result, Tensor, bail};

/// Collective operations of ranks, which are processes that compute a result together. Every rank makes the same calls
/// in the same order.
///
/// Gradients do not pass between ranks. Implementations that send tensors reject a tensor that is tracked for
/// gradients, since its gradients would be lost. [`SingleProcess`] returns its tensors unchanged.
pub trait Communicator {
    /// Returns the rank of this process, which counts from 0.
    fn rank(&self) -> usize;

    /// Returns the world size: the number of ranks.
    fn size(&self) -> usize;

    /// Returns the sum of the tensors of all ranks, which have one shape and dtype (all-reduce).
    ///
    /// # Errors
    /// If the library does not support the dtype, if the tensor is tracked for gradients, or if the library fails.
    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor>;

    /// Returns the tensors of all ranks, which have one shape and dtype, in the order of the ranks (all-gather).
    ///
    /// # Errors
    /// The errors of [`all_reduce_sum`](Self::all_reduce_sum).
    fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>>;

    /// Sends tensors to the next rank of the ring and receives tensors from the previous rank while `meanwhile`
    /// computes. The received tensors have `shapes` and the dtypes of `xs`.
    ///
    /// # Errors
    /// The errors of [`all_reduce_sum`](Self::all_reduce_sum) and of `meanwhile`.
    fn send_recv(
        &self,
        xs: &[Tensor],
        shapes: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>>;

    /// Returns the number of bytes of all tensors that this rank has passed to the library so far: its tensor of each
    /// all-reduce and all-gather, and the tensors that it sent around the ring. A single rank sends 0 bytes.
    fn bytes_sent(&self) -> u64;
}

/// Communicator of a single rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleProcess;

impl Communicator for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor> {
        Ok(xs.clone())
    }

    fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>> {
        Ok(vec![xs.clone()])
    }

    fn send_recv(
        &self,
        xs: &[Tensor],
        _: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>> {
        meanwhile()?;
        Ok(xs.to_vec())
    }

    fn bytes_sent(&self) -> u64 {
        0
    }
}

/// Checks by a checksum that `bytes` are the same on all ranks, such as a config or the names of a file's tensors.
/// Otherwise ranks could wait for each other forever, or compute different results. The error names them `what`.
///
/// # Errors
/// On every rank, if the bytes of one rank differ. The message names the ranks that differ from rank 0.
pub fn check_same(processes: &dyn Communicator, what: &str, bytes: &[u8]) -> Result<()> {
    // FNV-1a.
    let checksum =
        bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let all = processes.all_gather(&Tensor::new(&[checksum as i64], &Device::Cpu)?)?;
    let all = all.iter().map(|sum| sum.to_vec1::<i64>()).collect::<Result<Vec<_>>>()?;
    let others: Vec<_> = (0..all.len()).filter(|&rank| all[rank] != all[0]).map(|rank| rank.to_string()).collect();
    if !others.is_empty() {
        bail!(
            "[distributed] expected {what} to be the same on all ranks, found a difference between rank 0 and rank {}",
            others.join(", ")
        )
    }
    Ok(())
}

/// Checks that no tensor is tracked for gradients, which would be lost.
pub(crate) fn expect_untracked(op: &str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().find(|xs| xs.track_op() && xs.dtype().is_float()) {
        None => Ok(()),
        Some(xs) => bail!(
            "[{op}] a tensor {:?} is tracked for gradients, which would be lost; expected a layer that is frozen \
             (`mha.freeze()?`) and an input that is detached (`xs.detach()`)",
            xs.dims()
        ),
    }
}

/// Evaluates `$call` with `$T` as the type of a tensor's numbers. A dtype that the library does not transfer is an
/// error with `$message`.
#[cfg(any(feature = "mpi", feature = "nccl"))]
macro_rules! with_dtype {
    ([$($dtype:ident $type:ty),+], $message:literal, $xs:expr, $T:ident => $call:expr) => {
        match $xs.dtype() {
            $(candle_core::DType::$dtype => {
                type $T = $type;
                $call
            })+
            other => candle_core::bail!($message, other),
        }
    };
}
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use with_dtype;
