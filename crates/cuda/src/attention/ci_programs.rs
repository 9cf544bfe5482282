//! The attention programs that continuous integration compiles for each compute capability.

use candle_attention_call::KvCodeFormat;

use crate::capability::Limits;
use crate::ci_programs::CiProgram;
use crate::element::ElementType;
use crate::program::{KernelShape, Program};
use crate::specialization::{Alignment, BiasElement, ModifierGradients, NamedSpecialization, Specialization};
use crate::tiles::{BackwardTile, DecodeTile, ForwardLength, ForwardTile};

/// Head dimensions of q and k, and of v.
#[derive(Clone, Copy)]
struct HeadDims {
    head: usize,
    value: usize,
}

const HEAD_DIMS: [HeadDims; 6] = [
    HeadDims { head: 64, value: 64 },
    HeadDims { head: 80, value: 80 },
    HeadDims { head: 96, value: 96 },
    HeadDims { head: 128, value: 128 },
    HeadDims { head: 192, value: 128 },
    HeadDims { head: 256, value: 256 },
];

/// A specialisation with a name.
struct Case {
    name: String,
    specialization: Specialization,
    is_quick: bool,
}

/// Returns the programs of attention that a device would run.
pub(crate) fn entries(limits: &Limits) -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for case in plain_cases().into_iter().chain(modifier_cases()).chain(layout_cases()) {
        add_passes(&case, limits, &mut entries);
    }
    entries
}

/// Returns the calls without score modifiers.
fn plain_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for element in ElementType::ALL {
        for HeadDims { head, value } in HEAD_DIMS {
            let dims = if head == value { format!("d{head}") } else { format!("d{head} {value}") };
            cases.push(Case {
                name: format!("{} {dims}", element.name()),
                specialization: Specialization::plain(element, head, value),
                is_quick: head == 64 || (head == 128 && value == 128 && element == ElementType::Bf16),
            });
        }
    }
    cases
}

/// Returns the calls with one score modifier, and with all of them.
fn modifier_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for head in [64, 128] {
        let plain = Specialization::plain(ElementType::Bf16, head, head);
        for NamedSpecialization { name, specialization } in plain.with_modifiers() {
            let is_quick = head == 64 && name.starts_with("all modifiers");
            cases.push(Case { name: format!("bf16 d{head} {name}"), specialization, is_quick });
        }
    }
    let f32_all = Specialization {
        element: ElementType::F32,
        ..cases.last().map_or(Specialization::plain(ElementType::F32, 64, 64), |case| case.specialization)
    };
    cases.push(Case { name: "f32 d128 all modifiers but dropout".into(), specialization: f32_all, is_quick: false });
    cases
}

/// Returns the calls whose tensors are not aligned, and the calls with codes or with keys in pages.
fn layout_cases() -> Vec<Case> {
    let unaligned = Alignment { rows: false, bias: false, boolean_mask: false };
    let odd = Specialization { alignment: unaligned, ..Specialization::plain(ElementType::F16, 75, 33) };
    let odd_bias = Specialization { bias: Some(BiasElement::Element), boolean_mask: true, ..odd };
    let mut cases = vec![
        Case { name: "f16 d75 33 unaligned".into(), specialization: odd, is_quick: true },
        Case { name: "f16 d75 33 unaligned bias".into(), specialization: odd_bias, is_quick: false },
    ];
    for element in ElementType::ALL {
        for head in [64, 128, 256] {
            let plain = Specialization::plain(element, head, head);
            cases.push(Case {
                name: format!("{} d{head} 8 bits", element.name()),
                specialization: Specialization { key_codes: Some(KvCodeFormat::Q8), ..plain },
                is_quick: head == 64,
            });
        }
    }
    // The formats differ in few instructions. Codes of 4 bits have several scales in rows of 128.
    for (format, head) in [(KvCodeFormat::E4M3, 64), (KvCodeFormat::Q4, 128)] {
        let plain = Specialization::plain(ElementType::Bf16, head, head);
        cases.push(Case {
            name: format!("bf16 d{head} {format}"),
            specialization: Specialization { key_codes: Some(format), ..plain },
            is_quick: true,
        });
    }
    let plain = Specialization { key_pages: true, ..Specialization::plain(ElementType::Bf16, 64, 64) };
    cases.push(Case { name: "bf16 d64 pages".into(), specialization: plain, is_quick: true });
    cases.push(Case {
        name: "bf16 d64 8 bits pages".into(),
        specialization: Specialization { key_codes: Some(KvCodeFormat::Q8), ..plain },
        is_quick: true,
    });
    cases
}

/// Adds the forward, decode and backward programs of a call, where a device runs them.
fn add_passes(case: &Case, limits: &Limits, entries: &mut Vec<CiProgram>) {
    let specialization = &case.specialization;
    let forward = Specialization { gradients: ModifierGradients::default(), ..*specialization };
    let mut add = |pass: &str, program: Program, kernels: Vec<KernelShape>| {
        entries.push(CiProgram::new(&program, format!("{pass} {}", case.name), case.is_quick, kernels));
    };
    if let Ok(tile) = ForwardTile::choose(&forward, ForwardLength::Other, limits.shared_bytes) {
        add("forward", tile.program(&forward), vec![tile.kernel(&forward)]);
        match ForwardTile::choose(&forward, ForwardLength::Long, limits.shared_bytes) {
            Ok(long) if long != tile => add("long forward", long.program(&forward), vec![long.kernel(&forward)]),
            _ => {}
        }
    }
    if !forward.dropout
        && let Ok(tile) = DecodeTile::choose(&forward, limits.shared_bytes)
    {
        add("decode", tile.program(&forward), vec![tile.kernel(&forward), DecodeTile::combine_kernel()]);
    }
    if specialization.key_codes.is_none()
        && !specialization.key_pages
        && let Ok(tile) = BackwardTile::choose(specialization, limits.shared_bytes)
    {
        let kernels = tile.kernels(specialization);
        let mut launched =
            vec![kernels.delta, kernels.sinks, kernels.tiles, kernels.query_gradients, kernels.key_gradients];
        let modifiers = [
            (specialization.gradients.bias, kernels.bias),
            (specialization.gradients.slopes, kernels.slopes),
            (specialization.gradients.relative_bias, kernels.relative_bias),
        ];
        launched.extend(modifiers.into_iter().filter(|(is_launched, _)| *is_launched).map(|(_, kernel)| kernel));
        add("backward", tile.program(specialization), launched);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::Capability;
    use std::collections::BTreeSet;

    const CAPABILITIES: [Capability; 3] =
        [Capability { major: 8, minor: 0 }, Capability { major: 8, minor: 6 }, Capability { major: 9, minor: 0 }];

    #[test]
    fn every_program_fits_the_shared_memory_of_its_device_and_has_a_name_of_its_own() {
        for capability in CAPABILITIES {
            let limits = Limits::of_capability(capability);
            let mut names = BTreeSet::new();
            for entry in entries(&limits) {
                let largest = entry.kernels.iter().map(|kernel| kernel.shared_bytes).max();
                assert!(largest <= Some(limits.shared_bytes), "{} for {capability}", entry.name);
                assert!(names.insert(entry.name.clone()), "{} twice", entry.name);
            }
        }
    }

    #[test]
    fn every_call_but_wide_f32_backward_has_programs_on_every_device() {
        for capability in CAPABILITIES {
            let names: BTreeSet<_> =
                entries(&Limits::of_capability(capability)).into_iter().map(|entry| entry.name).collect();
            for case in plain_cases().into_iter().chain(modifier_cases()).chain(layout_cases()) {
                let Specialization { dropout, key_codes, key_pages, .. } = case.specialization;
                let passes = [("forward", true), ("decode", !dropout), ("backward", key_codes.is_none() && !key_pages)];
                for (pass, _) in passes.into_iter().filter(|(_, is_expected)| *is_expected) {
                    let name = format!("{pass} {}", case.name);
                    let is_too_wide = name == "backward f32 d256" && capability.minor == 6;
                    assert_eq!(names.contains(&name), !is_too_wide, "{name} for {capability}");
                }
            }
        }
    }
}
