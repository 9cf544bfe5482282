//! Attention programs whose constants are given by name, for the tests on the emulator.

use super::backward::{KeyTile, QueryTile};
use super::{BackwardTile, DecodeTile, ForwardTile, KernelSet, QueryGradient};
use crate::element::ElementType;
use crate::given::Given;
use crate::program::Program;
use crate::specialization::Specialization;

fn forward(given: &mut Given, is_f32: bool) -> ForwardTile {
    ForwardTile {
        warps: given.take("FORWARD_WARPS", 4),
        row_tiles: given.take("FORWARD_ROW_TILES", if is_f32 { 1 } else { 2 }),
        keys: given.take("FORWARD_KEYS", if is_f32 { 32 } else { 64 }),
        stages: given.take("FORWARD_STAGES", 1),
        queries_in_registers: given.flag("FORWARD_QUERIES_IN_REGISTERS", false),
    }
}

fn decode(given: &mut Given) -> DecodeTile {
    DecodeTile {
        warps: given.take("DECODE_WARPS", 4),
        keys: given.take("DECODE_KEYS", 16),
        stages: given.take("DECODE_STAGES", 3),
    }
}

fn backward(given: &mut Given, is_f32: bool) -> BackwardTile {
    let keys = KeyTile {
        warps: given.take("KEY_WARPS", if is_f32 { 4 } else { 8 }),
        row_tiles: given.take("KEY_ROW_TILES", 1),
        warps_per_keys: given.take("WARPS_PER_KEYS", 1),
        queries: given.take("BACKWARD_QUERIES", if is_f32 { 16 } else { 64 }),
    };
    let row_warps = given.take("FUSED_ROW_WARPS", if keys.queries == 16 { 1 } else { 2 });
    let queries = QueryTile {
        warps: given.take("QUERY_WARPS", 4),
        row_tiles: given.take("QUERY_ROW_TILES", if is_f32 { 1 } else { 2 }),
        keys: given.take("QUERY_KEYS", if is_f32 { 16 } else { 32 }),
    };
    let is_fused = given.flag("FUSED_BACKWARD", false);
    let queries = if is_fused { QueryGradient::Fused { row_warps } } else { QueryGradient::Separate(queries) };
    BackwardTile { keys, queries }
}

/// Returns the program of some constants, such as `-DHEAD_DIM=64 -DFORWARD_WARPS=2`.
///
/// # Errors
/// For a constant that does not exist, and for some that kernels cannot have together.
pub(crate) fn program_of_options(options: &str) -> Result<Program, String> {
    let mut given = Given::parse(options)?;
    let set = given.take("KERNEL_SET", 7);
    let specialization = Specialization::of_constants(&mut given)?;
    let is_f32 = specialization.element == ElementType::F32;
    let (forward, decode) = (forward(&mut given, is_f32), decode(&mut given));
    let backward = backward(&mut given, is_f32);
    given.finish()?;
    let sets: Vec<_> = super::rows::ALL_KERNELS.into_iter().filter(|own| set & own.bit() as usize != 0).collect();
    let mut programs = Vec::new();
    for own in &sets {
        match own {
            KernelSet::Forward => programs.push(forward.program(&specialization)),
            KernelSet::Decode if specialization.dropout => {
                return Err("the decode kernel drops no weights, expected HAS_DROPOUT 0 with it".into());
            }
            KernelSet::Decode => programs.push(decode.program(&specialization)),
            KernelSet::Backward if specialization.key_codes.is_some() => {
                return Err("codes have no gradients, expected KEY_CODES 0 with the backward kernels".into());
            }
            KernelSet::Backward if specialization.key_pages => {
                return Err("keys in pages have no gradients, expected KEY_PAGES 0 with the backward kernels".into());
            }
            KernelSet::Backward if !backward.divides(&specialization) => {
                return Err(format!("the warps do not divide the columns: {backward:?}"));
            }
            KernelSet::Backward => programs.push(backward.program(&specialization)),
        }
    }
    Ok(super::rows::joined(&sets, &programs))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the value of a macro in a program.
    fn value(program: &Program, name: &str) -> Option<i64> {
        program.defines.iter().find(|define| define.name == name).map(|define| define.value)
    }

    #[test]
    fn program_of_options_computes_the_constants_that_are_not_given() -> Result<(), String> {
        let options = "-DELEMENT=0 -DHEAD_DIM=32 -DFORWARD_WARPS=2 -DFORWARD_ROW_TILES=1 -DKERNEL_SET=1";
        let program = program_of_options(options)?;
        assert_eq!(value(&program, "KERNEL_SET"), Some(1));
        assert_eq!(value(&program, "FORWARD_QUERIES"), Some(32));
        // Rows of 32 halves and 16 bytes: 32 queries, then 64 keys, then 64 values.
        assert_eq!(value(&program, "FORWARD_KEYS_AT"), Some(32 * 80));
        assert_eq!(value(&program, "FORWARD_BIAS_AT"), Some(32 * 80 + 2 * 64 * 80));
        assert_eq!(value(&program, "KEY_WARPS"), None);
        Ok(())
    }

    #[test]
    fn options_that_kernels_cannot_have_are_an_error() {
        for (options, reason) in [
            ("-DHEAD_DIMS=64", "there is no constant HEAD_DIMS"),
            ("-DHEAD_DIM=x", "HEAD_DIM is x"),
            ("HEAD_DIM=64", "expected -DNAME=NUMBER"),
            ("-DELEMENT=3", "ELEMENT is 3"),
            ("-DHAS_DROPOUT=1", "drops no weights"),
            ("-DKEY_CODES=1 -DKERNEL_SET=4", "codes have no gradients"),
            ("-DCODE_FORMAT=1", "CODE_FORMAT is 1, expected KEY_CODES 1"),
            ("-DKEY_CODES=1 -DCODE_FORMAT=3", "CODE_FORMAT is 3"),
            ("-DKEY_CODES=1 -DCODE_FORMAT=2 -DHEAD_DIM=80", "expected multiples of 32"),
            ("-DHEAD_DIM=80 -DWARPS_PER_KEYS=2", "do not divide"),
        ] {
            let error = program_of_options(options).expect_err(options);
            assert!(error.contains(reason), "{error}");
        }
    }
}
