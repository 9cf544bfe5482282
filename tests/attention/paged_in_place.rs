//! Pages that the CPU kernel reads in place: the bits of the same keys and values in one piece, and the plans of calls
//! over pages.

use candle_attention::{
    PagedSequences, plan_paged, scaled_dot_product_attention_paged as paged,
    scaled_dot_product_attention_paged_with_lse as paged_with_lse,
    scaled_dot_product_attention_with_lse as attention_with_lse,
};

use crate::paged::{D, D_V, H, H_KV, Stored, random_rows, values};
use crate::*;

#[test]
fn plan_of_paged_sequences_says_whether_pages_are_read_in_place() -> Result<()> {
    let Stored { q, k_pool, v_pool, sequences, .. } = Stored::new(16, DType::F32, &CPU)?;
    let plan = |queries: &Tensor, options: &SdpaOptions| {
        plan_paged(queries, &k_pool, &v_pool, &sequences, &AttentionMask::causal(), options)
    };
    let plain = SdpaOptions::default;
    let in_place = plan(&q, &plain())?;
    assert_eq!(in_place.backend, Backend::Fused);
    assert!(in_place.reason.ends_with(", which reads pages in place"), "{in_place}");
    assert_eq!(plan(&q, &plain().with_backend(Backend::Reference))?.reason, "requested");
    let tracked = Var::from_tensor(&q)?;
    let of_gradients = plan(tracked.as_tensor(), &plain())?;
    let with_dropout = plan(&q, &plain().with_dropout(0.5, true))?;
    let reasons = [(of_gradients, "an input is tracked for gradients"), (with_dropout, "weights are dropped")];
    for (copied, reason) in reasons {
        assert_eq!(copied.backend, Backend::Fused);
        assert!(copied.reason.ends_with(&format!(", over a copy of the pages: {reason}")), "{copied}");
    }
    Ok(())
}

/// Checks sequences all of whose pages are one page: copies would take 16 TB for the plan and 32 GB for the call.
#[test]
fn plans_and_windows_over_pages_copy_no_keys() -> Result<()> {
    const PAGE_SIZE: usize = 1 << 16;
    let random = &mut Random::new(1);
    let q = random_rows(random, 1, H, D)?;
    let mut new_pool = |width: usize| random_rows(random, PAGE_SIZE, H_KV, width)?.unsqueeze(0);
    let (k_pool, v_pool) = (new_pool(D)?, new_pool(D)?);
    let of_pages = |count: usize| PagedSequences::new(vec![0, 1], vec![count * PAGE_SIZE], vec![vec![0; count]]);
    let window = AttentionMask::causal().with_window(9);
    let dropping = SdpaOptions::default().with_dropout(0.5, true);
    let copied = plan_paged(&q, &k_pool, &v_pool, &of_pages(1 << 20)?, &window, &dropping)?;
    assert!(copied.reason.ends_with(", over a copy of the pages: weights are dropped"), "{copied}");

    let options = SdpaOptions::default();
    let found = paged(&q, &k_pool, &v_pool, &of_pages(1 << 11)?, &window, &options)?;
    let last = |pool: &Tensor| pool.squeeze(0)?.narrow(0, PAGE_SIZE - 9, 9)?.transpose(0, 1);
    let own_q = q.transpose(0, 1)?;
    let expected = on_reference_path(&own_q, &last(&k_pool)?, &last(&v_pool)?, &options)?.transpose(0, 1)?;
    let difference = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(difference < 1e-6, "{difference}");
    Ok(())
}

/// Returns attention to all keys on the reference path.
fn on_reference_path(q: &Tensor, k: &Tensor, v: &Tensor, options: &SdpaOptions) -> Result<Tensor> {
    let options = options.clone().with_backend(Backend::Reference);
    scaled_dot_product_attention(q, k, v, &AttentionMask::none(), &options)
}

/// A step of a server over pools of pages: a mask, options, and sequences some of which begin with the same pages.
struct Step {
    dtype: DType,
    page_size: usize,
    heads: usize,
    key_heads: usize,
    mask: AttentionMask,
    options: SdpaOptions,
    /// The number of queries of each sequence.
    queries: Vec<usize>,
    /// The length of each sequence.
    lens: Vec<usize>,
    pages: Vec<Vec<u32>>,
}

/// The pages of a pool of a step.
const PAGES: usize = 60;

impl Step {
    fn draw(random: &mut Random) -> Result<Self> {
        let dtype = [DType::F32, DType::BF16, DType::F16][random.up_to(2)];
        let page_size = [16, 24, 32][random.up_to(2)];
        let (heads, key_heads) = [(2, 2), (6, 2), (4, 1)][random.up_to(2)];
        let causal = AttentionMask::causal();
        let mask = match random.up_to(2) {
            0 => causal,
            1 => causal.with_window(1 + random.up_to(60)),
            _ => causal.with_chunk(1 + random.up_to(40)),
        };
        let by_head = |source: &mut Random| -> Result<Tensor> {
            let numbers: Vec<f32> = (0..heads).map(|_| source.between(0.0, 1.0) as f32).collect();
            Tensor::from_vec(numbers, heads, &CPU)?.to_dtype(dtype)
        };
        let mut options = SdpaOptions::default();
        if random.chance(0.5) {
            options = options.with_softcap(1.5);
        }
        if random.chance(0.5) {
            options = options.with_alibi_slopes(&by_head(random)?);
        }
        if random.chance(0.5) {
            options = options.with_sinks(&by_head(random)?);
        }
        let mut queries = Vec::new();
        let mut lens = Vec::new();
        let mut pages: Vec<Vec<u32>> = Vec::new();
        for s in 0..1 + random.up_to(7) {
            // Tokens, chunks of a length that several have, and chunks of any length.
            queries.push(match random.up_to(3) {
                0 | 1 => 1,
                2 => 16,
                _ => random.up_to(70),
            });
            lens.push(queries[s] + random.up_to(200));
            let mut own: Vec<u32> = Vec::new();
            if s > 0 && random.chance(0.5) {
                own.clone_from(&pages[random.up_to(s - 1)]);
            }
            own.truncate(lens[s] / page_size);
            own.resize_with(lens[s].div_ceil(page_size), || random.up_to(PAGES - 1) as u32);
            pages.push(own);
        }
        Ok(Self { dtype, page_size, heads, key_heads, mask, options, queries, lens, pages })
    }

    fn check(&self, random: &mut Random, seed: u64) -> Result<()> {
        let Self { dtype, page_size, heads, key_heads, mask, options, queries, lens, pages } = self;
        let mut ends = vec![0];
        for count in queries {
            ends.push(ends.last().unwrap_or(&0) + count);
        }
        let q = random_rows(random, ends[queries.len()], *heads, D)?.to_dtype(*dtype)?;
        let mut new_pool = |width: usize| {
            let rows = random_rows(random, PAGES * page_size, *key_heads, width)?;
            rows.reshape((PAGES, *page_size, *key_heads, width))?.to_dtype(*dtype)
        };
        let (k_pool, v_pool) = (new_pool(D)?, new_pool(D_V)?);
        let sequences = PagedSequences::new(ends.clone(), lens.clone(), pages.clone())?;
        let (found, lse) = paged_with_lse(&q, &k_pool, &v_pool, &sequences, mask, options)?;
        for s in 0..queries.len() {
            let own_pages = Tensor::new(pages[s].as_slice(), &CPU)?;
            let in_one_piece =
                |pool: &Tensor| pool.index_select(&own_pages, 0)?.flatten(0, 1)?.narrow(0, 0, lens[s])?.transpose(0, 1);
            if queries[s] == 0 {
                continue;
            }
            let own_q = q.narrow(0, ends[s], queries[s])?.transpose(0, 1)?;
            let (k, v) = (in_one_piece(&k_pool)?, in_one_piece(&v_pool)?);
            let (expected, expected_lse) = attention_with_lse(&own_q, &k, &v, mask, options)?;
            let own = found.narrow(0, ends[s], queries[s])?.transpose(0, 1)?;
            let what = format!("seed {seed}: {} queries, {} keys, {dtype:?}, {mask:?}", queries[s], lens[s]);
            assert!(values(&own)? == values(&expected)?, "{what}");
            assert!(values(&lse.narrow(1, ends[s], queries[s])?)? == values(&expected_lse)?, "{what}");
        }
        Ok(())
    }
}

#[test]
fn paged_steps_of_random_schedules_have_the_bits_of_each_sequence_in_one_piece() -> Result<()> {
    for seed in 0..120 {
        let random = &mut Random::new(seed);
        Step::draw(random)?.check(random, seed)?;
    }
    Ok(())
}

/// Checks sequences that are long enough for several parts of the keys.
#[test]
fn paged_sequences_of_several_parts_have_the_bits_of_keys_in_one_piece() -> Result<()> {
    let lens = vec![1100, 90, 35, 1030, 1500, 16, 2100];
    let queries = vec![1, 40, 1, 3, 40, 1, 1];
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625, 0.03, 0.015], &CPU)?;
    for dtype in [DType::F32, DType::BF16] {
        let random = &mut Random::new(3);
        let mut pages: Vec<Vec<u32>> = Vec::new();
        for len in &lens {
            pages.push((0..usize::div_ceil(*len, 32)).map(|_| random.up_to(PAGES - 1) as u32).collect());
        }
        let step = Step {
            dtype,
            page_size: 32,
            heads: H,
            key_heads: H_KV,
            mask: AttentionMask::causal(),
            options: SdpaOptions::default().with_alibi_slopes(&slopes.to_dtype(dtype)?),
            queries: queries.clone(),
            lens: lens.clone(),
            pages,
        };
        step.check(random, 3)?;
    }
    Ok(())
}
