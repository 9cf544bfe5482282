//! Heat maps of attention weights.

#[cfg(feature = "plot")]
mod chart;
#[cfg(feature = "plot")]
mod image;

use candle_attention::plot::{Color, Heads, HeatMap, TerminalOptions};
use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;
use unicode_width::UnicodeWidthStr;

const PLAIN: TerminalOptions = TerminalOptions { color: Color::None, max_width: None, max_rows: None };

const HOSTILE: [&str; 11] =
    ["a\nb", "\x1b[31m", "\u{202e}abc", "Ġthe", "▁of", " in ", "", "\\n", "\u{301}x", "e\u{301}", "\u{9b}2J"];

/// Returns weights (2, 2, 2) whose numbers are exact in every float dtype.
fn two_heads() -> Result<Tensor> {
    Tensor::new(&[[[1f32, 0.0], [0.25, 0.75]], [[0.5, 0.5], [0.25, 0.75]]], &Device::Cpu)
}

/// Returns weights (heads, queries, keys), each row a distribution with a different peak.
fn many(heads: usize, queries: usize, keys: usize) -> Result<Tensor> {
    let count = heads * queries * keys;
    let scores = (0..count).map(|i| ((i * 7919 + i / keys * 31) % 101) as f32 / 12.0);
    let scores = Tensor::from_iter(scores, &Device::Cpu)?.reshape((heads, queries, keys))?;
    candle_nn::ops::softmax_last_dim(&scores)
}

/// Returns the lines of the only panel: the header and the rows.
fn matrix(text: &str, rows: usize) -> Vec<&str> {
    text.lines().skip_while(|line| !line.starts_with("mean of")).skip(1).take(rows + 1).collect()
}

/// Checks that a program that draws pictures compiles without the feature, and that the error names it.
#[cfg(not(feature = "plot"))]
#[test]
fn pictures_without_plot_feature_are_rejected() -> Result<()> {
    let map = HeatMap::new(&two_heads()?)?;
    let file = std::env::temp_dir().join("no_picture.svg");
    for error in [
        map.to_svg(Heads::All).expect_err("no feature"),
        map.to_png(Heads::All).expect_err("no feature"),
        map.save(&file, Heads::All).expect_err("no feature"),
    ] {
        assert!(error.to_string().starts_with("[heat_map] pictures need the feature `plot`"), "{error}");
    }
    assert!(!file.exists());
    Ok(())
}

/// Compares with the files of `maps/`, which `UPDATE_EXPECT=1 cargo test --test plot` writes.
#[test]
fn heat_map_text_matches_reviewed_files() -> Result<()> {
    let two = HeatMap::new(&two_heads()?)?;
    let small = two.clone().with_tokens(&["hello", "world"])?.with_title("Layer 0");
    let early = two.clone().with_scale_max(0.5)?;
    let zero = HeatMap::new(&Tensor::new(&[[0.0f32, 0.001, 0.999]], &Device::Cpu)?)?;
    let outside = Tensor::new(&[[1.25f32, -0.5], [f32::NAN, f32::NEG_INFINITY]], &Device::Cpu)?;
    let rounding = Tensor::new(&[[1.000_001f32, -1e-7]], &Device::Cpu)?;
    let outside = HeatMap::new(&outside)?;
    let rounding = HeatMap::new(&rounding)?;
    let large = HeatMap::new(&many(1, 64, 50)?)?;
    let hostile = HeatMap::new(&many(1, 11, 11)?)?.with_tokens(&HOSTILE)?.with_title("t\x07\r\n");
    let long = HeatMap::new(&many(1, 2, 2)?)?.with_tokens(&["你好世界你好世界你好", "supercalifragilistic"])?;
    let cut = TerminalOptions { max_width: Some(34), max_rows: Some(4), ..PLAIN };
    let of = |color| TerminalOptions { color, ..PLAIN };
    for (file, map, heads, options) in [
        ("labelled", &small, Heads::Mean, &PLAIN),
        ("all_heads_share_one_scale", &two, Heads::All, &PLAIN),
        ("one_head_on_its_own_scale", &two, Heads::One(1), &PLAIN),
        ("colors", &two, Heads::One(0), &of(Color::TrueColor)),
        ("256_colors", &two, Heads::One(0), &of(Color::Ansi256)),
        ("a_zero_and_a_small_weight", &zero, Heads::Mean, &PLAIN),
        ("a_scale_that_ends_early", &early, Heads::All, &PLAIN),
        ("weights_outside_of_0_to_1", &outside, Heads::Mean, &PLAIN),
        ("weights_that_rounding_leaves_outside", &rounding, Heads::Mean, &PLAIN),
        ("keys_and_queries_that_do_not_fit", &large, Heads::Mean, &cut),
        ("all_keys_and_queries", &large, Heads::Mean, &PLAIN),
        ("tokens_that_would_break_out", &hostile, Heads::Mean, &PLAIN),
        ("long_and_wide_labels", &long, Heads::Mean, &PLAIN),
    ] {
        assert_reviewed(&format!("{file}.txt"), &map.to_terminal(heads, options)?);
    }
    Ok(())
}

#[track_caller]
fn assert_reviewed(file: &str, found: &str) {
    expect_test::expect_file![format!("maps/{file}")].assert_eq(found);
}

#[test]
fn heat_map_of_any_dtype_strides_and_batch_of_one_is_equal() -> Result<()> {
    let weights = two_heads()?;
    let expected = HeatMap::new(&weights)?.to_terminal(Heads::All, &PLAIN)?;
    for dtype in [DType::F16, DType::BF16, DType::F64, DType::F8E4M3] {
        assert_eq!(HeatMap::new(&weights.to_dtype(dtype)?)?.to_terminal(Heads::All, &PLAIN)?, expected, "{dtype:?}");
    }
    let strided = weights.transpose(0, 2)?.contiguous()?.transpose(0, 2)?;
    assert!(!strided.is_contiguous());
    assert_eq!(HeatMap::new(&strided)?.to_terminal(Heads::All, &PLAIN)?, expected);
    assert_eq!(HeatMap::new(&strided.unsqueeze(0)?)?.to_terminal(Heads::All, &PLAIN)?, expected);
    let batch = Tensor::stack(&[weights.zeros_like()?, weights], 0)?;
    assert_eq!(HeatMap::from_batch(&batch, 1)?.to_terminal(Heads::All, &PLAIN)?, expected);
    Ok(())
}

proptest! {
    #[test]
    fn heat_map_lines_are_equally_wide_and_within_limit(
        tokens in prop::collection::vec(any::<String>(), 1..12),
        max_width in prop::option::of(16usize..90),
        max_rows in prop::option::of(1usize..12),
    ) {
        let n = tokens.len();
        let options = TerminalOptions { max_width, max_rows, ..PLAIN };
        let map = HeatMap::new(&many(1, n, n).unwrap()).unwrap().with_tokens(&tokens).unwrap();
        let text = map.to_terminal(Heads::Mean, &options).unwrap();
        let rows = max_rows.map_or(n, |max_rows| if max_rows < n { max_rows + 1 } else { n });
        let lines = matrix(&text, rows);
        prop_assert_eq!(lines.len(), rows + 1);
        for line in &lines {
            prop_assert_eq!(line.width(), lines[0].width(), "{}", text);
        }
        prop_assert!(!text.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'), "{:?}", text);
        for line in text.lines() {
            prop_assert!(max_width.is_none_or(|max_width| line.width() <= max_width), "{}", text);
        }
    }
}

/// Checks the least width. tests/errors has the error for one column less.
#[test]
fn heat_map_of_least_width_has_one_key() -> Result<()> {
    let map = HeatMap::new(&many(1, 2, 2)?)?.with_tokens(&["hello", "world"])?;
    let narrow = |max_width| map.to_terminal(Heads::Mean, &TerminalOptions { max_width: Some(max_width), ..PLAIN });
    assert!(narrow(10).is_err() && narrow(11).is_ok());
    Ok(())
}

#[test]
fn heat_map_of_extreme_weights_is_drawn() -> Result<()> {
    for row in [[0.0, 0.0], [f64::MAX, f64::MIN], [5e-324, 0.0], [f64::NAN, f64::NAN], [1e10, 3e5], [-1.0, -2.0]] {
        let map = HeatMap::new(&Tensor::new(&[row], &Device::Cpu)?)?;
        for color in [Color::None, Color::Ansi256, Color::TrueColor] {
            let text = map.to_terminal(Heads::All, &TerminalOptions { color, ..PLAIN })?;
            assert!(text.starts_with("head 0 of 1\n"), "{row:?}");
        }
        #[cfg(feature = "plot")]
        assert!(map.to_svg(Heads::All)?.contains("<text") && !map.to_png(Heads::All)?.is_empty(), "{row:?}");
    }
    Ok(())
}
