//! Programs whose constants are given by name, for the tests on the emulator. What is not given has a default.

use super::backward::{KeyTile, QueryTile};
use super::{BackwardTile, DecodeTile, ForwardTile, KernelSet, QueryGradient};
use crate::element::Element;
use crate::program::Program;
use crate::specialization::{Alignment, BiasElement, ModifierGradients, Specialization};

/// The constants that are given, and not used yet.
struct Given {
    constants: Vec<(String, usize)>,
}

impl Given {
    /// Reads options such as `-DHEAD_DIM=64`.
    fn parse(options: &str) -> Result<Self, String> {
        let mut constants = Vec::new();
        for option in options.split_whitespace() {
            let constant = option.strip_prefix("-D").and_then(|rest| rest.split_once('='));
            let Some((name, value)) = constant else { return Err(format!("expected -DNAME=NUMBER, found {option}")) };
            let number = value.parse().map_err(|_| format!("{name} is {value}, expected a number"))?;
            constants.push((name.to_string(), number));
        }
        Ok(Self { constants })
    }

    /// Returns the value of a constant, or its default.
    fn take(&mut self, name: &str, default: usize) -> usize {
        match self.constants.iter().position(|(given, _)| given == name) {
            Some(at) => self.constants.remove(at).1,
            None => default,
        }
    }

    fn flag(&mut self, name: &str, default: bool) -> bool {
        self.take(name, default.into()) != 0
    }

    fn element(&mut self) -> Result<Element, String> {
        match self.take("ELEMENT", 1) {
            0 => Ok(Element::F16),
            1 => Ok(Element::Bf16),
            2 => Ok(Element::F32),
            other => Err(format!("ELEMENT is {other}, expected 0, 1 or 2")),
        }
    }

    fn bias(&mut self) -> Result<Option<BiasElement>, String> {
        match self.take("HAS_BIAS", 0) {
            0 => Ok(None),
            1 => Ok(Some(BiasElement::Element)),
            2 => Ok(Some(BiasElement::F32)),
            other => Err(format!("HAS_BIAS is {other}, expected 0, 1 or 2")),
        }
    }

    fn specialization(&mut self) -> Result<Specialization, String> {
        let element = self.element()?;
        let head_dim = self.take("HEAD_DIM", 128);
        let value_dim = self.take("VALUE_DIM", head_dim);
        Ok(Specialization {
            key_codes: self.flag("KEY_CODES", false),
            softcap: self.flag("HAS_SOFTCAP", false),
            alibi: self.flag("HAS_ALIBI", false),
            relative_bias: self.flag("HAS_RELATIVE_BIAS", false),
            bias: self.bias()?,
            boolean_mask: self.flag("HAS_BOOLEAN_MASK", false),
            dropout: self.flag("HAS_DROPOUT", false),
            positive_scale: !self.flag("MODIFIES_SCORES", false),
            gradients: ModifierGradients {
                bias: self.flag("BIAS_GRADIENT", false),
                slopes: self.flag("SLOPE_GRADIENT", false),
                relative_bias: self.flag("RELATIVE_BIAS_GRADIENT", false),
            },
            alignment: Alignment {
                rows: self.flag("ALIGNED_ROWS", true),
                bias: self.flag("ALIGNED_BIAS", true),
                boolean_mask: self.flag("ALIGNED_BOOLEAN_MASK", true),
            },
            ..Specialization::plain(element, head_dim, value_dim)
        })
    }

    fn forward(&mut self, is_f32: bool) -> ForwardTile {
        ForwardTile {
            warps: self.take("FORWARD_WARPS", 4),
            row_tiles: self.take("FORWARD_ROW_TILES", if is_f32 { 1 } else { 2 }),
            keys: self.take("FORWARD_KEYS", if is_f32 { 32 } else { 64 }),
            stages: self.take("FORWARD_STAGES", 1),
            queries_in_registers: self.flag("FORWARD_QUERIES_IN_REGISTERS", false),
        }
    }

    fn decode(&mut self) -> DecodeTile {
        DecodeTile {
            warps: self.take("DECODE_WARPS", 4),
            keys: self.take("DECODE_KEYS", 16),
            stages: self.take("DECODE_STAGES", 3),
        }
    }

    fn backward(&mut self, is_f32: bool) -> BackwardTile {
        let keys = KeyTile {
            warps: self.take("KEY_WARPS", if is_f32 { 4 } else { 8 }),
            row_tiles: self.take("KEY_ROW_TILES", 1),
            warps_per_keys: self.take("WARPS_PER_KEYS", 1),
            queries: self.take("BACKWARD_QUERIES", if is_f32 { 16 } else { 64 }),
        };
        let row_warps = self.take("FUSED_ROW_WARPS", if keys.queries == 16 { 1 } else { 2 });
        let queries = QueryTile {
            warps: self.take("QUERY_WARPS", 4),
            row_tiles: self.take("QUERY_ROW_TILES", if is_f32 { 1 } else { 2 }),
            keys: self.take("QUERY_KEYS", if is_f32 { 16 } else { 32 }),
        };
        let is_fused = self.flag("FUSED_BACKWARD", false);
        let queries = if is_fused { QueryGradient::Fused { row_warps } } else { QueryGradient::Separate(queries) };
        BackwardTile { keys, queries }
    }
}

/// Returns the program of some constants, such as `-DHEAD_DIM=64 -DFORWARD_WARPS=2`.
///
/// # Errors
/// For a constant that does not exist, and for some that kernels cannot have together.
pub(crate) fn program_of_options(options: &str) -> Result<Program, String> {
    let mut given = Given::parse(options)?;
    let set = given.take("KERNEL_SET", 7);
    let specialization = given.specialization()?;
    let is_f32 = specialization.element == Element::F32;
    let (forward, decode, backward) = (given.forward(is_f32), given.decode(), given.backward(is_f32));
    if let Some((name, _)) = given.constants.first() {
        return Err(format!("there is no constant {name}, or it is given twice"));
    }
    let sets: Vec<_> = super::rows::ALL_KERNELS.into_iter().filter(|own| set & own.bit() as usize != 0).collect();
    let mut programs = Vec::new();
    for own in &sets {
        match own {
            KernelSet::Forward => programs.push(forward.program(&specialization)),
            KernelSet::Decode if specialization.dropout => {
                return Err("the decode kernel drops no weights, expected HAS_DROPOUT 0 with it".into());
            }
            KernelSet::Decode => programs.push(decode.program(&specialization)),
            KernelSet::Backward if specialization.key_codes => {
                return Err("codes have no gradients, expected KEY_CODES 0 with the backward kernels".into());
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
    fn program_of_options_has_the_given_constants_and_what_follows_from_them() -> Result<(), String> {
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
            ("-DHEAD_DIM=80 -DWARPS_PER_KEYS=2", "do not divide"),
        ] {
            let error = program_of_options(options).expect_err(options);
            assert!(error.contains(reason), "{error}");
        }
    }
}
