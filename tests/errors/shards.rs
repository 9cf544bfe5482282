//! Errors of layers whose heads cannot be divided among ranks, and of files without such a layer.

use crate::common::sharded;
use crate::words::{self, Fields};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("share", share), ("share calls", |line, _| named(CALLS, line))];

/// Loads the first shard of a layer of these tensors.
fn share(_: &str, call: &Fields) -> Result<String> {
    let tensors = call.read("weights", words::named::<Vec<_>>)?.expect("names and tensors").into_iter();
    let vb = sharded(&tensors.map(|(name, tensor)| (format!("layer.{name}"), tensor)).collect())?.pp("layer");
    let config = call.need("config")?;
    let shard = HeadShard::new(0, call.need("processes")?)?;
    let layer = MultiHeadAttention::load_shard(&config, WeightLayout::Canonical, shard, &vb)?;
    let [xs] = call.tensors(["xs"])?;
    xs.map_or(Ok(()), |xs| layer.forward(&xs).map(drop)).map(accepted)
}

const CALLS: &[Named] = calls! {
    "a rank past the last" => HeadShard::new(2, 2),
    "no processes" => HeadShard::new(0, 0),
    "a relative bias of other heads" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 4, any_weights())?.shard(HeadShard::new(0, 3)?),
};
