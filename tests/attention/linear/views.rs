//! The same numbers under other strides give the same bits.

use candle_attention::cpu::Tier;
use candle_core::{Module, Result};

use crate::linear::case::{Layout, Recipe, TYPES, WeightLayout, bits};

#[test]
fn a_view_gives_the_bits_of_its_copy() -> Result<()> {
    for layout in Layout::ALL {
        for (n, types) in TYPES.into_iter().enumerate() {
            for rows in [1, 6, 45] {
                let recipe = Recipe { layout, ..Recipe::plain(types, rows, (257 + n, 61)) };
                let case = recipe.case();
                let xs = case.input()?;
                for tier in Tier::available() {
                    let packed = case.packed(tier)?;
                    let (viewed, copied) = (packed.forward(&xs)?, packed.forward(&xs.force_contiguous()?)?);
                    assert!(bits(&viewed) == bits(&copied), "{tier}: {recipe:?}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_weight_is_packed_from_a_view_as_from_its_copy() -> Result<()> {
    for weight_layout in WeightLayout::ALL {
        for types in TYPES {
            let recipe = Recipe { weight_layout, ..Recipe::plain(types, 3, (31, 50)) };
            let case = recipe.case();
            let (weight, bias, xs) = case.tensors()?;
            for tier in Tier::available() {
                let pack = |weight| candle_attention::PackedLinear::with_tier(weight, bias.as_ref(), Some(tier));
                let (viewed, copied) = (pack(&weight)?.forward(&xs)?, pack(&weight.force_contiguous()?)?.forward(&xs)?);
                assert!(bits(&viewed) == bits(&copied), "{tier}: {recipe:?}");
            }
        }
    }
    Ok(())
}
