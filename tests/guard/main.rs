//! The fused kernel and the projections under an allocator with a forbidden page next to every buffer: a stray read or
//! write outside of q, k, v, keep, bias, a weight, an input, the output or scratch memory ends the process. Linux only.
//!
//! The page is after the buffers in this process, and before them in a child process. `PROPTEST_CASES` and
//! `PROPTEST_RNG_SEED` have the same meaning as in the `flash` and `linear` tests.
#![cfg(target_os = "linux")]

mod allocator;
#[path = "../attention/call.rs"]
#[allow(dead_code, reason = "a part is for weights and gradients")]
mod call;
#[path = "../common/mod.rs"]
mod common;
#[path = "../attention/recipe.rs"]
#[allow(dead_code, reason = "a part is for other sizes")]
mod recipe;
use attention_oracle::{array, attention as oracle};

#[path = "../attention/linear"]
#[allow(dead_code, reason = "a part is for other properties")]
mod linear {
    pub mod case;
}

use std::hint::black_box;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::Ordering;

use allocator::{GUARDED, GuardedAllocator, guard_is_before};
use candle_attention::cpu::InstructionSet;
use candle_core::{DType, Result};
use proptest::prelude::*;
use proptest::sample::select;

use call::{Call, Path};
use linear::case::{INPUTS, OUTPUTS, Product, ROWS, TYPES, check, products};
use oracle::{Case, Dims, Lens, Mask, Part};
use recipe::{DTYPES, Kind, LENGTHS, Layout, MaskShape, Recipe, WIDTHS, for_all, kernel_recipes};

#[global_allocator]
static ALLOCATOR: GuardedAllocator = GuardedAllocator;

/// Layouts whose tensor ends, or begins, where its buffer does.
const TIGHT: [Layout; 5] =
    [Layout::Contiguous, Layout::HeadsTransposed, Layout::ColumnMajor, Layout::OneBatch, Layout::OneHead];

/// Runs each case in a new pool, so that no scratch memory is left that is larger than the case needs. With
/// `--nocapture`, the case in which a guard ends the process is the last one that is printed.
fn isolated<T: Send>(case: String, run: impl FnOnce() -> T + Send) -> T {
    println!("{case}");
    rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("a pool").install(run)
}

/// Runs a case on every instruction set.
fn run(case: &Case, dtype: DType) -> Result<()> {
    let call = Call::fused(case, dtype)?;
    Path::kernels().into_iter().try_for_each(|path| call.by(path).results().map(drop))
}

fn holds(draw: &Recipe) -> Result<()> {
    let case = draw.case();
    isolated(format!("{draw:#?}"), || run(&case, draw.dtype))
}

#[test]
fn attention_with_random_calls_stays_in_its_buffers() {
    let layout = || select(&TIGHT[..]);
    let strategy = (kernel_recipes(), [layout(), layout(), layout()]);
    for_all(48, strategy, |(draw, layouts)| holds(&Recipe { layouts, ..draw }));
}

#[test]
fn attention_with_every_edge_size_stays_in_its_buffers() {
    let masks: [&[Kind]; 6] = [
        &[],
        &[Kind::Causal],
        &[Kind::BoolMask(MaskShape::Keys)],
        &[Kind::Bias(MaskShape::Square)],
        &[Kind::BoolMask(MaskShape::Whole), Kind::Bias(MaskShape::Keys)],
        &[Kind::Bias(MaskShape::Head), Kind::Causal],
    ];
    for (n, &width) in WIDTHS.iter().enumerate() {
        let some = |&(m, &length): &(usize, &usize)| length <= 129 && (n + 3 * m) % 7 < 4;
        for (m, &length) in LENGTHS.iter().enumerate().filter(some) {
            let other = LENGTHS[(5 * m + n) % 17];
            let dims = Dims { b: 1, h: 2, h_kv: 1, t_q: other, t_kv: length, d: width, d_v: WIDTHS[(n + m) % 13] };
            let draw = Recipe::of_kernel(dims, masks[(n + m) % 6].to_vec(), DTYPES[(n + m) % 3]);
            let draw = Recipe { layouts: [TIGHT[m % 5], TIGHT[n % 5], TIGHT[(n + m) % 5]], ..draw };
            holds(&draw).unwrap_or_else(|difference| panic!("{difference}\n{draw:?}"));
        }
    }
}

/// Checks left padding of each length that products of whole tiles have to skip without overrunning a buffer.
#[test]
fn left_padding_within_a_block_stays_in_its_buffers() {
    for t_kv in [64, 128, 256, 300] {
        for (n, start) in (0..t_kv).step_by(8).enumerate() {
            let dims = Dims { b: 1, h: 1, h_kv: 1, t_q: 17, t_kv, d: 8, d_v: 16 };
            let dtype = DTYPES[n % 3];
            let mut case = Recipe::of_kernel(dims, vec![], dtype).case();
            case.masks = vec![Mask::of(Part::Starts(Lens::PerSequence(vec![start])))];
            let what = format!("keys {start}..{t_kv} in {dtype:?}");
            isolated(what.clone(), || run(&case, dtype)).unwrap_or_else(|error| panic!("{error}: {what}"));
        }
    }
}

fn product_holds(product: &Product) -> Result<()> {
    isolated(format!("{product:#?}"), || check(product))
}

#[test]
fn linear_with_random_products_stays_in_its_buffers() {
    let strategy = (products(), prop_oneof![3 => select(&TIGHT[..]), 1 => select(&Layout::ALL[..])]);
    for_all(48, strategy, |(product, layout)| product_holds(&Product { layout, ..product }));
}

/// Checks each number of inputs with a fifth of the numbers of outputs, and the reverse.
#[test]
fn linear_with_every_edge_size_stays_in_its_buffers() {
    for (n, &inputs) in INPUTS.iter().enumerate() {
        let some = |&(m, &outputs): &(usize, &usize)| outputs <= 101 && (n + 2 * m).is_multiple_of(5);
        for (m, &outputs) in OUTPUTS.iter().enumerate().filter(some) {
            let rows = ROWS[(2 * n + m) % 23];
            let product = Product::plain(TYPES[(n + m) % 5], rows, (inputs, outputs));
            let product = Product { layout: TIGHT[(n + m / 5) % 5], rank: 1 + m % 4, ..product };
            product_holds(&product).unwrap_or_else(|difference| panic!("{difference}\n{product:?}"));
        }
    }
}

/// Runs tests of this file in a subprocess.
fn child(args: &[&str], side: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().expect("a path to this test"));
    command.args(args).env("FLASH_GUARD", side).output().expect("the child runs")
}

/// Runs all other tests again in a process with pages on the other side.
#[test]
fn guard_page_before_each_buffer_stays_untouched() {
    if guard_is_before() {
        return;
    }
    let output = child(&["--skip", "guard_page_before", "--skip", "guard_page_and_canary"], "before");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("6 passed"), "{output:?}");
}

#[test]
fn guard_page_touches_each_buffer() {
    let before = GUARDED.load(Ordering::Relaxed);
    let numbers = black_box(vec![1f32; 1000]);
    assert!(GUARDED.load(Ordering::Relaxed) > before);
    let address = numbers.as_ptr() as usize;
    let edge = if guard_is_before() { address } else { address + size_of_val(numbers.as_slice()) };
    assert_eq!(edge % 4096, 0, "the buffer touches a page's edge");
    assert!(InstructionSet::available().contains(&InstructionSet::Scalar));
}

/// Reads where it must not.
#[test]
#[ignore = "ends the process, as it should"]
fn child_reads_guard_page() {
    let numbers = black_box(vec![1f32; 1000]);
    let pointer = numbers.as_ptr();
    // SAFETY: none, on purpose: the page next to the buffer ends the process.
    let read =
        unsafe { if guard_is_before() { pointer.sub(1).read_volatile() } else { pointer.add(1000).read_volatile() } };
    println!("read {read}");
}

#[test]
#[ignore = "ends the process, as it should"]
fn child_writes_canary() {
    let mut numbers = black_box(vec![1f32; 1000]);
    let pointer = numbers.as_mut_ptr();
    // SAFETY: the bytes next to the buffer are in the same mapping, and are the canary.
    unsafe {
        if guard_is_before() { pointer.add(1000).write_volatile(0.0) } else { pointer.sub(1).write_volatile(0.0) }
    };
}

/// Checks the guards: without this test, the others could pass under an allocator that does nothing.
#[test]
fn guard_page_and_canary_end_process_of_stray_access() {
    if guard_is_before() {
        return;
    }
    for side in ["behind", "before"] {
        let child = |test| child(&[test, "--exact", "--ignored", "--nocapture"], side);
        assert_eq!(child("child_reads_guard_page").status.signal(), Some(libc::SIGSEGV), "a read with the page {side}");
        let output = child("child_writes_canary");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "a write with the page {side}: {text}");
        assert!(text.contains("a write beside an allocation"), "{text}");
    }
}
