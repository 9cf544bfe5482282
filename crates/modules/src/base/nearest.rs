//! Suggestions for a misspelt name in errors.

/// The length of the longest names that are compared: the time grows with the product of the lengths.
const LONGEST: usize = 128;

/// A known name that is near.
struct NearName<'a> {
    name: &'a str,
    /// The number of edits without regard to case.
    distance: usize,
    edits_with_case: usize,
}

/// Returns the names nearest to `name`, the nearest first, at most three.
///
/// The distance is the number of edits between two names (Damerau-Levenshtein) without regard to case. Ties go to the
/// smaller number of edits with regard to case, then to the order of `known`. A name whose distance is more than half
/// of the longer length is not near.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let lower = name.to_lowercase();
    let len = lower.chars().count();
    let mut candidates = Vec::new();
    for candidate in known {
        let lower_candidate = candidate.to_lowercase();
        let other = lower_candidate.chars().count();
        let longer = len.max(other);
        // The difference in length is a lower bound of the distance, and far cheaper.
        if longer > LONGEST || 2 * len.abs_diff(other) > longer {
            continue;
        }
        let distance = edits(&lower, &lower_candidate);
        if 2 * distance <= longer {
            candidates.push(NearName { name: candidate, distance, edits_with_case: edits(name, candidate) });
        }
    }
    candidates.sort_by_key(|candidate| (candidate.distance, candidate.edits_with_case));
    candidates.into_iter().take(3).map(|candidate| candidate.name).collect()
}

/// Returns the question for an error about an unknown name, `did you mean "a" or "b"?`, or `otherwise()` if no name is
/// near.
pub fn did_you_mean<'a>(
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
    otherwise: impl FnOnce() -> String,
) -> String {
    match nearest(name, known).as_slice() {
        [] => otherwise(),
        near => {
            let quoted: Vec<_> = near.iter().map(|near| format!("{near:?}")).collect();
            format!("did you mean {}?", quoted.join(" or "))
        }
    }
}

/// Returns the number of letters to insert, remove, replace or swap with their neighbour to turn one name into the
/// other (the optimal string alignment distance).
pub fn edits(a: &str, b: &str) -> usize {
    let a: Vec<_> = a.chars().collect();
    let b: Vec<_> = b.chars().collect();
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
    fn edits_of_known_pairs_are_right() {
        for (a, b, expected) in
            [("", "", 0), ("", "ab", 2), ("kitten", "sitting", 3), ("bert", "bret", 1), ("é", "e", 1)]
        {
            assert_eq!((edits(a, b), edits(b, a)), (expected, expected), "{a} and {b}");
        }
    }

    #[test]
    fn nearest_names_come_first_and_far_names_are_left_out() {
        assert_eq!(nearest("qwen", ["Qwen", "bert", "qwen2", "qwen"]), ["qwen", "Qwen", "qwen2"]);
        assert!(nearest("zzzz", ["bert", "gpt2"]).is_empty());
    }
}
