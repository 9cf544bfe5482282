//! A mask as tensors that broadcast to the scores: boolean masks and biases.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{AttentionMask, BOOL_MASK, OP};
use candle_attention_modules::base::{self, Expect, floats_on, floats_text, is_addressable};

impl AttentionMask {
    /// Returns the mask as one tensor to add to the scores, a float `attn_mask` of PyTorch: the sum of the biases, and
    /// -inf for masked keys. It has `dtype`, is on `device` and broadcasts to `dims` = (B, H, T_q, T_kv); its batch
    /// dimension is 1 if the mask is the same for all sequences.
    ///
    /// ```
    /// use candle_attention::AttentionMask;
    /// use candle_core::{DType, Device};
    /// # fn main() -> candle_core::Result<()> {
    /// let additive = AttentionMask::causal().to_additive((1, 1, 2, 2), DType::F32, &Device::Cpu)?;
    /// assert_eq!(additive.squeeze(0)?.squeeze(0)?.to_vec2::<f32>()?, [[0.0, f32::NEG_INFINITY], [0.0, 0.0]]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), for boolean masks and biases that do not fit, for a dtype without -inf, and for
    /// dimensions that are too large for memory.
    pub fn to_additive(&self, dims: (usize, usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
        if !floats_on(device).contains(&dtype) {
            let reason = if dtype == DType::F64 { "" } else { " has no -inf" };
            bail!("[{OP}] an additive mask in {dtype:?}{reason}, expected {}", floats_text(device))
        }
        let dims = dims.into();
        check_addressable(dims)?;
        let [_, _, t_q, t_kv] = dims;
        check_memory(&[t_q, t_kv], dtype)?;
        let bias = match self.bias_tensor(dims, dtype, device)? {
            Some(bias) => bias,
            None => Tensor::zeros((1, 1, t_q, t_kv), dtype, device)?,
        };
        let Some(bool_mask) = self.combined_bool_mask(dims, device)? else { return Ok(bias) };
        let shape = bool_mask.shape().broadcast_shape_binary_op(bias.shape(), "to_additive")?;
        check_memory(shape.dims(), dtype)?;
        let masked = Tensor::new(f32::NEG_INFINITY, device)?.to_dtype(dtype)?.broadcast_as(&shape)?;
        bool_mask.broadcast_as(&shape)?.where_cond(&bias.broadcast_as(&shape)?, &masked)
    }

    /// Returns all constraints and boolean masks as one boolean mask: u8 that broadcasts to (B, H, T_q, T_kv), where 1
    /// allows to attend; `None` if nothing is masked.
    pub(crate) fn combined_bool_mask(&self, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        check_addressable(dims)?;
        let [b, _, t_q, t_kv] = dims;
        let ranges = self.ranges_of_batch(b, t_q, t_kv)?;
        ranges.rows(OP)?.to_bool_mask(self.bool_mask(dims, device)?, dims, device)
    }

    /// Returns the boolean masks and the lists of keys as one boolean mask, without the ranges of
    /// [`resolve`](Self::resolve).
    pub(crate) fn bool_mask(&self, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        self.with_own_key_lists(self.bool_mask_of_tensors(dims, device)?, dims, device)
    }

    /// Returns the boolean masks as one. A single mask stays a view.
    pub(crate) fn bool_mask_of_tensors(&self, dims: [usize; 4], device: &Device) -> Result<Option<Tensor>> {
        let mut combined: Option<Tensor> = None;
        for mask in &self.bool_masks {
            Expect::one(OP, BOOL_MASK, mask).dtype_of(&[DType::U8], " with 1 = attend")?;
            let mask = fit(BOOL_MASK, mask, dims, device)?;
            combined = Some(match combined {
                Some(combined) => all_of(&combined, &mask)?,
                None => mask,
            });
        }
        Ok(combined)
    }

    /// Returns the sum of all biases in `dtype`, which broadcasts to (B, H, T_q, T_kv); `None` if there is none.
    pub(crate) fn bias_tensor(&self, dims: [usize; 4], dtype: DType, device: &Device) -> Result<Option<Tensor>> {
        let mut sum: Option<Tensor> = None;
        for bias in &self.biases {
            Expect::one(OP, "bias", bias).float("; a mask of ones and zeros is for `with_bool_mask`")?;
            let mut bias = fit("bias", bias, dims, device)?;
            if bias.dtype() != dtype {
                check_memory(bias.dims(), dtype)?;
                bias = bias.to_dtype(dtype)?;
            }
            if let Some(sum) = sum {
                check_memory(sum.shape().broadcast_shape_binary_op(bias.shape(), "bias")?.dims(), dtype)?;
                bias = sum.broadcast_add(&bias)?;
            }
            sum = Some(bias);
        }
        Ok(sum)
    }

    /// Returns the mask without the boolean masks, biases and lists of keys that differ from head to head.
    pub(crate) fn of_all_heads(&self) -> Self {
        let is_shared = |tensor: &&Tensor| tensor.dims().iter().rev().nth(2).is_none_or(|&heads| heads == 1);
        let mut shared = self.clone().without_lists_by_head();
        shared.bool_masks = self.bool_masks.iter().filter(is_shared).cloned().collect();
        shared.biases = self.biases.iter().filter(is_shared).cloned().collect();
        shared
    }

    /// Returns the dtype of the bias, if there is exactly one.
    pub(crate) fn only_bias_dtype(&self) -> Option<DType> {
        match self.biases.as_slice() {
            [bias] => Some(bias.dtype()),
            _ => None,
        }
    }

    /// Returns the mask of some of `h` heads.
    pub(crate) fn of_heads(&self, heads: Range<usize>, h: usize) -> Result<Self> {
        let mut mask = self.clone();
        for lists in &mut mask.key_lists {
            *lists = lists.of_heads(&heads, h)?;
        }
        for tensor in mask.bool_masks.iter_mut().chain(&mut mask.biases) {
            if let [.., tensor_heads, _, _] = *tensor.dims()
                && tensor_heads == h
            {
                *tensor = readable(&tensor.narrow(tensor.rank() - 3, heads.start, heads.len())?)?;
            }
        }
        Ok(mask)
    }

    /// Returns the mask for keys to which `n` more were appended that every query attends to, with biases in `dtype`.
    ///
    /// It is written out as tensors: a range of keys cannot have a gap before the appended ones.
    pub(crate) fn with_appended_keys(&self, n: usize, dims: [usize; 4], dtype: DType, device: &Device) -> Result<Self> {
        let appended = |tensor: Tensor, fill: f64| -> Result<Tensor> {
            let (b, h, t_q, _) = tensor.dims4()?;
            let t_kv = dims[3];
            check_memory(&[b, h, t_q, t_kv.saturating_add(n)], tensor.dtype())?;
            let tensor = tensor.broadcast_as((b, h, t_q, t_kv))?;
            let fill = (Tensor::zeros((b, h, t_q, n), tensor.dtype(), device)? + fill)?;
            Tensor::cat(&[&tensor.contiguous()?, &fill], 3)
        };
        let mut mask = Self::none().with_fully_masked_rows(self.fully_masked_rows);
        if let Some(bool_mask) = self.combined_bool_mask(dims, device)? {
            mask.bool_masks.push(appended(bool_mask, 1.0)?);
        }
        if let Some(bias) = self.bias_tensor(dims, dtype, device)? {
            mask.biases.push(appended(bias, 0.0)?);
        }
        Ok(mask)
    }
}

/// Returns the largest entry of a boolean mask, if it is on a CPU and has entries. Entries that a view repeats are read
/// once, in the order of memory.
pub(super) fn largest_entry(mask: &Tensor) -> Option<u8> {
    if mask.dtype() != DType::U8 || mask.elem_count() == 0 || !mask.device().is_cpu() {
        return None;
    }
    let strides = mask.stride();
    let mut without_repeats = mask.clone();
    for (dim, &stride) in strides.iter().enumerate() {
        if stride == 0 {
            without_repeats = without_repeats.narrow(dim, 0, 1).ok()?;
        }
    }
    let mut order: Vec<_> = (0..mask.rank()).collect();
    order.sort_by_key(|&dim| std::cmp::Reverse(strides[dim]));
    without_repeats.permute(order).ok()?.max_all().ok()?.to_scalar().ok()
}

/// Returns the boolean mask that allows what both masks allow.
pub(super) fn all_of(one: &Tensor, other: &Tensor) -> Result<Tensor> {
    check_memory(one.shape().broadcast_shape_binary_op(other.shape(), BOOL_MASK)?.dims(), DType::U8)?;
    one.broadcast_mul(&other.ne(0u8)?)
}

/// Checks that a mask can be allocated. Candle ends the program if it cannot.
pub(super) fn check_memory(dims: &[usize], dtype: DType) -> Result<()> {
    let bytes = [dims, &[dtype.size_in_bytes()]].concat();
    base::check_memory(OP, format_args!("a mask of {dims:?} entries"), &bytes)
}

/// Checks that scores of these dimensions could be addressed.
fn check_addressable(dims: [usize; 4]) -> Result<()> {
    if !is_addressable(&dims) {
        bail!("[{OP}] (B, H, T_q, T_kv) = {dims:?} is too large to address")
    }
    Ok(())
}

/// Returns a boolean mask or a bias with four dimensions, each of which is 1 or that of `dims`. `what` names it in
/// errors.
///
/// # Errors
/// For a shape that does not broadcast to `dims`, and for another device than the call's.
pub(super) fn fit(what: &str, tensor: &Tensor, dims: [usize; 4], device: &Device) -> Result<Tensor> {
    let shape = tensor.dims();
    let fits =
        shape.len() <= 4 && shape.iter().rev().zip(dims.iter().rev()).all(|(&have, &want)| have == want || have == 1);
    if !fits {
        let meant = match *shape {
            [b, t_kv] if [b, t_kv] == [dims[0], dims[3]] => {
                "; a padding mask (B, T_kv) is for `AttentionMask::from_attention_mask`, or (B, 1, 1, T_kv)"
            }
            [b, t_q, t_kv] if [b, t_q, t_kv] == [dims[0], dims[2], dims[3]] => {
                "; `unsqueeze(1)` makes (B, 1, T_q, T_kv) of (B, T_q, T_kv)"
            }
            _ => "",
        };
        bail!("[{OP}] {what} has shape {shape:?}, which does not broadcast to (B, H, T_q, T_kv) = {dims:?}{meant}")
    }
    Expect::one(OP, what, tensor).same_device("the queries", device)?;
    let mut padded = readable(tensor)?;
    // Not a reshape, which would write out a view that is expanded.
    for _ in shape.len()..4 {
        padded = padded.unsqueeze(0)?;
    }
    Ok(padded)
}

/// Returns a tensor that Candle can copy: a view of an empty buffer may begin past its end, where copies panic, so an
/// empty tensor is made anew.
pub(super) fn readable(tensor: &Tensor) -> Result<Tensor> {
    if tensor.elem_count() > 0 {
        return Ok(tensor.clone());
    }
    Tensor::zeros(tensor.shape(), tensor.dtype(), tensor.device())
}
