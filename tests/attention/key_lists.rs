//! Lists of keys against a boolean mask of the same keys, which plain loops make.

use candle_attention::{
    KeyLists, PagedSequences, plan_paged, scaled_dot_product_attention_paged as paged,
    scaled_dot_product_attention_varlen as varlen,
};

use crate::paged::random_rows;
use crate::*;

/// The sizes of a call, and its lists of keys.
#[derive(Debug, Clone, Copy)]
struct Lists {
    b: usize,
    h: usize,
    h_kv: usize,
    t_q: usize,
    t_kv: usize,
    /// 1, or `h_kv`.
    heads: usize,
    query_block: usize,
    key_block: usize,
    /// Entries of a list.
    n: usize,
    d: usize,
}

const PROMPT: Lists =
    Lists { b: 2, h: 4, h_kv: 2, t_q: 7, t_kv: 90, heads: 1, query_block: 1, key_block: 1, n: 3, d: 16 };

impl Lists {
    /// Returns random lists with entries of -1 and with keys that are listed twice.
    fn entries(self, random: &mut Random) -> Vec<i64> {
        let blocks = self.t_q.div_ceil(self.query_block);
        let last = self.t_kv.div_ceil(self.key_block) - 1;
        let mut entries = Vec::new();
        for _ in 0..self.b * self.heads * blocks {
            for n in 0..self.n {
                entries.push(match random.up_to(4) {
                    0 => -1,
                    1 if n > 0 => entries[entries.len() - 1],
                    _ => random.up_to(last) as i64,
                });
            }
        }
        entries
    }

    fn lists(self, entries: &[i64]) -> Result<KeyLists> {
        let blocks = self.t_q.div_ceil(self.query_block);
        let entries = Tensor::from_slice(entries, (self.b, self.heads, blocks, self.n), &CPU)?;
        KeyLists::new(&entries)?.with_query_blocks(self.query_block)?.with_key_blocks(self.key_block)
    }

    /// Returns the boolean mask (B, H, T_q, T_kv) of lists.
    fn mask(self, entries: &[i64]) -> Result<Tensor> {
        let blocks = self.t_q.div_ceil(self.query_block);
        let mut allowed = Vec::new();
        for b in 0..self.b {
            for head in 0..self.h {
                let list_head = if self.heads == 1 { 0 } else { head / (self.h / self.h_kv) };
                for query in 0..self.t_q {
                    let list = ((b * self.heads + list_head) * blocks + query / self.query_block) * self.n;
                    let list = &entries[list..][..self.n];
                    let is_named = |key: usize| list.contains(&((key / self.key_block) as i64));
                    allowed.extend((0..self.t_kv).map(|key| u8::from(is_named(key))));
                }
            }
        }
        Tensor::from_vec(allowed, (self.b, self.h, self.t_q, self.t_kv), &CPU)
    }

    fn qkv(self, random: &mut Random) -> Result<[Var; 3]> {
        let Self { b, h, h_kv, t_q, t_kv, d, .. } = self;
        let [q, k, v] = [[b, h, t_q, d], [b, h_kv, t_kv, d], [b, h_kv, t_kv, d + 8]].map(|dims| {
            let numbers: Vec<f32> = (0..dims.iter().product()).map(|_| random.between(-1.0, 1.0) as f32).collect();
            Var::from_tensor(&Tensor::from_vec(numbers, &dims, &CPU)?)
        });
        Ok([q?, k?, v?])
    }
}

/// Checks that numbers agree within `tolerance`, and that none is NaN.
#[track_caller]
fn check_close(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert!(values(expected).iter().all(|number| !number.is_nan()), "{what}: NaN is expected");
    assert_close(found, expected, tolerance, what);
}

/// Checks output, log-sum-exp and gradients of a call with lists against the reference path with a boolean mask.
fn check_lists(sizes: Lists, mask: &AttentionMask, options: &SdpaOptions, dtype: DType, is_listed: bool) -> Result<()> {
    let random = &mut Random::new(sizes.n as u64 * 31 + sizes.t_q as u64);
    let entries = sizes.entries(random);
    let [q, k, v] = sizes.qkv(random)?;
    let sinks = Var::from_tensor(&Tensor::arange(0f32, sizes.h as f32, &CPU)?)?;
    let options = options.clone().with_sinks(sinks.as_tensor());
    let inputs = [q.as_tensor(), k.as_tensor(), v.as_tensor(), sinks.as_tensor()];
    let listed = mask.clone().with_key_lists(&sizes.lists(&entries)?);
    let as_mask = mask.clone().with_bool_mask(&sizes.mask(&entries)?);
    let [own_q, own_k, own_v] = [&q, &k, &v].map(|var| var.to_dtype(dtype));
    let (own_q, own_k, own_v) = (own_q?, own_k?, own_v?);
    let plan = candle_attention::plan(&own_q, &own_k, &own_v, &listed, &options)?;
    assert_eq!(plan.reason.contains("over the listed keys"), is_listed, "{sizes:?}: {plan}");

    let of = |mask_of_call: &AttentionMask, chosen: &SdpaOptions, qkv: [&Tensor; 3]| -> Result<Vec<Tensor>> {
        let (output, lse) = scaled_dot_product_attention_with_lse(qkv[0], qkv[1], qkv[2], mask_of_call, chosen)?;
        let plain = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], mask_of_call, chosen)?;
        check_close(&plain, &output, 0.0, "the output alone");
        // A fully masked query has -inf.
        let finite = lse.eq(f64::NEG_INFINITY)?.where_cond(&lse.zeros_like()?, &lse)?;
        let joined = Tensor::cat(&[output.to_dtype(DType::F32)?, finite.unsqueeze(3)?], 3)?;
        Ok([vec![output, lse], gradients(&joined, &inputs)?].concat())
    };
    let expected = of(&as_mask, &options.clone().with_backend(Backend::Reference), [&q, &k, &v])?;
    let specified = of(&listed, &options.clone().with_backend(Backend::Reference), [&q, &k, &v])?;
    let found = of(&listed, &options, [&own_q, &own_k, &own_v])?;
    let names = ["output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v", "gradient of sinks"];
    let tolerance = if dtype == DType::F32 { 2e-5 } else { 0.06 };
    for (n, name) in names.into_iter().enumerate() {
        check_close(&specified[n], &expected[n], 0.0, name);
        check_close(&found[n], &expected[n], tolerance, name);
    }
    Ok(())
}

#[test]
fn key_lists_match_boolean_mask_with_gradients() -> Result<()> {
    let shapes = [
        PROMPT,
        Lists { heads: 2, ..PROMPT },
        Lists { query_block: 3, ..PROMPT },
        Lists { query_block: 3, heads: 2, key_block: 4, n: 2, ..PROMPT },
        Lists { h: 2, t_q: 1, b: 1, ..PROMPT },
        Lists { h: 8, h_kv: 1, t_kv: 400, n: 8, ..PROMPT },
    ];
    for sizes in shapes {
        let lens = AttentionMask::none().with_valid_lens(vec![60; sizes.b]);
        for mask in [AttentionMask::none(), AttentionMask::causal().with_window(40), AttentionMask::causal().and(&lens)]
        {
            check_lists(sizes, &mask, &SdpaOptions::default(), DType::F32, true)?;
        }
    }
    // Too many rows for one part.
    let parts = Lists { b: 1, h: 8, h_kv: 8, t_q: 11, t_kv: 2000, n: 100, d: 64, ..PROMPT };
    check_lists(parts, &AttentionMask::none(), &SdpaOptions::default(), DType::F32, true)?;
    let softcap = SdpaOptions::default().with_softcap(0.5).with_scale(0.7).with_output_layout(OutputLayout::Bthd);
    check_lists(PROMPT, &AttentionMask::causal(), &softcap, DType::F32, true)?;
    check_lists(PROMPT, &AttentionMask::causal(), &softcap, DType::BF16, true)
}

#[test]
fn key_lists_with_modifiers_of_all_keys_are_a_boolean_mask() -> Result<()> {
    let random = &mut Random::new(5);
    let bias: Vec<f32> = (0..PROMPT.t_q * PROMPT.t_kv).map(|_| random.between(-1.0, 1.0) as f32).collect();
    let bias = Tensor::from_vec(bias, (PROMPT.t_q, PROMPT.t_kv), &CPU)?;
    let with_bias = AttentionMask::causal().with_bias(&bias);
    check_lists(PROMPT, &with_bias, &SdpaOptions::default(), DType::F32, false)?;
    let slopes = SdpaOptions::default().with_alibi_slopes(&Tensor::new(&[0.1f32, 0.2, 0.3, 0.4], &CPU)?);
    check_lists(PROMPT, &AttentionMask::causal(), &slopes, DType::F32, false)?;
    // Lists of most keys.
    check_lists(Lists { n: 80, ..PROMPT }, &AttentionMask::causal(), &SdpaOptions::default(), DType::F32, false)?;

    let entries = PROMPT.entries(random);
    let [q, k, v] = PROMPT.qkv(random)?;
    let [q, k, v] = [&q, &k, &v].map(|var| var.detach());
    let listed = AttentionMask::causal().with_key_lists(&PROMPT.lists(&entries)?);
    let as_mask = AttentionMask::causal().with_bool_mask(&PROMPT.mask(&entries)?);
    let options = SdpaOptions::default();
    let weights = scaled_dot_product_attention_with_weights(&q, &k, &v, &listed, &options)?.weights;
    let expected = scaled_dot_product_attention_with_weights(&q, &k, &v, &as_mask, &options)?.weights;
    check_close(&weights, &expected, 0.0, "weights");
    let wanted = StatisticsOptions::default().with_top_keys(2);
    let (_, found) = scaled_dot_product_attention_with_statistics(&q, &k, &v, &listed, &options, &wanted)?;
    let (_, right) = scaled_dot_product_attention_with_statistics(&q, &k, &v, &as_mask, &options, &wanted)?;
    check_close(&found.entropy, &right.entropy, 0.0, "entropy");
    check_close(&found.key_weight_sums, &right.key_weight_sums, 0.0, "sums");
    // Lists of two masks: the keys that both name.
    let others = PROMPT.entries(random);
    let both = listed.and(&AttentionMask::none().with_key_lists(&PROMPT.lists(&others)?));
    let both_as_mask = as_mask.with_bool_mask(&PROMPT.mask(&others)?);
    let of_both = scaled_dot_product_attention(&q, &k, &v, &both, &options)?;
    check_close(&of_both, &scaled_dot_product_attention(&q, &k, &v, &both_as_mask, &options)?, 0.0, "both");
    Ok(())
}

#[test]
fn key_lists_without_a_key_return_zeros() -> Result<()> {
    let [q, k, v] = PROMPT.qkv(&mut Random::new(3))?;
    let none = KeyLists::new(&Tensor::full(-1i64, (PROMPT.t_q, 2), &CPU)?)?;
    let mask = AttentionMask::none().with_key_lists(&none);
    let (output, lse) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &SdpaOptions::default())?;
    assert!(output.flatten_all()?.to_vec1::<f32>()?.iter().all(|&number| number == 0.0));
    assert!(lse.flatten_all()?.to_vec1::<f32>()?.iter().all(|&number| number == f32::NEG_INFINITY));
    // NaN in a key that no list names reaches no query.
    let named = KeyLists::new(&Tensor::new(&[[1u32, 4]; 7], &CPU)?)?;
    let some = AttentionMask::none().with_key_lists(&named);
    let clean = scaled_dot_product_attention(&q, &k, &v, &some, &SdpaOptions::default())?;
    let poison = Tensor::full(f32::NAN, (2, 2, 80, 16), &CPU)?;
    let poisoned = Tensor::cat(&[&k.narrow(2, 0, 10)?, &poison], 2)?;
    let found = scaled_dot_product_attention(&q, &poisoned, &v, &some, &SdpaOptions::default())?;
    check_close(&found, &clean, 0.0, "output");
    Ok(())
}

#[test]
fn key_lists_of_packed_and_paged_sequences_match_separate_calls() -> Result<()> {
    let random = &mut Random::new(11);
    let lens_q = [1usize, 5, 0, 2];
    let lens_kv = [70usize, 33, 20, 64];
    let (h, h_kv, d, n) = (4, 2, 16, 2);
    let q = random_rows(random, 8, h, d)?;
    let k = random_rows(random, lens_kv.iter().sum(), h_kv, d)?;
    let v = random_rows(random, lens_kv.iter().sum(), h_kv, d)?;
    let mut entries = Vec::new();
    for _ in 0..h_kv {
        for (t_q, t_kv) in lens_q.iter().zip(lens_kv) {
            entries.extend((0..t_q * n).map(|_| random.up_to(t_kv - 1) as i64));
        }
    }
    let entries = Tensor::from_vec(entries, (h_kv, 8, n), &CPU)?;
    let packed = PackedSequences::from_lens(&lens_q, &lens_kv)?;
    let mask = AttentionMask::causal().with_key_lists(&KeyLists::new(&entries)?);
    for options in [SdpaOptions::default(), SdpaOptions::default().with_backend(Backend::Reference)] {
        let found = varlen(&q, &k, &v, &packed, &mask, &options)?;
        for s in 0..lens_q.len() {
            let (queries, keys) = (packed.queries(s), packed.keys(s));
            if queries.is_empty() {
                continue;
            }
            let heads = |xs: &Tensor, own: &std::ops::Range<usize>| xs.narrow(0, own.start, own.len())?.transpose(0, 1);
            let own = KeyLists::new(&entries.narrow(1, queries.start, queries.len())?)?;
            let own_mask = AttentionMask::causal().with_key_lists(&own);
            let reference = SdpaOptions::default().with_backend(Backend::Reference);
            let (q, k, v) = (heads(&q, &queries)?, heads(&k, &keys)?, heads(&v, &keys)?);
            let expected = scaled_dot_product_attention(&q, &k, &v, &own_mask, &reference)?;
            check_close(&heads(&found, &queries)?, &expected, 1e-5, "a sequence");
        }
    }

    // Pages of 16 positions, in the order 0, 2, 4, .. and then 1, 3, ..
    let pages: usize = lens_kv.iter().map(|len| len.div_ceil(16)).sum();
    let order: Vec<u32> = (0..pages as u32).step_by(2).chain((1..pages as u32).step_by(2)).collect();
    let mut pool_rows = vec![0u32; pages * 16];
    let mut tables = Vec::new();
    let mut next = order.into_iter();
    for (s, len) in lens_kv.into_iter().enumerate() {
        let table: Vec<u32> = next.by_ref().take(len.div_ceil(16)).collect();
        for position in 0..len {
            pool_rows[table[position / 16] as usize * 16 + position % 16] = (packed.keys(s).start + position) as u32;
        }
        tables.push(table);
    }
    let pool_rows = Tensor::from_vec(pool_rows, pages * 16, &CPU)?;
    let pool = |xs: &Tensor| xs.index_select(&pool_rows, 0)?.reshape((pages, 16, h_kv, d));
    let (k_pool, v_pool) = (pool(&k)?, pool(&v)?);
    let sequences = PagedSequences::new(vec![0, 1, 6, 6, 8], lens_kv.to_vec(), tables)?;
    let options = SdpaOptions::default();
    let plan = plan_paged(&q, &k_pool, &v_pool, &sequences, &mask, &options)?;
    assert!(plan.reason.contains("over the listed keys"), "{plan}");
    let expected = varlen(&q, &k, &v, &packed, &mask, &options)?;
    check_close(&paged(&q, &k_pool, &v_pool, &sequences, &mask, &options)?, &expected, 0.0, "pages");
    let reference = options.clone().with_backend(Backend::Reference);
    check_close(&paged(&q, &k_pool, &v_pool, &sequences, &mask, &reference)?, &expected, 1e-5, "pages");

    let factors = random_rows(random, 8, h, d)?;
    let check_gradients = |own: [&Tensor; 2], attend: &dyn Fn([&Tensor; 3], &SdpaOptions) -> Result<Tensor>| {
        let inputs = [Var::from_tensor(&q)?, Var::from_tensor(own[0])?, Var::from_tensor(own[1])?];
        let of = |chosen: &SdpaOptions| -> Result<Vec<Tensor>> {
            let ys = attend([&inputs[0], &inputs[1], &inputs[2]], chosen)?;
            gradients(&(ys * &factors)?, &[&inputs[0], &inputs[1], &inputs[2]])
        };
        for (found, specified) in of(&options)?.iter().zip(of(&reference)?) {
            check_close(found, &specified, 2e-5, "a gradient");
        }
        Ok::<(), candle_core::Error>(())
    };
    check_gradients([&k, &v], &|inputs, chosen| varlen(inputs[0], inputs[1], inputs[2], &packed, &mask, chosen))?;
    check_gradients([&k_pool, &v_pool], &|inputs, chosen| {
        paged(inputs[0], inputs[1], inputs[2], &sequences, &mask, chosen)
    })
}

#[test]
fn key_lists_in_a_layer_with_a_cache_match_one_call() -> Result<()> {
    let (t, chunk) = (50, 10);
    let layer = seeded::layer(&Config::new(32, 4).with_num_kv_heads(2).with_causal(true), DType::F32, &CPU)?;
    let random = &mut Random::new(2);
    let xs: Vec<f32> = (0..2 * t * 32).map(|_| random.between(-1.0, 1.0) as f32).collect();
    let xs = Tensor::from_vec(xs, (2, t, 32), &CPU)?;
    let entries: Vec<i64> = (0..2 * t).flat_map(|i| [(i % t) as i64, ((i % t) / 2) as i64, -1]).collect();
    let entries = Tensor::from_vec(entries, (2, 1, t, 3), &CPU)?;
    let mask = AttentionMask::none().with_key_lists(&KeyLists::new(&entries)?);
    let whole = layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))?;
    let mut cache = AttentionCache::default();
    for start in (0..t).step_by(chunk) {
        let own = KeyLists::new(&entries.narrow(2, start, chunk)?)?;
        let own_mask = AttentionMask::none().with_key_lists(&own);
        let part = xs.narrow(1, start, chunk)?;
        let input = AttentionInput::new(&part).with_mask(&own_mask).with_cache(&mut cache);
        check_close(&layer.forward_with(input)?, &whole.narrow(1, start, chunk)?, 1e-5, "a chunk");
    }
    Ok(())
}

#[test]
fn key_lists_with_a_cache_of_8_bits_match_boolean_mask() -> Result<()> {
    let (t, chunk) = (50, 10);
    let layer = seeded::layer(&Config::new(32, 4).with_num_kv_heads(2).with_causal(true), DType::F32, &CPU)?;
    let xs = random_rows(&mut Random::new(4), t, 1, 32)?.squeeze(1)?.unsqueeze(0)?;
    let entries: Vec<i64> = (0..t).flat_map(|i| [i as i64, (i / 2) as i64, -1]).collect();
    let entries = Tensor::from_vec(entries, (1, 1, t, 3), &CPU)?;
    for backend in [Backend::Auto, Backend::Fused, Backend::Reference] {
        let cache = || AttentionCache::new(&AttentionCacheConfig::new().with_q8());
        let (mut by_lists, mut by_mask) = (cache()?, cache()?);
        for start in (0..t).step_by(chunk) {
            let lists = entries.narrow(2, start, chunk)?;
            let end = start + chunk;
            let mut allowed = vec![0u8; chunk * end];
            for (i, row) in allowed.chunks_exact_mut(end).enumerate() {
                row[start + i] = 1;
                row[(start + i) / 2] = 1;
            }
            let allowed = Tensor::from_vec(allowed, (chunk, end), &CPU)?;
            let part = xs.narrow(1, start, chunk)?;
            let masks = [
                AttentionMask::none().with_key_lists(&KeyLists::new(&lists)?),
                AttentionMask::none().with_bool_mask(&allowed),
            ];
            let input = |n: usize| AttentionInput::new(&part).with_mask(&masks[n]).with_backend(backend);
            let found = layer.forward_with(input(0).with_cache(&mut by_lists))?;
            let expected = layer.forward_with(input(1).with_cache(&mut by_mask))?;
            assert_close(&found, &expected, 1e-5, &format!("{backend:?}, from {start}"));
        }
    }
    Ok(())
}

#[test]
fn key_lists_that_do_not_fit_are_errors() -> Result<()> {
    let [q, k, v] = PROMPT.qkv(&mut Random::new(3))?;
    let error = |lists: Result<KeyLists>| -> String {
        let mask = match lists {
            Ok(lists) => AttentionMask::none().with_key_lists(&lists),
            Err(error) => return error.to_string(),
        };
        let found = scaled_dot_product_attention(&q, &k, &v, &mask, &SdpaOptions::default());
        found.expect_err("lists that do not fit").to_string()
    };
    let of = |entry: i64, shape: &[usize]| KeyLists::new(&Tensor::full(entry, shape, &CPU)?);
    let expected = [
        (of(90, &[7, 2]), "list 0 of head 0 of sequence 0 has key 90, expected -1 (none) to 89"),
        (of(-2, &[7, 2]), "list 0 of head 0 of sequence 0 has key -2, expected -1 (none) to 89"),
        (of(9, &[7, 2])?.with_key_blocks(10), "has block of keys 9, expected -1 (none) to 8"),
        (of(0, &[6, 2]), "key lists have shape [1, 1, 6, 2], expected 2 or 1 sequences and 7 blocks of queries"),
        (of(0, &[7, 2])?.with_query_blocks(2), "expected 2 or 1 sequences and 4 blocks of queries"),
        (of(0, &[3, 1, 7, 2]), "expected 2 or 1 sequences and 7 blocks of queries"),
        (of(0, &[4, 7, 2]), "key lists have 4 heads, expected 1 or one for each of 2 key heads"),
        (of(0, &[7]), "key lists have shape [7], expected (B, H_kv, T_q, n) or (H_kv, T_q, n) or (T_q, n)"),
        (of(0, &[7, 2])?.with_key_blocks(0), "the block of keys is 0, expected at least 1"),
        (of(0, &[7, 2])?.with_query_blocks(0), "the block of queries is 0, expected at least 1"),
        (KeyLists::new(&Tensor::zeros((7, 2), DType::F32, &CPU)?), "key lists have dtype F32"),
    ];
    for (lists, text) in expected {
        let found = error(lists);
        assert!(found.contains(text) && found.starts_with("[attention_mask]"), "{found:?}, expected {text:?}");
    }
    // A batch without queries may have any size.
    let of_batch = |t: usize| Tensor::zeros((1, 1, t, 4), DType::F32, &CPU)?.broadcast_as((1 << 56, 1, t, 4));
    let lists = AttentionMask::none().with_key_lists(&of(0, &[0, 2])?);
    let found =
        scaled_dot_product_attention(&of_batch(0)?, &of_batch(3)?, &of_batch(3)?, &lists, &SdpaOptions::default());
    assert!(found.expect_err("a large batch").to_string().contains("sequences does not fit in memory"));
    let of_part = AttentionMask::none().with_key_lists(&of(0, &[7, 2])?).of_part(2, 0..7, 0..90);
    assert!(of_part.expect_err("a part").to_string().contains("the mask has key lists"));
    Ok(())
}
