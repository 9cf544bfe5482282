//! The gated delta rule and `GatedDeltaNet`: its config, its tensors, its inputs and its cache.

use crate::cache::{Edit, numbers};
use crate::common::values;
use crate::words::{Fields, packed, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("delta rule", rule), ("delta net", net)];

fn rule(_: &str, call: &Fields) -> Result<String> {
    let options = DeltaOptions::default().with_scale(call.get::<f64>("scale")?);
    let options = options.with_qk_norm(call.get::<f64>("qk_norm")?).with_backend(call.backend());
    let [q, k, v] = ["q", "k", "v"].map(|name| call.tensor(name));
    let q = &q?;
    let k = &k?;
    let v = &v?;
    let others = call.tensors(["decay", "beta", "state"])?;
    let [decay, beta, state] = others.each_ref().map(Option::as_ref);
    match call.part("packed", packed)? {
        Some(packed) => gated_delta_rule_varlen(q, k, v, decay, beta, state, &packed, &options),
        None => gated_delta_rule(q, k, v, decay, beta, state, &options),
    }
    .map(accepted)
}

fn run(call: &Fields, xs: &Tensor, cache: Option<&mut DeltaCache>) -> Result<Tensor> {
    let config = call.need("config")?;
    let vb = call.builder("seed")?;
    let net = match call.get("layout")? {
        Some(layout) => GatedDeltaNet::load(&config, layout, vb)?,
        None => GatedDeltaNet::new(&config, vb)?,
    };
    // The layout that the weights are saved in.
    if let Some(layout) = call.get("saved")? {
        return net.state_dict(layout).map(|_| xs.clone());
    }
    let [residual, attention_mask] = call.tensors(["residual", "attention_mask"])?;
    let packed = call.part("packed", packed)?;
    let valid_lens = call.get::<Vec<usize>>("valid_lens")?;
    let input = DeltaInput::new(xs).with_residual(residual.as_ref());
    let input = input.with_attention_mask(attention_mask.as_ref());
    let input = with(input, valid_lens.as_deref(), DeltaInput::with_valid_lens);
    let input = input.with_packed(packed.as_ref());
    net.forward_with(with(input, cache, DeltaInput::with_cache))
}

/// Calls a layer with distinct numbers.
fn step(call: &Value, cache: &mut DeltaCache) -> Result<Tensor> {
    Fields::all(call, |call| {
        let xs = call.tensor("xs")?;
        run(call, &numbers(xs.shape()).to_dtype(xs.dtype())?, Some(cache))
    })
}

/// Calls a net. A call with a cache that is an error does not change the cache. The cache has the earlier calls, and a
/// snapshot after the first.
fn net(_: &str, call: &Fields) -> Result<String> {
    let xs = call.tensor("xs")?;
    let edit = call.get::<Edit>("edit")?;
    let Some(before) = call.json("cache").and_then(Value::as_array) else { return run(call, &xs, None).map(accepted) };
    let mut cache = DeltaCache::default();
    for (n, earlier) in before.iter().enumerate() {
        step(earlier, &mut cache)?;
        if n == 0 {
            cache.snapshot();
        }
    }
    let mut untouched = cache.fork()?;
    let outcome = match edit {
        Some(Edit::Truncate(len)) => cache.truncate(len),
        Some(Edit::Reorder(sequences)) => cache.reorder(&sequences),
        Some(Edit::Remove(sequence)) => cache.remove(sequence),
        Some(Edit::SwapRemove(sequence)) => cache.swap_remove(sequence),
        Some(Edit::TruncateTo(lens)) => cache.truncate_to(&lens),
        Some(Edit::Keep { .. }) => panic!("a state has no drafts to keep"),
        None => run(call, &xs, Some(&mut cache)).map(drop),
    };
    if let (Err(_), Some(first)) = (&outcome, before.first()) {
        assert_eq!(cache.lens(), untouched.lens());
        let [own, other] = [&mut cache, &mut untouched].map(|cache| step(first, cache));
        assert_eq!(values(&own?), values(&other?));
    }
    outcome.map(accepted)
}
