//! Packed sequences of different lengths on a device, compared with the CPU in f64.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionMask, Backend, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse,
};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::check::{Checked, DTYPES, allowed, gradients, largest_error};
use super::table::Row;

const LENS_Q: [usize; 5] = [33, 1, 0, 70, 16];
const LENS_KV: [usize; 5] = [33, 90, 12, 70, 40];
const HEADS: usize = 4;
const KEY_HEADS: usize = 2;
const WIDTH: usize = 64;

/// A call of packed sequences.
struct Packed {
    name: &'static str,
    mask: AttentionMask,
    options: PackedOptions,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PackedOptions {
    Plain,
    Softcap,
    Alibi,
    RelativeBias,
    Sinks,
    Dropout,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Output,
    LogSumExp,
    Gradients,
}

/// The tensors of a call: q, k, v, and the tensors of its options.
struct Operands {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_head: Tensor,
    /// (H, longest queries + longest keys - 1).
    relative_bias: Tensor,
}

/// Checks outputs, log-sum-exps and gradients.
pub fn check(device: &Device, tolerance: f64) -> Result<[Row; 2]> {
    let causal = AttentionMask::causal;
    let lens: Vec<usize> = LENS_KV.iter().map(|len| len.div_ceil(2)).collect();
    let call = |name, mask, options| Packed { name, mask, options };
    let calls = [
        call("no mask", AttentionMask::none(), PackedOptions::Plain),
        call("causal", causal(), PackedOptions::Plain),
        call("a window", causal().with_window(9), PackedOptions::Plain),
        call("lengths", AttentionMask::none().with_valid_lens(lens), PackedOptions::Plain),
        call("softcap", causal(), PackedOptions::Softcap),
        call("ALiBi", causal(), PackedOptions::Alibi),
        call("a relative bias", AttentionMask::none(), PackedOptions::RelativeBias),
        call("sinks", causal(), PackedOptions::Sinks),
        call("dropout", causal(), PackedOptions::Dropout),
    ];
    let mut outputs = Row::new("packed sequences");
    let mut with_gradients = Row::new("packed, gradients");
    for dtype in DTYPES {
        for packed in &calls {
            for want in [Want::Output, Want::LogSumExp, Want::Gradients] {
                let row = if want == Want::Gradients { &mut with_gradients } else { &mut outputs };
                row.add(dtype, compare(packed, want, dtype, device), tolerance * allowed(dtype), &packed.name);
            }
        }
    }
    Ok([outputs, with_gradients])
}

fn compare(call: &Packed, want: Want, dtype: DType, device: &Device) -> Result<Checked> {
    let sequences = PackedSequences::from_lens(&LENS_Q, &LENS_KV)?;
    let seed = TorchSeed::new(5);
    let draw = |t: usize, h: usize| seed.randn((t, h, WIDTH))?.to_dtype(dtype);
    let distances = LENS_Q.iter().max().unwrap_or(&0) + LENS_KV.iter().max().unwrap_or(&0) - 1;
    let operands = Operands {
        q: draw(sequences.total_queries(), HEADS)?,
        k: draw(sequences.total_keys(), KEY_HEADS)?,
        v: draw(sequences.total_keys(), KEY_HEADS)?,
        by_head: Tensor::new(&[0.02f32, 0.07, 0.12, 0.17], &Device::Cpu)?.to_dtype(dtype)?,
        relative_bias: seed.randn((HEADS, distances))?.to_dtype(dtype)?,
    };
    let exact = operands.map(|tensor| tensor.to_dtype(DType::F64))?;
    let expected = run(call, want, &exact, &sequences, Backend::Reference)?;
    let here = operands.map(|tensor| tensor.to_device(device))?;
    let found = run(call, want, &here, &sequences, Backend::Auto)?;
    Ok(Checked { error: largest_error(&found, &expected)?, plan: None })
}

fn run(
    call: &Packed,
    want: Want,
    operands: &Operands,
    sequences: &PackedSequences,
    backend: Backend,
) -> Result<Vec<Tensor>> {
    let operands = match want {
        Want::Gradients => &operands.map(|tensor| Ok(Var::from_tensor(tensor)?.into_inner()))?,
        _ => operands,
    };
    let Operands { q, k, v, by_head, relative_bias } = operands;
    let mask = &call.mask;
    let mut options = SdpaOptions::default().with_backend(backend);
    let mut variables = vec![q, k, v];
    match call.options {
        PackedOptions::Plain => {}
        PackedOptions::Softcap => options = options.with_softcap(2.0),
        PackedOptions::Alibi => {
            options = options.with_alibi_slopes(by_head);
            variables.push(by_head);
        }
        PackedOptions::RelativeBias => {
            options = options.with_relative_bias(relative_bias);
            variables.push(relative_bias);
        }
        PackedOptions::Sinks => {
            options = options.with_sinks(by_head);
            variables.push(by_head);
        }
        PackedOptions::Dropout => options = options.with_dropout(0.3, true).with_dropout_philox_seed(7),
    }
    if want == Want::LogSumExp {
        let (output, lse) = scaled_dot_product_attention_varlen_with_lse(q, k, v, sequences, mask, &options)?;
        return Ok(vec![output, lse]);
    }
    let output = scaled_dot_product_attention_varlen(q, k, v, sequences, mask, &options)?;
    if want == Want::Output {
        return Ok(vec![output]);
    }
    gradients(&output.sqr()?.sum_all()?, &variables)
}

impl Operands {
    /// Applies `change` to each tensor.
    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            q: change(&self.q)?,
            k: change(&self.k)?,
            v: change(&self.v)?,
            by_head: change(&self.by_head)?,
            relative_bias: change(&self.relative_bias)?,
        })
    }
}
