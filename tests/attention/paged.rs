//! Keys and values in pages against the same ones packed in one piece.

use candle_attention::{
    PagedSequences, scaled_dot_product_attention_paged as paged,
    scaled_dot_product_attention_paged_with_lse as paged_with_lse, scaled_dot_product_attention_varlen as varlen,
    scaled_dot_product_attention_varlen_with_lse as varlen_with_lse,
};

use crate::*;

crate::on_each_device!(paged_sequences_with_every_modifier_match_packed_ones,);

pub const H: usize = 6;
pub const H_KV: usize = 2;
pub const D: usize = 16;
pub const D_V: usize = 24;
const PAGES: usize = 24;

/// The number of queries and of keys of a sequence: a chunk of a prompt, a token, a whole prompt, none of either kind,
/// and lengths at the ends of pages of 16 and of 32.
const LENS: [[usize; 2]; 7] = [[9, 41], [1, 64], [20, 20], [0, 5], [2, 0], [1, 33], [1, 1]];

/// Packed queries, the keys and values of all sequences in one piece and in pages, and where the pages are.
pub struct Stored {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub packed: PackedSequences,
    pub k_pool: Tensor,
    pub v_pool: Tensor,
    pub sequences: PagedSequences,
}

/// Returns random numbers (rows, heads, width).
pub fn random_rows(random: &mut Random, rows: usize, heads: usize, width: usize) -> Result<Tensor> {
    let data: Vec<f32> = (0..rows * heads * width).map(|_| random.between(-1.0, 1.0) as f32).collect();
    Tensor::from_vec(data, (rows, heads, width), &CPU)
}

impl Stored {
    /// Returns sequences in pages of a random order. Every row of a pool that no sequence has is NaN.
    pub fn new(page_size: usize, dtype: DType, device: &Device) -> Result<Self> {
        let random = &mut Random::new(page_size as u64);
        let mut order: Vec<u32> = (0..PAGES as u32).collect();
        for n in (1..PAGES).rev() {
            order.swap(n, random.up_to(n));
        }
        let lens_q = LENS.map(|[queries, _]| queries);
        let lens_kv = LENS.map(|[_, keys]| keys);
        let packed = PackedSequences::from_lens(&lens_q, &lens_kv)?;
        let q = random_rows(random, packed.total_queries(), H, D)?;
        let k = random_rows(random, packed.total_keys(), H_KV, D)?;
        let v = random_rows(random, packed.total_keys(), H_KV, D_V)?;
        let mut pages = Vec::new();
        for keys in lens_kv {
            // More pages than the length needs are not read.
            let count = keys.div_ceil(page_size) + random.up_to(1);
            pages.push(order.split_off(order.len() - count));
        }
        let pool = |packed_rows: &Tensor| -> Result<Tensor> {
            let (_, heads, width) = packed_rows.dims3()?;
            let from = packed_rows.flatten_all()?.to_vec1::<f32>()?;
            let row = heads * width;
            let mut rows = vec![f32::NAN; PAGES * page_size * row];
            for (s, own) in pages.iter().enumerate() {
                for (position, key) in packed.keys(s).enumerate() {
                    let to = own[position / page_size] as usize * page_size + position % page_size;
                    rows[to * row..][..row].copy_from_slice(&from[key * row..][..row]);
                }
            }
            Tensor::from_vec(rows, (PAGES, page_size, heads, width), &CPU)
        };
        let (k_pool, v_pool) = (pool(&k)?, pool(&v)?);
        let mut ends = vec![0];
        ends.extend(lens_q.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        }));
        let sequences = PagedSequences::new(ends, lens_kv.to_vec(), pages)?;
        let put = |numbers: Tensor| numbers.to_dtype(dtype)?.to_device(device);
        Ok(Self { q: put(q)?, k: put(k)?, v: put(v)?, packed, k_pool: put(k_pool)?, v_pool: put(v_pool)?, sequences })
    }
}

/// Returns the numbers of a tensor in f64.
pub fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_device(&CPU)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// A call with a name for failures.
struct Modified {
    name: &'static str,
    mask: AttentionMask,
    options: SdpaOptions,
}

fn modified(dtype: DType, device: &Device) -> Result<Vec<Modified>> {
    let list = |numbers: &[f32]| Tensor::new(numbers, &CPU)?.to_dtype(dtype)?.to_device(device);
    let slopes = list(&[0.5, 0.25, 0.125, 0.0625, 0.03, 0.015])?;
    let sinks = list(&[0.5, -1.0, 0.0, 2.0, -3.0, 0.25])?;
    // 20 queries and 64 keys are the most of a sequence.
    let biases: Vec<f32> = (0..H * 83).map(|n| (n % 17) as f32 / 8.0 - 1.0).collect();
    let biases = Tensor::from_vec(biases, (H, 83), &CPU)?.to_dtype(dtype)?.to_device(device)?;
    let causal = AttentionMask::causal;
    let plain = SdpaOptions::default;
    let of = |name, mask, options| Modified { name, mask, options };
    Ok(vec![
        of("nothing", AttentionMask::none(), plain()),
        of("causal", causal(), plain()),
        of("a window", causal().with_window(7), plain()),
        of("a local window", AttentionMask::none().with_local_window(3, 2), plain()),
        of("chunks", causal().with_chunk(8), plain()),
        of("a prefix", causal().with_prefix(vec![30, 3, 15, 5, 0, 2, 1]), plain()),
        of(
            "starts and lengths",
            causal().with_starts(vec![3, 20, 0, 0, 0, 17, 1]).with_valid_lens(vec![40; 7]),
            plain(),
        ),
        of("softcap and scale", causal(), plain().with_softcap(0.7).with_scale(0.3)),
        of("alibi", causal(), plain().with_alibi_slopes(&slopes)),
        of("sinks", causal().with_window(20), plain().with_sinks(&sinks)),
        of("a relative bias", causal(), plain().with_relative_bias(&biases)),
        of("dropout by a seed", causal(), plain().with_dropout(0.3, true).with_dropout_philox_seed(7)),
    ])
}

fn paged_sequences_with_every_modifier_match_packed_ones(device: &Device) -> Result<()> {
    for &(dtype, page_size) in &[(DType::F32, 16), (DType::F32, 32), (DType::BF16, 16)] {
        let Stored { q, k, v, packed, k_pool, v_pool, sequences } = &Stored::new(page_size, dtype, device)?;
        for Modified { name, mask, options } in modified(dtype, device)? {
            for backend in [Backend::Reference, Backend::Auto] {
                let options = options.clone().with_backend(backend);
                let (expected, expected_lse) = varlen_with_lse(q, k, v, packed, &mask, &options)?;
                let (found, lse) = paged_with_lse(q, k_pool, v_pool, sequences, &mask, &options)?;
                let what = format!("{name} on {backend:?} in {dtype:?} with pages of {page_size}");
                assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype), "{what}");
                // Kernels may add in another order, and round the last step of a dtype otherwise.
                let most = match (backend, dtype) {
                    (Backend::Reference, _) => 0.0,
                    (_, DType::F32) => 1e-5,
                    _ => 2e-2,
                };
                for (one, other) in [(&found, &expected), (&lse, &expected_lse)] {
                    let (one, other) = (values(one)?, values(other)?);
                    for (a, b) in one.iter().zip(&other) {
                        assert!(a == b || (a - b).abs() <= most, "{what}: {a}, expected {b}");
                    }
                }
                if name == "causal" {
                    let alone = paged(q, k_pool, v_pool, sequences, &mask, &options)?;
                    assert_eq!(values(&alone)?, values(&found)?, "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn paged_sequences_that_share_pages_match_sequences_of_their_own() -> Result<()> {
    let Stored { q, k_pool, v_pool, .. } = Stored::new(16, DType::F32, &CPU)?;
    // Zeros for NaN: here all rows are read.
    let finite = |pool: &Tensor| pool.eq(pool)?.where_cond(pool, &pool.zeros_like()?);
    let (k_pool, v_pool) = (finite(&k_pool)?, finite(&v_pool)?);
    let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
    let pages = [vec![5, 2, 9], vec![5, 2, 11], vec![5]];
    let lens = [40, 36, 16];
    let sequences = PagedSequences::new(vec![0, 4, 5, 12], lens.to_vec(), pages.to_vec())?;
    let q = q.narrow(0, 0, 12)?;
    let found = paged(&q, &k_pool, &v_pool, &sequences, &causal, &options)?;
    for s in 0..3 {
        let rows = |pool: &Tensor| {
            let own = Tensor::new(pages[s].as_slice(), &CPU)?;
            pool.index_select(&own, 0)?.flatten(0, 1)?.narrow(0, 0, lens[s])
        };
        let queries = sequences.queries(s);
        let own_q = q.narrow(0, queries.start, queries.len())?;
        let alone = PackedSequences::from_lens(&[queries.len()], &[lens[s]])?;
        let expected = varlen(&own_q, &rows(&k_pool)?, &rows(&v_pool)?, &alone, &causal, &options)?;
        let difference = (found.narrow(0, queries.start, queries.len())? - expected)?;
        let most = difference.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(most < 1e-6, "sequence {s}: {most}");
    }
    Ok(())
}

#[test]
fn released_pages_with_a_window_are_not_read_and_without_one_are_an_error() -> Result<()> {
    let Stored { q, k, v, packed, k_pool, v_pool, sequences } = Stored::new(16, DType::F32, &CPU)?;
    let options = SdpaOptions::default();
    let window = AttentionMask::causal().with_window(7);
    // 9 queries of 41 positions, and one of 64, with a window of 7: positions before 26 and 57 are not attended to.
    let released = |pages: &[u32], count: usize| [vec![u32::MAX; count], pages[count..].to_vec()].concat();
    let mut pages: Vec<_> = (0..sequences.len()).map(|s| sequences.pages(s).to_vec()).collect();
    (pages[0], pages[1]) = (released(&pages[0], 1), released(&pages[1], 3));
    let ends = (0..=LENS.len()).map(|s| LENS[..s].iter().map(|lens| lens[0]).sum()).collect();
    let without = PagedSequences::new(ends, LENS.map(|lens| lens[1]).to_vec(), pages)?;
    let without = without.with_first_positions(vec![16, 48, 0, 0, 0, 0, 0])?;
    let expected = varlen(&q, &k, &v, &packed, &window, &options)?;
    let found = paged(&q, &k_pool, &v_pool, &without, &window, &options)?;
    let difference = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(difference < 1e-6, "{difference}");
    let error = paged(&q, &k_pool, &v_pool, &without, &AttentionMask::causal(), &options);
    let text = error.expect_err("a released key").to_string();
    let start = "[scaled_dot_product_attention_paged] a query of sequence 0 may attend to the key at position 0, but \
                 the pages before position 16 were released; expected a shorter window";
    assert!(text.starts_with(start), "{text}");
    Ok(())
}

#[test]
fn gradients_of_pools_reach_the_rows_of_the_sequences() -> Result<()> {
    let Stored { q, k_pool, v_pool, sequences, .. } = Stored::new(16, DType::F32, &CPU)?;
    let (k_pool, v_pool) = (Var::from_tensor(&k_pool)?, Var::from_tensor(&v_pool)?);
    let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
    let output = paged(&q, &k_pool, &v_pool, &sequences, &causal, &options)?;
    let gradients = output.sqr()?.sum_all()?.backward()?;
    for pool in [&k_pool, &v_pool] {
        let gradient = gradients.get(pool).expect("a gradient").sqr()?.sum_keepdim(3)?.flatten(1, 3)?;
        let by_row = gradient.reshape((PAGES, 16, H_KV))?.to_vec3::<f32>()?;
        // Position 0 of the chunk of a prompt, and a row past the length of a sequence of 33.
        assert!(by_row[sequences.pages(0)[0] as usize][0].iter().all(|square| *square > 0.0));
        assert!(by_row[sequences.pages(5)[2] as usize][1].iter().all(|square| *square == 0.0));
    }
    Ok(())
}
