//! Which layout a checkpoint is in, by the names and shapes in it.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use super::layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use super::source::{self, has};

/// What training loops and compilers put in front of a model's names.
const WRAPPERS: [&str; 5] = ["module", "_orig_mod", "model", "state_dict", "model_state_dict"];

/// A shape that no tensor has: asking for it gives an error with the true one, and reads nothing.
const NO_SHAPE: [usize; 17] = [0; 17];

/// The shape of a tensor that the builder has.
pub(super) fn shape(vb: &VarBuilder, name: &str) -> Result<Vec<usize>> {
    let error = match vb.get(NO_SHAPE.to_vec(), name) {
        Ok(tensor) => return Ok(tensor.dims().to_vec()),
        Err(error) => error,
    };
    match source::root(&error) {
        Error::UnexpectedShape { got, .. } => Ok(got.dims().to_vec()),
        Error::CannotFindTensor { .. } => Err(error),
        other => bail!(
            "[weight_layout] the shape of {name}, which tells its layout, cannot be had from this builder ({other}); name the layout"
        ),
    }
}

impl WeightLayout {
    /// The layout of the attention layer at the builder's prefix.
    ///
    /// Plain parameters that are not square are taken as (in, out), as `nn.Parameter(torch.rand(d_in, d_out))` makes
    /// them; read the other way they do not fit the config, and loading says so.
    ///
    /// # Errors
    /// If nothing there looks like attention; and where names and shapes leave two readings (a square plain parameter, a
    /// packed weight whose name is used for two row orders), an error that names both.
    /// [`Checkpoint::detect`](crate::weights::Checkpoint::detect) asks the checkpoint's config.json too.
    pub fn detect(vb: &VarBuilder) -> Result<Self> {
        detect(vb, None)
    }
}

/// `config` is that of the checkpoint, for what names and shapes leave open.
pub(super) fn detect(vb: &VarBuilder, config: Option<&serde_json::Value>) -> Result<WeightLayout> {
    let place = match vb.prefix() {
        prefix if prefix.is_empty() => "at the root of the file".to_string(),
        prefix => format!("below {prefix:?}"),
    };
    if has(vb, "w_v.weight") && has(vb, "W_q.weight") {
        bail!("[weight_layout] {place} are the weights of an AdditiveAttention (w_v), not of a multi-head layer")
    }
    let readings = readings(vb)?;
    let chosen = config.and_then(|config| readings.iter().find(|layout| says(config, **layout)));
    match (readings.as_slice(), chosen) {
        ([layout], _) | (_, Some(layout)) => Ok(*layout),
        ([], _) => bail!(
            "[weight_layout] no attention weights {place}: looked for the query projections {}; {}",
            query_names().join(", "),
            elsewhere(vb)?
        ),
        _ => {
            let readings: Vec<_> = readings.iter().map(|layout| format!("`{layout}`{}", used_by(*layout))).collect();
            bail!("[weight_layout] the weights {place} can be read as {}; name the one meant", readings.join(" or as "))
        }
    }
}

/// Whether a checkpoint's config.json says that it is in this layout: by `layout`, this crate's own key, or by the
/// architecture, of those whose packed rows are in an order that their names do not tell.
fn says(config: &serde_json::Value, layout: WeightLayout) -> bool {
    if let Some(spelling) = config["layout"].as_str() {
        return spelling == layout.to_string();
    }
    let WeightLayout::Packed(_, order) = layout else { return false };
    match config["model_type"].as_str() {
        Some("bloom" | "falcon" | "gpt_bigcode" | "gpt_neox" | "RefinedWeb" | "RefinedWebModel") => {
            order == QkvOrder::ByHead
        }
        Some("chatglm") => order == QkvOrder::ByPart,
        _ => false,
    }
}

/// Who uses one of two orders, for the error that asks.
fn used_by(layout: WeightLayout) -> &'static str {
    match layout {
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByPart) => " (nanoGPT)",
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead) => " (GPT-BigCode)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByPart) => " (ChatGLM)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead) => " (GPT-NeoX, Bloom, Falcon)",
        _ => "",
    }
}

/// Where attention weights are instead: behind a wrapper's prefix, without the first part of this one, or as the builder
/// tells.
fn elsewhere(vb: &VarBuilder) -> Result<String> {
    let prefix = vb.prefix();
    let mut wrappers: Vec<_> = WRAPPERS.iter().map(ToString::to_string).collect();
    wrappers.extend(WRAPPERS.iter().flat_map(|outer| WRAPPERS.map(|inner| format!("{outer}.{inner}"))));
    let mut candidates: Vec<_> =
        wrappers.iter().map(|wrapper| format!("{wrapper}.{prefix}").trim_end_matches('.').to_string()).collect();
    candidates.extend(prefix.split_once('.').map(|(_, rest)| rest.to_string()));
    for candidate in candidates {
        if !readings(&vb.root().pp(&candidate))?.is_empty() {
            return Ok(format!("they are below {candidate:?}, from the root of the file"));
        }
    }
    let hint = vb.get_unchecked("q_proj.weight").err().map(|error| source::hint(&error)).unwrap_or_default();
    Ok(if hint.is_empty() { "is a prefix missing (`vb.pp(..)`)?".to_string() } else { hint })
}

/// Every layout that the names and shapes allow.
fn readings(vb: &VarBuilder) -> Result<Vec<WeightLayout>> {
    let mut found = separate(vb);
    for naming in Naming::ALL {
        let query = naming.names()[0];
        if has(vb, query) {
            found.extend(plain(&shape(vb, query)?).iter().map(|&way| WeightLayout::Raw(naming, way)));
        }
        let query = format!("heads.0.{query}");
        if has(vb, &format!("{query}.weight")) {
            found.push(WeightLayout::StackedHeads(naming, Storage::Linear));
        }
        if has(vb, &query) {
            let ways = plain(&shape(vb, &query)?);
            found.extend(ways.iter().map(|&way| WeightLayout::StackedHeads(naming, Storage::Raw(way))));
        }
    }
    if has(vb, "in_proj_weight") || has(vb, "q_proj_weight") {
        found.push(WeightLayout::Torch);
    }
    let packed = PackedNaming::all().map(|naming| (naming, naming.names()[0], naming.names()[1])).collect();
    for naming in present(vb, packed) {
        let by_part = WeightLayout::Packed(naming, QkvOrder::ByPart);
        let both = [by_part, WeightLayout::Packed(naming, QkvOrder::ByHead)];
        match naming {
            PackedNaming::QueryKeyValue => found.extend(both),
            PackedNaming::CAttn => match shape(vb, "c_attn.weight")?.as_slice() {
                [rows, columns] if rows > columns => found.extend(both),
                _ => found.push(WeightLayout::Conv1d),
            },
            _ => found.push(by_part),
        }
    }
    Ok(found)
}

fn separate(vb: &VarBuilder) -> Vec<WeightLayout> {
    let rows = WeightLayout::all_linear().filter_map(|(layout, [query, .., out])| {
        // `query` alone is the inner module of BERT and its kin, whose output projection is outside.
        (layout != WeightLayout::MinGpt || has(vb, "proj.weight")).then_some((layout, query, out))
    });
    present(vb, rows.collect())
}

/// Of (layout, query name, output name), those whose query projection is there; of several that share its name, the ones
/// whose output projection is there too, or the first where none is.
fn present<T: Copy>(vb: &VarBuilder, rows: Vec<(T, &str, &str)>) -> Vec<T> {
    let has = |name: &str| has(vb, &format!("{name}.weight"));
    let rows: Vec<_> = rows.into_iter().filter(|(_, query, _)| has(query)).collect();
    let with_out = |query: &str| rows.iter().any(|(_, other, out)| *other == query && has(out));
    let is_first = |i: usize, query: &str| rows[..i].iter().all(|(_, other, _)| *other != query);
    let chosen = rows.iter().enumerate().filter(
        |&(i, (_, query, out))| {
            if with_out(query) { has(out) } else { is_first(i, query) }
        },
    );
    chosen.map(|(_, (layout, ..))| *layout).collect()
}

/// How a plain parameter of this shape may be stored.
fn plain(shape: &[usize]) -> &'static [Orientation] {
    match shape {
        [rows, columns] if rows == columns => &[Orientation::InOut, Orientation::OutIn],
        _ => &[Orientation::InOut],
    }
}

/// The names of query projections, each once, as an error lists them.
fn query_names() -> Vec<String> {
    let stacked = Naming::ALL.map(|naming| naming.names()[0]).join(", ");
    let linear = WeightLayout::all_linear().map(|(_, [query, ..])| query.to_string());
    let others = [format!("heads.0.{{{stacked}}}"), "in_proj_weight".into(), "q_proj_weight".into()];
    let mut all: Vec<String> = Vec::new();
    for name in linear.chain(others).chain(PackedNaming::all().map(|naming| naming.names()[0].to_string())) {
        if !all.contains(&name) {
            all.push(name);
        }
    }
    all
}

/// The last part of a parameter's name that marks the query projection of some layout, for finding layers in a file; a
/// name that ends with another comes before it.
pub(super) fn query_suffixes() -> Vec<String> {
    let mut suffixes: Vec<_> = WeightLayout::all().into_iter().map(WeightLayout::query_parameter).collect();
    suffixes.push("q_proj_weight".to_string());
    suffixes.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
    suffixes.dedup();
    suffixes
}
