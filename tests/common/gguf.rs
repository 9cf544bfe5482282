//! GGUF files in memory.

use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};

/// A file that is being put together.
#[derive(Default)]
pub struct File {
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<(String, QTensor)>,
}

impl File {
    /// A layer of 2 heads over 1 that are 4 wide, by llama.cpp's metadata and names.
    pub fn llama() -> Result<Self> {
        let mut file = Self::default();
        file.set("general.architecture", Value::String("llama".into()));
        let sizes = [
            ("block_count", 1),
            ("embedding_length", 8),
            ("context_length", 64),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
        ];
        sizes.into_iter().for_each(|(key, size)| file.set(&format!("llama.{key}"), Value::U32(size)));
        for (name, rows) in [("attn_q", 8), ("attn_k", 4), ("attn_v", 4), ("attn_output", 8)] {
            let weight = Tensor::arange(0f32, (rows * 8) as f32, &Device::Cpu)?.reshape((rows, 8))?;
            file.add(&format!("blk.0.{name}.weight"), &(weight.affine(0.37, 0.1)?.sin()? * 0.4)?, GgmlDType::F32)?;
        }
        Ok(file)
    }

    /// A key, anew or in the place of the one that is there.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.retain(|(known, _)| known != key);
        self.metadata.push((key.into(), value));
    }

    /// The same for a tensor.
    pub fn add(&mut self, name: &str, tensor: &Tensor, dtype: GgmlDType) -> Result<()> {
        self.tensors.retain(|(known, _)| known != name);
        // Candle quantises the whole buffer of a view.
        self.tensors.push((name.into(), QTensor::quantize(&tensor.force_contiguous()?, dtype)?));
        Ok(())
    }

    pub fn bytes(&self) -> Result<Vec<u8>> {
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        let mut bytes = Cursor::new(Vec::new());
        gguf_file::write(&mut bytes, &metadata, &tensors)?;
        Ok(bytes.into_inner())
    }

    /// As a reader finds it.
    pub fn open(&self) -> Result<(Content, Cursor<Vec<u8>>)> {
        let mut reader = Cursor::new(self.bytes()?);
        Ok((Content::read(&mut reader)?, reader))
    }
}
