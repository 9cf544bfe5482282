//! However many threads there are, and whoever calls: the same bits.

use std::sync::Barrier;
use std::thread;

use candle_attention::cpu::Tier;
use candle_core::Result;
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use crate::draw::{Draw, draws};
use crate::fused::{Call, DTYPES, bits};
use crate::oracle::Dims;
use crate::recipe::{Kind, Reach, for_all};

type Bits = (Vec<u64>, Vec<u64>);

fn run(call: &Call) -> Bits {
    let both = || -> Result<Bits> {
        let (context, lse) = call.with_lse()?;
        Ok((bits(&context), bits(&lse)))
    };
    both().unwrap_or_else(|error| panic!("{error}"))
}

/// Prefill, decoding, split keys, groups, few and many heads.
fn calls() -> Vec<Call> {
    let mut calls = Vec::new();
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
            let call = Call::new(&Draw::plain(dims, kinds.clone(), dtype).case(), dtype).expect("tensors");
            calls.extend(Tier::available().into_iter().map(|tier| call.on_tier(tier)));
        }
    }
    calls
}

fn pool(threads: usize) -> rayon::ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

#[test]
fn pools_of_any_size_give_the_same_bits() {
    let calls = calls();
    let expected: Vec<_> = pool(1).install(|| calls.iter().map(run).collect());
    for threads in [2, 3, 5, 8] {
        let got: Vec<_> = pool(threads).install(|| calls.iter().map(run).collect());
        for ((got, expected), call) in got.iter().zip(&expected).zip(&calls) {
            let (dims, dtype) = ((call.q.dims(), call.k.dims()), call.q.dtype());
            assert!(got == expected, "{threads} threads: {dims:?}, {dtype:?}, {:?}", call.options);
        }
    }
    for (expected, call) in expected.iter().zip(&calls) {
        assert!(run(call) == *expected, "outside of any pool: {:?} {:?}", call.q.dims(), call.options);
    }
}

#[test]
fn random_calls_give_the_same_bits_in_pools_of_any_size() {
    let pools: Vec<_> = [1, 2, 3, 5, 8].into_iter().map(pool).collect();
    for_all(200, draws(), |draw| {
        let call = Call::new(&draw.case(), draw.dtype()).map_err(|error| error.to_string())?;
        for tier in Tier::available() {
            let call = call.on_tier(tier);
            let mut results = pools.iter().map(|pool| pool.install(|| run(&call)));
            let first = results.next();
            if let Some(n) = results.position(|result| Some(&result) != first.as_ref()) {
                return Err(format!("{tier}: pool {} gives other bits than one thread", n + 1));
            }
        }
        Ok(())
    });
}

#[test]
fn many_threads_call_at_once() {
    let calls = calls();
    let expected: Vec<_> = calls.iter().map(run).collect();
    const CALLERS: usize = 8;
    let start = Barrier::new(CALLERS);
    thread::scope(|scope| {
        for caller in 0..CALLERS {
            let (calls, expected, start) = (&calls, &expected, &start);
            scope.spawn(move || {
                start.wait();
                for n in (caller..calls.len()).step_by(3) {
                    assert!(run(&calls[n]) == expected[n], "caller {caller}: {:?}", calls[n].options);
                }
            });
        }
    });
}

/// Calls nested in parallel loops of somebody else's pool, where a worker that waits may pick up another call: scratch
/// memory of a thread must not be in use twice.
#[test]
fn calls_nest_in_parallel_loops_of_another_pool() {
    let calls = calls();
    let expected: Vec<_> = calls.iter().map(run).collect();
    for threads in [1, 2, 5] {
        pool(threads).install(|| {
            (0..2 * calls.len()).into_par_iter().with_max_len(1).for_each(|n| {
                let n = n % calls.len();
                assert!(run(&calls[n]) == expected[n], "{threads} threads: {:?}", calls[n].options);
                // And one level further down.
                let m = (n + 7) % calls.len();
                let (one, other) = rayon::join(|| run(&calls[m]), || run(&calls[n]));
                for (got, call) in [(one, m), (other, n)] {
                    assert!(got == expected[call], "{threads} threads, joined: {:?}", calls[call].options);
                }
            });
        });
    }
}
