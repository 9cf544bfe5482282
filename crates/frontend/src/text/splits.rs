//! The pairs of tokens of a vocabulary that make another one.

use std::collections::HashSet;
use std::iter::successors;

/// Where each token can be split into two others, in time that grows with the length of all, however they are nested.
pub(super) struct Splits<'a> {
    tokens: &'a [&'a str],
    /// The longest token that each begins with, or ends with, beside itself.
    begins_with: Vec<Option<usize>>,
    ends_with: Vec<Option<usize>>,
}

impl<'a> Splits<'a> {
    pub fn new(tokens: &'a [&'a str]) -> Self {
        let reversed: Vec<Vec<u8>> = tokens.iter().map(|token| token.bytes().rev().collect()).collect();
        Self { tokens, begins_with: longest_prefixes(tokens), ends_with: longest_prefixes(&reversed) }
    }

    /// The lengths of the first parts of a token.
    pub fn of(&self, token: usize) -> impl Iterator<Item = usize> {
        let len = self.tokens[token].len();
        let starts: HashSet<_> = self.lens(&self.ends_with, token).map(|second| len - second).collect();
        self.lens(&self.begins_with, token).filter(move |first| *first > 0 && starts.contains(first))
    }

    fn lens<'b>(&'b self, links: &'b [Option<usize>], token: usize) -> impl Iterator<Item = usize> + 'b {
        successors(links[token], |&at| links[at]).map(|at| self.tokens[at].len())
    }
}

/// The longest other text that each text begins with, if there is one. In order these stand before it, and each of them
/// begins with the one before.
fn longest_prefixes<T: AsRef<[u8]>>(texts: &[T]) -> Vec<Option<usize>> {
    let text = |i: usize| texts[i].as_ref();
    let mut order: Vec<_> = (0..texts.len()).collect();
    order.sort_unstable_by_key(|&i| text(i));
    let mut longest = vec![None; texts.len()];
    let mut nested: Vec<usize> = Vec::new();
    for i in order {
        let is_shorter_prefix = |&last: &usize| text(last).len() < text(i).len() && text(i).starts_with(text(last));
        while nested.last().is_some_and(|last| !is_shorter_prefix(last)) {
            nested.pop();
        }
        longest[i] = nested.last().copied();
        nested.push(i);
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every token of up to five letters that is drawn, some of them twice.
    #[test]
    fn splits_are_those_into_two_tokens() {
        let mut state = 1u32;
        let mut draw = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for round in 0..200 {
            let words: Vec<String> =
                (0..round).map(|_| (0..draw(6)).map(|_| ['a', 'b', '▁'][draw(3) as usize]).collect()).collect();
            let tokens: Vec<&str> = words.iter().map(String::as_str).collect();
            let splits = Splits::new(&tokens);
            for (i, token) in tokens.iter().enumerate() {
                let mut found: Vec<_> = splits.of(i).collect();
                found.sort_unstable();
                let starts = token.char_indices().skip(1).map(|(at, _)| at);
                let expected: Vec<_> = starts
                    .filter(|&at| [&token[..at], &token[at..]].iter().all(|part| tokens.contains(part)))
                    .collect();
                assert_eq!(found, expected, "{token:?} of {tokens:?}");
            }
        }
    }
}
