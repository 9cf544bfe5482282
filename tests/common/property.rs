//! Properties over random cases.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};

/// Runs a property over `cases` draws, or over `PROPTEST_CASES` draws if that is set, with the seed
/// `PROPTEST_RNG_SEED`.
#[track_caller]
pub fn for_all<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> candle_core::Result<()>) {
    let from_environment = Config::default();
    let given = std::env::var_os("PROPTEST_CASES").is_some();
    let rng_seed = match from_environment.rng_seed {
        RngSeed::Random => RngSeed::Fixed(0x5d9a),
        fixed => fixed,
    };
    let cases = if given { from_environment.cases } else { cases };
    let config = Config { cases, rng_seed, failure_persistence: None, ..from_environment };
    let outcome = TestRunner::new(config)
        .run(&strategy, |value| test(value).map_err(|error| TestCaseError::fail(error.to_string())));
    if let Err(error) = outcome {
        panic!("{error}\nto run it again: PROPTEST_CASES={cases} PROPTEST_RNG_SEED={rng_seed}");
    }
}

/// Lowers sizes from ascending lists until they fit: first the size at `first`, then the next.
pub fn within<const N: usize>(
    mut sizes: [usize; N],
    lists: [&[usize]; N],
    first: usize,
    fits: impl Fn([usize; N]) -> bool,
) -> [usize; N] {
    for at in (first..first + N).map(|at| at % N) {
        let given = sizes[at];
        for &size in lists[at].iter().rev().filter(|&&size| size < given) {
            if fits(sizes) {
                return sizes;
            }
            sizes[at] = size;
        }
    }
    sizes
}
