//! Line charts as SVG and PNG.

use candle_attention::plot::LineChart;
use candle_core::Result;

#[test]
fn lines_go_through_their_points() -> Result<()> {
    let chart = LineChart::new("a < b", "step", "loss")
        .with_line("falls", &[[0.0, 4.0], [50.0, 2.0], [100.0, 0.0]])?
        .with_line("stays", &[[0.0, 1.0], [100.0, 1.0]])?;
    crate::assert_reviewed("chart.svg", &chart.to_svg()?);
    assert!(chart.to_png()?.starts_with(b"\x89PNG\r\n\x1a\n"));
    Ok(())
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
