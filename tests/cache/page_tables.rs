//! Tables of pages and pools: which pages are copied, found and freed, and errors that change nothing.

use crate::paged_model::{base, pool_of};
use crate::program::EMBED_DIM;
use crate::*;

const PAGE: usize = 16;

/// Returns three tokens (3, E).
fn three_tokens() -> Result<Tensor> {
    wave(1, 3, EMBED_DIM, 0.0)?.squeeze(0)
}

/// Returns the numbers of all pages of a pool.
fn stored(pool: &KvPool) -> Result<Vec<f32>> {
    let (keys, values) = pool.keys_and_values();
    Tensor::cat(&[keys.flatten_all()?, values.flatten_all()?], 0)?.to_vec1()
}

#[test]
fn fork_of_a_fork_within_a_page_copies_the_page_for_each_writer_but_the_last() -> Result<()> {
    let mut table = PageTable::new(8, PAGE)?;
    let first = table.add();
    table.step(&[first.tokens(20)])?.commit();
    let second = table.fork(first)?;
    let third = table.fork(second)?;
    assert_eq!((table.used_pages(), table.pages_needed(third, 1)?, table.pages_needed(third, 0)?), (2, 1, 0));
    let step = table.step(&[third.tokens(1)])?;
    let last = step.sequences().pages(0)[1];
    assert_eq!(step.copies(), [PageCopy { from: 1, to: last }]);
    assert_eq!((step.rows(), step.positions(), step.last_tokens()), (vec![last * 16 + 4], vec![20], vec![0]));
    step.commit();
    assert_eq!((table.pages_of(first)?, table.pages_of(third)?), (&[0, 1][..], &[0, last][..]));
    table.step(&[second.tokens(1)])?.commit();
    let in_place = table.step(&[first.tokens(1)])?;
    assert_eq!((in_place.copies(), in_place.rows()), (&[][..], vec![20]));
    in_place.commit();
    assert_eq!(table.used_pages(), 4);
    for sequence in [first, third, second] {
        table.free(sequence)?;
    }
    assert_eq!((table.used_pages(), table.free_pages()), (0, 8));
    Ok(())
}

#[test]
fn prefix_that_ends_within_a_page_shares_the_whole_pages_before() -> Result<()> {
    let mut table = PageTable::new(4, PAGE)?;
    let ids: Vec<u32> = (0..40).collect();
    let one = table.add();
    table.step(&[one.tokens(40)])?.commit();
    table.share_prefix(one, &ids)?;
    let tokens = |of: &mut PageTable, own_ids: &[u32]| -> Result<usize> {
        let found = of.add_with_prefix(own_ids);
        of.free(found.sequence)?;
        Ok(found.tokens)
    };
    // One token at least is left to compute.
    for (len, expected) in [(40, 32), (33, 32), (32, 16), (17, 16), (16, 0), (1, 0), (0, 0)] {
        assert_eq!(tokens(&mut table, &ids[..len])?, expected, "{len} ids");
    }
    let mut other = ids.clone();
    other[20] = 7;
    assert_eq!(tokens(&mut table, &other)?, 16);
    let error = error_text(table.share_prefix(one, &other));
    assert_eq!(error, "[page_table] page 1 of the sequence is found by other ids, expected the ids of its tokens");
    // Freed pages are found until they are needed.
    table.free(one)?;
    assert_eq!((table.free_pages(), table.free_pages_with_prefix(), tokens(&mut table, &ids)?), (4, 2, 32));
    let two = table.add();
    table.step(&[two.tokens(40)])?.commit();
    assert_eq!((table.free_pages_with_prefix(), tokens(&mut table, &ids)?), (1, 16));
    Ok(())
}

#[test]
fn sequence_truncated_within_a_found_page_writes_to_a_copy() -> Result<()> {
    let mut table = PageTable::new(4, PAGE)?;
    let one = table.add();
    table.step(&[one.tokens(32)])?.commit();
    table.share_prefix(one, &[1; 32])?;
    table.truncate(one, 20)?;
    let step = table.step(&[one.tokens(1)])?;
    assert_eq!(step.copies().len(), 1);
    step.commit();
    assert_eq!(table.add_with_prefix(&[1; 33]).tokens, 32);
    Ok(())
}

#[test]
fn errors_of_a_page_table_name_the_cause_and_change_nothing() -> Result<()> {
    assert_eq!(error_text(PageTable::new(4, 8)), "[page_table] page_size is 8, expected a multiple of 16");
    assert!(error_text(PageTable::new(0, 16)).starts_with("[page_table] pages is 0, expected"));
    let mut table = PageTable::new(4, PAGE)?;
    let one = table.add();
    let two = table.add();
    table.step(&[one.tokens(30), two.tokens(5)])?.commit();
    let stranger = PageTable::new(4, PAGE)?.add();
    let gone = table.add();
    table.free(gone)?;
    let in_the_slot_of_gone = table.add();
    let freed = "[page_table] the sequence was freed, expected one that the table has";
    for (sequence, expected) in [(gone, freed), (stranger, "[page_table] the sequence is of another table")] {
        assert_eq!(error_text(table.step(&[one.tokens(1), sequence.tokens(1)])), expected);
        assert_eq!(error_text(table.fork(sequence)), expected);
        assert_eq!(error_text(table.truncate(sequence, 0)), expected);
        assert_eq!(error_text(table.free(sequence)), expected);
        assert_eq!(error_text(table.release_before(sequence, 1)), expected);
        assert_eq!(error_text(table.share_prefix(sequence, &[])), expected);
        assert_eq!(error_text(table.len(sequence)), expected);
        assert_eq!(error_text(table.pages_of(sequence)), expected);
    }
    let full = "[page_table] the step needs 2 pages, but 1 of 4 are free";
    assert_eq!(error_text(table.step(&[one.tokens(3), two.tokens(12)])), full);
    let huge = error_text(table.step(&[one.tokens(usize::MAX - 30)]));
    assert!(huge.ends_with("pages, but 1 of 4 are free"), "{huge}");
    let uncountable = error_text(table.step(&[one.tokens(usize::MAX)]));
    assert!(uncountable.ends_with("more are too many to count"), "{uncountable}");
    let twice = "[page_table] entry 1 of the step is of a sequence that is listed before, expected each once";
    assert_eq!(error_text(table.step(&[one.tokens(1), one.tokens(1)])), twice);
    assert_eq!(
        error_text(table.truncate(two, 6)),
        "[page_table] len is 6, expected at most the sequence's 5 positions"
    );
    let ids = "[page_table] there are 6 ids, expected at most the 5 tokens of the sequence";
    assert_eq!(error_text(table.share_prefix(two, &[0; 6])), ids);
    assert_eq!((table.len(one)?, table.len(two)?, table.len(in_the_slot_of_gone)?), (30, 5, 0));
    assert_eq!((table.free_pages(), table.num_sequences()), (1, 3));
    assert_eq!((table.release_before(one, 20)?, table.release_before(one, 20)?, table.free_pages()), (1, 0, 2));
    let released = "[page_table] len is 9, expected 0 or at least 16: the pages before were released";
    assert_eq!(error_text(table.truncate(one, 9)), released);
    table.truncate(one, 0)?;
    assert_eq!((table.stored(one)?, table.free_pages()), (0..0, 3));
    Ok(())
}

#[test]
fn errors_of_a_pool_name_the_cause_and_leave_its_pages() -> Result<()> {
    let cfg = base();
    let own = layer(&cfg)?.freeze()?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = pool_of(&cfg, &table)?;
    let of_other = pool_of(&cfg, &PageTable::new(4, PAGE)?)?;
    let larger = pool_of(&cfg, &PageTable::new(5, PAGE)?)?;
    let of_one_head = KvPool::new(&KvPoolConfig::new(1, 8, &table), &DEVICE)?;
    let tracked = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE))?;
    let xs = three_tokens()?;
    let sequence = table.add();
    let step = table.step(&[sequence.tokens(3)])?;
    let run = |mha: &MultiHeadAttention, to: &KvPool| {
        error_text(mha.forward_with(AttentionInput::new(&xs).with_pages(to, &step)))
    };
    let another = "[kv_pool] the step is of another table, expected the one that the pool was made for";
    assert_eq!(run(&own, &of_other), another);
    let geometry = "[kv_pool] the pool has 5 pages of 16 positions, expected the table's 4 of 16";
    assert_eq!(run(&own, &larger), geometry);
    let heads = run(&own, &of_one_head);
    assert!(heads.starts_with("[kv_pool] keys have shape [3, 2, 8], expected"), "{heads}");
    let gradients = run(&tracked, &pool);
    assert!(gradients.starts_with("[kv_pool] keys or values are tracked for gradients"), "{gradients}");
    for untouched in [&pool, &of_other, &larger, &of_one_head] {
        assert!(stored(untouched)?.iter().all(|number| *number == 0.0));
    }
    own.forward_with(AttentionInput::new(&xs).with_pages(&pool, &step))?;
    assert!(stored(&pool)?.iter().any(|number| *number != 0.0));
    step.commit();
    let next = table.step(&[sequence.tokens(3)])?;
    let late = pool_of(&cfg, next.table())?;
    let missed = "[kv_pool] the pool has not stored the tokens of an earlier step that was committed, expected a call \
                  of its layer in every step";
    assert_eq!(error_text(own.forward_with(AttentionInput::new(&xs).with_pages(&late, &next))), missed);
    Ok(())
}

#[test]
fn detached_pool_takes_keys_of_variables_without_gradients() -> Result<()> {
    let cfg = base();
    let tracked = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE))?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = KvPool::new(&KvPoolConfig::for_layer(&cfg, &table).with_detached(true), &DEVICE)?;
    let sequence = table.add();
    let xs = three_tokens()?;
    let step = table.step(&[sequence.tokens(3)])?;
    let found = tracked.forward_with(AttentionInput::new(&xs).with_pages(&pool, &step))?;
    let expected = tracked.freeze()?.forward(&xs)?;
    assert_close(&found, &expected, 1e-5, "detached");
    let (keys, values) = pool.keys_and_values();
    assert!(!keys.track_op() && !values.track_op());
    Ok(())
}

#[test]
fn pages_with_unsupported_inputs_or_layers_are_errors() -> Result<()> {
    let own = layer(&base())?.freeze()?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = pool_of(&base(), &table)?;
    let xs = three_tokens()?;
    let two = xs.narrow(0, 0, 2)?;
    let batch = xs.unsqueeze(0)?;
    let positions = Tensor::new(&[0u32, 1, 2], &DEVICE)?;
    let packed = PackedSequences::self_attention(vec![0, 3])?;
    let tree = TokenTree::new(&[None, Some(0)])?;
    let bias = AttentionMask::none().with_bias(&Tensor::zeros((3, 3), DType::F32, &DEVICE)?);
    let chunked = AttentionMask::none().with_chunk(4);
    let upper_left = AttentionMask::causal_upper_left();
    let lens = [2];
    let mut cache = AttentionCache::default();
    let sequence = table.add();
    let first = table.step(&[sequence.tokens(3)])?;
    own.forward_with(AttentionInput::new(&xs).with_pages(&pool, &first))?;
    first.commit();
    let step = table.step(&[sequence.tokens(3)])?;
    let later = layer(&base().with_kv_sharing(KvSharing::EarlierLayer))?;
    let shared = || AttentionInput::new(&xs).with_shared_pages(&pool, &step);
    let early = "[kv_pool] the earlier layer has not stored the tokens of the step, expected its call first";
    assert_eq!(error_text(later.forward_with(shared())), early);
    let input = || AttentionInput::new(&xs).with_pages(&pool, &step);
    let function =
        |q: &Tensor, _: &Tensor, _: &Tensor, _: &AttentionMask, _: &SdpaOptions| -> Result<Tensor> { Ok(q.clone()) };
    let text = |refused: AttentionInput| error_text(own.forward_with(refused));
    let with_two = AttentionInput::new(&two).with_pages(&pool, &step);
    let with_batch = AttentionInput::new(&batch).with_pages(&pool, &step);
    let by_layer = [
        (text(with_two), "there are 2 queries, expected the step's 3 new tokens"),
        (text(with_batch), "queries with pages have shape [1, 3, 12], expected (total, E)"),
        (text(input().with_packed(&packed)), "packed sequences were given with pages, expected one of the two"),
        (text(input().with_cache(&mut cache)), "both a cache and pages were given, expected one of the two"),
        (text(input().with_valid_lens(&lens[..])), "valid_lens or starts of an `AttentionInput` were given"),
        (text(input().with_function(&function)), "an attention function was given with pages"),
        (text(input().with_mask(&upper_left)), "by the mask, query i attends to keys 0..=i"),
        (text(input().with_mask(&chunked).with_positions(&positions)), "positions were given with pages and a mask"),
        (error_text(own.forward_with_weights(input())), "weights (B, H, T_q, T_kv) were requested"),
    ];
    for (found, expected) in by_layer {
        assert!(found.starts_with(&format!("[multi_head_attention] {expected}")), "{found}, expected {expected}");
    }
    let biased = text(input().with_mask(&bias));
    assert!(biased.contains("bias has shape [3, 3], which does not broadcast to"), "{biased}");
    let of_batch = "[multi_head_attention] weights or statistics were requested of a call with pages that runs as a \
                    batch, expected the output alone";
    assert_eq!(error_text(own.forward_with_weights(input().with_mask(&bias))), of_batch);
    let small = text(input().with_tree(&tree));
    assert!(small.contains("the tree of sequence 0 has 2 nodes, expected one for each of 3 tokens"), "{small}");
    let falcon = layer(&base().with_alibi(AlibiConfig::Falcon))?.freeze()?;
    let moved = error_text(falcon.forward_with(input().with_positions(&positions)));
    assert!(moved.contains("positions were given with pages to a layer whose biases follow"), "{moved}");
    let found = text(shared());
    assert!(found.starts_with("[multi_head_attention] the pages of an earlier layer were given"), "{found}");
    let latent = latents(LatentConfig::new(EMBED_DIM, 3).with_kv_lora_rank(8), DType::F32, &DEVICE)?;
    let refused = error_text(latent.run(input()));
    let of_keys = "[kv_pool] the pool stores keys of 8 numbers and values of 8, expected a pool \
                   `KvPoolConfig::for_latent_layer` for latents of 72 and values of 8";
    assert_eq!(refused, of_keys);
    let of_earlier = error_text(latent.run(shared()));
    let expected = "[multi_head_latent_attention] the pages of an earlier layer were given";
    assert!(of_earlier.starts_with(expected), "{of_earlier}");
    if DEVICE.is_cpu() {
        assert_eq!(own.plan(&input())?.backend, Backend::Fused);
    }
    Ok(())
}

#[test]
fn errors_of_states_name_the_cause_and_change_nothing() -> Result<()> {
    let net_of = |heads: usize| GatedDeltaNet::new(&GatedDeltaNetConfig::new(EMBED_DIM, heads), seeded_weights());
    let net = net_of(4)?.freeze()?;
    let plain = PageTable::new(4, PAGE)?;
    let without = "[delta_pool] the table has no states, expected one made `with_states`";
    assert_eq!(error_text(DeltaPool::new(&net, &plain)), without);
    let drafts = "[page_table] drafts were set for a table without states, which takes back any tokens; expected none";
    assert_eq!(error_text(plain.with_drafts(2)), drafts);
    assert!(error_text(PageTable::new(4, PAGE)?.with_states(0)).starts_with("[page_table] states is 0, expected"));
    let mut used = PageTable::new(4, PAGE)?;
    used.add();
    let late = "[page_table] the table has 1 sequences, expected none before its states are set";
    assert_eq!(error_text(used.with_states(2)), late);

    let mut table = PageTable::new(4, PAGE)?.with_states(3)?.with_drafts(2)?;
    let pool = DeltaPool::new(&net, &table)?;
    let of_other = DeltaPool::new(&net, &PageTable::new(4, PAGE)?.with_states(3)?)?;
    let of_two_heads = DeltaPool::new(&net_of(2)?, &table)?;
    let (one, two) = (table.add(), table.add());
    let full = "[page_table] the step needs 4 states, but 3 of 3 are free";
    assert_eq!(error_text(table.step(&[one.tokens(2), two.tokens(2)])), full);
    let xs = three_tokens()?;
    let step = table.step(&[one.tokens(3)])?;
    let run = |to: &DeltaPool| error_text(net.forward_with(DeltaInput::new(&xs).with_pages(to, &step)));
    let another = "[delta_pool] the step is of another table, expected the one that the pool was made for";
    assert_eq!(run(&of_other), another);
    assert!(run(&of_two_heads).starts_with("[delta_pool] the pool stores inputs ["), "{}", run(&of_two_heads));
    let mut cache = DeltaCache::default();
    let both = error_text(net.forward_with(DeltaInput::new(&xs).with_pages(&pool, &step).with_cache(&mut cache)));
    assert!(
        both.ends_with("pages were given with a cache, padding or packed sequences, expected none of them"),
        "{both}"
    );
    let tree = TokenTree::new(&[None, Some(0), Some(0)])?;
    let long = error_text(net.forward_with(DeltaInput::new(&xs).with_pages(&pool, &step).with_tree(&tree)));
    assert!(long.ends_with("expected a table made `with_drafts(3)`"), "{long}");
    let two_rows = xs.narrow(0, 0, 2)?;
    let short = error_text(net.forward_with(DeltaInput::new(&two_rows).with_pages(&pool, &step)));
    assert!(short.contains("input has shape [2, 12], expected (total = 3, 12)"), "{short}");
    step.commit();
    let within = error_text(table.truncate(one, 1));
    assert!(within.contains("len is 1, expected 0 or one of [3], after which the sequence has a state"), "{within}");
    let next = table.step(&[one.tokens(1)])?;
    let token = xs.narrow(0, 0, 1)?;
    let missed = error_text(net.forward_with(DeltaInput::new(&token).with_pages(&pool, &next)));
    assert!(missed.starts_with("[delta_pool] the pool has not stored the tokens of an earlier step"), "{missed}");
    drop(next);
    assert_eq!((table.len(one)?, table.free_states()), (3, 2));

    let latents = KvPool::new(&KvPoolConfig::for_latent_layer(&LatentConfig::new(EMBED_DIM, 3), &table), &DEVICE)?;
    let own = layer(&base())?.freeze()?;
    let last = table.step(&[two.tokens(3)])?;
    let found = error_text(own.forward_with(AttentionInput::new(&xs).with_pages(&latents, &last)));
    assert_eq!(found, "[kv_pool] the pool stores latents, expected the call of a layer of latent attention");
    Ok(())
}

/// Returns random weights for any layer.
fn seeded_weights() -> VarBuilder<'static> {
    TorchSeed::new(1).var_builder(DType::F32, &DEVICE)
}
