//! The pages in use after operations that transformers' continuous batching has recorded (`block_rules.py`): prefixes
//! of whole pages, forks that copy a page that is not full, and freed pages that are still found.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::*;

const PAGES: usize = 400;
const PAGE: usize = 16;

/// A sequence with its tokens.
struct Sequence {
    id: SequenceId,
    ids: Vec<u32>,
}

/// Appends tokens to a sequence, and makes its whole pages found.
fn extend(table: &mut PageTable, own: &mut Sequence, ids: &[u32]) -> Result<()> {
    table.step(&[own.id.tokens(ids.len())])?.commit();
    own.ids.extend(ids);
    table.share_prefix(own.id, &own.ids)
}

fn generated(number: usize, count: usize) -> Vec<u32> {
    (0..count).map(|i| (1_000_000 + number * 1000 + i) as u32).collect()
}

#[test]
fn pages_in_use_after_recorded_operations_equal_the_blocks_of_transformers() -> Result<()> {
    let recorded: Vec<Value> = serde_json::from_str(include_str!("block_rules.json")).expect("JSON");
    let mut table = PageTable::new(PAGES, PAGE)?;
    let mut sequences: BTreeMap<String, Sequence> = BTreeMap::new();
    let count = |value: &Value| value.as_u64().expect("a number") as usize;
    let mut shared = 0;
    for (number, operation) in recorded.iter().enumerate() {
        if let Some(prompt) = operation.get("add") {
            let [kind, common, length] = ["kind", "common", "length"].map(|name| count(&prompt[name]));
            let id = |i: usize| if i < common { kind * 1000 + i } else { 100_000 + number * 1000 + i };
            let ids: Vec<u32> = (0..length).map(|i| id(i) as u32).collect();
            let SharedPrefix { sequence, tokens } = table.add_with_prefix(&ids);
            assert_eq!(tokens, count(&operation["shared"]), "operation {number}: {operation}");
            shared += tokens;
            let mut own = Sequence { id: sequence, ids: ids[..tokens].to_vec() };
            extend(&mut table, &mut own, &ids[tokens..])?;
            sequences.insert(number.to_string(), own);
        } else if let Some(Value::String(name)) = operation.get("extend") {
            let own = sequences.get_mut(name).expect("a sequence");
            extend(&mut table, own, &generated(number, count(&operation["count"])))?;
        } else if let Some(Value::String(name)) = operation.get("fork") {
            let of = &sequences[name];
            let mut own = Sequence { id: table.fork(of.id)?, ids: of.ids.clone() };
            extend(&mut table, &mut own, &generated(number, 1))?;
            sequences.insert(number.to_string(), own);
        } else if let Some(Value::String(name)) = operation.get("free") {
            table.free(sequences.remove(name).expect("a sequence").id)?;
        }
        let found = (table.used_pages(), table.free_pages_with_prefix());
        assert_eq!(found, (count(&operation["used"]), count(&operation["found"])), "operation {number}: {operation}");
    }
    assert!(shared > 0);
    Ok(())
}
