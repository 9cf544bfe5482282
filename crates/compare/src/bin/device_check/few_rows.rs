//! Linear layers of few rows, as of tokens that are generated: their numbers, compared with the CPU in f64, and the
//! number of kernels of this project that they launch on CUDA.

use candle_attention::init::TorchSeed;
use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_attention_cuda::{LinearRowsCall, is_available, launches_of_thread};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Activation;

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::table::Row;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Plain,
    BiasAndResidual,
    Activation,
    /// Some of the outputs.
    Columns,
    Gated,
    GatedWithBias,
}

const KINDS: [Kind; 6] =
    [Kind::Plain, Kind::BiasAndResidual, Kind::Activation, Kind::Columns, Kind::Gated, Kind::GatedWithBias];

/// The sizes of a weight (out, in).
#[derive(Debug, Clone, Copy)]
struct Size {
    outputs: usize,
    inputs: usize,
}

/// Few and many outputs, wide and narrow rows, and rows that do not begin at multiples of 16 bytes.
const SIZES: [Size; 4] = [
    Size { outputs: 256, inputs: 2048 },
    Size { outputs: 1500, inputs: 256 },
    Size { outputs: 37, inputs: 301 },
    Size { outputs: 70, inputs: 40 },
];

/// The numbers of rows: one more than the kernel computes, and fewer.
const ROWS: [usize; 6] = [1, 2, 3, 5, LinearRowsCall::MAX_ROWS, LinearRowsCall::MAX_ROWS + 1];

/// The tensors of a layer, of which each kind uses some.
struct Operands {
    xs: Tensor,
    weight: Tensor,
    bias: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    residual: Tensor,
}

/// The output of a layer, and the number of its launches.
struct Outcome {
    output: Tensor,
    launches: u64,
}

/// Checks the numbers and the launches of layers.
pub fn check(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("linear layers of few rows");
    for dtype in DTYPES {
        for size in SIZES {
            let all = Operands::draw(size, LinearRowsCall::MAX_ROWS + 1, dtype)?;
            for rows in ROWS {
                let operands = all.first_rows(rows)?;
                for kind in KINDS {
                    let checked = compare(kind, &operands, dtype, device);
                    let what = format!("{kind:?} of {rows} rows, {size:?}");
                    row.add(dtype, checked, tolerance * allowed(dtype), &what);
                }
            }
        }
    }
    Ok(row)
}

fn compare(kind: Kind, operands: &Operands, dtype: DType, device: &Device) -> Result<Checked> {
    let found = kind.run(&operands.moved(dtype, device)?)?;
    let expected = kind.run(&operands.moved(DType::F64, &Device::Cpu)?)?;
    let has_kernel = device.is_cuda() && is_available(device).is_ok();
    let is_few = operands.xs.dim(0)? <= LinearRowsCall::MAX_ROWS;
    if has_kernel && is_few && found.launches != 1 {
        bail!("{} kernels of candle-attention, expected 1", found.launches)
    }
    Ok(Checked { error: relative_error(&found.output, &expected.output)?, plan: None })
}

impl Operands {
    /// Draws tensors on the CPU.
    fn draw(size: Size, rows: usize, dtype: DType) -> Result<Self> {
        let Size { outputs, inputs } = size;
        let seed = TorchSeed::new(13);
        let draw = |dims: &[usize]| seed.randn(dims.to_vec())?.to_dtype(dtype);
        let matrix = || (seed.randn((outputs, inputs))? * (inputs as f64).powf(-0.5))?.to_dtype(dtype);
        Ok(Self {
            xs: draw(&[rows, inputs])?,
            weight: matrix()?,
            bias: draw(&[outputs])?,
            up_weight: matrix()?,
            up_bias: draw(&[outputs])?,
            residual: draw(&[rows, outputs])?,
        })
    }

    /// Returns the layer with fewer rows of inputs.
    fn first_rows(&self, rows: usize) -> Result<Self> {
        Ok(Self {
            xs: self.xs.narrow(0, 0, rows)?,
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            up_weight: self.up_weight.clone(),
            up_bias: self.up_bias.clone(),
            residual: self.residual.narrow(0, 0, rows)?,
        })
    }

    fn moved(&self, dtype: DType, device: &Device) -> Result<Self> {
        let own = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(device);
        Ok(Self {
            xs: own(&self.xs)?,
            weight: own(&self.weight)?,
            bias: own(&self.bias)?,
            up_weight: own(&self.up_weight)?,
            up_bias: own(&self.up_bias)?,
            residual: own(&self.residual)?,
        })
    }
}

impl Kind {
    fn run(self, operands: &Operands) -> Result<Outcome> {
        let Operands { xs, weight, bias, up_weight, up_bias, residual } = operands;
        let plain = PackedLinear::new(weight, None)?;
        let linear = PackedLinear::new(weight, Some(bias))?;
        let plain_up = PackedLinear::new(up_weight, None)?;
        let up = PackedLinear::new(up_weight, Some(up_bias))?;
        let before = launches_of_thread();
        let output = match self {
            Self::Plain => plain.forward(xs)?,
            Self::BiasAndResidual => linear.forward_with_residual(xs, residual)?,
            Self::Activation => linear.with_activation(Activation::Gelu)?.forward(xs)?,
            Self::Columns => linear.forward_columns(xs, 5..weight.dim(0)? - 2)?,
            Self::Gated => PackedGatedLinear::new(plain, plain_up, Activation::Silu)?.forward(xs)?,
            Self::GatedWithBias => PackedGatedLinear::new(linear, up, Activation::Silu)?.forward(xs)?,
        };
        Ok(Outcome { output, launches: launches_of_thread() - before })
    }
}
