//! The training: steps, their measurements, and checkpoints.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_attention::init::TorchSeed;
use candle_core::{D, DType, Device, Error, Result, Tensor, Var, bail, safetensors};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap, loss};

use crate::Args;
use crate::attention_only::{AttentionOnly, AttentionOnlyConfig};
use crate::data::{Batch, Copies};

const DEVICE: Device = Device::Cpu;
const BATCH: usize = 32;
const LEARNING_RATE: f64 = 2e-3;
/// The steps over which the learning rate rises, at the start and after a checkpoint.
const WARM_UP: usize = 50;
/// The step number of the sequences for measurements, larger than any step of training.
const MEASURED: u64 = u32::MAX as u64;
const HISTORY: &str = "history";

pub struct Training {
    pub model: AttentionOnly,
    variables: VarMap,
    optimizer: AdamW,
    measured: Batch,
    /// The steps since the optimiser was created.
    warmth: usize,
    pub history: Vec<Measurement>,
}

/// The progress of the model, measured on sequences that it is not trained on.
#[derive(Debug, Clone)]
pub struct Measurement {
    pub step: usize,
    /// The mean cross-entropy in nats where the sequences repeat.
    pub loss: f32,
    /// The share of next tokens that the model predicts there.
    pub copied: f32,
    /// The share of weight on tokens after a previous copy, of the best head of the last layer.
    pub induction: f32,
}

impl Training {
    /// Makes a model whose weights are drawn as in PyTorch.
    pub fn new(cfg: &AttentionOnlyConfig) -> Result<Self> {
        let drawn = TorchSeed::new(0).var_builder(DType::F32, &DEVICE);
        AttentionOnly::new(cfg, drawn.clone())?;
        let variables = VarMap::new();
        let model = AttentionOnly::new(cfg, VarBuilder::from_varmap(&variables, DType::F32, &DEVICE))?;
        for (name, variable) in named(&variables)? {
            variable.set(&drawn.get_unchecked(&name)?)?;
        }
        let optimizer = AdamW::new(variables.all_vars(), ParamsAdamW { lr: 0.0, ..Default::default() })?;
        let measured = Batch::draw(BATCH, MEASURED)?;
        Ok(Self { model, variables, optimizer, measured, warmth: 0, history: Vec::new() })
    }

    /// Continues from a checkpoint; the moments of the optimiser start again from zero.
    pub fn resume(&mut self, file: &Path) -> Result<()> {
        if !file.is_file() {
            bail!("[induction_heads] there is no {}: run without --resume first", file.display())
        }
        let Some(history) = safetensors::load(file, &DEVICE)?.remove(HISTORY) else {
            bail!("[induction_heads] {} is no checkpoint of this program: it has no {HISTORY:?}", file.display())
        };
        self.variables.load(file)?;
        let row =
            |row: Vec<f32>| Measurement { step: row[0] as usize, loss: row[1], copied: row[2], induction: row[3] };
        self.history = history.reshape(((), 4))?.to_vec2()?.into_iter().map(row).collect();
        Ok(())
    }

    /// Returns the next step.
    pub fn next_step(&self) -> usize {
        self.history.last().map_or(0, |last| last.step)
    }

    pub fn step(&mut self, step: usize) -> Result<()> {
        self.warmth += 1;
        self.optimizer.set_learning_rate(LEARNING_RATE * (self.warmth as f64 / WARM_UP as f64).min(1.0));
        let batch = Batch::draw(BATCH, step as u64)?;
        let copies = batch.copies(&DEVICE)?;
        let logits = self.logits(&batch, &copies)?;
        self.optimizer.backward_step(&loss::cross_entropy(&logits, &copies.next_tokens)?)
    }

    /// Returns the logits (N, V) at the positions of `copies`.
    fn logits(&self, batch: &Batch, copies: &Copies) -> Result<Tensor> {
        let logits = self.model.forward(&batch.ids(&DEVICE)?)?.flatten_to(1)?;
        logits.index_select(&copies.rows, 0)
    }

    /// Measures the model after `step` steps, and adds the measurement to the history.
    pub fn measure(&mut self, step: usize) -> Result<&Measurement> {
        let copies = self.measured.copies(&DEVICE)?;
        let logits = self.logits(&self.measured, &copies)?;
        let is_right = logits.argmax(D::Minus1)?.eq(&copies.next_tokens)?;
        let copied = is_right.to_dtype(DType::F32)?.mean_all()?.to_scalar()?;
        let weights = self.model.attention_weights(&self.measured.ids(&DEVICE)?)?;
        let induction = self.measured.induction(&weights)?.into_iter().fold(0.0, f32::max);
        let loss = loss::cross_entropy(&logits, &copies.next_tokens)?.to_scalar()?;
        self.history.push(Measurement { step, loss, copied, induction });
        Ok(&self.history[self.history.len() - 1])
    }

    /// Writes the parameters, and with `history` what [`resume`](Self::resume) needs. If the process is killed
    /// meanwhile, the file is unchanged.
    pub fn save(&self, file: &Path, history: bool) -> Result<()> {
        let parameters =
            named(&self.variables)?.into_iter().map(|(name, variable)| (name, variable.as_detached_tensor()));
        let mut tensors: HashMap<_, _> = parameters.collect();
        if history {
            let rows = self.history.iter().flat_map(|m| [m.step as f32, m.loss, m.copied, m.induction]);
            tensors.insert(HISTORY.into(), Tensor::from_iter(rows, &DEVICE)?.reshape(((), 4))?);
        }
        let unfinished = file.with_extension("unfinished");
        safetensors::save(&tensors, &unfinished)?;
        std::fs::rename(&unfinished, file)?;
        Ok(())
    }
}

fn named(variables: &VarMap) -> Result<HashMap<String, Var>> {
    Ok(variables.data().lock().map_err(|_| Error::msg("the variables are lost"))?.clone())
}

pub fn checkpoint(args: &Args) -> PathBuf {
    args.out.join("checkpoint.safetensors")
}
