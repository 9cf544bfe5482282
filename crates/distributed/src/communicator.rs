//! What processes have to be able to do together.

use candle_core::{Device, Result, Tensor, bail};

/// The processes that compute something together. Each of them makes the same calls in the same order.
///
/// Gradients do not go from process to process. Implementations that send tensors refuse those that are tracked for
/// gradients, which would be lost; [`SingleProcess`] returns its tensors as they are.
pub trait Communicator {
    /// Which process this is, from 0 on.
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn size(&self) -> usize;

    /// The sum over all processes of tensors of one shape and dtype.
    ///
    /// # Errors
    /// For dtypes that the library does not have, for a tensor that is tracked for gradients, and if it fails.
    fn all_reduce_sum(&self, xs: &Tensor) -> Result<Tensor>;

    /// The tensors of all processes, of one shape and dtype, in the order of their ranks.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum).
    fn all_gather(&self, xs: &Tensor) -> Result<Vec<Tensor>>;

    /// Sends tensors to the next process of the ring and receives the ones of the process before, which have these
    /// shapes and the same dtypes, while `meanwhile` computes.
    ///
    /// # Errors
    /// As [`all_reduce_sum`](Self::all_reduce_sum), and those of `meanwhile`.
    fn send_recv(
        &self,
        xs: &[Tensor],
        shapes: &[Vec<usize>],
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Tensor>>;

    /// The bytes of all tensors that this process has handed over so far: its own one of a sum and of a gather, and
    /// what it sent around the ring. Alone it sends nothing.
    fn bytes_sent(&self) -> u64;
}

/// One process alone.
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

/// Checks, by a checksum, that something is the same in all processes, so that they do not wait for each other in vain
/// or compute different things: a config, the names of a file's tensors. `what` it is stands in the error.
///
/// # Errors
/// In every process, if it differs in one; the message names those that differ from process 0.
pub fn check_same(processes: &dyn Communicator, what: &str, bytes: &[u8]) -> Result<()> {
    // FNV-1a.
    let checksum =
        bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let all = processes.all_gather(&Tensor::new(&[checksum as i64], &Device::Cpu)?)?;
    let all = all.iter().map(|sum| sum.to_vec1::<i64>()).collect::<Result<Vec<_>>>()?;
    let others: Vec<_> = (0..all.len()).filter(|&rank| all[rank] != all[0]).map(|rank| rank.to_string()).collect();
    if !others.is_empty() {
        bail!(
            "[distributed] expected {what} to be the same in all processes, found another in process {} than in process 0",
            others.join(", ")
        )
    }
    Ok(())
}

/// Refuses tensors that are tracked for gradients, where these would be lost.
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

/// Does something with the type of a tensor's numbers, if it is one of those that a library transfers, and fails with a
/// message about its dtype otherwise.
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
