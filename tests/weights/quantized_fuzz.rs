//! Checkpoints of quantising libraries with changed headers, settings, shapes and numbers: each is read, or is an
//! error, without a panic and without memory that its file does not explain.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use attention_oracle::array::Random;
use candle_attention::packed_linear_no_bias;
use candle_attention::weights::Checkpoint;
use candle_core::{DType, Result};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use crate::DEVICE;
use crate::common::{allocations, listed, recorded};

const LAYER: &str = "model.layers.0.self_attn.q_proj";
/// The changed copies of each checkpoint.
const COPIES: u64 = 10;
/// The bytes that a request may have for each byte of a file: a code of one bit becomes a number in f32 next to a scale
/// and a zero in f32.
const BYTES: usize = 96;
/// The bytes that reading any file may ask for at once.
const BASE: usize = 1 << 17;

/// A tensor of a layer.
#[derive(Debug, Clone)]
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// A layer in a file, and its config.
#[derive(Debug, Clone)]
struct Layer {
    config: Value,
    tensors: Vec<Stored>,
    metadata: Option<HashMap<String, String>>,
}

/// Numbers that a config or a tensor may have by mistake.
fn number(draws: &mut Random) -> i64 {
    const NUMBERS: [i64; 18] = [0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 64, 127, 1 << 31, 1 << 62, i64::MAX];
    NUMBERS[draws.up_to(NUMBERS.len() - 1)]
}

/// Replaces a value somewhere in JSON.
fn change_json(value: &mut Value, draws: &mut Random) {
    let inner: Option<&mut Value> = match value {
        Value::Object(object) if !object.is_empty() => {
            let at = draws.up_to(object.len() - 1);
            object.values_mut().nth(at)
        }
        Value::Array(list) if !list.is_empty() => {
            let at = draws.up_to(list.len() - 1);
            list.get_mut(at)
        }
        _ => None,
    };
    if let Some(inner) = inner
        && draws.up_to(7) > 0
    {
        return change_json(inner, draws);
    }
    *value = match draws.up_to(7) {
        0 => Value::Null,
        1 => json!(draws.up_to(1) == 0),
        2 => json!(""),
        3 => json!([]),
        4 => json!({}),
        5 => json!(-1e300),
        _ => json!(number(draws)),
    };
}

impl Layer {
    /// Reads the layer of a folder.
    fn of(folder: &Path) -> Result<Self> {
        let config = serde_json::from_slice(&fs::read(folder.join("config.json"))?).expect("a config");
        let file = fs::read(folder.join("model.safetensors"))?;
        let (_, header) = SafeTensors::read_metadata(&file)?;
        let mut tensors = Vec::new();
        for (name, view) in SafeTensors::deserialize(&file)?.tensors() {
            if name.starts_with(LAYER) {
                tensors.push(Stored {
                    name,
                    dtype: view.dtype(),
                    shape: view.shape().to_vec(),
                    bytes: view.data().to_vec(),
                });
            }
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { config, tensors, metadata: header.metadata().clone() })
    }

    /// Makes a change: to a setting, or to the dtype, shape, numbers or name of a tensor.
    fn change(&mut self, draws: &mut Random) {
        let kind = draws.up_to(10);
        if kind < 3 {
            let keys = ["quantization_config", "quantization"];
            match keys.iter().find(|key| self.config[**key].is_object()) {
                Some(key) => change_json(&mut self.config[*key], draws),
                None => change_json(&mut self.config, draws),
            }
            return;
        }
        if kind == 3
            && let Some(text) = self.metadata.as_mut().and_then(|texts| texts.values_mut().next())
            && let Ok(mut value) = serde_json::from_str(text)
        {
            change_json(&mut value, draws);
            *text = value.to_string();
            return;
        }
        if self.tensors.is_empty() {
            return;
        }
        let at = draws.up_to(self.tensors.len() - 1);
        if kind == 4 {
            drop(self.tensors.remove(at));
            return;
        }
        self.tensors[at].change(kind, draws);
    }

    /// Returns the bytes of a file.
    fn file(&self) -> Result<Vec<u8>> {
        let mut views = HashMap::new();
        for Stored { name, dtype, shape, bytes } in &self.tensors {
            views.insert(name, TensorView::new(*dtype, shape.clone(), bytes)?);
        }
        Ok(safetensors::serialize(views, self.metadata.clone())?)
    }
}

impl Stored {
    fn change(&mut self, kind: usize, draws: &mut Random) {
        const NAMES: [&str; 9] = [
            "weight",
            "weight_scale",
            "weight_zero_point",
            "weight_packed",
            "g_idx",
            "weight_g_idx",
            "pre_quant_scale",
            "zero",
            "scales",
        ];
        const DTYPES: [Dtype; 11] = [
            Dtype::U8,
            Dtype::I8,
            Dtype::I16,
            Dtype::I32,
            Dtype::U32,
            Dtype::I64,
            Dtype::F16,
            Dtype::BF16,
            Dtype::F32,
            Dtype::F8_E4M3,
            Dtype::F8_E8M0,
        ];
        match kind {
            5 => self.name = format!("{LAYER}.{}", NAMES[draws.up_to(NAMES.len() - 1)]),
            6 => {
                self.dtype = DTYPES[draws.up_to(DTYPES.len() - 1)];
                self.shape = vec![self.bytes.len() * 8 / self.dtype.bitsize()];
                self.bytes.truncate(self.shape[0] * self.dtype.bitsize() / 8);
                self.fold(draws);
            }
            7 => {
                let count = self.shape.iter().product();
                self.shape = vec![count];
                self.fold(draws);
            }
            8 => {
                let byte = [0, 1, 0x7f, 0x80, 0xff][draws.up_to(4)];
                self.bytes.fill(byte);
            }
            9 => {
                let size = self.dtype.bitsize() / 8;
                let rows = draws.up_to(self.shape.first().copied().unwrap_or(1));
                let row = self.shape.iter().skip(1).product::<usize>();
                self.shape = [&[rows], self.shape.get(1..).unwrap_or_default()].concat();
                self.bytes.truncate(rows * row * size);
            }
            _ => self.change_numbers(draws),
        }
        let len = self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8;
        self.bytes.resize(len, 1);
    }

    /// Makes a list of elements a matrix, or a tensor with more dimensions.
    fn fold(&mut self, draws: &mut Random) {
        let count = self.shape[0];
        let columns = 1 << draws.up_to(7);
        if !count.is_multiple_of(columns) {
            return;
        }
        let rows = count / columns;
        self.shape = match draws.up_to(3) {
            0 => vec![columns, rows],
            1 => vec![1, rows, columns],
            2 => vec![rows, columns, 1],
            _ => vec![rows, columns],
        };
    }

    /// Changes one number, or a value of a text in JSON.
    fn change_numbers(&mut self, draws: &mut Random) {
        if let Ok(mut value) = serde_json::from_slice::<Value>(&self.bytes)
            && value.is_object()
        {
            change_json(&mut value, draws);
            self.bytes = value.to_string().into_bytes();
            self.shape = vec![self.bytes.len()];
            return;
        }
        let size = (self.dtype.bitsize() / 8).clamp(1, 8);
        let count = self.bytes.len() / size;
        if count > 0 {
            let at = draws.up_to(count - 1) * size;
            self.bytes[at..at + size].copy_from_slice(&number(draws).to_le_bytes()[..size]);
        }
    }
}

/// Changes a byte or more of the header of a file, or cuts the file.
fn change_header(file: &mut Vec<u8>, draws: &mut Random) {
    let header = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    for _ in 0..=draws.up_to(2) {
        let at = draws.up_to(header.min(file.len() - 9)) + 8;
        match draws.up_to(4) {
            0 => file[at] = draws.bits() as u8,
            1 => file[at] = b"0123456789[]{}\",:"[draws.up_to(16)],
            2 => file[draws.up_to(7)] = draws.bits() as u8,
            3 => file.truncate(at),
            _ => drop(file.remove(at)),
        }
        if file.len() < 10 {
            return;
        }
    }
}

/// Opens a checkpoint, and reads the layer in every way.
fn read(folder: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(folder)?;
    let vb = checkpoint.var_builder(DType::F32, &DEVICE)?;
    drop(checkpoint.detect("model.layers.0.self_attn"));
    let name = format!("{LAYER}.weight");
    let shape = checkpoint.shapes().find(|(listed, _)| *listed == name).map(|(_, shape)| shape.to_vec());
    if let Some(&[outputs, inputs]) = shape.as_deref() {
        packed_linear_no_bias(inputs, outputs, vb.pp(LAYER))?;
    }
    let weight = vb.get_unchecked(&name)?;
    assert_eq!(Some(weight.dims()), shape.as_deref());
    Ok(())
}

#[test]
fn changed_quantized_checkpoints_are_read_or_errors_within_the_memory_of_their_files() -> Result<()> {
    let [mut were_read, mut refused] = [0, 0];
    for (case, folder) in (0u64..).zip(listed(recorded("weights/quantized"))) {
        let whole = Layer::of(&folder)?;
        for copy in 0..COPIES {
            let mut draws = Random::new(case * COPIES + copy);
            let mut layer = whole.clone();
            for _ in 0..=draws.up_to(1) {
                layer.change(&mut draws);
            }
            let mut file = layer.file()?;
            if draws.up_to(7) == 0 {
                change_header(&mut file, &mut draws);
            }
            let to = tempfile::tempdir()?;
            fs::write(to.path().join("config.json"), layer.config.to_string())?;
            fs::write(to.path().join("model.safetensors"), &file)?;
            // A panic is found by what was printed last.
            println!("{}, copy {copy}", folder.display());
            allocations::reset();
            let result = read(to.path());
            let largest = allocations::asked().largest;
            assert!(largest <= BASE + BYTES * file.len(), "{largest} bytes at once for {}", file.len());
            match result {
                Ok(()) => were_read += 1,
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("[weights] ") || text.contains(LAYER), "{text}");
                    refused += 1;
                }
            }
        }
    }
    // Neither all nor none, or the changes would be of no use.
    assert!(were_read > 50 && refused > 100, "{were_read} were read, {refused} refused");
    Ok(())
}
