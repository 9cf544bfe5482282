//! What is not a number reaches its own row, or its own column, and nobody else.

use candle_attention::cpu::Tier;
use candle_core::Result;

use crate::array::Array;
use crate::linear::case::{Case, Product, TYPES, bits};

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Sizes that leave something over everywhere: tiles of rows, vectors, panels and blocks.
const SIZES: [(usize, usize, usize); 4] = [(1, 9, 19), (5, 261, 50), (21, 67, 97), (195, 33, 13)];

/// A case whose numbers are changed one by one, and what each tier makes of it as it is.
struct Subject {
    product: Product,
    case: Case,
    clean: Vec<(Tier, Vec<u64>)>,
}

impl Subject {
    /// Puts something into the case, and holds what it reaches to f64 and the rest to the bits that it had.
    fn poison(&self, change: impl Fn(&mut Case), is_reached: impl Fn(usize, usize) -> bool) -> Result<()> {
        let mut poisoned = self.case.clone();
        change(&mut poisoned);
        let expected = poisoned.expected()?;
        let (product, outputs) = (&self.product, self.product.outputs);
        for (tier, clean) in &self.clean {
            let ys = poisoned.forward(*tier)?;
            for (at, (clean, found)) in clean.iter().zip(bits(&ys)).enumerate() {
                let same = is_reached(at / outputs, at % outputs) || found == *clean;
                assert!(same, "{tier}: row {}, column {}\n{product:?}", at / outputs, at % outputs);
            }
            expected.compare(&ys).unwrap_or_else(|error| panic!("{tier}: {error}\n{product:?}"));
        }
        Ok(())
    }
}

fn set(array: &mut Array, at: [usize; 2], value: f64) {
    let place = array.place([0, 0, at[0], at[1]]);
    array.data[place] = value;
}

/// Every size in every type, with a special number and a counter.
fn each(test: impl Fn(&Subject, f64, usize) -> Result<()>) -> Result<()> {
    let mut n = 0;
    for types in TYPES {
        for (rows, inputs, outputs) in SIZES {
            let product = Product { bias: true, ..Product::plain(types, rows, (inputs, outputs)) };
            let case = product.case();
            let clean = |tier| Ok((tier, bits(&case.forward(tier)?)));
            let clean = Tier::available().into_iter().map(clean).collect::<Result<_>>()?;
            let subject = Subject { product, case, clean };
            for special in SPECIALS {
                n += 1;
                test(&subject, special, n)?;
            }
        }
    }
    Ok(())
}

/// Of the input its row, of the weight and the bias their column.
#[test]
fn what_is_no_number_reaches_only_its_row_or_column() -> Result<()> {
    each(|subject, special, n| {
        let Product { rows, inputs, outputs, .. } = subject.product;
        let other = 17 * n % outputs;
        for input in [0, 37 * n % inputs, inputs - 1] {
            for row in [0, rows / 2, rows - 1] {
                subject.poison(|case| set(&mut case.xs, [row, input], special), |at, _| at == row)?;
            }
            for column in [0, other, outputs - 1] {
                subject.poison(|case| set(&mut case.weight, [column, input], special), |_, at| at == column)?;
            }
        }
        let change = |case: &mut Case| case.bias.as_mut().expect("a bias").data[other] = special;
        subject.poison(change, |_, at| at == other)
    })
}

/// Infinities of both signs in one sum make a NaN; infinite inputs over a zero weight too.
#[test]
fn infinities_add_up() -> Result<()> {
    each(|subject, special, _| {
        let both = |case: &mut Case| {
            set(&mut case.xs, [0, 0], special);
            set(&mut case.xs, [0, subject.product.inputs - 1], -special);
        };
        subject.poison(both, |row, _| row == 0)?;
        let zero = |case: &mut Case| {
            set(&mut case.xs, [0, 2], special);
            set(&mut case.weight, [1, 2], 0.0);
        };
        subject.poison(zero, |row, column| row == 0 || column == 1)
    })
}
