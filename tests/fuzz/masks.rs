//! Masks of any constraints, held to their definitions, and the fused path to the reference path under them.

use candle_attention::{
    AttentionMask, Backend, SdpaOptions, TorchSeed, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Result, Tensor};

pub fn run(bytes: &[u8]) {
    // An error is an answer, too: constraints may exclude each other.
    drop(check(bytes));
}

/// Reads one byte after the other. Missing bytes are 0.
fn check(bytes: &[u8]) -> Result<()> {
    let mut bytes = bytes.iter().copied();
    let mut next = || bytes.next().unwrap_or(0);
    let [t_q, t_kv] = [next() % 40, next() % 40].map(usize::from);
    let alignment = next() % 5;
    let at_end = [t_kv as i64 - t_q as i64; 2];
    // With the position of the first query of each of two sequences.
    let (mut mask, positions) = match alignment {
        0 => (AttentionMask::none(), at_end),
        1 => (AttentionMask::causal(), at_end),
        2 => (AttentionMask::causal_upper_left(), [0; 2]),
        3 => {
            let n = next();
            (AttentionMask::causal_with_offset(n.into()), [n.into(); 2])
        }
        _ => {
            let offsets = [next() as i8, next() as i8].map(i64::from);
            (AttentionMask::causal_with_offsets(offsets), offsets)
        }
    };
    // Of each of the sequences, but for a window and a local window.
    let [window, local, prefix, starts, lens] = [(); 5].map(|()| (next() % 2 == 1).then(|| [next(), next()]));
    let each = |values: [u8; 2]| values.map(usize::from).to_vec();
    mask = window.map_or(mask.clone(), |[w, _]| mask.with_window(w.into()));
    mask = local.map_or(mask.clone(), |[left, right]| mask.with_local_window(left.into(), right.into()));
    mask = prefix.map_or(mask.clone(), |prefix| mask.with_prefix(each(prefix)));
    mask = starts.map_or(mask.clone(), |starts| mask.with_starts(each(starts)));
    mask = lens.map_or(mask.clone(), |lens| mask.with_valid_lens(each(lens)));
    // Returns whether query i of sequence b attends to key j, if the first queries have these positions.
    let attends = |firsts: [i64; 2], b: usize, i: usize, j: usize| {
        let position = i as i64 + firsts[b];
        let j = j as i64;
        let of = |values: Option<[u8; 2]>| values.map(|values| i64::from(values[b]));
        (alignment == 0 || j <= position || of(prefix).is_some_and(|prefix| j < prefix))
            && window.is_none_or(|[w, _]| position - j < i64::from(w))
            && local.is_none_or(|[l, r]| j >= position - i64::from(l) && j <= position + i64::from(r))
            && of(starts).is_none_or(|start| j >= start)
            && of(lens).is_none_or(|len| j < len)
    };

    let seed = TorchSeed::new(0);
    let [q, k, v] = [seed.randn((2, 2, t_q, 4))?, seed.randn((2, 1, t_kv, 4))?, seed.randn((2, 1, t_kv, 4))?];
    let options = SdpaOptions::default();
    let output = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options)?;
    for (b, heads) in output.weights.to_dtype(DType::F32)?.chunk(2, 0)?.iter().enumerate() {
        let rows: Vec<Vec<f32>> = heads.get(0)?.get(0)?.to_vec2()?;
        for (i, row) in rows.iter().enumerate() {
            for (j, &weight) in row.iter().enumerate() {
                assert_eq!(weight > 0.0, attends(positions, b, i, j), "sequence {b}, query {i}, key {j}");
            }
        }
    }
    let fused = options.clone().with_backend(Backend::Fused);
    let gap = (scaled_dot_product_attention(&q, &k, &v, &mask, &fused)? - output.output)?;
    if gap.elem_count() > 0 {
        let gap: f32 = Tensor::abs(&gap)?.max_all()?.to_scalar()?;
        assert!(gap < 1e-5, "the fused path is off by {gap}");
    }

    // A part of the queries and keys. In a whole sequence query i is at key i, unless an offset says otherwise.
    let [first_query, first_key] = [next() % 9, next() % 9].map(usize::from);
    let part = mask.of_part(2, first_query..first_query + t_q, first_key..first_key + t_kv)?;
    let positions = if alignment < 2 { [0; 2] } else { positions };
    let ranges = part.resolve(2, t_q, t_kv)?;
    for (b, i) in (0..2).flat_map(|b| (0..t_q).map(move |i| (b, i))) {
        let found = ranges.kv_range(b, i);
        for j in 0..t_kv {
            let expected = attends(positions, b, first_query + i, first_key + j);
            assert_eq!(found.contains(&j), expected, "sequence {b}, query {i}, key {j} of a part");
        }
    }
    for chosen in [options.clone().with_backend(Backend::Reference), fused] {
        let whole = scaled_dot_product_attention(&q, &k, &v, &part, &chosen);
        assert_eq!(whole.err().map(|error| error.to_string()), None, "the part's own sizes");
        for (queries, keys) in [(t_q + 1, t_kv), (t_q, t_kv + 1)] {
            let [query, kv] = [seed.randn((2, 2, queries, 4))?, seed.randn((2, 1, keys, 4))?];
            let refused = scaled_dot_product_attention(&query, &kv, &kv, &part, &chosen);
            assert!(refused.is_err(), "{queries} queries and {keys} keys for another part");
        }
    }
    Ok(())
}
