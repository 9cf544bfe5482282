//! A row's result does not depend on the rows beside it, nor a column's on the columns.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{Module, Result, Tensor};

use crate::array::Random;
use crate::common::property::for_all;
use crate::linear::case::{Outcome, Recipe, TYPES, bits};
use crate::linear::draw::recipes;

/// Rows of the input as (rows, in).
fn rows_of(xs: &Tensor) -> Result<Tensor> {
    xs.force_contiguous()?.reshape(((), xs.dims()[xs.rank() - 1]))
}

/// Each of `parts`, as first row and number of rows, gives what it has in the whole.
fn assert_invariant(recipe: &Recipe, parts: &[(usize, usize)]) -> Outcome {
    let compare = || -> Result<Outcome> {
        let case = recipe.case();
        let xs = rows_of(&case.input()?)?;
        for tier in Tier::available() {
            let packed = case.packed(tier)?;
            let whole = packed.forward(&xs)?;
            for &(first, rows) in parts {
                let part = packed.forward(&xs.narrow(0, first, rows)?)?;
                if bits(&part) != bits(&whole.narrow(0, first, rows)?) {
                    return Ok(Err(format!("{tier}: {rows} rows from {first} alone differ from those in their batch")));
                }
            }
        }
        Ok(Ok(()))
    };
    compare().unwrap_or_else(|error| Err(error.to_string()))
}

#[test]
fn a_row_does_not_feel_its_batch() {
    for_all(300, recipes(), |recipe| {
        let mut random = Random::new(recipe.seed ^ 1);
        let part = |_| {
            let first = random.up_to(recipe.rows - 1);
            (first, 1 + random.up_to(recipe.rows - first - 1))
        };
        let mut parts: Vec<_> = (0..4).map(part).collect();
        parts.extend([(0, 1), (recipe.rows - 1, 1)]);
        assert_invariant(&recipe, &parts)
    });
}

/// Every batch size at which another tile, way to widen the weight or cut into tasks may be taken.
#[test]
fn the_first_row_is_the_same_in_every_batch() -> Result<()> {
    for types in TYPES {
        for (inputs, outputs) in [(1030, 49), (577, 100), (64, 17)] {
            let case = Recipe::plain(types, 400, (inputs, outputs)).case();
            let xs = case.input()?;
            for tier in Tier::available() {
                let packed = case.packed(tier)?;
                let alone = bits(&packed.forward(&xs.narrow(0, 0, 1)?)?);
                for rows in (2..=20).chain([31, 32, 33, 191, 192, 193, 400]) {
                    let batch = packed.forward(&xs.narrow(0, 0, rows)?)?;
                    let same = bits(&batch.narrow(0, 0, 1)?) == alone;
                    assert!(same, "{tier}: {types:?}, {inputs} inputs, {outputs} outputs, of {rows} rows");
                }
            }
        }
    }
    Ok(())
}

/// A row of zeros and one of other numbers, and a copy of the row.
#[test]
fn a_row_does_not_feel_the_numbers_beside_it() -> Result<()> {
    for types in TYPES {
        let recipe = Recipe::plain(types, 9, (300, 70));
        let (one, other) = (recipe.case(), Recipe { seed: 7, ..recipe.clone() }.case());
        let (xs, others) = (one.input()?, other.input()?);
        for tier in Tier::available() {
            let packed = one.packed(tier)?;
            let expected = bits(&packed.forward(&xs)?.narrow(0, 4, 1)?);
            let row = xs.narrow(0, 4, 1)?;
            for beside in [others.clone(), others.zeros_like()?, xs.clone()] {
                let mixed = Tensor::cat(&[&beside.narrow(0, 0, 4)?, &row, &beside.narrow(0, 5, 4)?], 0)?;
                assert_eq!(bits(&packed.forward(&mixed)?.narrow(0, 4, 1)?), expected, "{tier}: {types:?}");
            }
        }
    }
    Ok(())
}

/// Outputs alone as a weight of their own give what they give among others.
#[test]
fn an_output_does_not_feel_the_others() -> Result<()> {
    for types in TYPES {
        for rows in [1, 17, 40] {
            let (weight, bias, xs) = Recipe::plain(types, rows, (520, 131)).case().tensors()?;
            for tier in Tier::available() {
                let pack = |first, count| -> Result<Tensor> {
                    let bias = bias.as_ref().map(|bias| bias.narrow(0, first, count)).transpose()?;
                    PackedLinear::with_tier(&weight.narrow(0, first, count)?, bias.as_ref(), Some(tier))?.forward(&xs)
                };
                let whole = pack(0, 131)?;
                for (first, count) in [(0, 1), (47, 2), (48, 83), (5, 100), (130, 1)] {
                    let same = bits(&pack(first, count)?) == bits(&whole.narrow(1, first, count)?);
                    assert!(same, "{tier}: {types:?}, {count} outputs from {first}, {rows} rows");
                }
            }
        }
    }
    Ok(())
}
