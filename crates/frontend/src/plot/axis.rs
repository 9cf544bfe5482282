//! Numbers along the scales of pictures and charts, and the width of their text.

use super::style::tick;

/// A number along a scale.
pub(super) struct Tick {
    /// The position on the scale, from 0 to 1.
    pub(super) position: f64,
    pub(super) text: String,
}

/// Returns the numbers along a scale: its ends, and round numbers between that are more than `clear` from them.
pub(super) fn ticks(low: f64, high: f64, clear: f64) -> Vec<Tick> {
    let at = |position: f64, value: f64| Tick { position, text: tick(value) };
    let mut ticks = vec![at(0.0, low), at(1.0, high)];
    let length = high - low;
    let magnitude = 10f64.powf((length / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|round| round * magnitude).into_iter().find(|step| length / step <= 5.0);
    if let Some(step) = step.filter(|step| step.is_normal()) {
        let first = (low / step).ceil();
        // At most 6 are between the ends, even if the quotient rounds.
        let values = (0..7).map(|i| (first + f64::from(i)) * step);
        let inner = values.map(|value| at((value - low) / length, value));
        ticks.extend(inner.filter(|tick| tick.position > clear && tick.position < 1.0 - clear));
    }
    ticks
}

/// Returns the width of `columns` terminal columns of the embedded font: each glyph of Hack advances 1233/2048 em.
pub(super) fn text_width(columns: usize, em: i32) -> i32 {
    (columns as f64 * f64::from(em) * 1233.0 / 2048.0).ceil() as i32
}
