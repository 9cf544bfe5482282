//! `AdditiveAttention`.

use crate::words::{Fields, mask};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("additive", additive),
    ("additive config in JSON", |line, _| {
        serde_json::from_str::<AdditiveAttentionConfig>(line).map(accepted).map_err(Error::wrap)
    }),
];

fn additive(_: &str, call: &Fields) -> Result<String> {
    let layer = AdditiveAttention::new(&call.need("config")?, call.builder("zeros")?)?;
    let [queries, keys, values] = ["queries", "keys", "values"].map(|name| call.tensor(name));
    let mask = call.part("mask", mask)?.unwrap_or_else(AttentionMask::none);
    layer.forward(&queries?, &keys?, &values?, &mask).map(accepted)
}
