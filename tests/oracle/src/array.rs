//! Numbers under a shape and strides: what a tensor is, without the crate's or Candle's code.

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

/// One way to look at a buffer.
#[derive(Debug, Clone)]
pub enum View {
    Transpose(usize, usize),
    Narrow { dim: usize, start: usize, len: usize },
    Broadcast(Vec<usize>),
}

/// A buffer in row-major order, and the views taken of it one after the other.
#[derive(Debug, Clone)]
pub struct Array {
    pub data: Vec<f64>,
    buffer: Vec<usize>,
    views: Vec<View>,
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
}

impl Array {
    /// Returns a buffer of NaN. Entries that no view reaches stay NaN, so a read of them shows.
    pub fn new(shape: &[usize]) -> Self {
        let mut strides = vec![1; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim] * shape[dim];
        }
        Self {
            data: vec![f64::NAN; shape.iter().product()],
            buffer: shape.to_vec(),
            views: Vec::new(),
            shape: shape.to_vec(),
            strides,
            offset: 0,
        }
    }

    /// Returns a contiguous array of numbers in row-major order.
    pub fn of(shape: &[usize], data: Vec<f64>) -> Self {
        assert_eq!(data.len(), shape.iter().product::<usize>(), "a number for each entry of {shape:?}");
        Self { data, ..Self::new(shape) }
    }

    /// Builds a contiguous array from the number of each index.
    pub fn each(shape: [usize; 4], number: impl Fn([usize; 4]) -> f64) -> Self {
        let [_, b, c, d] = shape;
        let mut array = Self::new(&shape);
        for (n, entry) in array.data.iter_mut().enumerate() {
            *entry = number([n / (b * c * d), n / (c * d) % b, n / d % c, n % d]);
        }
        array
    }

    pub fn view(mut self, view: View) -> Self {
        match &view {
            View::Transpose(a, b) => {
                self.shape.swap(*a, *b);
                self.strides.swap(*a, *b);
            }
            View::Narrow { dim, start, len } => {
                self.offset += start * self.strides[*dim];
                self.shape[*dim] = *len;
            }
            View::Broadcast(shape) => {
                for (dim, &size) in shape.iter().enumerate() {
                    if self.shape[dim] != size {
                        assert_eq!(self.shape[dim], 1, "only a dimension of 1 broadcasts");
                        self.strides[dim] = 0;
                    }
                }
                self.shape = shape.clone();
            }
        }
        self.views.push(view);
        self
    }

    /// Returns the entries of one sequence of (B, .., .., ..). An array that is the same for every sequence is returned
    /// unchanged.
    pub fn of_sequence(&self, b: usize) -> Self {
        let has_own = self.rank() == 4 && self.shape[0] > 1;
        if has_own { self.clone().view(View::Narrow { dim: 0, start: b, len: 1 }) } else { self.clone() }
    }

    /// Fills every entry that the views reach.
    pub fn filled(mut self, mut value: impl FnMut() -> f64) -> Self {
        for n in 0..self.shape.iter().product() {
            let mut rest: usize = n;
            let mut place = self.offset;
            for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
                place += rest % size * stride;
                rest /= size;
            }
            self.data[place] = value();
        }
        self
    }

    /// Fills every entry that the views reach uniformly on [-most, most), rounded to a dtype.
    pub fn uniform(self, random: &mut Random, most: f64, dtype: DType) -> Self {
        self.filled(|| round(random.between(-most, most), dtype))
    }

    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    pub fn dim(&self, dim: usize) -> usize {
        self.shape[dim]
    }

    /// Returns the size of the last dimension.
    pub fn width(&self) -> usize {
        self.shape[self.rank() - 1]
    }

    /// Returns the position in `data` of an entry. The index is that of the last dimensions, and a dimension of 1
    /// broadcasts.
    pub fn place(&self, index: [usize; 4]) -> usize {
        let index = &index[4 - self.rank()..];
        let steps = index.iter().zip(&self.shape).zip(&self.strides);
        self.offset + steps.map(|((&i, &size), &stride)| if size == 1 { 0 } else { i * stride }).sum::<usize>()
    }

    pub fn at(&self, index: [usize; 4]) -> f64 {
        self.data[self.place(index)]
    }

    /// Rounds every number to a dtype, so that a tensor of that dtype has equal numbers.
    pub fn rounded(mut self, dtype: DType) -> Self {
        self.data.iter_mut().for_each(|value| *value = round(*value, dtype));
        self
    }

    /// Returns the buffer as a tensor, before any view.
    pub fn leaf(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        if self.data.is_empty() {
            // Metal copies no empty tensors.
            return Tensor::zeros(self.buffer.as_slice(), dtype, device);
        }
        Tensor::from_slice(&self.data, self.buffer.as_slice(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    }

    /// Applies the views to a buffer that [`leaf`](Self::leaf) returned.
    pub fn look(&self, leaf: &Tensor) -> Result<Tensor> {
        let mut tensor = leaf.clone();
        for view in &self.views {
            tensor = match view {
                View::Transpose(a, b) => tensor.transpose(*a, *b)?,
                View::Narrow { dim, start, len } => tensor.narrow(*dim, *start, *len)?,
                View::Broadcast(shape) => tensor.broadcast_as(shape.as_slice())?,
            };
        }
        assert_eq!(tensor.dims(), self.shape, "the views give the shape");
        Ok(tensor)
    }

    pub fn tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        self.look(&self.leaf(dtype, device)?)
    }
}

/// A memory layout of a tensor (B, H, T, D).
#[derive(Debug, Clone, Copy)]
pub enum Layout {
    Contiguous,
    /// (B, T, H, D), as a projection returns it.
    HeadsTransposed,
    /// The first positions of a longer buffer.
    CacheHead,
    /// Positions from the middle of a longer buffer of transposed heads.
    CacheMiddle,
    /// A part of wider rows.
    NarrowRows,
    /// (B, H, D, T): the last dimension is not contiguous.
    ColumnMajor,
    /// One sequence for all.
    OneBatch,
    /// One head for all.
    OneHead,
    /// A third of (B, T, 3 · H, D), as a packed projection returns it.
    Packed,
    /// One vector for all positions.
    OnePosition,
    /// One number a vector.
    OneColumn,
}

impl Layout {
    pub const ALL: [Self; 11] = [
        Self::Contiguous,
        Self::HeadsTransposed,
        Self::CacheHead,
        Self::CacheMiddle,
        Self::NarrowRows,
        Self::ColumnMajor,
        Self::OneBatch,
        Self::OneHead,
        Self::Packed,
        Self::OnePosition,
        Self::OneColumn,
    ];

    pub fn array(self, [b, h, t, d]: [usize; 4]) -> Array {
        match self {
            Self::Contiguous => Array::new(&[b, h, t, d]),
            Self::HeadsTransposed => Array::new(&[b, t, h, d]).view(View::Transpose(1, 2)),
            Self::CacheHead => Array::new(&[b, h, t + 3, d]).view(View::Narrow { dim: 2, start: 0, len: t }),
            Self::CacheMiddle => Array::new(&[b, t + 3, h, d])
                .view(View::Narrow { dim: 1, start: 2, len: t })
                .view(View::Transpose(1, 2)),
            Self::NarrowRows => Array::new(&[b, h, t, d + 2]).view(View::Narrow { dim: 3, start: 1, len: d }),
            Self::ColumnMajor => Array::new(&[b, h, d, t]).view(View::Transpose(2, 3)),
            Self::OneBatch => Array::new(&[1, h, t, d]).view(View::Broadcast(vec![b, h, t, d])),
            Self::OneHead => Array::new(&[b, 1, t, d]).view(View::Broadcast(vec![b, h, t, d])),
            Self::Packed => Array::new(&[b, t, 3 * h, d])
                .view(View::Narrow { dim: 2, start: h, len: h })
                .view(View::Transpose(1, 2)),
            Self::OnePosition => Array::new(&[b, h, 1, d]).view(View::Broadcast(vec![b, h, t, d])),
            Self::OneColumn => Array::new(&[b, h, t, 1]).view(View::Broadcast(vec![b, h, t, d])),
        }
    }
}

/// Rounds a number to a dtype.
pub fn round(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16::from_f64(value).to_f64(),
        DType::BF16 => bf16::from_f64(value).to_f64(),
        _ => value,
    }
}

/// Returns a sum over the bits of numbers, each multiplied by a different odd number.
pub fn checksum(numbers: &[f32]) -> u64 {
    let terms = numbers.iter().zip(0u64..).map(|(x, n)| u64::from(x.to_bits()).wrapping_mul(2 * n + 1));
    terms.fold(0, u64::wrapping_add)
}

/// SplitMix64 (Steele et al., 2014): numbers from a seed, the same everywhere.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Draws uniformly from [low, high).
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws uniformly from 0..=most.
    pub fn up_to(&mut self, most: usize) -> usize {
        (self.bits() % (most as u64 + 1)) as usize
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.between(0.0, 1.0) < probability
    }
}
