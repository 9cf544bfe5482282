//! Attention to the keys that an indexer chooses, in calls with a cache and with padding.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, IndexerConfig, KvPool, KvPoolConfig,
    MultiHeadAttention, MultiHeadLatentAttention, PackedSequences, PageTable, hf,
};
use candle_core::{DType, Result, Tensor};

use crate::{DEVICE, Model};

/// A layer of a model.
struct Place {
    model: &'static str,
    layer: usize,
}

const fn place(model: &'static str, layer: usize) -> Place {
    Place { model, layer }
}

/// The layers whose indexers choose few of the keys of each query, and one that has a window in a model of such.
const PLACES: [Place; 11] = [
    place("deepseek_v32", 0),
    place("glm_moe_dsa", 0),
    place("axk2", 0),
    place("hy_v4", 0),
    place("mistral_large4", 0),
    place("mistral_large4", 1),
    place("dots3_note", 0),
    place("dots3_note", 1),
    place("glm5_next", 0),
    place("minimax_m3", 1),
    place("qwen4_exp", 0),
];

#[derive(Clone)]
#[allow(clippy::large_enum_variant, reason = "a test has few")]
enum Layer {
    Latent(MultiHeadLatentAttention),
    MultiHead(MultiHeadAttention),
}

impl Layer {
    fn forward_with(&self, input: AttentionInput) -> Result<Tensor> {
        match self {
            Self::Latent(own) => own.forward_with(input),
            Self::MultiHead(own) => own.forward_with(input),
        }
    }

    fn freeze(&self) -> Result<Self> {
        Ok(match self {
            Self::Latent(own) => Self::Latent(own.freeze()?),
            Self::MultiHead(own) => Self::MultiHead(own.freeze()?),
        })
    }

    /// Makes a pool for the pages of a table.
    fn pool(&self, table: &PageTable) -> Result<KvPool> {
        let config = match self {
            Self::Latent(own) => KvPoolConfig::for_latent_layer(own.config(), table),
            Self::MultiHead(own) => KvPoolConfig::for_layer(own.config(), table),
        };
        KvPool::new(&config, &DEVICE)
    }

    fn num_heads(&self) -> usize {
        match self {
            Self::Latent(own) => own.config().num_heads(),
            Self::MultiHead(own) => own.config().num_heads(),
        }
    }
}

/// A layer, and inputs (2, T, E) with the outputs of transformers.
struct Recorded {
    model: Model,
    layer: Layer,
    xs: Tensor,
    ys: Tensor,
}

fn recorded() -> Result<Vec<Recorded>> {
    let mut all = Vec::new();
    for Place { model: name, layer: number } in PLACES {
        let model = Model::named(name);
        let layer = if hf::latent_attention_config(&model.config, number).is_ok() {
            let latent = hf::load_latent_attention(&model.config, number, model.vb())?;
            let config = latent.config();
            assert!(config.indexer().map(|own| own.top_k) == Some(4) || config.window() == Some(5), "{name} {number}");
            Layer::Latent(latent)
        } else {
            let own = hf::load_attention(&model.config, number, model.vb())?;
            assert_eq!(own.config().indexer().map(|indexer| indexer.top_blocks), Some(3));
            Layer::MultiHead(own)
        };
        let (xs, ys) =
            (model.golden[&format!("layer{number}.in")].clone(), model.golden[&format!("layer{number}.out")].clone());
        all.push(Recorded { model, layer, xs, ys });
    }
    Ok(all)
}

#[test]
fn indexer_with_cache_in_chunks_matches_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        for own in [layer.clone(), layer.freeze()?] {
            for chunk in [1, 3, 8] {
                let mut cache = AttentionCache::default();
                for start in (0..t).step_by(chunk) {
                    let n = chunk.min(t - start);
                    let part = xs.narrow(1, start, n)?;
                    let found = own.forward_with(AttentionInput::new(&part).with_cache(&mut cache))?;
                    model.assert_close(&found, &ys.narrow(1, start, n)?, &format!("chunks of {chunk} from {start}"));
                }
            }
        }
    }
    Ok(())
}

/// The numbers of tokens of the steps in which two sequences are stored in pages, whose sum is that of the recorded
/// inputs.
const STEPS: [[usize; 2]; 4] = [[5, 0], [1, 7], [6, 1], [1, 5]];

/// Returns the rows of (2, T, E) of a step's tokens, (total, E), after `before` tokens of each sequence.
fn rows_of_step(tensor: &Tensor, before: [usize; 2], tokens: [usize; 2]) -> Result<Tensor> {
    let own = |s: usize| tensor.get(s)?.narrow(0, before[s], tokens[s]);
    Tensor::cat(&[own(0)?, own(1)?], 0)
}

#[test]
fn indexer_in_pages_matches_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let mut table = PageTable::new(2, 16)?;
        let pool = layer.pool(&table)?;
        let sequences = [table.add(), table.add()];
        let mut before = [0, 0];
        for tokens in STEPS {
            let step = table.step(&[sequences[0].tokens(tokens[0]), sequences[1].tokens(tokens[1])])?;
            let rows = rows_of_step(&xs, before, tokens)?;
            let found = layer.forward_with(AttentionInput::new(&rows).with_pages(&pool, &step))?;
            model.assert_close(&found, &rows_of_step(&ys, before, tokens)?, &format!("{tokens:?} after {before:?}"));
            step.commit();
            before = [before[0] + tokens[0], before[1] + tokens[1]];
        }
        assert_eq!(before, [xs.dim(1)?; 2]);
    }
    Ok(())
}

#[test]
fn indexer_with_masks_for_each_head_matches_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let (t, h) = (xs.dim(1)?, layer.num_heads());
        let ones = Tensor::ones((1, h, t, t), DType::U8, xs.device())?;
        let zeros = ones.to_dtype(xs.dtype())?.affine(0.0, 0.0)?;
        for mask in [AttentionMask::none().with_bool_mask(&ones), AttentionMask::none().with_bias(&zeros)] {
            let found = layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))?;
            model.assert_close(&found, &ys, "a mask for each head");
        }
    }
    Ok(())
}

#[test]
fn indexer_with_left_padding_matches_sequences_alone() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        let padding = 5;
        let starts = [0, padding];
        // The second sequence without its last tokens, after padding.
        let second = xs.narrow(0, 1, 1)?;
        let padded = Tensor::cat(&[&second.narrow(1, 2, padding)?, &second.narrow(1, 0, t - padding)?], 1)?;
        let batch = Tensor::cat(&[&xs.narrow(0, 0, 1)?, &padded], 0)?;
        let check = |found: &Tensor, name: &str| -> Result<()> {
            model.assert_close(&found.narrow(0, 0, 1)?, &ys.narrow(0, 0, 1)?, name);
            let own = found.narrow(0, 1, 1)?.narrow(1, padding, t - padding)?;
            model.assert_close(&own, &ys.narrow(0, 1, 1)?.narrow(1, 0, t - padding)?, name);
            Ok(())
        };
        for backend in [Backend::Auto, Backend::Reference] {
            let mask = AttentionMask::none().with_starts(starts.to_vec());
            let input = || AttentionInput::new(&batch).with_backend(backend);
            check(&layer.forward_with(input().with_mask(&mask))?, "without a cache")?;
            let mut cache = AttentionCache::default();
            check(&layer.forward_with(input().with_starts(&starts).with_cache(&mut cache))?, "with a cache")?;
        }
        // The same prompt, and then token by token.
        let prompt = batch.narrow(1, 0, padding + 2)?;
        let mut cache = AttentionCache::default();
        let input = AttentionInput::new(&prompt).with_starts(&starts).with_cache(&mut cache);
        let mut parts = vec![layer.forward_with(input)?];
        for token in padding + 2..t {
            let step = batch.narrow(1, token, 1)?;
            parts.push(layer.forward_with(AttentionInput::new(&step).with_cache(&mut cache))?);
        }
        check(&Tensor::cat(&parts, 1)?, "token by token")?;
    }
    Ok(())
}

#[test]
fn indexer_of_other_sizes_or_inputs_is_an_error() -> Result<()> {
    let Recorded { model, layer: Layer::Latent(layer), xs, .. } = recorded()?.remove(1) else { unreachable!() };
    let error = |name: &str, value: serde_json::Value| {
        let mut config = model.config.clone();
        config[name] = value;
        hf::latent_attention_config(&config, 0).expect_err("another config").to_string()
    };
    let indexer = layer.config().indexer().map(|own| IndexerConfig { top_k: 0, ..own });
    let none = layer.config().clone().with_indexer(indexer).validate().expect_err("no keys").to_string();
    assert!(none.contains("the indexer's top_k is 0, expected at least 1"), "{none}");
    assert!(error("index_head_dim", 2.into()).contains("head_dim is 2, expected at least the rope_head_dim of 4"));
    assert!(error("q_lora_rank", serde_json::Value::Null).contains("has an indexer and no q_lora_rank"));

    let total = xs.dim(1)?;
    let packed = PackedSequences::from_lens(&[total], &[total])?;
    let rows = xs.get(0)?;
    let found = layer.forward_with(AttentionInput::new(&rows).with_packed(&packed));
    let text = found.expect_err("packed sequences").to_string();
    assert!(text.contains("packed sequences were given to a layer with an indexer"), "{text}");
    Ok(())
}

/// The models of which a layer may attend to the keys that another chose.
const SHARING: [&str; 2] = ["glm_moe_dsa", "hy_v4"];

/// Returns the first layer of a model by a config that says whether the layer has an indexer.
fn by_indexer_type(model: &Model, kind: &str) -> Result<MultiHeadLatentAttention> {
    let mut config = model.config.clone();
    config["indexer_types"] = serde_json::json!([kind]);
    hf::load_latent_attention(&config, 0, model.vb())
}

#[test]
fn layer_with_shared_choice_in_pages_matches_transformers() -> Result<()> {
    for name in SHARING {
        let model = Model::named(name);
        let (choosing, sharing) = (by_indexer_type(&model, "full")?, by_indexer_type(&model, "shared")?);
        let (xs, ys) = (&model.golden["layer0.in"], &model.golden["layer0.out"]);
        let mut table = PageTable::new(2, 16)?;
        let pool = |layer: &MultiHeadLatentAttention| {
            KvPool::new(&KvPoolConfig::for_latent_layer(layer.config(), &table), &DEVICE)
        };
        let (first, second) = (pool(&choosing)?, pool(&sharing)?);
        let sequences = [table.add(), table.add()];
        let mut before = [0, 0];
        for tokens in STEPS {
            let step = table.step(&[sequences[0].tokens(tokens[0]), sequences[1].tokens(tokens[1])])?;
            let rows = rows_of_step(xs, before, tokens)?;
            let expected = rows_of_step(ys, before, tokens)?;
            let made = choosing.forward_with_choice(AttentionInput::new(&rows).with_pages(&first, &step))?;
            model.assert_close(&made.output, &expected, "the layer that chooses");
            let own = || AttentionInput::new(&rows).with_pages(&second, &step);
            let found = sharing.forward_with_choice(own().with_chosen_keys(&made.chosen))?;
            model.assert_close(&found.output, &expected, &format!("{tokens:?} after {before:?}"));
            let again = sharing.forward_with(own().with_chosen_keys(&found.chosen))?;
            model.assert_close(&again, &expected, "the choice that was passed on");

            let without_pages = choosing.forward_with_choice(xs)?.chosen;
            let error = sharing.forward_with(own().with_chosen_keys(&without_pages)).expect_err("another call");
            let text = "the keys were chosen in a call without pages, expected a call with pages of 2 sequences";
            assert!(error.to_string().contains(text), "{error}");
            let in_pages = sharing.forward_with(AttentionInput::new(xs).with_chosen_keys(&made.chosen));
            let reason = "the keys were chosen in a call with pages of 2 sequences, expected a call without pages";
            assert!(in_pages.expect_err("another call").to_string().contains(reason));
            step.commit();
            before = [before[0] + tokens[0], before[1] + tokens[1]];
        }
    }
    Ok(())
}

/// Compares a layer that attends to the keys that another chose with the other layer, where both have the same weights.
#[test]
fn layer_with_shared_choice_attends_to_the_keys_of_the_layer_that_chose() -> Result<()> {
    for name in SHARING {
        let model = Model::named(name);
        let (choosing, sharing) = (by_indexer_type(&model, "full")?, by_indexer_type(&model, "shared")?);
        assert!(sharing.config().shared_choice() && sharing.config().indexer().is_none());
        let (xs, ys) = (&model.golden["layer0.in"], &model.golden["layer0.out"]);
        let found = choosing.forward_with_choice(xs)?;
        model.assert_close(&found.output, ys, "the layer that chooses");
        let shared = sharing.forward_with_choice(AttentionInput::new(xs).with_chosen_keys(&found.chosen))?;
        model.assert_close(&shared.output, ys, "without a cache");
        let again = sharing.forward_with(AttentionInput::new(xs).with_chosen_keys(&shared.chosen))?;
        model.assert_close(&again, ys, "the choice that was passed on");

        let (mut first, mut second) = (AttentionCache::default(), AttentionCache::default());
        for start in (0..xs.dim(1)?).step_by(3) {
            let part = xs.narrow(1, start, 3.min(xs.dim(1)? - start))?;
            let made = choosing.forward_with_choice(AttentionInput::new(&part).with_cache(&mut first))?;
            let input = AttentionInput::new(&part).with_cache(&mut second).with_chosen_keys(&made.chosen);
            model.assert_close(&sharing.forward_with(input)?, &ys.narrow(1, start, part.dim(1)?)?, "with a cache");
        }
        let missing = sharing.forward(xs).expect_err("no choice").to_string();
        assert!(missing.contains("expected a call `with_chosen_keys`"), "{missing}");
        let own = choosing.forward_with(AttentionInput::new(xs).with_chosen_keys(&found.chosen));
        assert!(own.expect_err("a choice of another").to_string().contains("expected a layer that asks for them"));
    }
    Ok(())
}

#[test]
fn cache_that_drops_keys_with_indexer_of_blocks_is_an_error() -> Result<()> {
    for Recorded { model, layer, xs, .. } in recorded()? {
        if !["glm5_next", "minimax_m3", "qwen4_exp"].contains(&model.name.as_str()) {
            continue;
        }
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(4))?;
        let found = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache));
        let text = found.expect_err("a sliding cache").to_string();
        assert!(text.contains("a cache that drops keys was given to a layer"), "{text}");
    }
    Ok(())
}
