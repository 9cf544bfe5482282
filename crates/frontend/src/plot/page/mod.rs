//! Attention weights of a whole model as one HTML file: the template with its style and scripts, and as data the
//! statistics of each layer, as the bytes that `decode.js` reads.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use candle_core::{DType, Error, Result, Tensor, bail};
use serde_json::json;

use super::style;
use candle_attention_core::AttentionStatistics;
use candle_attention_modules::base::{Expect, FLOATS, rowwise::to_vec};

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

/// A page of the attention of one sequence, in all heads of all layers, as one HTML file to explore.
///
/// The file needs nothing but a browser: no network, no server. It has three views that link to each other. *Model*
/// has a small map of each head of each layer. *Head* has the tokens on both sides with lines between them, or the map
/// of T_q rows and T_kv columns with the weight under the pointer, or, with [`with_picture`](Self::with_picture), the
/// picture. *Token* has the keys that a token attends to and the queries that attend to it, over all heads. Keyboard
/// and touch work like a pointer. The address selects the view: `#layer=3&head=5` opens that head,
/// `#layer=3&head=5&token=17` selects query 17 in it, `key=4` a key, `as=map` the map; `#token=17` opens the view of a
/// token. All count from 0.
///
/// The numbers come from [`AttentionStatistics`], so that the weights need not be stored: for each query the keys with
/// the largest weights, to within 2e-5, and its entropy; for each key the sum of its weights. The page shows how much
/// of the weight the other keys have. If a layer's statistics have the weights of all queries and keys
/// ([`with_weights_of`]), every weight is stored: those that are not among the largest to within `w.sqrt() / 250`, or
/// 2e-5 if that is more.
///
/// Each head takes `T_q · (4 + 4k) + 4 · T_kv` bytes for k top keys (`4 + 6k` if T_kv is above 65,536), each stored
/// weight one byte more, and base64 a third on top: 16 MB for 144 heads, 2,048 tokens and k = 8 without all weights.
///
/// Tokens, names and the title are treated as untrusted text, written as in [`HeatMap`](super::HeatMap).
///
/// ```
/// use candle_attention::plot::Page;
/// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, StatisticsOptions, TorchSeed};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = TorchSeed::new(0).var_builder(DType::F32, &Device::Cpu);
/// let mut page = Page::new("two layers").with_tokens(&["The", " cat", " sat"])?;
/// let mut xs = Tensor::randn(0f32, 1., (1, 3, 16), &Device::Cpu)?;
/// for name in ["first", "second"] {
///     let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(16, 2), vb.pp(name))?;
///     let statistics;
///     (xs, statistics) = layer.forward_with_statistics(AttentionInput::new(&xs), &StatisticsOptions::default())?;
///     page.push_layer(name, &statistics, 0)?; // a progress bar advances here
/// }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("attention.html");
/// page.write(&path)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// [`with_weights_of`]: candle_attention_core::StatisticsOptions::with_weights_of
#[derive(Debug, Clone)]
#[must_use]
pub struct Page {
    title: String,
    /// The shape of every layer; `None` before the first.
    shape: Option<Shape>,
    layers: Vec<PageLayer>,
    query_tokens: Option<Vec<String>>,
    key_tokens: Option<Vec<String>>,
    picture: Option<KeyPicture>,
}

/// The picture of which the keys are patches.
#[derive(Debug, Clone)]
struct KeyPicture {
    kind: &'static str,
    bytes: Vec<u8>,
    /// Rows and columns of patches.
    grid: [usize; 2],
    /// Keys before the first patch.
    leading: usize,
}

impl Page {
    /// Makes a page without layers.
    pub fn new(title: impl AsRef<str>) -> Self {
        Self {
            title: style::safe(title.as_ref()),
            shape: None,
            layers: Vec::new(),
            query_tokens: None,
            key_tokens: None,
            picture: None,
        }
    }

    /// Labels queries and keys by the same tokens, for self-attention. Without tokens they are labelled by index.
    ///
    /// # Errors
    /// If the page has layers whose T_q or T_kv is not the number of tokens.
    pub fn with_tokens<S: AsRef<str>>(self, tokens: &[S]) -> Result<Self> {
        self.with_query_tokens(tokens)?.with_key_tokens(tokens)
    }

    /// Labels the queries: T_q tokens.
    ///
    /// # Errors
    /// If the page has layers whose T_q is not the number of tokens.
    pub fn with_query_tokens<S: AsRef<str>>(mut self, tokens: &[S]) -> Result<Self> {
        self.query_tokens = Some(style::tokens(tokens));
        self.check(self.shape).map(|()| self)
    }

    /// Labels the keys: T_kv tokens.
    ///
    /// # Errors
    /// If the page has layers whose T_kv is not the number of tokens.
    pub fn with_key_tokens<S: AsRef<str>>(mut self, tokens: &[S]) -> Result<Self> {
        self.key_tokens = Some(style::tokens(tokens));
        self.check(self.shape).map(|()| self)
    }

    /// Shows weights over a picture, a PNG or JPEG file: the keys are `leading` tokens, such as `[CLS]`, and after them
    /// `grid` rows and columns of patches, row by row. Statistics with all weights colour every patch.
    ///
    /// # Errors
    /// If the picture has another format, the grid is empty, or the page has layers with another T_kv.
    pub fn with_picture(mut self, picture: &[u8], grid: [usize; 2], leading: usize) -> Result<Self> {
        let kind = match picture {
            [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => "png",
            [0xff, 0xd8, 0xff, ..] => "jpeg",
            _ => bail!("[page] the picture of {} bytes is neither a PNG nor a JPEG file", picture.len()),
        };
        if grid.contains(&0) {
            bail!("[page] the picture has {} x {} patches, expected at least one", grid[0], grid[1])
        }
        self.picture = Some(KeyPicture { kind, bytes: picture.to_vec(), grid, leading });
        self.check(self.shape).map(|()| self)
    }

    /// Adds the next layer: see [`Page::push_layer`].
    ///
    /// # Errors
    /// As [`Page::push_layer`].
    pub fn with_layer(mut self, name: impl AsRef<str>, statistics: &AttentionStatistics, b: usize) -> Result<Self> {
        self.push_layer(name, statistics, b)?;
        Ok(self)
    }

    /// Adds the next layer: sequence `b` of its statistics, in the shapes that [`AttentionStatistics`] names, or
    /// without the dimension B. The page keeps a compact copy, so that layers can be added as a model runs.
    ///
    /// # Errors
    /// If `b` is not below B, a tensor has another shape or dtype, the statistics have no top keys, a weight is outside
    /// \[0, 1\], there are weights of some queries or keys alone, the layers before have other numbers of heads,
    /// queries, keys or top keys, or the numbers of tokens differ. The page is then unchanged. Weights that are not
    /// finite are no error, and are shown as such.
    pub fn push_layer(&mut self, name: impl AsRef<str>, statistics: &AttentionStatistics, b: usize) -> Result<()> {
        let layer = PageLayer::new(style::safe(name.as_ref()), statistics, b)?;
        let shape = layer.shape;
        let before = self.shape.unwrap_or(shape);
        if shape != before {
            let index = self.layers.len();
            bail!(
                "[page] layer {index} has {shape}, the layers before it {before}, expected equal numbers in all layers"
            )
        }
        self.check(Some(shape))?;
        self.shape = Some(shape);
        self.layers.push(layer);
        Ok(())
    }

    /// Writes the page to `path`.
    ///
    /// # Errors
    /// If there is no layer, or the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let cannot = |error| Error::Msg(format!("[page] cannot write {}: {error}", path.display()));
        let shape = self.shape()?;
        let mut file = BufWriter::new(File::create(path).map_err(cannot)?);
        html(self, shape, &mut file).and_then(|()| file.flush()).map_err(cannot)
    }

    /// Writes the page, in UTF-8, in many small pieces: use a [`BufWriter`] for a file.
    ///
    /// # Errors
    /// If there is no layer, or `out` has an error.
    pub fn write_to(&self, mut out: impl Write) -> Result<()> {
        let shape = self.shape()?;
        html(self, shape, &mut out).map_err(|error| Error::Msg(format!("[page] cannot write: {error}")))
    }

    fn shape(&self) -> Result<&Shape> {
        self.shape.as_ref().ok_or_else(|| Error::Msg("[page] there is no layer to show: see Page::with_layer".into()))
    }

    /// Checks that tokens and picture fit layers of this shape, if there are any.
    fn check(&self, shape: Option<Shape>) -> Result<()> {
        let Some(Shape { queries, keys, .. }) = shape else { return Ok(()) };
        if let Some(tokens) = &self.query_tokens
            && tokens.len() != queries
        {
            bail!("[page] {} query tokens for {queries} queries", tokens.len())
        }
        if let Some(tokens) = &self.key_tokens
            && tokens.len() != keys
        {
            bail!("[page] {} key tokens for {keys} keys", tokens.len())
        }
        if let Some(KeyPicture { grid: [rows, columns], leading, .. }) = self.picture
            && rows.checked_mul(columns).and_then(|patches| patches.checked_add(leading)) != Some(keys)
        {
            bail!("[page] {rows} x {columns} patches after {leading} leading tokens for {keys} keys")
        }
        Ok(())
    }
}

/// The most by which rounding may move a weight out of \[0, 1\], as in heat maps.
const ROUNDING: f32 = 0.01;

/// The size of a layer's statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    heads: usize,
    queries: usize,
    keys: usize,
    /// Top keys of each query.
    top: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = style::count(self.heads, "head");
        let keys = style::count(self.keys, "key");
        let top = style::count(self.top, "top key");
        let queries = if self.queries == 1 { "query" } else { "queries" };
        write!(f, "{heads}, {} {queries}, {keys} and {top}", self.queries)
    }
}

/// The statistics of a layer in a page.
#[derive(Debug, Clone)]
struct PageLayer {
    name: String,
    shape: Shape,
    /// Little-endian, in this order: sums of weights (H, T_kv) and entropies (H, T_q) in f32, top keys (H, T_q, k) in
    /// u16 or u32, codes of their weights in u16, and, where all weights are kept, their codes (H, T_q, T_kv) in u8.
    bytes: Vec<u8>,
    has_all_weights: bool,
}

impl PageLayer {
    /// Encodes sequence `b` of statistics.
    fn new(name: String, statistics: &AttentionStatistics, b: usize) -> Result<Self> {
        let AttentionStatistics { top_keys, top_weights, entropy, key_weight_sums, weights } = statistics;
        let has_batch = match *top_keys.dims() {
            [batch, _, _, _] if b >= batch => bail!("[page] sequence {b} is not below the batch size {batch}"),
            [_, _, _, _] => true,
            [_, _, _] if b == 0 => false,
            [_, _, _] => bail!("[page] there is no sequence {b} in statistics without the dimension B"),
            _ => bail!("[page] the top keys have shape {:?}; expected (B, H, T_q, k) or (H, T_q, k)", top_keys.dims()),
        };
        let of_sequence = |tensor: &Tensor, what: &str| match has_batch {
            true if tensor.dims().first().is_none_or(|&batch| b >= batch) => {
                bail!("[page] {what} of shape {:?} has no sequence {b}", tensor.dims())
            }
            true => tensor.get(b),
            false => Ok(tensor.clone()),
        };
        let top_keys = of_sequence(top_keys, "top_keys")?;
        let (heads, queries, top) = top_keys.dims3()?;
        let key_weight_sums = of_sequence(key_weight_sums, "key_weight_sums")?;
        let keys = key_weight_sums.dims().last().copied().unwrap_or_default();
        let shape = Shape { heads, queries, keys, top };
        if heads == 0 || (top == 0 && queries > 0 && keys > 0) {
            bail!("[page] layer {name:?} has {shape}; expected at least one head and one top key")
        }
        Expect::one("page", "top_keys", &top_keys).dtype_of(&[DType::U32], "")?;

        let mut bytes = Vec::new();
        let key_weight_sums = floats(&key_weight_sums, "key_weight_sums", &[heads, keys])?;
        let entropy = floats(&of_sequence(entropy, "entropy")?, "entropy", &[heads, queries])?;
        bytes.extend(key_weight_sums.iter().chain(&entropy).flat_map(|number| number.to_le_bytes()));

        let found = to_vec::<u32>(&top_keys)?;
        if let Some(key) = found.iter().find(|&&key| key as usize >= keys) {
            bail!("[page] the top keys have key {key}; expected keys below {keys}")
        }
        // Two bytes can store all keys below 65,536.
        let len = if keys > usize::from(u16::MAX) + 1 { 4 } else { 2 };
        found.iter().for_each(|key| bytes.extend(&key.to_le_bytes()[..len]));
        let top_weights = floats(&of_sequence(top_weights, "top_weights")?, "top_weights", &[heads, queries, top])?;
        extend_with_codes::<2>(&mut bytes, &name, &top_weights)?;
        if let Some(weights) = weights {
            let weights = floats(&of_sequence(weights, "weights")?, "weights", &[heads, queries, keys])?;
            extend_with_codes::<1>(&mut bytes, &name, &weights)?;
        }
        Ok(Self { name, shape, bytes, has_all_weights: weights.is_some() })
    }
}

/// Returns the numbers of a tensor of floats of this shape.
fn floats(tensor: &Tensor, what: &str, shape: &[usize]) -> Result<Vec<f32>> {
    Expect::one("page", what, tensor).sizes(shape)?.dtype_of(&FLOATS, "")?;
    to_vec(tensor)
}

/// Appends weights as unsigned integers of `SIZE` bytes, proportional to their square roots, so that small weights keep
/// their digits. 0 is the code of a weight of 0 alone, the largest integer the code of a weight that is not finite, and
/// the integer before it the code of 1.
fn extend_with_codes<const SIZE: usize>(bytes: &mut Vec<u8>, name: &str, weights: &[f32]) -> Result<()> {
    let last = (1u32 << (8 * SIZE)) - 1;
    for &weight in weights {
        if weight.is_finite() && !(-ROUNDING..=1.0 + ROUNDING).contains(&weight) {
            bail!("[page] layer {name:?} has a weight of {weight}; expected weights from 0 to 1")
        }
        let code = match weight {
            _ if !weight.is_finite() => last,
            _ if weight <= 0.0 => 0,
            _ => ((weight.min(1.0).sqrt() * (last - 1) as f32).round() as u32).max(1),
        };
        bytes.extend(&code.to_le_bytes()[..SIZE]);
    }
    Ok(())
}

/// Writes the HTML file: the template with its style, data and script.
fn html(page: &Page, shape: &Shape, out: &mut impl Write) -> io::Result<()> {
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

/// Writes the data as elements that no browser runs, read by their ids.
fn data(page: &Page, shape: &Shape, out: &mut impl Write) -> io::Result<()> {
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
        "picture": page.picture.as_ref().map(|KeyPicture { kind, grid, leading, .. }| json!({
            "kind": kind, "rows": grid[0], "columns": grid[1], "leading": leading,
        })),
    });
    // A script element must not contain `</script>` or `<!--`; JSON has `<` in strings alone.
    let about = about.to_string().replace('<', "\\u003c");
    writeln!(out, "<script type=\"application/json\" id=\"about\">{about}</script>")?;
    let pictures = page.picture.iter().map(|picture| (String::from("picture-data"), &picture.bytes));
    let layer_data = page.layers.iter().enumerate().map(|(index, layer)| (format!("layer-{index}"), &layer.bytes));
    for (id, bytes) in pictures.chain(layer_data) {
        let text = Base64Display::new(bytes, &STANDARD);
        writeln!(out, "<script type=\"text/plain\" id=\"{id}\">{text}</script>")?;
    }
    Ok(())
}
