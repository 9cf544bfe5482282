//! Models whose layers stand in stages, counted through all of them.

use candle_core::Result;

use super::fields::Fields;

/// `depths`, the layers of each stage, and what stages differ in.
#[derive(Clone, Copy)]
pub(super) struct Stages {
    /// The default of `depths`.
    pub depths: &'static [usize],
    /// That of the heads of each stage.
    pub heads: &'static [usize],
    /// Whether each is twice as wide as the one before.
    pub widens: bool,
}

impl Stages {
    /// The stage of the layer, and its number there.
    pub fn place(&self, fields: &Fields) -> Result<[usize; 2]> {
        let depths = fields.get_or("depths", self.depths.to_vec())?;
        let mut number = fields.layer;
        for (stage, &depth) in depths.iter().enumerate() {
            match number.checked_sub(depth) {
                Some(rest) => number = rest,
                None => return Ok([stage, number]),
            }
        }
        fields.fail(format!("there is no layer {}, depths is {depths:?}", fields.layer))
    }

    /// `embed_dim` and the number of heads of the layer; the width is the first stage's, and `heads` the field with
    /// those of each.
    pub fn sizes(&self, fields: &Fields, width: usize, heads: &str) -> Result<[usize; 2]> {
        let [stage, _] = self.place(fields)?;
        let each = fields.get_or(heads, self.heads.to_vec())?;
        let Some(&num_heads) = each.get(stage).filter(|&&heads| heads > 0) else {
            return fields.fail(format!("{heads} is {each:?}, expected at least 1 for stage {stage}"));
        };
        let times =
            if self.widens { u32::try_from(stage).ok().and_then(|stage| 2usize.checked_pow(stage)) } else { Some(1) };
        match times.and_then(|times| width.checked_mul(times)) {
            Some(width) => Ok([width, num_heads]),
            None => fields.fail(format!("stage {stage} is too wide to address, from {width}")),
        }
    }
}
