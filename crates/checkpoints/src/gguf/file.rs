//! Reads the tensors of a GGUF file, and quantised weights, whole, joined and in part.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Result, Tensor, bail};

use super::header::{TensorInfo, has_tensor};
use super::stored::StoredTensor;
use candle_attention_core::internal::ProjectionShape;
use candle_attention_modules::base::is_addressable;
use candle_attention_modules::ggml::GgmlType;
use candle_attention_modules::linear::{Outputs, PackedLinear, PackedProjection};

/// Returns the end of an error about a file that is one part of several; "" for a whole file.
pub(super) fn of_part(content: &Content) -> String {
    let number = |key: &str| content.metadata.get(key).and_then(|value| value.to_u16().ok());
    match (number("split.no"), number("split.count")) {
        (Some(part), Some(count)) if count > 1 => {
            format!("; the file is part {} of {count}, and has a part of the model", u32::from(part) + 1)
        }
        _ => String::new(),
    }
}

/// An open GGUF file.
pub(super) struct File<'a, R> {
    pub content: &'a Content,
    pub reader: &'a mut R,
    pub device: &'a Device,
}

impl<R: Read + Seek> File<'_, R> {
    /// Returns whether the file has a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        has_tensor(self.content, name)
    }

    /// Returns the description of a tensor; `None` if the file does not have it.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        TensorInfo::find(self.content, name)
    }

    /// Reads a tensor.
    pub fn tensor(&mut self, name: &str) -> Result<StoredTensor> {
        let Some(info) = self.info(name) else { bail!("[gguf] {name} is missing") };
        let place = Blocks::of(name, &info)?;
        self.read(name, place, info.dims)
    }

    /// Reads one of the tensors (out, in) that a tensor (count, out, in) consists of, such as the weight of an expert.
    pub fn slice(&mut self, name: &str, index: usize) -> Result<StoredTensor> {
        let Some(info) = self.info(name) else { bail!("[gguf] {name} is missing{}", of_part(self.content)) };
        let &[count, outputs, inputs] = info.dims.as_slice() else {
            bail!("[gguf] {name} has shape {:?}, expected (experts, out, in)", info.dims)
        };
        if index >= count {
            bail!("[gguf] {name} has {count} experts, expected an index below {count}, found {index}")
        }
        let whole = Blocks::of(name, &info)?;
        let bytes = whole.bytes / count;
        let own = Blocks { offset: whole.offset.saturating_add((index * bytes) as u64), bytes, ..whole };
        self.read(name, own, vec![outputs, inputs])
    }

    /// Reads the blocks of a tensor.
    fn read(&mut self, name: &str, blocks: Blocks, dims: Vec<usize>) -> Result<StoredTensor> {
        let start = self.content.tensor_data_offset.saturating_add(blocks.offset);
        let size = self.reader.seek(SeekFrom::End(0))?;
        let remaining = size.saturating_sub(start);
        if blocks.bytes as u64 > remaining {
            bail!(
                "[gguf] {name}: tensor needs {} bytes at offset {start}, only {remaining} remaining in file",
                blocks.bytes
            )
        }
        let mut data = vec![0; blocks.bytes];
        self.reader.seek(SeekFrom::Start(start))?;
        self.reader.read_exact(&mut data)?;
        Ok(StoredTensor { kind: blocks.kind, dims, data })
    }

    /// Reads `name.weight` (out, in), and `name.bias` (out,) if `has_bias` is true.
    pub fn weight(&mut self, name: &str, shape: ProjectionShape, has_bias: bool) -> Result<FileWeight> {
        let weight = self.shaped(&format!("{name}.weight"), &[shape.outputs, shape.inputs])?;
        let mut bias = None;
        if has_bias {
            bias = Some(self.numbers(&format!("{name}.bias"), &[shape.outputs])?);
        }
        Ok(FileWeight { weight, bias, device: self.device.clone() })
    }

    /// Reads the linear layer of one expert of `name.weight` (experts, out, in), and its bias if the file has
    /// `name.bias` (experts, out).
    pub fn expert(&mut self, name: &str, expert: usize) -> Result<FileWeight> {
        let weight = self.slice(&format!("{name}.weight"), expert)?;
        let mut bias = None;
        if self.has(&format!("{name}.bias")) {
            let biases = self.tensor(&format!("{name}.bias"))?.dequantize(self.device)?;
            match *biases.dims() {
                [experts, outputs] if expert < experts && outputs == weight.rows() => bias = Some(biases.get(expert)?),
                _ => bail!(
                    "[gguf] {name}.bias has shape {:?}, expected one for each expert and each of {} outputs",
                    biases.dims(),
                    weight.rows()
                ),
            }
        }
        Ok(FileWeight { weight, bias, device: self.device.clone() })
    }

    /// Reads a linear layer of any shape, and its bias if the file has one.
    pub fn linear(&mut self, name: &str) -> Result<FileWeight> {
        let weight = format!("{name}.weight");
        let has_bias = self.has(&format!("{name}.bias"));
        let Some(info) = self.info(&weight) else { bail!("[gguf] {weight} is missing{}", of_part(self.content)) };
        match *info.dims.as_slice() {
            [outputs, inputs] => self.weight(name, ProjectionShape { outputs, inputs }, has_bias),
            _ => bail!("[gguf] {weight} has shape {:?}, expected (out, in)", info.dims),
        }
    }

    /// Reads a tensor of this shape, in f32.
    pub fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.shaped(name, shape)?.dequantize(self.device)
    }

    /// Reads a tensor of this shape.
    pub fn shaped(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor> {
        match self.info(name) {
            None => bail!("[gguf] {name} is missing, expected shape {shape:?}{}", of_part(self.content)),
            Some(info) if info.dims != shape => bail!("[gguf] {name} has shape {:?}, expected {shape:?}", info.dims),
            Some(_) => self.tensor(name),
        }
    }
}

/// The blocks of a tensor, or of a part of it.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub kind: &'static GgmlType,
    /// The number of bytes from the beginning of the file's tensors.
    pub offset: u64,
    pub bytes: usize,
}

impl Blocks {
    /// Returns the blocks of a tensor.
    ///
    /// # Errors
    /// For a type that is not read, and for a shape that no tensor can have.
    pub fn of(name: &str, info: &TensorInfo) -> Result<Self> {
        let dims = &info.dims;
        let Some(kind) = GgmlType::find(info.type_number) else {
            bail!(
                "[gguf] {name} has {}, expected one of: {}",
                GgmlType::describe(info.type_number),
                GgmlType::all().map(|known| known.name).collect::<Vec<_>>().join(", ")
            )
        };
        if dims.contains(&0) {
            bail!("[gguf] {name} has shape {dims:?}, expected dimensions of at least 1")
        }
        if !is_addressable(dims) {
            bail!("[gguf] {name} has shape {dims:?}, which is too large to address")
        }
        if !dims.last().unwrap_or(&1).is_multiple_of(kind.block) {
            bail!("[gguf] {name} has shape {dims:?}, expected whole blocks of {} numbers of {}", kind.block, kind.name)
        }
        let count: usize = dims.iter().product();
        Ok(Self { kind, offset: info.offset, bytes: count / kind.block * kind.bytes })
    }
}

/// The shard of a linear layer (out, in) that one rank of several has.
#[derive(Debug, Clone)]
pub enum LinearShard {
    /// These outputs, in this order; at least one.
    Outputs(Vec<Range<usize>>),
    /// These inputs, in whole blocks of the weight's type. The outputs of all ranks are added up, and one rank has the
    /// bias.
    Inputs {
        /// The inputs.
        range: Range<usize>,
        /// Whether the shard has the bias.
        has_bias: bool,
    },
}

/// A weight (out, in) in the type of the file, and its bias (out,) in f32.
pub(super) struct FileWeight {
    pub weight: StoredTensor,
    pub bias: Option<Tensor>,
    pub device: Device,
}

impl FileWeight {
    /// Returns a shard of the weight. Errors have the name `name`.
    pub fn part(&self, name: &str, part: &LinearShard) -> Result<Self> {
        match part {
            LinearShard::Outputs(ranges) if ranges.is_empty() => {
                bail!("[gguf] {name}: no outputs were requested, expected some of {}", self.weight.rows())
            }
            LinearShard::Outputs(ranges) => {
                Self::concat(&ranges.iter().map(|range| self.outputs(name, range)).collect::<Result<Vec<_>>>()?)
            }
            LinearShard::Inputs { range, has_bias } => self.inputs(name, range, *has_bias),
        }
    }

    fn outputs(&self, name: &str, range: &Range<usize>) -> Result<Self> {
        let outputs = self.weight.rows();
        if range.start >= range.end || range.end > outputs {
            bail!("[gguf] {name}: outputs {range:?} were requested, expected some of {outputs}")
        }
        let bias = self.bias.as_ref().map(|bias| bias.narrow(0, range.start, range.len())?.force_contiguous());
        Ok(Self { weight: self.weight.with_rows(range.clone()), bias: bias.transpose()?, device: self.device.clone() })
    }

    fn inputs(&self, name: &str, range: &Range<usize>, has_bias: bool) -> Result<Self> {
        let inputs = self.weight.columns();
        if range.start >= range.end || range.end > inputs {
            bail!("[gguf] {name}: inputs {range:?} were requested, expected some of {inputs}")
        }
        let GgmlType { name: kind, block, .. } = self.weight.kind;
        if !range.start.is_multiple_of(*block) || !range.end.is_multiple_of(*block) {
            bail!(
                "[gguf] {name}: inputs {range:?} of a weight in {kind} were requested, expected whole blocks of {block}"
            )
        }
        let bias = self.bias.clone().filter(|_| has_bias);
        Ok(Self { weight: self.weight.with_columns(range.clone()), bias, device: self.device.clone() })
    }

    /// Joins the rows of weights of one type, one after the other. A missing bias is zeros.
    pub fn concat(all: &[Self]) -> Result<Self> {
        let device = &all[0].device;
        let weights: Vec<_> = all.iter().map(|part| &part.weight).collect();
        let mut bias = None;
        if all.iter().any(|part| part.bias.is_some()) {
            let bias_or_zeros = |part: &Self| match &part.bias {
                Some(stored) => Ok(stored.clone()),
                None => Tensor::zeros(part.weight.rows(), DType::F32, device),
            };
            bias = Some(Tensor::cat(&all.iter().map(bias_or_zeros).collect::<Result<Vec<_>>>()?, 0)?);
        }
        Ok(Self { weight: StoredTensor::join_rows(&weights), bias, device: device.clone() })
    }

    /// Packs the weight.
    pub fn pack(self) -> Result<PackedLinear> {
        self.weight.pack(self.bias.as_ref(), &self.device)
    }

    /// Packs the weight, and returns it as a list of one projection.
    pub fn columns(self) -> Result<Vec<PackedProjection>> {
        let outputs = Outputs { count: self.weight.rows(), has_bias: self.bias.is_some() };
        Ok(PackedProjection::split(self.pack()?, [outputs]))
    }
}

/// A weight with the rows of one or more projections of one input.
pub(super) struct FusedWeight {
    pub weight: FileWeight,
    /// The projections, in the order of the rows.
    pub outputs: Vec<Outputs>,
}

impl FusedWeight {
    /// Packs the weight, and returns its projections.
    pub fn pack(self) -> Result<Vec<PackedProjection>> {
        Ok(PackedProjection::split(self.weight.pack()?, self.outputs))
    }

    /// Packs weights of one input. Neighbours of one type become one weight, whose products are computed at once.
    pub fn pack_joined(all: Vec<Self>) -> Result<Vec<PackedProjection>> {
        let mut runs: Vec<Vec<Self>> = Vec::new();
        for next in all {
            let number = next.weight.weight.kind.number;
            match runs.last_mut() {
                Some(run) if run[0].weight.weight.kind.number == number => run.push(next),
                _ => runs.push(vec![next]),
            }
        }
        let mut projections = Vec::new();
        for run in runs {
            let outputs = run.iter().flat_map(|fused| fused.outputs.iter().copied()).collect();
            let mut weights: Vec<_> = run.into_iter().map(|fused| fused.weight).collect();
            let weight = if weights.len() == 1 { weights.remove(0) } else { FileWeight::concat(&weights)? };
            projections.extend(Self { weight, outputs }.pack()?);
        }
        Ok(projections)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{Device, Error};

    use super::*;

    #[test]
    fn gguf_shards_have_the_numbers_of_the_whole() -> Result<()> {
        let whole = Tensor::randn(0f32, 1., (6, 512), &Device::Cpu)?;
        let bias = Tensor::arange(0f32, 6., &Device::Cpu)?;
        for dtype in [GgmlDType::F32, GgmlDType::BF16, GgmlDType::Q8_0, GgmlDType::Q4K] {
            let kind = GgmlType::find(GgmlType::number_of(dtype)).expect("a type that is read");
            let data = QTensor::quantize(&whole, dtype)?.data()?.into_owned();
            let stored = StoredTensor { kind, dims: vec![6, 512], data };
            let weight = FileWeight { weight: stored, bias: Some(bias.clone()), device: Device::Cpu };
            let numbers = |any: &FileWeight| any.weight.dequantize(&Device::Cpu);
            let same = |got: &Tensor, expected: &Tensor| -> Result<()> {
                assert_eq!(got.dims(), expected.dims());
                assert_eq!((got - expected)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0, "{dtype:?}");
                Ok(())
            };
            let expected = numbers(&weight)?;
            let outputs = weight.part("w", &LinearShard::Outputs(vec![4..6, 1..2]))?;
            same(&numbers(&outputs)?, &Tensor::cat(&[expected.narrow(0, 4, 2)?, expected.narrow(0, 1, 1)?], 0)?)?;
            same(&outputs.bias.expect("a bias"), &Tensor::new(&[4f32, 5., 1.], &Device::Cpu)?)?;
            let inputs = weight.part("w", &LinearShard::Inputs { range: 256..512, has_bias: false })?;
            same(&numbers(&inputs)?, &expected.narrow(1, 256, 256)?)?;
            assert!(inputs.bias.is_none());
            let error = |part| weight.part("w", &part).err().map(|error: Error| error.to_string()).unwrap_or_default();
            assert!(
                error(LinearShard::Inputs { range: 0..513, has_bias: true }).starts_with("[gguf] w: inputs 0..513")
            );
            assert!(error(LinearShard::Outputs(vec![0..1, 3..7])).starts_with("[gguf] w: outputs 3..7"));
            let cut = error(LinearShard::Inputs { range: 0..48, has_bias: true });
            assert_eq!(cut.contains("expected whole blocks of"), dtype.block_size() > 1, "{cut}");
        }
        Ok(())
    }
}
