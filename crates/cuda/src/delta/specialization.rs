//! The constants that the kernels of the gated delta rule are compiled for, and the launches that follow from them.

use candle_core::DType;

use super::arguments::DeltaArguments;
use crate::capability::Limits;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, Launch};
use crate::element::Element;
use crate::kernel_struct::KernelStruct;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

/// The largest D_k and D_v of the kernels, whose registers and shared memory have rows of a state.
const MAX_WIDTH: usize = 256;

/// The tokens of a chunk that the kernels take, the best first.
const CHUNKS: [usize; 2] = [32, 16];

const PREPARE_WARPS: usize = 8;
const STEP_WARPS: usize = 8;
const BACKWARD_STEP_WARPS: usize = 8;

/// The most warps of a block of a scan: with more, two would share the tensor core of a quarter of a multiprocessor.
const MAX_SCAN_WARPS: usize = 4;

/// The constants of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeltaSpecialization {
    element: Element,
    d_k: usize,
    d_v: usize,
    /// The tokens of a chunk.
    pub chunk: usize,
    scan_warps: usize,
    /// The chunks whose matrices a scan has in shared memory.
    scan_stages: usize,
    is_backward: bool,
}

/// The number of blocks of some launches.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaGrid {
    /// N.
    pub sequences: usize,
    /// H.
    pub heads: usize,
    /// The chunks of all sequences.
    pub chunks: usize,
}

impl DeltaSpecialization {
    /// Returns the constants for a device and a call.
    ///
    /// # Errors
    /// If the kernels do not take the element type or the widths, or need more shared memory than the device has.
    pub fn choose(
        limits: &Limits,
        dtype: DType,
        d_k: usize,
        d_v: usize,
        is_backward: bool,
    ) -> Result<Self, Unsupported> {
        let element = Element::of(dtype)?;
        for (name, width) in [("queries and keys", d_k), ("values", d_v)] {
            if width == 0 || width > MAX_WIDTH {
                return Err(Unsupported::new(format!(
                    "the head dimension of {name} is {width}, expected 1 to {MAX_WIDTH}"
                )));
            }
        }
        let mut needed = 0;
        for chunk in CHUNKS {
            let scan_warps = MAX_SCAN_WARPS.min(d_v.div_ceil(16));
            let single = Self { element, d_k, d_v, chunk, scan_warps, scan_stages: 1, is_backward };
            needed = single.largest_shared_bytes();
            if needed > limits.shared_bytes {
                continue;
            }
            let double = Self { scan_stages: 2, ..single };
            return Ok(if double.scan_bytes() <= limits.shared_bytes { double } else { single });
        }
        Err(Unsupported::new(format!(
            "D_k of {d_k} and D_v of {d_v} need {needed} bytes of shared memory, and the device has {}",
            limits.shared_bytes
        )))
    }

    /// Returns the program with the kernels of a pass.
    pub fn program(&self) -> Program {
        let define = |name, value: usize| Define { name, value: value as i64 };
        let defines = vec![
            self.element.define(),
            define("KEY_WIDTH", self.d_k),
            define("VALUE_WIDTH", self.d_v),
            define("CHUNK", self.chunk),
            define("SCAN_WARPS", self.scan_warps),
            define("SCAN_STAGES", self.scan_stages),
            define("HAS_BACKWARD", usize::from(self.is_backward)),
        ];
        Program { root: "delta.cu", arguments: DeltaArguments::DEFINITION, defines }
    }

    /// Returns D_k, rounded up to whole fragments.
    pub fn key_columns(&self) -> usize {
        self.d_k.next_multiple_of(16)
    }

    /// Returns D_v, rounded up to whole fragments.
    pub fn value_columns(&self) -> usize {
        self.d_v.next_multiple_of(16)
    }

    /// Returns the numbers of the tile of a chunk and head: TILE_WORDS in the source.
    pub fn tile_len(&self) -> usize {
        3 * self.chunk * self.key_columns() + self.key_columns() + 2 * self.chunk * self.chunk
    }

    /// Returns the launch of a kernel that prepares the chunks for a scan.
    pub fn prepare(&self, kernel: &'static str, grid: DeltaGrid) -> Launch {
        Launch {
            kernel,
            grid: Grid { x: grid.chunks, y: grid.heads, z: 1 },
            threads: PREPARE_WARPS * 32,
            shared_bytes: self.prepare_bytes(),
        }
    }

    /// Returns the launch of a scan over the chunks.
    pub fn scan(&self, kernel: &'static str, grid: DeltaGrid) -> Launch {
        let blocks = (self.value_columns() / 16).div_ceil(self.scan_warps);
        Launch {
            kernel,
            grid: Grid { x: blocks, y: grid.heads, z: grid.sequences },
            threads: self.scan_warps * 32,
            shared_bytes: self.scan_bytes(),
        }
    }

    /// Returns the launch of the kernel that computes token by token.
    pub fn step(&self, grid: DeltaGrid) -> Launch {
        Launch {
            kernel: "delta_step",
            grid: Grid { x: self.d_v.div_ceil(32), y: grid.heads, z: grid.sequences },
            threads: STEP_WARPS * 32,
            shared_bytes: self.step_bytes(),
        }
    }

    /// Returns the launch of the kernel of the gradients of rows.
    pub fn gradients(&self, grid: DeltaGrid) -> Launch {
        Launch {
            kernel: "delta_gradients",
            grid: Grid { x: grid.chunks, y: grid.heads, z: 1 },
            threads: (self.key_columns() / 16).max(4) * 32,
            shared_bytes: self.gradient_bytes(),
        }
    }

    /// Returns the launch of the backward pass token by token.
    pub fn step_backward(&self, grid: DeltaGrid) -> Launch {
        Launch {
            kernel: "delta_step_backward",
            grid: Grid { x: grid.heads, y: grid.sequences, z: 1 },
            threads: BACKWARD_STEP_WARPS * 32,
            shared_bytes: self.backward_step_bytes(),
        }
    }

    /// Returns the launches of all kernels of the program.
    pub fn launches(&self, grid: DeltaGrid) -> Vec<Launch> {
        let mut launches = vec![self.prepare("delta_prepare", grid), self.scan("delta_scan", grid), self.step(grid)];
        if self.is_backward {
            launches.push(self.prepare("delta_prepare_backward", grid));
            launches.push(self.scan("delta_scan_backward", grid));
            launches.push(self.gradients(grid));
            launches.push(self.step_backward(grid));
        }
        launches
    }

    /// Returns the kernels of the program.
    fn kernels(&self) -> Vec<KernelShape> {
        let grid = DeltaGrid { sequences: 1, heads: 1, chunks: 1 };
        self.launches(grid).iter().map(Launch::kernel_shape).collect()
    }

    fn largest_shared_bytes(&self) -> usize {
        let forward = self.prepare_bytes().max(self.scan_bytes()).max(self.step_bytes());
        if self.is_backward { forward.max(self.gradient_bytes()).max(self.backward_step_bytes()) } else { forward }
    }

    /// Returns the bytes of the rows of a chunk of keys in shared memory.
    fn key_rows(&self) -> usize {
        self.chunk * (self.key_columns() + 8) * 4
    }

    /// Returns the bytes of a matrix (CHUNK, CHUNK) in shared memory.
    fn square(&self) -> usize {
        self.chunk * (self.chunk + 8) * 4
    }

    /// Returns the bytes of the numbers of each token of a chunk.
    fn numbers(&self) -> usize {
        self.chunk * 12
    }

    fn prepare_bytes(&self) -> usize {
        4 * self.key_rows() + 3 * self.square() + self.numbers()
    }

    fn scan_bytes(&self) -> usize {
        self.scan_stages * (3 * self.key_rows() + 2 * self.square() + self.key_columns() * 4)
    }

    fn step_bytes(&self) -> usize {
        let rows = 3 * STEP_WARPS * self.key_columns() * 4;
        let values_and_sums = 5 * STEP_WARPS * 32 * 4;
        rows + values_and_sums + 2 * STEP_WARPS * 4
    }

    fn gradient_bytes(&self) -> usize {
        let value_rows = self.chunk * (self.key_columns().max(self.value_columns()) + 8) * 4;
        3 * self.key_rows() + 3 * value_rows + 2 * self.square() + self.key_columns() * 4 + self.numbers()
    }

    fn backward_step_bytes(&self) -> usize {
        3 * self.key_rows() + self.numbers() + 3 * (self.value_columns() + self.key_columns()) * 4
    }
}

/// Returns the programs that a device runs for the usual widths.
pub(crate) fn entries(limits: &Limits) -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in Element::ALL {
        for (d_k, d_v) in [(64, 64), (128, 128), (256, 256), (75, 33)] {
            for is_backward in [false, true] {
                let Ok(own) = DeltaSpecialization::choose(limits, element.dtype(), d_k, d_v, is_backward) else {
                    continue;
                };
                let pass = if is_backward { "backward" } else { "forward" };
                let is_quick = is_backward && d_k == 128;
                let name = format!("delta {pass} {} d{d_k} {d_v}", element.name());
                entries.push(CiProgram::new(&own.program(), name, is_quick, own.kernels()));
            }
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpp;

    /// Compares tiles and shared memory with the source, for widths of whole fragments and others.
    #[test]
    fn delta_sizes_match_the_source() {
        for (d_k, d_v, chunk) in [(128, 128, 32), (37, 45, 16), (16, 200, 32)] {
            let own = DeltaSpecialization {
                element: Element::F32,
                d_k,
                d_v,
                chunk,
                scan_warps: 2,
                scan_stages: 2,
                is_backward: true,
            };
            let grid = DeltaGrid { sequences: 1, heads: 1, chunks: 1 };
            let sizes = [
                ("TILE_WORDS", own.tile_len()),
                ("PREPARE_SHARED", own.prepare_bytes()),
                ("SCAN_SHARED", own.scan_bytes()),
                ("STEP_SHARED", own.step_bytes()),
                ("GRADIENT_SHARED", own.gradient_bytes()),
                ("BACKWARD_STEP_SHARED", own.backward_step_bytes()),
                ("GRADIENT_WARPS * 32", own.gradients(grid).threads),
            ];
            let mut text = String::from("#include \"delta.cu\"\n");
            for (name, size) in sizes {
                text += &format!("static_assert({name} == {size}, \"{name}\");\n");
            }
            let program = own.program();
            let options: Vec<_> = program.define_options().collect();
            let Some(result) = cpp::check(&text, &program.arguments.headers(), &options) else { return };
            assert_eq!(result, Ok(()), "{own:?}");
        }
    }
}
