//! Linear layers whose weights are codes: products of few rows, and the numbers of the weights.

use candle_core::{DType, Result, Storage, Tensor, bail};

use super::activation::Activation;
use super::code_format::CodeConstants;
use super::coded_weight::{CodedNumbers, CodedValues, CodedWeight};
use super::linear::{
    LINEAR_NO_ACTIVATION, LINEAR_WARPS, LinearRowsArguments, LinearRowsCall, MAX_SIZE, product_warps, sums_bytes,
};
use super::outline::{self, OneLaunch, RowsCall};
use crate::attention::InputAddresses;
use crate::device::{Grid, KernelArguments, Launch};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer};
use crate::kernel_struct::kernel_struct;
use crate::program::{Define, KernelShape};
use crate::unsupported::Unsupported;

/// The columns of a block that computes numbers of a weight.
const DEQUANTIZE_COLUMNS: usize = 4 * DEQUANTIZE_THREADS;

/// The bytes of the tables of two weights.
const TABLE_BYTES: usize = 2 * 16 * 4;

/// `activation(x · Wᵀ + bias) · (x · Uᵀ + up bias) + residual`, for few rows and weights of codes. The numbers of the
/// weights and the sums are in f32. Without the factor the result is rounded once; with it, both products are rounded
/// first, like the results of separate operations.
#[derive(Debug, Clone)]
pub struct LinearCodesCall {
    /// (M, K), f32, bf16 or f16; contiguous, with at most [`MAX_ROWS`](Self::MAX_ROWS) rows.
    pub xs: Tensor,
    /// The weight and the bias of the outputs.
    pub linear: CodedLinear,
    /// The activation of the outputs.
    pub activation: Option<Activation>,
    /// The weight, of the same format, and the bias of the factors of the activated outputs.
    pub up: Option<CodedLinear>,
    /// (M, N), contiguous, in the dtype of `xs`.
    pub residual: Option<Tensor>,
}

/// A weight of codes and a bias.
#[derive(Debug, Clone)]
pub struct CodedLinear {
    /// (N, K).
    pub weight: CodedWeight,
    /// (N,), contiguous, in the dtype of the inputs.
    pub bias: Option<Tensor>,
}

/// The numbers of a weight of codes, (N, K).
#[derive(Debug, Clone)]
pub struct DequantizeCall {
    /// (N, K).
    pub weight: CodedWeight,
    /// The dtype of the numbers: f32, bf16 or f16.
    pub dtype: DType,
}

/// The dimensions of a product, or of the numbers of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CodesShape {
    rows: usize,
    width: usize,
    outputs: usize,
    /// The number of pairs of products: an output and its factor, or two outputs. A warp computes both of a pair.
    pairs: usize,
    format: CodeConstants,
}

kernel_struct! {
    /// A number for each group of each row of a weight, (N, groups).
    pub struct GroupPointers {
        /// f16, bf16, f32 or bytes. May be null.
        pub numbers: InputPointer<Elements>,
        /// 256 floats for bytes of a table, or factors in f16 of nested numbers. May be null.
        pub table: InputPointer<Elements>,
        /// The number that is subtracted from nested numbers first.
        pub middle: i32,
        /// 0: makes the size a multiple of 8 bytes.
        pub reserved: i32,
    }
}

kernel_struct! {
    /// A weight of codes but their lower bits.
    pub struct WeightCodes {
        /// The upper bits of codes of 3, 5 and 6 bits. May be null.
        pub high: InputPointer<u32>,
        /// The 16 numbers of codes of up to 4 bits. May be null.
        pub code_table: InputPointer<f32>,
        /// The scales.
        pub scales: GroupPointers,
        /// The zeros or the minimums.
        pub offsets: GroupPointers,
        /// The number of groups of a row.
        pub groups: i32,
        /// 0: makes the size a multiple of 8 bytes.
        pub reserved: i32,
    }
}

kernel_struct! {
    /// The only argument of the kernels of linear layers whose weights are codes.
    pub struct LinearCodesArguments {
        /// The product. Its weights and up weights are the lower bits of codes, u32.
        pub linear: LinearRowsArguments,
        /// The weight.
        pub weight: WeightCodes,
        /// The weight of the factors.
        pub up_weight: WeightCodes,
    }

    /// The number of threads of a block that computes numbers of a weight.
    const DEQUANTIZE_THREADS: usize = 256;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for LinearCodesArguments {}

impl RowsCall for LinearCodesCall {
    type Arguments = LinearCodesArguments;
    type Shape = CodesShape;

    const OPERATION: &'static str = "linear_codes";
    const SOURCE: &'static str = "linear_codes.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<CodesShape, Unsupported> {
        let weight = &self.linear.weight;
        let (outputs, width, format) = (weight.outputs(), weight.inputs(), CodeConstants::of(weight));
        let &[rows, _] = self.xs.dims() else {
            return Err(Unsupported::new(format!("the input has the shape {:?}, expected (M, K)", self.xs.dims())));
        };
        if !(1..=Self::MAX_ROWS).contains(&rows) || !is_supported_size(outputs, width) {
            return Err(Unsupported::new(format!("no kernel multiplies {rows} rows by a weight ({outputs}, {width})")));
        }
        if let Some(up) = &self.up
            && CodeConstants::of(&up.weight) != format
        {
            return Err(Unsupported::new("the weight of the gate and the one of its factor have different formats"));
        }
        let pairs = if self.up.is_some() { outputs } else { outputs.div_ceil(2) };
        Ok(CodesShape { rows, width, outputs, pairs, format })
    }

    fn check(&self, shape: CodesShape) -> Result<()> {
        let CodesShape { rows, width, outputs, .. } = shape;
        let check = |name: &str, tensor: &Tensor, dims: &[usize]| {
            self.check_tensor(name, tensor, dims, self.xs.dtype())?;
            self.check_contiguous(name, tensor)
        };
        check("the input", &self.xs, &[rows, width])?;
        if let Some(bias) = &self.linear.bias {
            check("the bias", bias, &[outputs])?;
        }
        if let Some(up) = &self.up {
            let found = [up.weight.outputs(), up.weight.inputs()];
            if found != [outputs, width] {
                bail!("[{}] the factor's weight is {found:?}, expected {:?}", Self::OPERATION, [outputs, width])
            }
            if let Some(bias) = &up.bias {
                check("the factor's bias", bias, &[outputs])?;
            }
        }
        if let Some(residual) = &self.residual {
            check("the residual", residual, &[rows, outputs])?;
        }
        Ok(())
    }

    fn constants(shape: CodesShape) -> Vec<Define> {
        constants(shape.program_rows(), &shape.format)
    }
}

impl LinearCodesCall {
    /// The largest number of rows. With more, a product of cuBLAS with the numbers of the weight is the better choice.
    pub const MAX_ROWS: usize = LinearRowsCall::MAX_ROWS;

    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the output, (M, N), contiguous, in the dtype of the inputs.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        outline::forward(self)
    }
}

impl OneLaunch for LinearCodesCall {
    fn forward_launch(shape: CodesShape) -> Launch {
        let grid = Grid::linear(shape.pairs.div_ceil(LINEAR_WARPS / shape.product_warps()));
        Launch::new(product_kernel(shape.program_rows()), grid)
    }

    fn output_dims(&self, shape: CodesShape) -> Vec<usize> {
        vec![shape.rows, shape.outputs]
    }

    fn arguments<'t>(
        &'t self,
        shape: CodesShape,
        operands: &mut impl InputAddresses<'t>,
    ) -> Result<LinearCodesArguments> {
        let up = self.up.as_ref();
        let inputs = operands.input("inputs", &self.xs)?;
        let is_aligned = inputs.address().is_multiple_of(16) && shape.width.is_multiple_of(shape.format.chunk());
        let linear = LinearRowsArguments {
            inputs,
            weights: operands.input("codes", self.linear.weight.low())?,
            biases: operands.optional_input("biases", self.linear.bias.as_ref())?,
            up_weights: operands.optional_input("up_codes", up.map(|up| up.weight.low()))?,
            up_biases: operands.optional_input("up_biases", up.and_then(|up| up.bias.as_ref()))?,
            residuals: operands.optional_input("residuals", self.residual.as_ref())?,
            rows: shape.rows as i32,
            width: shape.width as i32,
            outputs: shape.outputs as i32,
            product_warps: shape.product_warps() as i32,
            is_aligned: is_aligned.into(),
            activation: self.activation.map_or(LINEAR_NO_ACTIVATION, Activation::code),
            ..LinearRowsArguments::default()
        };
        let up_weight = match up {
            Some(up) => weight_codes(&up.weight, operands)?,
            None => WeightCodes::default(),
        };
        Ok(LinearCodesArguments { linear, weight: weight_codes(&self.linear.weight, operands)?, up_weight })
    }

    fn set_output(arguments: &mut LinearCodesArguments, output: OutputPointer<Elements>) {
        arguments.linear.output = output;
    }
}

impl RowsCall for DequantizeCall {
    type Arguments = LinearCodesArguments;
    type Shape = CodesShape;

    const OPERATION: &'static str = "dequantize_codes";
    const SOURCE: &'static str = "linear_codes.cu";

    fn elements(&self) -> &Tensor {
        self.weight.low()
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> std::result::Result<CodesShape, Unsupported> {
        let (outputs, width) = (self.weight.outputs(), self.weight.inputs());
        if !is_supported_size(outputs, width) {
            return Err(Unsupported::new(format!("no kernel computes the numbers of a weight ({outputs}, {width})")));
        }
        let shape = CodesShape { rows: 1, width, outputs, pairs: 0, format: CodeConstants::of(&self.weight) };
        shape.dequantize_launch().check()?;
        Ok(shape)
    }

    fn check(&self, _shape: CodesShape) -> Result<()> {
        Ok(())
    }

    fn constants(shape: CodesShape) -> Vec<Define> {
        constants(1, &shape.format)
    }
}

impl DequantizeCall {
    /// Checks that the kernel computes the numbers, and loads the program, which is compiled in the first call. No
    /// tensor is read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the numbers, (N, K), contiguous, rounded once.
    ///
    /// # Errors
    /// If the kernel does not, or it does not compile or launch, and if memory is short.
    pub fn forward(&self) -> Result<Tensor> {
        outline::forward_buffer(self)?.into_tensor(&[self.weight.outputs(), self.weight.inputs()])
    }
}

impl OneLaunch for DequantizeCall {
    fn forward_launch(shape: CodesShape) -> Launch {
        shape.dequantize_launch()
    }

    fn output_dims(&self, shape: CodesShape) -> Vec<usize> {
        vec![shape.outputs, shape.width]
    }

    fn arguments<'t>(
        &'t self,
        shape: CodesShape,
        operands: &mut impl InputAddresses<'t>,
    ) -> Result<LinearCodesArguments> {
        let linear = LinearRowsArguments {
            weights: operands.input("codes", self.weight.low())?,
            width: shape.width as i32,
            outputs: shape.outputs as i32,
            ..LinearRowsArguments::default()
        };
        let weight = weight_codes(&self.weight, operands)?;
        Ok(LinearCodesArguments { linear, weight, up_weight: WeightCodes::default() })
    }

    fn set_output(arguments: &mut LinearCodesArguments, output: OutputPointer<Elements>) {
        arguments.linear.output = output;
    }
}

impl CodesShape {
    /// Returns the number of rows that the program is compiled for.
    fn program_rows(self) -> usize {
        self.rows.next_power_of_two()
    }

    fn product_warps(self) -> usize {
        product_warps(self.pairs, self.width.div_ceil(self.format.chunk()))
    }

    /// Returns the launch that computes the numbers of the weight.
    fn dequantize_launch(self) -> Launch {
        let blocks = self.outputs.saturating_mul(self.width.div_ceil(DEQUANTIZE_COLUMNS));
        Launch::new(dequantize_kernel(), Grid::linear(blocks))
    }
}

fn is_supported_size(outputs: usize, width: usize) -> bool {
    (1..=MAX_SIZE).contains(&outputs) && (1..=MAX_SIZE).contains(&width)
}

/// Returns the addresses of a weight, without its lower bits.
fn weight_codes<'t>(weight: &'t CodedWeight, operands: &mut impl InputAddresses<'t>) -> Result<WeightCodes> {
    let code_table = match weight.values() {
        CodedValues::Table(table) => Some(table),
        _ => None,
    };
    let offsets = match weight.offsets() {
        Some(offsets) => group_numbers(offsets, operands)?,
        None => GroupPointers::default(),
    };
    Ok(WeightCodes {
        high: operands.optional_input("upper_bits", weight.high())?,
        code_table: operands.optional_input("code_table", code_table)?,
        scales: group_numbers(weight.scales(), operands)?,
        offsets,
        groups: weight.groups() as i32,
        reserved: 0,
    })
}

fn group_numbers<'t>(numbers: &'t CodedNumbers, operands: &mut impl InputAddresses<'t>) -> Result<GroupPointers> {
    Ok(GroupPointers {
        numbers: operands.input("numbers", numbers.numbers())?,
        table: operands.optional_input("table", numbers.table())?,
        middle: numbers.middle().into(),
        reserved: 0,
    })
}

/// Returns the constants of the program for at most `rows` rows.
pub(super) fn constants(rows: usize, format: &CodeConstants) -> Vec<Define> {
    let mut constants = vec![Define { name: "LINEAR_ROWS", value: rows as i64 }];
    constants.extend(format.defines());
    constants
}

/// Returns the kernel of products in the program for at most `rows` rows.
pub(super) fn product_kernel(rows: usize) -> KernelShape {
    KernelShape { name: "linear_codes", threads: LINEAR_WARPS * 32, shared_bytes: sums_bytes(rows) + TABLE_BYTES }
}

/// Returns the kernel that computes the numbers of a weight, in the program for one row.
pub(super) fn dequantize_kernel() -> KernelShape {
    let shared_bytes = sums_bytes(1) + TABLE_BYTES;
    KernelShape { name: "dequantize_codes", threads: DEQUANTIZE_THREADS, shared_bytes }
}
