//! Every size, type and layout, on every instruction set: at random, and each size of one kind once.

use crate::linear::case::{CPU, INPUTS, Layout, OF_WEIGHTS, OUTPUTS, Product, ROWS, TYPES, check, products};
use crate::*;

#[track_caller]
fn assert_holds(product: &Product) {
    check(product).unwrap_or_else(|difference| panic!("{difference}\n{product:?}"));
}

#[test]
fn linear_with_random_products_matches_f64() {
    for_all(256, products(), |product| check(&product));
}

/// Checks few columns and many: at each number of rows, another tile, another way to widen the weight or another split
/// into tasks may be chosen.
#[test]
fn linear_with_every_number_of_rows_matches_f64() {
    for (n, rows) in ROWS.into_iter().enumerate() {
        for types in TYPES {
            assert_holds(&Product::plain(types, rows, (37, 53)));
        }
        assert_holds(&Product::plain(TYPES[n % 5], rows, (577, 100)));
        assert_holds(&Product::plain(TYPES[(n + 2) % 5], rows, (1030, 49)));
    }
}

#[test]
fn linear_with_every_pair_of_widths_matches_f64() {
    for (n, inputs) in INPUTS.into_iter().enumerate() {
        for (m, outputs) in OUTPUTS.into_iter().enumerate() {
            let rows = ROWS[(n + 3 * m) % 20];
            let types = TYPES[(n + m) % 5];
            assert_holds(&Product::plain(types, rows, (inputs, outputs)));
        }
    }
}

/// Checks every pair of dtypes and every rank too.
#[test]
fn linear_with_every_pair_of_strides_matches_f64() {
    for (layout, of_weight) in Layout::ALL.into_iter().flat_map(|layout| OF_WEIGHTS.map(|other| (layout, other))) {
        for (types, rows) in TYPES.into_iter().flat_map(|types| [1, 2, 7, 30].map(|rows| (types, rows))) {
            for rank in 1..=4 {
                assert_holds(&Product { rank, layout, of_weight, ..Product::plain(types, rows, (19, 50)) });
            }
        }
    }
}

/// Checks ranges that begin and end within a panel and within a vector.
#[test]
fn linear_with_every_range_of_columns_matches_f64() {
    let outputs = 67;
    for (n, start) in (0..=outputs).step_by(3).enumerate() {
        for (m, end) in (start..=outputs).step_by(4).enumerate() {
            let part = (start as f64 / outputs as f64, end as f64 / outputs as f64);
            let product = Product { part, ..Product::plain(TYPES[(n + m) % 5], 1 + (n + m) % 3, (9, outputs)) };
            assert_eq!(product.some(outputs), start..end);
            assert_holds(&product);
        }
    }
}

/// Checks that outputs without inputs are the bias or zeros, and that results without rows or outputs are empty.
#[test]
fn linear_with_empty_sizes_matches_f64() {
    for types in TYPES {
        for sizes in [[1, 0, 5], [6, 0, 5], [0, 4, 5], [3, 4, 0], [0, 0, 5], [3, 0, 0], [0, 0, 0]] {
            for (layout, of_weight) in
                Layout::ALL.into_iter().flat_map(|layout| OF_WEIGHTS.map(|other| (layout, other)))
            {
                for (bias, rank) in [(false, 2), (true, 3), (true, 4)] {
                    let [rows, inputs, outputs] = sizes;
                    let plain = Product::plain(types, rows, (inputs, outputs));
                    assert_holds(&Product { bias, rank, layout, of_weight, ..plain });
                }
            }
        }
    }
}

#[test]
fn linear_accepts_empty_views_past_the_end_of_their_buffer() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let beyond = |dtype| Tensor::ones((3, 5), dtype, &CPU)?.narrow(1, 5, 0)?.narrow(0, 3, 0);
        for instruction_set in InstructionSet::available() {
            let pack = |weight: &Tensor| PackedLinear::with_instruction_set(weight, None, Some(instruction_set));
            let packed = pack(&Tensor::zeros((2, 0), of_weight, &CPU)?)?;
            assert_eq!(packed.forward(&beyond(of_input)?)?.dims(), [0, 2]);
            let none = pack(&beyond(of_weight)?)?;
            assert_eq!((none.out_dim(), none.in_dim()), (0, 0));
        }
    }
    Ok(())
}
