//! However many threads there are, and whoever calls: the same bits.

use std::sync::Barrier;
use std::thread;

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{Module, Result, Tensor};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::call::{Call, Outcome};
use crate::common::bits;
use crate::linear::case::{Product, TYPES, products};
use crate::oracle::Dims;
use crate::recipe::{DTYPES, Kind, Reach, Recipe, for_all, kernel_recipes};

/// One call of attention or of a projection.
enum Work {
    Attention(Call),
    Projection(PackedLinear, Tensor),
}

impl Work {
    fn run(&self) -> Vec<u64> {
        let results = match self {
            Self::Attention(call) => call.with_lse().map(|(context, lse)| [bits(&context), bits(&lse)].concat()),
            Self::Projection(packed, xs) => packed.forward(xs).map(|ys| bits(&ys)),
        };
        results.unwrap_or_else(|error| panic!("{error}: {}", self.name()))
    }

    fn name(&self) -> String {
        match self {
            Self::Attention(Call { q, k, options, .. }) => format!("{q:?} {k:?} {options:?}"),
            Self::Projection(packed, xs) => format!("{packed:?} over {xs:?}"),
        }
    }
}

/// Prefill, decoding, split keys, groups, few and many heads; one row and many, few outputs and many.
fn all() -> Result<Vec<Work>> {
    let mut all = Vec::new();
    for (b, h, h_kv, t_q, t_kv, kinds) in [
        (1, 2, 2, 300, 300, vec![Kind::Causal]),
        (2, 4, 2, 129, 257, vec![Kind::Causal, Kind::Window]),
        (1, 8, 1, 1, 5000, vec![]),
        (1, 1, 1, 1, 9001, vec![Kind::ValidLens]),
        (3, 8, 2, 1, 700, vec![Kind::Starts]),
        (1, 1, 1, 17, 2049, vec![Kind::Causal]),
        (5, 3, 1, 7, 33, vec![Kind::Bias(Reach::Head)]),
        (1, 2, 1, 700, 31, vec![Kind::Keep(Reach::Square)]),
    ] {
        for dtype in DTYPES {
            let dims = Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 48 };
            let call = Call::fused(&Recipe::of_kernel(dims, kinds.clone(), dtype).case(), dtype)?;
            all.extend(Tier::available().into_iter().map(|tier| Work::Attention(call.on_tier(tier))));
        }
    }
    for (rows, inputs, outputs) in [(1, 2050, 1600), (12, 1030, 500), (16, 3001, 48), (400, 300, 100), (193, 40, 700)] {
        for types in TYPES {
            let case = Product::plain(types, rows, (inputs, outputs)).case();
            for tier in Tier::available() {
                all.push(Work::Projection(case.packed(tier)?, case.input()?));
            }
        }
    }
    Ok(all)
}

pub fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// All, and what each gives on one thread.
fn all_with_results() -> Result<(Vec<Work>, Vec<Vec<u64>>)> {
    let all = all()?;
    let expected = pool(1).install(|| all.iter().map(Work::run).collect());
    Ok((all, expected))
}

/// Runs something on every tier, in pools of several sizes.
fn the_same_in_each(pools: &[ThreadPool], work: impl Fn(Tier) -> Result<Work> + Sync) -> Outcome {
    for tier in Tier::available() {
        // Packing is split over threads as well.
        let run = |pool: &ThreadPool| pool.install(|| work(tier).map(|work| work.run()));
        let results: Vec<_> =
            pools.iter().map(run).collect::<Result<_>>().map_err(|error| format!("{tier}: {error}"))?;
        if let Some(n) = results.iter().position(|result| *result != results[0]) {
            return Err(format!("{tier}: pool {n} gives other bits than one thread"));
        }
    }
    Ok(())
}

#[test]
fn random_calls_give_the_same_bits_in_pools_of_any_size() {
    let pools: Vec<_> = [1, 2, 3, 5, 8].into_iter().map(pool).collect();
    for_all(64, kernel_recipes(), |draw| {
        let call = Call::fused(&draw.case(), draw.dtype).map_err(|error| error.to_string())?;
        the_same_in_each(&pools, |tier| Ok(Work::Attention(call.on_tier(tier))))
    });
}

#[test]
fn random_projections_give_the_same_bits_in_pools_of_any_size() {
    let pools: Vec<_> = [1, 2, 3, 7].into_iter().map(pool).collect();
    for_all(24, products(), |mut product| {
        (product.inputs, product.outputs) = (1500 + product.inputs, 600 + product.outputs);
        product.rows = product.rows.min(9);
        let case = product.case();
        the_same_in_each(&pools, |tier| Ok(Work::Projection(case.packed(tier)?, case.input()?)))
    });
}

#[test]
fn many_threads_call_at_once() -> Result<()> {
    let (all, expected) = all_with_results()?;
    const CALLERS: usize = 8;
    let start = Barrier::new(CALLERS);
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (all, expected, start) = (&all, &expected, &start);
            scope.spawn(move || {
                start.wait();
                for n in (caller..all.len()).step_by(3) {
                    assert!(all[n].run() == expected[n], "caller {caller}: {}", all[n].name());
                }
            });
        }
    });
    Ok(())
}

/// Calls nested in parallel loops of somebody else's pool, where a worker that waits may pick up another call: scratch
/// memory of a thread must not be in use twice.
#[test]
fn calls_nest_in_parallel_loops_of_another_pool() -> Result<()> {
    let (all, expected) = all_with_results()?;
    for threads in [1, 2, 3, 5, 8] {
        pool(threads).install(|| {
            (0..2 * all.len()).into_par_iter().with_max_len(1).for_each(|n| {
                let n = n % all.len();
                assert!(all[n].run() == expected[n], "{threads} threads: {}", all[n].name());
                // And one level further down.
                let m = (n + 7) % all.len();
                let (one, other) = rayon::join(|| all[m].run(), || all[n].run());
                for (got, n) in [(one, m), (other, n)] {
                    assert!(got == expected[n], "{threads} threads, joined: {}", all[n].name());
                }
            });
        });
    }
    Ok(())
}
