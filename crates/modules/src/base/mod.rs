//! Shared utilities: checks of numbers and tensors, loops over rows of tensors, operations in Candle's graph,
//! parameters by name, and shards for tensor parallelism.

mod expect;
mod facts;
mod fields;
pub mod first_use;
mod fused;
mod graph;
mod group_numbers;
mod linear_reader;
mod low_rank;
mod nearest;
mod optional_ref;
mod parameter_list;
mod parameters;
mod product;
mod quantization;
mod quantize;
mod quantized_tensor;
mod quantized_weight;
mod query_heads;
mod reader;
mod row_order;
pub mod rowwise;
mod shard;
mod spec;
mod sum;
mod uploads;

pub use expect::{
    Dim, Expect, FLOATS, accumulation_dtype, check_entries, check_keys_and_values, check_memory, filled,
    fits_in_memory, floats_on, floats_text, is_addressable,
};
pub use facts::Fact;
pub use fields::{Synonym, explain_unknown_field, optional_variant, unknown_field, variant};
pub use fused::{FusedRows, FusedTensor, StoredDims};
pub use graph::{IntoStorage, gradient_of, is_linked, record, record_two, reshape_linked, transpose_linked};
pub use group_numbers::GroupNumbers;
pub use low_rank::LowRankUpdate;
pub use nearest::{did_you_mean, edits, nearest};
pub use optional_ref::OptionalRef;
pub use parameter_list::{ParameterList, StoredParameter};
pub use parameters::{Parameter, WeightAndBias, frozen, part, save, variables_without_gradient};
pub use product::{matmul, matmul_by_head, matmul_ready};
pub use quantization::{ConfigMethod, QuantizationSigns};
pub use quantize::QuantizationFormat;
pub use quantized_weight::{CodeValues, Float8, QuantizedWeight};
pub use query_heads::QueryHeadOrder;
pub use reader::{
    DRAWN_THEN_ZEROED, LINEAR_WEIGHT, ParameterReader, SCALES, WholeTensors, has, linear_bias, missing_tensor_hint,
    moved_names, root, stored_name,
};
pub use row_order::{joined_in_order, rows_of};
pub use shard::{HeadCounts, HeadShard, Heads, Share};
pub use spec::{NO_BIAS, ParameterSpec};
pub use sum::sum_of_terms;
pub use uploads::{copied_to, to_device, uploaded};

pub mod number {
    //! Checks of the numbers that callers set.

    pub use crate::base::expect::{above_zero, epsilon, expect, finite, probability, size, within};
}
