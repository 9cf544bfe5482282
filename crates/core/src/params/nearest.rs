//! The layout whose names are nearest to the names in a file, for errors.

use super::layout::WeightLayout;
use candle_attention_modules::base::edits;
use candle_attention_modules::linear::Projection::Gate;

/// The number of names and the length of a name up to which names are compared: the time grows with their product.
const MOST: usize = 48;

/// Returns the layout whose weights have the names nearest to `names`, if each weight of a layout has another name near
/// it: one whose distance is at most half of the longer length.
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
fn distance(layout: WeightLayout, stems: &[&str]) -> Option<usize> {
    let mut free = stems.to_vec();
    let mut sum = 0;
    for tensor in layout.tensors(0, true).iter().filter(|tensor| !tensor.is_bias && !tensor.holds(Gate)) {
        let name = tensor.name();
        let stem = stem(&name)?;
        let (index, edits) = free.iter().map(|other| edits(stem, other)).enumerate().min_by_key(|(_, edits)| *edits)?;
        if 2 * edits > stem.len().max(free[index].len()) {
            return None;
        }
        sum += edits;
        free.swap_remove(index);
    }
    Some(sum)
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
