//! Generation by a hybrid model: with drafts it returns the tokens of generation without, and a sequence of a batch has
//! the bits that it has alone.

use crate::hybrid::{Cache, DraftHead, Model, VOCABULARY};
use crate::*;

/// The number of generated tokens.
const TOKENS: usize = 24;
/// The number of drafted tokens of a step.
const DRAFTS: usize = 3;

fn prompts() -> Vec<Vec<u32>> {
    vec![vec![3, 1, 4, 1, 5], vec![2, 7], vec![1, 6, 1, 8, 0, 3, 9]]
}

/// Returns the last entry of each row.
fn last_of(rows: &[Vec<u32>], lens: &[usize]) -> Vec<u32> {
    rows.iter().zip(lens).map(|(row, &len)| row[len - 1]).collect()
}

fn lens_of(rows: &[Vec<u32>]) -> Vec<usize> {
    rows.iter().map(Vec::len).collect()
}

/// Returns the tokens that the model generates one at a time.
fn generated(model: &Model, prompts: &[Vec<u32>]) -> Result<Vec<Vec<u32>>> {
    let mut caches = model.caches(0);
    let of_prompts = model.forward(prompts, None, &mut caches)?;
    let mut next = last_of(&model.choices(&of_prompts)?, &lens_of(prompts));
    let mut outputs = vec![Vec::new(); prompts.len()];
    loop {
        for (output, &token) in outputs.iter_mut().zip(&next) {
            output.push(token);
        }
        if outputs[0].len() == TOKENS {
            return Ok(outputs);
        }
        let rows: Vec<_> = next.iter().map(|&token| vec![token]).collect();
        let hidden = model.forward(&rows, None, &mut caches)?;
        next = last_of(&model.choices(&hidden)?, &vec![1; rows.len()]);
    }
}

/// Returns how many drafts are the model's own choices: `row` is the last token and its drafts, and `choices` the
/// choice after each of them.
fn accepted(row: &[u32], choices: &[u32]) -> usize {
    row[1..].iter().zip(choices).take_while(|(draft, choice)| draft == choice).count()
}

/// The outcome of generation with drafts.
struct Drafted {
    tokens: Vec<Vec<u32>>,
    /// The number of accepted drafts of each sequence, for each step.
    accepted: Vec<Vec<usize>>,
}

/// Generates with drafts of a head that reads the hidden states of the model.
fn with_draft_head(model: &Model, head: &mut DraftHead, prompts: &[Vec<u32>]) -> Result<Drafted> {
    let mut caches = model.caches(1 + DRAFTS);
    let mut hidden = model.forward(prompts, None, &mut caches)?;
    let mut next = last_of(&model.choices(&hidden)?, &lens_of(prompts));
    let mut outputs: Vec<Vec<u32>> = next.iter().map(|&token| vec![token]).collect();
    // The positions that the head has not seen yet have these next tokens.
    let mut following = Vec::new();
    for (prompt, &token) in prompts.iter().zip(&next) {
        following.push([&prompt[1..], &[token]].concat());
    }
    let mut steps = Vec::new();
    while outputs.iter().any(|output| output.len() < TOKENS) {
        let mut rows: Vec<Vec<u32>> = next.iter().map(|&token| vec![token]).collect();
        let mut drafted = head.forward(model, &hidden, &following)?;
        let mut lens = lens_of(&following);
        let known = head.cache.lens();
        for draft in 0..DRAFTS {
            let tokens = last_of(&model.choices(&drafted)?, &lens);
            for (row, &token) in rows.iter_mut().zip(&tokens) {
                row.push(token);
            }
            if draft + 1 < DRAFTS {
                let last = lens.iter().enumerate().map(|(b, len)| drafted.i((b..b + 1, len - 1..*len)));
                let last = Tensor::cat(&last.collect::<Result<Vec<_>>>()?, 0)?;
                drafted = head.forward(model, &last, &tokens.iter().map(|&token| vec![token]).collect::<Vec<_>>())?;
                lens = vec![1; rows.len()];
            }
        }
        head.cache.truncate_to(&known)?;

        let before = caches[0].lens();
        hidden = model.forward(&rows, None, &mut caches)?;
        let choices = model.choices(&hidden)?;
        let counts: Vec<_> = rows.iter().zip(&choices).map(|(row, own)| accepted(row, own)).collect();
        let ends: Vec<_> = before.iter().zip(&counts).map(|(len, count)| len + 1 + count).collect();
        for cache in &mut caches {
            cache.truncate_to(&ends)?;
        }
        for (sequence, &count) in counts.iter().enumerate() {
            following[sequence] = choices[sequence][..=count].to_vec();
            outputs[sequence].extend(&following[sequence]);
        }
        let longest = counts.iter().max().map_or(0, |count| count + 1);
        hidden = hidden.narrow(1, 0, longest)?;
        next = last_of(&following, &lens_of(&following));
        steps.push(counts);
    }
    outputs.iter_mut().for_each(|output| output.truncate(TOKENS));
    Ok(Drafted { tokens: outputs, accepted: steps })
}

#[test]
fn hybrid_generation_with_draft_head_matches_generation_without() -> Result<()> {
    let seed = TorchSeed::new(5);
    let model = Model::new(&seed, DType::F32)?;
    let expected = generated(&model, &prompts())?;
    let drafted = with_draft_head(&model, &mut DraftHead::new(&seed)?, &prompts())?;
    assert_eq!(drafted.tokens, expected);
    let all: Vec<_> = drafted.accepted.iter().flatten().copied().collect();
    assert!(all.contains(&0) && all.iter().any(|&count| count > 0), "{:?}", drafted.accepted);
    assert!(drafted.accepted.iter().any(|step| step.iter().any(|count| count != &step[0])), "{:?}", drafted.accepted);
    Ok(())
}

/// Generates with a tree of guesses: two tokens may follow the last one, and one each of these.
fn with_guessed_trees(model: &Model, prompts: &[Vec<u32>]) -> Result<Drafted> {
    let tree = TokenTree::new(&[None, Some(0), Some(0), Some(1), Some(2)])?;
    let mut caches = model.caches(tree.len());
    let hidden = model.forward(prompts, None, &mut caches)?;
    let first = last_of(&model.choices(&hidden)?, &lens_of(prompts));
    let mut outputs: Vec<Vec<u32>> = first.iter().map(|&token| vec![token]).collect();
    let mut steps = Vec::new();
    while outputs.iter().any(|output| output.len() < TOKENS) {
        let rows: Vec<_> = outputs.iter().map(|output| guesses(output)).collect();
        let before = caches[0].lens();
        let choices = model.choices(&model.forward(&rows, Some(&tree), &mut caches)?)?;
        let mut kept = Vec::new();
        for ((output, row), own) in outputs.iter_mut().zip(&rows).zip(&choices) {
            let mut path = vec![0];
            output.push(own[0]);
            let mut node = 0;
            while let Some(child) = child_with(&tree, node, row, own[node]) {
                path.push(child);
                output.push(own[child]);
                node = child;
            }
            kept.push(path);
        }
        for cache in &mut caches {
            cache.keep(&before, &kept)?;
        }
        steps.push(kept.iter().map(|path| path.len() - 1).collect());
    }
    outputs.iter_mut().for_each(|output| output.truncate(TOKENS));
    Ok(Drafted { tokens: outputs, accepted: steps })
}

/// Returns the child of a node that has a token.
fn child_with(tree: &TokenTree, node: usize, tokens: &[u32], token: u32) -> Option<usize> {
    (0..tree.len()).find(|&child| tree.parents()[child] == Some(node) && tokens[child] == token)
}

/// Returns the last token of a text and guesses after it: the token that followed its last occurrence, another token,
/// and a token after each of these.
fn guesses(text: &[u32]) -> Vec<u32> {
    let after = |token: u32| {
        let found = text[..text.len() - 1].iter().rposition(|&other| other == token);
        found.map_or(token, |position| text[position + 1])
    };
    let last = text[text.len() - 1];
    let first = after(last);
    let other = (first + 1) % VOCABULARY as u32;
    vec![last, other, first, after(other), after(first)]
}

#[test]
fn hybrid_generation_with_trees_of_drafts_matches_generation_without() -> Result<()> {
    let model = Model::new(&TorchSeed::new(5), DType::F32)?;
    let drafted = with_guessed_trees(&model, &prompts())?;
    assert_eq!(drafted.tokens, generated(&model, &prompts())?);
    let all: Vec<_> = drafted.accepted.iter().flatten().copied().collect();
    assert!([0, 1, 2].iter().all(|count| all.contains(count)), "{:?}", drafted.accepted);
    assert!(drafted.accepted.iter().any(|step| step.iter().any(|count| count != &step[0])), "{:?}", drafted.accepted);
    Ok(())
}

/// Runs a prompt in chunks and then single tokens, as sequence `place` of a batch of `b`, and returns the logits.
fn logits_in_batch(model: &Model, b: usize, place: usize) -> Result<Vec<Tensor>> {
    let mut caches: Vec<Cache> = model.caches(0);
    let mut all = Vec::new();
    let mut first = 0;
    for len in [40, 9, 3, 1, 1] {
        let row = |sequence: usize| {
            let own = if sequence == place { 0 } else { sequence + 1 };
            (first..first + len).map(|t| ((t * t + own * (t + 3)) % VOCABULARY) as u32).collect()
        };
        let rows: Vec<Vec<u32>> = (0..b).map(row).collect();
        let logits = model.logits(&model.forward(&rows, None, &mut caches)?)?;
        all.push(logits.i(place)?);
        first += len;
    }
    Ok(all)
}

/// Only on a CPU do the bits of a sequence not depend on its batch.
mod cpu {
    use super::*;

    #[test]
    fn hybrid_logits_of_a_sequence_have_the_same_bits_in_every_batch() -> Result<()> {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let model = Model::new(&TorchSeed::new(5), dtype)?;
            let expected = logits_in_batch(&model, 1, 0)?;
            for b in [2, 9, 33] {
                for place in [0, b - 1] {
                    for (call, (own, alone)) in logits_in_batch(&model, b, place)?.iter().zip(&expected).enumerate() {
                        assert_eq!(bits(own), bits(alone), "{dtype:?}, sequence {place} of {b}, call {call}");
                    }
                }
            }
        }
        Ok(())
    }

    /// Decodes a sequence next to longer and shorter ones, which were prompts of other calls. The longest has several
    /// parts of keys, which the kernels compute apart.
    #[test]
    fn hybrid_logits_of_a_sequence_next_to_longer_ones_have_the_same_bits() -> Result<()> {
        let model = Model::new(&TorchSeed::new(5), DType::F32)?;
        let text = |sequence: usize, len: usize| -> Vec<u32> {
            (0..len).map(|t| ((t * t + sequence * (t + 3)) % VOCABULARY) as u32).collect()
        };
        let prefilled = |sequence: usize, len: usize| -> Result<Vec<Cache>> {
            let mut caches = model.caches(0);
            model.forward(&[text(sequence, len)], None, &mut caches)?;
            Ok(caches)
        };
        let mut alone = prefilled(0, 50)?;
        let mut batch = prefilled(1, 2_100)?;
        for (sequence, len) in [(0, 50), (2, 7)] {
            for (cache, other) in batch.iter_mut().zip(&prefilled(sequence, len)?) {
                cache.join(other)?;
            }
        }
        for new in [1, 1, 4, 1] {
            let rows: Vec<_> = (0..3).map(|sequence| text(sequence + 5, new)).collect();
            let logits = model.logits(&model.forward(&rows, None, &mut batch)?)?;
            let expected = model.logits(&model.forward(&rows[1..2], None, &mut alone)?)?;
            assert_eq!(bits(&logits.i(1..2)?), bits(&expected), "a call of {new} tokens");
        }
        assert_eq!(batch[2].lens(), [2_107, 57, 14]);
        Ok(())
    }
}
