//! The layout whose names are nearest to the names in a file, for errors.

use super::layout::WeightLayout;
use candle_attention_modules::base::edits;

/// The number of names and the length of a name up to which names are compared: the time grows with their product.
const MOST: usize = 48;

/// Returns the layout whose weight names are nearest to `names` by edit distance; `None` if no layout is near. A layout
/// is near if each of its weight names has a different entry of `names` within half of the longer of both lengths, or
/// within a quarter for layouts of two weights.
pub fn nearest_layout(names: &[&str]) -> Option<WeightLayout> {
    let stems: Vec<&str> = names.iter().filter_map(|name| stem(name)).collect();
    if stems.len() > MOST || stems.iter().any(|stem| stem.len() > MOST) {
        return None;
    }
    let mut nearest = None;
    let mut least = usize::MAX;
    for layout in WeightLayout::all() {
        if let Some(distance) = distance(layout, &stems)
            && distance < least
        {
            least = distance;
            nearest = Some(layout);
        }
    }
    nearest
}

/// Returns the sum of the edits from each weight of a layout to another name; `None` if a weight has no name near it.
/// The pair with the fewest edits is taken first.
fn distance(layout: WeightLayout, stems: &[&str]) -> Option<usize> {
    let mut weights = layout.weight_names();
    // Two names of a packed layout are easily near others, such as the projections of an MLP.
    let strictness = if weights.len() < 3 { 4 } else { 2 };
    let mut free = stems.to_vec();
    let mut sum = 0;
    while !weights.is_empty() {
        let mut best: Option<NamePair> = None;
        for (weight, name) in weights.iter().enumerate() {
            let stem = stem(name)?;
            for (other, candidate) in free.iter().enumerate() {
                let edits = edits(stem, candidate);
                let is_near = strictness * edits <= stem.len().max(candidate.len());
                if is_near && best.as_ref().is_none_or(|best| edits < best.edits) {
                    best = Some(NamePair { weight, other, edits });
                }
            }
        }
        let NamePair { weight, other, edits } = best?;
        weights.swap_remove(weight);
        free.swap_remove(other);
        sum += edits;
    }
    Some(sum)
}

/// A weight of a layout and another name near it, by their indices.
struct NamePair {
    weight: usize,
    other: usize,
    edits: usize,
}

/// Returns the name of a weight without its end; `None` for a bias.
fn stem(name: &str) -> Option<&str> {
    if name.ends_with("bias") {
        return None;
    }
    Some([".weight", ".kernel", ".vars.0"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_layout_of_misspelt_names_is_found() {
        let of_mlx = ["query_projection.weight", "key_projection.weight", "value_projection.weight", "out_proj.weight"];
        assert_eq!(nearest_layout(&of_mlx), Some(WeightLayout::Mlx));
        let canonical = ["q_prj.weight", "k_prj.weight", "v_prj.weight", "o_prj.weight", "norm.weight"];
        assert_eq!(nearest_layout(&canonical), Some(WeightLayout::Canonical));
        assert_eq!(nearest_layout(&["up_proj.weight", "down_proj.weight", "gate_proj.weight"]), None);
        assert_eq!(nearest_layout(&[]), None);
    }
}
