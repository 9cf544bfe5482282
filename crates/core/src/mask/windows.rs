//! Windows of an image as the sequences of a batch.

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::mask::AttentionMask;
use candle_attention_modules::base;

const OP: &str = "windows";

/// The square windows of an image of height × width tokens, for attention within windows (SAM, ViTDet, Swin): each
/// window is a sequence of a batch. If the windows do not divide the image, it is padded below and on the right with
/// zeros, which are tokens like others, as in these models.
///
/// ```
/// use candle_attention::Windows;
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let windows = Windows::new([4, 6], 3)?;
/// let image = Tensor::randn(0f32, 1., (2, 4 * 6, 64), &Device::Cpu)?;
/// let parts = windows.partition(&image)?;
/// assert_eq!(parts.dims(), [2 * 4, 9, 64]);
/// assert_eq!(windows.join(&parts)?.to_vec3::<f32>()?, image.to_vec3::<f32>()?);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// The height of the image in tokens.
    height: usize,
    /// The width of the image in tokens.
    width: usize,
    window: usize,
    shift: usize,
}

impl Windows {
    /// Returns windows of `window` × `window` tokens of an image of [height, width] tokens.
    ///
    /// # Errors
    /// For a size of 0, and an image that is too large to address.
    pub fn new(image: [usize; 2], window: usize) -> Result<Self> {
        const MOST: usize = 1 << 24;
        if window == 0 || window > MOST || image.iter().any(|&size| size == 0 || size > MOST) {
            bail!("[{OP}] the image is {image:?} and windows are of {window}, expected 1 to {MOST} each")
        }
        let [height, width] = image;
        Ok(Self { height, width, window, shift: 0 })
    }

    /// Shifts the image up and to the left by `shift` tokens before it is divided (Swin). The first rows and columns
    /// move to the end. Attention then needs the [`mask`](Self::mask).
    ///
    /// # Errors
    /// For a shift that is not below the window.
    pub fn with_shift(self, shift: usize) -> Result<Self> {
        if shift >= self.window {
            bail!("[{OP}] shift is {shift}, expected less than the window {}", self.window)
        }
        Ok(Self { shift, ..self })
    }

    /// Returns the number of windows of an image.
    pub fn count(&self) -> usize {
        self.down() * self.across()
    }

    /// Returns the number of rows of windows.
    fn down(&self) -> usize {
        self.height.div_ceil(self.window)
    }

    /// Returns the number of windows in a row.
    fn across(&self) -> usize {
        self.width.div_ceil(self.window)
    }

    /// Returns images (B, height · width, E), whose tokens are listed row by row, as windows (B · windows, window², E):
    /// the windows of the first image, then those of the second, and so on.
    ///
    /// # Errors
    /// For another shape, and for padded images that do not fit in memory.
    pub fn partition(&self, xs: &Tensor) -> Result<Tensor> {
        let Self { height, width, .. } = *self;
        let down = self.down();
        let across = self.across();
        let w = self.window;
        let dims = xs.dims();
        if dims.len() != 3 || dims[1] != height * width {
            bail!("[{OP}] images have shape {dims:?}, expected (B, {height} · {width}, E)")
        }
        let (b, _, e) = xs.dims3()?;
        check_memory("padded images", &[b, down * w, across * w, e], xs.dtype())?;
        let padded = xs.reshape((b, height, width, e))?;
        let padded = padded.pad_with_zeros(1, 0, down * w - height)?.pad_with_zeros(2, 0, across * w - width)?;
        let shift = -(self.shift as i32);
        let moved = padded.roll(shift, 1)?.roll(shift, 2)?;
        let parts = moved.contiguous()?.reshape(vec![b, down, w, across, w, e])?.transpose(2, 3)?.contiguous()?;
        parts.reshape((b * down * across, w * w, e))
    }

    /// Returns windows (B · windows, window², E) as images (B, height · width, E) without padding: the inverse of
    /// [`partition`](Self::partition).
    ///
    /// # Errors
    /// For another shape, and for windows that do not fit in memory.
    pub fn join(&self, xs: &Tensor) -> Result<Tensor> {
        let Self { height, width, .. } = *self;
        let down = self.down();
        let across = self.across();
        let w = self.window;
        let count = down * across;
        let dims = xs.dims();
        if dims.len() != 3 || !dims[0].is_multiple_of(count) || dims[1] != w * w {
            bail!("[{OP}] windows have shape {dims:?}, expected (B · {count}, {w} · {w}, E)")
        }
        let (n, _, e) = xs.dims3()?;
        let b = n / count;
        check_memory("windows", xs.dims(), xs.dtype())?;
        let parts = xs.contiguous()?.reshape(vec![b, down, across, w, w, e])?.transpose(2, 3)?.contiguous()?;
        let padded = parts.reshape((b, down * w, across * w, e))?;
        let moved = padded.roll(self.shift as i32, 1)?.roll(self.shift as i32, 2)?;
        moved.narrow(1, 0, height)?.narrow(2, 0, width)?.contiguous()?.reshape((b, height * width, e))
    }

    /// Returns the mask of the windows of `b` images. After a shift, a window has tokens from opposite sides of the
    /// image, which do not attend to each other: a boolean mask with an entry for each pair of tokens. Without a shift,
    /// nothing is masked.
    ///
    /// # Errors
    /// If the mask does not fit in memory.
    pub fn mask(&self, b: usize, device: &Device) -> Result<AttentionMask> {
        if self.shift == 0 {
            return Ok(AttentionMask::none());
        }
        let down = self.down();
        let across = self.across();
        let w = self.window;
        let n = down * across;
        let tokens = w * w;
        check_memory("a mask", &[b, n, tokens, tokens], DType::U8)?;
        if b == 0 {
            let empty = Tensor::zeros((0, 1, tokens, tokens), DType::U8, device)?;
            return Ok(AttentionMask::none().with_bool_mask(&empty));
        }
        // A number for each token of the padded image: whether its row and its column are moved to the opposite side.
        let padded = Self { height: down * w, width: across * w, ..*self };
        let is_moved = |line| u8::from(line < self.shift);
        let row_of_sides = |row| (0..across * w).map(move |column| 2 * is_moved(row) + is_moved(column));
        let sides = Tensor::from_iter((0..down * w).flat_map(row_of_sides), &Device::Cpu)?;
        let sides = padded.partition(&sides.reshape((1, n * tokens, 1))?)?;
        let allowed = sides.broadcast_eq(&sides.transpose(1, 2)?)?.to_device(device)?;
        let allowed = allowed.broadcast_as((b, n, tokens, tokens))?.contiguous()?;
        Ok(AttentionMask::none().with_bool_mask(&allowed.reshape((b * n, 1, tokens, tokens))?))
    }
}

/// Checks that a tensor of these dimensions can be addressed and allocated; `what` names it in the error.
fn check_memory(what: &str, dims: &[usize], dtype: DType) -> Result<()> {
    let bytes = [dims, &[dtype.size_in_bytes()]].concat();
    base::check_memory(OP, format_args!("{what} of shape {dims:?}"), &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_does_not_fit<T>(result: Result<T>, shape: &str) {
        let text = result.err().expect("more than any memory").to_string();
        let text = text.lines().next().unwrap_or_default();
        assert!(text.contains(&format!("of shape {shape} does not fit in memory")), "{text}");
    }

    #[test]
    fn windows_that_pad_beyond_memory_are_an_error() -> Result<()> {
        let token = Tensor::zeros((1, 1, 1), DType::F32, &Device::Cpu)?;
        // The second has a size whose square is addressable, and too many bytes.
        for (size, shape) in [(1 << 24, "[1, 16777216, 16777216, 1]"), (1 << 23, "[1, 8388608, 8388608, 1]")] {
            assert_does_not_fit(Windows::new([1, 1], size)?.partition(&token), shape);
        }
        let windows = Windows::new([1, 1], 1 << 23)?;
        assert_does_not_fit(windows.join(&token.broadcast_as((1, 1 << 46, 1))?), "[1, 70368744177664, 1]");
        Ok(())
    }

    #[test]
    fn windows_of_no_images_have_an_empty_mask_at_once() -> Result<()> {
        let windows = Windows::new([1 << 20, 1 << 20], 2)?.with_shift(1)?;
        let mask = windows.mask(0, &Device::Cpu)?;
        let ranges = mask.to_additive((0, 1, 4, 4), DType::F32, &Device::Cpu)?;
        assert_eq!(ranges.dims(), [0, 1, 4, 4]);
        assert_does_not_fit(windows.mask(1, &Device::Cpu), "[1, 274877906944, 4, 4]");
        Ok(())
    }
}
