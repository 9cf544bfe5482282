//! PyTorch's CPU generator: the Mersenne Twister and what PyTorch makes of its outputs.

use super::box_muller;
use rand_mt::Mt;

/// The state that `torch.manual_seed` sets: MT19937, and the second half of a Box-Muller pair that waits for its turn.
pub(super) struct Generator {
    twister: Mt,
    spare_normal: Option<f64>,
}

impl Generator {
    /// The twister is seeded with the low 32 bits, as in PyTorch.
    pub(super) fn new(seed: u64) -> Self {
        Self { twister: Mt::new(seed as u32), spare_normal: None }
    }

    /// `uniform_(lo, hi)`, one 32-bit output an element.
    ///
    /// PyTorch's vector kernels scale and shift with one rounding, which `mul_add` promises on every machine. A detour over
    /// f64 would not: its sum rounds too where `lo` has bits far below those of the range. A value that rounds up to `hi`
    /// becomes `lo`, as in PyTorch 2.15, since `hi` is outside the interval.
    pub(super) fn uniform(&mut self, lo: f32, hi: f32, out: &mut [f32]) {
        let range = hi - lo;
        for slot in out {
            let value = self.unit_f32().mul_add(range, lo);
            *slot = if value < hi { value } else { lo };
        }
    }

    /// `normal_(mean, std)`: by blocks of sixteen in f32, or one by one in f64 for fewer elements than a block.
    pub(super) fn normal(&mut self, mean: f64, std: f64, out: &mut [f32]) {
        if out.len() < box_muller::BLOCK {
            for slot in out {
                *slot = self.unit_normal().mul_add(std, mean) as f32;
            }
            return;
        }
        let (mean, std) = (mean as f32, std as f32);
        self.fill_unit_f32(out);
        let (blocks, remainder) = out.as_chunks_mut();
        for block in blocks {
            box_muller::transform(block, mean, std);
        }
        // Where the last block is not full, the last sixteen elements are drawn afresh, those of the block before included.
        if !remainder.is_empty()
            && let Some(last) = out.last_chunk_mut()
        {
            self.fill_unit_f32(last);
            box_muller::transform(last, mean, std);
        }
    }

    /// `bernoulli_(probability)` as bytes, one 64-bit draw an element.
    pub(super) fn bernoulli(&mut self, probability: f64, out: &mut [u8]) {
        for slot in out {
            *slot = u8::from(self.unit_f64() < probability);
        }
    }

    fn fill_unit_f32(&mut self, out: &mut [f32]) {
        for slot in out {
            *slot = self.unit_f32();
        }
    }

    /// From [0, 1), a multiple of 2^-24.
    fn unit_f32(&mut self) -> f32 {
        const SCALE: f32 = 1.0 / (1 << f32::MANTISSA_DIGITS) as f32;
        (self.twister.next_u32() & 0x00ff_ffff) as f32 * SCALE
    }

    /// From [0, 1), a multiple of 2^-53.
    fn unit_f64(&mut self) -> f64 {
        const SCALE: f64 = 1.0 / (1u64 << f64::MANTISSA_DIGITS) as f64;
        (self.twister.next_u64() & 0x001f_ffff_ffff_ffff) as f64 * SCALE
    }

    /// Box-Muller in f64: a pair at a time, of which the second is kept for the next call. The library functions may differ
    /// from PyTorch's in a last bit, far below what the rounding to f32 lets through.
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
