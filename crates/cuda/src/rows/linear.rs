//! Linear layers of few rows.

use candle_core::{Result, Storage, Tensor};

use super::activation::Activation;
use super::{check_contiguous, check_tensor};
use crate::arguments::Address;
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, Operands, Reading};
use crate::element::Element;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

const OP: &str = "linear_rows";

/// The file of the kernel.
const ROOT: &str = "linear_rows.cu";

/// The warps of a block: LINEAR_WARPS in the source.
const WARPS: usize = 8;

/// The bytes that a lane loads at once.
const LOAD_BYTES: usize = 16;

/// The numbers of rows that programs are compiled for.
const ROWS: [usize; 4] = [1, 2, 4, 8];

/// The warps that occupy a large device: the columns of a product are divided until a launch has this number. It is the
/// same for every device, so that all devices add in the same order.
const ENOUGH_WARPS: usize = 4096;

/// The largest width, and the largest number of outputs, so that offsets of columns are an i32.
const MAX_SIZE: usize = 1 << 30;

/// `activation(x · Wᵀ + bias) · (x · Uᵀ + up bias) + residual`, for few rows. Sums are in f32. Without the factor the
/// result is rounded once; with it, both products are rounded first, like the results of separate operations.
///
/// A matrix product of cuBLAS reads the weights as fast, but takes longer to launch, and the bias, the activation, the
/// factor and the residual are further launches.
#[derive(Debug, Clone)]
pub struct LinearRowsCall {
    /// (M, K), f32, bf16 or f16; contiguous, with at most [`MAX_ROWS`](Self::MAX_ROWS) rows.
    pub xs: Tensor,
    /// The weight and the bias of the outputs.
    pub linear: LinearParameters,
    /// The activation of the outputs.
    pub activation: Option<Activation>,
    /// The weight and the bias of the factors of the activated outputs.
    pub up: Option<LinearParameters>,
    /// (M, N), contiguous, in the dtype of `xs`.
    pub residual: Option<Tensor>,
}

/// A weight and a bias, in the dtype of the inputs.
#[derive(Debug, Clone)]
pub struct LinearParameters {
    /// (N, K), contiguous.
    pub weight: Tensor,
    /// (N,), contiguous.
    pub bias: Option<Tensor>,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LinearShape {
    rows: usize,
    width: usize,
    outputs: usize,
    /// The pairs of products that warps compute.
    pairs: usize,
    element: Element,
}

/// The argument of the kernel. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct LinearRowsArguments {
    inputs: Address,
    weights: Address,
    biases: Address,
    up_weights: Address,
    up_biases: Address,
    residuals: Address,
    output: Address,

    rows: i32,
    width: i32,
    outputs: i32,
    product_warps: i32,

    is_aligned: i32,
    activation: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for LinearRowsArguments {}

impl LinearRowsCall {
    /// The largest number of rows. With more, a product of cuBLAS, on tensor cores, is the better choice.
    pub const MAX_ROWS: usize = ROWS[ROWS.len() - 1];

    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        let device = KernelDevice::of(self.xs.device())?;
        let shape = self.shape()?;
        device.prepare(&program(shape.element, shape.program_rows()))
    }

    /// Returns the dimensions, which the kernel supports.
    fn shape(&self) -> std::result::Result<LinearShape, Unsupported> {
        let element = Element::of(self.xs.dtype())?;
        let unsupported = |what: &str, tensor: &Tensor| {
            Err(Unsupported::new(format!("{what} has the shape {:?}, which no kernel takes", tensor.dims())))
        };
        let &[rows, width] = self.xs.dims() else { return unsupported("the input", &self.xs) };
        let &[outputs, _] = self.linear.weight.dims() else { return unsupported("the weight", &self.linear.weight) };
        if !(1..=Self::MAX_ROWS).contains(&rows) || !(1..=MAX_SIZE).contains(&width) {
            return unsupported("the input", &self.xs);
        }
        if !(1..=MAX_SIZE).contains(&outputs) {
            return unsupported("the weight", &self.linear.weight);
        }
        let pairs = if self.up.is_some() { outputs } else { outputs.div_ceil(2) };
        Ok(LinearShape { rows, width, outputs, pairs, element })
    }

    /// Returns the dimensions of tensors that fit together.
    fn checked_shape(&self) -> Result<LinearShape> {
        let shape = self.shape()?;
        let LinearShape { rows, width, outputs, .. } = shape;
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| {
            check_tensor(OP, name, tensor, dims, self.xs.dtype())?;
            check_contiguous(OP, name, tensor)
        };
        check("the input", &self.xs, &[rows, width])?;
        check("the weight", &self.linear.weight, &[outputs, width])?;
        if let Some(bias) = &self.linear.bias {
            check("the bias", bias, &[outputs])?;
        }
        if let Some(up) = &self.up {
            check("the factor's weight", &up.weight, &[outputs, width])?;
            if let Some(bias) = &up.bias {
                check("the factor's bias", bias, &[outputs])?;
            }
        }
        if let Some(residual) = &self.residual {
            check("the residual", residual, &[rows, outputs])?;
        }
        Ok(shape)
    }

    /// Computes the output, (M, N), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        let shape = self.checked_shape()?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = device.load(&program(shape.element, shape.program_rows()))?;
        let mut output = device.uninitialized(self.xs.dtype(), shape.rows * shape.outputs)?;
        {
            let readings = Readings::new(self);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(shape, &readings, &mut operands)?;
            arguments.output = operands.write("output", &mut output)?;
            let grid = Grid::linear(shape.pairs.div_ceil(WARPS / shape.product_warps()));
            operands.launch(&program, &Launch::new(kernel(shape.program_rows()), grid), &arguments)?;
        }
        Ok(output.into_storage())
    }

    fn arguments<'a>(
        &self,
        shape: LinearShape,
        readings: &'a Readings,
        operands: &mut Operands<'a>,
    ) -> Result<LinearRowsArguments> {
        let inputs = operands.read("inputs", &readings.xs)?;
        let weights = operands.read("weights", &readings.weight)?;
        let up_weights = operands.read_optional("up_weights", readings.up_weight.as_ref())?;
        let row_bytes = (shape.width * shape.element.bytes()) as u64;
        let is_aligned = [inputs, weights, up_weights, row_bytes].iter().all(|n| n % LOAD_BYTES as u64 == 0);
        Ok(LinearRowsArguments {
            inputs,
            weights,
            biases: operands.read_optional("biases", readings.bias.as_ref())?,
            up_weights,
            up_biases: operands.read_optional("up_biases", readings.up_bias.as_ref())?,
            residuals: operands.read_optional("residuals", readings.residual.as_ref())?,
            rows: shape.rows as i32,
            width: shape.width as i32,
            outputs: shape.outputs as i32,
            product_warps: shape.product_warps() as i32,
            is_aligned: is_aligned.into(),
            activation: self.activation.map_or(NO_ACTIVATION, Activation::code),
            ..LinearRowsArguments::default()
        })
    }
}

/// The activation of outputs that have none: LINEAR_NO_ACTIVATION in the source.
const NO_ACTIVATION: i32 = -1;

impl LinearShape {
    /// Returns the number of rows that the program is compiled for.
    fn program_rows(self) -> usize {
        self.rows.next_power_of_two()
    }

    /// Returns the warps that share the columns of a product: more than one if there are few products, as long as each
    /// lane has something to load.
    fn product_warps(self) -> usize {
        let lanes = (self.width * self.element.bytes()).div_ceil(LOAD_BYTES);
        let mut warps = 1;
        while warps < WARPS && self.pairs * warps < ENOUGH_WARPS && 2 * warps * 32 <= lanes {
            warps *= 2;
        }
        warps
    }
}

/// The tensors of a call while a launch reads them.
struct Readings<'t> {
    xs: Reading<'t>,
    weight: Reading<'t>,
    bias: Option<Reading<'t>>,
    up_weight: Option<Reading<'t>>,
    up_bias: Option<Reading<'t>>,
    residual: Option<Reading<'t>>,
}

impl<'t> Readings<'t> {
    fn new(call: &'t LinearRowsCall) -> Self {
        let up = call.up.as_ref();
        Self {
            xs: Reading::new(&call.xs),
            weight: Reading::new(&call.linear.weight),
            bias: call.linear.bias.as_ref().map(Reading::new),
            up_weight: up.map(|up| Reading::new(&up.weight)),
            up_bias: up.and_then(|up| up.bias.as_ref()).map(Reading::new),
            residual: call.residual.as_ref().map(Reading::new),
        }
    }
}

/// Returns the program for at most `rows` rows.
fn program(element: Element, rows: usize) -> Program {
    Program { root: ROOT, defines: vec![element.define(), Define { name: "LINEAR_ROWS", value: rows as i64 }] }
}

/// Returns the kernel of the program for at most `rows` rows. The shared memory is LINEAR_SHARED in the source.
fn kernel(rows: usize) -> KernelShape {
    KernelShape { name: "linear_rows", threads: WARPS * 32, shared_bytes: WARPS * 2 * rows * 4 }
}

/// Returns the programs of all element types and numbers of rows.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    let mut entries = Vec::new();
    for element in Element::ALL {
        for rows in ROWS {
            let name = format!("linear rows {}, {rows}", element.name());
            let is_quick = rows == 1 || rows == LinearRowsCall::MAX_ROWS;
            entries.push(CatalogueEntry::new(&program(element, rows), name, is_quick, vec![kernel(rows)]));
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn linear_rows_arguments_match_the_source() {
        for rows in ROWS {
            let sizes = source_sizes(&program(Element::F32, rows));
            assert_same_layout!(
                sizes,
                LinearRowsArguments,
                [
                    inputs,
                    weights,
                    biases,
                    up_weights,
                    up_biases,
                    residuals,
                    output,
                    rows,
                    width,
                    outputs,
                    product_warps,
                    is_aligned,
                    activation
                ]
            );
            assert_eq!(sizes["LINEAR_WARPS"], WARPS);
            assert_eq!(sizes["LINEAR_SHARED"], kernel(rows).shared_bytes);
        }
    }

    #[test]
    fn linear_rows_divide_columns_until_warps_occupy_a_device() {
        let warps = |pairs: usize, width: usize| {
            LinearShape { rows: 1, width, outputs: pairs, pairs, element: Element::Bf16 }.product_warps()
        };
        assert_eq!(warps(16_000, 2048), 1);
        assert_eq!(warps(1024, 2048), 4);
        assert_eq!(warps(128, 2048), 8);
        assert_eq!(warps(128, 256), 1);
        assert_eq!(warps(1, 1), 1);
    }
}
