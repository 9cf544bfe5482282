//! Every size, type and layout, on every tier: at random, and each size of one kind once.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{Module, Result, Tensor};

use crate::common::property::for_all;
use crate::linear::case::{CPU, INPUTS, Layout, OUTPUTS, Product, ROWS, TYPES, WeightLayout, check, products};

#[track_caller]
fn assert_holds(product: &Product) {
    check(product).unwrap_or_else(|difference| panic!("{difference}\n{product:?}"));
}

#[test]
fn random_products_agree_with_f64() {
    for_all(256, products(), |product| check(&product));
}

/// At each another tile, way to widen the weight or cut into tasks may be taken: for few columns and for many.
#[test]
fn every_number_of_rows() {
    for (n, rows) in ROWS.into_iter().enumerate() {
        for types in TYPES {
            assert_holds(&Product::plain(types, rows, (37, 53)));
        }
        assert_holds(&Product::plain(TYPES[n % 5], rows, (577, 100)));
        assert_holds(&Product::plain(TYPES[(n + 2) % 5], rows, (1030, 49)));
    }
}

#[test]
fn every_pair_of_inputs_and_outputs() {
    for (n, inputs) in INPUTS.into_iter().enumerate() {
        for (m, outputs) in OUTPUTS.into_iter().enumerate() {
            let rows = ROWS[(n + 3 * m) % 20];
            let types = TYPES[(n + m) % 5];
            assert_holds(&Product::plain(types, rows, (inputs, outputs)));
        }
    }
}

#[test]
fn every_pair_of_layouts_in_every_type() {
    for layout in Layout::ALL {
        for weight_layout in WeightLayout::ALL {
            for types in TYPES {
                for rows in [1, 2, 7, 30] {
                    assert_holds(&Product { layout, weight_layout, ..Product::plain(types, rows, (19, 50)) });
                }
            }
        }
    }
}

/// Every beginning and end, which may lie within panels and vectors.
#[test]
fn every_range_of_columns() {
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

/// A few products of a model's size, which fill every task and every worker.
#[test]
fn large_products_agree_with_f64() {
    for types in TYPES {
        for (rows, inputs, outputs) in [(1, 2048, 1536), (19, 1030, 1000), (193, 300, 777)] {
            assert_holds(&Product::plain(types, rows, (inputs, outputs)));
        }
    }
}

/// Sums of nothing are the bias or zeros; no rows and no outputs give nothing.
#[test]
fn every_set_of_empty_sizes() {
    for types in TYPES {
        for sizes in [[1, 0, 5], [6, 0, 5], [0, 4, 5], [3, 4, 0], [0, 0, 5], [3, 0, 0], [0, 0, 0]] {
            for layout in Layout::ALL {
                for weight_layout in WeightLayout::ALL {
                    for bias in [false, true] {
                        let [rows, inputs, outputs] = sizes;
                        let plain = Product::plain(types, rows, (inputs, outputs));
                        assert_holds(&Product { bias, layout, weight_layout, ..plain });
                    }
                }
            }
        }
    }
}

/// Views of nothing that begin past the end of their buffers.
#[test]
fn views_of_nothing() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let beyond = |dtype| Tensor::ones((3, 5), dtype, &CPU)?.narrow(1, 5, 0)?.narrow(0, 3, 0);
        for tier in Tier::available() {
            let pack = |weight: &Tensor| PackedLinear::with_tier(weight, None, Some(tier));
            let packed = pack(&Tensor::zeros((2, 0), of_weight, &CPU)?)?;
            assert_eq!(packed.forward(&beyond(of_input)?)?.dims(), [0, 2]);
            let none = pack(&beyond(of_weight)?)?;
            assert_eq!((none.out_dim(), none.in_dim()), (0, 0));
        }
    }
    Ok(())
}
