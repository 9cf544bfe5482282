//! Line charts as SVG and PNG.

use candle_attention::plot::LineChart;
use candle_core::Result;

/// Of each vertical piece of a line in one colour: its left end and its middle.
fn pieces(svg: &str, color: &str) -> Vec<[f64; 2]> {
    let attribute = |rect: &str, name: &str| -> f64 {
        let value = rect.split_once(&format!(" {name}=\"")).and_then(|(_, rest)| rest.split('"').next());
        value.and_then(|value| value.parse().ok()).expect("a number")
    };
    let rects = svg.lines().filter(|line| line.starts_with("<rect ") && line.contains(color));
    rects.map(|rect| [attribute(rect, "x"), attribute(rect, "y") + attribute(rect, "height") / 2.0]).collect()
}

#[test]
fn lines_go_through_their_points() -> Result<()> {
    let chart = LineChart::new("a < b", "step", "loss")
        .with_line("falls", &[[0.0, 4.0], [50.0, 2.0], [100.0, 0.0]])?
        .with_line("stays", &[[0.0, 1.0], [100.0, 1.0]])?;
    let svg = chart.to_svg()?;
    for text in ["a &lt; b", "step", "loss", "falls", "stays", ">4<", ">100<"] {
        assert!(svg.contains(text), "no {text:?}");
    }
    let colors: Vec<_> = ["falls", "stays"].iter().map(|name| color_of(&svg, name)).collect();
    assert_ne!(colors[0], colors[1]);
    let [falls, stays] = [0, 1].map(|line| pieces(&svg, &format!("fill=\"{}\"", colors[line])));
    let (first, last) = (falls[0], falls[falls.len() - 1]);
    let middle = falls[falls.len() / 2];
    assert!(first[0] < middle[0] && middle[0] < last[0] && first[1] < last[1]);
    assert!((middle[1] - (first[1] + last[1]) / 2.0).abs() < 2.0, "{first:?} {middle:?} {last:?}");
    let level = last[1] - (last[1] - first[1]) / 4.0;
    assert!(stays.iter().all(|piece| (piece[1] - level).abs() < 2.0), "{level} {:?}", stays[0]);
    assert!(chart.to_png()?.starts_with(b"\x89PNG\r\n\x1a\n"));
    Ok(())
}

/// The colour in which a line's name is written.
fn color_of(svg: &str, name: &str) -> String {
    let text = svg.lines().find(|line| line.contains(&format!(">{name}<"))).expect("the name");
    text.split_once("fill=\"").and_then(|(_, rest)| rest.split('"').next()).expect("a colour").to_string()
}

#[test]
fn one_point_and_large_numbers_are_drawn() -> Result<()> {
    for points in [&[[3.0, 7.0]][..], &[[3.0, 0.0]], &[[-1e300, -1e300], [1e300, 1e300]], &[[5.0, 1.0], [5.0, 2.0]]] {
        LineChart::new("", "", "").with_line("", points)?.to_png()?;
    }
    Ok(())
}

#[test]
fn what_cannot_be_drawn_is_an_error() {
    let error = |result: Result<LineChart>| {
        result.and_then(|chart| chart.to_svg()).map(drop).expect_err("an error").to_string()
    };
    let chart = || LineChart::new("training", "step", "loss");
    for (result, expected) in [
        (Ok(chart()), "[line_chart] there is no line to draw"),
        (chart().with_line("loss", &[]), "the line \"loss\" has 0 points, expected at least one, all within ±1e300"),
        (chart().with_line("loss", &[[0.0, f64::NAN]]), "expected at least one, all within ±1e300"),
        (chart().with_line("loss", &[[2.0, 1.0], [1.0, 1.0]]), "the line \"loss\" goes from x = 2 back to 1"),
    ] {
        let text = error(result);
        assert!(text.contains(expected), "{text}");
    }
    let unnamed = chart().with_line("loss", &[[0.0, 1.0]]).and_then(|chart| chart.save("loss.pdf"));
    assert!(unnamed.expect_err("an error").to_string().contains("expected svg or png"));
}
