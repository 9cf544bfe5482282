//! Masks as a user writes them, with their matrices: a row for each query, with `1` for a key that it attends to.

use crate::*;

crate::on_each_device!(
    no_mask_and_causal_masks_match_drawn_matrices,
    valid_lens_and_starts_match_drawn_matrices,
    window_masks_match_drawn_matrices,
    chunk_masks_match_drawn_matrices,
    chunks_after_padding_of_tensors_match_drawn_matrices,
    prefix_masks_match_drawn_matrices,
    joined_masks_match_drawn_matrices,
    attention_mask_of_ones_and_zeros_masks_zeros,
);

/// A mask, and its matrices for equal numbers of queries and keys, for fewer queries, and for more.
type Drawn = (AttentionMask, &'static str);

fn none() -> AttentionMask {
    AttentionMask::none()
}

fn lower_right() -> AttentionMask {
    AttentionMask::causal()
}

fn upper_left() -> AttentionMask {
    AttentionMask::causal_upper_left()
}

fn offset(n: usize) -> AttentionMask {
    AttentionMask::causal_with_offset(n)
}

fn offsets(n: i64) -> AttentionMask {
    AttentionMask::causal_with_offsets([n])
}

/// Compares the key ranges of masks with their matrices, and what both paths compute: for values that are the rows of a
/// unit matrix, the output is the weights.
fn match_matrices<const N: usize>(masks: [Drawn; N], device: &Device) -> Result<()> {
    let joined = |rows: Vec<String>| rows.join(" ");
    for (mask, matrices) in masks {
        for drawn in matrices.split(" | ") {
            let t_q = drawn.split(' ').count();
            let t_kv = drawn.split(' ').next().map_or(0, str::len);
            let found = mask.resolve(1, t_q, t_kv)?.to_string();
            assert_eq!(joined(found.lines().map(|row| row.replace(' ', "")).collect()), drawn, "{mask:?}");
            check_weights(&mask, drawn, device)?;
        }
    }
    Ok(())
}

/// Compares the weights of both paths with a drawn matrix.
fn check_weights(mask: &AttentionMask, drawn: &str, device: &Device) -> Result<()> {
    let t_q = drawn.split(' ').count();
    let t_kv = drawn.split(' ').next().map_or(0, str::len);
    let [q, k] = [t_q, t_kv].map(|t| Tensor::zeros((1, 1, t, 3), DType::F32, device));
    let v = Tensor::eye(t_kv, DType::F32, device)?.reshape((1, 1, t_kv, t_kv))?;
    let call = Call::plain(&q?, &k?, &v, mask);
    for backend in [Backend::Reference, Backend::Auto] {
        let weights = values(&call.on(backend).context()?);
        let row = |row: &[f64]| row.iter().map(|&weight| if weight > 0.0 { '1' } else { '.' }).collect::<String>();
        let rows: Vec<_> = weights.chunks(t_kv).map(row).collect();
        assert_eq!(rows.join(" "), drawn, "{mask:?} by {backend:?}");
    }
    Ok(())
}

/// Checks masks that are aligned to the end, to the start, or to an offset.
fn no_mask_and_causal_masks_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (none(), "1111 1111 1111 1111 | 11111 11111 | 11 11 11 11 11"),
        (lower_right(), "1... 11.. 111. 1111 | 1111. 11111 | .. .. .. 1. 11"),
        (upper_left(), "1... 11.. 111. 1111 | 1.... 11... | 1. 11 11 11 11 | 1..... 11.... 111... 1111.."),
        (offset(0), "1..... 11.... 111... 1111.."),
        (offset(1), "11.. 111. 1111 1111 | 11... 111.. | 11 11 11 11 11"),
        (offsets(-1), "... 1.. 11. | .. 1. 11 11"),
        (offsets(-2).with_window(1), "... ... 1.. .1."),
    ];
    assert_eq!(masks.each_ref().map(|(mask, _)| mask.is_none()), [true, false, false, false, false, false, false]);
    match_matrices(masks, device)
}

fn valid_lens_and_starts_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (none().with_valid_lens(vec![3]), "111. 111. 111. 111. | 111.. 111.. | 11 11 11 11 11"),
        (none().with_valid_lens(vec![vec![0, 3, 1]]), "... 111 1.. | .. 11 1. | .... 111. 1..."),
        (none().with_starts(vec![2]), "..11 ..11 ..11 ..11 | ..111 ..111 | .. .. .. .. .."),
        (none().with_starts(vec![vec![0, 1, 3]]), "111 .11 ..."),
    ];
    match_matrices(masks, device)
}

/// Checks that a window counts the query's own key.
fn window_masks_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (lower_right().with_window(2), "1... 11.. .11. ..11 | ..11. ...11 | .. .. .. 1. 11"),
        (none().with_window(1), "1111 .111 ..11 ...1 | ...11 ....1 | 11 11 11 11 .1"),
        (upper_left().with_window(2), "1.... 11... .11.."),
        (offset(2).with_window(2), ".11.. ..11. ...11"),
        (none().with_local_window(1, 2), "111. 1111 .111 ..11 | ..111 ...11 | .. 1. 11 11 11"),
        (none().with_local_window(0, 0), "1.. .1. ..1"),
        (lower_right().with_local_window(1, 2), "1.. 11. .11"),
        (none().with_local_window(2, 0).with_local_window(0, 2), "1.. .1. ..1"),
    ];
    match_matrices(masks, device)
}

/// Checks that chunks count from the first key of a sequence, and that a query before it is in a chunk without keys.
fn chunk_masks_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (none().with_chunk(2), "11.. 11.. ..11 ..11 | ..11. ....1 | .. .. .. 11 11"),
        (lower_right().with_chunk(3), "1... 11.. 111. ...1 | ...1. ...11"),
        (offset(1).with_chunk(2), "11.... ..1... ..11.. ....1."),
        // Padding on the left, by starts and by tensors, and two sequences side by side.
        (
            lower_right().with_chunk(4).with_starts(vec![3]),
            "........ ........ ........ ...1.... ...11... ...111.. \
            ...1111. .......1",
        ),
        (none().with_starts(vec![1]).and(&lower_right().with_chunk(2)), ".... .1.. .11. ...1 | .11. ...1"),
        (none().with_starts(vec![1]).with_chunk(2), ".... .11. .11. ...1"),
        (
            lower_right().with_chunk(2).with_starts(vec![vec![0, 0, 0, 3, 3, 3]]),
            "1..... 11.... ..1... ...1.. ...11. \
            .....1",
        ),
    ];
    match_matrices(masks, device)
}

/// Checks that chunks count from the end of padding on the left that tensors name.
fn chunks_after_padding_of_tensors_match_drawn_matrices(device: &Device) -> Result<()> {
    let key_padding = Tensor::new(&[[[[0u8, 1, 1, 1]]]], device)?;
    let additive = Tensor::new(&[[[[f32::MIN, 0., 0., 0.]]]], device)?;
    let of_queries = Tensor::new(&[[0u8, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], device)?;
    // Queries of padding attend to all keys, as in transformers.
    let of_transformers = Tensor::new(&[[1u8, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], device)?;
    // A query attends to key 0, which is no padding.
    let first_attended = Tensor::new(&[[0u8, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]], device)?;
    let with_gap = AttentionMask::from_attention_mask(&Tensor::new(&[[0u8, 1, 0, 1, 1]], device)?)?;
    let chunks = || lower_right().with_chunk(2);
    for (mask, drawn) in [
        (chunks().with_bool_mask(&key_padding), ".... .1.. .11. ...1"),
        // The only key of query 0 has the smallest number, and all weight.
        (chunks().with_bias(&additive), "1... .1.. .11. ...1"),
        (chunks().with_bool_mask(&of_queries), ".... .1.. .11. ...1"),
        (chunks().with_bool_mask(&of_transformers), "1... .1.. .11. ...1"),
        (chunks().with_bool_mask(&first_attended), ".... .1.. ..1. ..1."),
        (lower_right().with_chunk(3).and(&with_gap), "..... .1... .1... .1.1. ....1"),
    ] {
        check_weights(&mask, drawn, device)?;
    }
    Ok(())
}

/// Checks that a prefix relaxes the causal constraint and no other, and that two prefixes are combined with AND.
fn prefix_masks_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (lower_right().with_prefix(vec![3]), "111. 111. 111. 1111 | 1111. 11111 | 11 11 11 11 11"),
        (lower_right().with_prefix(vec![3]).with_valid_lens(vec![2]), "11. 11. 11."),
        (lower_right().with_prefix(vec![3]).with_window(2), "111 111 .11"),
        (lower_right().with_prefix(vec![vec![0, 3, 0]]), "1.. 111 111"),
        (none().with_prefix(vec![1]), "11 11"),
        (lower_right().with_prefix(vec![1]).with_prefix(vec![3]), "1.. 11. 111"),
        (lower_right().with_prefix(vec![2]).and(&offset(0)), "1.. 11. 111"),
        (lower_right().and(&lower_right()).with_prefix(vec![2]), "11. 11. 111"),
    ];
    match_matrices(masks, device)
}

/// Checks that joined masks keep their alignments, and that a prefix relaxes the causal constraint of its mask alone. A
/// window that is added to masks with equal positions counts from there.
fn joined_masks_match_drawn_matrices(device: &Device) -> Result<()> {
    let masks = [
        (lower_right().and(&upper_left()), "1.... 11... 111.. | .. .. 1. 11"),
        (none().with_window(2).and(&upper_left()), "1.... .1... ..1.. ...1."),
        (none().with_valid_lens(vec![4]).and(&upper_left()).with_window(2), "1.... 11... .11.."),
    ];
    match_matrices(masks, device)
}

/// Checks too that no tensor is read where the ones of each row are adjacent: the mask has starts and lengths.
fn attention_mask_of_ones_and_zeros_masks_zeros(device: &Device) -> Result<()> {
    let without_holes: [&[&str]; 6] =
        [&["111.", "1...", "1111"], &[".111", "...1"], &[".11.", "11.."], &["....", ".1.."], &["...."], &[]];
    let with_holes: [&[&str]; 3] = [&["1.11", "....", "11.."], &["11.1"], &["....", "1.1.", "1111"]];
    for (n, rows) in without_holes.into_iter().chain(with_holes).enumerate() {
        let b = rows.len();
        let seen: Vec<bool> = rows.iter().flat_map(|row| row.bytes()).map(|byte| byte == b'1').collect();
        let hidden: Vec<f64> = seen.iter().map(|&seen| if seen { 0.0 } else { f64::NEG_INFINITY }).collect();
        let ones = copied_to(device, seen.into_iter().map(u8::from).collect(), (b, 4))?;
        for dtype in [DType::U8, DType::U32, DType::I64, DType::F32, DType::F16, DType::BF16] {
            let mask = AttentionMask::from_attention_mask(&ones.to_dtype(dtype)?)?;
            let written = mask.to_additive((b, 1, 1, 4), DType::F32, device)?;
            assert_eq!(values(&written.broadcast_as((b, 1, 1, 4))?), hidden, "{rows:?} in {dtype:?}");
            let has_tensor =
                mask.of_part(b, 0..1, 0..4).is_err_and(|error| error.to_string().contains("has a boolean tensor"));
            assert_eq!(has_tensor, n >= without_holes.len(), "{rows:?}: {mask:?}");
        }
    }
    Ok(())
}

/// Checks constraints that count from the position of a query, of which these masks have two.
#[test]
fn window_and_prefix_on_joined_masks_with_different_positions_are_rejected() {
    let joined = AttentionMask::causal().and(&AttentionMask::causal_upper_left());
    let error = |mask: &AttentionMask| error_text(mask.resolve(1, 2, 5));
    for (builder, mask) in [
        ("with_window", joined.clone().with_window(2)),
        ("with_local_window", joined.clone().with_local_window(1, 1)),
        ("with_prefix", joined.clone().with_prefix(vec![1])),
        (
            "with_prefix",
            AttentionMask::causal().with_prefix(vec![2]).and(&AttentionMask::causal()).with_prefix(vec![1]),
        ),
    ] {
        let expected = format!(
            "[attention_mask] {builder} was called on masks that were joined and whose queries are at different positions, \
             expected it on one of them before `and`"
        );
        assert_eq!(error(&mask), expected);
        assert_eq!(error(&AttentionMask::none().and(&mask)), expected);
    }
}

/// Checks too that masks with different alignments are accepted for shapes where these agree.
#[test]
fn alibi_on_joined_masks_with_different_positions_is_rejected() {
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
