//! Inputs and positions that rotary embeddings cannot take.

use candle_core::Var;

use crate::wrong::Fitting;
use crate::*;

fn rope() -> RopeConfig {
    RopeConfig::new(10_000.0)
}

fn axes(sections: &[usize], layout: RopeAxisLayout) -> RopeConfig {
    rope().with_axes(RopeAxes::new(sections.to_vec(), layout))
}

fn two_axes() -> RopeConfig {
    axes(&[2, 2], RopeAxisLayout::Axial)
}

fn with(rope: RopeConfig) -> Config {
    Config::new(8, 1).with_rope(rope)
}

#[test]
fn positions_on_axes() {
    let xs = zeros((2, 3, 8));
    let input = || AttentionInput::new(&xs);
    let sections: [(&[usize], RopeAxisLayout); 6] = [
        (&[4], RopeAxisLayout::Sections),
        (&[4, 0], RopeAxisLayout::Sections),
        (&[2, 1, 2], RopeAxisLayout::Interleaved),
        (&[usize::MAX, 5], RopeAxisLayout::Axial),
        (&[1, 3], RopeAxisLayout::Interleaved),
        (&[3, 1], RopeAxisLayout::AxialDealt),
    ];
    let on_axes = |at: &Tensor| layer(with(two_axes()))?.forward_with(input().with_axis_positions(at));
    let numbers = each("positions at", [f64::NAN, -2e7], |number| on_axes(&(zeros((2, 3)) + number)?));
    let positions = wrong::tensors("B 2", &[("positions", DType::F32, "2 B 3")], |at| on_axes(&at[0]));
    let at = zeros((2, 3));
    let others = cases! {
        "scaled series of axes" => two_axes().with_scaling(RopeScaling::Linear { factor: 2.0 }).validate(8),
        "patches without positions" => layer(with(two_axes()))?.forward(&xs),
        "axis positions without axes" => layer(with(rope()))?.forward_with(input().with_axis_positions(&at)),
        "axis positions of cross-attention" =>
            layer(with(two_axes()))?.forward_with(input().with_key_value(&xs, &xs).with_axis_positions(&at)),
        "a memory of patches" => layer(with(two_axes()))?.project_memory(&xs, &xs),
        "tables without axes" => RotaryEmbedding::new(&rope(), 4)?.apply_on_axes(&zeros((2, 1, 3, 4)), &at),
    };
    assert_reviewed(
        "rope_axes",
        &[each("axes", sections, |(sections, layout)| axes(sections, layout).validate(8)), numbers, positions, others],
    );
}

#[test]
fn tables() {
    // For heads of 4 whose first `r` entries are rotated.
    let new = |r, cos: Tensor, sin: Tensor| RotaryEmbedding::from_tables(&rope().with_rotary_dim(r), 4, &cos, &sin);
    let of_eight = || zeros((8, 2));
    let xs = zeros((2, 1, 3, 4));
    let cases = cases! {
        "a table of more pairs than are rotated" => new(2, of_eight(), of_eight()),
        "sines without positions" => new(4, of_eight(), zeros(())),
        "a trained table" => new(4, of_eight(), Var::zeros((8, 2), DType::F32, &CPU)?.into_inner()),
        "a table beyond memory" => {
            let table = zeros((1, 2)).broadcast_as((1 << 50, 2))?;
            new(4, table.clone(), table)
        },
        "tables of an odd number of entries" => new(3, of_eight(), of_eight()),
        "tables of one axis for several" =>
            RotaryEmbedding::from_tables(&axes(&[1, 1], RopeAxisLayout::Axial), 4, &of_eight(), &of_eight()),
        "a position past the tables" => new(4, of_eight(), of_eight())?.apply_from(&xs, 6),
        "a position in tables of none" => new(4, zeros((0, 2)), zeros((0, 2)))?.apply_from(&xs, 0),
        "a layer's position past the tables" => {
            let rotary = RotaryEmbedding::from_tables(&rope(), 8, &zeros((2, 4)), &zeros((2, 4)))?;
            layer(with(rope()))?.with_rotary(rotary)?.forward(&zeros((1, 3, 8)))
        },
    };
    let dims: [Fitting; 2] = [("cos", DType::F32, "P 2"), ("sin", DType::F32, "P 2")];
    let wrong = wrong::tensors("P 8", &dims, |tables| new(4, tables[0].clone(), tables[1].clone()));
    assert_reviewed("rope_tables", &[wrong, cases]);
}

#[test]
fn inputs_and_positions() {
    let rotary = || RotaryEmbedding::new(&rope(), 4);
    // Of two sequences of three tokens.
    let at = |positions: Tensor| -> Result<Tensor> { rotary()?.apply(&zeros((2, 1, 3, 4)), &positions) };
    let cases = cases! {
        "inputs too large to address" => {
            let xs = zeros((1, 1, 1, 4)).broadcast_as(Shape::from((1 << 61, 1, 1, 4)))?;
            rotary()?.apply_from(&xs, 0)
        },
        "a negative position" => at(Tensor::new(&[0i64, -1, 2], &CPU)?),
        "a position that f32 cannot tell from the next" => at(Tensor::new(&[0i64, 1, 1 << 24], &CPU)?),
        "positions beyond counting" => rotary()?.apply_from(&zeros((2, 1, 3, 4)), usize::MAX),
        "slopes of too many heads" => alibi_slopes(usize::MAX),
    };
    let dims: [Fitting; 2] = [("xs", DType::F32, "B 1 T 4"), ("positions", DType::I64, "B T")];
    let wrong = wrong::tensors("B 2 T 3", &dims, |tensors| rotary()?.apply(&tensors[0], &tensors[1]));
    assert_reviewed("rope_inputs", &[wrong, cases]);
}
