//! Rows of a tensor in another order.

use candle_core::{Result, Tensor};

/// Returns some rows of a tensor along a dimension: a view where they follow each other.
pub fn rows_of(tensor: &Tensor, dim: usize, rows: &[u32]) -> Result<Tensor> {
    if rows.windows(2).all(|pair| pair[1] == pair[0] + 1) {
        let first = rows.first().copied().unwrap_or(0);
        return tensor.narrow(dim, first as usize, rows.len());
    }
    tensor.contiguous()?.index_select(&Tensor::new(rows, tensor.device())?, dim)
}

/// Concatenates tensors along a dimension, with their rows in order. `places` has the place of each row in the result,
/// for the rows of the first tensor, then for the rows of the second, and so on; each place occurs once.
pub fn joined_in_order(tensors: &[Tensor], dim: usize, places: &[u32]) -> Result<Tensor> {
    let mut sources = vec![0; places.len()];
    for (source, &place) in (0..).zip(places) {
        sources[place as usize] = source;
    }
    rows_of(&Tensor::cat(tensors, dim)?, dim, &sources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn rows_joined_in_order_have_the_given_places() -> Result<()> {
        let tensor = |rows: &[[f32; 2]; 2]| Tensor::new(rows, &Device::Cpu);
        let parts = [tensor(&[[3.0, 30.0], [0.0, 0.0]])?, tensor(&[[1.0, 10.0], [2.0, 20.0]])?];
        let expected = [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0], [3.0, 30.0]];
        assert_eq!(joined_in_order(&parts, 0, &[3, 0, 1, 2])?.to_vec2::<f32>()?, expected);
        let columns = [parts[0].t()?, parts[1].t()?];
        assert_eq!(joined_in_order(&columns, 1, &[3, 0, 1, 2])?.t()?.to_vec2::<f32>()?, expected);
        let whole = Tensor::cat(&parts, 0)?;
        assert_eq!(rows_of(&whole, 0, &[1, 2])?.to_vec2::<f32>()?, expected[..2]);
        assert_eq!(rows_of(&whole, 0, &[3, 1])?.to_vec2::<f32>()?, [expected[2], expected[0]]);
        assert_eq!(rows_of(&whole, 0, &[])?.dims(), [0, 2]);
        Ok(())
    }
}
