//! The range of keys of every query as a few numbers for each sequence, for kernels that compute ranges themselves.

use super::constraint::{Constraint, QueryPosition, Reach, first_key};
use super::lens::ValidLens;
use super::placement::{Placement, SequencePlan};

/// The largest magnitude of a position, whose sums fit into 32 bits.
const MOST: i128 = 1 << 30;

/// Bounds of the keys that each query attends to. Query i of a sequence has the key position `first_position + i`, and
/// attends to the keys within all of the bounds. Keys count within the sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyBounds {
    /// The key position of query 0 of each sequence, from which ALiBi counts too.
    pub first_positions: Vec<i32>,
    /// Whether the last query of every sequence is at its last key.
    pub is_aligned_to_end: bool,
    /// Whether keys after a query's own are masked, unless they are below the prefix.
    pub is_causal: bool,
    /// The keys before a query's own that it attends to, if they are limited.
    pub left: Option<i32>,
    /// The keys after a query's own that it attends to, if they are limited.
    pub right: Option<i32>,
    /// The positions of a chunk, if keys in other chunks than the query's are masked.
    pub chunk: Option<i32>,
    /// The first key of each sequence that is not masked; none if that is key 0 for all.
    pub starts: Option<Vec<i32>>,
    /// The number of keys of each sequence, if some at the end are masked for all queries.
    pub lengths: Option<Vec<i32>>,
    /// The number of keys of each sequence that the causal bound does not mask, if there are some.
    pub prefixes: Option<Vec<i32>>,
    /// Whether all constraints place the queries at the same positions.
    pub positions_agree: bool,
}

/// The bounds of one sequence. Bounds that move with the query are given for query 0.
struct SequenceBounds {
    /// The key position of query 0.
    first_position: i64,
    positions_agree: bool,
    start: i128,
    length: i128,
    /// The bound of a causal constraint with a prefix.
    causal: Option<PrefixBound>,
    /// The positions of a chunk.
    chunk: Option<i128>,
    window_start: Option<WindowBound>,
    window_end: Option<WindowBound>,
}

/// The bounds that move with the query, which are alike in all sequences.
struct MovingBounds {
    is_causal: bool,
    chunk: Option<i32>,
    left: Option<i32>,
    right: Option<i32>,
}

/// The reason why constraints have no bounds of this form: sequences differ in them, or one exceeds 32 bits.
struct NoBounds;

/// The first key that query 0 attends to by a window, or the first key after those.
#[derive(Clone, Copy)]
struct WindowBound {
    key: i128,
    /// Whether the bound masks a key that exists for any query.
    masks_keys: bool,
}

/// A causal bound that a prefix relaxes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct PrefixBound {
    end: i128,
    prefix: i128,
}

impl KeyBounds {
    /// Returns the bounds of all sequences; `None` if the constraints have none of this form.
    pub(super) fn new(constraints: &[Constraint], plans: &[SequencePlan]) -> Option<Self> {
        let mut each = Vec::with_capacity(plans.len());
        for (b, plan) in plans.iter().enumerate() {
            each.push(SequenceBounds::new(constraints, b, plan)?);
        }
        if MovingBounds::of(&each).is_err() && plans.iter().all(|plan| plan.queries.len() == 1) {
            each.iter_mut().for_each(SequenceBounds::fix);
        }
        let MovingBounds { is_causal, chunk, left, right } = MovingBounds::of(&each).ok()?;
        let mut is_aligned_to_end = true;
        let mut first_positions = Vec::with_capacity(each.len());
        for (own, plan) in each.iter().zip(plans) {
            let keys_less_queries = plan.t_kv as i128 - plan.queries.len() as i128;
            is_aligned_to_end &= i128::from(own.first_position) == keys_less_queries;
            first_positions.push(small(own.first_position.into())?);
        }
        let prefixes = each.iter().map(|own| own.causal.map_or(0, |causal| causal.prefix.clamp(0, MOST) as i32));
        let prefixes: Vec<_> = prefixes.collect();
        let starts: Vec<_> = each.iter().map(|own| own.start.clamp(0, MOST) as i32).collect();
        let is_whole = |(own, plan): (&SequenceBounds, &SequencePlan)| own.length >= plan.t_kv as i128;
        let lengths = match each.iter().zip(plans).all(is_whole) {
            true => None,
            false => Some(each.iter().map(|own| own.length.clamp(0, MOST) as i32).collect()),
        };
        Some(Self {
            first_positions,
            is_aligned_to_end,
            is_causal,
            left,
            right,
            chunk,
            starts: starts.iter().any(|&start| start > 0).then_some(starts),
            lengths,
            prefixes: prefixes.iter().any(|&prefix| prefix > 0).then_some(prefixes),
            positions_agree: each.iter().all(|own| own.positions_agree),
        })
    }
}

impl SequenceBounds {
    /// Returns the bounds of sequence `b`; `None` if a constraint has no bound of this form.
    fn new(constraints: &[Constraint], b: usize, plan: &SequencePlan) -> Option<Self> {
        let SequencePlan { placement, queries, .. } = plan;
        let t_q = queries.len();
        let t_kv = placement.keys.len();
        let QueryPosition { first: first_position, other } = placement.query_position(constraints, b, 0);
        let mut bounds = Self {
            first_position,
            positions_agree: other.is_none(),
            start: 0,
            length: t_kv as i128,
            causal: None,
            chunk: None,
            window_start: None,
            window_end: None,
        };
        if placement.tokens.is_empty() && t_q > 0 {
            bounds.length = 0;
        } else if placement.tokens != (0..t_q) {
            return None;
        }
        // With starts for each of several queries there is no bound of this form, so the start of query 0 is enough.
        let first_of_sequence = first_key(constraints, b, 0) as i128;
        for constraint in constraints {
            bounds.add(constraint, b, placement, t_q, first_of_sequence)?;
        }
        Some(bounds)
    }

    /// Adds a constraint on `t_q` queries of a sequence that begins at the key `first_of_sequence`; `None` if it has no
    /// bound of this form.
    fn add(
        &mut self,
        constraint: &Constraint,
        b: usize,
        placement: &Placement,
        t_q: usize,
        first_of_sequence: i128,
    ) -> Option<()> {
        let first_key = placement.keys.start as i128;
        let t_kv = placement.keys.len();
        let entry = |lens: &ValidLens| -> Option<i128> {
            let entry = lens.of_sequence(b).or_else(|| (t_q == 1).then(|| lens.get(b, 0)))?;
            Some(entry as i128 - first_key)
        };
        match constraint {
            Constraint::ValidLens(lens) => self.length = self.length.min(entry(lens)?),
            Constraint::Starts(starts) | Constraint::FirstKeys(starts) => self.start = self.start.max(entry(starts)?),
            Constraint::Padded(_) | Constraint::Prefix(_) | Constraint::Tokenized(_) | Constraint::Wrong(_) => {}
            Constraint::Aligned(alignment, reach) => {
                let position = alignment.position(b, placement, 0) - first_key;
                match reach {
                    Reach::Window { left, right } => {
                        self.add_window_start(position - *left as i128, t_q);
                        self.add_window_end(position + *right as i128 + 1, t_kv);
                    }
                    Reach::Causal { prefix } if prefix.is_empty() => self.add_window_end(position + 1, t_kv),
                    Reach::Causal { prefix } => {
                        let mut shortest = i128::MAX;
                        for lens in prefix {
                            shortest = shortest.min(entry(lens)?);
                        }
                        let bound = PrefixBound { end: position + 1, prefix: shortest };
                        if self.causal.is_some_and(|other| other != bound) {
                            return None;
                        }
                        self.causal = Some(bound);
                    }
                    Reach::Chunk(size) => {
                        let size = *size as i128;
                        // The row of keys at which the sequence begins.
                        let first_row = first_of_sequence - first_key;
                        let number = (position - first_row).div_euclid(size);
                        let of_last = (position - first_row + t_q as i128 - 1).div_euclid(size);
                        if t_q > 0 && number == of_last {
                            self.start = self.start.max(first_row + number * size);
                            self.length = self.length.min(first_row + (number + 1) * size);
                            return Some(());
                        }
                        // Chunks of rows are chunks of positions if row 0 begins one, and count from one position.
                        let counts_alike = first_row % size == 0 && position == i128::from(self.first_position);
                        if !counts_alike || self.chunk.is_some_and(|other| other != size) {
                            return None;
                        }
                        self.chunk = Some(size);
                    }
                }
            }
        }
        Some(())
    }

    /// Adds a bound that moves with the query: `key` is the first key that query 0 of `t_q` queries attends to.
    fn add_window_start(&mut self, key: i128, t_q: usize) {
        if self.window_start.is_none_or(|other| other.key < key) {
            self.window_start = Some(WindowBound { key, masks_keys: key + t_q as i128 > 1 });
        }
    }

    /// Adds a bound that moves with the query: `key` is the first key after those that query 0 attends to, of `t_kv`.
    fn add_window_end(&mut self, key: i128, t_kv: usize) {
        if self.window_end.is_none_or(|other| other.key > key) {
            self.window_end = Some(WindowBound { key, masks_keys: key < t_kv as i128 });
        }
    }

    /// Turns the bounds that move with the query into fixed ones. The sequence has one query.
    fn fix(&mut self) {
        if let Some(WindowBound { key, .. }) = self.window_start.take() {
            self.start = self.start.max(key);
        }
        if let Some(WindowBound { key, .. }) = self.window_end.take() {
            self.length = self.length.min(key);
        }
        if let Some(PrefixBound { end, prefix }) = self.causal.take() {
            self.length = self.length.min(end.max(prefix));
        }
    }
}

impl MovingBounds {
    /// Returns the bounds that all sequences have.
    ///
    /// # Errors
    /// If they differ or do not fit in 32 bits.
    fn of(each: &[SequenceBounds]) -> Result<Self, NoBounds> {
        let causal =
            common(each.iter().map(|own| own.causal.map(|causal| causal.end - i128::from(own.first_position))))?;
        if causal.is_some_and(|end| end != 1) {
            return Err(NoBounds);
        }
        // A window that masks nothing is left out: its distance may exceed 32 bits.
        let masks_keys = |bound: Option<WindowBound>| bound.is_some_and(|own| own.masks_keys);
        let mut left = None;
        if each.iter().any(|own| masks_keys(own.window_start)) {
            left = common(
                each.iter().map(|own| own.window_start.map(|bound| i128::from(own.first_position) - bound.key)),
            )?;
        }
        let mut right = None;
        if each.iter().any(|own| masks_keys(own.window_end)) {
            right = common(
                each.iter().map(|own| own.window_end.map(|bound| bound.key - 1 - i128::from(own.first_position))),
            )?;
        }
        let chunk = distance(common(each.iter().map(|own| own.chunk))?)?;
        let left = distance(left)?;
        if causal.is_none() && right == Some(0) {
            return Ok(Self { is_causal: true, chunk, left, right: None });
        }
        Ok(Self { is_causal: causal.is_some(), chunk, left, right: distance(right)? })
    }
}

/// Returns a position in 32 bits; `None` if it is too large.
fn small(position: i128) -> Option<i32> {
    if position.abs() <= MOST { Some(position as i32) } else { None }
}

/// Returns a limit as a distance in 32 bits, which is not negative, if there is a limit.
fn distance(limit: Option<i128>) -> Result<Option<i32>, NoBounds> {
    match limit {
        None => Ok(None),
        Some(limit) if limit < 0 => Err(NoBounds),
        Some(limit) => Ok(Some(small(limit).ok_or(NoBounds)?)),
    }
}

/// Returns the limit that all sequences have, if they have one.
fn common(mut limits: impl Iterator<Item = Option<i128>>) -> Result<Option<i128>, NoBounds> {
    let Some(first) = limits.next() else { return Ok(None) };
    if limits.all(|limit| limit == first) { Ok(first) } else { Err(NoBounds) }
}

#[cfg(test)]
mod tests;
