//! Warnings about calls that are valid and usually a mistake. Each kind is logged once in a process, since a model
//! would repeat it for every layer and token.

use candle_core::{Result, bail};

use super::input::AttentionInput;
use crate::cache::{AttentionCache, EarlierPadding, NewTokens};
use crate::mask::{AttentionMask, OtherOffset};
use candle_attention_modules::linear::IDLE_CALLS;
use candle_attention_modules::warn_once;

/// Checks the masks of a call, the caller's and the layer's, against the earlier calls of its cache.
///
/// # Errors
/// For [`AttentionMask::causal_upper_left`] after earlier positions.
pub(super) fn check_mask(
    op: &str,
    call_mask: Option<&AttentionMask>,
    layer_mask: &AttentionMask,
    tokens: &NewTokens,
    padding: EarlierPadding,
) -> Result<()> {
    let Some(&before) = tokens.before.iter().find(|&&before| before > 0) else { return Ok(()) };
    if layer_mask.allows_later_keys() && call_mask.is_none_or(AttentionMask::allows_later_keys) {
        warn_once!(
            "[{op}] a layer that is not causal continues a cache: its earlier tokens have not attended to those of \
             this call, as in one call over all they would; expected `with_causal(true)`, or a causal mask"
        );
    }
    if padding.is_stored && call_mask.is_none_or(|mask| !mask.can_name_padding()) {
        warn_once!(
            "[{op}] this call attends to padding: the mask of an earlier call hid some of its tokens, the cache stores \
             them, and the mask of this call has no starts, lengths or tensors that hide them; expected padding in \
             `AttentionInput::with_starts` and `with_valid_lens`, which leave it out of the cache"
        );
    }
    let Some(call_mask) = call_mask else { return Ok(()) };
    if padding.is_left_out && call_mask.counts_left_padding() {
        warn_once!(
            "[{op}] the mask has starts above 0 or a tensor with a row for each sequence, but the cache does not store \
             the padding that `AttentionInput::with_starts` left out of an earlier call; expected a mask that does not \
             count it"
        );
    }
    if tokens.t > 0 {
        check_offset(op, call_mask, tokens, before)?;
    }
    Ok(())
}

/// Checks that the offsets of a causal mask are the numbers of positions that the cache has.
fn check_offset(op: &str, mask: &AttentionMask, tokens: &NewTokens, before: usize) -> Result<()> {
    let sequences = tokens.before.iter().zip(&tokens.tokens);
    let first_queries: Vec<_> = sequences.map(|(&len, new)| len as i128 - new.start as i128).collect();
    let Some(OtherOffset { sequence, position }) = mask.other_offset(&first_queries) else { return Ok(()) };
    if position == 0 {
        bail!(
            "[{op}] by the mask, query i attends to keys 0..=i (`causal_upper_left`), but {before} positions are in \
             the cache before query 0; expected `causal`, which is aligned to the end"
        )
    }
    warn_once!(
        "[{op}] an offset of the mask puts query 0 of sequence {sequence} at position {position}, and the cache at {}; \
         expected `causal`, which is aligned to the end",
        first_queries[sequence]
    );
    Ok(())
}

/// Warns about a length in the mask of a call without a cache that is above the number of keys, of which it masks none.
/// `usize::MAX` says on purpose that there is no padding.
pub(super) fn about_lengths(op: &str, input: &AttentionInput, t_kv: usize) {
    if input.any_cache().is_some() || input.packed.is_some() || input.any_pages().is_some() {
        return;
    }
    if let Some(length) = input.mask().and_then(AttentionMask::largest_length)
        && length > t_kv
        && length < usize::MAX
    {
        warn_once!(
            "[{op}] the mask has a length of {length}, and there are {t_kv} keys: it masks none of them; expected the \
             number of tokens of each sequence"
        );
    }
}

/// Warns about dropout in a call with a cache that was not made for training.
pub(super) fn about_dropout(op: &str, cache: &AttentionCache) {
    if !cache.config().detached() {
        warn_once!(
            "[{op}] dropout happens in a call with a cache; expected `with_train(false)` for inference, or a cache \
             made `with_detached(true)` for training"
        );
    }
}

/// Warns about an adapter that training does not change.
pub(super) fn about_idle_adapter(op: &str) {
    warn_once!(
        "[{op}] an adapter is unchanged after {IDLE_CALLS} calls of training; expected an optimizer that was made after \
         `Adapter::load_onto`, which adds the variables of a new adapter"
    );
}

/// Warns about a causal layer, or one with a window, whose keys are another sequence's.
pub(super) fn about_cross_attention(op: &str) {
    warn_once!(
        "[{op}] a layer that is causal or has a window is used in cross-attention, where its mask counts from the end \
         of the other sequence; expected a config without it"
    );
}

/// Warns about positions of new tokens that do not come after the `last` one in the cache.
pub(super) fn about_positions(op: &str, sequence: usize, first: usize, last: usize) {
    warn_once!(
        "[{op}] the positions of sequence {sequence} continue at {first}, but the last one in the cache is {last}; \
         expected positions that continue those of earlier calls"
    );
}

/// Warns about axis positions of new tokens that begin at 0 after those in the cache.
pub(super) fn about_axis_positions(op: &str, sequence: usize, before: usize) {
    warn_once!(
        "[{op}] the axis positions of sequence {sequence} begin at 0 on all axes after {before} positions in the \
         cache; expected positions that continue those of earlier calls"
    );
}
