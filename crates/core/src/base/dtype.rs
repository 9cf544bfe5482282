//! Dtypes in which attention is computed.

use candle_core::DType;

/// The dtypes in which attention is computed. Candle's other floats lack what it needs: an infinity, or conversions.
pub(crate) const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

/// The dtype in which scores and weights are computed.
pub(crate) fn accumulation_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
