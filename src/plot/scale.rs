//! The colour scale, and how weights are written as numbers.

/// How far a weight may leave \[0, 1\] by rounding: one step of bf16 above 1 is 0.0078.
const ROUNDING: f64 = 0.01;

/// A colour as red, green and blue.
pub(super) type Rgb = [u8; 3];

/// The colour of a weight that is not finite: viridis has no grey.
pub(super) const NOT_FINITE: Rgb = [187, 187, 187];

/// What the weights of all panels of a drawing span.
pub(super) struct Extent {
    limit: Option<f64>,
    min: f64,
    max: f64,
    not_finite: usize,
    negative_infinity: bool,
    above: usize,
}

impl Extent {
    /// Of no weights yet; `limit` is where the caller ends the scale.
    pub(super) fn new(limit: Option<f64>) -> Self {
        Self { limit, min: 0.0, max: 0.0, not_finite: 0, negative_infinity: false, above: 0 }
    }

    pub(super) fn add(&mut self, weights: &[f64]) {
        for &w in weights {
            if w.is_finite() {
                self.min = self.min.min(w);
                self.max = self.max.max(w);
                self.above += usize::from(self.limit.is_some_and(|limit| w > limit));
            } else {
                self.not_finite += 1;
                self.negative_infinity |= w == f64::NEG_INFINITY;
            }
        }
    }
}

/// A linear colour scale from `low` to `high`.
pub(super) struct Scale {
    pub(super) low: f64,
    pub(super) high: f64,
    /// The most characters that [`short`] takes for a weight of this scale.
    pub(super) digits: usize,
    pub(super) not_finite: usize,
    /// What a reader has to know beyond the two ends.
    pub(super) notes: Vec<String>,
}

impl Scale {
    pub(super) fn over(extent: &Extent) -> Self {
        let mut notes = Vec::new();
        if extent.max > 1.0 + ROUNDING {
            notes.push(format!("weights reach {}: dropout in training leaves weights above 1", tick(extent.max)));
        }
        if extent.min < -ROUNDING {
            notes.push(format!("weights reach below 0, to {}", tick(extent.min)));
        }
        if let (Some(limit), 1..) = (extent.limit, extent.above) {
            let above = count(extent.above, "weight");
            notes.push(format!("{above} above the scale's end {}", tick(limit)));
        }

        let low = if extent.min < -ROUNDING { extent.min } else { 0.0 };
        let high = extent.limit.unwrap_or(extent.max);
        let sign = if extent.min < 0.0 || extent.negative_infinity { 4 } else { 3 };
        let digits = [extent.min, extent.max].map(|w| short(w).len()).into_iter().fold(sign, usize::max);
        // With no weight but 0 the scale still needs a length.
        Self { low, high: if high > low { high } else { 1.0 }, digits, not_finite: extent.not_finite, notes }
    }

    /// Where a weight lies on the scale, from 0 to 1; none if it is not finite.
    pub(super) fn position(&self, weight: f64) -> Option<f64> {
        // Halved, so that a scale over nearly all of f64 has a finite length.
        let length = self.high / 2.0 - self.low / 2.0;
        let position = if self.low == 0.0 { weight / self.high } else { (weight / 2.0 - self.low / 2.0) / length };
        weight.is_finite().then(|| position.clamp(0.0, 1.0))
    }
}

/// The colour at a position from 0 to 1: viridis, whose lightness grows evenly, also for the colour-blind.
pub(super) fn gradient(position: f64) -> Rgb {
    colorous::VIRIDIS.eval_continuous(position).into_array()
}

/// Black or white, whichever stands out more from `background` (the contrast ratio of WCAG 2.2).
pub(super) fn contrasting(background: Rgb) -> Rgb {
    let [r, g, b] = background.map(|channel| {
        let c = f64::from(channel) / 255.0;
        if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
    });
    let luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
    if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) { [0; 3] } else { [255; 3] }
}

/// A weight in two digits, `.27` or `1.3`; `0` only for exactly 0.
pub(super) fn short(weight: f64) -> String {
    let size = weight.abs();
    if weight.is_nan() {
        String::from("nan")
    } else if size.is_infinite() || weight == 0.0 {
        format!("{}", if weight == 0.0 { 0.0 } else { weight })
    } else if size < 0.995 {
        format!("{weight:.2}").replacen("0.", ".", 1)
    } else if size < 9.95 {
        format!("{weight:.1}")
    } else if size < 999.5 {
        format!("{weight:.0}")
    } else {
        format!("{weight:.0e}")
    }
}

/// A number of the scale in at most three significant digits, `0.813`.
pub(super) fn tick(value: f64) -> String {
    let rounded = format!("{value:.2e}");
    match rounded.parse::<f64>() {
        Ok(v) if v == 0.0 || (1e-4..1e6).contains(&v.abs()) => format!("{v}"),
        _ => rounded,
    }
}

/// `1 head`, `16 heads`.
pub(super) fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
