//! A row's result does not depend on the rows beside it, nor a column's on the columns. Of random products, `check` holds
//! rows alone to rows in their batch.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{Module, Result, Tensor};

use crate::linear::case::{Product, TYPES, bits};

/// Every batch size at which another tile, way to widen the weight or cut into tasks may be taken.
#[test]
fn the_first_row_is_the_same_in_every_batch() -> Result<()> {
    for types in TYPES {
        for (inputs, outputs) in [(1030, 49), (577, 100), (64, 17)] {
            let case = Product::plain(types, 400, (inputs, outputs)).case();
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

/// Outputs alone as a weight of their own give what they give among others.
#[test]
fn an_output_does_not_feel_the_others() -> Result<()> {
    for types in TYPES {
        for rows in [1, 17, 40] {
            let (weight, bias, xs) = Product::plain(types, rows, (520, 131)).case().tensors()?;
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
