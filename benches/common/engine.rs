//! The implementations that are timed.

use std::fmt;
use std::time::Instant;

use candle_attention::{
    AttentionMask, Backend, PagedSequences, SdpaOptions, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_paged,
};
use candle_attention_kernels::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, KvCodeFormat, KvScales, OutputLayout, RequestedResults,
    ScoreModifiers, Strided, attend,
};
use candle_attention_kernels::{Element, InstructionSet};
use candle_core::{DType, Device, Error, Result, Tensor, WithDType, bail};
use candle_nn::attention::{AttnMask, flash_attn};
use clap::ValueEnum;
use half::{bf16, f16};

use super::cell::{Cell, Mask};
use super::inputs::{CodedRows, Inputs};

/// The largest scores, in bytes, that the reference path is asked to compute; it keeps a few tensors of that size at
/// once.
pub const REFERENCE_BYTES: usize = 1 << 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// This crate, with the path that it chooses.
    Ours,
    /// This crate's reference path: Candle's own operations.
    Reference,
    /// Candle's flash attention on the CPU.
    Flash,
    /// A layer as Candle models usually write it.
    HandWritten,
    /// Candle's `Linear`.
    Linear,
    /// candle-nn's norms.
    Norm,
    /// This crate over plain tensors, in cells that time it over variables.
    Frozen,
    /// PyTorch, in another process.
    Torch,
}

impl Engine {
    pub const ALL: [Self; 8] = [
        Self::Ours,
        Self::Reference,
        Self::Flash,
        Self::HandWritten,
        Self::Linear,
        Self::Norm,
        Self::Frozen,
        Self::Torch,
    ];

    /// Returns the name in tables and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Ours => "candle-attention",
            Self::Reference => "reference path",
            Self::Flash => "candle flash_attn",
            Self::HandWritten => "hand-written",
            Self::Linear => "candle Linear",
            Self::Norm => "candle-nn",
            Self::Frozen => "frozen",
            Self::Torch => "PyTorch",
        }
    }
}

/// Writes the name on the command line.
impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_possible_value() {
            Some(value) => f.write_str(value.get_name()),
            None => Ok(()),
        }
    }
}

/// A call made ready. Each run takes the next copy of the keys and values.
pub type Call<'a> = Box<dyn FnMut() -> Result<Tensor> + 'a>;

/// An engine in a cell, or the reason why it is skipped.
pub enum Entry<'a> {
    Ready(Call<'a>),
    Skipped(String),
}

/// Returns the call of an engine for a cell, whose output is (B, H, T_q, D). The engine is skipped if it cannot compute
/// the cell, or if a single call would take more than `patience` seconds, judging by a few of the queries.
///
/// # Errors
/// If the engine fails in a cell that it should be able to compute.
pub fn prepare<'a>(engine: Engine, cell: &Cell, inputs: &'a Inputs, patience: f64) -> Result<Entry<'a>> {
    if let Some(obstacle) = obstacle(engine, cell, inputs)? {
        return Ok(Entry::Skipped(obstacle));
    }
    let Some((k, v)) = inputs.kv.first() else { bail!("[prepare] no keys to attend to") };
    let few = cell.t_q / 32;
    if few > 0 && !runs_fused(engine, cell, inputs)? {
        // The last queries attend to the most keys, so an estimate by queries is too high for a causal mask. An
        // estimate by pairs is not.
        let part = Cell { t_q: few, ..cell.clone() };
        let q = inputs.q.narrow(2, cell.t_q - few, few)?.contiguous()?;
        let q = Inputs { q, kv: vec![(k.clone(), v.clone())], codes: Vec::new() };
        let mut call = ready(engine, &part, &q)?;
        let start = Instant::now();
        call()?;
        let work = cell.visible_pairs()? as f64 / part.visible_pairs()?.max(1) as f64;
        let seconds = start.elapsed().as_secs_f64() * work;
        if seconds > patience {
            return Ok(Entry::Skipped(format!("about {seconds:.0} s a call")));
        }
    }
    Ok(Entry::Ready(ready(engine, cell, inputs)?))
}

/// Returns this crate's plan for the cell in one line.
pub fn our_plan(cell: &Cell, inputs: &Inputs) -> Result<String> {
    if cell.codes.is_some() {
        return Ok(format!("Fused: the CPU kernel, {}", instruction_set(cell)?));
    }
    let Some((k, v)) = inputs.kv.first() else { bail!("[our_plan] no keys to attend to") };
    Ok(plan(&inputs.q, k, v, &cell.mask.attention(), &SdpaOptions::default())?.to_string())
}

fn runs_fused(engine: Engine, cell: &Cell, inputs: &Inputs) -> Result<bool> {
    if cell.codes.is_some() || cell.page_size.is_some() {
        return Ok(engine == Engine::Ours);
    }
    let Some((k, v)) = inputs.kv.first() else { bail!("[runs_fused] no keys to attend to") };
    let plan = plan(&inputs.q, k, v, &cell.mask.attention(), &SdpaOptions::default())?;
    Ok(engine == Engine::Ours && plan.backend == Backend::Fused)
}

fn obstacle(engine: Engine, cell: &Cell, inputs: &Inputs) -> Result<Option<String>> {
    let reason = match engine {
        Engine::Ours if cell.codes.is_some() || cell.page_size.is_some() => None,
        Engine::Reference | Engine::Flash if cell.page_size.is_some() => Some("no pages".into()),
        Engine::Reference | Engine::Flash if cell.codes.is_some() => Some("no keys and values that are codes".into()),
        Engine::Ours | Engine::Reference => {
            let bytes = 4 * cell.b * cell.h * cell.t_q * cell.t_kv;
            let too_many = bytes > REFERENCE_BYTES && !runs_fused(engine, cell, inputs)?;
            too_many.then(|| format!("the reference path's scores take {:.1} GiB", bytes as f64 / (1u64 << 30) as f64))
        }
        Engine::Flash if matches!(cell.mask, Mask::Lens(_)) => Some("no lengths for each sequence".into()),
        Engine::Flash if cell.b > 1 && cell.dtype == DType::BF16 => Some("no bf16 for more than one sequence".into()),
        Engine::Flash => None,
        _ => Some("a layer, not a function".into()),
    };
    Ok(reason)
}

fn ready<'a>(engine: Engine, cell: &Cell, inputs: &'a Inputs) -> Result<Call<'a>> {
    if let Some(format) = cell.codes
        && engine == Engine::Ours
    {
        return match cell.dtype {
            DType::BF16 => ours_of_codes::<bf16>(format, cell, inputs),
            DType::F16 => ours_of_codes::<f16>(format, cell, inputs),
            _ => ours_of_codes::<f32>(format, cell, inputs),
        };
    }
    match engine {
        Engine::Flash => flash(cell, inputs),
        Engine::Ours if cell.page_size.is_some() => ours_paged(cell, inputs),
        Engine::Reference => Ok(ours(cell, inputs, Backend::Reference)),
        _ => Ok(ours(cell, inputs, Backend::Auto)),
    }
}

fn ours<'a>(cell: &Cell, inputs: &'a Inputs, backend: Backend) -> Call<'a> {
    let (mask, options) = (cell.mask.attention(), SdpaOptions::default().with_backend(backend));
    let mut copies = inputs.kv.iter().cycle();
    Box::new(move || {
        let Some((k, v)) = copies.next() else { bail!("[ours] no keys to attend to") };
        scaled_dot_product_attention(&inputs.q, k, v, &mask, &options)
    })
}

/// Returns the call over pages whose order in the pools follows no pattern.
fn ours_paged<'a>(cell: &Cell, inputs: &'a Inputs) -> Result<Call<'a>> {
    let Some(size) = cell.page_size else { bail!("[ours_paged] the cell has no pages") };
    let pages = cell.t_kv.div_ceil(size);
    // A stride that is a prime number, and no divisor of the number of pages, visits each of them once.
    let order: Vec<u32> = (0..pages).map(|page| (page * 7919 % pages) as u32).collect();
    let mut position = vec![0u32; pages];
    for (place, &page) in order.iter().enumerate() {
        position[page as usize] = place as u32;
    }
    let position = Tensor::new(position, &Device::Cpu)?;
    let pool = |rows: &Tensor| {
        let rows = rows.squeeze(0)?.transpose(0, 1)?.contiguous()?;
        rows.reshape((pages, size, cell.h_kv, cell.d))?.index_select(&position, 0)
    };
    let pools = inputs.kv.iter().map(|(k, v)| Ok((pool(k)?, pool(v)?))).collect::<Result<Vec<_>>>()?;
    let sequences = PagedSequences::new(vec![0, cell.t_q], vec![cell.t_kv], vec![order])?;
    let q = inputs.q.squeeze(0)?.transpose(0, 1)?.contiguous()?;
    let (mask, options) = (cell.mask.attention(), SdpaOptions::default());
    let mut next = 0;
    Ok(Box::new(move || {
        let Some((k, v)) = pools.get(next) else { bail!("[ours] no keys to attend to") };
        next = (next + 1) % pools.len();
        let output = scaled_dot_product_attention_paged(&q, k, v, &sequences, &mask, &options)?;
        output.transpose(0, 1)?.unsqueeze(0)
    }))
}

/// Returns the instruction set of a call.
fn instruction_set(cell: &Cell) -> Result<InstructionSet> {
    InstructionSet::choose(None, cell.dtype == DType::BF16).map_err(Error::wrap)
}

/// Returns the call of the kernel that reads a cache of codes.
fn ours_of_codes<'a, E: Element + WithDType>(
    format: KvCodeFormat,
    cell: &Cell,
    inputs: &'a Inputs,
) -> Result<Call<'a>> {
    let &Cell { b, h, h_kv, t_q, t_kv, d, .. } = cell;
    let q: Vec<E> = inputs.q.flatten_all()?.to_vec1()?;
    let resolved = cell.mask.attention().resolve(b, t_q, t_kv)?;
    let ranges: Vec<_> = (0..b * t_q).map(|row| resolved.kv_range(row / t_q, row % t_q)).collect();
    let (instruction_set, mut copies) = (instruction_set(cell)?, inputs.codes.iter().cycle());
    Ok(Box::new(move || {
        let Some([k, v]) = copies.next() else { bail!("[ours] no keys to attend to") };
        let strides = |width: usize| [h_kv * t_kv * width, t_kv * width, width];
        let codes = |rows: &'a CodedRows| Strided { data: &rows.codes[..], strides: strides(format.bytes(d)) }.into();
        let scales =
            |rows: &'a CodedRows| Strided { data: &rows.scales[..], strides: strides(format.scales(d)) }.into();
        let call = AttentionCall {
            dims: AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v: d },
            q: Strided { data: &q[..], strides: [h * t_q * d, t_q * d, d] }.into(),
            k: codes(k),
            v: codes(v),
            kv_scales: Some(KvScales { format, k: scales(k), v: scales(v) }),
            pages: None,
            keys: KeysOfQueries { ranges: &ranges, ..Default::default() },
            scores: ScoreModifiers { scale: 1.0 / (d as f64).sqrt(), ..Default::default() },
            output_layout: OutputLayout::Bhtd,
        };
        let found = attend::<E>(&call, instruction_set, RequestedResults::default()).map_err(Error::wrap)?;
        let context = found.output;
        Tensor::from_vec(context, (b, h, t_q, d), &Device::Cpu)
    }))
}

type FlashAttn = fn(&Tensor, &Tensor, &Tensor, f32, AttnMask, Option<f32>, Option<f32>) -> Result<Tensor>;

/// Returns the call of Candle's flash attention, which takes (B, T, H, D), returns (B, H, T_q, D), and has no windows:
/// they become an additive mask.
fn flash(cell: &Cell, inputs: &Inputs) -> Result<Call<'static>> {
    let flash_attn: FlashAttn = match cell.dtype {
        DType::F32 => flash_attn::<f32>,
        DType::BF16 => flash_attn::<bf16>,
        DType::F16 => flash_attn::<f16>,
        dtype => bail!("[flash_attn] no cells in {dtype:?}"),
    };
    let rows = |tensor: &Tensor| tensor.transpose(1, 2)?.contiguous();
    let q = rows(&inputs.q)?;
    let kv = inputs.kv.iter().map(|(k, v)| Ok((rows(k)?, rows(v)?))).collect::<Result<Vec<_>>>()?;
    let scale = 1.0 / (cell.d as f32).sqrt();
    let mask = match &cell.mask {
        Mask::Causal => AttnMask::causal_with_offset(cell.t_kv - cell.t_q),
        Mask::Window(_) => AttnMask::Mask(additive(&cell.mask.attention(), cell)?),
        Mask::None | Mask::Lens(_) => AttnMask::None,
    };
    let mut next = 0;
    Ok(Box::new(move || {
        let Some((k, v)) = kv.get(next) else { bail!("[flash_attn] no keys to attend to") };
        next = (next + 1) % kv.len();
        flash_attn(&q, k, v, scale, mask.clone(), None, None)
    }))
}

fn additive(mask: &AttentionMask, cell: &Cell) -> Result<Tensor> {
    let dims = (1, 1, cell.t_q, cell.t_kv);
    mask.to_additive(dims, cell.dtype, &Device::Cpu)?.reshape((cell.t_q, cell.t_kv))
}
