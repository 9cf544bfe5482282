//! Linear attention by the gated delta rule, number by number.

use std::ops::Range;

use crate::array::Array;

/// A call. Where there are fewer heads of something, consecutive heads share one.
#[derive(Debug, Clone)]
pub struct Delta {
    /// (B, H_q, T, D_k)
    pub q: Array,
    /// (B, H_k, T, D_k)
    pub k: Array,
    /// (B, H_v, T, D_v)
    pub v: Array,
    /// (B, heads, T, 1), or (B, heads, T, D_k) with one decay for each row of the state.
    pub decay: Option<Array>,
    /// (B, heads, T, 1)
    pub beta: Option<Array>,
    /// (n, H_s, D_k, D_v)
    pub state: Option<Array>,
    /// The entry of the batch and the tokens of each of n sequences.
    pub sequences: Vec<(usize, Range<usize>)>,
    pub scale: f64,
    pub qk_norm: Option<f64>,
}

/// In row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Recurred {
    /// (B, H, T, D_v)
    pub y: Vec<f64>,
    /// (n, H_s, D_k, D_v)
    pub state: Vec<f64>,
    /// The largest number of a state at any time.
    pub largest_state: f64,
    /// The largest sum of the numbers of a scaled query.
    pub largest_query: f64,
}

impl Delta {
    pub fn h_s(&self) -> usize {
        self.k.dim(1).max(self.v.dim(1))
    }

    pub fn h(&self) -> usize {
        self.q.dim(1).max(self.h_s())
    }

    pub fn recur(&self) -> Recurred {
        let b = self.q.dim(0);
        let t = self.q.dim(2);
        let h = self.h();
        let h_s = self.h_s();
        let d_v = self.v.dim(3);
        let mut y = vec![0.0; b * h * t * d_v];
        let mut states = Vec::new();
        let mut largest_state = 0f64;
        let mut largest_query = 0f64;
        let largest = |most: f64, state: &[Vec<f64>]| state.iter().flatten().fold(most, |most, x| most.max(x.abs()));
        for (n, (entry, tokens)) in self.sequences.iter().enumerate() {
            for head in 0..h_s {
                let mut state = self.before(n, head);
                largest_state = largest(largest_state, &state);
                for token in tokens.clone() {
                    self.update(&mut state, [*entry, head, token]);
                    largest_state = largest(largest_state, &state);
                    for reader in (0..h).filter(|reader| reader / (h / h_s) == head) {
                        let at = ((entry * h + reader) * t + token) * d_v;
                        let q = self.query([*entry, reader, token]);
                        largest_query = largest_query.max(q.iter().map(|x| x.abs()).sum());
                        for (j, out) in y[at..at + d_v].iter_mut().enumerate() {
                            *out = q.iter().zip(&state).map(|(q, row)| q * row[j]).sum();
                        }
                    }
                }
                states.extend(state.concat());
            }
        }
        Recurred { y, state: states, largest_state, largest_query }
    }

    /// Returns the rows of a state.
    fn before(&self, n: usize, head: usize) -> Vec<Vec<f64>> {
        let number = |i, j| self.state.as_ref().map_or(0.0, |state| state.at([n, head, i, j]));
        (0..self.k.dim(3)).map(|i| (0..self.v.dim(3)).map(|j| number(i, j)).collect()).collect()
    }

    fn update(&self, state: &mut [Vec<f64>], [entry, head, token]: [usize; 3]) {
        let of = |xs: &Array, at: usize| xs.at([entry, head / (self.h_s() / xs.dim(1)), token, at]);
        let k = self.row(&self.k, [entry, head / (self.h_s() / self.k.dim(1)), token]);
        for (i, row) in state.iter_mut().enumerate() {
            let factor = self.decay.as_ref().map_or(1.0, |decay| of(decay, i).exp());
            row.iter_mut().for_each(|number| *number *= factor);
        }
        for j in 0..self.v.dim(3) {
            let recalled: f64 = k.iter().zip(&*state).map(|(k, row)| k * row[j]).sum();
            let added = match &self.beta {
                Some(beta) => of(beta, 0) * (of(&self.v, j) - recalled),
                None => of(&self.v, j),
            };
            state.iter_mut().zip(&k).for_each(|(row, k)| row[j] += k * added);
        }
    }

    /// Returns the scaled query.
    fn query(&self, [entry, reader, token]: [usize; 3]) -> Vec<f64> {
        let q = self.row(&self.q, [entry, reader / (self.h() / self.q.dim(1)), token]);
        q.iter().map(|x| x * self.scale).collect()
    }

    fn row(&self, xs: &Array, [entry, head, token]: [usize; 3]) -> Vec<f64> {
        let row: Vec<_> = (0..xs.dim(3)).map(|i| xs.at([entry, head, token, i])).collect();
        let Some(eps) = self.qk_norm else { return row };
        let length = (row.iter().map(|x| x * x).sum::<f64>() + eps).sqrt();
        row.iter().map(|x| x / length).collect()
    }
}
