//! Layers whose heads cannot be divided among processes, and files that hold no such layer.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::common::sharded;
use crate::words::{Of, Tensors};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("share", run::<Share>), ("share calls", |line, _| named(CALLS, line))];

/// The first share of a layer of these tensors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Share {
    config: Of<Config>,
    processes: usize,
    weights: BTreeMap<String, Tensors>,
    xs: Option<Tensors>,
}

impl Call for Share {
    fn call(self) -> Result<String> {
        let tensors = self.weights.iter().map(|(name, tensor)| (format!("layer.{name}"), (**tensor).clone()));
        let vb = sharded(&tensors.collect())?.pp("layer");
        let shard = HeadShard::new(0, self.processes)?;
        let layer = MultiHeadAttention::load_shard(&self.config.0, WeightLayout::Canonical, shard, &vb)?;
        self.xs.map_or(Ok(()), |xs| layer.forward(&xs).map(drop)).map(accepted)
    }
}

const CALLS: &[Named] = calls! {
    "a rank past the last" => HeadShard::new(2, 2),
    "no processes" => HeadShard::new(0, 0),
    "a relative bias of other heads" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 4, any_weights())?.shard(HeadShard::new(0, 3)?),
};
