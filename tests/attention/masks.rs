//! What masks mean for any numbers: one rule for a query and a key, however it is asked for.

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

/// Some numbers of a mask become as large as they can be.
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
            Part::Band(left, right) => numbers.extend([left, right]),
            Part::Keep(_) | Part::Bias(_) => {}
        }
    }
    for number in numbers {
        if random.chance(0.5) {
            *number = HUGE[random.up_to(5)];
        }
    }
}

/// A random mask as the oracle has it and as the crate has it.
fn both(recipe: &Recipe, device: &Device) -> Result<(Case, AttentionMask)> {
    let (mut case, mut random) = (recipe.case(), Random::new(recipe.seed));
    if recipe.seed.is_multiple_of(3) {
        case.masks.iter_mut().for_each(|mask| enlarge(mask, &mut random));
    }
    let mask = Call::new(&case, recipe.dtype, device)?.mask;
    Ok((case, mask))
}

/// `kv_range`, `query_position`, `Display` and `to_additive` are compared with the oracle's rule for one query and one
/// key.
fn mask_with_random_constraints_matches_oracle(device: &Device) {
    let dtypes: &[DType] = if device.is_metal() { &[DType::F32] } else { &[DType::F32, DType::F64] };
    for_all(5_000, recipes(dtypes), |recipe| {
        let dims @ Dims { b, h, t_q, t_kv, .. } = recipe.dims;
        let (case, mask) = both(&recipe, device)?;
        let additive = mask.to_additive((b, h, t_q, t_kv), recipe.dtype, device)?;
        let (ranges, additive) = (mask.resolve(b, t_q, t_kv)?, values(&additive.broadcast_as((b, h, t_q, t_kv))?));
        let (mut structural, biases) = (case.clone(), Case { options: Options::default(), ..case.clone() });
        let is_interval = |part: &Part| !matches!(part, Part::Keep(_) | Part::Bias(_));
        structural.masks.iter_mut().for_each(|mask| mask.parts.retain(is_interval));
        structural.options.alibi_slopes = None;
        let mut drawn = vec![String::new(); b];
        for (b, i) in (0..b).flat_map(|b| (0..t_q).map(move |i| (b, i))) {
            let seen: Vec<usize> = (0..t_kv).filter(|&j| structural.sees([b, 0, i, j])).collect();
            let range = ranges.kv_range(b, i);
            if range.clone().collect::<Vec<_>>() != seen || (seen.is_empty() && range != (0..0)) {
                bail!("query {i} of {b} sees {seen:?}, not {range:?}");
            }
            let position = case.position(0, i).clamp(i64::MIN.into(), i64::MAX.into());
            if i128::from(ranges.query_position(i)) != position {
                bail!("query {i} stands at {}, expected {position}", ranges.query_position(i));
            }
            let row: Vec<_> = (0..t_kv).map(|j| if seen.contains(&j) { "1" } else { "." }).collect();
            drawn[b].push_str(&format!("{}\n", row.join(" ")));
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

/// Joined in either order, with itself and with an empty mask, a mask has the same masked keys and biases. The order
/// decides only where ALiBi counts from.
#[test]
fn mask_joining_commutes_and_associates() {
    let device = Device::Cpu;
    for_all(2_000, (recipes(&[DType::F64]), recipes(&[DType::F64])), |(one, other)| {
        let other = Recipe { dims: one.dims, dtype: one.dtype, ..other };
        let Dims { b, h, t_q, t_kv, .. } = one.dims;
        let (one, other) = (both(&one, &device)?.1, both(&other, &device)?.1);
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

/// Parts are some queries and some keys of two whole sequences.
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
            let of_part = |mask: &AttentionMask| mask.of_part(2, queries.clone(), keys.clone());
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

/// Entries outside a view are not checked, and entries that a view repeats are checked once.
fn bool_mask_checks_only_entries_of_its_view(device: &Device) -> Result<()> {
    let bytes = Tensor::new(&[[7u8, 1, 0, 1], [9, 0, 1, 2]], device)?;
    let resolve = |keep: &Tensor| AttentionMask::none().with_bool_mask(keep).resolve(1, 2, 2).map(drop);
    resolve(&bytes.narrow(1, 1, 2)?)?;
    resolve(&bytes.narrow(1, 1, 2)?.t()?)?;
    resolve(&bytes.narrow(1, 1, 1)?.narrow(0, 0, 1)?.broadcast_as((1 << 20, 1 << 20))?)?;
    for keep in [bytes.clone(), bytes.narrow(1, 2, 2)?.t()?, bytes.narrow(1, 3, 1)?.broadcast_as((2, 1 << 40))?] {
        let expected = format!(
            "[attention_mask] keep has an entry {}, expected ones (the key is seen) and zeros",
            if keep.elem_count() == 8 { 9 } else { 2 }
        );
        assert_eq!(error_text(resolve(&keep)), expected);
    }
    Ok(())
}

/// Of an empty batch that is cut from a longer buffer, the view's offset lies outside the storage, where Candle's
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
        let (q, kv) = (view(&[0, 2, 4, 3], dtype)?, view(&[0, 2, 5, 3], dtype)?);
        let output = attend(&q, &kv, &kv, &mask, &reference())?;
        assert_eq!((output.output.dims(), output.weights.dims()), (&[0, 2, 4, 3][..], &[0, 2, 4, 5][..]));
    }
    Ok(())
}
