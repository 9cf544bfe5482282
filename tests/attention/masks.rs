//! The meaning of masks with any numbers: one rule for a query and a key, in every form that a mask is read.

use candle_attention::scaled_dot_product_attention_with_weights as attend;

use crate::*;

crate::on_each_device!(
    mask_with_random_constraints_matches_oracle,
    valid_lens_from_lists_and_tensors_are_equal,
    bool_mask_checks_only_entries_of_its_view,
    mask_tensors_may_be_empty_views_past_the_end_of_their_buffer,
);

/// At the end of `usize` and around `i64::MAX`.
const HUGE: [usize; 6] =
    [usize::MAX, usize::MAX - 1, usize::MAX / 2 + 2, usize::MAX / 2 + 1, usize::MAX / 2, usize::MAX / 2 - 1];

/// Replaces some numbers of a mask by the largest ones.
fn enlarge(mask: &mut Mask, random: &mut Random) {
    let mut numbers: Vec<&mut usize> = Vec::new();
    match &mut mask.alignment {
        Alignment::Offset(n) => numbers.push(n),
        Alignment::Offsets(all) => all[..].iter_mut().for_each(|n| *n = [i64::MIN, *n, i64::MAX][random.up_to(2)]),
        _ => {}
    }
    for part in &mut mask.parts {
        match part {
            Part::ValidLens(lens) | Part::Starts(lens) | Part::Prefix(lens) => match lens {
                Lens::PerSequence(lens) => numbers.extend(lens),
                Lens::PerQuery(rows) => numbers.extend(rows.iter_mut().flatten()),
            },
            Part::Window(n) | Part::Chunk(n) => numbers.push(n),
            Part::LocalWindow(left, right) => numbers.extend([left, right]),
            Part::BoolMask(_) | Part::Bias(_) => {}
        }
    }
    for number in numbers {
        if random.chance(0.5) {
            *number = HUGE[random.up_to(5)];
        }
    }
}

/// Returns a random mask of the oracle and the equal mask of the crate.
fn both(recipe: &Recipe, device: &Device) -> Result<(Case, AttentionMask)> {
    let mut case = recipe.case();
    let mut random = Random::new(recipe.seed);
    if recipe.seed.is_multiple_of(3) {
        case.masks.iter_mut().for_each(|mask| enlarge(mask, &mut random));
    }
    let mask = Call::new(&case, recipe.dtype, device)?.mask;
    Ok((case, mask))
}

/// Compares `kv_range`, `query_position`, `Display` and `to_additive` with the oracle's rule for one query and one key.
fn mask_with_random_constraints_matches_oracle(device: &Device) {
    let dtypes: &[DType] = if device.is_metal() { &[DType::F32] } else { &[DType::F32, DType::F64] };
    for_all(5_000, recipes(dtypes), |recipe| {
        let dims @ Dims { b, h, t_q, t_kv, .. } = recipe.dims;
        let (case, mask) = both(&recipe, device)?;
        let additive = mask.to_additive((b, h, t_q, t_kv), recipe.dtype, device)?;
        let ranges = mask.resolve(b, t_q, t_kv)?;
        let additive = values(&additive.broadcast_as((b, h, t_q, t_kv))?);
        let biases = Case { options: Options::default(), ..case.clone() };
        let mut drawn = vec![String::new(); b];
        for (sequence, i) in (0..b).flat_map(|b| (0..t_q).map(move |i| (b, i))) {
            let seen: Vec<usize> = (0..t_kv).filter(|&j| case.sees_without_tensors([sequence, i, j])).collect();
            let range = ranges.kv_range(sequence, i);
            if range.clone().collect::<Vec<_>>() != seen || (seen.is_empty() && range != (0..0)) {
                bail!("query {i} of {sequence} sees {seen:?}, not {range:?}");
            }
            let position = case.position(0, i).clamp(i64::MIN.into(), i64::MAX.into());
            if i128::from(ranges.query_position(i)) != position {
                bail!("query {i} stands at {}, expected {position}", ranges.query_position(i));
            }
            let row: Vec<_> = (0..t_kv).map(|j| if seen.contains(&j) { "1" } else { "." }).collect();
            drawn[sequence].push_str(&format!("{}\n", row.join(" ")));
        }
        let indices =
            (0..b * h * t_q * t_kv).map(|n| [n / (h * t_q * t_kv), n / (t_q * t_kv) % h, n / t_kv % t_q, n % t_kv]);
        for (index, got) in indices.zip(additive) {
            let expected = if case.sees(index) { biases.bias(index) } else { f64::NEG_INFINITY };
            let close = (got - expected).abs() <= 1e-6 * (1.0 + expected.abs());
            if got != expected && !close {
                bail!("to_additive has {got} at {index:?}, expected {expected}");
            }
        }
        let drawn = drawn.join("\n");
        if ranges.to_string() != drawn || ranges.kv_range(b, 0) != (0..0) || ranges.kv_range(0, t_q) != (0..0) {
            bail!("drawn as\n{ranges}expected\n{drawn}for {dims:?}");
        }
        Ok(())
    });
}

/// Checks that a mask joined in either order, with itself and with an empty mask, has the same masked keys and biases.
/// The order decides only where ALiBi counts from.
#[test]
fn mask_joining_commutes_and_associates() {
    let device = Device::Cpu;
    for_all(2_000, (recipes(&[DType::F64]), recipes(&[DType::F64])), |(one, other)| {
        let other = Recipe { dims: one.dims, dtype: one.dtype, ..other };
        let Dims { b, h, t_q, t_kv, .. } = one.dims;
        let one = both(&one, &device)?.1;
        let other = both(&other, &device)?.1;
        let written = |mask: &AttentionMask| -> Result<_> {
            let additive = mask.to_additive((b, h, t_q, t_kv), DType::F64, &device)?;
            let additive = values(&additive.broadcast_as((b, h, t_q, t_kv))?);
            // Sums of the same biases in another order.
            let rounded: Vec<_> = additive.into_iter().map(|bias| (bias * 1e9).round()).collect();
            Ok((rounded, mask.resolve(b, t_q, t_kv)?.to_string(), mask.fully_masked_rows()))
        };
        let drawn = |mask: &AttentionMask| mask.resolve(b, t_q, t_kv).map(|ranges| ranges.to_string());
        let none = AttentionMask::none();
        let uniform = [&one, &other].iter().any(|mask| mask.fully_masked_rows() == FullyMaskedRows::Uniform);
        let properties = [
            ("is uniform if either is", (one.and(&other).fully_masked_rows() == FullyMaskedRows::Uniform) == uniform),
            ("commutes", written(&one.and(&other))? == written(&other.and(&one))?),
            ("associates", written(&one.and(&other.and(&one)))? == written(&one.and(&other).and(&one))?),
            ("with nothing on the right", written(&one.and(&none))? == written(&one)?),
            ("with nothing on the left", written(&none.and(&one))? == written(&one)?),
            ("with itself", drawn(&one.and(&one))? == drawn(&one)?),
        ];
        match properties.into_iter().find(|(_, holds)| !holds) {
            Some((what, _)) => bail!("`and` {what}: no"),
            None => Ok(()),
        }
    });
}

fn valid_lens_from_lists_and_tensors_are_equal(device: &Device) -> Result<()> {
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let one = Tensor::new(&[3u8, 0], device)?.to_dtype(dtype)?;
        assert_eq!(ValidLens::from_tensor(&one)?, ValidLens::from(vec![3, 0]));
        let table = Tensor::new(&[[3u8, 0, 9], [1, 2, 3]], device)?.to_dtype(dtype)?;
        assert_eq!(ValidLens::try_from(&table)?, ValidLens::from(vec![vec![3, 0, 9], vec![1, 2, 3]]));
        let strided = table.t()?;
        assert_eq!(ValidLens::from_tensor(&strided)?, ValidLens::from(vec![vec![3, 1], vec![0, 2], vec![9, 3]]));
    }
    Ok(())
}

#[test]
fn mask_of_huge_sizes_does_not_overflow() {
    let far = AttentionMask::causal_with_offset(usize::MAX).resolve(1, 2, 2).expect("fits");
    assert_eq!(far.query_position(1), i64::MAX);
    let long = AttentionMask::causal().resolve(1, usize::MAX, 2).expect("fits");
    assert_eq!((long.query_position(0), long.kv_range(0, 0)), (i64::MIN, 0..0));
    assert_eq!((long.query_position(usize::MAX - 1), long.kv_range(0, usize::MAX - 1)), (1, 0..2));
    let wide = AttentionMask::causal().with_window(3).resolve(1, 2, usize::MAX).expect("fits");
    assert_eq!(wide.kv_range(0, 1), usize::MAX - 3..usize::MAX);
    let all = AttentionMask::causal_with_offset(usize::MAX).resolve(usize::MAX, usize::MAX, usize::MAX).expect("fits");
    assert_eq!(all.kv_range(usize::MAX - 1, 7), 0..usize::MAX);
    assert_eq!((all.kv_range(usize::MAX, 0), all.query_position(usize::MAX)), (0..0, i64::MAX));
}

/// Compares parts of some queries and some keys of two whole sequences.
#[test]
fn mask_of_part_equals_part_of_whole_mask() -> Result<()> {
    let masks = [
        AttentionMask::causal(),
        AttentionMask::causal_with_offset(2),
        AttentionMask::causal_with_offsets([-2, 3]),
        AttentionMask::causal_with_offsets([1, -4]).with_window(3),
        AttentionMask::none().with_local_window(1, 2),
    ];
    for mask in masks {
        let whole = mask.resolve(2, 7, 7)?;
        for (queries, keys) in [(0..7, 0..7), (2..4, 3..7), (5..7, 0..3)] {
            let of_part = |one: &AttentionMask| one.of_part(2, queries.clone(), keys.clone());
            for part in [of_part(&mask)?, of_part(&AttentionMask::none())?.and(&mask)] {
                let part = part.resolve(2, queries.len(), keys.len())?;
                for (b, query) in (0..2).flat_map(|b| queries.clone().map(move |query| (b, query))) {
                    let seen: Vec<_> = whole.kv_range(b, query).filter(|key| keys.contains(key)).collect();
                    let found = part.kv_range(b, query - queries.start).map(|key| keys.start + key);
                    assert_eq!(found.collect::<Vec<_>>(), seen, "{mask:?}, query {query} of {b}, keys {keys:?}");
                }
            }
        }
    }
    Ok(())
}

/// Calls with other sizes `(B, T_q, T_kv)` than the part of a mask, which has 2 sequences, 4 queries and 5 keys.
const OTHER_SIZES: [(usize, usize, usize); 6] = [(2, 6, 5), (2, 3, 5), (2, 4, 6), (2, 4, 4), (1, 4, 5), (3, 4, 5)];

#[test]
fn mask_of_part_with_other_sizes_is_an_error_on_every_path() -> Result<()> {
    let mask = AttentionMask::causal().of_part(2, 3..7, 2..7)?;
    let device = &Device::Cpu;
    let expected = "[attention_mask] the mask is `of_part` with 2 sequences, expected ";
    for (b, t_q, t_kv) in OTHER_SIZES {
        let expected = if b == 2 {
            format!(
                "[attention_mask] the mask is `of_part` with 4 queries and 5 keys, expected {t_q} queries and \
                 {t_kv} keys"
            )
        } else {
            format!("{expected}{b}")
        };
        for dtype in [DType::F32, DType::F64] {
            let tensor = |t| Tensor::zeros((b, 2, t, 8), dtype, device);
            let q = &tensor(t_q)?;
            let kv = &tensor(t_kv)?;
            let options = &SdpaOptions::default();
            let statistics = &StatisticsOptions::default();
            let texts = [
                error_text(scaled_dot_product_attention(q, kv, kv, &mask, options)),
                error_text(scaled_dot_product_attention(q, kv, kv, &mask, &reference())),
                error_text(attend(q, kv, kv, &mask, options)),
                error_text(scaled_dot_product_attention_with_lse(q, kv, kv, &mask, options)),
                error_text(scaled_dot_product_attention_with_statistics(q, kv, kv, &mask, options, statistics)),
                error_text(plan(q, kv, kv, &mask, options)),
                error_text(mask.to_additive((b, 2, t_q, t_kv), dtype, device)),
                error_text(mask.resolve(b, t_q, t_kv)),
            ];
            for text in texts {
                assert_eq!(text, expected, "{dtype:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn mask_of_part_returns_output_of_its_queries_on_every_path() -> Result<()> {
    let b = 2;
    let t = 7;
    let device = &Device::Cpu;
    let whole = AttentionMask::causal_with_offsets([1, -2]).with_window(4);
    let queries = 3..7;
    let keys = 0..7;
    let part = whole.of_part(b, queries.clone(), keys)?;
    for dtype in [DType::F32, DType::F64] {
        let q = Tensor::randn(0f32, 1.0, (b, 2, t, 8), device)?.to_dtype(dtype)?;
        let own = q.narrow(2, queries.start, queries.len())?;
        let expected = scaled_dot_product_attention(&q, &q, &q, &whole, &reference())?;
        let expected = expected.narrow(2, queries.start, queries.len())?;
        for options in [SdpaOptions::default(), reference()] {
            let found = scaled_dot_product_attention(&own, &q, &q, &part, &options)?;
            assert!(max_error(&found, &expected) < 1e-5, "{dtype:?}");
            assert!(max_error(&attend(&own, &q, &q, &part, &options)?.output, &expected) < 1e-5, "{dtype:?} weights");
        }
    }
    Ok(())
}

#[test]
fn masks_of_different_parts_do_not_join() -> Result<()> {
    let of_part = |queries, keys| AttentionMask::causal().of_part(2, queries, keys);
    let one = of_part(0..4, 0..5)?;
    let same = one.and(&of_part(0..4, 0..5)?);
    assert_eq!(same.resolve(2, 4, 5)?.to_string(), one.resolve(2, 4, 5)?.to_string());
    for other in [of_part(1..5, 0..5)?, of_part(0..4, 1..6)?, AttentionMask::none().of_part(1, 0..4, 0..5)?] {
        for joined in [one.and(&other), other.and(&one), one.and(&AttentionMask::none()).and(&other)] {
            assert_eq!(
                error_text(joined.resolve(2, 4, 5)),
                "[attention_mask] masks `of_part` of different parts were joined, expected masks of the same queries \
                 and keys"
            );
        }
    }
    Ok(())
}

#[test]
fn mask_of_part_has_the_entries_of_its_queries() -> Result<()> {
    let rows = |rows: [[usize; 7]; 2]| ValidLens::from(rows.map(Vec::from).to_vec());
    let lens = rows([[0, 1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2, 1]]);
    let starts = rows([[3, 3, 0, 1, 2, 0, 5], [1, 1, 4, 0, 2, 6, 0]]);
    let masks = [
        AttentionMask::none().with_valid_lens(lens.clone()),
        AttentionMask::none().with_starts(starts.clone()),
        AttentionMask::causal().with_prefix(lens).with_starts(starts),
    ];
    for mask in masks {
        let whole = mask.resolve(2, 7, 7)?;
        let part = mask.of_part(2, 2..5, 1..7)?.resolve(2, 3, 6)?;
        for (b, i) in (0..2).flat_map(|b| (0..3).map(move |i| (b, i))) {
            let expected: Vec<_> = whole.kv_range(b, 2 + i).filter(|&key| key >= 1).map(|key| key - 1).collect();
            assert_eq!(part.kv_range(b, i).collect::<Vec<_>>(), expected, "{mask:?}, query {i} of {b}");
        }
        assert!(error_text(mask.of_part(2, 5..8, 0..7)).contains("has 7 entries, expected one for each query up to"));
    }
    Ok(())
}

#[test]
fn mask_of_part_of_wrong_ranges_is_an_error_and_of_many_sequences_is_made_at_once() -> Result<()> {
    let causal = AttentionMask::causal();
    #[allow(clippy::reversed_empty_ranges, reason = "the mistake")]
    for (queries, keys) in [(3..2, 0..2), (0..2, 3..2)] {
        let text = error_text(causal.of_part(1, queries, keys));
        assert!(text.ends_with("of the part are 3..2, expected a range that ends at or after its start"), "{text}");
    }
    let ones = Tensor::ones((1, 4), DType::U8, &Device::Cpu)?;
    assert_eq!(
        error_text(AttentionMask::from_attention_mask(&ones)?.of_part(1, 0..2, 3..6)),
        "[attention_mask] the attention mask has 4 columns, expected one for each key up to 6"
    );
    let many = causal.of_part(1 << 40, 0..2, 0..2)?;
    assert_eq!(many.resolve(1 << 40, 2, 2)?.kv_range((1 << 40) - 1, 0), 0..1);
    let text = error_text(many.to_additive((1 << 40, 1, 2, 2), DType::F32, &Device::Cpu));
    assert!(text.contains("does not fit in memory"), "{text}");
    Ok(())
}

/// Checks views that repeat one entry, so that they have any size.
#[test]
fn masks_and_lengths_beyond_memory_are_an_error() -> Result<()> {
    let one = Tensor::ones((1, 1), DType::U8, &Device::Cpu)?;
    for text in [
        error_text(ValidLens::from_tensor(&one.squeeze(0)?.broadcast_as(1 << 46)?)),
        error_text(ValidLens::from_tensor(&one.broadcast_as((1 << 23, 1 << 23))?)),
        error_text(AttentionMask::from_attention_mask(&one.broadcast_as((1 << 23, 1 << 23))?)),
    ] {
        assert!(text.contains("does not fit in memory"), "{text}");
    }
    Ok(())
}

/// Checks that entries outside of a view are not read, and that entries that a view repeats are read once. On another
/// device than the CPU, no entries are read.
fn bool_mask_checks_only_entries_of_its_view(device: &Device) -> Result<()> {
    let bytes = Tensor::new(&[[7u8, 1, 0, 1], [9, 0, 1, 2]], device)?;
    let resolve = |keep: &Tensor| AttentionMask::none().with_bool_mask(keep).resolve(1, 2, 2).map(drop);
    resolve(&bytes.narrow(1, 1, 2)?)?;
    resolve(&bytes.narrow(1, 1, 2)?.t()?)?;
    resolve(&bytes.narrow(1, 1, 1)?.narrow(0, 0, 1)?.broadcast_as((1 << 20, 1 << 20))?)?;
    for keep in [bytes.clone(), bytes.narrow(1, 2, 2)?.t()?, bytes.narrow(1, 3, 1)?.broadcast_as((2, 1 << 40))?] {
        if !device.is_cpu() {
            resolve(&keep)?;
            continue;
        }
        let expected = format!(
            "[attention_mask] bool_mask has an entry {}, expected 1 (attend) or 0",
            if keep.elem_count() == 8 { 9 } else { 2 }
        );
        assert_eq!(error_text(resolve(&keep)), expected);
    }
    Ok(())
}

/// Checks an empty batch that is cut from a longer buffer: the view's offset is outside of the storage, where Candle's
/// copies panic.
fn mask_tensors_may_be_empty_views_past_the_end_of_their_buffer(device: &Device) -> Result<()> {
    let view = |shape: &[usize], dtype| {
        let mut shape = shape.to_vec();
        let last = shape.len() - 1;
        shape[last] += 3;
        Tensor::zeros(shape.as_slice(), dtype, device)?.narrow(last, 2, shape[last] - 3)
    };
    for dtype in [DType::U8, DType::U32, DType::I64] {
        assert_eq!(ValidLens::from_tensor(&view(&[0, 3], dtype)?)?, ValidLens::from(Vec::<Vec<usize>>::new()));
        assert!(AttentionMask::from_attention_mask(&view(&[0, 3], dtype)?)?.resolve(0, 1, 3)?.to_string().is_empty());
    }
    assert_eq!(ValidLens::from_tensor(&view(&[0], DType::U32)?)?, ValidLens::from(Vec::<usize>::new()));
    let no_queries = ValidLens::from(vec![vec![]; 2]);
    assert_eq!(ValidLens::from_tensor(&view(&[2, 0], DType::U32)?)?, no_queries);
    for dtype in [DType::F32, DType::F16] {
        let bias = view(&[0, 1, 4, 5], dtype)?;
        let keep = view(&[0, 1, 4, 5], DType::U8)?;
        let mask = AttentionMask::none().with_bool_mask(&keep).with_bias(&bias);
        assert_eq!(mask.to_additive((0, 2, 4, 5), DType::F32, device)?.dims(), [0, 1, 4, 5]);
        let q = view(&[0, 2, 4, 3], dtype)?;
        let kv = view(&[0, 2, 5, 3], dtype)?;
        let output = attend(&q, &kv, &kv, &mask, &reference())?;
        assert_eq!((output.output.dims(), output.weights.dims()), (&[0, 2, 4, 3][..], &[0, 2, 4, 5][..]));
    }
    Ok(())
}
