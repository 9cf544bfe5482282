//! Reads a GGUF file: its header, its tensors, and quantised weights, whole, joined and in part.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use candle_core::quantized::gguf_file::Content;
use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Error, Result, Tensor, bail};

use candle_attention_core::internal::ProjectionShape;
use candle_attention_modules::base::{is_addressable, root};
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
        self.content.tensor_infos.contains_key(name)
    }

    /// Reads a tensor.
    pub fn tensor(&mut self, name: &str) -> Result<QTensor> {
        let Some(info) = self.content.tensor_infos.get(name) else { bail!("[gguf] {name} is missing") };
        // Candle casts the bytes of a tensor to blocks, and the bytes of an empty tensor are not aligned.
        if info.shape.dims().contains(&0) {
            bail!("[gguf] {name} has shape {:?}, expected dimensions of at least 1", info.shape)
        }
        // Candle compares the size with the size of the file before it allocates.
        if !is_addressable(info.shape.dims()) {
            bail!("[gguf] {name} has shape {:?}, which is too large to address", info.shape)
        }
        self.content
            .tensor(self.reader, name, self.device)
            .map_err(|error| Error::msg(format!("[gguf] {name}: {}", root(&error))))
    }

    /// Reads `name.weight` (out, in), and `name.bias` (out,) if `has_bias` is true.
    pub fn weight(&mut self, name: &str, shape: ProjectionShape, has_bias: bool) -> Result<Weight> {
        let weight = self.shaped(&format!("{name}.weight"), &[shape.outputs, shape.inputs])?;
        let mut bias = None;
        if has_bias {
            bias = Some(self.numbers(&format!("{name}.bias"), &[shape.outputs])?);
        }
        Ok(Weight { weight, bias })
    }

    /// Reads a linear layer of any shape, and its bias if the file has one.
    pub fn linear(&mut self, name: &str) -> Result<Weight> {
        let weight = format!("{name}.weight");
        let has_bias = self.has(&format!("{name}.bias"));
        match self.content.tensor_infos.get(&weight).map(|info| info.shape.dims()) {
            Some(&[outputs, inputs]) => self.weight(name, ProjectionShape { outputs, inputs }, has_bias),
            Some(found) => bail!("[gguf] {weight} has shape {found:?}, expected (out, in)"),
            None => bail!("[gguf] {weight} is missing{}", of_part(self.content)),
        }
    }

    /// Reads a tensor of this shape, in f32.
    pub fn numbers(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.shaped(name, shape)?.dequantize(self.device)
    }

    /// Reads a tensor of this shape.
    pub fn shaped(&mut self, name: &str, shape: &[usize]) -> Result<QTensor> {
        match self.content.tensor_infos.get(name) {
            None => bail!("[gguf] {name} is missing, expected shape {shape:?}{}", of_part(self.content)),
            Some(info) if info.shape.dims() != shape => {
                bail!("[gguf] {name} has shape {:?}, expected {shape:?}", info.shape)
            }
            Some(_) => self.tensor(name),
        }
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
pub(super) struct Weight {
    pub weight: QTensor,
    pub bias: Option<Tensor>,
}

impl Weight {
    /// Returns a shard of the weight. Errors have the name `name`.
    pub fn part(&self, name: &str, part: &LinearShard) -> Result<Self> {
        match part {
            LinearShard::Outputs(ranges) if ranges.is_empty() => {
                bail!("[gguf] {name}: no outputs were requested, expected some of {}", self.out_dim())
            }
            LinearShard::Outputs(ranges) => {
                Self::concat(&ranges.iter().map(|range| self.outputs(name, range)).collect::<Result<Vec<_>>>()?)
            }
            LinearShard::Inputs { range, has_bias } => self.inputs(name, range, *has_bias),
        }
    }

    fn outputs(&self, name: &str, range: &Range<usize>) -> Result<Self> {
        let (outputs, inputs) = self.weight.shape().dims2()?;
        if range.start >= range.end || range.end > outputs {
            bail!("[gguf] {name}: outputs {range:?} were requested, expected some of {outputs}")
        }
        let data = self.weight.data()?;
        let row = data.len() / outputs;
        let bias = self.bias.as_ref().map(|bias| bias.narrow(0, range.start, range.len())?.force_contiguous());
        Ok(Self {
            weight: self.like(data[range.start * row..range.end * row].to_vec(), (range.len(), inputs))?,
            bias: bias.transpose()?,
        })
    }

    fn inputs(&self, name: &str, range: &Range<usize>, has_bias: bool) -> Result<Self> {
        let (outputs, inputs) = self.weight.shape().dims2()?;
        if range.start >= range.end || range.end > inputs {
            bail!("[gguf] {name}: inputs {range:?} were requested, expected some of {inputs}")
        }
        let dtype = self.weight.dtype();
        let data = self.weight.data()?;
        let block = dtype.block_size();
        if !range.start.is_multiple_of(block) || !range.end.is_multiple_of(block) {
            bail!(
                "[gguf] {name}: inputs {range:?} of a weight in {dtype:?} were requested, expected whole blocks of \
                 {block}"
            )
        }
        let bytes = range.start / block * dtype.type_size()..range.end / block * dtype.type_size();
        let rows = data.chunks(data.len() / outputs).flat_map(|row| &row[bytes.clone()]).copied();
        let bias = self.bias.clone().filter(|_| has_bias);
        Ok(Self { weight: self.like(rows.collect(), (outputs, range.len()))?, bias })
    }

    fn like(&self, data: Vec<u8>, shape: (usize, usize)) -> Result<QTensor> {
        QTensor::new(QStorage::from_data(data.into(), &self.weight.device(), self.weight.dtype())?, shape)
    }

    fn out_dim(&self) -> usize {
        self.weight.shape().dims()[0]
    }

    /// Joins the rows of weights of one type, one after the other. A missing bias is zeros.
    pub fn concat(all: &[Self]) -> Result<Self> {
        let first = &all[0].weight;
        let device = all[0].weight.device();
        let rows = all.iter().map(Self::out_dim).sum::<usize>();
        let data = all.iter().map(|part| part.weight.data()).collect::<Result<Vec<_>>>()?;
        let storage = QStorage::from_data(data.concat().into(), &device, first.dtype())?;
        let mut bias = None;
        if all.iter().any(|part| part.bias.is_some()) {
            let bias_or_zeros = |part: &Self| match &part.bias {
                Some(stored) => Ok(stored.clone()),
                None => Tensor::zeros(part.out_dim(), DType::F32, &device),
            };
            bias = Some(Tensor::cat(&all.iter().map(bias_or_zeros).collect::<Result<Vec<_>>>()?, 0)?);
        }
        Ok(Self { weight: QTensor::new(storage, (rows, first.shape().dims()[1]))?, bias })
    }

    /// Packs the weight.
    pub fn pack(self) -> Result<PackedLinear> {
        PackedLinear::from_qtensor(self.weight, self.bias.as_ref())
    }

    /// Packs the weight, and returns it as a list of one projection.
    pub fn columns(self) -> Result<Vec<PackedProjection>> {
        let outputs = Outputs { count: self.out_dim(), has_bias: self.bias.is_some() };
        Ok(PackedProjection::split(self.pack()?, [outputs]))
    }
}

/// A weight with the rows of one or more projections of one input.
pub(super) struct FusedWeight {
    pub weight: Weight,
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
            let dtype = next.weight.weight.dtype();
            match runs.last_mut() {
                Some(run) if run[0].weight.weight.dtype() == dtype => run.push(next),
                _ => runs.push(vec![next]),
            }
        }
        let mut projections = Vec::new();
        for run in runs {
            let outputs = run.iter().flat_map(|fused| fused.outputs.iter().copied()).collect();
            let mut weights: Vec<_> = run.into_iter().map(|fused| fused.weight).collect();
            let weight = if weights.len() == 1 { weights.remove(0) } else { Weight::concat(&weights)? };
            projections.extend(Self { weight, outputs }.pack()?);
        }
        Ok(projections)
    }
}

/// Reads the header of a file, as [`Content::read`] does. That panics for a `general.alignment` of 0, which is an error
/// here.
///
/// # Errors
/// For such a file, one that is no GGUF file, and one that cannot be read.
pub fn read<R: Read + Seek>(reader: &mut R) -> Result<Content> {
    Content::read(&mut Header { reader, next: Next::Other }).map_err(|error| header_error(root(&error)))
}

/// Returns the error of a header, from that of Candle.
fn header_error(error: &Error) -> Error {
    if let Error::Io(cause) = error
        && cause.kind() == io::ErrorKind::UnexpectedEof
    {
        return Error::msg("[gguf] the file ends within its header, expected a whole GGUF file");
    }
    let text = error.to_string();
    if let Some(number) = text.strip_prefix("unknown dtype for tensor ") {
        return Error::msg(format!("[gguf] a tensor has type {number}, expected a type that Candle reads"));
    }
    match text.strip_prefix("unknown magic ") {
        Some(magic) => Error::msg(format!("[gguf] the file begins with {magic}, expected GGUF's 0x46554747")),
        None => Error::msg(format!("[gguf] {text}")),
    }
}

/// A file that Candle reads piece by piece: a key, the type of its value, the value. It checks the alignment.
struct Header<'a, R> {
    reader: &'a mut R,
    next: Next,
}

/// The piece that is read next.
enum Next {
    TypeOfAlignment,
    Alignment,
    Other,
}

impl<R: Read> Read for Header<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes)
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.reader.read_exact(bytes)?;
        let are_zeros = |piece: &[u8]| piece.iter().all(|&byte| byte == 0);
        self.next = match (&self.next, &*bytes) {
            // Candle removes zeros at the end of a key.
            (_, key) if key.strip_prefix(b"general.alignment").is_some_and(are_zeros) => Next::TypeOfAlignment,
            (Next::TypeOfAlignment, [_, _, _, _]) => Next::Alignment,
            // Candle ignores wider integers.
            (Next::Alignment, value) if value.len() <= 4 && are_zeros(value) => {
                return Err(io::Error::other("general.alignment is 0, expected at least 1"));
            }
            _ => Next::Other,
        };
        Ok(())
    }
}

impl<R: Seek> Seek for Header<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.seek(to)
    }

    fn stream_position(&mut self) -> io::Result<u64> {
        self.reader.stream_position()
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::GgmlDType;
    use candle_core::{Device, Error};

    use super::*;

    #[test]
    fn gguf_shards_have_the_numbers_of_the_whole() -> Result<()> {
        let whole = Tensor::randn(0f32, 1., (6, 512), &Device::Cpu)?;
        let bias = Tensor::arange(0f32, 6., &Device::Cpu)?;
        for dtype in [GgmlDType::F32, GgmlDType::BF16, GgmlDType::Q8_0, GgmlDType::Q4K] {
            let weight = Weight { weight: QTensor::quantize(&whole, dtype)?, bias: Some(bias.clone()) };
            let numbers = |any: &Weight| any.weight.dequantize(&Device::Cpu);
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
