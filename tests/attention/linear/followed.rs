//! Operations that follow a product in the same pass - an activation, a gate, a residual - compared with Candle's
//! operations in f64.

use crate::linear::case::{ACTIVATIONS, Layout, Product, TYPES, Then};
use crate::linear::gradients::{Projection, tolerance};
use crate::*;

#[test]
fn linear_with_activation_gate_or_residual_matches_f64() -> Result<()> {
    let sizes = [(1, 7, 5), (3, 18, 49), (7, 193, 97), (20, 64, 48), (6, 0, 5), (0, 4, 5), (40, 33, 130)];
    for (n, (types, (rows, inputs, outputs))) in
        TYPES.into_iter().flat_map(|types| sizes.map(|sizes| (types, sizes))).enumerate()
    {
        let layout = Layout::ALL[n % Layout::ALL.len()];
        let rank = 1 + n % 4;
        let plain = Product { layout, rank, size: 0.2, ..Product::plain(types, rows, (inputs, outputs)) };
        let steps = ACTIVATIONS.into_iter().flat_map(|own| [Then::Activation(own), Then::Both(own), Then::Gate(own)]);
        for then in steps.chain([Then::Residual]) {
            let product = Product { then, ..plain.clone() };
            let call = Projection::of(product.case());
            let mut wide = call.clone();
            let mut some = call.clone();
            (wide.case.types.1, some.columns) = (DType::F32, product.some(outputs));
            let exact = backward(&call, &None, |_| false)?;
            for instruction_set in InstructionSet::available().into_iter().map(Some) {
                let found = backward(&call, &instruction_set, |_| false)?;
                let what = || format!("{instruction_set:?}: {product:?}");
                are_near(&found, &exact, |_, largest| tolerance(types.1) * largest.max(1.0))
                    .map_err(|error| error.context(what()))?;
                let ys = &found["result 0"];
                // Each result is the rounded one of the same call in f32, which instruction sets that multiply pairs of
                // bf16 sum in another order.
                if [InstructionSet::Scalar, InstructionSet::Avx2, InstructionSet::Avx512, InstructionSet::Neon]
                    .map(Some)
                    .contains(&instruction_set)
                {
                    let wide = wide.run(&instruction_set, &mut |_, tensor| Ok(tensor))?.remove(0).to_dtype(types.1)?;
                    assert_eq!(bits(ys), bits(&wide), "{}", what());
                }
                if let Then::Activation(_) = then {
                    let part = some.run(&instruction_set, &mut |_, tensor| Ok(tensor))?.remove(0);
                    let expected = ys.narrow(ys.rank() - 1, some.columns.start, some.columns.len())?;
                    assert_eq!(bits(&part), bits(&expected), "some columns, {}", what());
                }
            }
        }
    }
    Ok(())
}
