//! Masks drawn as matrices: a row for each query, `1` for a key that it sees.

mod common;

use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention_with_weights as attend};
use candle_core::{DType, Device, Result, Tensor};

use common::{assert_close, error_text, values};

on_each_device!(
    attention_masks_become_starts_and_lengths,
    attention_masks_with_holes_become_keep,
    attention_masks_come_in_any_dtype,
);

/// A drawing without its indentation.
fn matrix(text: &str) -> String {
    text.trim().lines().map(|line| format!("{}\n", line.trim())).collect()
}

#[track_caller]
fn assert_drawn(mask: &AttentionMask, (t_q, t_kv): (usize, usize), expected: &str) {
    let drawn = mask.resolve(1, t_q, t_kv).expect("the mask fits").to_string();
    assert_eq!(drawn, matrix(expected), "{mask:?}\ndrawn:\n{drawn}expected:\n{}", matrix(expected));
}

/// One mask with as many queries as keys, with fewer, and with more.
#[track_caller]
fn assert_matrices(mask: &AttentionMask, [square, fewer, more]: [&str; 3]) {
    assert_drawn(mask, (4, 4), square);
    assert_drawn(mask, (2, 5), fewer);
    assert_drawn(mask, (5, 2), more);
}

#[test]
fn none_hides_nothing() {
    let all = ["1 1 1 1\n1 1 1 1\n1 1 1 1\n1 1 1 1", "1 1 1 1 1\n1 1 1 1 1", "1 1\n1 1\n1 1\n1 1\n1 1"];
    assert_matrices(&AttentionMask::none(), all);
    assert!(AttentionMask::none().is_none() && !AttentionMask::causal().is_none());
}

#[test]
fn causal_is_aligned_to_the_end() {
    assert_matrices(
        &AttentionMask::causal(),
        [
            "
            1 . . .
            1 1 . .
            1 1 1 .
            1 1 1 1
            ",
            "
            1 1 1 1 .
            1 1 1 1 1
            ",
            "
            . .
            . .
            . .
            1 .
            1 1
            ",
        ],
    );
}

#[test]
fn causal_upper_left_is_aligned_to_the_start() {
    assert_matrices(
        &AttentionMask::causal_upper_left(),
        [
            "
            1 . . .
            1 1 . .
            1 1 1 .
            1 1 1 1
            ",
            "
            1 . . . .
            1 1 . . .
            ",
            "
            1 .
            1 1
            1 1
            1 1
            1 1
            ",
        ],
    );
    let upper_left = AttentionMask::causal_upper_left().resolve(1, 4, 6).expect("fits").to_string();
    assert_eq!(AttentionMask::causal_with_offset(0).resolve(1, 4, 6).expect("fits").to_string(), upper_left);
}

#[test]
fn an_offset_moves_the_diagonal_to_the_right() {
    assert_matrices(
        &AttentionMask::causal_with_offset(1),
        [
            "
            1 1 . .
            1 1 1 .
            1 1 1 1
            1 1 1 1
            ",
            "
            1 1 . . .
            1 1 1 . .
            ",
            "
            1 1
            1 1
            1 1
            1 1
            1 1
            ",
        ],
    );
}

#[test]
fn lengths_hide_the_keys_at_and_past_them() {
    assert_matrices(
        &AttentionMask::none().with_valid_lens(vec![3]),
        [
            "
            1 1 1 .
            1 1 1 .
            1 1 1 .
            1 1 1 .
            ",
            "
            1 1 1 . .
            1 1 1 . .
            ",
            "
            1 1
            1 1
            1 1
            1 1
            1 1
            ",
        ],
    );
    let per_query = AttentionMask::none().with_valid_lens(vec![vec![0, 3, 1]]);
    assert_drawn(&per_query, (3, 3), ". . .\n1 1 1\n1 . .");
    assert_drawn(&per_query, (3, 2), ". .\n1 1\n1 .");
    assert_drawn(&per_query, (3, 4), ". . . .\n1 1 1 .\n1 . . .");
}

#[test]
fn starts_hide_the_keys_before_them() {
    assert_matrices(
        &AttentionMask::none().with_starts(vec![2]),
        [
            "
            . . 1 1
            . . 1 1
            . . 1 1
            . . 1 1
            ",
            "
            . . 1 1 1
            . . 1 1 1
            ",
            "
            . .
            . .
            . .
            . .
            . .
            ",
        ],
    );
    let per_query = AttentionMask::none().with_starts(vec![vec![0, 1, 3]]);
    assert_drawn(&per_query, (3, 3), "1 1 1\n. 1 1\n. . .");
}

#[test]
fn a_window_counts_the_querys_own_key() {
    assert_matrices(
        &AttentionMask::causal().with_window(2),
        [
            "
            1 . . .
            1 1 . .
            . 1 1 .
            . . 1 1
            ",
            "
            . . 1 1 .
            . . . 1 1
            ",
            "
            . .
            . .
            . .
            1 .
            1 1
            ",
        ],
    );
    assert_matrices(
        &AttentionMask::none().with_window(1),
        [
            "
            1 1 1 1
            . 1 1 1
            . . 1 1
            . . . 1
            ",
            "
            . . . 1 1
            . . . . 1
            ",
            "
            1 1
            1 1
            1 1
            1 1
            . 1
            ",
        ],
    );
    assert_drawn(&AttentionMask::causal_upper_left().with_window(2), (3, 5), "1 . . . .\n1 1 . . .\n. 1 1 . .");
    assert_drawn(&AttentionMask::causal_with_offset(2).with_window(2), (3, 5), ". 1 1 . .\n. . 1 1 .\n. . . 1 1");
}

#[test]
fn a_band_reaches_to_both_sides() {
    assert_matrices(
        &AttentionMask::none().with_band(1, 2),
        [
            "
            1 1 1 .
            1 1 1 1
            . 1 1 1
            . . 1 1
            ",
            "
            . . 1 1 1
            . . . 1 1
            ",
            "
            . .
            1 .
            1 1
            1 1
            1 1
            ",
        ],
    );
    assert_drawn(&AttentionMask::none().with_band(0, 0), (3, 3), "1 . .\n. 1 .\n. . 1");
    assert_drawn(&AttentionMask::causal().with_band(1, 2), (3, 3), "1 . .\n1 1 .\n. 1 1");
    assert_drawn(&AttentionMask::none().with_band(2, 0).with_band(0, 2), (3, 3), "1 . .\n. 1 .\n. . 1");
}

#[test]
fn a_prefix_is_seen_by_all() {
    assert_matrices(
        &AttentionMask::causal().with_prefix(vec![3]),
        [
            "
            1 1 1 .
            1 1 1 .
            1 1 1 .
            1 1 1 1
            ",
            "
            1 1 1 1 .
            1 1 1 1 1
            ",
            "
            1 1
            1 1
            1 1
            1 1
            1 1
            ",
        ],
    );
    // It lifts the causal constraint and no other.
    assert_drawn(&AttentionMask::causal().with_prefix(vec![3]).with_valid_lens(vec![2]), (3, 3), "1 1 .\n1 1 .\n1 1 .");
    assert_drawn(&AttentionMask::causal().with_prefix(vec![3]).with_window(2), (3, 3), "1 1 1\n1 1 1\n. 1 1");
    assert_drawn(&AttentionMask::causal().with_prefix(vec![vec![0, 3, 0]]), (3, 3), "1 . .\n1 1 1\n1 1 1");
    assert_drawn(&AttentionMask::none().with_prefix(vec![1]), (2, 2), "1 1\n1 1");
    // Two hold together like any two constraints.
    let both = AttentionMask::causal().with_prefix(vec![1]).with_prefix(vec![3]);
    assert_drawn(&both, (3, 3), "1 . .\n1 1 .\n1 1 1");
}

#[test]
fn sequences_are_drawn_one_below_the_other() {
    let mask = AttentionMask::causal().with_valid_lens(vec![3, 1]).with_starts(vec![1, 0]);
    let drawn = mask.resolve(2, 3, 3).expect("the mask fits").to_string();
    assert_eq!(drawn, ". . .\n. 1 .\n. 1 1\n\n1 . .\n1 . .\n1 . .\n");
}

#[test]
fn joined_masks_keep_their_own_alignments() {
    let joined = AttentionMask::causal().and(&AttentionMask::causal_upper_left());
    assert_drawn(&joined, (3, 5), "1 . . . .\n1 1 . . .\n1 1 1 . .");
    assert_drawn(&joined, (4, 2), ". .\n. .\n1 .\n1 1");
    let windowed = AttentionMask::none().with_window(2).and(&AttentionMask::causal_upper_left());
    assert_drawn(&windowed, (4, 5), "1 . . . .\n. 1 . . .\n. . 1 . .\n. . . 1 .");
    // A prefix lifts the causal constraint of its own mask.
    let prefixed = AttentionMask::causal().with_prefix(vec![2]).and(&AttentionMask::causal_with_offset(0));
    assert_drawn(&prefixed, (3, 3), "1 . .\n1 1 .\n1 1 1");
}

#[test]
fn positions_follow_the_alignment() {
    let position = |mask: AttentionMask, (t_q, t_kv)| mask.resolve(1, t_q, t_kv).expect("fits").query_position(1);
    assert_eq!(position(AttentionMask::none(), (2, 5)), 4);
    assert_eq!(position(AttentionMask::causal(), (5, 2)), -2);
    assert_eq!(position(AttentionMask::causal_upper_left(), (2, 5)), 1);
    assert_eq!(position(AttentionMask::causal_with_offset(7), (2, 5)), 8);
}

fn attention_masks_become_starts_and_lengths(device: &Device) {
    let from = |rows: &[[u8; 4]]| {
        let flat = Tensor::from_slice(rows.as_flattened(), (rows.len(), 4), device).expect("a tensor");
        AttentionMask::from_attention_mask(&flat).expect("ones and zeros")
    };
    let drawn = |mask: &AttentionMask, b| mask.resolve(b, 1, 4).expect("the mask fits").to_string();
    assert_eq!(drawn(&from(&[[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]), 3), "1 1 1 .\n\n1 . . .\n\n1 1 1 1\n");
    assert_eq!(drawn(&from(&[[0, 1, 1, 1], [0, 0, 0, 1]]), 2), ". 1 1 1\n\n. . . 1\n");
    assert_eq!(drawn(&from(&[[0, 1, 1, 0], [1, 1, 0, 0]]), 2), ". 1 1 .\n\n1 1 . .\n");
    assert_eq!(drawn(&from(&[[0, 0, 0, 0], [0, 1, 0, 0]]), 2), ". . . .\n\n. 1 . .\n");
    assert_eq!(drawn(&from(&[[0, 0, 0, 0]]), 1), ". . . .\n");
    assert_eq!(drawn(&from(&[]), 0), "");
    // Nothing is left to read from memory.
    for mask in [from(&[[0, 1, 1, 0]]), from(&[[0, 0, 0, 0]]), from(&[[1, 1, 1, 1]])] {
        let text = format!("{mask:?}");
        assert!(text.contains("keep: []") && text.contains("bias: []"), "{text}");
    }
}

fn attention_masks_with_holes_become_keep(device: &Device) {
    let test = || -> Result<()> {
        let rows = Tensor::new(&[[1i64, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], device)?;
        let mask = AttentionMask::from_attention_mask(&rows)?;
        let hidden = values(&mask.to_additive((3, 2, 1, 4), DType::F32, device)?.broadcast_as((3, 2, 1, 4))?);
        let lowest = f64::NEG_INFINITY;
        let expected = [[0.0, lowest, 0.0, 0.0], [lowest; 4], [0.0, 0.0, lowest, lowest]];
        let expected: Vec<f64> = expected.iter().flat_map(|row| [row, row]).flatten().copied().collect();
        assert_eq!(hidden, expected);
        let x = Tensor::randn(0f32, 1., (3, 2, 4, 5), device)?;
        let output = attend(&x, &x, &x, &mask, &SdpaOptions::default())?;
        assert_close(&output.context.narrow(0, 1, 1)?, &x.narrow(0, 1, 1)?.zeros_like()?, 0.0, "a row of zeros");
        for (n, weight) in values(&output.weights).into_iter().enumerate() {
            let (b, j) = (n / (2 * 4 * 4), n % 4);
            assert_eq!(weight > 0.0, [[1, 0, 1, 1], [0; 4], [1, 1, 0, 0]][b][j] == 1, "sequence {b}, key {j}");
        }
        Ok(())
    };
    test().expect("the calls run");
}

fn attention_masks_come_in_any_dtype(device: &Device) {
    let test = || -> Result<()> {
        for rows in [[[1u8, 1, 0], [0, 1, 1]], [[1, 0, 1], [0, 0, 0]]] {
            let bytes = Tensor::new(&rows, device)?;
            let written = |mask: &Tensor| -> Result<_> {
                let mask = AttentionMask::from_attention_mask(mask)?;
                Ok(values(&mask.to_additive((2, 1, 1, 3), DType::F32, device)?))
            };
            for dtype in [DType::U32, DType::I64, DType::F32, DType::F16, DType::BF16] {
                assert_eq!(written(&bytes.to_dtype(dtype)?)?, written(&bytes)?, "{dtype:?}");
            }
        }
        Ok(())
    };
    test().expect("the masks are read");
}

#[test]
fn an_attention_mask_keeps_its_width() {
    let mask = Tensor::new(&[[1u8, 1, 1, 0, 0]], &Device::Cpu).expect("a mask");
    let mask = AttentionMask::from_attention_mask(&mask).expect("ones and zeros");
    assert!(mask.resolve(1, 2, 5).is_ok());
    for t_kv in [4, 6] {
        let text = error_text(mask.resolve(1, 2, t_kv));
        let expected =
            format!("[attention_mask] the attention mask has 5 columns, expected one for each of {t_kv} keys");
        assert_eq!(text, expected);
        assert_eq!(error_text(AttentionMask::causal().and(&mask).resolve(1, 2, t_kv)), expected);
    }
}
