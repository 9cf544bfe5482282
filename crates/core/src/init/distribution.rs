//! Candle's initialisation hints in PyTorch's terms.

use candle_core::Shape;
use candle_nn::Init;
use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};

/// A hint in PyTorch's terms, within the bounds that PyTorch checks.
#[derive(Debug, PartialEq)]
pub(super) enum Distribution {
    Constant(f32),
    Uniform { lo: f32, hi: f32 },
    Normal { mean: f64, std: f64 },
}

impl Distribution {
    /// The arguments of PyTorch's function, or what PyTorch would object to.
    pub(super) fn of(hint: Init, shape: &Shape) -> Result<Self, String> {
        match hint {
            Init::Const(value) => {
                let rounded = value as f32;
                if value.is_finite() && rounded.is_infinite() {
                    return Err(format!("the constant {value} is too large for f32"));
                }
                Ok(Self::Constant(rounded))
            }
            // A shape without elements draws nothing; its fan may be 0, and a bound from it infinite.
            _ if shape.dims().contains(&0) => Ok(Self::Constant(0.0)),
            Init::Uniform { lo, up } => Self::uniform(lo, up),
            Init::Randn { mean, stdev } => Self::normal(mean, stdev),
            Init::Kaiming { dist, fan, non_linearity } => {
                // Candle's default hint: that of its linear layers and convolutions.
                let is_default = matches!(
                    (dist, fan, non_linearity),
                    (NormalOrUniform::Normal, FanInOut::FanIn, NonLinearity::ReLU)
                );
                let gain = if is_default { linear_gain() } else { non_linearity.gain() };
                let std = gain / (fan.for_shape(shape) as f64).sqrt();
                if is_default || matches!(dist, NormalOrUniform::Uniform) {
                    let bound = 3f64.sqrt() * std;
                    Self::uniform(-bound, bound)
                } else {
                    Self::normal(0.0, std)
                }
            }
        }
    }

    fn uniform(lo: f64, up: f64) -> Result<Self, String> {
        let (lo_f32, hi_f32) = (lo as f32, up as f32);
        if lo <= up && (hi_f32 - lo_f32).is_finite() {
            Ok(Self::Uniform { lo: lo_f32, hi: hi_f32 })
        } else {
            Err(format!(
                "a uniform distribution takes bounds lo <= up that are finite in f32, as is up - lo; found lo {lo}, up {up}"
            ))
        }
    }

    fn normal(mean: f64, std: f64) -> Result<Self, String> {
        if (mean as f32).is_finite() && std >= 0.0 && (std as f32).is_finite() {
            Ok(Self::Normal { mean, std })
        } else {
            Err(format!(
                "a normal distribution takes a mean and a standard deviation >= 0 that are finite in f32; found {mean}, {std}"
            ))
        }
    }
}

/// The gain of `torch.nn.Linear.reset_parameters`, a leaky ReLU of slope sqrt(5), in PyTorch's own roundings.
fn linear_gain() -> f64 {
    (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_kaiming_gain_of_one_over_root_three_is_the_bound_of_a_linear_layer() {
        for fan_in in 1..=100_000usize {
            let shape = Shape::from((1, fan_in));
            let hint = Init::Kaiming {
                dist: NormalOrUniform::Uniform,
                fan: FanInOut::FanIn,
                non_linearity: NonLinearity::ExplicitGain(1.0 / 3f64.sqrt()),
            };
            let bias_bound = (1.0 / (fan_in as f64).sqrt()) as f32;
            let expected = Ok(Distribution::Uniform { lo: -bias_bound, hi: bias_bound });
            assert_eq!(Distribution::of(hint, &shape), expected, "fan in {fan_in}");
            assert_eq!(Distribution::of(candle_nn::init::DEFAULT_KAIMING_NORMAL, &shape), expected, "fan in {fan_in}");
        }
    }
}
