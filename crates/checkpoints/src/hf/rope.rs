//! Rotary positions: `rope_parameters`, or `rope_theta` and `rope_scaling` in older configurations.

use candle_core::Result;
use serde_json::Value;

use super::columns::{Number, columns};
use super::fields::Fields;
use candle_attention_core::{RopeAxes, RopeAxisLayout, RopeConfig, RopeScaling, RopeStyle};
use candle_attention_modules::warn_once;

/// The kinds of layers that may have different parameters.
const KINDS: [&str; 3] = ["full_attention", "sliding_attention", "indexed_attention"];
const PARTIAL: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";

columns! {
    /// The rotary positions of a family: the defaults of its class, and the names of its fields.
    struct Rope,
    /// Rotation of whole heads, in halves.
    first WHOLE:
    layers: Rotated = Rotated::All,
    theta: Number = Number("rope_theta", 10_000.0),
    /// The default of `max_position_embeddings`.
    context: usize = 2048,
    style: RopeStyle = RopeStyle::RotateHalf,
    /// Whether LongRoPE is the only scaling, which configs of Phi 3 also call `su` or `yarn`.
    long_rope_only: bool = false,
    /// Whether `rope_parameters` may also be one object for layers of all kinds. Its scaling is for the layers without
    /// a window.
    one_for_all: bool = false,
    /// Whether `rope_scaling` of older configurations is for layers with a window too.
    shares_scaling: bool = false,
    /// Whether tokens are rotated by the opposite angles.
    reversed: bool = false,
    /// Whether the width of heads is that of the part that rotates, so that `partial_rotary_factor` is of no use.
    rotates_whole: bool = false,
    /// The change of the base that does not depend on the length of a call.
    ntk: Ntk = Ntk::None,
    [None unless set]
    /// The part of each head that is rotated; unless set, whole heads are rotated.
    part: Number,
    /// The flag by which neighbours are rotated together, unless it is false.
    interleaving_flag: &'static str,
    /// Positions on several axes.
    axes: Axes,
    /// The default of `rope_parameters` in a config that has neither that nor `rope_scaling`, in JSON.
    default_parameters: &'static str,
}

/// The layout of axes in a head, and the default of `mrope_section`. No sections mean equal ones.
#[derive(Clone, Copy)]
pub(super) struct Axes(pub RopeAxisLayout, pub &'static [usize]);

/// "NTK" scaling by a base that is the same for every length.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Ntk {
    None,
    /// Hunyuan's: `alpha` of the kind "dynamic".
    Alpha,
    /// GTE's: `factor` of the kind "ntk".
    Factor,
}

/// The layers that have rotary positions.
#[derive(Clone, Copy)]
pub(super) enum Rotated {
    All,
    /// Layers with a window.
    Windowed,
    /// Layers with a window, or all layers where `sliding_window` is null.
    WindowedIfAny,
    /// All layers, if a field is this text.
    IfText(&'static str, &'static str),
    If(fn(&Fields) -> Result<bool>),
}

/// Returns the rotation of whole heads in halves, with the defaults of `rope_theta` and `max_position_embeddings`.
pub(super) const fn rope(theta: f64, context: usize) -> Rope {
    Rope::WHOLE.theta(Number("rope_theta", theta)).context(context)
}

impl Rope {
    /// Sets the default of `partial_rotary_factor`.
    pub(super) const fn partial(self, default: f64) -> Self {
        self.part(Number(PARTIAL, default))
    }

    pub(super) const fn interleaved(self) -> Self {
        self.style(RopeStyle::Interleaved)
    }

    /// Returns whether a layer with this window has rotary positions.
    pub(super) fn rotates(&self, fields: &Fields, window: Option<usize>) -> Result<bool> {
        Ok(match self.layers {
            Rotated::All => true,
            Rotated::Windowed => window.is_some(),
            Rotated::WindowedIfAny => {
                window.is_some() || fields.nullable::<usize>("sliding_window", Some(1))?.is_none()
            }
            Rotated::IfText(name, text) => fields.get(name).is_some_and(|value| *value == text),
            Rotated::If(condition) => condition(fields)?,
        })
    }

    /// Returns the rotary positions of heads of this width.
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

    /// Returns the rotary positions of layers of a kind, in a family with parameters for each kind.
    pub(super) fn of_kind(&self, fields: &Fields, kind: &str, head_dim: usize) -> Result<RopeConfig> {
        let is_scaled = kind != "sliding_attention" || self.shares_scaling;
        let parameters = match (fields.object("rope_scaling")?, fields.object("rope_parameters")?) {
            (Some(_), Some(_)) => return fields.fail("rope_scaling and rope_parameters are both given, expected one"),
            (_, Some(kinds)) if KINDS.iter().any(|known| kinds.has(known)) => kinds.object(kind)?,
            (_, Some(all)) if self.one_for_all => {
                let rope = self.read(fields, Some(all), head_dim)?;
                return Ok(if is_scaled { rope } else { rope.with_scaling(RopeScaling::None) });
            }
            (_, Some(_)) => return fields.fail("rope_parameters has no full_attention and no sliding_attention"),
            (scaling, None) => scaling.filter(|_| is_scaled),
        };
        self.read(fields, parameters, head_dim)
    }

    /// Returns the rotary positions of given parameters, or of the family's defaults.
    pub(super) fn read(&self, fields: &Fields, given: Option<Fields>, head_dim: usize) -> Result<RopeConfig> {
        let default: Value = serde_json::from_str(self.default_parameters.unwrap_or("null")).unwrap_or_default();
        let given = given.or_else(|| Some(fields.within("rope_parameters", default.as_object()?)));
        let rope = self.angles(fields, given.as_ref(), head_dim)?;
        let Some(Axes(layout, sections)) = self.axes else { return Ok(rope) };
        let given = given.map_or(Ok(None), |given| given.optional("mrope_section"))?;
        let sections = given.unwrap_or_else(|| match sections {
            [] => vec![rope.rotary_dim(head_dim) / 4; 2],
            sections => sections.to_vec(),
        });
        Ok(rope.with_axes(RopeAxes::new(sections, layout)))
    }

    fn angles(&self, fields: &Fields, given: Option<&Fields>, head_dim: usize) -> Result<RopeConfig> {
        let number = |name| given.map_or(Ok(None), |given| given.optional(name));
        let base = match number("rope_theta")? {
            Some(base) => base,
            None => fields.get_or(self.theta.0, self.theta.1)?,
        };
        let Number(name, default) = self.part.unwrap_or(Number(PARTIAL, 1.0));
        let part = match number(PARTIAL)? {
            _ if self.rotates_whole => 1.0,
            Some(part) => part,
            None => fields.optional(name)?.unwrap_or(default),
        };
        let (base, scaling) = match given {
            Some(given) => match self.with_ntk(given, base, head_dim)? {
                Some(scaled) => scaled,
                None => (base, self.scaling(fields, given, part)?),
            },
            None => (base, RopeScaling::None),
        };
        let style = match self.interleaving_flag {
            Some(flag) if fields.flag(flag, true)? => RopeStyle::Interleaved,
            _ => self.style,
        };
        let rope = RopeConfig::new(base).with_style(style).with_reversed(self.reversed);
        if matches!(scaling, RopeScaling::Proportional { .. }) || part == 1.0 {
            return Ok(rope.with_scaling(scaling));
        }
        if self.part.is_none() {
            return fields.fail(format!("{name} is {part:?}, which is not supported, expected 1"));
        }
        let rotary_dim = head_dim as f64 * part;
        if !(rotary_dim >= 1.0 && part <= 1.0) {
            return fields.fail(format!("{name} is {part:?}, expected a part of heads that are {head_dim} wide"));
        }
        Ok(rope.with_rotary_dim(rotary_dim as usize).with_scaling(scaling))
    }

    /// Returns the base and the scaling of a family with a larger base for long contexts; `None` where the config has
    /// none.
    fn with_ntk(&self, given: &Fields, base: f64, head_dim: usize) -> Result<Option<(f64, RopeScaling)>> {
        let width = head_dim as f64;
        match (self.ntk, kind_of(given)?) {
            (Ntk::Alpha, "dynamic") => {
                let alpha = given.optional::<f64>("alpha")?.filter(|&alpha| alpha != 0.0);
                Ok(alpha.map(|alpha| (base * alpha.powf(width / (width - 2.0)), RopeScaling::None)))
            }
            (Ntk::Factor, "ntk") => {
                given.only("mixed_b", Value::Null)?;
                let factor: f64 = given.required("factor")?;
                Ok(Some((base * factor, RopeScaling::Linear { factor: factor.powf(2.0 / width) })))
            }
            _ => Ok(None),
        }
    }

    fn scaling(&self, fields: &Fields, given: &Fields, part: f64) -> Result<RopeScaling> {
        let kind = kind_of(given)?;
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
            match fields.optional(ORIGINAL)? {
                Some(original) => Ok(original),
                // Phi 3's class has its own default.
                None if self.long_rope_only => Ok(self.context),
                None => Ok(given.optional(ORIGINAL)?.unwrap_or(context)),
            }
        };
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: given.required("factor")? }),
            "dynamic" => Ok(RopeScaling::Dynamic { factor: given.required("factor")?, original_context: context }),
            "llama3" => llama3(given, original()?),
            "yarn" => yarn(given, context, original()?),
            "longrope" => long_rope(given, context, original()?),
            "proportional" if self.part.is_none() => {
                Ok(RopeScaling::Proportional { factor: given.get_or("factor", 1.0)?, proportion: part })
            }
            _ => fields.fail(format!(
                "rope_type is {kind:?}, expected one of: default, linear, dynamic, llama3, yarn, longrope, proportional"
            )),
        }
    }
}

/// Reads the kind of scaling by its name in new configurations or in old ones.
fn kind_of<'a>(given: &Fields<'a>) -> Result<&'a str> {
    match given.optional("rope_type")? {
        None => Ok(given.optional("type")?.unwrap_or("default")),
        Some(kind) => Ok(kind),
    }
}

fn llama3(given: &Fields, original_context: usize) -> Result<RopeScaling> {
    Ok(RopeScaling::Llama3 {
        factor: given.required("factor")?,
        low_freq_factor: given.required("low_freq_factor")?,
        high_freq_factor: given.required("high_freq_factor")?,
        original_context,
    })
}

fn yarn(given: &Fields, context: usize, original_context: usize) -> Result<RopeScaling> {
    warn_of_other_factor(given)?;
    // transformers treats 0 as absent.
    let beta = |name: &str, default: f64| -> Result<f64> {
        Ok(given.optional(name)?.filter(|&beta| beta != 0.0).unwrap_or(default))
    };
    Ok(RopeScaling::Yarn {
        factor: match given.get("factor") {
            None if given.has("factor") => context as f64 / original_context as f64,
            _ => given.required("factor")?,
        },
        original_context,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        attention_factor: given.optional("attention_factor")?,
        mscale: given.optional("mscale")?,
        mscale_all_dim: given.optional("mscale_all_dim")?,
        truncate: given.flag("truncate", true)?,
    })
}

/// Logs a warning, once in a process, for `attn_factor`, which vLLM multiplies by YaRN's own factor, and which
/// transformers does not read.
fn warn_of_other_factor(given: &Fields) -> Result<()> {
    let Some(factor) = given.optional::<f64>("attn_factor")?.filter(|&factor| factor != 1.0) else { return Ok(()) };
    warn_once!(
        "[hf] attn_factor of YaRN is {factor}, which is not used, as in transformers; expected attention_factor"
    );
    Ok(())
}

fn long_rope(given: &Fields, context: usize, original_context: usize) -> Result<RopeScaling> {
    let factor = given.optional("factor")?.unwrap_or(context as f64 / original_context as f64);
    Ok(RopeScaling::LongRope {
        short_factor: given.required("short_factor")?,
        long_factor: given.required("long_factor")?,
        original_context,
        factor: Some(factor),
        attention_factor: given.optional("attention_factor")?,
    })
}
