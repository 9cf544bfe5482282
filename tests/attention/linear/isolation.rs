//! What is not a number reaches its own row, or its own column, and nobody else.

use candle_attention::cpu::Tier;
use candle_core::Result;

use crate::array::Array;
use crate::linear::case::{Case, Recipe, TYPES, bits};

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Sizes that leave something over everywhere: tiles of rows, vectors, panels and blocks.
const SIZES: [(usize, usize, usize); 4] = [(1, 9, 19), (5, 261, 50), (21, 67, 97), (195, 33, 13)];

/// Outputs of each tier for a case.
fn outputs(case: &Case) -> Result<Vec<(Tier, Vec<u64>)>> {
    Tier::available().into_iter().map(|tier| Ok((tier, bits(&case.forward(tier)?)))).collect()
}

/// Puts something into a case, and holds what it reaches to f64 and the rest to the bits that it had.
fn poison(recipe: &Recipe, change: impl Fn(&mut Case), is_reached: impl Fn(usize, usize) -> bool) -> Result<()> {
    let case = recipe.case();
    let mut poisoned = case.clone();
    change(&mut poisoned);
    let expected = poisoned.expected()?;
    for ((tier, clean), (_, found)) in outputs(&case)?.into_iter().zip(outputs(&poisoned)?) {
        for (at, (clean, found)) in clean.iter().zip(&found).enumerate() {
            let (row, column) = (at / recipe.outputs, at % recipe.outputs);
            if !is_reached(row, column) {
                assert_eq!(found, clean, "{tier}: row {row}, column {column}\n{recipe:?}");
            }
        }
        expected.compare(&poisoned.forward(tier)?).unwrap_or_else(|error| panic!("{tier}: {error}\n{recipe:?}"));
    }
    Ok(())
}

fn set(array: &mut Array, at: [usize; 2], value: f64) {
    let place = array.place([0, 0, at[0], at[1]]);
    array.data[place] = value;
}

/// Every size in every type, with a special number and a counter.
fn each(test: impl Fn(&Recipe, f64, usize) -> Result<()>) -> Result<()> {
    let mut n = 0;
    for types in TYPES {
        for (rows, inputs, outputs) in SIZES {
            for special in SPECIALS {
                n += 1;
                test(&Recipe { bias: true, ..Recipe::plain(types, rows, (inputs, outputs)) }, special, n)?;
            }
        }
    }
    Ok(())
}

#[test]
fn an_input_that_is_no_number_reaches_only_its_row() -> Result<()> {
    each(|recipe, special, n| {
        for row in [0, recipe.rows / 2, recipe.rows - 1] {
            for input in [0, 37 * n % recipe.inputs, recipe.inputs - 1] {
                poison(recipe, |case| set(&mut case.xs, [row, input], special), |at, _| at == row)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_weight_that_is_no_number_reaches_only_its_column() -> Result<()> {
    each(|recipe, special, n| {
        for column in [0, 17 * n % recipe.outputs, recipe.outputs - 1] {
            for input in [0, 37 * n % recipe.inputs, recipe.inputs - 1] {
                poison(recipe, |case| set(&mut case.weight, [column, input], special), |_, at| at == column)?;
            }
        }
        Ok(())
    })
}

#[test]
fn a_bias_that_is_no_number_reaches_only_its_column() -> Result<()> {
    each(|recipe, special, n| {
        let column = 17 * n % recipe.outputs;
        let change = |case: &mut Case| case.bias.as_mut().expect("a bias").data[column] = special;
        poison(recipe, change, |_, at| at == column)
    })
}

/// Infinities of both signs in one sum make a NaN; infinite inputs over a zero weight too.
#[test]
fn infinities_add_up() -> Result<()> {
    each(|recipe, special, _| {
        let both = |case: &mut Case| {
            set(&mut case.xs, [0, 0], special);
            set(&mut case.xs, [0, recipe.inputs - 1], -special);
        };
        poison(recipe, both, |row, _| row == 0)?;
        let zero = |case: &mut Case| {
            set(&mut case.xs, [0, 2], special);
            set(&mut case.weight, [1, 2], 0.0);
        };
        poison(recipe, zero, |row, column| row == 0 || column == 1)
    })
}
