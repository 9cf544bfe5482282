//! The score modifiers of a call.

use crate::gradients::PerInput;
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

/// The format in which a path computes scores. The numbers of a call have to be normal numbers of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFormat {
    /// 32 bits, for inputs of 16 or 32 bits.
    F32,
    /// 64 bits, on the reference path.
    F64,
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

impl<T> ScoreModifiers<T> {
    /// Checks the numbers of a call, whose scores are computed in a format.
    ///
    /// # Errors
    /// `name is .., expected ..` of the first number that is out of its range.
    pub fn check_numbers(&self, format: ScoreFormat) -> Result<(), String> {
        let Self { scale, softcap, alibi_slopes: _, relative_bias: _, bias: _, boolean_mask: _, sinks: _, dropout } =
            self;
        let smallest;
        let largest;
        match format {
            ScoreFormat::F32 => (smallest, largest) = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)),
            ScoreFormat::F64 => (smallest, largest) = (f64::MIN_POSITIVE, f64::MAX),
        }
        if !(-largest..=largest).contains(scale) {
            return Err(format!("scale is {scale:?}, expected a finite number in {format:?}"));
        }
        // One over the softcap is a factor too.
        if let Some(softcap) = softcap
            && !(smallest..=largest).contains(softcap)
        {
            return Err(format!("softcap is {softcap:?}, expected a finite number above zero in {format:?}"));
        }
        if let Some(Dropout { p, .. }) = dropout
            && !(0.0..=1.0).contains(p)
        {
            return Err(format!("dropout is {p:?}, expected a probability from 0 to 1"));
        }
        Ok(())
    }

    /// Returns the tensors that have gradients. Queries, keys and values are not among the modifiers.
    pub(crate) fn differentiable(&self) -> PerInput<Option<&T>> {
        let Self { scale: _, softcap: _, alibi_slopes, relative_bias, bias, boolean_mask: _, sinks, dropout: _ } = self;
        PerInput {
            q: None,
            k: None,
            v: None,
            bias: bias.as_ref(),
            relative_bias: relative_bias.as_ref(),
            alibi_slopes: alibi_slopes.as_ref(),
            sinks: sinks.as_ref(),
        }
    }

    /// Returns the names of the modifiers that the call has, for messages. The scale is not one of them.
    pub fn names(&self) -> Vec<&'static str> {
        let Self { scale: _, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks, dropout } = self;
        let mut names = Vec::new();
        if softcap.is_some() {
            names.push("softcap");
        }
        if alibi_slopes.is_some() {
            names.push("ALiBi");
        }
        if relative_bias.is_some() {
            names.push("relative bias");
        }
        if bias.is_some() {
            names.push("bias tensor");
        }
        if boolean_mask.is_some() {
            names.push("boolean mask");
        }
        if sinks.is_some() {
            names.push("sinks");
        }
        if dropout.is_some() {
            names.push("dropout");
        }
        names
    }

    /// Returns whether a modifier changes the scores of different keys differently, apart from their products. Then the
    /// keys of a call cannot be numbered anew.
    pub fn depends_on_keys(&self) -> bool {
        let Self { scale: _, softcap: _, alibi_slopes, relative_bias, bias, boolean_mask, sinks: _, dropout } = self;
        let by_position = alibi_slopes.is_some() || relative_bias.is_some();
        by_position || bias.is_some() || boolean_mask.is_some() || dropout.is_some()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn capped(softcap: f64) -> ScoreModifiers<()> {
        ScoreModifiers { softcap: Some(softcap), ..ScoreModifiers::default() }
    }

    fn scaled(scale: f64) -> ScoreModifiers<()> {
        ScoreModifiers { scale, ..ScoreModifiers::default() }
    }

    fn dropped(p: f64) -> ScoreModifiers<()> {
        ScoreModifiers { dropout: Some(Dropout { p, mask: DropoutMask::Philox(1) }), ..ScoreModifiers::default() }
    }

    #[test]
    fn numbers_of_a_call_out_of_range_are_named() {
        let above_zero = "expected a finite number above zero in F32";
        for (modifiers, expected) in [
            (capped(0.0), format!("softcap is 0.0, {above_zero}")),
            (capped(-30.0), format!("softcap is -30.0, {above_zero}")),
            (capped(f64::NAN), format!("softcap is NaN, {above_zero}")),
            (capped(1e-40), format!("softcap is 1e-40, {above_zero}")),
            (scaled(f64::INFINITY), "scale is inf, expected a finite number in F32".into()),
            (scaled(-1e60), "scale is -1e60, expected a finite number in F32".into()),
            (dropped(1.5), "dropout is 1.5, expected a probability from 0 to 1".into()),
        ] {
            assert_eq!(modifiers.check_numbers(ScoreFormat::F32), Err(expected));
        }
        for wide in [capped(1e-40), scaled(-1e60)] {
            assert_eq!(wide.check_numbers(ScoreFormat::F64), Ok(()));
        }
        for modifiers in [ScoreModifiers::default(), capped(30.0), scaled(-0.5), dropped(1.0)] {
            assert_eq!(modifiers.check_numbers(ScoreFormat::F32), Ok(()));
        }
    }

    #[test]
    fn names_of_modifiers_tell_which_are_there_and_which_depend_on_keys() {
        assert_eq!(ScoreModifiers::<()>::default().names(), [""; 0]);
        let with_sinks = ScoreModifiers { sinks: Some(()), ..capped(2.0) };
        assert_eq!(with_sinks.names(), ["softcap", "sinks"]);
        assert!(!with_sinks.depends_on_keys());
        let biased = ScoreModifiers { relative_bias: Some(()), bias: Some(()), ..with_sinks };
        assert_eq!(biased.names(), ["softcap", "relative bias", "bias tensor", "sinks"]);
        assert!(biased.depends_on_keys());
        let masked = ScoreModifiers { boolean_mask: Some(()), alibi_slopes: Some(()), ..dropped(0.5) };
        assert_eq!(masked.names(), ["ALiBi", "boolean mask", "dropout"]);
        assert!(masked.depends_on_keys() && dropped(0.5).depends_on_keys());
    }
}
