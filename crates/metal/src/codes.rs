//! The formats of codes of keys and values, by the numbers that they have in the kernels.

use candle_attention_call::KvCodeFormat;
use candle_attention_cuda::shared::Define;

/// The macro of the format in a program; KEY_CODES says whether there are codes.
pub(crate) const CODE_FORMAT: &str = "CODE_FORMAT";

/// Returns the macro for the format of a call; that of 8 bits without codes.
pub(crate) fn code_format_define(format: Option<KvCodeFormat>) -> Define {
    let value = match format {
        None | Some(KvCodeFormat::Q8) => 0,
        Some(KvCodeFormat::E4M3) => 1,
        Some(KvCodeFormat::Q4) => 2,
    };
    Define { name: CODE_FORMAT, value }
}
