//! Pages of attention weights. `browser.test.mjs`, which `ci/page.sh` runs, opens those that
//! `page_files_are_written_for_the_browser` writes.

#[path = "../common/mod.rs"]
mod common;

use std::{env, path::PathBuf};

use candle_attention::plot::Page;
use candle_attention::*;
use candle_core::{DType, Device, Result, Tensor};
use common::error_text;
use serde_json::json;

const CPU: Device = Device::Cpu;
/// Tokens of several scripts, and what could harm a page or a reader.
const TOKENS: [&str; 12] = [
    "[CLS]",
    "</script>",
    "<img src=x onerror=alert(1)>",
    " the",
    "cat",
    "שלום",
    "سلام",
    "猫",
    "🙂",
    "a\u{202e}b",
    "\u{1b}[0m\n",
    "",
];

/// Draws numbers from -1 to 1, the same on every machine.
fn draw(seed: usize, shape: &[usize]) -> Result<Tensor> {
    let count: usize = shape.iter().product();
    let numbers = (0..count).map(|i| ((i * 7919 + seed * 104_729 + i / 7 * 31) % 2003) as f32 / 1001.0 - 1.0);
    Tensor::from_iter(numbers, &CPU)?.reshape(shape)
}

/// Computes statistics of heads, and the weights of the reference path (H, T_q, T_kv).
fn attend(
    seed: usize,
    [heads, queries, keys]: [usize; 3],
    mask: &AttentionMask,
    wanted: &StatisticsOptions,
) -> Result<(AttentionStatistics, Tensor)> {
    let q = (draw(seed, &[1, heads, queries, 8])? * 4.0)?;
    let k = draw(seed + 1, &[1, heads, keys, 8])?;
    let options = SdpaOptions::default();
    let reference = options.clone().with_backend(Backend::Reference);
    let weights = scaled_dot_product_attention_with_weights(&q, &k, &k, mask, &reference)?.weights;
    let (_, found) = scaled_dot_product_attention_with_statistics(&q, &k, &k, mask, &options, wanted)?;
    Ok((found, weights.squeeze(0)?))
}

fn top(keys: usize) -> StatisticsOptions {
    StatisticsOptions::default().with_top_keys(keys)
}

/// Returns statistics of this size without attention: (1, H, T, 8), each query's keys spread over earlier ones.
fn synthetic(heads: usize, len: usize) -> Result<AttentionStatistics> {
    let rows = || (0..heads * len).map(|row| (row / len, row % len));
    let keys = rows().flat_map(|(head, query)| (0..8).map(move |i| ((query * i / 8 + head * i) % len) as u32));
    let weights = rows().flat_map(|_| (0..8).map(|i| 0.5f32 / (1 << i) as f32));
    Ok(AttentionStatistics {
        top_keys: Tensor::from_iter(keys, &CPU)?.reshape((1, heads, len, 8))?,
        top_weights: Tensor::from_iter(weights, &CPU)?.reshape((1, heads, len, 8))?,
        entropy: Tensor::ones((1, heads, len), DType::F32, &CPU)?,
        key_weight_sums: Tensor::ones((1, heads, len), DType::F32, &CPU)?,
        weights: None,
    })
}

fn synthetic_page(layers: usize, heads: usize, len: usize) -> Result<Page> {
    let tokens: Vec<_> = (0..len).map(|i| format!("token{}", i * 7919 % 1000)).collect();
    let statistics = synthetic(heads, len)?;
    let page = Page::new("synthetic").with_tokens(&tokens)?;
    (0..layers).try_fold(page, |page, layer| page.with_layer(format!("layers.{layer}"), &statistics, 0))
}

fn html(page: &Page) -> Result<String> {
    let mut bytes = Vec::new();
    page.write_to(&mut bytes)?;
    Ok(String::from_utf8(bytes).expect("UTF-8"))
}

/// Returns a page with two layers of three heads over [`TOKENS`], the first with all weights, and the weights of the
/// reference path.
fn hostile() -> Result<(Page, serde_json::Value)> {
    let len = TOKENS.len();
    let mut page = Page::new("Heads & <script>alert(1)</script>").with_tokens(&TOKENS)?;
    let mut expected = Vec::new();
    for (layer, wanted) in [top(4).with_weights_of(0..len, 0..len), top(4)].iter().enumerate() {
        let (found, weights) = attend(layer, [3, len, len], &AttentionMask::causal(), wanted)?;
        page = page.with_layer(["first", "<b>second</b>"][layer], &found, 0)?;
        expected.push(json!({
            "weights": weights.to_vec3::<f32>()?,
            "entropy": found.entropy.get(0)?.to_vec2::<f32>()?,
            "key_weight_sums": weights.sum(1)?.to_vec2::<f32>()?,
        }));
    }
    Ok((page, json!(expected)))
}

/// Returns a PNG file of a gradient.
fn png() -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, 40, 32);
    encoder.set_color(png::ColorType::Rgb);
    let pixels: Vec<_> = (0..40 * 32u32).flat_map(|i| [(i % 40 * 6) as u8, (i / 40 * 7) as u8, 128]).collect();
    encoder.write_header().and_then(|mut file| file.write_image_data(&pixels)).expect("a picture");
    bytes
}

#[test]
fn page_files_are_written_for_the_browser() -> Result<()> {
    let folder = PathBuf::from(env::var_os("PAGES").unwrap_or(concat!(env!("CARGO_TARGET_TMPDIR"), "/page").into()));
    std::fs::create_dir_all(&folder)?;
    let write = |name: &str, page: Page| page.write(folder.join(name).with_extension("html"));
    let of = |shape: [usize; 3], mask: AttentionMask, wanted| {
        Page::new("page").with_layer("", &attend(5, shape, &mask, &wanted)?.0, 0)
    };

    let (page, expected) = hostile()?;
    write("hostile", page)?;
    std::fs::write(folder.join("hostile.json"), expected.to_string())?;
    write("cross", of([2, 3, 7], AttentionMask::none(), top(3))?.with_query_tokens(&["a", "b", "c"])?)?;
    write("one", of([1, 1, 1], AttentionMask::none(), top(8))?.with_tokens(&["only"])?)?;
    write("none", of([2, 0, 0], AttentionMask::none(), top(8))?)?;
    let nothing = AttentionMask::none().with_valid_lens(vec![0]);
    write("hidden", of([2, 4, 4], nothing, top(2))?)?;
    let mut not_finite = synthetic(1, 16)?;
    not_finite.top_weights = (not_finite.top_weights * f64::NAN)?;
    write("not_finite", Page::new("page").with_layer("", &not_finite, 0)?)?;
    let all = top(8).with_weights_of(0..21, 0..21);
    write("picture", of([2, 21, 21], AttentionMask::none(), all)?.with_picture(&png(), [4, 5], 1)?)?;
    write("large", synthetic_page(30, 9, 1024)?)?;
    write("long", synthetic_page(12, 12, 4096)?)
}

#[test]
fn page_size_stays_below_limit() -> Result<()> {
    for (layers, heads, len, most) in [(30, 9, 1024, 25), (12, 12, 4096, 40), (6, 12, 512, 5)] {
        let size = html(&synthetic_page(layers, heads, len)?)?.len();
        println!("{layers} x {heads} heads, {len} tokens: {size} bytes");
        assert!(size < most * 1_000_000, "{layers} x {heads} heads, {len} tokens: {size} bytes");
    }
    Ok(())
}

#[test]
fn page_escapes_texts_of_users() -> Result<()> {
    let page = html(&hostile()?.0)?;
    assert!(page.contains("<title>Heads &amp; &lt;script>alert(1)&lt;/script></title>"), "{}", &page[..600]);
    assert_eq!(page.matches("</script>").count(), 4, "data, two layers and the script");
    for text in ["<img src=x", "alert(1)</script>", "\u{202e}", "\u{1b}", "<b>"] {
        assert!(!page.contains(text), "{text:?}");
    }
    for text in [r"\u003c/script>", "שלום", r"a\\u{202e}b", r"\\u{1b}[0m\\n", "␣the"] {
        assert!(page.contains(text), "{text:?}");
    }
    Ok(())
}

/// Compares errors with `errors.txt`, which `UPDATE_EXPECT=1 cargo test --features plot --test page` writes.
#[test]
fn page_of_statistics_that_do_not_fit_is_rejected() -> Result<()> {
    let good = synthetic(2, 6)?;
    let new = || Page::new("");
    let page = || Page::new("").with_layer("l", &good, 0);
    let mut wrong: [_; 9] = std::array::from_fn(|_| good.clone());
    wrong[0].top_keys = good.top_keys.to_dtype(DType::I64)?;
    wrong[1].top_keys = (&good.top_keys + 1.0)?;
    wrong[2].top_keys = good.entropy.get(0)?;
    wrong[3].top_keys = good.top_keys.narrow(3, 0, 0)?;
    wrong[4].top_weights = good.top_keys.clone();
    wrong[5].top_weights = (&good.top_weights * 3.0)?;
    wrong[6].entropy = good.entropy.narrow(2, 0, 5)?;
    wrong[7].key_weight_sums = good.key_weight_sums.narrow(1, 0, 1)?;
    wrong[8].weights = Some(draw(0, &[1, 2, 3, 6])?);
    let outcomes = [
        new().write_to(Vec::new()).map(|()| new()),
        new().with_layer("l", &good, 1),
        page()?.with_layer("m", &synthetic(3, 6)?, 0),
        page()?.with_tokens(&["a"]),
        new().with_key_tokens(&["a"; 7])?.with_layer("l", &good, 0),
        page()?.with_picture(b"GIF89a", [2, 3], 0),
        page()?.with_picture(&png(), [0, 3], 0),
        page()?.with_picture(&png(), [2, 3], 1),
    ];
    let outcomes = outcomes.into_iter().chain(wrong.iter().map(|statistics| new().with_layer("l", statistics, 0)));
    let said: String = outcomes.map(|outcome| error_text(outcome) + "\n").collect();
    expect_test::expect_file!["errors.txt"].assert_eq(&said);
    assert!(error_text(page()?.write("/")).starts_with("[page] cannot write /: "));
    Ok(())
}
