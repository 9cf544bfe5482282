//! Packed sequences of different lengths on a device, compared with the CPU in f64.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionMask, Backend, PackedSequences, SdpaOptions, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse,
};
use candle_core::{DType, Device, Result, Tensor};

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::table::Row;

const LENS_Q: [usize; 5] = [33, 1, 0, 70, 16];
const LENS_KV: [usize; 5] = [33, 90, 12, 70, 40];

pub fn check(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("packed sequences");
    let masks = [
        ("no mask", AttentionMask::none()),
        ("causal", AttentionMask::causal()),
        ("a window", AttentionMask::causal().with_window(9)),
    ];
    for dtype in DTYPES {
        for (what, mask) in &masks {
            for with_lse in [false, true] {
                row.add(dtype, compare(mask, with_lse, (dtype, device)), tolerance * allowed(dtype), what);
            }
        }
    }
    Ok(row)
}

fn compare(mask: &AttentionMask, with_lse: bool, (dtype, device): (DType, &Device)) -> Result<Checked> {
    let sequences = PackedSequences::from_lens(&LENS_Q, &LENS_KV)?;
    let seed = TorchSeed::new(5);
    let draw = |t: usize, h: usize| seed.randn((t, h, 64))?.to_dtype(dtype);
    let inputs =
        [draw(sequences.total_queries(), 4)?, draw(sequences.total_keys(), 2)?, draw(sequences.total_keys(), 2)?];
    let run = |to: &Device, precision: DType, backend: Backend| -> Result<Vec<Tensor>> {
        let moved = |tensor: &Tensor| tensor.to_dtype(precision)?.to_device(to);
        let [q, k, v] = &inputs;
        let (q, k, v) = (moved(q)?, moved(k)?, moved(v)?);
        let options = SdpaOptions::default().with_backend(backend);
        if with_lse {
            let (output, lse) = scaled_dot_product_attention_varlen_with_lse(&q, &k, &v, &sequences, mask, &options)?;
            return Ok(vec![output, lse]);
        }
        Ok(vec![scaled_dot_product_attention_varlen(&q, &k, &v, &sequences, mask, &options)?])
    };
    let (found, expected) = (run(device, dtype, Backend::Auto)?, run(&Device::Cpu, DType::F64, Backend::Reference)?);
    let errors = found.iter().zip(&expected).map(|(found, expected)| relative_error(found, expected));
    Ok(Checked { error: errors.collect::<Result<Vec<_>>>()?.into_iter().fold(0.0, f64::max), plan: None })
}
