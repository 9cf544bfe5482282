//! The storage of one layer in pages, and attention to it.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::config::{KvPoolConfig, OP};
use super::step::{PageCopy, PagedTokens, RowRun};
use super::stored_steps::StoredSteps;
use crate::cache::{Buffer, BufferCodes, Hadamard, KvSizes, StorageFormat, rotated, rotated_back};
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, Call, PagedSequences, Plan, Qkv, SdpaOptions, attend, plan_of_call};
use candle_attention_call::{KvScales, RequestedResults};
use candle_attention_modules::base::{Expect, accumulation_dtype, check_memory, floats_on, floats_text};

/// The name of the operation in errors of attention to a pool.
const ATTENTION: &str = "scaled_dot_product_attention_paged";

/// The keys and values of one layer in pages: (pages, page size, H_kv, D) and (pages, page size, H_kv, D_v). A
/// [`PageTable`](crate::PageTable) for all layers has the pages of each sequence.
///
/// All memory is allocated at once. A layer writes to its pool in a call
/// [`with_pages`](crate::AttentionInput::with_pages); those who have their own projections call
/// [`write`](Self::write) and [`attend`](Self::attend).
///
/// ```
/// use candle_attention::{AttentionMask, KvPool, KvPoolConfig, PageTable, SdpaOptions};
/// use candle_core::{DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let mut table = PageTable::new(10, 16)?;
/// let pool = KvPool::new(&KvPoolConfig::new(2, 64, &table).with_q8(), &Device::Cpu)?;
/// let sequence = table.add();
/// let step = table.step(&[sequence.tokens(20)])?;
/// let heads = |h| Tensor::randn(0f32, 1., (20, h, 64), &Device::Cpu); // (total, H, D)
/// pool.write(&step, &heads(2)?, &heads(2)?)?;
/// let ys = pool.attend(&heads(4)?, step.sequences(), &AttentionMask::causal(), &SdpaOptions::default())?;
/// assert_eq!(ys.dims(), [20, 4, 64]);
/// step.commit();
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct KvPool {
    config: KvPoolConfig,
    keys: Buffer,
    /// A view of the first columns of the keys, if these are latents.
    values: Buffer,
    stored: StoredSteps,
}

impl KvPool {
    /// Returns a pool of zeros.
    ///
    /// # Errors
    /// For a size of 0, for a dtype that cannot be stored on the device, and for a pool that does not fit in memory.
    pub fn new(config: &KvPoolConfig, device: &Device) -> Result<Self> {
        config.validate()?;
        let KvSizes { h_kv, d, d_v } = config.sizes;
        let zeros = |width: usize, dtype: DType| {
            let dims = [config.pages, config.page_size, h_kv, width];
            let bytes = [&dims[..], &[dtype.size_in_bytes()]].concat();
            check_memory(OP, format_args!("a pool of {dims:?}"), &bytes)?;
            Tensor::zeros(&dims, dtype, device)
        };
        let buffer = |width: usize| match config.format() {
            StorageFormat::Floats(dtype) if !floats_on(device).contains(&dtype) => {
                bail!("[{OP}] dtype is {dtype:?}, expected {}", floats_text(device))
            }
            StorageFormat::Floats(dtype) => Ok(Buffer { entries: zeros(width, dtype)?, codes: None }),
            StorageFormat::Codes(format) => {
                let scales = zeros(format.scales(width), DType::F32)?;
                // Latents have blocks that divide the width of values too.
                let widths = if config.is_latent { [d, d_v] } else { [width, width] };
                let rotation = Hadamard::of(format, &widths);
                let codes = Some(BufferCodes { format, scales, rotation });
                Ok(Buffer { entries: zeros(format.bytes(width), DType::U8)?, codes })
            }
        };
        let keys = buffer(d)?;
        let values = if config.is_latent { keys.first_columns(d_v)? } else { buffer(d_v)? };
        Ok(Self { config: config.clone(), keys, values, stored: StoredSteps::of_table(config.table) })
    }

    /// Returns the config of the pool.
    pub fn config(&self) -> &KvPoolConfig {
        &self.config
    }

    /// Returns the number of bytes of all pages.
    pub fn memory(&self) -> usize {
        let values = (!self.config.is_latent).then_some(&self.values);
        let tensors = [&self.keys].into_iter().chain(values).flat_map(Buffer::tensors);
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Returns the pools of keys and of values: views, to which later calls write. Of codes, their bytes. The values of
    /// latents are the first columns of the keys.
    pub fn keys_and_values(&self) -> (&Tensor, &Tensor) {
        (&self.keys.entries, &self.values.entries)
    }

    /// Stores the keys (total, H_kv, D) and values (total, H_kv, D_v) of the tokens of a step, in the pages that the
    /// step has for them. First it copies the pages that a sequence stops sharing.
    ///
    /// # Errors
    /// For tensors that do not fit the pool or the step, for keys that are tracked for gradients, for a step of another
    /// table than the pool's, and if the pool did not store the tokens of a step before.
    pub fn write(&self, step: &PagedTokens, k: &Tensor, v: &Tensor) -> Result<()> {
        if self.config.is_latent {
            bail!("[{OP}] the pool stores latents, expected the call of a layer of latent attention")
        }
        self.check_step(step)?;
        let KvSizes { d, d_v, .. } = self.config.sizes;
        self.check_rows("keys", k, step, d)?;
        self.check_rows("values", v, step, d_v)?;
        let keys = Buffer::encode(k, self.config.format(), &[d])?;
        let values = Buffer::encode(v, self.config.format(), &[d_v])?;
        write_buffer(&self.keys, &keys, step)?;
        write_buffer(&self.values, &values, step)?;
        self.stored.add(step);
        Ok(())
    }

    pub(super) fn keys(&self) -> &Buffer {
        &self.keys
    }

    pub(super) fn values(&self) -> &Buffer {
        &self.values
    }

    /// Returns whether the values are the first columns of the keys.
    pub(super) fn is_latent(&self) -> bool {
        self.config.is_latent
    }

    pub(super) fn sizes(&self) -> KvSizes {
        self.config.sizes
    }

    pub(super) fn stored_steps(&self) -> &StoredSteps {
        &self.stored
    }

    /// Stores the latents (total, 1, width) of the tokens of a step, as [`write`](Self::write) stores keys and values.
    fn write_latents(&self, step: &PagedTokens, latents: &Tensor) -> Result<()> {
        self.check_step(step)?;
        let KvSizes { d, d_v, .. } = self.config.sizes;
        self.check_rows("latents", latents, step, d)?;
        write_buffer(&self.keys, &Buffer::encode(latents, self.config.format(), &[d, d_v])?, step)?;
        self.stored.add(step);
        Ok(())
    }

    /// Checks the rows (total, H_kv, width) of the tokens of a step.
    fn check_rows(&self, name: &str, rows: &Tensor, step: &PagedTokens, width: usize) -> Result<()> {
        let sizes = [step.total_tokens(), self.config.sizes.h_kv, width];
        let found = Expect::many(OP, name, rows).sizes(&sizes)?.float("")?;
        found.same_device("the pool", self.keys.entries.device())?;
        if rows.track_op() && !self.config.detached {
            bail!(
                "[{OP}] keys or values are tracked for gradients, which a pool would lose; expected a layer after \
                 `freeze()` and an input `xs.detach()`, or a pool made `with_detached(true)`"
            )
        }
        Ok(())
    }

    /// Attends from packed queries (total_q, H, D) to sequences in the pool, as
    /// [`scaled_dot_product_attention_paged`](crate::scaled_dot_product_attention_paged) does. The fused kernels
    /// read codes directly.
    ///
    /// # Errors
    /// As [`scaled_dot_product_attention_paged`](crate::scaled_dot_product_attention_paged).
    pub fn attend(
        &self,
        q: &Tensor,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Tensor> {
        let call = self.call(ATTENTION, q, sequences, mask, options)?;
        let found = rotated_back(attend(call, RequestedResults::default())?, self.values.rotation())?;
        Ok(found.into_dtype(q.dtype())?.without_batch()?.output)
    }

    /// Returns the call of packed queries (total_q, H, D).
    fn call(
        &self,
        op: &'static str,
        q: &Tensor,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Call> {
        let own = if self.config.detached { q.detach() } else { q.clone() };
        let scales = match (&self.keys.codes, &self.values.codes) {
            (Some(k), Some(v)) => Some(KvScales { format: k.format, k: k.scales.clone(), v: v.scales.clone() }),
            _ => None,
        };
        let converted = match scales {
            Some(_) => rotated(&own, self.keys.rotation())?,
            None => own.to_dtype(self.keys.entries.dtype())?,
        };
        let qkv = Qkv { q: &converted, k: &self.keys.entries, v: &self.values.entries };
        Call::over_pages(op, qkv, scales.as_ref(), sequences, mask, options)
    }

    /// Checks that a step is of the table that the pool was made for, and that the pool has stored the tokens of all
    /// steps before.
    pub(super) fn check_step(&self, step: &PagedTokens) -> Result<()> {
        let KvPoolConfig { pages, page_size, .. } = self.config;
        if (pages, page_size) != (step.pages, step.page_size) {
            bail!(
                "[{OP}] the pool has {pages} pages of {page_size} positions, expected the table's {} of {}",
                step.pages,
                step.page_size
            )
        }
        self.stored.check(OP, step)?;
        self.stored.check_moved(OP, step)
    }
}

/// A pool with the tokens of a step: the keys and values that a call of a layer attends to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PagedKeys<'a> {
    pub pool: &'a KvPool,
    pub step: &'a PagedTokens,
}

impl PagedKeys<'_> {
    /// Stores the keys (1, H_kv, total, D) and values (1, H_kv, total, D_v) of the tokens.
    pub fn write(&self, k: &Tensor, v: &Tensor) -> Result<()> {
        let rows = |heads: &Tensor| heads.squeeze(0)?.transpose(0, 1);
        self.pool.write(self.step, &rows(k)?, &rows(v)?)
    }

    /// Stores the latents (1, 1, total, width) of the tokens, whose first `d_v` columns are the values.
    pub fn write_latents(&self, latents: &Tensor, d_v: usize) -> Result<()> {
        self.check_latents(latents.dim(3)?, d_v)?;
        self.pool.write_latents(self.step, &latents.squeeze(0)?.transpose(0, 1)?)
    }

    /// Checks that the pool stores latents of `d` numbers, whose first `d_v` numbers are the values.
    pub fn check_latents(&self, d: usize, d_v: usize) -> Result<()> {
        let KvPoolConfig { is_latent, sizes, .. } = self.pool.config;
        let expected = KvSizes { h_kv: 1, d, d_v };
        if !is_latent || sizes != expected {
            let kind = if is_latent { "latents" } else { "keys" };
            bail!(
                "[{OP}] the pool stores {kind} of {} numbers and values of {}, expected a pool \
                 `KvPoolConfig::for_latent_layer` for latents of {} and values of {d_v}",
                sizes.d,
                sizes.d_v,
                expected.d
            )
        }
        Ok(())
    }

    /// Checks that the pool stores keys and values of these sizes; `whose` is the beginning of the error.
    pub fn check_sizes(&self, whose: &str, sizes: KvSizes) -> Result<()> {
        if self.pool.config.is_latent {
            bail!("[{OP}] {whose} pool stores latents, expected keys and values")
        }
        if self.pool.config.sizes != sizes {
            let KvSizes { h_kv, d, d_v } = self.pool.config.sizes;
            bail!(
                "[{OP}] {whose} keys and values have H_kv = {h_kv}, D = {d} and D_v = {d_v}, expected {}, {} and {}",
                sizes.h_kv,
                sizes.d,
                sizes.d_v
            )
        }
        Ok(())
    }

    /// Checks that an earlier layer has stored keys and values of these sizes for the tokens of the step.
    pub fn check_written(&self, sizes: KvSizes) -> Result<()> {
        self.pool.check_step(self.step)?;
        self.check_sizes("the earlier layer's", sizes)?;
        if !self.pool.stored.is_last(self.step) {
            bail!("[{OP}] the earlier layer has not stored the tokens of the step, expected its call first")
        }
        Ok(())
    }

    /// Attends from queries (1, H, total, D) to (1, H, total, D_v).
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        self.attend_from(q, self.step.sequences(), mask, options, wanted)
    }

    /// Attends as [`attend`](Self::attend) from the queries of some sequences of the step, whose mask it is.
    pub fn attend_from(
        &self,
        q: &Tensor,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        let found = attend(self.call(q, sequences, mask, options)?, wanted)?;
        rotated_back(found, self.pool.values.rotation())?.into_dtype(q.dtype())
    }

    /// Returns the path of attention for its output.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        self.plan_from(q, self.step.sequences(), mask, options)
    }

    /// Returns the path of [`attend_from`](Self::attend_from) for its output.
    pub fn plan_from(
        &self,
        q: &Tensor,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Plan> {
        plan_of_call(self.call(q, sequences, mask, options)?)
    }

    fn call(
        &self,
        q: &Tensor,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Call> {
        let rows = q.squeeze(0)?.transpose(0, 1)?;
        self.pool.call(ATTENTION, &rows, sequences, mask, options)
    }

    /// Returns the dtype in which attention to the stored keys as floats is computed, for a layer whose keys have
    /// `key_dtype`.
    pub fn float_dtype(&self, key_dtype: DType) -> DType {
        match self.pool.keys.codes {
            Some(_) => accumulation_dtype(key_dtype),
            None => self.pool.keys.entries.dtype(),
        }
    }

    /// Returns a tensor that attends to the keys or is attended to, without its gradient if gradients end at the pool.
    pub fn attached(&self, tensor: &Tensor) -> Tensor {
        if self.pool.config.detached { tensor.detach() } else { tensor.clone() }
    }
}

/// Writes the rows of the tokens of a step to a buffer of pages, after the copies of pages that sequences stop sharing.
pub(super) fn write_buffer(buffer: &Buffer, rows: &Buffer, step: &PagedTokens) -> Result<()> {
    for (pool, new) in buffer.tensors().zip(rows.tensors()) {
        copy_pages(pool, step.copies())?;
        write_rows(pool, new, step.runs())?;
    }
    Ok(())
}

/// Copies pages within a pool (pages, ..).
fn copy_pages(pool: &Tensor, copies: &[PageCopy]) -> Result<()> {
    for &PageCopy { from, to } in copies {
        let page = pool.narrow(0, from as usize, 1)?.force_contiguous()?;
        pool.slice_set(&page, 0, to as usize)?;
    }
    Ok(())
}

/// Writes the rows of tokens (total, H_kv, width) to a pool (pages, page size, H_kv, width).
fn write_rows(pool: &Tensor, tokens: &Tensor, runs: &[RowRun]) -> Result<()> {
    let rows = pool.flatten(0, 1)?;
    for &RowRun { token, row, len } in runs {
        rows.slice_set(&tokens.narrow(0, token, len)?, 0, row)?;
    }
    Ok(())
}
