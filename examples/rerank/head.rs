//! The head of a cross-encoder: the hidden state of a pair's first token to one score.

use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder, linear};

/// `out(activation(dense(x)))`, by the names of each family.
pub struct Head {
    dense: Linear,
    /// DistilBERT's has no negative numbers, the others have a tangent.
    is_relu: bool,
    out: Linear,
}

/// Dense and output layers: of RoBERTa and MPNet, of DistilBERT, of BERT.
const NAMES: [[&str; 2]; 4] = [
    ["classifier.dense", "classifier.out_proj"],
    ["pre_classifier", "classifier"],
    ["bert.pooler.dense", "classifier"],
    ["pooler.dense", "classifier"],
];

impl Head {
    /// From a builder at the checkpoint's root, for hidden states of this width.
    ///
    /// # Errors
    /// For a checkpoint without a head, or with one of several classes.
    pub fn load(width: usize, vb: &VarBuilder) -> Result<Self> {
        let weight = |name: &str| format!("{name}.weight");
        let found = NAMES.iter().find(|names| names.iter().all(|name| vb.contains_tensor(&weight(name))));
        let Some([dense, out]) = found else {
            bail!(
                "[rerank] no head in the checkpoint, looked for {}",
                NAMES.map(|names| names.join(" with ")).join(", ")
            )
        };
        let Ok(out_layer) = linear(width, 1, vb.pp(out)) else {
            bail!("[rerank] {out} gives no single score: the checkpoint is of another kind, expected one label")
        };
        Ok(Self { dense: linear(width, width, vb.pp(dense))?, is_relu: *dense == "pre_classifier", out: out_layer })
    }

    /// A score for each row of hidden states (N, E).
    pub fn scores(&self, hidden: &Tensor) -> Result<Vec<f32>> {
        let xs = self.dense.forward(hidden)?;
        let xs = if self.is_relu { xs.relu()? } else { xs.tanh()? };
        self.out.forward(&xs)?.squeeze(1)?.to_dtype(DType::F32)?.to_vec1()
    }
}
