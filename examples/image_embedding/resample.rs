//! Resampling of planes of numbers, with the results of PyTorch's `interpolate`.

use candle_core::{Device, Result, Tensor, bail};

/// The most pixels of a picture, 8,192 by 8,192: a file of a few bytes can declare any size.
pub const MAX_PIXELS: usize = 1 << 26;

/// The interpolation between pixels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filter {
    /// The parameter of the cubic polynomial; linear without it.
    pub cubic: Option<f32>,
    /// Whether a pixel of a smaller picture is the mean over the pixels that it covers.
    pub antialias: bool,
}

/// Pillow's and torchvision's bilinear and bicubic filters, with antialiasing.
pub const BILINEAR: Filter = Filter { cubic: None, antialias: true };
pub const BICUBIC: Filter = Filter { cubic: Some(-0.5), antialias: true };

impl Filter {
    fn weight(self, distance: f32) -> f32 {
        let x = distance.abs();
        match self.cubic {
            None => (1.0 - x).max(0.0),
            Some(a) if x < 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            Some(a) if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * a,
            Some(_) => 0.0,
        }
    }

    /// Returns the weights (to, from) of the entries of a row in the entries of another length.
    fn weights(self, from: usize, to: usize) -> Result<Tensor> {
        let scale = from as f32 / to as f32;
        let stretch = if self.antialias { scale.max(1.0) } else { 1.0 };
        // The greatest distance of a pixel with a weight.
        let radius = if self.cubic.is_some() { 2.0 * stretch } else { stretch };
        let mut weights = vec![0.0; to * from];
        for (i, row) in weights.chunks_mut(from).enumerate() {
            let middle = (i as f32 + 0.5) * scale - 0.5;
            let first = middle - radius;
            let last = middle + radius;
            for j in first.ceil() as i64..=last.floor() as i64 {
                // Pixels outside have no weight if there is antialiasing, and else the value of the nearest pixel.
                if (0..from as i64).contains(&j) || !self.antialias {
                    row[j.clamp(0, from as i64 - 1) as usize] += self.weight((j as f32 - middle) / stretch);
                }
            }
            if self.antialias {
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|weight| *weight /= sum);
            }
        }
        Tensor::from_vec(weights, (to, from), &Device::Cpu)
    }
}

/// The rows and columns of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub rows: usize,
    pub columns: usize,
}

impl Size {
    /// Returns whether a picture of this size has at most [`MAX_PIXELS`].
    pub fn fits(self) -> bool {
        self.rows.checked_mul(self.columns).is_some_and(|pixels| pixels <= MAX_PIXELS)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} x {}", self.rows, self.columns)
    }
}

/// Resamples planes (N, rows, columns) on the CPU to another size. Neither size is 0.
///
/// # Errors
/// If the result, or an intermediate result, would have more than [`MAX_PIXELS`].
pub fn resample(planes: &Tensor, to: Size, filter: Filter) -> Result<Tensor> {
    let (_, rows, columns) = planes.dims3()?;
    let from = Size { rows, columns };
    let widened = Size { rows, columns: to.columns };
    let column_weights = Size { rows: to.columns, columns };
    let row_weights = Size { rows: to.rows, columns: rows };
    if ![to, widened, column_weights, row_weights].into_iter().all(Size::fits) {
        bail!("[resample] resampling {from} pixels to {to} needs too much memory, expected smaller sides")
    }
    let wide = planes.broadcast_matmul(&filter.weights(columns, to.columns)?.t()?)?;
    filter.weights(rows, to.rows)?.broadcast_matmul(&wide)
}
