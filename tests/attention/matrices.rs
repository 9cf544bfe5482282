//! The vocabulary of masks: each as a user writes it, as the oracle has it, and drawn as a matrix of a row for each
//! query, with `1` for a key that it sees.

use candle_attention::{AttentionMask, Backend, SdpaOptions, scaled_dot_product_attention};
use candle_core::{DType, Device, Result, Tensor};

use crate::call::{Call, check};
use crate::common::{assert_close, error_text, values};
use crate::oracle::Alignment::{Causal, Free, Offset, Offsets, UpperLeft};
use crate::oracle::Lens::{PerQuery, PerSequence};
use crate::oracle::Part::{Band, Chunk, Prefix, Starts, ValidLens, Window};
use crate::oracle::{Case, Dims, Mask, Part};
use crate::recipe::Recipe;

crate::on_each_device!(
    every_mask_is_what_is_drawn,
    attention_masks_become_starts_and_lengths,
    attention_masks_with_holes_become_keep,
    attention_masks_come_in_any_dtype,
);

/// A mask, and its matrices for some numbers of queries and keys: rows from top to bottom.
struct Drawn {
    mask: AttentionMask,
    oracle: Vec<Mask>,
    matrices: &'static [&'static str],
}

fn drawn<const N: usize>(mask: AttentionMask, oracle: [Mask; N], matrices: &'static [&'static str]) -> Drawn {
    Drawn { mask, oracle: oracle.into(), matrices }
}

fn free(parts: impl Into<Vec<Part>>) -> [Mask; 1] {
    [Mask::new(Free, parts)]
}

fn causal(parts: impl Into<Vec<Part>>) -> [Mask; 1] {
    [Mask::new(Causal, parts)]
}

fn upper_left(parts: impl Into<Vec<Part>>) -> [Mask; 1] {
    [Mask::new(UpperLeft, parts)]
}

fn lens(n: usize) -> Part {
    ValidLens(PerSequence(vec![n]))
}

fn prefix(n: usize) -> Part {
    Prefix(PerSequence(vec![n]))
}

/// As many queries as keys, fewer, and more; then what is special about the mask.
#[rustfmt::skip]
fn vocabulary() -> Vec<Drawn> {
    let none = AttentionMask::none;
    let lower_right = AttentionMask::causal;
    let top_left = AttentionMask::causal_upper_left;
    let offset = AttentionMask::causal_with_offset;
    let offsets = |n: i64| AttentionMask::causal_with_offsets([n]);
    vec![
        drawn(none(), free([]), &["1111 1111 1111 1111", "11111 11111", "11 11 11 11 11"]),
        // Aligned to the end, and to the start.
        drawn(lower_right(), causal([]), &["1... 11.. 111. 1111", "1111. 11111", ".. .. .. 1. 11"]),
        drawn(top_left(), upper_left([]), &["1... 11.. 111. 1111", "1.... 11...", "1. 11 11 11 11", "1..... 11.... 111... 1111.."]),
        drawn(offset(0), [Mask::new(Offset(0), [])], &["1..... 11.... 111... 1111.."]),
        drawn(offset(1), [Mask::new(Offset(1), [])], &["11.. 111. 1111 1111", "11... 111..", "11 11 11 11 11"]),
        drawn(offsets(-1), [Mask::new(Offsets(vec![-1]), [])], &["... 1.. 11.", ".. 1. 11 11"]),
        drawn(offsets(-2).with_window(1), [Mask::new(Offsets(vec![-2]), [Window(1)])], &["... ... 1.. .1."]),
        drawn(none().with_valid_lens(vec![3]), free([lens(3)]), &["111. 111. 111. 111.", "111.. 111..", "11 11 11 11 11"]),
        drawn(none().with_valid_lens(vec![vec![0, 3, 1]]), free([ValidLens(PerQuery(vec![vec![0, 3, 1]]))]),
            &["... 111 1..", ".. 11 1.", ".... 111. 1..."]),
        drawn(none().with_starts(vec![2]), free([Starts(PerSequence(vec![2]))]), &["..11 ..11 ..11 ..11", "..111 ..111", ".. .. .. .. .."]),
        drawn(none().with_starts(vec![vec![0, 1, 3]]), free([Starts(PerQuery(vec![vec![0, 1, 3]]))]), &["111 .11 ..."]),
        // A window counts the query's own key.
        drawn(lower_right().with_window(2), causal([Window(2)]), &["1... 11.. .11. ..11", "..11. ...11", ".. .. .. 1. 11"]),
        drawn(none().with_window(1), free([Window(1)]), &["1111 .111 ..11 ...1", "...11 ....1", "11 11 11 11 .1"]),
        drawn(top_left().with_window(2), upper_left([Window(2)]), &["1.... 11... .11.."]),
        drawn(offset(2).with_window(2), [Mask::new(Offset(2), [Window(2)])], &[".11.. ..11. ...11"]),
        drawn(none().with_band(1, 2), free([Band(1, 2)]), &["111. 1111 .111 ..11", "..111 ...11", ".. 1. 11 11 11"]),
        drawn(none().with_band(0, 0), free([Band(0, 0)]), &["1.. .1. ..1"]),
        drawn(lower_right().with_band(1, 2), causal([Band(1, 2)]), &["1.. 11. .11"]),
        drawn(none().with_band(2, 0).with_band(0, 2), free([Band(2, 0), Band(0, 2)]), &["1.. .1. ..1"]),
        // Chunks count from the first key; a query before it stands in a chunk without keys.
        drawn(none().with_chunk(2), free([Chunk(2)]), &["11.. 11.. ..11 ..11", "..11. ....1", ".. .. .. 11 11"]),
        drawn(lower_right().with_chunk(3), causal([Chunk(3)]), &["1... 11.. 111. ...1", "...1. ...11"]),
        drawn(offset(1).with_chunk(2), [Mask::new(Offset(1), [Chunk(2)])], &["11.... ..1... ..11.. ....1."]),
        // A prefix lifts the causal constraint and no other; two hold together like any two constraints.
        drawn(lower_right().with_prefix(vec![3]), causal([prefix(3)]), &["111. 111. 111. 1111", "1111. 11111", "11 11 11 11 11"]),
        drawn(lower_right().with_prefix(vec![3]).with_valid_lens(vec![2]), causal([prefix(3), lens(2)]), &["11. 11. 11."]),
        drawn(lower_right().with_prefix(vec![3]).with_window(2), causal([prefix(3), Window(2)]), &["111 111 .11"]),
        drawn(lower_right().with_prefix(vec![vec![0, 3, 0]]), causal([Prefix(PerQuery(vec![vec![0, 3, 0]]))]), &["1.. 111 111"]),
        drawn(none().with_prefix(vec![1]), free([prefix(1)]), &["11 11"]),
        drawn(lower_right().with_prefix(vec![1]).with_prefix(vec![3]), causal([prefix(1), prefix(3)]), &["1.. 11. 111"]),
        // Joined masks keep their own alignments, and a prefix lifts the causal constraint of its own mask.
        drawn(lower_right().and(&top_left()), [Mask::new(Causal, []), Mask::new(UpperLeft, [])], &["1.... 11... 111..", ".. .. 1. 11"]),
        drawn(none().with_window(2).and(&top_left()), [Mask::new(Free, [Window(2)]), Mask::new(UpperLeft, [])], &["1.... .1... ..1.. ...1."]),
        drawn(lower_right().with_prefix(vec![2]).and(&offset(0)), [Mask::new(Causal, [prefix(2)]), Mask::new(Offset(0), [])], &["1.. 11. 111"]),
    ]
}

/// The oracle's rule, the intervals of keys, and what both paths compute.
fn every_mask_is_what_is_drawn(device: &Device) -> Result<()> {
    for Drawn { mask, oracle, matrices } in vocabulary() {
        for matrix in matrices {
            let rows: Vec<&str> = matrix.split(' ').collect();
            let (t_q, t_kv) = (rows.len(), rows[0].len());
            let spaced = |row: &&str| row.chars().map(String::from).collect::<Vec<_>>().join(" ") + "\n";
            let expected: String = rows.iter().map(spaced).collect();
            let found = mask.resolve(1, t_q, t_kv)?.to_string();
            assert_eq!(found, expected, "{mask:?}\ndrawn:\n{found}expected:\n{expected}");
            let dims = Dims { b: 1, h: 2, h_kv: 1, t_q, t_kv, d: 3, d_v: 2 };
            let case = Case { masks: oracle.clone(), ..Recipe::plain(dims, vec![], DType::F32).case() };
            for (i, row) in rows.iter().enumerate() {
                let seen: String = (0..t_kv).map(|j| if case.sees([0, 0, i, j]) { '1' } else { '.' }).collect();
                assert_eq!(seen, *row, "the oracle's row {i} of {mask:?}");
            }
            check(&case, DType::F32, device).unwrap_or_else(|error| panic!("{error}: {mask:?}"));
        }
    }
    Ok(())
}

#[test]
fn sequences_are_drawn_one_below_the_other() {
    let mask = AttentionMask::causal().with_valid_lens(vec![3, 1]).with_starts(vec![1, 0]);
    let drawn = mask.resolve(2, 3, 3).expect("the mask fits").to_string();
    assert_eq!(drawn, ". . .\n. 1 .\n. 1 1\n\n1 . .\n1 . .\n1 . .\n");
    assert!(AttentionMask::none().is_none() && !mask.is_none());
}

#[test]
fn positions_follow_the_alignment() {
    for (mask, (t_q, t_kv), expected) in [
        (AttentionMask::none(), (2, 5), 4),
        (AttentionMask::causal(), (5, 2), -2),
        (AttentionMask::causal_upper_left(), (2, 5), 1),
        (AttentionMask::causal_with_offset(7), (2, 5), 8),
        (AttentionMask::causal_with_offsets([-7]), (2, 5), -6),
    ] {
        assert_eq!(mask.resolve(1, t_q, t_kv).expect("fits").query_position(1), expected, "{mask:?}");
    }
}

fn attention_masks_become_starts_and_lengths(device: &Device) -> Result<()> {
    let cases: [&[&str]; 6] =
        [&["111.", "1...", "1111"], &[".111", "...1"], &[".11.", "11.."], &["....", ".1.."], &["...."], &[]];
    for rows in cases {
        let ones: Vec<u8> = rows.iter().flat_map(|row| row.bytes()).map(|byte| u8::from(byte == b'1')).collect();
        let mask = AttentionMask::from_attention_mask(&Tensor::from_vec(ones, (rows.len(), 4), device)?)?;
        let drawn = mask.resolve(rows.len(), 1, 4)?.to_string();
        assert_eq!(drawn.replace(' ', "").split_whitespace().collect::<Vec<_>>(), rows);
        // Nothing is left to read from memory.
        let text = format!("{mask:?}");
        assert!(!text.contains("Keep") && !text.contains("Bias"), "{text}");
    }
    Ok(())
}

fn attention_masks_with_holes_become_keep(device: &Device) -> Result<()> {
    let rows = Tensor::new(&[[1i64, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], device)?;
    let mask = AttentionMask::from_attention_mask(&rows)?;
    let hidden = values(&mask.to_additive((3, 2, 1, 4), DType::F32, device)?.broadcast_as((3, 2, 1, 4))?);
    let lowest = f64::NEG_INFINITY;
    let expected = [[0.0, lowest, 0.0, 0.0], [lowest; 4], [0.0, 0.0, lowest, lowest]];
    let expected: Vec<f64> = expected.iter().flat_map(|row| [row, row]).flatten().copied().collect();
    assert_eq!(hidden, expected);
    let x = Tensor::randn(0f32, 1., (3, 2, 4, 5), device)?;
    let output = Call::plain(&x, &x, &x, &mask).on(Backend::Auto).with_weights()?;
    assert_close(&output.context.narrow(0, 1, 1)?, &x.narrow(0, 1, 1)?.zeros_like()?, 0.0, "a row of zeros");
    for (n, weight) in values(&output.weights).into_iter().enumerate() {
        let (b, j) = (n / (2 * 4 * 4), n % 4);
        assert_eq!(weight > 0.0, [[1, 0, 1, 1], [0; 4], [1, 1, 0, 0]][b][j] == 1, "sequence {b}, key {j}");
    }
    Ok(())
}

fn attention_masks_come_in_any_dtype(device: &Device) -> Result<()> {
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
}

/// Builders that count from a query's position, on masks that disagree about it.
#[test]
fn what_joined_masks_leave_unclear_is_an_error() {
    let joined = AttentionMask::causal().and(&AttentionMask::causal_upper_left());
    let error = |mask: &AttentionMask| error_text(mask.resolve(1, 2, 5));
    for (builder, mask) in [
        ("with_window", joined.clone().with_window(2)),
        ("with_band", joined.clone().with_band(1, 1)),
        ("with_prefix", joined.clone().with_prefix(vec![1])),
        (
            "with_prefix",
            AttentionMask::causal().with_prefix(vec![2]).and(&AttentionMask::causal()).with_prefix(vec![1]),
        ),
    ] {
        let expected = format!(
            "[attention_mask] {builder} was called on masks that were joined and whose queries stand at different positions, \
             expected it on one of them before `and`"
        );
        assert_eq!(error(&mask), expected);
        assert_eq!(error(&AttentionMask::none().and(&mask)), expected);
    }
    // Where they agree, the order does not matter.
    let padding = AttentionMask::none().with_valid_lens(vec![4]);
    let (before, after) = (
        AttentionMask::causal_upper_left().with_window(2).and(&padding),
        padding.and(&AttentionMask::causal_upper_left()).with_window(2),
    );
    let drawn = |mask: &AttentionMask, t_q, t_kv| mask.resolve(1, t_q, t_kv).expect("fits").to_string();
    assert_eq!(drawn(&after, 3, 5), "1 . . . .\n1 1 . . .\n. 1 1 . .\n");
    assert_eq!(drawn(&before, 3, 5), drawn(&after, 3, 5));
    let twice = AttentionMask::causal().and(&AttentionMask::causal()).with_prefix(vec![2]);
    assert_eq!(drawn(&twice, 3, 3), "1 1 .\n1 1 .\n1 1 1\n");
}

/// ALiBi counts from a query's position: masks that disagree about it leave none, unless the shape makes them agree.
#[test]
fn alibi_on_masks_that_disagree_about_positions_is_an_error() {
    let joined = AttentionMask::causal().and(&AttentionMask::causal_upper_left());
    let zeros = |t: usize| Tensor::zeros((1, 1, t, 8), DType::F32, &Device::Cpu).expect("zeros");
    let slopes = Tensor::ones(1, DType::F32, &Device::Cpu).expect("a slope");
    let run = |backend, t_kv| {
        let options = SdpaOptions::default().with_alibi_slopes(&slopes).with_backend(backend);
        scaled_dot_product_attention(&zeros(2), &zeros(t_kv), &zeros(t_kv), &joined, &options)
    };
    for backend in [Backend::Reference, Backend::Fused] {
        assert_eq!(
            error_text(run(backend, 5)),
            "[attention_mask] ALiBi counts from a query's position, and the joined masks give query 0 of sequence 0 the \
             positions 3 and 0, expected one"
        );
        assert!(run(backend, 2).is_ok());
    }
}
