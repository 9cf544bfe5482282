//! The HTML file: the template with its style, data and script.

use std::io::{Result, Write};

use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::layer::Shape;
use super::{Page, Picture};

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
/// One script, in this order: the last file starts it.
const SCRIPTS: [&str; 5] = [
    include_str!("decode.js"),
    include_str!("draw.js"),
    include_str!("model.js"),
    include_str!("head.js"),
    include_str!("page.js"),
];

pub(super) fn html(page: &Page, shape: &Shape, out: &mut impl Write) -> Result<()> {
    for line in TEMPLATE.lines() {
        match line.trim() {
            "{{title}}" => writeln!(out, "<title>{}</title>", page.title.replace('&', "&amp;").replace('<', "&lt;"))?,
            "{{style}}" => out.write_all(STYLE.as_bytes())?,
            "{{data}}" => data(page, shape, out)?,
            "{{script}}" => SCRIPTS.iter().try_for_each(|script| out.write_all(script.as_bytes()))?,
            _ => writeln!(out, "{line}")?,
        }
    }
    Ok(())
}

/// Elements that no browser runs, read by their ids.
fn data(page: &Page, shape: &Shape, out: &mut impl Write) -> Result<()> {
    let indices = |count: usize| (0..count).map(|index| index.to_string()).collect::<Vec<_>>();
    let tokens = |tokens: &Option<Vec<String>>, count| tokens.clone().unwrap_or_else(|| indices(count));
    let [queries, keys] = [tokens(&page.query_tokens, shape.queries), tokens(&page.key_tokens, shape.keys)];
    let layers = page.layers.iter().map(|layer| json!({"name": layer.name, "hasAllWeights": layer.has_all_weights}));
    let about = json!({
        "title": page.title,
        "shape": {"heads": shape.heads, "queries": shape.queries, "keys": shape.keys, "top": shape.top},
        "layers": layers.collect::<Vec<_>>(),
        "hasTokens": {"query": page.query_tokens.is_some(), "key": page.key_tokens.is_some()},
        "isSelf": queries == keys,
        "tokens": {"key": if queries == keys { None } else { Some(keys) }, "query": queries},
        "picture": page.picture.as_ref().map(|Picture { kind, grid, leading, .. }| json!({
            "kind": kind, "rows": grid[0], "columns": grid[1], "leading": leading,
        })),
    });
    // Neither `</script>` nor `<!--` may stand in a script element; JSON has `<` in strings alone.
    let about = about.to_string().replace('<', "\\u003c");
    writeln!(out, "<script type=\"application/json\" id=\"about\">{about}</script>")?;
    let pictures = page.picture.iter().map(|picture| (String::from("picture-data"), &picture.bytes));
    let layers = page.layers.iter().enumerate().map(|(index, layer)| (format!("layer-{index}"), &layer.bytes));
    for (id, bytes) in pictures.chain(layers) {
        let text = Base64Display::new(bytes, &STANDARD);
        writeln!(out, "<script type=\"text/plain\" id=\"{id}\">{text}</script>")?;
    }
    Ok(())
}
