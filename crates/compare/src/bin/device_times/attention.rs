//! Calls of attention.

use candle_attention::{
    AttentionMask, PackedSequences, SdpaOptions, alibi_slopes, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_varlen,
};
use candle_core::{Device, Result, Tensor, Var};

use super::cell::{AttentionSizes, MaskKind, Pass, WINDOW};
use super::clock::Clock;
use super::outcome::Outcome;

/// The keys and values that are read in turn when decoding exceed this many bytes, so that no cache can store them.
const CACHED: usize = 256 << 20;

/// A call with its tensors.
struct Call {
    q: Tensor,
    keys: Vec<KeysAndValues>,
    mask: AttentionMask,
    options: SdpaOptions,
    packed: Option<PackedSequences>,
    pass: Pass,
}

struct KeysAndValues {
    k: Tensor,
    v: Tensor,
}

pub fn time(sizes: &AttentionSizes, clock: &Clock) -> Result<Outcome> {
    let copies = if sizes.t_q == 1 { CACHED.div_ceil(sizes.kv_bytes()) } else { 1 };
    let call = Call::new(sizes, copies, &clock.device)?;
    let path = call.path()?;
    let ms = clock.milliseconds(|n| call.run(n))?;
    Ok(Outcome::Milliseconds { ms, path })
}

/// Returns the bytes that one call adds to the peak of the device's memory.
pub fn memory(sizes: &AttentionSizes, device: &Device) -> Result<Outcome> {
    let call = Call::new(sizes, 1, device)?;
    // The first call compiles kernels.
    call.run(0)?;
    super::memory::added_to_peak(device, || call.run(0))
}

impl Call {
    fn new(sizes: &AttentionSizes, copies: usize, device: &Device) -> Result<Self> {
        let AttentionSizes { b, h, h_kv, t_q, t_kv, d, dtype, pass, .. } = *sizes;
        let draw = |dims: &[usize]| Tensor::randn(0f32, 1., dims, device)?.to_dtype(dtype);
        let lens = sizes.lens();
        let is_packed = sizes.mask == MaskKind::Packed;
        let total: usize = lens.iter().sum();
        let shape = |heads: usize, t: usize| if is_packed { vec![total, heads, d] } else { vec![b, heads, t, d] };
        let input = |dims: &[usize]| -> Result<Tensor> {
            let drawn = draw(dims)?;
            if pass == Pass::Training { Ok(Var::from_tensor(&drawn)?.into_inner()) } else { Ok(drawn) }
        };
        let q = input(&shape(h, t_q))?;
        let mut keys = Vec::with_capacity(copies);
        for _ in 0..copies {
            keys.push(KeysAndValues { k: input(&shape(h_kv, t_kv))?, v: input(&shape(h_kv, t_kv))? });
        }
        let none = AttentionMask::none;
        let mask = match sizes.mask {
            MaskKind::None => none(),
            MaskKind::Causal | MaskKind::Alibi | MaskKind::Packed => AttentionMask::causal(),
            MaskKind::Lengths => none().with_valid_lens(lens.clone()),
            MaskKind::Window => AttentionMask::causal().with_window(WINDOW),
            MaskKind::Bias => none().with_bias(&draw(&[1, h, t_q, t_kv])?),
            MaskKind::BooleanMask => {
                none().with_bool_mask(&Tensor::rand(0f32, 1., (b, 1, t_q, t_kv), device)?.gt(0.1)?)
            }
        };
        let mut options = SdpaOptions::default();
        if sizes.mask == MaskKind::Alibi {
            options = options.with_alibi_slopes(&Tensor::new(alibi_slopes(h)?, device)?);
        }
        let packed = is_packed.then(|| PackedSequences::from_lens(&lens, &lens)).transpose()?;
        Ok(Self { q, keys, mask, options, packed, pass })
    }

    /// Returns the path that the call takes.
    fn path(&self) -> Result<String> {
        let Some(KeysAndValues { k, v }) = self.keys.first() else { return Ok("no keys".into()) };
        if self.packed.is_some() {
            return Ok("packed sequences, which have no plan".into());
        }
        Ok(plan(&self.q, k, v, &self.mask, &self.options)?.to_string())
    }

    /// Computes the output, or the gradients of all inputs.
    fn run(&self, n: usize) -> Result<Option<Tensor>> {
        let KeysAndValues { k, v } = &self.keys[n % self.keys.len()];
        let output = match &self.packed {
            Some(sequences) => {
                scaled_dot_product_attention_varlen(&self.q, k, v, sequences, &self.mask, &self.options)?
            }
            None => scaled_dot_product_attention(&self.q, k, v, &self.mask, &self.options)?,
        };
        match self.pass {
            Pass::Forward => Ok(Some(output)),
            // The gradient of the output is ones, so that no loss is timed.
            Pass::Training => Ok(output.backward()?.get(&self.q).cloned()),
        }
    }
}
