//! Planes of numbers in another size, as PyTorch's `interpolate` gives them.

/// How pixels between others come about.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Filter {
    /// The parameter of the cubic polynomial; a triangle without it.
    pub cubic: Option<f32>,
    /// Whether a pixel of a smaller picture is the mean over all that it covers.
    pub antialias: bool,
}

/// What Pillow and torchvision call bilinear and bicubic, which make pictures smaller.
pub const BILINEAR: Filter = Filter { cubic: None, antialias: true };
pub const BICUBIC: Filter = Filter { cubic: Some(-0.5), antialias: true };

impl Filter {
    /// How far from its middle a pixel counts.
    fn radius(self) -> f32 {
        if self.cubic.is_some() { 2.0 } else { 1.0 }
    }

    fn weight(self, distance: f32) -> f32 {
        let x = distance.abs();
        match self.cubic {
            None => (1.0 - x).max(0.0),
            Some(a) if x < 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            Some(a) if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * a,
            Some(_) => 0.0,
        }
    }

    /// The entries of a row of `from` that make each of `to`, and their weights.
    fn taps(self, from: usize, to: usize) -> Vec<Vec<(usize, f32)>> {
        let scale = from as f32 / to as f32;
        let stretch = if self.antialias { scale.max(1.0) } else { 1.0 };
        let of = |i: usize| {
            let middle = (i as f32 + 0.5) * scale - 0.5;
            let (first, last) = (middle - self.radius() * stretch, middle + self.radius() * stretch);
            let near = first.ceil() as i64..=last.floor() as i64;
            let mut taps: Vec<_> = near.map(|j| (j, self.weight((j as f32 - middle) / stretch))).collect();
            if self.antialias {
                // What lies outside counts for nothing, and the others for more.
                taps.retain(|(j, _)| (0..from as i64).contains(j));
                let sum: f32 = taps.iter().map(|(_, weight)| weight).sum();
                taps.iter_mut().for_each(|(_, weight)| *weight /= sum);
            }
            taps.into_iter().map(|(j, weight)| (j.clamp(0, from as i64 - 1) as usize, weight)).collect()
        };
        (0..to).map(of).collect()
    }
}

/// Rows and columns of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub rows: usize,
    pub columns: usize,
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} x {}", self.rows, self.columns)
    }
}

/// A plane in another size. Neither size is 0.
pub fn resample(plane: &[f32], from: Size, to: Size, filter: Filter) -> Vec<f32> {
    let sum = |taps: &[(usize, f32)], at: &dyn Fn(usize) -> f32| taps.iter().map(|&(j, weight)| weight * at(j)).sum();
    let columns = filter.taps(from.columns, to.columns);
    let wide: Vec<f32> = plane
        .chunks(from.columns)
        .flat_map(|row| columns.iter().map(|taps| sum(taps, &|j| row[j])).collect::<Vec<f32>>())
        .collect();
    let rows = filter.taps(from.rows, to.rows);
    let entry = |i: usize| sum(&rows[i / to.columns], &|j| wide[j * to.columns + i % to.columns]);
    (0..to.rows * to.columns).map(entry).collect()
}
