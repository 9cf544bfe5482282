//! The programs for weights of codes in the usual formats.

use super::code_format::{CodeConstants, NumberKind, NumbersFormat, ValueKind};
use super::linear_codes::{LinearCodesCall, constants, dequantize_kernel, product_kernel};
use super::outline;
use crate::ci_programs::CiProgram;
use crate::element::ElementType;

/// A format of files, for the list of programs.
struct NamedFormat {
    name: &'static str,
    format: CodeConstants,
    /// Whether each element type is compiled, with one row and with the most rows; otherwise bf16 with one row.
    is_common: bool,
}

/// Returns the formats that are most common, and others so that there is each kind of codes and of numbers.
fn named_formats() -> Vec<NamedFormat> {
    let [f16, bf16, f32, whole, bytes] =
        [NumberKind::F16, NumberKind::Bf16, NumberKind::F32, NumberKind::Whole, NumberKind::Bytes]
            .map(NumbersFormat::plain);
    // K-quants have a factor for each 256 columns.
    let nested = |group: usize| NumbersFormat { kind: NumberKind::Nested, nest: 256 / group };
    let format = |bits, values, group, scales, offsets| CodeConstants { bits, values, group, scales, offsets };
    let common = |name, own| NamedFormat { name, format: own, is_common: true };
    let other = |name, own| NamedFormat { name, format: own, is_common: false };
    vec![
        common("signed 4 g128", format(4, ValueKind::Signed, 128, f16, None)),
        common("zeros 4 g128", format(4, ValueKind::Zeros, 128, f16, Some(whole))),
        common("Q4_K", format(4, ValueKind::Minimums, 32, nested(32), Some(nested(32)))),
        common("Q6_K", format(6, ValueKind::Signed, 16, nested(16), None)),
        common("NF4 g64", format(4, ValueKind::Table, 64, f32, None)),
        other("zeros 4 g64 bf16", format(4, ValueKind::Zeros, 64, bf16, Some(bf16))),
        other("zeros 3 g128", format(3, ValueKind::Zeros, 128, f16, Some(whole))),
        other("minimums 4 g32", format(4, ValueKind::Minimums, 32, f16, Some(f16))),
        other("minimums 4 g64 bf16", format(4, ValueKind::Minimums, 64, bf16, Some(bf16))),
        other("signed 8 g32", format(8, ValueKind::Signed, 32, f16, None)),
        other("signed 8 rows", format(8, ValueKind::Signed, 0, f32, None)),
        other("Q2_K", format(2, ValueKind::Minimums, 16, nested(16), Some(nested(16)))),
        other("Q3_K", format(3, ValueKind::Signed, 16, nested(16), None)),
        other("Q5_K", format(5, ValueKind::Minimums, 32, nested(32), Some(nested(32)))),
        other("MXFP4", format(4, ValueKind::Table, 32, bytes, None)),
        other("E4M3 rows", format(8, ValueKind::E4M3, 0, f32, None)),
        other("E4M3 g128", format(8, ValueKind::E4M3, 128, bf16, None)),
        other("E5M2 rows", format(8, ValueKind::E5M2, 0, f32, None)),
    ]
}

/// Returns the programs of the usual formats.
pub(super) fn entries() -> Vec<CiProgram> {
    let most = LinearCodesCall::MAX_ROWS;
    let mut entries = Vec::new();
    for NamedFormat { name, format, is_common } in named_formats() {
        for element in ElementType::ALL {
            for rows in [1, most] {
                if !is_common && (element != ElementType::Bf16 || rows > 1) {
                    continue;
                }
                let mut kernels = vec![product_kernel(rows)];
                if rows == 1 {
                    kernels.push(dequantize_kernel());
                }
                // Each element type, each number of rows, codes of two planes, and a table.
                let is_quick = match name {
                    "signed 4 g128" => element == ElementType::Bf16 && rows == 1,
                    "Q4_K" => element == ElementType::F32,
                    "Q6_K" => element == ElementType::Bf16 && rows == most,
                    "NF4 g64" => element == ElementType::F16 && rows == 1,
                    _ => false,
                };
                let program = outline::program::<LinearCodesCall>(element, constants(rows, &format));
                let full_name = format!("linear codes {name}, {}, {rows}", element.name());
                entries.push(CiProgram::new(&program, full_name, is_quick, kernels));
            }
        }
    }
    entries
}
