//! AMX: eight tile registers of 16 rows by 64 bytes, and a matrix product of bf16 tiles into f32 ones.
//!
//! The standard library has no stable intrinsics for it, so the instructions are written out. The compiler itself never
//! touches a tile register, so that its content lasts from one `asm!` to the next.

use std::arch::asm;

use super::avx512::Avx512;
use crate::cpu::functions::prefetch_bytes;
use crate::cpu::kernel::{Columns, Kernel, Tiles, Vector, compiled_for};
use crate::cpu::panel::{NextBytes, PanelProduct};

pub(crate) struct Amx;

/// Rows of a tile, and 32-bit words in one of its rows.
const TILE: usize = 16;
const PANEL: usize = 2 * TILE;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The configuration of eight whole tiles.
static WHOLE_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Releases the tile registers.
///
/// # Safety
/// The operating system permits AMX.
unsafe fn release() {
    // SAFETY: the operating system permits AMX, by this function's contract.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

macro_rules! tile {
    ("load", $tile:literal, $from:expr, $stride:expr) => {
        asm!(concat!("tileloadd tmm", $tile, ", [{} + {} * 4]"), in(reg) $from, in(reg) $stride, options(nostack, readonly))
    };
    ("store", $tile:literal, $to:expr, $stride:expr) => {
        asm!(concat!("tilestored [{} + {} * 4], tmm", $tile), in(reg) $to, in(reg) $stride, options(nostack))
    };
    ("zero", $tile:literal) => {
        asm!(concat!("tilezero tmm", $tile), options(nostack, nomem))
    };
    ("multiply", $c:literal, $a:literal, $b:literal) => {
        asm!(concat!("tdpbf16ps tmm", $c, ", tmm", $a, ", tmm", $b), options(nostack, nomem))
    };
}

/// Computes 32 rows by 32 columns of C in tiles 0 to 3, with A in 4 and 5 and B in 6 and 7.
///
/// # Safety
/// As [`multiply`](crate::cpu::multiply).
unsafe fn block_32_by_32(product: &PanelProduct, row: usize) {
    // SAFETY: the tiles are configured and the pointers valid; depth is a multiple of 16 words.
    unsafe {
        let c = product.c.add(row * PANEL);
        let c01 = c.add(TILE);
        let c10 = c.add(TILE * PANEL);
        let c11 = c.add(TILE * PANEL + TILE);
        if product.factors.is_some() {
            tile!("load", "0", c, PANEL);
            tile!("load", "1", c01, PANEL);
            tile!("load", "2", c10, PANEL);
            tile!("load", "3", c11, PANEL);
        } else {
            tile!("zero", "0");
            tile!("zero", "1");
            tile!("zero", "2");
            tile!("zero", "3");
        }
        for depth in (0..product.depth).step_by(TILE) {
            let a = product.a.at.add(row / TILE * product.a.group + depth);
            let b = product.b.at.add(depth * PANEL);
            tile!("load", "6", b, PANEL);
            tile!("load", "4", a, product.a.row);
            tile!("multiply", "0", "4", "6");
            tile!("load", "7", b.add(TILE), PANEL);
            tile!("multiply", "1", "4", "7");
            tile!("load", "5", a.add(product.a.group), product.a.row);
            tile!("multiply", "2", "5", "6");
            tile!("multiply", "3", "5", "7");
        }
        tile!("store", "0", c, PANEL);
        tile!("store", "1", c01, PANEL);
        tile!("store", "2", c10, PANEL);
        tile!("store", "3", c11, PANEL);
    }
}

/// Computes 16 rows by 16 columns of C in tile 0.
///
/// # Safety
/// As [`multiply`](crate::cpu::multiply).
unsafe fn block_16_by_16(product: &PanelProduct, row: usize, column: usize) {
    // SAFETY: the tiles are configured and the pointers valid; depth is a multiple of 16 words.
    unsafe {
        let c = product.c.add(row * PANEL + column);
        if product.factors.is_some() {
            tile!("load", "0", c, PANEL);
        } else {
            tile!("zero", "0");
        }
        for depth in (0..product.depth).step_by(TILE) {
            tile!("load", "6", product.b.at.add(depth * PANEL + column), PANEL);
            tile!("load", "4", product.a.at.add(row / TILE * product.a.group + depth), product.a.row);
            tile!("multiply", "0", "4", "6");
        }
        tile!("store", "0", c, PANEL);
    }
}

/// Multiplies C by the factors, unless all of them are 1: tiles cannot be scaled.
///
/// # Safety
/// As [`multiply`](crate::cpu::multiply); `factors` is the product's.
#[inline(always)]
unsafe fn scale_columns(product: &PanelProduct, factors: *const f32) {
    // SAFETY: C has `rows` rows of a panel, and the factors a panel.
    unsafe {
        if (0..product.vectors * TILE).all(|column| *factors.add(column) == 1.0) {
            return;
        }
        for vector in 0..product.vectors {
            let factor = Avx512::load(factors.add(vector * TILE));
            for row in 0..product.rows {
                let at = product.c.add(row * PANEL + vector * TILE);
                Avx512::load(at).mul(factor).store(at);
            }
        }
    }
}

impl Kernel for Amx {
    type Vector = Avx512;
    const ELEMENTS: usize = 2;
    const ROWS: usize = TILE;
    const MIN_ROWS: usize = TILE;
    const DEPTH: usize = TILE;
    const VECTORS: usize = 2;
    const BLOCK: usize = 256;

    unsafe fn configure_tiles() -> Option<Tiles> {
        // SAFETY: the processor has the instruction set, and the operating system permits it; the configuration is 64
        // bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const WHOLE_TILES, options(nostack, readonly)) };
        Some(Tiles { release })
    }

    compiled_for!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract; rows are a multiple of a tile's, and the factors are a panel.
        unsafe {
            if let Some(factors) = product.factors {
                scale_columns(product, factors);
            }
            let mut row = 0;
            if product.vectors == 2 {
                let blocks = product.rows.div_ceil(2 * TILE);
                while row + 2 * TILE <= product.rows {
                    let NextBytes { at, count } = product.next.part(row / (2 * TILE), blocks);
                    prefetch_bytes::<Avx512>(at, count);
                    block_32_by_32(product, row);
                    row += 2 * TILE;
                }
            }
            while row < product.rows {
                for vector in 0..product.vectors {
                    block_16_by_16(product, row, vector * TILE);
                }
                row += TILE;
            }
        }
    }
}
