//! The score modifiers of a call.

use crate::inputs::Input;

/// The scale, and the modifiers of scores and weights, applied in the order of the fields.
///
/// `T` is a tensor. [`map`](Self::map) converts the tensors of one package to those of another. A field that is added
/// here is a compile error in every package that has to decide about it.
#[derive(Debug, Clone, Copy)]
pub struct ScoreModifiers<T> {
    /// The factor of the product of a query and a key, usually 1 / √D.
    pub scale: f64,
    /// `softcap · tanh(score / softcap)`.
    pub softcap: Option<f64>,
    /// (H,): `-slope · |position of the query - key|` is added.
    pub alibi_slopes: Option<T>,
    /// (B or 1, H, T_q + T_kv - 1), of which entry `T_q - 1 - query + key` is added. Packed sequences share one (1, H,
    /// ..), where T_q and T_kv are the largest numbers of queries and of keys of a sequence.
    pub relative_bias: Option<T>,
    /// (B or 1, H or 1, T_q or 1, T_kv or 1): added.
    pub bias: Option<T>,
    /// Bytes of such a shape: 0 masks a key for a query.
    pub boolean_mask: Option<T>,
    /// (H,): a logit for each query head that takes weight and has no value.
    pub sinks: Option<T>,
    /// Dropout of the weights.
    pub dropout: Option<Dropout<T>>,
}

/// Weights are dropped with a probability, and the others divided by the probability of being kept.
#[derive(Debug, Clone, Copy)]
pub struct Dropout<T> {
    /// The probability, from 0 to 1.
    pub p: f64,
    /// The choice of the weights that are dropped.
    pub mask: DropoutMask<T>,
}

/// A choice of the weights that are dropped.
#[derive(Debug, Clone, Copy)]
pub enum DropoutMask<T> {
    /// The weights that Philox 4×32-7 draws for a seed: the key is the seed, the counter is (key / 4, query, head,
    /// sequence).
    Philox(u64),
    /// The weights that it draws for a seed on the device, u32 (2,): the low and the high half of the number.
    PhiloxOnDevice(T),
    /// The weights whose bit is 0: a bit for each of (B, H, T_q, T_kv), the first of eight in the lowest bit of a byte.
    KeptBits(T),
}

impl<T> Default for ScoreModifiers<T> {
    /// Returns a scale of 1 without modifiers.
    fn default() -> Self {
        Self {
            scale: 1.0,
            softcap: None,
            alibi_slopes: None,
            relative_bias: None,
            bias: None,
            boolean_mask: None,
            sinks: None,
            dropout: None,
        }
    }
}

impl<T> ScoreModifiers<T> {
    /// Returns the modifiers with what `change` makes of each tensor.
    ///
    /// # Errors
    /// If `change` fails.
    pub fn map<'a, U, E>(
        &'a self,
        change: &mut impl FnMut(Input, &'a T) -> Result<U, E>,
    ) -> Result<ScoreModifiers<U>, E> {
        let Self { scale, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks, dropout } = self;
        Ok(ScoreModifiers {
            scale: *scale,
            softcap: *softcap,
            alibi_slopes: map_one(Input::AlibiSlopes, alibi_slopes, change)?,
            relative_bias: map_one(Input::RelativeBias, relative_bias, change)?,
            bias: map_one(Input::Bias, bias, change)?,
            boolean_mask: map_one(Input::BooleanMask, boolean_mask, change)?,
            sinks: map_one(Input::Sinks, sinks, change)?,
            dropout: match dropout {
                Some(Dropout { p, mask }) => Some(Dropout { p: *p, mask: mask.map(change)? }),
                None => None,
            },
        })
    }
}

impl<T> DropoutMask<T> {
    fn map<'a, U, E>(&'a self, change: &mut impl FnMut(Input, &'a T) -> Result<U, E>) -> Result<DropoutMask<U>, E> {
        Ok(match self {
            Self::Philox(seed) => DropoutMask::Philox(*seed),
            Self::PhiloxOnDevice(seed) => DropoutMask::PhiloxOnDevice(change(Input::Dropout, seed)?),
            Self::KeptBits(bits) => DropoutMask::KeptBits(change(Input::Dropout, bits)?),
        })
    }
}

/// Changes a tensor, if there is one.
pub(crate) fn map_one<'a, T, U, E>(
    input: Input,
    tensor: &'a Option<T>,
    change: &mut impl FnMut(Input, &'a T) -> Result<U, E>,
) -> Result<Option<U>, E> {
    match tensor {
        Some(tensor) => Ok(Some(change(input, tensor)?)),
        None => Ok(None),
    }
}
