//! Random masks of a call. A caller's mask counts the positions of each sequence, whatever the cache holds of them.

use candle_attention::AttentionMask;
use candle_core::{DType, Device, Result, Tensor};

use crate::array::Random;
use crate::program::Call;

/// For each sequence and each position of the call, a number for each key.
type Table = Vec<Vec<Vec<f32>>>;

enum Kind {
    /// Hides the first tokens of each sequence.
    Starts(Vec<usize>),
    /// Hides the tokens past a length of each sequence.
    Lens(Vec<usize>),
    /// A length for each query.
    LensByQuery(Vec<Vec<usize>>),
    /// With a causal constraint of the call's own.
    Prefix(Vec<usize>),
    Window(usize),
    /// Of batches of one length.
    UpperLeft,
    Keep(Table),
    Bias(Table),
}

/// Two of them together.
pub struct Drawn([Kind; 2]);

impl Drawn {
    pub fn draw(random: &mut Random, call: &Call) -> Self {
        Self([Kind::draw(random, call), Kind::draw(random, call)])
    }

    pub fn of_call(&self, call: &Call, device: &Device) -> Result<AttentionMask> {
        let [one, other] = &self.0;
        Ok(one.of_call(call, device)?.and(&other.of_call(call, device)?))
    }

    /// The mask of sequence `n` as a whole, whose last queries are those of the call.
    pub fn of_sequence(&self, n: usize, call: &Call, device: &Device) -> Result<AttentionMask> {
        let [one, other] = &self.0;
        Ok(one.of_sequence(n, call, device)?.and(&other.of_sequence(n, call, device)?))
    }
}

/// The keys of the longest sequence.
fn longest(call: &Call) -> usize {
    call.before.iter().zip(&call.own).map(|(before, own)| before + own.len()).max().unwrap_or(0)
}

impl Kind {
    fn draw(random: &mut Random, call: &Call) -> Self {
        let (b, t_kv) = (call.own.len(), longest(call));
        let each = |random: &mut Random, most| (0..b).map(|_| random.up_to(most)).collect();
        let table = |random: &mut Random, entry: fn(&mut Random) -> f32| {
            let mut row = || (0..t_kv).map(|_| entry(random)).collect();
            (0..b).map(|_| (0..call.t).map(|_| row()).collect()).collect()
        };
        let is_even = call.before.iter().all(|before| *before == call.before[0])
            && call.own.iter().all(|own| own.len() == call.t);
        match random.up_to(7) {
            0 => Self::Starts(each(random, 4)),
            1 => Self::Lens(each(random, t_kv + 1)),
            2 => Self::LensByQuery((0..b).map(|_| (0..call.t).map(|_| random.up_to(t_kv)).collect()).collect()),
            3 => Self::Prefix(each(random, 5)),
            5 if is_even => Self::UpperLeft,
            4 | 5 => Self::Window(1 + random.up_to(4)),
            6 => Self::Keep(table(random, |random| f32::from(u8::from(random.chance(0.6))))),
            _ => Self::Bias(table(random, |random| random.between(-2.0, 2.0) as f32)),
        }
    }

    fn of_call(&self, call: &Call, device: &Device) -> Result<AttentionMask> {
        let none = AttentionMask::none;
        let tensor = |table: &Table| {
            let data: Vec<f32> = table.iter().flatten().flatten().copied().collect();
            Tensor::from_vec(data, (call.own.len(), 1, call.t, longest(call)), &Device::Cpu)?.to_device(device)
        };
        Ok(match self {
            Self::Starts(starts) => none().with_starts(starts.clone()),
            Self::Lens(lens) => none().with_valid_lens(lens.clone()),
            Self::LensByQuery(lens) => none().with_valid_lens(lens.clone()),
            Self::Prefix(prefix) => AttentionMask::causal().with_prefix(prefix.clone()),
            &Self::Window(window) => none().with_window(window),
            // Without a cache query i stands at position i; here its position has to be said, one for all sequences.
            Self::UpperLeft => AttentionMask::causal_with_offset(call.before[0]),
            Self::Keep(table) => none().with_keep(&tensor(table)?.to_dtype(DType::U8)?),
            Self::Bias(table) => none().with_bias(&tensor(table)?),
        })
    }

    fn of_sequence(&self, n: usize, call: &Call, device: &Device) -> Result<AttentionMask> {
        let none = AttentionMask::none;
        let (before, own) = (call.before[n], call.own[n].clone());
        let len = before + own.len();
        // Ones for the queries before the call, whose outputs nobody reads.
        let tensor = |table: &Table| {
            let rows = table[n][own.clone()].iter().flat_map(|row| &row[..len]).copied();
            let data: Vec<f32> = vec![1.0; before * len].into_iter().chain(rows).collect();
            Tensor::from_vec(data, (1, 1, len, len), &Device::Cpu)?.to_device(device)
        };
        Ok(match self {
            Self::Starts(starts) => none().with_starts(vec![starts[n]]),
            Self::Lens(lens) => none().with_valid_lens(vec![lens[n]]),
            Self::LensByQuery(lens) => none().with_valid_lens(vec![[&vec![0; before], &lens[n][own.clone()]].concat()]),
            Self::Prefix(prefix) => AttentionMask::causal().with_prefix(vec![prefix[n]]),
            &Self::Window(window) => none().with_window(window),
            Self::UpperLeft => AttentionMask::causal_upper_left(),
            Self::Keep(table) => none().with_keep(&tensor(table)?.to_dtype(DType::U8)?),
            Self::Bias(table) => none().with_bias(&tensor(table)?),
        })
    }
}
