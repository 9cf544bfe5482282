//! Attention over a sequence whose keys are on several processes.

use candle_attention::{
    AttentionFunction, AttentionMask, MultiHeadAttentionConfig, SdpaOptions, merge_attention,
    scaled_dot_product_attention_with_lse,
};
use candle_core::{Result, Tensor, bail};

use crate::{Communicator, ZigZag};

/// Ring attention (Liu et al. 2023, arXiv:2310.01889): each process keeps the queries of its positions, and keys and
/// values go from process to process, the next ones while the last ones are attended to. What a query saw in each place
/// is merged by its log-sum-exp.
///
/// One process gives the bits of [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention).
/// Several add up the parts of a query in another order than one would, so that results of different numbers of
/// processes differ by roundings, about 1e-6 of the values; those of one number of processes are the same bits every
/// time.
///
/// ```
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig};
/// use candle_attention_distributed::{RingAttention, SingleProcess, ZigZag};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let processes = SingleProcess; // or mpi::Mpi, in each of several processes
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_rope(RopeConfig::new(10_000.0));
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let order = ZigZag::new(1024, &processes);
/// let positions = order.positions().map(|position| position as u32).collect::<Vec<_>>();
/// let xs = Tensor::randn(0f32, 1., (1, positions.len(), 64), &Device::Cpu)?; // of these positions
/// let positions = Tensor::new(positions, &Device::Cpu)?;
///
/// let ring = RingAttention::for_layer(&cfg)?;
/// let attend = ring.function(&order, &processes);
/// let ys = mha.forward_with(AttentionInput::new(&xs).with_positions(&positions).with_function(&attend))?;
/// assert_eq!(ys.dims(), xs.dims());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct RingAttention {
    causal: bool,
    options: SdpaOptions,
}

impl RingAttention {
    /// Every query sees every key.
    pub fn new() -> Self {
        Self::default()
    }

    /// A query sees the keys of its own position and of those before it.
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.options = self.options.with_scale(scale);
        self
    }

    /// Bounds the scores to ±`softcap`.
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.options = self.options.with_softcap(softcap);
        self
    }

    /// The attention of a layer.
    ///
    /// # Errors
    /// For what depends on the distance of a key (windows, bands, chunks, ALiBi, relative biases), and for sinks and
    /// appended keys, which belong to one part only.
    pub fn for_layer(cfg: &MultiHeadAttentionConfig) -> Result<Self> {
        let obstacle = [
            (cfg.window().is_some(), "a window"),
            (cfg.band().is_some(), "a band"),
            (cfg.chunk().is_some(), "chunks"),
            (cfg.alibi().is_some(), "ALiBi"),
            (cfg.relative_bias().is_some(), "a relative bias"),
            (cfg.sinks(), "sinks"),
            (cfg.bias_kv() || cfg.add_zero_attn(), "keys that it appends"),
        ];
        if let Some((_, obstacle)) = obstacle.iter().find(|(has, _)| *has) {
            bail!("[ring_attention] the layer has {obstacle}, which a ring of processes does not take")
        }
        let mut ring = Self::new().with_causal(cfg.causal());
        if let Some(scale) = cfg.scale() {
            ring = ring.with_scale(scale);
        }
        if let Some(softcap) = cfg.softcap() {
            ring = ring.with_softcap(softcap);
        }
        Ok(ring)
    }

    /// [`attend`](Self::attend) for [`AttentionInput::with_function`](candle_attention::AttentionInput::with_function):
    /// the mask and the options of a call are those that the layer's config has, and are not looked at.
    pub fn function<'a>(&'a self, order: &'a ZigZag, processes: &'a dyn Communicator) -> Box<AttentionFunction<'a>> {
        Box::new(|q, k, v, _, _| Ok(self.attend([q, k, v], order, processes)?.0))
    }

    /// q (B, H, T, D), k (B, H_kv, T, D) and v (B, H_kv, T, D_v) of this process's positions give the context (B, H, T,
    /// D_v) of its queries over the keys of all processes, and the log-sum-exp (B, H, T).
    ///
    /// # Errors
    /// If the tensors do not have this process's positions, and those of
    /// [`scaled_dot_product_attention`](candle_attention::scaled_dot_product_attention) and of the processes.
    pub fn attend(&self, qkv: [&Tensor; 3], order: &ZigZag, processes: &dyn Communicator) -> Result<(Tensor, Tensor)> {
        let (rank, size) = (processes.rank(), processes.size());
        order.check_parts(qkv[0])?;
        for xs in qkv {
            if xs.rank() != 4 || xs.dim(2)? != order.count(rank) {
                bail!(
                    "[ring_attention] expected (B, H, {}, D) in process {rank}, found {:?}",
                    order.count(rank),
                    xs.dims()
                )
            }
        }
        let [q, k, v] = qkv;
        let mut attended = Attended::default();
        let mut held = [k.clone(), v.clone()];
        for step in 0..size {
            let of = (rank + size - step) % size;
            let mut attend = || self.attend_to(q, &held, [rank, of], order, &mut attended);
            if step + 1 == size {
                attend()?;
                break;
            }
            // Those of the process before the one whose keys are here.
            let count = order.count((of + size - 1) % size);
            let shapes = held.each_ref().map(|xs| [&xs.dims()[..2], &[count], &xs.dims()[3..]].concat());
            let next = processes.send_recv(&held, &shapes, &mut attend)?;
            held = next.try_into().map_err(|_| candle_core::Error::msg("[ring_attention] expected keys and values"))?;
        }
        let (contexts, lses) = attended.halves.into_iter().flatten().unzip::<_, _, Vec<_>, Vec<_>>();
        Ok((Tensor::cat(&contexts, 2)?, Tensor::cat(&lses, 2)?))
    }

    /// From each query to each of some keys.
    pub(crate) fn attend_part(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        scaled_dot_product_attention_with_lse(q, k, v, &AttentionMask::none(), &self.options)
    }

    /// Attends from the queries of process `rank` to the keys of process `of`. With a causal mask the parts of two
    /// processes are
    ///
    /// ```text
    ///                 keys of an earlier rank   own keys      keys of a later rank
    ///                 front  back               front  back   front  back
    /// front queries   all    none               causal none   none   none
    /// back queries    all    none               all    causal all    all
    /// ```
    fn attend_to(
        &self,
        q: &Tensor,
        held: &[Tensor; 2],
        ranks: [usize; 2],
        order: &ZigZag,
        attended: &mut Attended,
    ) -> Result<()> {
        let ([rank, of], [k, v]) = (ranks, held);
        let front = |rank: usize| order.parts(rank)[0].len();
        let (queries, t) = (front(rank), q.dim(2)?);
        if self.causal && of > rank {
            let back = q.narrow(2, queries, t - queries)?;
            return attended.add(1, self.attend_part(&back, k, v)?);
        }
        let (context, lse) = if self.causal && of < rank {
            let keys = front(of);
            self.attend_part(q, &k.narrow(2, 0, keys)?, &v.narrow(2, 0, keys)?)?
        } else if self.causal {
            scaled_dot_product_attention_with_lse(q, k, v, &AttentionMask::causal(), &self.options)?
        } else {
            self.attend_part(q, k, v)?
        };
        for (half, (start, len)) in [(0, queries), (queries, t - queries)].into_iter().enumerate() {
            attended.add(half, (context.narrow(2, start, len)?, lse.narrow(2, start, len)?))?;
        }
        Ok(())
    }
}

/// The context and the log-sum-exp so far of the front and the back queries.
#[derive(Default)]
struct Attended {
    halves: [Option<(Tensor, Tensor)>; 2],
}

impl Attended {
    fn add(&mut self, half: usize, part: (Tensor, Tensor)) -> Result<()> {
        let half = &mut self.halves[half];
        *half = Some(match half.take() {
            None => part,
            Some(before) => merge_attention(&[before, part])?,
        });
        Ok(())
    }
}
