//! The rows of the table, with their aims.

use candle_core::DType;

use super::cell::{
    AttentionSizes, CachedSizes, Cell, DeltaSizes, LayerSizes, Mark, MaskKind, ModelStep, Pass, RowSizes, Section, Work,
};

/// The tokens of all sequences of a call, as in the figures of the FlashAttention papers.
const TOKENS: usize = 16_384;
const HEADS: usize = 16;

/// Returns the cells whose sequences are not longer than `longest`.
pub fn cells(longest: usize) -> Vec<Cell> {
    let mut cells = forward(longest);
    cells.extend(masks(4096.min(longest)));
    cells.extend(training(longest));
    cells.extend(f32(4096.min(longest)));
    cells.extend(decode(longest));
    cells.extend(linear(4096.min(longest)));
    cells.extend(layers(1024.min(longest)));
    cells.extend(rows(longest));
    cells.extend(model());
    cells.push(memory(8192.min(longest)));
    cells
}

/// Returns the lengths that are not longer than `longest`, or `longest` alone.
fn lengths(all: &[usize], longest: usize) -> Vec<usize> {
    let short: Vec<usize> = all.iter().copied().filter(|&t| t <= longest).collect();
    if short.is_empty() { vec![longest] } else { short }
}

/// Returns a call of self-attention in bf16, with some 16,384 tokens.
fn sizes(t: usize, d: usize, mask: MaskKind) -> AttentionSizes {
    let (b, dtype) = ((TOKENS / t).clamp(1, 8), DType::BF16);
    AttentionSizes { b, h: HEADS, h_kv: HEADS, t_q: t, t_kv: t, d, dtype, mask, pass: Pass::Forward }
}

fn attention(section: Section, sizes: AttentionSizes, mark: Mark) -> Cell {
    Cell { name: sizes.to_string(), section, work: Work::Attention(sizes), mark }
}

fn forward(longest: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for d in [64, 128] {
            for t in lengths(&[2048, 8192, 16_384], longest) {
                for mask in [MaskKind::Causal, MaskKind::None] {
                    let sizes = AttentionSizes { dtype, ..sizes(t, d, mask) };
                    cells.push(attention(Section::Forward, sizes, Mark::OfPytorch(0.95)));
                }
            }
        }
    }
    cells
}

fn masks(t: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for d in [64, 128] {
        let causal = sizes(t, d, MaskKind::Causal);
        let none = sizes(t, d, MaskKind::None);
        cells.push(attention(Section::Masks, causal, Mark::None));
        cells.push(attention(Section::Masks, none, Mark::None));
        let others = [
            (MaskKind::Lengths, none),
            (MaskKind::Window, causal),
            (MaskKind::Alibi, causal),
            (MaskKind::Packed, causal),
        ];
        for (mask, other) in others {
            let mark = Mark::OfPairs { other: other.to_string(), share: 0.9 };
            cells.push(attention(Section::Masks, sizes(t, d, mask), mark));
        }
        for mask in [MaskKind::Bias, MaskKind::BooleanMask] {
            cells.push(attention(Section::Masks, sizes(t, d, mask), Mark::OfPytorch(1.0)));
        }
    }
    cells
}

fn training(longest: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for d in [64, 128] {
        for t in lengths(&[2048, 8192], longest) {
            for mask in [MaskKind::Causal, MaskKind::None] {
                let sizes = AttentionSizes { pass: Pass::Training, ..sizes(t, d, mask) };
                cells.push(attention(Section::Training, sizes, Mark::OfPytorch(0.8)));
            }
        }
    }
    cells
}

fn f32(t: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for d in [64, 128] {
        for (mask, pass, share) in [
            (MaskKind::Causal, Pass::Forward, 1.0),
            (MaskKind::None, Pass::Forward, 1.0),
            (MaskKind::Causal, Pass::Training, 1.0),
        ] {
            let sizes = AttentionSizes { b: 2, dtype: DType::F32, pass, ..sizes(t, d, mask) };
            cells.push(attention(Section::F32, sizes, Mark::OfPytorch(share)));
        }
    }
    cells
}

fn decode(longest: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (b, t_kv) in [(1, 32_768), (1, 131_072), (16, 8192)] {
        let t_kv = t_kv.min(longest);
        let sizes = AttentionSizes { b, h: 32, h_kv: 8, t_q: 1, t_kv, ..sizes(t_kv, 128, MaskKind::None) };
        cells.push(attention(Section::Decode, sizes, Mark::OfBandwidth(0.85)));
    }
    let cached = CachedSizes { h: 32, h_kv: 8, d: 128, t_kv: 131_072.min(longest), q8: false };
    let name = |bits: &str| format!("a token, layer with a cache in {bits} t{}", cached.t_kv);
    let work = Work::CachedToken(cached);
    cells.push(Cell { name: name("bf16"), section: Section::Decode, work, mark: Mark::None });
    let work_of_8_bits = Work::CachedToken(CachedSizes { q8: true, ..cached });
    let mark = Mark::OfTime { other: name("bf16"), share: 0.6 };
    cells.push(Cell { name: name("8 bits"), section: Section::Decode, work: work_of_8_bits, mark });
    cells
}

fn linear(t: usize) -> Vec<Cell> {
    let forward = DeltaSizes { h: HEADS, t, d: 128, pass: Pass::Forward, reference: false };
    let named = |what: &str| format!("gated delta rule t{t} h{HEADS} d128{what}");
    let cell = |name: String, sizes: DeltaSizes, mark: Mark| Cell {
        name,
        section: Section::Linear,
        work: Work::DeltaRule(sizes),
        mark,
    };
    let reference = named(" reference path");
    vec![
        cell(reference.clone(), DeltaSizes { reference: true, ..forward }, Mark::None),
        cell(named(""), forward, Mark::OfTime { other: reference, share: 0.01 }),
        cell(named(" backward too"), DeltaSizes { pass: Pass::Training, ..forward }, Mark::None),
        cell(format!("gated delta rule one token h{HEADS} d128"), DeltaSizes { t: 1, ..forward }, Mark::None),
    ]
}

fn layers(t: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        let sizes = LayerSizes { b: 8, t, embed_dim: 768, h: 12, dtype };
        let name = format!("{} layer b8 t{t} e768 backward too", dtype.as_str());
        let work = Work::LayerTraining(sizes);
        cells.push(Cell { name, section: Section::Layer, work, mark: Mark::OfPytorch(0.8) });
    }
    cells
}

/// Returns one row by a weight in bf16 and by one of codes, a quarter of its bytes.
fn rows(longest: usize) -> Vec<Cell> {
    let (outputs, inputs) = if longest < 2048 { (256, 256) } else { (32_768, 8192) };
    let cell = |name: &str, has_codes, mark| Cell {
        name: name.to_string(),
        section: Section::Layer,
        work: Work::Row(RowSizes { outputs, inputs, has_codes }),
        mark,
    };
    let of_elements = "one row, a weight in bf16";
    vec![
        cell(of_elements, false, Mark::None),
        cell("one row, a weight in 4 bits", true, Mark::OfTime { other: of_elements.into(), share: 0.4 }),
    ]
}

fn model() -> Vec<Cell> {
    let cell = |name: &str, step, mark| Cell {
        name: name.to_string(),
        section: Section::Model,
        work: Work::Model(step),
        mark,
    };
    vec![
        cell("Llama, bf16: prompt of 2048", ModelStep::Prompt, Mark::OfPytorch(1.0)),
        cell("Llama, bf16: a token after it", ModelStep::Token, Mark::Milliseconds(2.0)),
    ]
}

/// Returns a training step whose peak of memory has to be far below one (H, T, T) tensor in bf16.
fn memory(t: usize) -> Cell {
    let sizes = AttentionSizes { b: 1, pass: Pass::Training, ..sizes(t, 64, MaskKind::Causal) };
    let mebibytes = (HEADS * t * t * 2) as f64 / f64::from(1 << 20);
    let name = format!("memory of a training step t{t} h{HEADS} d64");
    Cell { name, section: Section::Memory, work: Work::Memory(sizes), mark: Mark::Mebibytes(mebibytes / 8.0) }
}
