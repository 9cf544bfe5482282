//! Copies of numbers on a device, and lists of integers that are kept there. The layers of a model attend with the same
//! lengths and positions, one after another, so that a list that was copied to the device a moment ago is used again.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use candle_core::{Device, Result, Shape, Tensor, WithDType};

/// The lists that are kept, the latest first.
static UPLOADS: Mutex<VecDeque<Upload>> = Mutex::new(VecDeque::new());

/// The number of lists that the cache of uploads keeps, counted over all devices.
const MOST_LISTS: usize = 32;

/// The length from which a list is not cached, so that the whole cache takes 8 MiB at most.
const MOST_ENTRIES: usize = 1 << 16;

/// A list and its copy on a device.
struct Upload {
    entries: Vec<i32>,
    on_device: Tensor,
}

/// Returns a tensor of these numbers on a device, also of none: Metal has no memory of no bytes to copy to.
///
/// # Errors
/// If the shape has another number of entries, or the device fails.
pub fn copied_to<E: WithDType>(device: &Device, numbers: Vec<E>, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    if numbers.is_empty() && shape.elem_count() == 0 {
        return Tensor::zeros(shape, E::DTYPE, device);
    }
    Tensor::from_vec(numbers, shape, device)
}

/// Returns a tensor on a device, also one without entries, of which Metal has no copies.
///
/// # Errors
/// If the device fails.
pub fn to_device(tensor: &Tensor, device: &Device) -> Result<Tensor> {
    if tensor.elem_count() == 0 && !tensor.device().same_device(device) {
        return Tensor::zeros(tensor.shape(), tensor.dtype(), device);
    }
    tensor.to_device(device)
}

/// Returns a list as an i32 tensor on a device. The tensor may be shared and must not be written to.
pub fn uploaded(entries: Vec<i32>, shape: &[usize], device: &Device) -> Result<Tensor> {
    if device.is_cpu() || entries.len() >= MOST_ENTRIES {
        return Tensor::from_vec(entries, shape, device);
    }
    let mut uploads = UPLOADS.lock().unwrap_or_else(PoisonError::into_inner);
    kept(&mut uploads, entries, shape, device)
}

/// Returns a list from those that are kept, or copies it to the device and keeps it.
fn kept(uploads: &mut VecDeque<Upload>, entries: Vec<i32>, shape: &[usize], device: &Device) -> Result<Tensor> {
    let is_found = |upload: &Upload| upload.entries == entries && upload.on_device.device().same_device(device);
    if let Some(at) = uploads.iter().position(is_found)
        && let Some(upload) = uploads.remove(at)
    {
        let on_device = upload.on_device.clone();
        uploads.push_front(upload);
        return on_device.reshape(shape);
    }
    let on_device = Tensor::from_slice(&entries, entries.len(), device)?;
    uploads.push_front(Upload { entries, on_device: on_device.clone() });
    uploads.truncate(MOST_LISTS);
    on_device.reshape(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_earlier_layers_are_uploaded_once() -> Result<()> {
        let mut uploads = VecDeque::new();
        let first = kept(&mut uploads, vec![3, 5], &[2], &Device::Cpu)?;
        for number in 0..MOST_LISTS as i32 - 1 {
            kept(&mut uploads, vec![number], &[1], &Device::Cpu)?;
            let again = kept(&mut uploads, vec![3, 5], &[2, 1], &Device::Cpu)?;
            assert_eq!((again.dims(), again.flatten_all()?.to_vec1::<i32>()?), ([2, 1].as_slice(), vec![3, 5]));
        }
        assert_eq!(uploads.len(), MOST_LISTS);
        assert_eq!(uploads.iter().filter(|upload| upload.entries == [3, 5]).count(), 1);
        kept(&mut uploads, vec![-1], &[1], &Device::Cpu)?;
        assert_eq!(uploads.len(), MOST_LISTS);
        assert_eq!(first.to_vec1::<i32>()?, [3, 5]);
        Ok(())
    }
}
