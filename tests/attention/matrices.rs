//! The vocabulary of masks: each as a user writes it, as the oracle has it, and drawn as a matrix of a row for each
//! query, with `1` for a key that it sees.

use crate::oracle::Alignment::{Causal, Free, Offset, Offsets, UpperLeft};
use crate::oracle::Lens::{PerQuery, PerSequence};
use crate::oracle::Part::{Band, Chunk, Prefix, Starts, ValidLens, Window};
use crate::*;

crate::on_each_device!(every_mask_is_what_is_drawn, attention_masks_are_rows_of_ones_and_zeros,);

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
        // What is built upon masks that agree about positions counts from there.
        drawn(none().with_valid_lens(vec![4]).and(&top_left()).with_window(2),
            [Mask::new(UpperLeft, [Window(2), lens(4)])], &["1.... 11... .11.."]),
        drawn(lower_right().and(&lower_right()).with_prefix(vec![2]), causal([prefix(2)]), &["11. 11. 111"]),
    ]
}

/// The oracle's rule, the intervals of keys, and what both paths compute.
fn every_mask_is_what_is_drawn(device: &Device) -> Result<()> {
    for (n, Drawn { mask, oracle, matrices }) in vocabulary().into_iter().enumerate() {
        assert_eq!(mask.is_none(), n == 0, "{mask:?}");
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

/// As starts and lengths, with nothing left to read from memory, where the ones of each row are beside each other.
fn attention_masks_are_rows_of_ones_and_zeros(device: &Device) -> Result<()> {
    let without_holes: [&[&str]; 6] =
        [&["111.", "1...", "1111"], &[".111", "...1"], &[".11.", "11.."], &["....", ".1.."], &["...."], &[]];
    let with_holes: [&[&str]; 3] = [&["1.11", "....", "11.."], &["11.1"], &["....", "1.1.", "1111"]];
    for (rows, has_holes) in
        without_holes.map(|rows| (rows, false)).into_iter().chain(with_holes.map(|rows| (rows, true)))
    {
        let b = rows.len();
        let seen: Vec<bool> = rows.iter().flat_map(|row| row.bytes()).map(|byte| byte == b'1').collect();
        let hidden: Vec<f64> = seen.iter().map(|&seen| if seen { 0.0 } else { f64::NEG_INFINITY }).collect();
        let ones = Tensor::from_vec(seen.into_iter().map(u8::from).collect(), (b, 4), device)?;
        for dtype in [DType::U8, DType::U32, DType::I64, DType::F32, DType::F16, DType::BF16] {
            let mask = AttentionMask::from_attention_mask(&ones.to_dtype(dtype)?)?;
            let written = mask.to_additive((b, 1, 1, 4), DType::F32, device)?;
            assert_eq!(values(&written.broadcast_as((b, 1, 1, 4))?), hidden, "{rows:?} in {dtype:?}");
            let text = format!("{mask:?}");
            assert!(text.contains("Keep") == has_holes && !text.contains("Bias"), "{rows:?}: {text}");
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
