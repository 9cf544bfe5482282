//! Heat maps as SVG and PNG.

use std::collections::HashSet;
use std::io::Cursor;

use candle_attention::plot::LineChart;

use super::*;

/// An element `<rect>` of an SVG: left, top, width, height, fill.
#[derive(Debug, Clone, PartialEq)]
struct Rect {
    x: usize,
    y: usize,
    w: usize,
    h: usize,
    fill: String,
}

fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    element.split_once(&format!(" {name}=\""))?.1.split('"').next()
}

fn number(element: &str, name: &str) -> usize {
    attribute(element, name).and_then(|value| value.parse().ok()).unwrap_or(usize::MAX)
}

fn rects(svg: &str) -> Vec<Rect> {
    let elements = svg.lines().filter(|line| line.starts_with("<rect "));
    elements
        .map(|line| Rect {
            x: number(line, "x"),
            y: number(line, "y"),
            w: number(line, "width"),
            h: number(line, "height"),
            fill: attribute(line, "fill").unwrap_or_default().to_string(),
        })
        .collect()
}

/// Returns the cells of all panels in order: rectangles of the size of the first one after the background and the first
/// frame.
fn cells(svg: &str) -> Vec<Rect> {
    let rects = rects(svg);
    rects.iter().filter(|rect| (rect.w, rect.h) == (rects[2].w, rects[2].h)).cloned().collect()
}

/// Returns the `<text>` elements as they are written in the file.
fn texts(svg: &str) -> Vec<&str> {
    svg.split("<text ").skip(1).filter_map(|text| Some(text.split_once('>')?.1.split_once("</text>")?.0)).collect()
}

fn size(svg: &str) -> (usize, usize) {
    let root = svg.lines().next().unwrap_or_default();
    (number(root, "width"), number(root, "height"))
}

struct Pixels {
    size: (usize, usize),
    rgb: Vec<u8>,
}

impl Pixels {
    fn decode(png: &[u8]) -> Self {
        let mut reader = png::Decoder::new(Cursor::new(png)).read_info().unwrap();
        let mut rgb = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut rgb).unwrap();
        assert_eq!((info.color_type, info.bit_depth), (png::ColorType::Rgb, png::BitDepth::Eight));
        Self { size: (info.width as usize, info.height as usize), rgb }
    }

    fn at(&self, x: usize, y: usize) -> String {
        let start = 3 * (y * self.size.0 + x);
        self.rgb[start..start + 3].iter().fold(String::from("#"), |hex, byte| format!("{hex}{byte:02X}"))
    }
}

/// Returns the message, without the backtrace that candle adds if the environment requests one.
fn error<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => String::from("no error"),
        Err(error) => error.to_string().lines().next().unwrap_or_default().to_string(),
    }
}

/// Compares with `maps/*.svg`, which `UPDATE_EXPECT=1 cargo test --features plot --test plot` writes. Look at them in a
/// browser.
#[test]
fn heat_map_svg_matches_reviewed_files() -> Result<()> {
    let heads = HeatMap::new(&two_heads()?)?.with_tokens(&["<pad>", "\"&'\x1b"])?.with_title("a < b & c");
    let nan = HeatMap::new(&Tensor::new(&[[f32::NAN, 1.0]], &Device::Cpu)?)?;
    assert_reviewed("heads.svg", &heads.to_svg(Heads::All)?);
    assert_reviewed("not_finite.svg", &nan.to_svg(Heads::All)?);
    Ok(())
}

#[test]
fn heat_map_png_has_colors_of_svg() -> Result<()> {
    for (heads, queries, keys) in [(16, 6, 6), (5, 12, 3), (8, 40, 40), (3, 1, 70)] {
        let map = HeatMap::new(&many(heads, queries, keys)?)?.with_title("A title");
        let svg = map.to_svg(Heads::All)?;
        let png = Pixels::decode(&map.to_png(Heads::All)?);
        assert_eq!(png.size, size(&svg));
        let cells = cells(&svg);
        assert_eq!(cells.len(), heads * queries * keys);
        for cell in &cells {
            // Numbers are in the middle of a cell.
            assert_eq!(png.at(cell.x, cell.y), cell.fill, "{cell:?}");
            assert_eq!(png.at(cell.x + cell.w - 1, cell.y + cell.h - 1), cell.fill, "{cell:?}");
        }
    }
    Ok(())
}

#[test]
fn heat_map_png_contains_labels() -> Result<()> {
    let weights = many(1, 6, 6)?;
    let map = |token: &str| HeatMap::new(&weights)?.with_tokens(&[token; 6]);
    let svg = map("hello")?.to_svg(Heads::All)?;
    let [hello, jello] =
        [map("hello")?, map("jello")?].map(|map| map.to_png(Heads::All).map(|png| Pixels::decode(&png)));
    let hello = hello?;
    let jello = jello?;
    let first = cells(&svg)[0].clone();
    let dark = |png: &Pixels, rows: std::ops::Range<usize>| {
        rows.map(|y| (0..first.x - 1).filter(|&x| png.at(x, y).as_str() < "#80").count()).sum::<usize>()
    };
    for row in 0..6 {
        let rows = first.y + row * first.h..first.y + (row + 1) * first.h;
        assert!(dark(&hello, rows.clone()) > 30, "row {row} has no label");
    }
    assert_ne!(hello.rgb, jello.rgb);
    Ok(())
}

#[test]
fn heat_map_png_notes_characters_missing_in_font() -> Result<()> {
    let map = |token: &str| HeatMap::new(&many(1, 2, 2)?)?.with_tokens(&[token; 2]);
    for covered in ["Ġthe", "▁мир", "␣naïve…", "◌", "α→β"] {
        let map = map(covered)?;
        assert_eq!(Pixels::decode(&map.to_png(Heads::All)?).size, size(&map.to_svg(Heads::All)?), "{covered}");
    }
    let map = map("你好")?;
    let svg = map.to_svg(Heads::All)?;
    assert_eq!(texts(&svg).iter().filter(|text| **text == "你好").count(), 4);
    assert!(Pixels::decode(&map.to_png(Heads::All)?).size.1 > size(&svg).1);
    Ok(())
}

/// Checks that nothing is outside of the picture, that no panel overlaps another, and that the grid is nearly square,
/// with few empty cells.
#[test]
fn heat_map_sizes_and_grids_stay_within_bounds() -> Result<()> {
    let grids =
        [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 3), (8, 4), (9, 3), (12, 4), (16, 4), (32, 8), (64, 8)];
    for (heads, columns) in grids {
        for (queries, keys) in [(6, 6), (1, 64), (40, 3), (64, 64)] {
            let tokens: Vec<_> = (0..keys).map(|i| format!("token{i}")).collect();
            let map = HeatMap::new(&many(heads, queries, keys)?)?.with_key_tokens(&tokens)?;
            let svg = map.to_svg(Heads::All)?;
            let (w, h) = size(&svg);
            assert!((200..=4000).contains(&w) && (150..=4000).contains(&h), "{heads} x {queries} x {keys}: {w} x {h}");
            let cells = cells(&svg);
            assert_eq!(cells.len(), heads * queries * keys);
            assert!(rects(&svg).iter().all(|rect| rect.x + rect.w <= w && rect.y + rect.h <= h));
            let corners: HashSet<_> = cells.iter().map(|cell| (cell.x, cell.y)).collect();
            assert_eq!(corners.len(), cells.len());
        }
        let bare = HeatMap::new(&many(heads, 6, 6)?)?.to_svg(Heads::All)?;
        let lefts: HashSet<_> = cells(&bare).iter().step_by(36).map(|cell| cell.x).collect();
        assert_eq!(lefts.len(), columns, "{heads} heads");
    }
    Ok(())
}

#[test]
fn heat_map_labels_of_small_cells_are_thinned_with_note() -> Result<()> {
    let tokens: Vec<_> = (0..64).map(|i| format!("t{i}")).collect();
    let weights = many(64, 64, 64)?;
    let svg = HeatMap::new(&weights)?.with_tokens(&tokens)?.to_svg(Heads::All)?;
    let texts = texts(&svg);
    assert!(texts.contains(&"queries: 1 token in 2 is labelled") && texts.contains(&"keys: 1 token in 2 is labelled"));
    assert!(texts.contains(&"t0") && !texts.contains(&"t1") && texts.contains(&"t62"));
    Ok(())
}

#[test]
fn pictures_that_cannot_be_drawn_are_rejected() -> Result<()> {
    let wide = HeatMap::new(&many(1, 1, 4100)?)?;
    let fine = HeatMap::new(&many(1, 600, 600)?)?;
    let chart = || LineChart::new("training", "step", "loss");
    let line = |points: &[[f64; 2]]| chart().with_line("loss", points).map(drop);
    let outcomes = [
        wide.to_png(Heads::All).map(drop),
        wide.to_svg(Heads::All).map(drop),
        fine.to_svg(Heads::Mean).map(drop),
        fine.to_png(Heads::One(1)).map(drop),
        fine.to_svg(Heads::One(1)).map(drop),
        fine.save("map.jpg", Heads::All),
        fine.save("map", Heads::All),
        chart().to_svg().map(drop),
        line(&[]),
        line(&[[0.0, f64::NAN]]),
        line(&[[2.0, 1.0], [1.0, 1.0]]),
        chart().with_line("loss", &[[0.0, 1.0]])?.save("loss.pdf"),
    ];
    assert_reviewed("errors.txt", &outcomes.map(|outcome| error(outcome) + "\n").concat());
    Ok(())
}

#[test]
fn heat_map_save_chooses_format_by_extension() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let map = HeatMap::new(&two_heads()?)?;
    let path = |name: &str| folder.path().join(name);
    map.save(path("map.PNG"), Heads::All)?;
    assert_eq!(std::fs::read(path("map.PNG"))?, map.to_png(Heads::All)?);
    map.save(path("map.svg"), Heads::Mean)?;
    assert_eq!(std::fs::read_to_string(path("map.svg"))?, map.to_svg(Heads::Mean)?);
    let missing = path("no/map.svg");
    assert!(
        error(map.save(&missing, Heads::All)).starts_with(&format!("[heat_map] cannot write {}: ", missing.display()))
    );
    Ok(())
}
