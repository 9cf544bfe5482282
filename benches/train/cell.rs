//! The cells of training and evaluation.

use candle_core::{DType, Result};
use serde_json::{Value, json};

use crate::common::cell::{Cell as Shape, Describe, Mask, Work};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The function, forward and backward.
    Attention,
    /// A layer, forward and backward.
    Layer,
    /// A layer over variables, forward alone.
    Evaluation,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Layer => "layer",
            Self::Evaluation => "evaluation",
        }
    }
}

pub struct Cell {
    pub part: Part,
    pub shape: Shape,
    pub dropout: f64,
}

pub fn cells() -> Vec<Cell> {
    let cell = |part, shape| Cell { part, shape, dropout: 0.0 };
    let attention = |t, d, mask, dtype| cell(Part::Attention, Shape::square(t, d, mask, dtype));
    let layer = |part, b, t, dtype| {
        let shape = Shape::square(t, 64, Mask::Causal, dtype);
        cell(part, Shape { b, h: 12, h_kv: 12, embed_dim: Some(768), ..shape })
    };
    let mut cells = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        for d in [64, 128] {
            cells.push(attention(2048, d, Mask::Causal, dtype));
        }
        cells.push(attention(8192, 64, Mask::Window(256), dtype));
        cells.push(Cell { dropout: 0.1, ..attention(2048, 64, Mask::Causal, dtype) });
        let long = Shape { h: 1, h_kv: 1, ..Shape::square(16384, 64, Mask::Causal, dtype) };
        cells.push(cell(Part::Attention, long));
        cells.push(layer(Part::Layer, 1, 2048, dtype));
        cells.push(layer(Part::Layer, 8, 1024, dtype));
        cells.extend([128, 512, 2048].map(|t| layer(Part::Evaluation, 1, t, dtype)));
    }
    cells
}

impl Cell {
    pub fn embed_dim(&self) -> usize {
        self.shape.embed_dim.unwrap_or(self.shape.h * self.shape.d)
    }
}

impl Describe for Cell {
    fn name(&self) -> String {
        let dropout = if self.dropout > 0.0 { format!(" dropout {}", self.dropout) } else { String::new() };
        format!("{} {}{dropout}", self.part.name(), self.shape.name())
    }

    fn dtype(&self) -> DType {
        self.shape.dtype
    }

    fn to_json(&self) -> Value {
        let mut line = self.shape.to_json();
        line["cell"] = json!(self.name());
        line["part"] = json!(self.part.name());
        line["dropout"] = json!(self.dropout);
        line
    }

    fn work(&self) -> Result<Work> {
        let forward = self.shape.work()?;
        let attention = Shape { embed_dim: None, ..self.shape.clone() }.flops()?;
        let projections = forward.flops - attention;
        Ok(match self.part {
            Part::Evaluation => forward,
            Part::Attention | Part::Layer => Work { flops: 3.5 * attention + 3.0 * projections, ..forward },
        })
    }
}
