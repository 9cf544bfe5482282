//! The constants that the kernels of the gated delta rule are compiled for, and the launches that follow from them.

use candle_core::DType;

use super::arguments::{BACKWARD_STEP_WARPS, DeltaArguments, PREPARE_WARPS, STEP_WARPS};
use crate::capability::Limits;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, Launch};
use crate::element::ElementType;
use crate::given::Given;
use crate::kernel_struct::KernelStruct;
use crate::memory_layout::MemoryLayout;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

/// The largest D_k and D_v of the kernels, whose registers and shared memory have rows of a state.
const MAX_WIDTH: usize = 256;

/// The tokens of a chunk that the kernels take, the best first.
const CHUNKS: [usize; 2] = [32, 16];

/// The most warps of a block of a scan: with more, two would share the tensor core of a quarter of a multiprocessor.
const MAX_SCAN_WARPS: usize = 4;

/// The constants of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeltaSpecialization {
    element: ElementType,
    d_k: usize,
    d_v: usize,
    /// The number of tokens of a chunk.
    pub chunk: usize,
    scan_warps: usize,
    /// The number of chunks whose matrices a scan has in shared memory.
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
    /// The number of chunks of all sequences.
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
        let element = ElementType::of(dtype)?;
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
        let mut defines = vec![
            self.element.define(),
            define("KEY_WIDTH", self.d_k),
            define("VALUE_WIDTH", self.d_v),
            define("CHUNK", self.chunk),
            define("SCAN_WARPS", self.scan_warps),
            define("SCAN_STAGES", self.scan_stages),
            define("HAS_BACKWARD", usize::from(self.is_backward)),
            define("KEY_COLUMNS", self.key_columns()),
            define("VALUE_COLUMNS", self.value_columns()),
            define("KEY_PITCH", Self::pitch(self.key_columns())),
            define("VALUE_PITCH", Self::pitch(self.value_columns())),
            define("CHUNK_PITCH", Self::pitch(self.chunk)),
            define("SCAN_SHARED", self.scan_bytes()),
        ];
        defines.extend(self.tile_layout().defines("TILE_WORDS"));
        defines.extend(self.prepare_layout().defines("PREPARE_SHARED"));
        defines.extend(self.scan_stage_layout().defines("SCAN_STAGE"));
        defines.extend(self.step_layout().defines("STEP_SHARED"));
        if self.is_backward {
            defines.push(define("GRADIENT_WARPS", self.gradient_warps()));
            defines.push(define("GRADIENT_PITCH", self.longest_pitch()));
            defines.extend(self.gradient_layout().defines("GRADIENT_SHARED"));
            defines.extend(self.backward_step_layout().defines("BACKWARD_STEP_SHARED"));
        }
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

    /// Returns the parts of the tile of a chunk and head, in numbers.
    fn tile_layout(&self) -> MemoryLayout {
        let (rows, square) = (self.chunk * self.key_columns(), self.chunk * self.chunk);
        let mut layout = MemoryLayout::default();
        layout.add("TILE_READING", rows);
        layout.add("TILE_QUERIES", rows);
        layout.add("TILE_WRITING", rows);
        layout.add("TILE_KEPT", self.key_columns());
        layout.add("TILE_MIXING", square);
        layout.add("TILE_LOCAL", square);
        layout
    }

    /// Returns how many numbers the tile of a chunk and head has.
    pub fn tile_len(&self) -> usize {
        self.tile_layout().size()
    }

    /// Returns the launch of a kernel that prepares the chunks for a scan.
    pub fn prepare(&self, kernel: &'static str, grid: DeltaGrid) -> Launch {
        Launch {
            kernel,
            grid: Grid { x: grid.chunks, y: grid.heads, z: 1 },
            threads: PREPARE_WARPS * 32,
            shared_bytes: self.prepare_layout().size(),
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
            shared_bytes: self.step_layout().size(),
        }
    }

    /// Returns the launch of the kernel of the gradients of rows.
    pub fn gradients(&self, grid: DeltaGrid) -> Launch {
        Launch {
            kernel: "delta_gradients",
            grid: Grid { x: grid.chunks, y: grid.heads, z: 1 },
            threads: self.gradient_warps() * 32,
            shared_bytes: self.gradient_layout().size(),
        }
    }

    /// Returns the launch of the backward pass token by token.
    pub fn step_backward(&self, grid: DeltaGrid) -> Launch {
        Launch {
            kernel: "delta_step_backward",
            grid: Grid { x: grid.heads, y: grid.sequences, z: 1 },
            threads: BACKWARD_STEP_WARPS * 32,
            shared_bytes: self.backward_step_layout().size(),
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
        let forward = self.prepare_layout().size().max(self.scan_bytes()).max(self.step_layout().size());
        if !self.is_backward {
            return forward;
        }
        forward.max(self.gradient_layout().size()).max(self.backward_step_layout().size())
    }

    /// Returns the number of warps of a block of the kernel of the gradients of rows, of which each has 16 columns of
    /// keys.
    fn gradient_warps(&self) -> usize {
        (self.key_columns() / 16).max(4)
    }

    /// Returns the number of bytes from row to row of D_k or D_v columns in shared memory: the rows of a fragment begin
    /// in different banks.
    fn pitch(columns: usize) -> usize {
        (columns + 8) * 4
    }

    /// Returns the number of bytes of the rows of a chunk of keys in shared memory.
    fn key_rows(&self) -> usize {
        self.chunk * Self::pitch(self.key_columns())
    }

    /// Returns the number of bytes from row to row of keys or of values, the longer ones.
    fn longest_pitch(&self) -> usize {
        Self::pitch(self.key_columns().max(self.value_columns()))
    }

    /// Returns the number of bytes of a matrix (CHUNK, CHUNK) in shared memory.
    fn square(&self) -> usize {
        self.chunk * Self::pitch(self.chunk)
    }

    /// Returns the number of bytes of the betas and of the row factors of a chunk.
    fn numbers(&self) -> usize {
        self.chunk * 12
    }

    fn prepare_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        for place in ["PREPARE_QUERIES", "PREPARE_KEYS", "PREPARE_FACTORS", "PREPARE_WRITING"] {
            layout.add(place, self.key_rows());
        }
        for place in ["PREPARE_KEY_PRODUCTS", "PREPARE_QUERY_PRODUCTS", "PREPARE_INVERSE"] {
            layout.add(place, self.square());
        }
        layout.add("PREPARE_BETAS", self.numbers());
        layout
    }

    /// Returns the matrices of a chunk that a scan has in shared memory.
    fn scan_stage_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        for place in ["SCAN_READING", "SCAN_QUERIES", "SCAN_WRITING"] {
            layout.add(place, self.key_rows());
        }
        for place in ["SCAN_MIXING", "SCAN_LOCAL"] {
            layout.add(place, self.square());
        }
        layout.add("SCAN_KEPT", self.key_columns() * 4);
        layout
    }

    fn scan_bytes(&self) -> usize {
        self.scan_stages * self.scan_stage_layout().size()
    }

    fn step_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        // Rows of STEP_WARPS tokens, which the warps read side by side.
        for place in ["STEP_QUERIES", "STEP_KEYS", "STEP_FACTORS"] {
            layout.add(place, STEP_WARPS * self.key_columns() * 4);
        }
        layout.add("STEP_VALUES", STEP_WARPS * 32 * 4);
        layout.add("STEP_BETAS", STEP_WARPS * 4);
        layout.add("STEP_PRODUCTS", STEP_WARPS * 4);
        // Sums of each warp over its rows, for keys and for queries, of two tokens by turns.
        layout.add("STEP_SUMS", 2 * 2 * STEP_WARPS * 32 * 4);
        layout
    }

    fn gradient_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        for place in ["GRADIENT_QUERIES", "GRADIENT_KEYS", "GRADIENT_FACTORS"] {
            layout.add(place, self.key_rows());
        }
        for place in ["GRADIENT_OUTPUTS", "GRADIENT_UPDATES", "GRADIENT_MINUS_Y"] {
            layout.add(place, self.chunk * self.longest_pitch());
        }
        for place in ["GRADIENT_OF_KEY_PRODUCTS", "GRADIENT_OF_QUERY_PRODUCTS"] {
            layout.add(place, self.square());
        }
        layout.add("GRADIENT_ENDS", self.key_columns() * 4);
        layout.add("GRADIENT_BETAS", self.numbers());
        layout
    }

    fn backward_step_layout(&self) -> MemoryLayout {
        let mut layout = MemoryLayout::default();
        layout.add("BACKWARD_STEP_ROWS", 3 * self.key_rows());
        layout.add("BACKWARD_STEP_BETAS", self.numbers());
        for place in ["BACKWARD_STEP_OUTPUTS", "BACKWARD_STEP_ERRORS", "BACKWARD_STEP_ERROR_GRADIENTS"] {
            layout.add(place, self.value_columns() * 4);
        }
        for place in ["BACKWARD_STEP_OF_QUERY", "BACKWARD_STEP_OF_KEY", "BACKWARD_STEP_OF_DECAY"] {
            layout.add(place, self.key_columns() * 4);
        }
        layout
    }
}

/// Returns the program of both passes with some constants, such as `-DKEY_WIDTH=64 -DSCAN_WARPS=2`, for the tests on
/// the emulator.
///
/// # Errors
/// For a constant that does not exist.
pub(crate) fn program_of_options(options: &str) -> Result<Program, String> {
    let mut given = Given::parse(options)?;
    let d_k = given.take("KEY_WIDTH", 64);
    let specialization = DeltaSpecialization {
        element: given.element()?,
        d_k,
        d_v: given.take("VALUE_WIDTH", d_k),
        chunk: given.take("CHUNK", 32),
        scan_warps: given.take("SCAN_WARPS", 2),
        scan_stages: given.take("SCAN_STAGES", 1),
        is_backward: true,
    };
    given.finish()?;
    Ok(specialization.program())
}

/// Returns the programs that a device runs for the usual widths.
pub(crate) fn entries(limits: &Limits) -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in ElementType::ALL {
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

    #[test]
    fn shared_memory_of_delta_kernels_has_its_parts_one_after_the_other() -> Result<(), String> {
        let program = program_of_options("-DELEMENT=2 -DKEY_WIDTH=37 -DVALUE_WIDTH=45 -DCHUNK=16 -DSCAN_STAGES=2")?;
        let value = |name: &str| program.defines.iter().find(|define| define.name == name).map(|define| define.value);
        // 37 and 45 columns are 48, and rows have 8 numbers more: 16 rows of 56 numbers, matrices of 16 times 24.
        let (rows, square) = (16 * 56 * 4, 16 * 24 * 4);
        assert_eq!(value("TILE_WORDS"), Some(3 * 16 * 48 + 48 + 2 * 16 * 16));
        assert_eq!(value("PREPARE_KEY_PRODUCTS"), Some(4 * rows));
        assert_eq!(value("PREPARE_SHARED"), Some(4 * rows + 3 * square + 16 * 12));
        assert_eq!(value("SCAN_SHARED"), Some(2 * (3 * rows + 2 * square + 48 * 4)));
        assert_eq!(value("STEP_SHARED"), Some(3 * 8 * 48 * 4 + 5 * 8 * 32 * 4 + 2 * 8 * 4));
        assert_eq!(value("GRADIENT_SHARED"), Some(6 * rows + 2 * square + 48 * 4 + 16 * 12));
        assert_eq!(value("BACKWARD_STEP_SHARED"), Some(3 * rows + 16 * 12 + 6 * 48 * 4));
        assert!(program_of_options("-DKEY_WIDTH=37 -DVALUES=2").is_err());
        Ok(())
    }
}
