//! BERT, the encoder: hidden states of sentences of several lengths in one batch.

use candle_core::{DType, Device, Result, Tensor};
use candle_transformers::models::bert::{BertModel, Config};
use serde_json::json;

use crate::common::relative_error;
use crate::our_encoder::Encoder;
use crate::{builder, ids, weights};

#[test]
fn encoder_bert_matches_candle_transformers() -> Result<()> {
    let json = json!({
        "model_type": "bert", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 40, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "max_position_embeddings": 24,
        "type_vocab_size": 2, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "pad_token_id": 0,
    });
    let config: Config = serde_json::from_value(json.clone()).expect("a config of BERT");
    let weights = weights(|vb| BertModel::load(vb, &config))?;
    let theirs = BertModel::load(builder(&weights), &config)?;
    let ours = Encoder::load(&json, builder(&weights), |_, _| {})?;
    for lens in [vec![1], vec![13], vec![13, 13, 13], vec![4, 13, 1]] {
        let b = lens.len();
        let t = lens.iter().copied().max().unwrap_or_default();
        let ids = ids(b, t, 61)?;
        let attended = lens.iter().flat_map(|&len| (0..t).map(move |position| u8::from(position < len)));
        let attended = Tensor::from_vec(attended.collect(), (b, t), &Device::Cpu)?.to_dtype(DType::U32)?;
        let expected = theirs.forward(&ids, &ids.zeros_like()?, Some(&attended))?;
        let rows: Vec<Vec<u32>> = ids.to_vec2()?;
        let texts: Vec<_> = rows.iter().zip(&lens).map(|(row, &len)| &row[..len]).collect();
        // Our encoder takes no padding: the texts are concatenated.
        let found = ours.forward(&texts)?;
        let mut start = 0;
        for (sequence, &len) in lens.iter().enumerate() {
            let gap = relative_error(&found.narrow(0, start, len)?, &expected.get(sequence)?.narrow(0, 0, len)?);
            assert!(gap <= 1e-4, "sequence {sequence} of lengths {lens:?}: off by {gap:e} of the largest");
            start += len;
        }
    }
    Ok(())
}
