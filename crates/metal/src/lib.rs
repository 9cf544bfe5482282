#![doc = include_str!("../README.md")]
#![cfg_attr(
    not(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator"))),
    allow(
        dead_code,
        reason = "launches on Metal are compiled for Apple's systems: elsewhere, and with the emulator, nothing uses \
                  their parts"
    )
)]
// `ci/metal.sh` sets `metal_check`, to type-check them on other systems.
#![allow(unexpected_cfgs)]

mod backward;
mod backward_tile;
mod bindings;
mod buffers;
mod call;
#[cfg(feature = "emulator")]
mod copies;
#[cfg(feature = "emulator")]
mod emulator;
mod launch;
#[cfg(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator")))]
mod metal;
mod operands;
mod rows;
mod run;
mod source;
mod tile;

use std::path::Path;
use std::{fs, io};

use candle_attention_cuda::all_options;

pub use call::{MetalAttention, MetalKernel, MetalOutput};
pub use candle_attention_cuda::{BackwardInputs, Unsupported};
pub use launch::launches_of_thread;
pub use rows::MetalRows;
pub use run::{first_use, is_available};

/// Returns all macros of the program with some constants, such as `-DHEAD_DIM=64 -DHAS_SOFTCAP=1`, as options of a C++
/// compiler. Constants that are not given have a default. The tests on the emulator run such programs.
///
/// # Errors
/// For a constant that does not exist.
pub fn options_of_program(given: &str) -> Result<Vec<String>, String> {
    // The decode kernel drops no weights, and codes and pages have no gradients.
    let has_gradients = !given.contains("-DKEY_CODES=1") && !given.contains("-DKEY_PAGES=1");
    let kernels = match (given.contains("-DKERNEL_SET="), given.contains("-DHAS_DROPOUT=1"), has_gradients) {
        (true, _, _) => "",
        (false, true, _) => "-DKERNEL_SET=5",
        (false, false, true) => "-DKERNEL_SET=7",
        (false, false, false) => "-DKERNEL_SET=3",
    };
    let of_cuda = all_options(&format!("{given} {kernels}"))?;
    // The tiles are others here: what follows replaces the constants of the same names.
    let call: Vec<String> = of_cuda
        .into_iter()
        .filter(|option| !["-DFORWARD_", "-DDECODE_", "-DTILES_"].iter().any(|tile| option.starts_with(tile)))
        .collect();
    let value = |name: &str| -> Result<usize, String> {
        let prefix = format!("-D{name}=");
        let found = call.iter().find_map(|option| option.strip_prefix(&prefix));
        found.and_then(|number| number.parse().ok()).ok_or_else(|| format!("expected a number for {name}"))
    };
    let columns = tile::TileColumns { of_keys: value("HEAD_COLUMNS")?, of_values: value("VALUE_COLUMNS")? };
    let tile = tile::MetalTile::of(columns, value("ELEMENT_BYTES")?);
    let backward = backward_tile::MetalBackwardTile::of(columns, value("ELEMENT_BYTES")?);
    let defines = [tile.defines(), backward.defines()].concat();
    let of_tile = defines.into_iter().map(|define| format!("-D{}={}", define.name, define.value));
    Ok(call.iter().cloned().chain(of_tile).collect())
}

/// Writes the sources of the kernels of attention and of weights of codes into a folder, which is made if necessary, as
/// the files that Metal compiles but for the constants of a program.
///
/// # Errors
/// If a file cannot be written.
pub fn write_source(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("attention.metal"), source::KernelSource::Attention.text())?;
    fs::write(folder.join("codes.metal"), source::KernelSource::Codes.text())
}
