//! The forward pass on the kernel of an instruction set: decoding for few rows, tiles for many.

use std::sync::atomic::Ordering;

use super::call::ForwardCall;
use super::chain::Chain;
use super::decode;
use super::epilogue::{KeyPart, Partials, WriteOutput};
use super::inputs::CheckedCall;
use super::kv_rows::KeysValues;
use super::pack::{PackTile, TileRows};
use super::prefill::Prefill;
use super::relative_bias::RelativeBiasTable;
use super::statistics::observe::Observe;
use super::tasks::{AttentionTask, AttentionTaskSplit, AttentionWorkspace, workers};
use super::tile::Tile;
use crate::cpu::{Kernel, Layout, for_each_task};
use crate::number::{Number, Stored};

/// Computes the attention output of a call. `None` if there is no memory for intermediate results.
///
/// # Safety
/// The processor has the instruction set of K.
pub(super) unsafe fn run_on<K: Kernel, E: Number, S: Stored>(
    call: &ForwardCall<E>,
    keys_values: &KeysValues<S>,
) -> Option<()> {
    let can_decode = call.inputs.options.dropout.is_none() && call.to.statistics.is_none();
    if can_decode && call.inputs.dims.rows() <= decode::max_rows::<K>() {
        // SAFETY: the processor has the instruction set of K, which includes that of its kernel for f32.
        return unsafe { decode::run::<K::Vector, E, S>(call, keys_values) };
    }
    run_tasks(call, K::LAYOUT, size_of::<S>(), &|workspace, task| {
        let inputs = task.inputs;
        // SAFETY: the processor has the instruction set of K, which includes that of its kernel for f32; the workspace
        // was made for the call and has a panel for each tile.
        unsafe {
            for (index, tile) in task.tiles.iter().enumerate() {
                let tile_rows = &TileRows { matrix: &call.q, width: inputs.dims.d, dims: &inputs.dims, tile };
                let width = workspace.d;
                let staging = workspace.staging.as_mut_ptr();
                let panel = workspace.queries.as_mut_ptr().add(index * width.word_squares * K::PANEL);
                K::run_simd(PackTile { rows: tile_rows, width, panel, staging, factor: task.units.query });
            }
            K::run_simd(Prefill { task, keys_values, workspace });
            if let Some(output) = &call.to.statistics {
                K::Vector::run_simd(Observe { task, output, workspace });
            }
            K::Vector::run_simd(WriteOutput {
                call,
                state: &mut workspace.state,
                kv: task.kv,
                rows: task.rows.clone(),
                key_part: task.key_part,
            });
        }
    })
}

/// Splits a call into tasks, and runs them, those with the most keys first. `bytes` is the size of a number of the keys
/// and values.
fn run_tasks<E: Number>(
    call: &ForwardCall<E>,
    layout: Layout,
    bytes: usize,
    run: &(dyn Fn(&mut AttentionWorkspace, &AttentionTask) + Sync),
) -> Option<()> {
    let dims = &call.inputs.dims;
    let relative_bias = match call.inputs.options.relative_bias {
        Some(bias) => Some(RelativeBiasTable::new(bias, dims)?),
        None => None,
    };
    let inputs = &CheckedCall { relative_bias: relative_bias.as_ref(), ..call.inputs };
    let units = inputs.options.units(layout.elements == 2);
    let workers = workers(dims, bytes, 1);
    let split = AttentionTaskSplit::new(layout, dims, workers.count, call.to.statistics.is_some());
    let heads = dims.kv_heads();
    let chunks = heads.checked_mul(split.row_chunks)?;
    let chain = &Chain::new(chunks, heads)?;
    let partials = match split.key_parts {
        1 => None,
        parts => Some(Partials::new(dims, dims.rows(), parts)?),
    };
    let panels = split.rows_per_chunk.min(dims.rows()).div_ceil(layout.panel);
    let allocate = || AttentionWorkspace::new(layout, inputs, panels, call.to.statistics.is_some());
    for_each_task(chunks.checked_mul(split.key_parts)?, workers, &allocate, &|workspace, number| {
        let index = number / split.key_parts;
        let part = number % split.key_parts;
        let range = split.task(dims, index, part);
        let tile = |first| Tile::new(layout, inputs, range.kv, first..range.rows.end.min(first + layout.panel));
        let tiles = range.rows.clone().step_by(layout.panel).map(tile).collect();
        let key_part = partials.as_ref().map(|partials| KeyPart { partials, part });
        let task = AttentionTask {
            inputs,
            units,
            kv: range.kv,
            rows: range.rows,
            keys: range.keys,
            tiles,
            key_part,
            chain,
            index,
        };
        run(workspace, &task);
    });
    if let Some(partials) = partials {
        partials.merge(call);
    }
    let is_out_of_memory =
        call.to.statistics.as_ref().is_some_and(|statistics| statistics.is_out_of_memory.load(Ordering::Relaxed));
    (!is_out_of_memory).then_some(())
}
