//! Random sequences that repeat, and a measure of how well a head copies from them.

use candle_attention::TorchSeed;
use candle_core::{Device, Result, Tensor};

/// The words of the model, drawn with equal probability.
pub const WORDS: [&str; 64] = [
    "?", "a", "all", "and", "are", "at", "be", "bird", "blue", "book", "but", "by", "cat", "come", "day", "dog", "eat",
    "fish", "for", "friend", "from", "go", "good", "green", "have", "hello", "house", "how", "i", "in", "is", "it",
    "like", "mat", "my", "night", "not", "of", "on", "or", "over", "rain", "red", "river", "said", "sat", "see", "she",
    "song", "sun", "that", "the", "they", "this", "to", "tree", "under", "walk", "was", "we", "wind", "with", "world",
    "you",
];
/// The number of tokens of a sequence.
pub const LENGTH: usize = 96;
/// The fewest tokens of a block.
const MIN_PERIOD: usize = 8;
/// The most tokens of a block.
const MAX_PERIOD: usize = 48;

/// Sequences (B, LENGTH), each a block of random words over and over. Blocks differ in length, so that the distance to
/// the previous copy can be found from the words only.
pub struct Batch {
    tokens: Vec<Vec<u32>>,
    /// The length of the block of each sequence.
    periods: Vec<usize>,
}

/// The positions of a batch whose next token follows from earlier tokens.
pub struct Copies {
    /// The positions as rows of (B·T, ..), (N,).
    pub rows: Tensor,
    /// The next token of each, (N,).
    pub next_tokens: Tensor,
}

impl Batch {
    /// Draws a batch, the same one for the same step.
    pub fn draw(size: usize, step: u64) -> Result<Self> {
        let draws = TorchSeed::new(step).rand((size, 1 + MAX_PERIOD))?.to_vec2::<f32>()?;
        let below = |draw: f32, n: usize| (draw * n as f32) as usize;
        let mut batch = Self { tokens: Vec::new(), periods: Vec::new() };
        for row in draws {
            let period = MIN_PERIOD + below(row[0], MAX_PERIOD - MIN_PERIOD + 1);
            let block: Vec<_> = row[1..=period].iter().map(|&draw| below(draw, WORDS.len()) as u32).collect();
            batch.tokens.push((0..LENGTH).map(|t| block[t % period]).collect());
            batch.periods.push(period);
        }
        Ok(batch)
    }

    pub fn ids(&self, device: &Device) -> Result<Tensor> {
        Tensor::new(self.tokens.concat(), device)?.reshape(((), LENGTH))
    }

    /// Returns the positions whose next token follows from earlier tokens.
    pub fn copies(&self, device: &Device) -> Result<Copies> {
        let mut rows = Vec::new();
        let mut next_tokens = Vec::new();
        for (row, (tokens, &period)) in self.tokens.iter().zip(&self.periods).enumerate() {
            for t in period..LENGTH - 1 {
                rows.push((row * LENGTH + t) as u32);
                next_tokens.push(tokens[t + 1]);
            }
        }
        Ok(Copies { rows: Tensor::new(rows, device)?, next_tokens: Tensor::new(next_tokens, device)? })
    }

    /// Returns for each head the share of its weights (B, H, T, T) that queries in a repetition have on tokens after a
    /// previous copy of the query's token.
    pub fn induction(&self, weights: &Tensor) -> Result<Vec<f32>> {
        let mut marks = Vec::with_capacity(self.tokens.len() * LENGTH * LENGTH);
        let mut queries = 0;
        for (tokens, &period) in self.tokens.iter().zip(&self.periods) {
            let is_after_a_copy = |query: usize, key: usize| {
                query >= period && (1..=query).contains(&key) && tokens[key - 1] == tokens[query]
            };
            marks.extend((0..LENGTH * LENGTH).map(|at| f32::from(is_after_a_copy(at / LENGTH, at % LENGTH))));
            queries += LENGTH - period;
        }
        let marks = Tensor::from_vec(marks, (self.tokens.len(), 1, LENGTH, LENGTH), weights.device())?;
        let sums = weights.broadcast_mul(&marks)?.sum((0, 2, 3))?;
        (sums / queries as f64)?.to_vec1()
    }
}
