//! Rotary positions: `rope_parameters`, or `rope_theta` and `rope_scaling` in older configurations.

use candle_core::Result;

use super::fields::Fields;
use candle_attention_core::{RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle};

/// The kinds of layers that may have parameters of their own.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The rotary positions of a family: the defaults of its class, and the names of its fields.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rope {
    theta: (&'static str, f64),
    /// The field with the part of each head that is rotated, and its default; without it heads are rotated as a whole.
    partial: Option<(&'static str, f64)>,
    /// `max_position_embeddings`.
    context: usize,
    style: RopeStyle,
    /// Whether LongRoPE is the only scaling, and has two more names (Phi 3).
    long_rope_only: bool,
    /// Positions on several axes: the sections of the class, or none for equal ones.
    axes: Option<(RopeAxisLayout, &'static [usize])>,
    /// Whether `rope_parameters` may also be one object for layers of all kinds, whose scaling is for those that are
    /// scaled.
    one_for_all: bool,
    /// The scaling of a config with neither `rope_scaling` nor `rope_parameters`.
    default_scaling: fn(&Fields) -> Result<RopeScaling>,
}

/// Whole heads in halves, with `rope_theta`, for a context of so many positions.
pub(super) const fn rope(theta: f64, context: usize) -> Rope {
    Rope {
        theta: ("rope_theta", theta),
        partial: None,
        context,
        style: RopeStyle::Halves,
        long_rope_only: false,
        axes: None,
        one_for_all: false,
        default_scaling: |_| Ok(RopeScaling::None),
    }
}

impl Rope {
    /// Another field than `rope_theta`.
    pub(super) const fn theta_from(self, name: &'static str) -> Self {
        Self { theta: (name, self.theta.1), ..self }
    }

    /// Partial rotary: the field with the part of each head that is rotated, and its default.
    pub(super) const fn partial(self, name: &'static str, default: f64) -> Self {
        Self { partial: Some((name, default)), ..self }
    }

    pub(super) const fn interleaved(self) -> Self {
        Self { style: RopeStyle::Interleaved, ..self }
    }

    pub(super) const fn long_rope_only(self) -> Self {
        Self { long_rope_only: true, ..self }
    }

    /// Positions on several axes, whose sections are these unless `mrope_section` gives others.
    pub(super) const fn on_axes(self, layout: RopeAxisLayout, sections: &'static [usize]) -> Self {
        Self { axes: Some((layout, sections)), ..self }
    }

    pub(super) const fn or_one_for_all(self) -> Self {
        Self { one_for_all: true, ..self }
    }

    pub(super) const fn scaled_unless_given(self, scaling: fn(&Fields) -> Result<RopeScaling>) -> Self {
        Self { default_scaling: scaling, ..self }
    }

    /// For heads of this width.
    pub(super) fn config(&self, fields: &Fields, head_dim: usize) -> Result<RopeConfig> {
        let parameters = match fields.object("rope_scaling")? {
            None => fields.object("rope_parameters")?,
            scaling => scaling,
        };
        if parameters.as_ref().is_some_and(|parameters| KINDS.iter().any(|kind| parameters.get(kind).is_some())) {
            return fields.fail("rotary parameters for each kind of layer are not supported");
        }
        self.read(fields, parameters, head_dim)
    }

    /// For a family with parameters for each kind of layer. `scaled` is whether `rope_scaling` of older configurations
    /// is for layers of this kind.
    pub(super) fn of_kind(&self, fields: &Fields, kind: &str, scaled: bool, head_dim: usize) -> Result<RopeConfig> {
        let parameters = match (fields.object("rope_scaling")?, fields.object("rope_parameters")?) {
            (Some(_), Some(_)) => return fields.fail("rope_scaling and rope_parameters are both given, expected one"),
            (_, Some(kinds)) if KINDS.iter().any(|kind| kinds.has(kind)) => kinds.object(kind)?,
            (_, Some(all)) if self.one_for_all => {
                let rope = self.read(fields, Some(all), head_dim)?;
                return Ok(if scaled { rope } else { rope.with_scaling(RopeScaling::None) });
            }
            (_, Some(_)) => return fields.fail("rope_parameters has no full_attention and no sliding_attention"),
            (scaling, None) => scaling.filter(|_| scaled),
        };
        self.read(fields, parameters, head_dim)
    }

    fn read(&self, fields: &Fields, parameters: Option<Fields>, head_dim: usize) -> Result<RopeConfig> {
        let rope = self.read_angles(fields, parameters.as_ref(), head_dim)?;
        let Some((layout, sections)) = self.axes else { return Ok(rope) };
        let given = parameters.map_or(Ok(None), |parameters| parameters.optional("mrope_section"))?;
        let sections = given.unwrap_or_else(|| match sections {
            [] => vec![rope.rotary_dim(head_dim) / 4; 2],
            sections => sections.to_vec(),
        });
        Ok(rope.with_axes(RopeAxes::new(sections, layout)))
    }

    fn read_angles(&self, fields: &Fields, parameters: Option<&Fields>, head_dim: usize) -> Result<RopeConfig> {
        let given = |name| parameters.map_or(Ok(None), |parameters| parameters.optional(name));
        let base = match given("rope_theta")? {
            Some(base) => base,
            None => fields.get_or(self.theta.0, self.theta.1)?,
        };
        let (name, default) = self.partial.unwrap_or(("partial_rotary_factor", 1.0));
        let part = match given("partial_rotary_factor")? {
            Some(part) => part,
            None => fields.optional(name)?.unwrap_or(default),
        };
        let scaling = match parameters {
            Some(parameters) => self.scaling(fields, parameters, part)?,
            None => (self.default_scaling)(fields)?,
        };
        let rope = RopeConfig::new(base).with_style(self.style);
        if matches!(scaling, RopeScaling::Proportional { .. }) || part == 1.0 {
            return Ok(rope.with_scaling(scaling));
        }
        if self.partial.is_none() {
            return fields.fail(format!("{name} is {part:?}, which is not supported, expected 1"));
        }
        let rotary_dim = head_dim as f64 * part;
        if !(rotary_dim >= 1.0 && part <= 1.0) {
            return fields.fail(format!("{name} is {part:?}, expected a part of heads that are {head_dim} wide"));
        }
        Ok(rope.with_rotary_dim(rotary_dim as usize).with_scaling(scaling))
    }

    fn scaling(&self, fields: &Fields, object: &Fields, part: f64) -> Result<RopeScaling> {
        let kind = match object.optional::<&str>("rope_type")? {
            None => object.optional::<&str>("type")?.unwrap_or("default"),
            Some(kind) => kind,
        };
        let kind = match kind {
            "su" | "yarn" if self.long_rope_only => "longrope",
            // Positions on several axes, by their old and their new name.
            "mrope" | "axial" if self.axes.is_some() => "default",
            "default" | "longrope" => kind,
            _ if self.long_rope_only => {
                return fields.fail(format!("rope_type is {kind:?}, expected \"default\" or \"longrope\""));
            }
            _ => kind,
        };
        let context = fields.get_or("max_position_embeddings", self.context)?;
        let original = || -> Result<usize> {
            const NAME: &str = "original_max_position_embeddings";
            match fields.optional(NAME)? {
                Some(original) => Ok(original),
                // Phi 3's class has a default of its own.
                None if self.long_rope_only => Ok(self.context),
                None => Ok(object.optional(NAME)?.unwrap_or(context)),
            }
        };
        Ok(match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: object.required("factor")? },
            "dynamic" => RopeScaling::Dynamic { factor: object.required("factor")?, original_context: context },
            "llama3" => RopeScaling::Llama3 {
                factor: object.required("factor")?,
                low_freq_factor: object.required("low_freq_factor")?,
                high_freq_factor: object.required("high_freq_factor")?,
                original_context: original()?,
            },
            "yarn" => {
                let original_context = original()?;
                let factor = match object.get("factor") {
                    None if object.has("factor") => context as f64 / original_context as f64,
                    _ => object.required("factor")?,
                };
                // transformers treats 0 as absent.
                let beta = |name: &str, default: f64| -> Result<f64> {
                    Ok(object.optional(name)?.filter(|&beta| beta != 0.0).unwrap_or(default))
                };
                RopeScaling::Yarn {
                    factor,
                    original_context,
                    beta_fast: beta("beta_fast", 32.0)?,
                    beta_slow: beta("beta_slow", 1.0)?,
                    attention_factor: object.optional("attention_factor")?,
                    mscale: object.optional("mscale")?,
                    mscale_all_dim: object.optional("mscale_all_dim")?,
                    truncate: object.flag("truncate", true)?,
                }
            }
            "longrope" => {
                let original_context = original()?;
                let factor = object.optional("factor")?;
                RopeScaling::LongRope {
                    short_factor: object.required("short_factor")?,
                    long_factor: object.required("long_factor")?,
                    original_context,
                    factor: Some(factor.unwrap_or(context as f64 / original_context as f64)),
                    attention_factor: object.optional("attention_factor")?,
                }
            }
            "proportional" if self.partial.is_none() => {
                RopeScaling::Proportional { factor: object.get_or("factor", 1.0)?, proportion: part }
            }
            _ => {
                return fields.fail(format!(
                    "rope_type is {kind:?}, expected one of: default, linear, dynamic, llama3, yarn, longrope, proportional"
                ));
            }
        })
    }
}
