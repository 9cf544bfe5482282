//! A builder of the tensors of a file.

use std::io::{Read, Seek};
use std::sync::{Arc, Mutex};

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::file::File;
use super::header::{has_tensor, tensor_info};

/// Returns a builder of all tensors of a file, by llama.cpp's names, which dequantises them as they are read. It is for
/// the parts of a model that are not attention.
pub fn var_builder<R: Read + Seek + Send + 'static>(
    content: Arc<Content>,
    reader: R,
    dtype: DType,
    device: &Device,
) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(GgufTensors { content, reader: reader.into() }), dtype, device.clone())
}

struct GgufTensors<R> {
    content: Arc<Content>,
    reader: Mutex<R>,
}

impl<R: Read + Seek + Send> SimpleBackend for GgufTensors<R> {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        match tensor_info(&self.content, name) {
            Some(info) if info.dims != shape.dims() => {
                bail!("[gguf] {name} has shape {:?}, expected {shape:?}", info.dims)
            }
            _ => self.get_unchecked(name, dtype, device),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Ok(mut reader) = self.reader.lock() else { bail!("[gguf] {name}: another thread failed to read the file") };
        let mut file = File { content: &self.content, reader: &mut *reader, device };
        file.tensor(name)?.dequantize(device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        has_tensor(&self.content, name)
    }
}
