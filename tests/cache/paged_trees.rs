//! Trees of drafts in pages, and layers whose modifiers count from the positions of keys: each sequence has the numbers
//! that it has alone in a cache.

use crate::paged_model::{DRAFTS, Kind, Model, Pool, Tokens, base, latent, pool_of};
use crate::program::EMBED_DIM;
use crate::*;

const PAGE: usize = 16;

/// Drafts trees after prompts of several lengths, keeps other paths of each, and compares every output with the same
/// sequence alone.
fn check(model: &Model, tolerance: f32) -> Result<()> {
    let mut table = PageTable::new(24, PAGE)?;
    if model.has_states() {
        table = table.with_states(40)?.with_drafts(DRAFTS)?;
    }
    let pools = model.pools(&table)?;
    // 1 and 2 are two guesses after 0, and 3 follows 2.
    let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
    let mut ids = Vec::new();
    let mut caches = Vec::new();
    let mut lens = Vec::new();
    for len in [14, 1, 37] {
        ids.push(table.add());
        caches.push(model.caches()?);
        lens.push(len);
    }
    let drafts = [[0, 1, 2, 0], [1, 1, 0, 2], [2, 0, 1, 1]];
    // Prompts, then a tree, then a token that follows the path, and again a tree and a token.
    for (round, kept) in [None, Some([1, 3, 2]), None, Some([3, 0, 1]), None].into_iter().enumerate() {
        let mut tokens: Vec<Vec<u32>> = drafts.iter().map(|own| own[..1].to_vec()).collect();
        if round == 0 {
            tokens = lens.iter().map(|&len| (0..len as u32).map(|i| i * i % 3).collect()).collect();
        } else if kept.is_some() {
            tokens = drafts.iter().map(|own| own.to_vec()).collect();
        }
        let entries: Vec<_> = ids.iter().zip(&tokens).map(|(id, own)| id.tokens(own.len())).collect();
        let before: Vec<_> = ids.iter().map(|&id| table.len(id)).collect::<Result<_>>()?;
        let step = table.step(&entries)?;
        let of_tree = kept.map(|_| &tree);
        let all = Tokens { ids: &tokens.concat(), tree: of_tree };
        let found = model.paged(&pools, &step, all, model.depth())?;
        step.commit();
        let mut first = 0;
        for (s, own) in tokens.iter().enumerate() {
            let expected = model.alone_with_tree(&mut caches[s], Tokens { ids: own, tree: of_tree })?;
            let difference = (found.narrow(0, first, own.len())? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference <= tolerance, "sequence {s} in round {round}: off by {difference:e}");
            first += own.len();
        }
        let Some(kept) = kept else { continue };
        for (s, node) in kept.into_iter().enumerate() {
            let path = tree.path(node)?;
            let moves = table.keep(ids[s], before[s], &path)?;
            assert_eq!(table.len(ids[s])?, before[s] + path.len());
            for pool in &pools {
                if let Pool::Softmax(pool) = pool {
                    pool.move_rows(&moves)?;
                }
            }
            for cache in &mut caches[s] {
                cache.keep(before[s], &path)?;
            }
        }
    }
    for id in ids {
        table.free(id)?;
    }
    assert_eq!((table.free_pages(), table.free_states()), (24, table.states()));
    Ok(())
}

#[test]
fn trees_of_drafts_in_pages_match_trees_alone_and_keep_their_paths() -> Result<()> {
    let rotated = base().with_rope(RopeConfig::new(100.0));
    let kinds = [Kind::MultiHead(rotated.clone()), Kind::MultiHead(rotated.clone().with_window(6))];
    check(&Model::new(&kinds, AttentionCacheConfig::new())?, 1e-5)?;
    let shared = [Kind::MultiHead(rotated.clone()), Kind::MultiHead(rotated.with_kv_sharing(KvSharing::EarlierLayer))];
    check(&Model::new(&shared, AttentionCacheConfig::new())?, 1e-5)?;
    check(&Model::new(&[Kind::MultiHead(base())], AttentionCacheConfig::new().with_q8())?, 1e-5)
}

#[test]
fn trees_of_drafts_over_latents_and_states_in_pages_match_trees_alone() -> Result<()> {
    check(&Model::new(&[Kind::Latent(latent()), Kind::Latent(latent())], AttentionCacheConfig::new())?, 1e-5)?;
    let linear = GatedDeltaNetConfig::new(EMBED_DIM, 4).with_num_key_heads(2).with_key_head_dim(6);
    let kinds = [Kind::Linear(linear.clone()), Kind::MultiHead(base()), Kind::Linear(linear)];
    check(&Model::new(&kinds, AttentionCacheConfig::new())?, 1e-5)
}

#[test]
fn trees_in_pages_of_layers_with_biases_by_position_and_appended_keys_match_trees_alone() -> Result<()> {
    let buckets = RelativeBiasConfig::new(false).with_num_buckets(8).with_max_distance(9);
    for cfg in [
        base().with_relative_bias(buckets),
        base().with_alibi(AlibiConfig::Falcon),
        base().with_bias_kv(true).with_causal(false),
        base().with_alibi(AlibiConfig::Standard),
    ] {
        check(&Model::new(&[Kind::MultiHead(cfg)], AttentionCacheConfig::new())?, 1e-5)?;
    }
    Ok(())
}

#[test]
fn mask_tensors_with_pages_apply_to_each_sequence() -> Result<()> {
    let own = layer(&base())?.freeze()?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = pool_of(&base(), &table)?;
    let mut cache = AttentionCache::default();
    let xs = wave(2, 5, EMBED_DIM, 0.0)?;
    let allowed = Tensor::from_vec((0..50u8).map(|n| u8::from(n % 3 != 1)).collect::<Vec<_>>(), (2, 1, 5, 5), &DEVICE)?;
    let mask = AttentionMask::none().with_bool_mask(&allowed);
    let expected = own.forward_with(AttentionInput::new(&xs).with_mask(&mask).with_cache(&mut cache))?;
    let (one, other) = (table.add(), table.add());
    let step = table.step(&[one.tokens(5), other.tokens(5)])?;
    let packed = xs.flatten(0, 1)?;
    let found = own.forward_with(AttentionInput::new(&packed).with_mask(&mask).with_pages(&pool, &step))?;
    assert_close(&found, &expected.flatten(0, 1)?, 1e-6, "a boolean mask of each sequence");
    let plan = own.plan(&AttentionInput::new(&packed).with_mask(&mask).with_pages(&pool, &step))?;
    assert!(plan.reason.ends_with(", over a copy of the pages"), "{plan}");
    Ok(())
}

#[test]
fn plan_of_tree_over_latents_in_pages_says_that_they_are_copied() -> Result<()> {
    let own = MultiHeadLatentAttention::new(&latent(), VarBuilder::zeros(DType::F32, &DEVICE))?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = KvPool::new(&KvPoolConfig::for_latent_layer(&latent(), &table), &DEVICE)?;
    let tree = TokenTree::new(&[None, Some(0), Some(0)])?;
    let (one, other) = (table.add(), table.add());
    let step = table.step(&[one.tokens(3), other.tokens(3)])?;
    let xs = wave(1, 6, EMBED_DIM, 0.0)?.squeeze(0)?;
    let plan = own.plan(&AttentionInput::new(&xs).with_tree(&tree).with_pages(&pool, &step))?;
    assert!(plan.reason.ends_with(", over a copy of the pages"), "{plan}");
    Ok(())
}

#[test]
fn kept_tokens_that_pools_have_not_moved_or_that_pages_share_are_errors() -> Result<()> {
    let own = layer(&base())?.freeze()?;
    let mut table = PageTable::new(4, PAGE)?;
    let pool = pool_of(&base(), &table)?;
    let xs = wave(1, 4, EMBED_DIM, 0.0)?.squeeze(0)?;
    let one = table.add();
    let step = table.step(&[one.tokens(4)])?;
    own.forward_with(AttentionInput::new(&xs).with_pages(&pool, &step))?;
    step.commit();
    let fork = table.fork(one)?;
    let shared = error_text(table.keep(one, 0, &[0, 2]));
    assert!(shared.starts_with("[page_table] kept tokens move to page 0, which another sequence shares"), "{shared}");
    table.free(fork)?;
    for (len, kept, expected) in [
        (5, &[][..], "[page_table] len is 5, expected at most the sequence's 4 positions"),
        (1, &[0, 3], "[page_table] a kept token of sequence 0 is 3, expected one of its last 3"),
        (0, &[2, 1], "[page_table] the kept tokens of sequence 0 are [2, 1], expected increasing numbers"),
    ] {
        assert_eq!(error_text(table.keep(one, len, kept)), expected);
    }
    assert_eq!(table.len(one)?, 4);
    let moves = table.keep(one, 0, &[0, 2, 3])?;
    assert_eq!((moves.from(), moves.to(), table.len(one)?), (&[2, 3][..], &[1, 2][..], 3));
    let token = xs.narrow(0, 0, 1)?;
    let next = table.step(&[one.tokens(1)])?;
    let missed = "[kv_pool] the pool has not moved the rows that `PageTable::keep` kept, expected a call of `move_rows` of \
                  every pool";
    assert_eq!(error_text(own.forward_with(AttentionInput::new(&token).with_pages(&pool, &next))), missed);
    drop(next);
    pool.move_rows(&moves)?;
    let twice = "[kv_pool] the pool has moved rows 1 times, expected 0 before these moves: each once";
    assert_eq!(error_text(pool.move_rows(&moves)), twice);
    let stranger = PageTable::new(4, PAGE)?;
    let of_stranger = pool_of(&base(), &stranger)?;
    let another = "[kv_pool] the moves are of another table, expected the one that the pool was made for";
    assert_eq!(error_text(of_stranger.move_rows(&moves)), another);
    let last = table.step(&[one.tokens(1)])?;
    own.forward_with(AttentionInput::new(&token).with_pages(&pool, &last))?;
    Ok(())
}
