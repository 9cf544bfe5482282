//! Few queries over keys whose heads are side by side, so that a task reads several heads.

use crate::cpu::InstructionSet;
use crate::cpu::tests::numbers;
use crate::flash::{
    AttentionCall, AttentionDims, KeysOfQueries, OutputLayout, RequestedResults, ScoreModifiers, Strided, attend,
};

#[test]
#[cfg_attr(miri, ignore = "thousands of keys take minutes")]
fn heads_side_by_side_have_bits_of_heads_in_one_piece_each() {
    let (t_kv, d) = (2100, 5);
    // Enough key heads for several in a task on any number of threads up to 36: with one tile of rows each, with
    // several, and with more rows than are decoded.
    for (h_kv, t_q) in [(96, 1), (96, 5), (96, 9)] {
        let dims = AttentionDims { b: 1, h: 2 * h_kv, h_kv, t_q, t_kv, d, d_v: d };
        let q: Vec<f32> = numbers(dims.h * t_q * d, 1);
        let by_key: [Vec<f32>; 2] = [numbers(h_kv * t_kv * d, 2), numbers(h_kv * t_kv * d, 3)];
        let by_head = by_key.each_ref().map(|rows| {
            let mut moved = vec![0f32; rows.len()];
            for (n, row) in rows.chunks_exact(d).enumerate() {
                let (key, head) = (n / h_kv, n % h_kv);
                moved[(head * t_kv + key) * d..][..d].copy_from_slice(row);
            }
            moved
        });
        // The last query attends to all keys but three, the others to fewer.
        let ranges: Vec<_> = (0..t_q).map(|i| 3..t_kv - 40 * (t_q - 1 - i)).collect();
        let output = |[k, v]: &[Vec<f32>; 2], strides: [usize; 3], instruction_set: InstructionSet| {
            let rows = |data| Strided { data, strides }.into();
            let call = AttentionCall {
                dims,
                q: Strided { data: &q[..], strides: [0, t_q * d, d] }.into(),
                k: rows(&k[..]),
                v: rows(&v[..]),
                kv_scales: None,
                pages: None,
                keys: KeysOfQueries { ranges: &ranges, ..Default::default() },
                scores: ScoreModifiers { scale: 0.4, ..Default::default() },
                output_layout: OutputLayout::Bhtd,
            };
            attend::<f32>(&call, instruction_set, RequestedResults::default()).unwrap().output
        };
        for instruction_set in InstructionSet::available() {
            let expected = output(&by_head, [0, t_kv * d, d], instruction_set);
            assert!(expected.iter().any(|&number| number != 0.0));
            let found = output(&by_key, [0, d, h_kv * d], instruction_set);
            assert!(found == expected, "{instruction_set}, {t_q} queries");
        }
    }
}
