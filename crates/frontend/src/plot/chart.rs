//! A line chart as SVG and PNG, on the canvases of the heat map. All lengths are pixels.

use std::path::Path;

use candle_core::{Result, bail};

use super::axis::{Tick, text_width, ticks};
use super::canvas::{self, Anchor, Canvas, Hack, Point, Rectangle, Size, Style};
use super::picture::{AXIS_NAME, FRAME, TICK, TITLE, WHITE};
use super::save;
use super::style::{Rgb, gradient, safe};

const SIZE: Size = Size { width: 720, height: 420 };
/// The area between the axes.
const AREA: Rectangle = Rectangle { left: 76, top: 52, width: 620, height: 304 };
const GRID: Rgb = [225; 3];
const TICK_LENGTH: i32 = 5;
const LINE_WIDTH: i32 = 2;
/// The space between two names of lines.
const NAME_GAP: i32 = 16;

/// A line chart over a common axis, for example of the loss over the steps of a training. Needs the feature `plot`.
///
/// ```
/// use candle_attention::plot::LineChart;
///
/// let chart = LineChart::new("training", "step", "loss").with_line("loss", &[[0.0, 4.2], [50.0, 3.1], [100.0, 0.4]])?;
/// assert!(chart.to_svg()?.starts_with("<svg "));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct LineChart {
    title: String,
    x_name: String,
    y_name: String,
    lines: Vec<ChartLine>,
}

#[derive(Debug, Clone)]
struct ChartLine {
    name: String,
    points: Vec<[f64; 2]>,
}

/// Numbers along one axis and the pixels that they are drawn at.
struct ChartAxis {
    low: f64,
    high: f64,
    start: i32,
    end: i32,
}

impl ChartAxis {
    /// Makes an axis over the numbers of all lines and `include`.
    fn new(numbers: impl Iterator<Item = f64>, include: f64, start: i32, end: i32) -> Self {
        let mut low = include;
        let mut high = include;
        for number in numbers {
            low = low.min(number);
            high = high.max(number);
        }
        // An axis needs some length, also for one number alone.
        Self { low, high: if high > low { high } else { low + 1.0 }, start, end }
    }

    fn pixel(&self, number: f64) -> f64 {
        self.at((number - self.low) / (self.high - self.low))
    }

    /// Returns the pixel at a share of the axis.
    fn at(&self, share: f64) -> f64 {
        f64::from(self.start) + share * f64::from(self.end - self.start)
    }

    /// Returns the ticks of round numbers along the axis.
    fn ticks(&self) -> Vec<Tick> {
        let clear = 1.5 * f64::from(TICK.em) / f64::from((self.end - self.start).abs());
        ticks(self.low, self.high, clear)
    }
}

impl LineChart {
    /// Makes a chart without lines; the names label its axes.
    pub fn new(title: impl AsRef<str>, x_name: impl AsRef<str>, y_name: impl AsRef<str>) -> Self {
        let [title, x_name, y_name] = [title.as_ref(), x_name.as_ref(), y_name.as_ref()].map(safe);
        Self { title, x_name, y_name, lines: Vec::new() }
    }

    /// Adds a line through points \[x, y\] in the order of their x.
    ///
    /// # Errors
    /// If there are no points, the points are not in order, or a number is not finite or beyond ±1e300.
    pub fn with_line(mut self, name: impl AsRef<str>, points: &[[f64; 2]]) -> Result<Self> {
        let name = safe(name.as_ref());
        if points.is_empty() || points.iter().flatten().any(|number| !number.is_finite() || number.abs() > 1e300) {
            let count = points.len();
            bail!("[line_chart] the line {name:?} has {count} points, expected at least one, all within ±1e300")
        }
        if let Some(pair) = points.windows(2).find(|pair| pair[0][0] > pair[1][0]) {
            bail!("[line_chart] the line {name:?} goes from x = {} back to {}", pair[0][0], pair[1][0])
        }
        self.lines.push(ChartLine { name, points: points.to_vec() });
        Ok(self)
    }

    /// Writes the chart to `path` as SVG or PNG, by the extension.
    ///
    /// # Errors
    /// If the extension is neither, the file cannot be written, or there is no line.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        save("line_chart", path.as_ref(), || self.to_svg(), || self.to_png())
    }

    /// Draws the chart as an SVG document of 720 x 420 pixels.
    ///
    /// # Errors
    /// If there is no line.
    pub fn to_svg(&self) -> Result<String> {
        canvas::to_svg(SIZE, |svg| self.draw(svg))
    }

    /// Draws the chart as a PNG file, the same picture as [`to_svg`](Self::to_svg).
    ///
    /// # Errors
    /// If there is no line.
    pub fn to_png(&self) -> Result<Vec<u8>> {
        canvas::to_png(Hack::new()?, SIZE, |bitmap| self.draw(bitmap))
    }

    fn draw(&self, canvas: &mut dyn Canvas) -> Result<()> {
        let Some(first) = self.lines.first() else { bail!("[line_chart] there is no line to draw") };
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let Rectangle { left, top, width, height } = AREA;
        let right = left + width;
        let bottom = top + height;
        let x_axis = ChartAxis::new(points().map(|point| point[0]), first.points[0][0], left, right);
        let y_axis = ChartAxis::new(points().map(|point| point[1]), 0.0, bottom, top);

        canvas.rect(Rectangle { left: 0, top: 0, width: SIZE.width, height: SIZE.height }, WHITE);
        canvas.text(&self.title, Point { x: SIZE.width / 2, y: TITLE.em }, TITLE);
        for tick in y_axis.ticks() {
            let y = y_axis.at(tick.position).round() as i32;
            canvas.rect(Rectangle { left, top: y, width: right - left, height: 1 }, GRID);
            canvas.text(&tick.text, Point { x: left - 2 * TICK_LENGTH, y }, Style { anchor: Anchor::End, ..TICK });
        }
        for tick in x_axis.ticks() {
            let x = x_axis.at(tick.position).round() as i32;
            canvas.rect(Rectangle { left: x, top: bottom, width: 1, height: TICK_LENGTH }, FRAME);
            canvas.text(
                &tick.text,
                Point { x, y: bottom + TICK_LENGTH + TICK.em },
                Style { anchor: Anchor::Middle, ..TICK },
            );
        }
        canvas.rect(Rectangle { left, top, width: 1, height: bottom - top }, FRAME);
        canvas.rect(Rectangle { left, top: bottom, width: right - left, height: 1 }, FRAME);
        canvas.text(&self.x_name, Point { x: (left + right) / 2, y: SIZE.height - AXIS_NAME.em }, AXIS_NAME);
        canvas.text(
            &self.y_name,
            Point { x: AXIS_NAME.em + 4, y: (top + bottom) / 2 },
            Style { vertical: true, ..AXIS_NAME },
        );

        let mut name_end = right;
        for (index, line) in self.lines.iter().enumerate().rev() {
            let color = gradient(0.25 + 0.6 * index as f64 / self.lines.len() as f64);
            line.draw(canvas, &x_axis, &y_axis, color);
            canvas.text(
                &line.name,
                Point { x: name_end, y: top - TICK.em },
                Style { anchor: Anchor::End, color, ..TICK },
            );
            name_end -= text_width(line.name.chars().count(), TICK.em) + NAME_GAP;
        }
        Ok(())
    }
}

impl ChartLine {
    /// Draws the part of the line that passes through each column of pixels.
    fn draw(&self, canvas: &mut dyn Canvas, x_axis: &ChartAxis, y_axis: &ChartAxis, color: Rgb) {
        let mut column = |x: i32, from: f64, to: f64| {
            let top = from.min(to).round() as i32;
            let bottom = from.max(to).round() as i32;
            canvas.rect(
                Rectangle { left: x, top: top - LINE_WIDTH / 2, width: LINE_WIDTH, height: bottom - top + LINE_WIDTH },
                color,
            );
        };
        if let [point] = self.points.as_slice() {
            let y = y_axis.pixel(point[1]);
            column(x_axis.pixel(point[0]).round() as i32, y, y);
        }
        for pair in self.points.windows(2) {
            let x0 = x_axis.pixel(pair[0][0]);
            let y0 = y_axis.pixel(pair[0][1]);
            let x1 = x_axis.pixel(pair[1][0]);
            let y1 = y_axis.pixel(pair[1][1]);
            let at = |x: f64| if x1 > x0 { y0 + (y1 - y0) * ((x - x0) / (x1 - x0)).clamp(0.0, 1.0) } else { y1 };
            for x in x0.round() as i32..=x1.round() as i32 {
                let middle = f64::from(x);
                column(x, if x1 > x0 { at(middle - 0.5) } else { y0 }, at(middle + 0.5));
            }
        }
    }
}
