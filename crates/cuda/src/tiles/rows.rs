//! Programs that together have every row of the tables of tiles, for the tests on the emulator. A device takes the
//! first row that fits, so that the tests of calls reach few of the others.

use super::{BackwardTile, DecodeTile, ForwardLength, ForwardTile, KernelSet, Width};
use crate::element::ElementType;
use crate::program::Program;
use crate::specialization::{BiasElement, Specialization};
use candle_attention_call::KvCodeFormat;

/// The kernels of a program.
pub(super) const ALL_KERNELS: [KernelSet; 3] = [KernelSet::Forward, KernelSet::Decode, KernelSet::Backward];

/// The kernels of codes, which have no gradients.
const KERNELS_OF_CODES: [KernelSet; 2] = [KernelSet::Forward, KernelSet::Decode];

/// Returns the programs: each row of the backward tables, with rows of the forward and of the decode tables in turn.
pub(crate) fn programs_of_every_row() -> Vec<Program> {
    let mut programs = Vec::new();
    for element in ElementType::ALL {
        for width in [Width::Narrow, Width::Middle, Width::Wide] {
            programs.extend(programs_of_width(element, width));
        }
    }
    for (format, width) in [(KvCodeFormat::Q8, 32), (KvCodeFormat::Q4, 128)] {
        let codes =
            Specialization { key_codes: Some(format), ..Specialization::plain(ElementType::Bf16, width, width) };
        for (n, decode) in DecodeTile::rows(&codes).into_iter().enumerate() {
            let forward = in_turn(&ForwardTile::rows(&codes), n);
            programs.push(joined(&KERNELS_OF_CODES, &[forward.program(&codes), decode.program(&codes)]));
        }
    }
    programs
}

/// Returns the programs of an element type and a class of head dimensions. The two types of 16 bits share the rows:
/// each has every second one.
fn programs_of_width(element: ElementType, width: Width) -> Vec<Program> {
    let mut programs = Vec::new();
    let widest = Specialization::plain(element, width.most(), width.most());
    let (forward, decode) = (ForwardTile::rows(&widest), DecodeTile::rows(&widest));
    let backward = BackwardTile::rows(&widest);
    for n in 0..forward.len().max(decode.len()).max(backward.len()) {
        let is_of_element = match element {
            ElementType::F16 => n % 2 == 0,
            ElementType::Bf16 => n % 2 == 1,
            ElementType::F32 => true,
        };
        if !is_of_element {
            continue;
        }
        let backward = in_turn(&backward, n);
        // The narrowest heads take the least time.
        let dims = (width.least()..=width.most()).step_by(16);
        let own = dims.map(|dim| Specialization::plain(element, dim, dim)).find(|own| backward.divides(own));
        let own = own.unwrap_or(widest);
        let of_passes = [in_turn(&forward, n).program(&own), in_turn(&decode, n).program(&own), backward.program(&own)];
        programs.push(joined(&ALL_KERNELS, &of_passes));
    }
    programs
}

fn in_turn<T: Copy>(rows: &[T], n: usize) -> T {
    rows[n % rows.len()]
}

/// Returns the program of the kernels of several programs of one specialisation.
pub(super) fn joined(sets: &[KernelSet], programs: &[Program]) -> Program {
    let mut defines = vec![KernelSet::define(sets)];
    for define in programs.iter().flat_map(|program| &program.defines) {
        if defines.iter().all(|known| known.name != define.name) {
            defines.push(*define);
        }
    }
    super::program(defines)
}

impl ForwardTile {
    /// Returns the rows of the tables for an element type and a class of head dimensions.
    fn rows(plain: &Specialization) -> Vec<Self> {
        let mut rows = Vec::new();
        for bias in [None, Some(BiasElement::F32)] {
            for boolean_mask in [false, true] {
                for relative_bias in [false, true] {
                    let own = Specialization { bias, boolean_mask, relative_bias, ..*plain };
                    for length in [ForwardLength::Other, ForwardLength::Long] {
                        rows.extend(Self::candidates(&own, length));
                    }
                }
            }
        }
        let mut unique = Vec::new();
        for row in rows {
            // Kernels of codes have one stage.
            let is_possible = plain.key_codes.is_none() || row.stages == 1;
            if is_possible && !unique.contains(&row) {
                unique.push(row);
            }
        }
        unique
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::specialization::ModifierGradients;

    /// Returns the values of macros in a program.
    fn values(program: &Program, names: &[&str]) -> Vec<Option<i64>> {
        let value = |name: &&str| program.defines.iter().find(|define| define.name == *name).map(|define| define.value);
        names.iter().map(value).collect()
    }

    /// Returns the class of head dimensions of a program.
    fn width(program: &Program) -> Width {
        let dim = values(program, &["HEAD_DIM"])[0].unwrap_or(0) as usize;
        Width::of(&Specialization::plain(ElementType::F16, dim, dim))
    }

    /// Checks that a program of every row has the tile of another program.
    fn check(all: &[Program], program: &Program, names: &[&str]) {
        let tile = values(program, names);
        let is_there = all.iter().any(|row| values(row, names) == tile && width(row) == width(program));
        assert!(is_there, "no program has {names:?} = {tile:?}, as {program:?}");
    }

    #[test]
    fn every_tile_that_a_device_takes_is_a_row() {
        const FORWARD: [&str; 5] =
            ["FORWARD_WARPS", "FORWARD_ROW_TILES", "FORWARD_KEYS", "FORWARD_STAGES", "FORWARD_QUERIES_IN_REGISTERS"];
        const DECODE: [&str; 3] = ["DECODE_WARPS", "DECODE_KEYS", "DECODE_STAGES"];
        const BACKWARD: [&str; 9] = [
            "KEY_WARPS",
            "KEY_ROW_TILES",
            "WARPS_PER_KEYS",
            "BACKWARD_QUERIES",
            "FUSED_BACKWARD",
            "FUSED_ROW_WARPS",
            "QUERY_WARPS",
            "QUERY_ROW_TILES",
            "QUERY_KEYS",
        ];
        let all = programs_of_every_row();
        for element in ElementType::ALL {
            for dim in [16, 64, 80, 96, 128, 192, 256] {
                for shared_bytes in [20, 40, 64, 99, 163, 227].map(|kibibytes| kibibytes * 1024) {
                    for bias in [None, Some(BiasElement::Element)] {
                        let gradients = ModifierGradients { bias: bias.is_some(), ..ModifierGradients::default() };
                        let own = Specialization { bias, gradients, ..Specialization::plain(element, dim, dim) };
                        for length in [ForwardLength::Other, ForwardLength::Long] {
                            if let Ok(tile) = ForwardTile::choose(&own, length, shared_bytes) {
                                check(&all, &tile.program(&own), &FORWARD);
                            }
                        }
                        if let Ok(tile) = DecodeTile::choose(&own, shared_bytes) {
                            check(&all, &tile.program(&own), &DECODE);
                        }
                        if let Ok(tile) = BackwardTile::choose(&own, shared_bytes) {
                            check(&all, &tile.program(&own), &BACKWARD);
                        }
                    }
                }
            }
        }
    }
}
