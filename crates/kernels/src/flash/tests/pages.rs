//! Keys and values in pages: the bits of the same call with keys and values in one piece.

use std::ops::Range;

use half::{bf16, f16};

use super::case::{Case, Data, FOR_BACKWARD, dims};
use super::{numbers, on_miri_only_scalar};
use crate::Element;
use crate::cpu::InstructionSet;
use crate::flash::{
    AttentionBackwardProblem, AttentionCall, AttentionDims, AttentionResults, CpuCall, KvCodeFormat, KvPages, KvScales,
    OutputLayout, PerInput, RequestedGradients, RequestedResults, RequestedStatistics, Strided, View, attend,
    attend_backward,
};

/// The entry of a page that no query needs.
const NO_PAGE: u32 = u32::MAX;

/// The places of the keys of a call in pools of pages, in no order, with a page between that belongs to nobody.
struct Placement {
    page_size: usize,
    /// The number of pages of the pools.
    pages: usize,
    /// The number of heads with separate pages: 1, or H_kv.
    heads: usize,
    /// (B, heads, pages of a sequence).
    table: Vec<u32>,
}

impl Placement {
    /// Places the keys that queries attend to. Every sequence has the first `shared` pages of the first one.
    fn new(case: &Case, page_size: usize, shared: usize, heads: usize) -> Self {
        let AttentionDims { b, t_q, t_kv, .. } = case.dims;
        let columns = t_kv.div_ceil(page_size);
        let entries = b * heads * columns;
        // Multiples of 7 visit every page once if 7 does not divide their number.
        let pages = if (entries + 1).is_multiple_of(7) { entries + 2 } else { entries + 1 };
        let mut table = vec![NO_PAGE; entries];
        for list in 0..b * heads {
            for n in 0..columns {
                let keys = n * page_size..(n + 1) * page_size;
                let ranges = &case.ranges[list / heads * t_q..(list / heads + 1) * t_q];
                if ranges.iter().any(|range| overlaps(range, &keys)) {
                    let owner = if n < shared { list % heads } else { list };
                    table[list * columns + n] = ((owner * columns + n) * 7 % pages) as u32;
                }
            }
        }
        Self { page_size, pages, heads, table }
    }

    /// Returns the table as kernels read it.
    fn view(&self, columns: usize) -> View<'_> {
        let of_head = if self.heads == 1 { 0 } else { columns };
        let of_sequences = Strided { data: &self.table[..], strides: [self.heads * columns, 1] };
        View { strides: [self.heads * columns, of_head, 0, 1], ..View::from(of_sequences) }
    }

    /// Returns a pool (pages, page size, H_kv, width) with the rows (B, H_kv, T_kv, width) of a call, and `poison`
    /// elsewhere.
    fn pool<T: Copy>(&self, dims: &AttentionDims, rows: &[T], width: usize, poison: T) -> Vec<T> {
        let &AttentionDims { b, h_kv, t_kv, .. } = dims;
        let columns = t_kv.div_ceil(self.page_size);
        let mut pool = vec![poison; self.pages * self.page_size * h_kv * width];
        for sequence in 0..b {
            for head in 0..h_kv {
                for key in 0..t_kv {
                    let list = sequence * self.heads + head % self.heads;
                    let page = self.table[list * columns + key / self.page_size];
                    if page == NO_PAGE {
                        continue;
                    }
                    let row = (page as usize * self.page_size + key % self.page_size) * h_kv + head;
                    let from = ((sequence * h_kv + head) * t_kv + key) * width;
                    pool[row * width..(row + 1) * width].copy_from_slice(&rows[from..from + width]);
                }
            }
        }
        pool
    }
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

/// The pools of a call.
struct Pools<E> {
    k: Vec<E>,
    v: Vec<E>,
    k_codes: Vec<u8>,
    v_codes: Vec<u8>,
    k_scales: Vec<f32>,
    v_scales: Vec<f32>,
}

impl<E: Element> Pools<E> {
    fn new(placement: &Placement, case: &Case, data: &Data<E>) -> Self {
        let dims = &case.dims;
        let format = case.codes.unwrap_or(KvCodeFormat::Q8);
        let nan = E::from_f32(f32::NAN);
        Self {
            k: placement.pool(dims, &data.k, dims.d, nan),
            v: placement.pool(dims, &data.v, dims.d_v, nan),
            k_codes: placement.pool(dims, &data.k_codes.codes, format.bytes(dims.d), 255),
            v_codes: placement.pool(dims, &data.v_codes.codes, format.bytes(dims.d_v), 255),
            k_scales: placement.pool(dims, &data.k_codes.scales, format.scales(dims.d), f32::NAN),
            v_scales: placement.pool(dims, &data.v_codes.scales, format.scales(dims.d_v), f32::NAN),
        }
    }

    /// Returns the call with its keys and values in the pools.
    fn call<'a>(&'a self, plain: &CpuCall<'a>, placement: &'a Placement) -> CpuCall<'a> {
        let AttentionDims { h_kv, t_kv, d, d_v, .. } = plain.dims;
        let page_size = placement.page_size;
        let strides = |width: usize| [page_size * h_kv * width, width, h_kv * width];
        let format = plain.kv_scales.map(|scales| scales.format);
        let rows = |floats: &'a [E], codes: &'a [u8], width: usize| match format {
            Some(format) => View::from(Strided { data: codes, strides: strides(format.bytes(width)) }),
            None => View::from(Strided { data: floats, strides: strides(width) }),
        };
        let kv_scales = format.map(|format| {
            let scales = |scales: &'a [f32], width: usize| {
                View::from(Strided { data: scales, strides: strides(format.scales(width)) })
            };
            KvScales { format, k: scales(&self.k_scales, d), v: scales(&self.v_scales, d_v) }
        });
        let table = placement.view(t_kv.div_ceil(page_size));
        AttentionCall {
            k: rows(&self.k, &self.k_codes, d),
            v: rows(&self.v, &self.v_codes, d_v),
            kv_scales,
            pages: Some(KvPages { table, page_size }),
            ..*plain
        }
    }
}

/// Copies the first keys of the first sequence to the others.
fn share_first_keys<T: Copy>(dims: &AttentionDims, rows: &mut [T], width: usize, keys: usize) {
    let of_head = dims.t_kv * width;
    let of_sequence = dims.h_kv * of_head;
    for at in of_sequence..rows.len() {
        if at % of_head < keys * width {
            rows[at] = rows[at % of_sequence];
        }
    }
}

/// Returns the bits of the output, the log-sum-exps, and the statistics if there are any.
fn bits<E: Element + Into<f32>>(found: AttentionResults<E>) -> Vec<u32> {
    let mut bits: Vec<u32> = found.output.into_iter().map(|x| x.into().to_bits()).collect();
    bits.extend(found.log_sum_exp.expect("requested").into_iter().map(f32::to_bits));
    if let Some(statistics) = found.statistics {
        bits.extend(statistics.top_keys);
        bits.extend(statistics.key_weight_sums.into_iter().map(f32::to_bits));
    }
    bits
}

/// Checks that a call has the same bits in pages of each size. Of every second size, heads have separate pages, and
/// sequences share their first page.
fn check_pages<E: Element + Into<f32>>(instruction_set: InstructionSet, case: &Case, page_sizes: &[usize]) {
    let two_keys = RequestedStatistics { top_keys: 2, tile: None };
    for (n, &page_size) in page_sizes.iter().enumerate() {
        let mut data = case.data::<E>();
        let shared = n % 2;
        let AttentionDims { d, d_v, .. } = case.dims;
        let keys = (shared * page_size).min(case.dims.t_kv);
        share_first_keys(&case.dims, &mut data.k, d, keys);
        share_first_keys(&case.dims, &mut data.v, d_v, keys);
        let format = case.codes.unwrap_or(KvCodeFormat::Q8);
        share_first_keys(&case.dims, &mut data.k_codes.codes, format.bytes(d), keys);
        share_first_keys(&case.dims, &mut data.v_codes.codes, format.bytes(d_v), keys);
        share_first_keys(&case.dims, &mut data.k_codes.scales, format.scales(d), keys);
        share_first_keys(&case.dims, &mut data.v_codes.scales, format.scales(d_v), keys);
        let heads = if shared == 1 { case.dims.h_kv } else { 1 };
        let placement = Placement::new(case, page_size, shared, heads);
        let pools = Pools::new(&placement, case, &data);
        let plain = case.call(&data);
        let paged = pools.call(&plain, &placement);
        for statistics in [None, Some(&two_keys)] {
            let requested = RequestedResults { log_sum_exp: true, statistics, ..RequestedResults::default() };
            let expected = attend::<E>(&plain, instruction_set, requested).expect("keys in one piece");
            let found = attend::<E>(&paged, instruction_set, requested).expect("keys in pages");
            assert!(
                bits(found) == bits(expected),
                "{instruction_set}, {}, {case}, pages of {page_size}, {shared} shared, statistics {}",
                E::NAME,
                statistics.is_some()
            );
        }
    }
}

/// Checks a case in every type.
fn check_types(instruction_set: InstructionSet, case: &Case, page_sizes: &[usize]) {
    check_pages::<f32>(instruction_set, case, page_sizes);
    check_pages::<bf16>(instruction_set, case, page_sizes);
    check_pages::<f16>(instruction_set, case, page_sizes);
}

/// Returns a case in which the second sequence has fewer keys, and all queries a window, if there is one.
fn case(dims: AttentionDims, has_modifiers: bool, window: Option<usize>, codes: Option<KvCodeFormat>) -> Case {
    let mut case = Case { codes, ..Case::new(dims, true, has_modifiers) };
    for (row, range) in case.ranges.iter_mut().enumerate() {
        if row >= dims.t_q {
            range.end = range.end.saturating_sub(dims.t_kv / 3);
        }
        if let Some(window) = window {
            range.start = range.end.saturating_sub(window);
        }
    }
    case
}

#[test]
fn attention_over_pages_has_the_bits_of_keys_in_one_piece() {
    for instruction_set in on_miri_only_scalar() {
        let shapes = [dims(4, 1, 131, 9, 5), dims(2, 3, 150, 16, 16), dims(4, 45, 140, 5, 9)];
        for &shape in if cfg!(miri) { &shapes[..1] } else { &shapes[..] } {
            let q8 = Some(KvCodeFormat::Q8);
            for (has_modifiers, window, codes) in
                [(false, None, None), (true, None, q8), (true, Some(40), None), (false, Some(21), q8)]
            {
                check_types(instruction_set, &case(shape, has_modifiers, window, codes), &[16, 32, 64, 5, 1, 1]);
            }
        }
    }
}

/// Checks several parts of the keys, which decoding and short prompts split.
#[cfg_attr(miri, ignore = "takes minutes")]
#[test]
fn attention_over_parts_of_pages_has_the_bits_of_keys_in_one_piece() {
    for instruction_set in InstructionSet::available() {
        for shape in [dims(2, 1, 2100, 8, 8), dims(1, 20, 1100, 8, 8)] {
            check_pages::<f32>(instruction_set, &case(shape, false, None, None), &[16, 1]);
            check_pages::<bf16>(instruction_set, &case(shape, false, Some(1050), Some(KvCodeFormat::Q8)), &[48]);
        }
    }
}

/// Returns the bits of the gradients of a call.
fn gradient_bits<E: Element + Into<f32>>(
    call: CpuCall,
    output_grad: &[E],
    instruction_set: InstructionSet,
) -> [Vec<u32>; 3] {
    let AttentionDims { h, t_q, d_v, .. } = call.dims;
    let found = attend::<E>(&call, instruction_set, FOR_BACKWARD).expect("a forward pass");
    let problem = AttentionBackwardProblem {
        forward: call,
        output: &found.output,
        softmax_stats: &found.softmax_stats.expect("requested"),
        output_grad: Strided { data: output_grad, strides: [h * t_q * d_v, t_q * d_v, d_v] },
        lse_grad: None,
    };
    let of = PerInput { q: true, k: true, v: true, ..PerInput::default() };
    let requested = RequestedGradients { layout: OutputLayout::Bhtd, of };
    let gradients = attend_backward(&problem, instruction_set, requested).expect("a backward pass");
    [gradients.q, gradients.k, gradients.v]
        .map(|numbers| numbers.expect("requested").into_iter().map(|x| x.into().to_bits()).collect())
}

#[test]
fn gradients_over_pages_have_the_bits_of_keys_in_one_piece() {
    for instruction_set in on_miri_only_scalar() {
        let shapes = [dims(2, 3, 40, 9, 5), dims(4, 45, 140, 5, 9)];
        for &shape in if cfg!(miri) { &shapes[..1] } else { &shapes[..] } {
            let AttentionDims { b, h, h_kv, t_q, d_v, .. } = shape;
            let case = case(shape, true, Some(21), None);
            let data = case.data::<f32>();
            let plain = case.call(&data);
            let output_grad = numbers::<f32>(b * h * t_q * d_v, 7);
            let expected = gradient_bits(plain, &output_grad, instruction_set);
            for (page_size, heads) in [(16, 1), (1, 1), (1, h_kv), (5, h_kv)] {
                let placement = Placement::new(&case, page_size, 0, heads);
                let pools = Pools::new(&placement, &case, &data);
                let found = gradient_bits(pools.call(&plain, &placement), &output_grad, instruction_set);
                assert!(found == expected, "{instruction_set}, {case}, pages of {page_size}, {heads} heads");
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_in_pages_reach_the_same_queries() {
    for instruction_set in on_miri_only_scalar() {
        for t_q in [2, 30] {
            let case = case(dims(2, t_q, 70, 8, 8), false, None, None);
            let mut data = case.data::<f32>();
            // Of the last key, which only the last query of the first sequence attends to, in two heads.
            data.v[(70 - 1) * 8] = f32::INFINITY;
            let placement = Placement::new(&case, 16, 0, 1);
            let pools = Pools::new(&placement, &case, &data);
            let plain = case.call(&data);
            let requested = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
            let expected = attend::<f32>(&plain, instruction_set, requested).expect("keys in one piece");
            let infinite = expected.output.iter().filter(|x| !x.is_finite()).count();
            let found = attend::<f32>(&pools.call(&plain, &placement), instruction_set, requested);
            assert!(bits(found.expect("keys in pages")) == bits(expected), "{instruction_set}, {t_q} queries");
            assert_eq!(infinite, 2, "{instruction_set}, {t_q} queries");
        }
    }
}

#[test]
fn tables_that_lack_a_page_are_refused() {
    let case = case(dims(2, 1, 40, 4, 4), false, None, None);
    let data = case.data::<f32>();
    let placement = Placement::new(&case, 16, 0, 1);
    let pools = Pools::new(&placement, &case, &data);
    let plain = case.call(&data);
    let good = pools.call(&plain, &placement);
    let with_table =
        |table: View<'static>, page_size| AttentionCall { pages: Some(KvPages { table, page_size }), ..good };
    let table = |pages: &'static [u32]| View::from(Strided { data: pages, strides: [3, 1] });
    let short_values = View::from(Strided { data: &pools.v[..pools.v.len() - 1], strides: [64, 4, 4] });
    let cases = [
        (
            with_table(table(&[0, 8, 1, 2, 3, 4]), 16),
            "expected pages below 8, the number of pages in the pools, found page 8 as entry 1 of sequence 0",
        ),
        (
            with_table(table(&[0, 1, 2, 3, 4]), 16),
            "the table of pages of [2, 1, 3] entries of 1 elements with strides [3, 0, 1] ends past the 5 elements of \
             its slice",
        ),
        (with_table(table(&[0; 6]), 0), "expected pages of at least one key, found pages of 0"),
        (
            with_table(View::from(Strided { data: &[0f32; 6], strides: [0, 0, 3, 1] }), 16),
            "expected the table of pages in u32, found numbers in f32",
        ),
        (
            AttentionCall { v: short_values, ..with_table(table(&[0, 1, 2, 3, 7, 9]), 16) },
            "expected pages below 7, the number of pages in the pools, found page 7 as entry 1 of sequence 1",
        ),
    ];
    for (call, expected) in cases {
        for instruction_set in InstructionSet::available() {
            let error = attend::<f32>(&call, instruction_set, RequestedResults::default()).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }
}

#[test]
fn attention_over_pages_of_e4m3_and_4_bits_has_the_bits_of_codes_in_one_piece() {
    for instruction_set in on_miri_only_scalar() {
        for format in [KvCodeFormat::E4M3, KvCodeFormat::Q4] {
            let shapes = [dims(4, 1, 131, 64, 32), dims(2, 3, 150, 32, 128), dims(4, 45, 140, 128, 96)];
            for &shape in if cfg!(miri) { &shapes[..1] } else { &shapes[..] } {
                check_pages::<f32>(instruction_set, &case(shape, true, Some(40), Some(format)), &[16, 5]);
                check_pages::<bf16>(instruction_set, &case(shape, false, None, Some(format)), &[32]);
            }
        }
    }
}
