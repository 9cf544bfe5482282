//! The nearest of some known names, for the errors about one that is not known.

/// The distance takes the product of the lengths in time, so longer names are not compared.
const LONGEST: usize = 128;

/// The names nearest to `name`, best first, at most three.
///
/// Near is by the edits between the two (Damerau and Levenshtein), without regard to case, then with regard to it, then
/// by the order of the names. One that takes more edits than half its length is not near.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let lower = name.to_lowercase();
    let len = lower.chars().count();
    let distance = |candidate: &str| {
        let candidate = candidate.to_lowercase();
        let other = candidate.chars().count();
        let longer = len.max(other);
        // The difference in length is a lower bound of the distance, and far cheaper.
        let is_near = longer <= LONGEST && 2 * len.abs_diff(other) <= longer;
        let distance = is_near.then(|| edits(&lower, &candidate))?;
        (2 * distance <= longer).then_some(distance)
    };
    let mut near: Vec<_> = known.into_iter().filter_map(|near| Some((distance(near)?, near))).collect();
    near.sort_by_cached_key(|(distance, near)| (*distance, edits(name, near)));
    near.into_iter().take(3).map(|(_, near)| near).collect()
}

/// The question that an error asks about a name, or `otherwise` where none is near: `did you mean "a" or "b"?`.
pub fn did_you_mean<'a>(
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
    otherwise: impl FnOnce() -> String,
) -> String {
    match nearest(name, known).as_slice() {
        [] => otherwise(),
        near => {
            let near: Vec<_> = near.iter().map(|name| format!("{name:?}")).collect();
            format!("did you mean {}?", near.join(" or "))
        }
    }
}

/// The letters that are inserted, left out, replaced or swapped with their neighbour between two names, each pair at
/// most once.
pub fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<_>, Vec<_>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<_>>()];
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let replaced = rows[i][j] + usize::from(x != y);
            let mut least = replaced.min(rows[i][j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && a[i - 1] == *y && b[j - 1] == *x {
                least = least.min(rows[i - 1][j - 1] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, expected) in
            [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("bert", "bret", 1), ("é", "e", 1)]
        {
            assert_eq!((edits(a, b), edits(b, a)), (expected, expected), "{a} and {b}");
        }
    }

    #[test]
    fn the_nearest_come_first_and_far_ones_not_at_all() {
        assert_eq!(nearest("qwen", ["Qwen", "bert", "qwen2", "qwen"]), ["qwen", "Qwen", "qwen2"]);
        assert!(nearest("zzzz", ["bert", "gpt2"]).is_empty());
    }
}
