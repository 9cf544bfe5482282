//! The stand-in's quantised tensors: blocks on the CPU, products in f32 over dequantised weights, as the Metal kernels
//! do (candle-core/src/quantized/metal.rs, whose lines are named below).
#![allow(unused)]
use super::{GgmlDType, GgmlType, QStorage, QuantizedType};
use crate::backend::{BackendDevice, BackendStorage};
use crate::{CpuStorage, D, DType, Device, Layout, MetalDevice, MetalStorage, Result, Shape};

pub struct QMetalStorage {
    blocks: Box<dyn QuantizedType>,
    device: MetalDevice,
}

fn cpu_blocks(storage: QStorage) -> Box<dyn QuantizedType> {
    match storage {
        QStorage::Cpu(blocks) => blocks,
        _ => unreachable!(),
    }
}

impl QMetalStorage {
    pub fn zeros(device: &MetalDevice, elem_count: usize, dtype: GgmlDType) -> Result<Self> {
        Ok(Self { blocks: cpu_blocks(Device::Cpu.qzeros(elem_count, dtype)?), device: device.clone() })
    }

    pub fn dtype(&self) -> GgmlDType {
        self.blocks.dtype()
    }

    pub fn device(&self) -> &MetalDevice {
        &self.device
    }

    pub fn dequantize(&self, elem_count: usize) -> Result<MetalStorage> {
        Ok(MetalStorage::launched(self.blocks.dequantize(elem_count)?, &self.device))
    }

    /// Quantises numbers in f32. The real backend (:134) reads the bytes of any buffer as f32, without a check.
    pub fn quantize(&mut self, src: &MetalStorage) -> Result<()> {
        if src.dtype() != DType::F32 {
            crate::bail!("[metal stand-in] Metal quantises wrong numbers: it reads {:?} as F32", src.dtype())
        }
        self.blocks.from_float(src.numbers().as_slice::<f32>()?);
        Ok(())
    }

    pub fn quantize_imatrix(&mut self, src: &MetalStorage, imatrix: &[f32], n_per_row: usize) -> Result<()> {
        self.blocks.from_float_imatrix(src.numbers().as_slice::<f32>()?, imatrix, n_per_row);
        Ok(())
    }

    pub fn quantize_imatrix_onto(&mut self, src: &CpuStorage, imatrix: &[f32], n_per_row: usize) -> Result<()> {
        self.blocks.from_float_imatrix(src.as_slice::<f32>()?, imatrix, n_per_row);
        Ok(())
    }

    pub fn quantize_onto(&mut self, src: &CpuStorage) -> Result<()> {
        self.blocks.from_float(src.as_slice::<f32>()?);
        Ok(())
    }

    pub fn storage_size_in_bytes(&self) -> usize {
        self.blocks.storage_size_in_bytes()
    }

    pub fn embedding(&self, rows: usize, hidden: usize, ids: &MetalStorage, ids_l: &Layout) -> Result<MetalStorage> {
        if ids.dtype() != DType::U32 {
            crate::bail!("quantized embedding expects u32 ids, got {:?}", ids.dtype())
        }
        if !ids_l.is_contiguous() {
            crate::bail!("quantized embedding requires contiguous ids")
        }
        let ids = ids.numbers();
        let ids = &ids.as_slice::<u32>()?[ids_l.start_offset()..][..ids_l.shape().elem_count()];
        Ok(MetalStorage::launched(self.blocks.embedding(ids, rows, hidden)?, &self.device))
    }

    /// Multiplies rows with the weight (:344 `fwd`, :282 `fwd_mv` for one row).
    pub fn fwd(&self, self_shape: &Shape, storage: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        if !layout.is_contiguous() {
            crate::bail!("input tensor is not contiguous {layout:?}")
        }
        let src_shape = layout.shape();
        if src_shape.rank() < 2 {
            crate::bail!("input tensor has only one dimension {layout:?}")
        }
        if src_shape.rank() < self_shape.rank() {
            crate::bail!("input rank ({}) must be >= weight rank ({})", src_shape.rank(), self_shape.rank())
        }
        let (n, k) = self_shape.dims2()?;
        let is_row = src_shape.dim(D::Minus2)? == 1;
        if is_row && src_shape.rank() > 3 {
            crate::bail!("Invalid rank {} for quantized matmul metal", src_shape.rank())
        }
        let mut dims = src_shape.dims().to_vec();
        if dims.pop() != Some(k) {
            crate::bail!("input tensor {layout:?} incompatible with {self_shape:?}")
        }
        dims.push(n);
        // :390 asserts; fwd_mv does not, and reads the bytes as f32.
        if storage.dtype() != DType::F32 && is_row {
            crate::bail!("[metal stand-in] Metal multiplies wrong numbers: it reads {:?} as F32", storage.dtype())
        }
        assert_eq!(storage.dtype(), DType::F32);
        // :429 the layout's offset is not used for several rows.
        if !is_row && layout.start_offset() != 0 {
            crate::bail!("[metal stand-in] Metal multiplies wrong numbers: it ignores the offset of {layout:?}")
        }
        let weight = self.blocks.dequantize(n * k)?;
        let rows = src_shape.elem_count() / k;
        let transposed = Layout::contiguous((n, k)).transpose(0, 1)?;
        let left = Layout::contiguous_with_offset((rows, k), layout.start_offset());
        let product = storage.numbers().matmul(&weight, (1, rows, n, k), &left, &transposed)?;
        Ok((MetalStorage::launched(product, &self.device), dims.into()))
    }

    pub fn data(&self) -> Result<Vec<u8>> {
        let bytes = self.blocks.storage_size_in_bytes();
        // SAFETY: the blocks have this number of bytes.
        Ok(unsafe { std::slice::from_raw_parts(self.blocks.as_ptr(), bytes) }.to_vec())
    }

    pub fn indexed_moe_forward(
        &self,
        _: &Shape,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        crate::bail!("indexed_moe_forward is not implemented in this platform!")
    }
}

pub fn load_quantized<T: GgmlType + Send + Sync + 'static>(device: &MetalDevice, data: &[T]) -> Result<QStorage> {
    crate::dummy_metal_backend::limits::from_slice(data.len())?;
    Ok(QStorage::Metal(QMetalStorage { blocks: Box::new(data.to_vec()), device: device.clone() }))
}
