//! Padded rows and documents of one sequence, in layers with chunks and attention temperatures: each equals the row
//! alone, however the padding and the positions are given.

use std::ops::Range;

use crate::*;

crate::on_each_device!(
    chunks_and_temperature_of_left_padded_rows_match_rows_alone,
    chunks_and_temperature_of_documents_match_documents_alone,
    chunks_and_temperature_with_cache_match_rows_alone,
    chunks_and_temperature_over_keys_of_earlier_layer_match_rows_alone,
    rope_scaled_by_length_of_left_padded_rows_matches_rows_alone,
);

const WIDTH: usize = 8;

/// A layer, and the rows of a batch.
struct Batch {
    config: Config,
    layer: MultiHeadAttention,
    /// The inputs (1, T, E) of each row.
    rows: Vec<Tensor>,
    /// The output of each row by itself.
    alone: Vec<Tensor>,
    backend: Backend,
    device: Device,
}

impl Batch {
    fn draw(random: &mut Random, device: &Device) -> Result<Self> {
        let mut config = Config::new(WIDTH, 4).with_num_kv_heads(2).with_causal(true);
        if random.chance(0.8) {
            config = config.with_chunk(1 + random.up_to(4));
        }
        if random.chance(0.5) {
            let temperature = AttentionTemperature { beta: 0.7, interval: 1 + random.up_to(2), first: random.up_to(1) };
            config = config.with_attention_temperature(temperature);
        }
        if random.chance(0.3) {
            config = config.with_window(1 + random.up_to(3));
        }
        if random.chance(0.5) {
            config = config.with_rope(RopeConfig::new(1e4));
        }
        if random.chance(0.3) {
            config = config.with_sinks(true);
        }
        if random.chance(0.2) {
            config = config.with_kv_sharing(KvSharing::KeysAsValues);
        }
        Self::of(config, random, device)
    }

    /// Draws rows for a layer.
    fn of(config: Config, random: &mut Random, device: &Device) -> Result<Self> {
        let layer = seeded::layer(&config, DType::F32, device)?;
        let mut rows = Vec::new();
        for n in 0..1 + random.up_to(2) {
            let t = 1 + random.up_to(8);
            rows.push(wave(1, t, WIDTH, n as f32 + random.up_to(9) as f32)?.to_device(device)?);
        }
        let alone = rows.iter().map(|row| layer.forward(row)).collect::<Result<_>>()?;
        let backend = if random.chance(0.5) { Backend::Reference } else { Backend::Auto };
        Ok(Self { config, layer, rows, alone, backend, device: device.clone() })
    }

    fn len(&self, row: usize) -> usize {
        self.rows[row].dims()[1]
    }

    /// Returns the length of the longest row with some padding.
    fn padded_len(&self, random: &mut Random) -> usize {
        (0..self.rows.len()).map(|row| self.len(row)).max().unwrap_or(0) + random.up_to(4)
    }

    /// Returns a batch (B, t, E) with padding on the left.
    fn padded(&self, t: usize) -> Result<Tensor> {
        let padded = |row: &Tensor| {
            let padding = (Tensor::ones((1, t - row.dim(1)?, WIDTH), DType::F32, &self.device)? * 3.0)?;
            Tensor::cat(&[&padding, row], 1)
        };
        Tensor::cat(&self.rows.iter().map(padded).collect::<Result<Vec<_>>>()?, 0)
    }

    fn starts(&self, t: usize) -> Vec<usize> {
        (0..self.rows.len()).map(|row| t - self.len(row)).collect()
    }

    /// Returns the ones and zeros of a tokenizer, (B, t).
    fn attention_mask(&self, t: usize) -> Result<Tensor> {
        let ones = self.starts(t).into_iter().flat_map(|start| (0..t).map(move |j| u8::from(j >= start)));
        Tensor::from_iter(ones, &self.device)?.reshape((self.rows.len(), t))
    }

    /// Returns the positions of transformers: tokens count from 0, and padding is at 1.
    fn positions(&self, t: usize) -> Result<Tensor> {
        let of_row = |start: usize| (0..t).map(move |j| j.checked_sub(start).unwrap_or(1) as u32);
        let positions = self.starts(t).into_iter().flat_map(of_row);
        Tensor::from_iter(positions, &self.device)?.reshape((self.rows.len(), t))
    }

    /// Returns a cache of all keys, or of the ones that a query of the layer can attend to.
    fn cache(&self, random: &mut Random) -> Result<AttentionCache> {
        match self.config.chunk() {
            Some(chunk) if random.chance(0.3) => {
                AttentionCache::new(&AttentionCacheConfig::default().with_window(chunk + random.up_to(2)))
            }
            _ => Ok(AttentionCache::default()),
        }
    }

    fn run<'a>(&self, input: AttentionInput<'a>) -> Result<Tensor> {
        self.layer.forward_with(input.with_backend(self.backend))
    }

    /// Compares some of the tokens of a row with the row alone.
    fn check(&self, found: &Tensor, row: usize, tokens: Range<usize>, way: &str) -> Result<()> {
        let expected = self.alone[row].narrow(1, tokens.start, tokens.len())?.squeeze(0)?;
        let what = format!("row {row} by {way}, {:?}, {:?}", self.config, self.backend);
        assert_close(found, &expected, 2e-5, &what);
        Ok(())
    }

    /// Compares the tokens of a padded batch with the rows alone.
    fn check_padded(&self, found: &Tensor, t: usize, way: &str) -> Result<()> {
        for (row, start) in self.starts(t).into_iter().enumerate() {
            self.check(&found.i((row, start..t))?, row, 0..t - start, way)?;
        }
        Ok(())
    }
}

/// Returns masks of padding on the left, with their names.
fn padding_masks(batch: &Batch, t: usize) -> Result<Vec<(&'static str, AttentionMask)>> {
    let none = AttentionMask::none;
    let starts = batch.starts(t);
    let by_query = starts.iter().map(|&start| vec![start; t]).collect::<Vec<_>>();
    let ones = batch.attention_mask(t)?;
    let keys = ones.reshape((starts.len(), 1, 1, t))?;
    let lower = Tensor::tril2(t, DType::U8, &batch.device)?;
    let whole = keys.broadcast_mul(&lower)?;
    // Padded queries attend to all keys, as in transformers.
    let is_empty = whole.to_dtype(DType::U32)?.sum_keepdim(3)?.eq(0u32)?;
    let of_transformers = whole.broadcast_add(&is_empty)?;
    let zero = Tensor::zeros(keys.shape(), DType::F32, &batch.device)?;
    let bias = |masked: f32| keys.where_cond(&zero, &(&zero + f64::from(masked))?);
    let mut masks = vec![
        ("starts", none().with_starts(starts.clone())),
        ("starts and a causal mask", AttentionMask::causal().with_starts(starts)),
        ("starts by query", none().with_starts(by_query)),
        ("attention mask", AttentionMask::from_attention_mask(&ones)?),
        ("boolean mask of keys", none().with_bool_mask(&keys)),
        ("boolean mask of queries and keys", none().with_bool_mask(&whole)),
        ("boolean mask of transformers", none().with_bool_mask(&of_transformers)),
        ("bias of the smallest number", none().with_bias(&bias(f32::MIN)?)),
    ];
    if !batch.device.is_metal() {
        masks.push(("bias of -inf", none().with_bias(&bias(f32::NEG_INFINITY)?)));
    }
    Ok(masks)
}

fn chunks_and_temperature_of_left_padded_rows_match_rows_alone(device: &Device) -> Result<()> {
    for seed in 0..60 {
        let random = &mut Random::new(seed);
        let batch = Batch::draw(random, device)?;
        let t = batch.padded_len(random);
        let xs = batch.padded(t)?;
        let positions = batch.positions(t)?;
        for (way, mask) in padding_masks(&batch, t)? {
            batch.check_padded(&batch.run(AttentionInput::new(&xs).with_mask(&mask))?, t, way)?;
            let with_positions = AttentionInput::new(&xs).with_mask(&mask).with_positions(&positions);
            batch.check_padded(&batch.run(with_positions)?, t, &format!("{way} and positions"))?;
        }
    }
    Ok(())
}

fn chunks_and_temperature_of_documents_match_documents_alone(device: &Device) -> Result<()> {
    for seed in 0..60 {
        let random = &mut Random::new(seed);
        let batch = Batch::draw(random, device)?;
        let xs = Tensor::cat(&batch.rows, 1)?;
        let lens: Vec<_> = (0..batch.rows.len()).map(|row| batch.len(row)).collect();
        let begins: Vec<usize> = lens.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len))).collect();
        let check = |found: &Tensor, way: &str| -> Result<()> {
            for (row, (&begin, &len)) in begins.iter().zip(&lens).enumerate() {
                batch.check(&found.narrow(0, begin, len)?, row, 0..len, way)?;
            }
            Ok(())
        };
        let starts: Vec<_> = begins.iter().zip(&lens).flat_map(|(&begin, &len)| vec![begin; len]).collect();
        let of_documents = AttentionMask::none().with_starts(vec![starts]);
        let positions = Tensor::from_iter(lens.iter().flat_map(|&len| 0..len as u32), device)?;
        let documents = || AttentionInput::new(&xs).with_mask(&of_documents);
        check(&batch.run(documents())?.squeeze(0)?, "starts of documents")?;
        check(&batch.run(documents().with_positions(&positions))?.squeeze(0)?, "starts and positions of documents")?;

        // Packed, without padding and with padding on the left of each sequence.
        let sequences = PackedSequences::from_lens(&lens, &lens)?;
        let packed = xs.squeeze(0)?;
        let in_one_row = || AttentionInput::new(&packed).with_packed(&sequences);
        check(&batch.run(in_one_row())?, "packed sequences")?;
        check(&batch.run(in_one_row().with_positions(&positions))?, "packed sequences and positions")?;
        let t = batch.padded_len(random);
        let padded = batch.padded(t)?.reshape((batch.rows.len() * t, WIDTH))?;
        let of_one_length = PackedSequences::from_lens(&vec![t; lens.len()], &vec![t; lens.len()])?;
        let of_padding = AttentionMask::none().with_starts(batch.starts(t));
        let found = batch.run(AttentionInput::new(&padded).with_packed(&of_one_length).with_mask(&of_padding))?;
        batch.check_padded(&found.reshape((lens.len(), t, WIDTH))?, t, "packed sequences with starts")?;
    }
    Ok(())
}

/// The way in which padding is given to calls with a cache.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// Starts of the first call, whose padding is not stored.
    InputStarts,
    /// As `InputStarts`, with the positions of the tokens.
    InputStartsAndPositions,
    /// A mask with starts in every call.
    MaskStarts,
    /// A tokenizer's mask in every call, with a column for each token so far.
    AttentionMask,
    /// A boolean mask in every call, with a column for each token so far.
    BoolMask,
    /// As `MaskStarts`, with the positions of transformers in every call.
    MaskStartsAndPositions,
    /// As `MaskStarts`, with the tokens after the prompt as the nodes of a tree of one branch.
    Tree,
}

fn chunks_and_temperature_with_cache_match_rows_alone(device: &Device) -> Result<()> {
    use Way::*;
    for seed in 0..60 {
        let random = &mut Random::new(seed);
        let batch = Batch::draw(random, device)?;
        let t = batch.padded_len(random);
        let xs = batch.padded(t)?;
        let starts = batch.starts(t);
        let positions = batch.positions(t)?;
        // The prompt, in which each row has a token, then pieces, then tokens.
        let prompt = (starts.iter().max().unwrap_or(&0) + 1 + random.up_to(2)).min(t);
        for way in
            [InputStarts, InputStartsAndPositions, MaskStarts, AttentionMask, BoolMask, MaskStartsAndPositions, Tree]
        {
            let mut cache = batch.cache(random)?;
            let mut begin = 0;
            while begin < t {
                let end = if begin == 0 { prompt } else { (begin + 1 + random.up_to(2)).min(t) };
                let piece = xs.narrow(1, begin, end - begin)?.contiguous()?;
                let piece_positions = positions.narrow(1, begin, end - begin)?;
                let ones = batch.attention_mask(t)?.narrow(1, 0, end)?.contiguous()?;
                let mask = match way {
                    InputStarts | InputStartsAndPositions => candle_attention::AttentionMask::none(),
                    MaskStarts | MaskStartsAndPositions | Tree => {
                        candle_attention::AttentionMask::none().with_starts(starts.clone())
                    }
                    AttentionMask => candle_attention::AttentionMask::from_attention_mask(&ones)?,
                    BoolMask => {
                        let keys = ones.reshape((starts.len(), 1, 1, end))?;
                        candle_attention::AttentionMask::none().with_bool_mask(&keys)
                    }
                };
                let mut input = AttentionInput::new(&piece).with_cache(&mut cache).with_mask(&mask);
                if matches!(way, InputStarts | InputStartsAndPositions) && begin == 0 {
                    input = input.with_starts(starts.as_slice());
                }
                if matches!(way, InputStartsAndPositions | MaskStartsAndPositions) {
                    input = input.with_positions(&piece_positions);
                }
                let chain: Vec<_> = (0..end - begin).map(|node: usize| node.checked_sub(1)).collect();
                let tree = TokenTree::new(&chain)?;
                if matches!(way, Tree) && begin > 0 {
                    input = input.with_tree(&tree);
                }
                let found = batch.run(input)?;
                for (row, &start) in starts.iter().enumerate() {
                    let first = start.max(begin);
                    let own = found.i((row, first - begin..))?;
                    batch.check(&own, row, first - start..end - start, &format!("{way:?} from {begin} to {end}"))?;
                }
                begin = end;
            }
        }
    }
    Ok(())
}

/// The padding and positions of a call.
struct Given<'a> {
    mask: Option<&'a AttentionMask>,
    starts: Option<&'a [usize]>,
    positions: Option<&'a Tensor>,
}

impl<'a> Given<'a> {
    fn add_to(&self, input: AttentionInput<'a>) -> AttentionInput<'a> {
        input.with_mask(self.mask).with_starts(self.starts).with_positions(self.positions)
    }
}

/// Runs an earlier layer in pieces, and after each a later layer that reads its keys.
fn chunks_and_temperature_over_keys_of_earlier_layer_match_rows_alone(device: &Device) -> Result<()> {
    for seed in 0..40 {
        let random = &mut Random::new(seed);
        let mut batch = Batch::draw(random, device)?;
        let later_config = batch.config.clone().with_kv_sharing(KvSharing::EarlierLayer);
        let later = seeded::layer(&later_config, DType::F32, device)?;
        for (row, alone) in batch.rows.iter().zip(&mut batch.alone) {
            let mut cache = AttentionCache::default();
            batch.layer.forward_with(AttentionInput::new(row).with_cache(&mut cache))?;
            *alone = later.forward_with(AttentionInput::new(row).with_shared_cache(&cache))?;
        }
        let t = batch.padded_len(random);
        let xs = batch.padded(t)?;
        let starts = batch.starts(t);
        let positions = batch.positions(t)?;
        let prompt = (starts.iter().max().unwrap_or(&0) + 1 + random.up_to(2)).min(t);
        let of_mask = AttentionMask::none().with_starts(starts.clone());
        for (is_stored, with_positions) in [(false, false), (true, false), (true, true)] {
            let mut cache = AttentionCache::default();
            let mut begin = 0;
            while begin < t {
                let end = if begin == 0 { prompt } else { (begin + 1 + random.up_to(2)).min(t) };
                let piece = xs.narrow(1, begin, end - begin)?.contiguous()?;
                let of_piece = positions.narrow(1, begin, end - begin)?;
                let given = Given {
                    mask: is_stored.then_some(&of_mask),
                    starts: (!is_stored && begin == 0).then_some(starts.as_slice()),
                    positions: with_positions.then_some(&of_piece),
                };
                batch.run(given.add_to(AttentionInput::new(&piece).with_cache(&mut cache)))?;
                let of_later = given.add_to(AttentionInput::new(&piece).with_shared_cache(&cache));
                let found = later.forward_with(of_later.with_backend(batch.backend))?;
                for (row, &start) in starts.iter().enumerate() {
                    let first = start.max(begin);
                    let way = format!("keys of an earlier layer, stored padding: {is_stored}, from {begin} to {end}");
                    batch.check(&found.i((row, first - begin..))?, row, first - start..end - start, &way)?;
                }
                begin = end;
            }
        }
    }
    Ok(())
}

/// Compares padded batches of rows of one length, which determines the frequencies.
fn rope_scaled_by_length_of_left_padded_rows_matches_rows_alone(device: &Device) -> Result<()> {
    for seed in 0..24 {
        let random = &mut Random::new(seed);
        let scaling = match seed % 2 {
            0 => RopeScaling::Dynamic { factor: 4.0, original_context: 4 },
            _ => RopeScaling::LongRope {
                short_factor: vec![1.0, 1.0],
                long_factor: vec![3.0, 2.0],
                original_context: 4,
                factor: Some(2.0),
                attention_factor: None,
            },
        };
        let rope = RopeConfig::new(1e4).with_scaling(scaling);
        let config = Config::new(WIDTH, 2).with_causal(true).with_rope(rope);
        let config = if random.chance(0.5) { config.with_chunk(3) } else { config };
        let mut batch = Batch::of(config, random, device)?;
        let len = batch.len(0).min(6);
        for (row, alone) in batch.rows.iter_mut().zip(&mut batch.alone) {
            *row = wave(1, len, WIDTH, random.up_to(9) as f32)?.to_device(device)?;
            *alone = batch.layer.forward(row)?;
        }
        let t = len + random.up_to(4);
        let xs = batch.padded(t)?;
        for (way, mask) in padding_masks(&batch, t)? {
            batch.check_padded(&batch.run(AttentionInput::new(&xs).with_mask(&mask))?, t, way)?;
        }
    }
    Ok(())
}

/// Checks that positions are an error where it is not known which keys they would be compared with.
#[test]
fn positions_with_chunks_of_other_keys_are_an_error() -> Result<()> {
    let layer = seeded::layer(&Config::new(WIDTH, 2).with_chunk(2), DType::F32, &DEVICE)?;
    let xs = wave(1, 3, WIDTH, 0.0)?;
    let others = wave(1, 4, WIDTH, 1.0)?;
    let positions = Tensor::new(&[0u32, 1, 2], &DEVICE)?;
    let other_keys = AttentionInput::new(&xs).with_key_value(&others, &others).with_positions(&positions);
    let text = error_text(layer.forward_with(other_keys));
    assert!(text.contains("positions were given with keys of other inputs and a mask that has chunks"), "{text}");
    let offset = AttentionMask::causal_with_offset(1).with_chunk(2);
    let at_offset = AttentionInput::new(&xs).with_mask(&offset).with_positions(&positions);
    let of_offset = error_text(layer.forward_with(at_offset));
    assert!(
        of_offset.contains("chunks of a mask count from key 1 for query 0 of sequence 0, expected its own key 0"),
        "{of_offset}"
    );
    Ok(())
}
