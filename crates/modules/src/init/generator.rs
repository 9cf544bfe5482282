//! PyTorch's CPU random generator (a Mersenne Twister and the distributions on it), and Candle's initialisation hints
//! as PyTorch's distributions.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI, TAU};

use candle_core::{Device, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::init::{FanInOut, NonLinearity, NormalOrUniform};
use rand_mt::Mt;

use super::buffer;
use crate::base::is_addressable;

/// The state that `torch.manual_seed` sets: MT19937, and the second number of the last Box-Muller pair if it is unused.
pub(super) struct Generator {
    twister: Mt,
    spare_normal: Option<f64>,
}

impl Generator {
    /// Seeds the twister with the low 32 bits, as PyTorch does.
    pub(super) fn new(seed: u64) -> Self {
        Self { twister: Mt::new(seed as u32), spare_normal: None }
    }

    /// Draws a tensor by a hint, after checking that PyTorch accepts the distribution. `what` begins the error texts.
    pub(super) fn draw(&mut self, what: &str, hint: Init, shape: &Shape) -> Result<Tensor> {
        let is_finite = |x: f64| (x as f32).is_finite();
        let zeros = || buffer(what, shape, 0f32);
        let numbers = match hint {
            Init::Const(value) if value.is_finite() && !is_finite(value) => {
                bail!("{what} the constant {value} is too large for f32")
            }
            Init::Const(value) => buffer(what, shape, value as f32)?,
            // For an empty tensor nothing is drawn: its fan may be 0 and the bound infinite. A tensor that is too large
            // to address has no fan; allocating it is an error.
            _ if shape.dims().contains(&0) || !is_addressable(shape.dims()) => zeros()?,
            Init::Uniform { lo, up } if lo <= up && (up as f32 - lo as f32).is_finite() => {
                let mut values = zeros()?;
                self.uniform(lo as f32, up as f32, &mut values);
                values
            }
            Init::Uniform { lo, up } => bail!(
                "{what} a uniform distribution takes bounds lo <= up that are finite in f32, as is up - lo; found lo \
                 {lo}, up {up}"
            ),
            Init::Randn { mean, stdev } if is_finite(mean) && is_finite(stdev) && stdev >= 0.0 => {
                let mut values = zeros()?;
                self.normal(mean, stdev, &mut values);
                values
            }
            Init::Randn { mean, stdev } => bail!(
                "{what} a normal distribution takes a mean and a standard deviation >= 0 that are finite in f32; found \
                 {mean}, {stdev}"
            ),
            Init::Kaiming { .. } => return self.draw(what, resolved(hint, shape), shape),
        };
        Tensor::from_vec(numbers, shape, &Device::Cpu)
    }

    /// Draws `uniform_(lo, hi)`, with one 32-bit output for each element.
    ///
    /// PyTorch's vector kernels scale and shift with one rounding, which `mul_add` guarantees on every machine.
    /// Computing in f64 would round twice if `lo` has bits far below the bits of the range. A value that rounds up to
    /// `hi` becomes `lo`, as in PyTorch 2.15, since `hi` is outside the interval.
    fn uniform(&mut self, lo: f32, hi: f32, out: &mut [f32]) {
        let range = hi - lo;
        out.fill_with(|| {
            let value = self.unit_f32().mul_add(range, lo);
            if value < hi { value } else { lo }
        });
    }

    /// Draws `normal_(mean, std)`: in blocks of sixteen in f32, or one by one in f64 for fewer than sixteen elements.
    fn normal(&mut self, mean: f64, std: f64, out: &mut [f32]) {
        if out.len() < BLOCK {
            return out.fill_with(|| self.unit_normal().mul_add(std, mean) as f32);
        }
        let simd = pulp::Arch::new();
        let mean = mean as f32;
        let std = std as f32;
        out.fill_with(|| self.unit_f32());
        let (blocks, remainder) = out.as_chunks_mut();
        simd.dispatch(BoxMuller { blocks, mean, std });
        // If the last block is not full, PyTorch draws the last sixteen elements again, including some of the block
        // before.
        if !remainder.is_empty()
            && let Some(last) = out.last_chunk_mut()
        {
            last.fill_with(|| self.unit_f32());
            simd.dispatch(BoxMuller { blocks: std::slice::from_mut(last), mean, std });
        }
    }

    /// Draws `bernoulli_(probability)` as a byte from one 64-bit output.
    pub(super) fn bernoulli(&mut self, probability: f64) -> u8 {
        u8::from(self.unit_f64() < probability)
    }

    /// Draws a multiple of 2^-24 from [0, 1).
    fn unit_f32(&mut self) -> f32 {
        const SCALE: f32 = 1.0 / (1 << f32::MANTISSA_DIGITS) as f32;
        (self.twister.next_u32() & 0x00ff_ffff) as f32 * SCALE
    }

    /// Draws a multiple of 2^-53 from [0, 1).
    fn unit_f64(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1u64 << f64::MANTISSA_DIGITS) as f64;
        (self.twister.next_u64() & 0x001f_ffff_ffff_ffff) as f64 * SCALE
    }

    /// Draws a normal number by Box-Muller in f64. The second number of each pair is stored for the next call. The
    /// library functions may differ from PyTorch's in the last bit of f64, which rounding to f32 removes.
    fn unit_normal(&mut self) -> f64 {
        if let Some(spare) = self.spare_normal.take() {
            return spare;
        }
        let angle = std::f64::consts::TAU * self.unit_f64();
        let radius = (-2.0 * (-self.unit_f64()).ln_1p()).sqrt();
        let (sin, cos) = angle.sin_cos();
        self.spare_normal = Some(radius * sin);
        radius * cos
    }
}

/// The number of uniform draws, and of normal numbers, of one block of the transform.
const BLOCK: usize = 16;

/// The Box-Muller transform of blocks of sixteen, with the bits of PyTorch's AVX2 kernel.
///
/// The polynomials come from the Cephes library's single-precision `logf`, `sinf` and `cosf`, for the small domain that
/// the transform needs: a logarithm on (0, 1] and an angle on [0, 2π]. There is a `mul_add` where PyTorch's compiled
/// kernel rounds once, and a product and a sum where it rounds twice. The functions around `mul_add` are inlined, so
/// that it is an instruction of the processor and not a call of the C library.
struct BoxMuller<'a> {
    /// Uniform draws from [0, 1): eight for radii, then eight for angles. They are replaced by sixteen normal numbers,
    /// the cosines first.
    blocks: &'a mut [[f32; BLOCK]],
    mean: f32,
    std: f32,
}

impl pulp::WithSimd for BoxMuller<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let Self { blocks, mean, std } = self;
        for block in blocks {
            let (radii, angles) = block.split_at_mut(BLOCK / 2);
            for (first, second) in radii.iter_mut().zip(angles) {
                let radius = (-2.0 * ln(1.0 - *first)).sqrt();
                let (sin, cos) = sin_cos(TAU * *second);
                *first = (radius * cos).mul_add(std, mean);
                *second = (radius * sin).mul_add(std, mean);
            }
        }
    }
}

/// Returns the natural logarithm of a positive normal number.
#[expect(clippy::excessive_precision, reason = "the coefficients keep the digits that Cephes prints")]
#[inline(always)]
fn ln(x: f32) -> f32 {
    // ln 2 in two parts, the high one short enough for exact multiples.
    const LN_2_HIGH: f32 = 0.693_359_375;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 8] = [
        -1.151_461_031e-1,
        1.167_699_874e-1,
        -1.242_014_084_6e-1,
        1.424_932_278_7e-1,
        -1.666_805_766_5e-1,
        2.000_071_476_5e-1,
        -2.499_999_399_3e-1,
        3.333_333_117_4e-1,
    ];
    // x = mantissa · 2^exponent with the mantissa in [0.5, 1), then in [√½, √2) less one.
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as f32 - 126.0;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0.5f32.to_bits());
    if m < FRAC_1_SQRT_2 {
        exponent -= 1.0;
        m = m - 1.0 + m;
    } else {
        m -= 1.0;
    }
    let m2 = m * m;
    let mut polynomial = 7.037_683_629_2e-2f32;
    for c in POLYNOMIAL {
        polynomial = polynomial.mul_add(m, c);
    }
    let tail = (polynomial * m).mul_add(m2, exponent * LN_2_LOW);
    let tail = m2.mul_add(-0.5, tail);
    exponent.mul_add(LN_2_HIGH, m + tail)
}

/// Returns the sine and the cosine of an angle in [0, 2π].
#[expect(clippy::excessive_precision, reason = "the coefficients keep the digits that Cephes prints")]
#[inline(always)]
fn sin_cos(angle: f32) -> (f32, f32) {
    // π/4 in three parts, so that subtracting a multiple is exact.
    const QUARTER_PI: [f32; 3] = [0.785_156_25, 2.418_756_484_985_351_562_5e-4, 3.774_894_977_445_941_08e-8];
    let octant = ((angle * (2.0 * FRAC_2_PI)) as u32 + 1) & !1;
    let multiple = octant as f32;
    let mut x = angle;
    for part in QUARTER_PI {
        x = multiple.mul_add(-part, x);
    }
    let x2 = x * x;

    let cos = 2.443_315_711_809_948e-5f32.mul_add(x2, -1.388_731_625_493_765e-3);
    let cos = cos.mul_add(x2, 4.166_664_568_298_827e-2) * x2;
    let cos = cos.mul_add(x2, -0.5 * x2) + 1.0;

    let sin = (-1.951_529_589_1e-4f32).mul_add(x2, 8.332_160_873_6e-3);
    let sin = sin.mul_add(x2, -1.666_665_461_1e-1) * x2;
    let sin = sin.mul_add(x, x);

    match octant % 8 {
        0 => (sin, cos),
        2 => (cos, -sin),
        4 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// Returns the uniform or normal distribution that PyTorch draws for a Kaiming hint. Other hints are returned
/// unchanged.
fn resolved(hint: Init, shape: &Shape) -> Init {
    let Init::Kaiming { dist, fan, non_linearity } = hint else { return hint };
    // Candle's default hint, of its linear layers and convolutions.
    let is_default =
        matches!((dist, fan, non_linearity), (NormalOrUniform::Normal, FanInOut::FanIn, NonLinearity::ReLU));
    // The gain of `torch.nn.Linear.reset_parameters`, a leaky ReLU of slope sqrt(5), rounded as PyTorch does.
    let gain_of_linear = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
    let gain = if is_default { gain_of_linear } else { non_linearity.gain() };
    let stdev = gain / (fan.for_shape(shape) as f64).sqrt();
    if is_default || matches!(dist, NormalOrUniform::Uniform) {
        let bound = 3f64.sqrt() * stdev;
        return Init::Uniform { lo: -bound, up: bound };
    }
    Init::Randn { mean: 0.0, stdev }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kaiming_uniform_bound_matches_linear_layer() {
        for fan_in in 1..=100_000usize {
            let shape = Shape::from((1, fan_in));
            let uniform = Init::Kaiming {
                dist: NormalOrUniform::Uniform,
                fan: FanInOut::FanIn,
                non_linearity: NonLinearity::ExplicitGain(1.0 / 3f64.sqrt()),
            };
            let bias_bound = (1.0 / (fan_in as f64).sqrt()) as f32;
            for hint in [uniform, candle_nn::init::DEFAULT_KAIMING_NORMAL] {
                let Init::Uniform { lo, up } = resolved(hint, &shape) else { panic!("{hint:?} is uniform") };
                assert_eq!((lo as f32, up as f32), (-bias_bound, bias_bound), "fan in {fan_in}");
            }
        }
    }
}
