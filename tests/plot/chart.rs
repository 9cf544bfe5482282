//! Line charts as SVG and PNG.

use candle_attention::plot::LineChart;
use candle_core::Result;

#[test]
fn line_chart_matches_reviewed_svg() -> Result<()> {
    let chart = LineChart::new("a < b", "step", "loss")
        .with_line("falls", &[[0.0, 4.0], [50.0, 2.0], [100.0, 0.0]])?
        .with_line("stays", &[[0.0, 1.0], [100.0, 1.0]])?;
    crate::assert_reviewed("chart.svg", &chart.to_svg()?);
    assert!(chart.to_png()?.starts_with(b"\x89PNG\r\n\x1a\n"));
    Ok(())
}

#[test]
fn line_chart_of_one_point_or_large_numbers_is_drawn() -> Result<()> {
    for points in [&[[3.0, 7.0]][..], &[[3.0, 0.0]], &[[-1e300, -1e300], [1e300, 1e300]], &[[5.0, 1.0], [5.0, 2.0]]] {
        LineChart::new("", "", "").with_line("", points)?.to_png()?;
    }
    Ok(())
}
