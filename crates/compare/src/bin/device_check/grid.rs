//! The calls that are checked: masks, options, sizes, strides, and kinds of results.

use super::case::{Case, Dims, Layout, Mask, Options, Want};

/// The calls of a row of the table.
pub struct Group {
    pub name: &'static str,
    pub cases: Vec<Case>,
}

const PLAIN: Dims = Dims { b: 2, h: 4, h_kv: 4, t_q: 48, t_kv: 48, d: 64, d_v: 64 };

/// (T_q, T_kv): a square that fills blocks and one that does not, new queries against a cache, one query.
const SHORT: [(usize, usize); 4] = [(32, 32), (37, 37), (9, 70), (1, 70)];
const LONG: [(usize, usize); 6] = [(128, 128), (200, 200), (129, 300), (300, 129), (1, 1030), (7, 2050)];

pub fn groups(short: bool) -> Vec<Group> {
    let lengths: Vec<_> = SHORT.into_iter().chain(if short { vec![] } else { LONG.to_vec() }).collect();
    let widths: &[usize] = if short { &[64] } else { &[32, 64, 96, 128] };
    let plain = |dims: Dims| Case {
        dims,
        layout: Layout::Contiguous,
        mask: Mask::None,
        options: Options::Plain,
        want: Want::Output,
    };
    // Every length and head dimension, with one key head for each query head, for two, or for all.
    let sizes = || {
        lengths
            .iter()
            .flat_map(|&(t_q, t_kv)| widths.iter().map(move |&d| (t_q, t_kv, d)))
            .enumerate()
            .map(|(n, (t_q, t_kv, d))| Dims { h_kv: [4, 2, 1][n % 3], t_q, t_kv, d, d_v: d, ..PLAIN })
    };
    let all =
        |name, change: &dyn Fn(Case) -> Case| Group { name, cases: sizes().map(|dims| change(plain(dims))).collect() };
    let masked = |name, mask| all(name, &|case| Case { mask, ..case });
    let with = |name, options, mask| all(name, &|case| Case { options, mask, ..case });
    let laid = |name, layout| all(name, &|case| Case { layout, mask: Mask::Causal, ..case });
    let one = |name, dims: Vec<Dims>| Group { name, cases: dims.into_iter().map(plain).collect() };
    vec![
        masked("no mask", Mask::None),
        masked("causal", Mask::Causal),
        masked("causal, upper left", Mask::UpperLeft),
        masked("causal, offset", Mask::Offset),
        masked("window", Mask::Window),
        masked("band", Mask::Band),
        masked("one length", Mask::OneLength),
        masked("lengths", Mask::Lens),
        masked("left padding", Mask::Starts),
        masked("lengths by query", Mask::LensByQuery),
        masked("prefix", Mask::Prefix),
        masked("boolean mask", Mask::Bool),
        masked("bias", Mask::Bias),
        masked("fully masked", Mask::FullyMasked),
        with("scale", Options::Scale, Mask::None),
        with("softcap", Options::Softcap, Mask::Causal),
        with("ALiBi", Options::Alibi, Mask::Causal),
        with("ALiBi, both sides", Options::Alibi, Mask::None),
        with("sinks", Options::Sinks, Mask::Causal),
        laid("as projected", Layout::Projection),
        laid("from a cache", Layout::Cache),
        laid("odd rows", Layout::OddRows),
        laid("column-major", Layout::ColumnMajor),
        one("D of 8, 72, 80, 256", [8, 72, 80, 256].map(|d| Dims { d, d_v: d, ..PLAIN }).to_vec()),
        one("D_v other than D", [(64, 32), (64, 65), (7, 64)].map(|(d, d_v)| Dims { d, d_v, ..PLAIN }).to_vec()),
        all("log-sum-exp", &|case| Case { want: Want::LogSumExp, mask: Mask::Causal, ..case }),
        all("weights", &|case| Case { want: Want::Weights, mask: Mask::Causal, ..case }),
        all("gradients", &|case| Case { want: Want::Gradients, mask: Mask::Causal, ..case }),
    ]
}
