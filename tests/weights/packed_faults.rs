//! Layers of GPTQ, AWQ and compressed-tensors whose tensors do not fit each other: errors that say what does not fit.

use candle_core::Result;
use safetensors::Dtype;

use crate::quantized_faults::{Layer, Part, assert_fault, part};

/// Returns a tensor of numbers of 4 or 8 bytes.
fn numbers(name: &'static str, dtype: Dtype, numbers: &[i64]) -> Part {
    let len = dtype.bitsize() / 8;
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()[..len].to_vec()).collect();
    Part { name, dtype, shape: vec![numbers.len()], bytes }
}

/// Returns a layer (2, 64) of 4 bits with two groups.
fn gptq(config: &'static str) -> Layer {
    let groups: Vec<i64> = (0..64).map(|input| input / 32).collect();
    Layer {
        config,
        parts: vec![
            part("qweight", Dtype::I32, &[8, 2]),
            part("qzeros", Dtype::I32, &[2, 1]),
            part("scales", Dtype::F16, &[2, 2]),
            numbers("g_idx", Dtype::I32, &groups),
        ],
        metadata: None,
    }
}

#[test]
fn gptq_with_misfit_tensors_is_an_error() -> Result<()> {
    let layer = gptq(r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}"#);
    layer.read(&layer.parts)?;
    for (name, dtype, shape, expected) in [
        ("qweight", Dtype::I32, &[7, 2][..], "codes of 2 to 8 bits"),
        ("qweight", Dtype::I64, &[8, 2], "I32"),
        ("qweight", Dtype::I32, &[16], "of two dimensions"),
        ("qweight", Dtype::I32, &[8, 3], "found `g_idx` I32 [64]"),
        ("qzeros", Dtype::I32, &[3, 1], "`qzeros` (groups, out · bits / 32)"),
        ("qzeros", Dtype::F32, &[2, 1], "I32"),
        ("scales", Dtype::F16, &[2, 3], "`scales` (groups, out)"),
        ("scales", Dtype::I16, &[2, 2], "scales has dtype I16"),
        ("g_idx", Dtype::I32, &[56], "codes of 2 to 8 bits"),
        ("g_idx", Dtype::I32, &[8, 8], "`g_idx` (in)"),
        ("g_idx", Dtype::F32, &[64], "g_idx has dtype F32"),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), expected);
    }
    for (group, expected) in [(2, "found 2"), (-1, "found -1")] {
        let wrong = numbers("g_idx", Dtype::I32, &[group; 64]);
        assert_fault(layer.read_with(&wrong), &format!("groups of 0..2 in the list of groups, {expected}"));
    }
    assert_fault(layer.read_without("qzeros"), "expected `qweight`, `qzeros` and `scales`");
    assert_fault(layer.read_without("scales"), "expected `qweight`, `qzeros` and `scales`");
    // Without a list, groups are neighbours.
    layer.read_without("g_idx")
}

#[test]
fn gptq_formats_that_are_not_read_are_errors_by_name() -> Result<()> {
    let marlin = gptq(r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}}"#);
    assert_fault(marlin.read(&marlin.parts), "\"marlin\" of GPTQ");
    let without = gptq("{}");
    assert_fault(without.read(&without.parts), "expected `quantization_config` of GPTQ, AWQ or auto-round");
    Ok(())
}

/// Returns a layer of 4 bits with 8 outputs and 64 inputs.
fn awq(config: &'static str) -> Layer {
    Layer {
        config,
        parts: vec![
            part("qweight", Dtype::I32, &[64, 1]),
            part("qzeros", Dtype::I32, &[2, 1]),
            part("scales", Dtype::F16, &[2, 8]),
        ],
        metadata: None,
    }
}

#[test]
fn awq_with_misfit_tensors_is_an_error() -> Result<()> {
    let layer = awq(r#"{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}"#);
    for (name, dtype, shape, expected) in [
        ("qweight", Dtype::I32, &[63, 1][..], "expected codes of 4 bits, `qweight` (in, out · bits / 32)"),
        ("qweight", Dtype::I16, &[64, 1], "of I32"),
        ("qzeros", Dtype::I32, &[2, 2], "`qzeros` (groups, out · bits / 32)"),
        ("scales", Dtype::F16, &[2, 9], "`scales` (groups, out)"),
        ("scales", Dtype::F16, &[2, 7], "`scales` (groups, out)"),
        ("scales", Dtype::F16, &[16], "of two dimensions"),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), expected);
    }
    assert_fault(layer.read_without("qzeros"), "expected `qweight`, `qzeros` and `scales`");
    for (config, expected) in [
        (r#"{"quantization_config": {"quant_method": "awq", "version": "gemv2"}}"#, "\"gemv2\" of AWQ"),
        (
            r#"{"quantization_config": {"quant_method": "awq", "version": "gemv_fast"}}"#,
            "expected codes of 4 bits, `qweight` (out / 4, in) of I16",
        ),
        (r#"{"quantization_config": {"quant_method": "awq", "backend": "llm-awq"}}"#, "\"llm-awq\" of AWQ"),
        (r#"{"quantization_config": {"quant_method": "awq", "bits": 9}}"#, "expected codes of 9 bits"),
        (r#"{"quantization_config": {"quant_method": "awq", "version": "gemv"}}"#, "`qweight` (out, in · bits / 32)"),
    ] {
        let other = awq(config);
        assert_fault(other.read(&other.parts), expected);
    }
    Ok(())
}

#[test]
fn awq_gemv_fast_with_misfit_tensors_is_an_error() -> Result<()> {
    let layer = Layer {
        config: r#"{"quantization_config": {"quant_method": "awq", "version": "gemv_fast", "group_size": 32}}"#,
        parts: vec![
            part("qweight", Dtype::I16, &[1, 64]),
            part("qzeros", Dtype::F16, &[8, 4]),
            part("scales", Dtype::F16, &[8, 4]),
        ],
        metadata: None,
    };
    assert_fault(layer.read(&layer.parts), "shape mismatch for q_proj.weight");
    for (name, dtype, shape) in [
        ("qweight", Dtype::I32, &[1, 64][..]),
        ("qweight", Dtype::I16, &[1, 96]),
        ("qweight", Dtype::I16, &[64]),
        ("qzeros", Dtype::F16, &[8, 5]),
        ("scales", Dtype::F16, &[9, 4]),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), "expected codes of 4 bits, `qweight` (out / 4, in)");
    }
    assert_fault(layer.read_without("scales"), "found 4 bits, `qweight` I16 [1, 64], `qzeros` F16 [8, 4]");
    Ok(())
}

#[test]
fn compressed_experts_with_misfit_tensors_are_an_error() -> Result<()> {
    let layer = Layer {
        config: FOUR_BITS,
        parts: vec![
            part("weight_packed", Dtype::I32, &[3, 2, 8]),
            part("weight_scale", Dtype::BF16, &[3, 2, 2]),
            numbers("weight_shape", Dtype::I64, &[3, 2, 64]),
        ],
        metadata: None,
    };
    assert_fault(layer.read(&layer.parts), "shape mismatch for q_proj.weight");
    let experts = "expected `weight_packed` of two dimensions and `weight_shape` (2), or of three";
    for shape in [&[2, 2, 64][..], &[2, 64], &[0, 2, 64], &[-1, 2, 64]] {
        assert_fault(layer.read_with(&numbers("weight_shape", Dtype::I64, shape)), experts);
    }
    assert_fault(layer.read_with(&numbers("weight_shape", Dtype::I64, &[3, 3, 64])), "of a weight (3, 64)");
    let scale = |shape: &[usize]| part("weight_scale", Dtype::BF16, shape);
    assert_fault(layer.read_with(&scale(&[3, 1, 2])), "expected scales of a weight (6, 64)");
    assert_fault(layer.read_with(&scale(&[2, 2, 2])), "expected scales of a weight (6, 64)");
    let zeros = part("weight_zero_point", Dtype::I32, &[1, 2]);
    assert_fault(layer.read_with(&zeros), "`weight_zero_point` (out · bits / 32, groups)");
    Ok(())
}

/// Returns a layer (2, 64) of 4 bits with two groups.
fn words(config: &'static str) -> Layer {
    Layer {
        config,
        parts: vec![
            part("weight_packed", Dtype::I32, &[2, 8]),
            part("weight_scale", Dtype::BF16, &[2, 2]),
            numbers("weight_shape", Dtype::I64, &[2, 64]),
        ],
        metadata: None,
    }
}

const FOUR_BITS: &str = r#"{"quantization_config": {"quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}}}"#;

#[test]
fn compressed_words_with_misfit_tensors_are_an_error() -> Result<()> {
    let layer = words(FOUR_BITS);
    layer.read(&layer.parts)?;
    let shapes = [[2, 63], [2, 1 << 62], [3, 64], [-1, 64], [2, 0]];
    for shape in shapes {
        let wrong = numbers("weight_shape", Dtype::I64, &shape);
        assert!(layer.read_with(&wrong).is_err(), "{shape:?}");
    }
    assert_fault(layer.read_with(&numbers("weight_shape", Dtype::I64, &[2, 80])), "of a weight (2, 80)");
    for (name, dtype, shape, expected) in [
        ("weight_packed", Dtype::I32, &[2, 7][..], "expected codes of 4 bits of a weight (2, 64)"),
        ("weight_packed", Dtype::I64, &[2, 8], "`weight_packed` of I32 or U8"),
        ("weight_packed", Dtype::I32, &[16], "of two dimensions"),
        ("weight_scale", Dtype::BF16, &[2, 3], "expected scales of a weight (2, 64)"),
        ("weight_scale", Dtype::I32, &[2, 2], "weight_scale has dtype I32"),
        ("weight_shape", Dtype::F32, &[2], "weight_shape has dtype F32"),
        ("weight_zero_point", Dtype::I32, &[2, 2], "`weight_zero_point` (out · bits / 32, groups)"),
        ("weight_zero_point", Dtype::F16, &[2, 2], "`weight_zero_point`"),
        ("weight_g_idx", Dtype::I32, &[63], "`weight_g_idx` (64)"),
        ("weight_g_idx", Dtype::I32, &[64], "groups of 0..2 in the list of groups"),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), expected);
    }
    layer.read_with(&part("weight_zero_point", Dtype::I32, &[1, 2]))?;
    layer.read_with(&part("weight_zero_point", Dtype::I8, &[2, 2]))?;
    layer.read_with(&numbers("weight_g_idx", Dtype::I32, &[-1; 64]))?;
    for name in ["weight_scale", "weight_shape"] {
        assert_fault(layer.read_without(name), &format!("`{name}`"));
    }
    Ok(())
}

#[test]
fn compressed_configs_that_are_not_read_are_errors_by_name() -> Result<()> {
    for (config, expected) in [
        (r#"{"quantization_config": {"quant_method": "compressed-tensors"}}"#, "expected `config_groups`"),
        (r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}"#, "marlin-24"),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"}}}"#,
            "sparse-24-bitmask",
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
                "a": {"targets": ["re:(["], "weights": {"num_bits": 4}},
                "b": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}}"#,
            "regular expression",
        ),
        (
            r#"{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
                "a": {"targets": ["k_proj"], "weights": {"num_bits": 4}},
                "b": {"targets": ["v_proj"], "weights": {"num_bits": 8}}}}}"#,
            "\"q_proj\" among the targets",
        ),
    ] {
        let layer = words(config);
        assert_fault(layer.read(&layer.parts), expected);
    }
    Ok(())
}

#[test]
fn compressed_floats_of_four_bits_with_misfit_tensors_are_an_error() -> Result<()> {
    let layer = Layer {
        config: FOUR_BITS,
        parts: vec![
            part("weight_packed", Dtype::U8, &[2, 32]),
            part("weight_scale", Dtype::F8_E4M3, &[2, 4]),
            part("weight_global_scale", Dtype::F32, &[1]),
        ],
        metadata: None,
    };
    layer.read(&layer.parts)?;
    for (name, dtype, shape) in [
        ("weight_scale", Dtype::F8_E4M3, &[2, 3][..]),
        ("weight_scale", Dtype::F8_E4M3, &[8]),
        ("weight_scale", Dtype::U8, &[2, 4]),
        ("weight_scale", Dtype::F32, &[2, 4]),
        ("weight_global_scale", Dtype::F32, &[2]),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), "`weight_packed`");
    }
    assert_fault(layer.read_without("weight_global_scale"), "`weight_global_scale` (1)");
    Ok(())
}

#[test]
fn compressed_bytes_with_misfit_tensors_are_an_error() -> Result<()> {
    let layer = Layer {
        config: FOUR_BITS,
        parts: vec![part("weight", Dtype::I8, &[2, 64]), part("weight_scale", Dtype::BF16, &[2, 1])],
        metadata: None,
    };
    layer.read(&layer.parts)?;
    layer.read_with(&part("weight_zero_point", Dtype::I8, &[2, 1]))?;
    for (name, dtype, shape, expected) in [
        ("weight_scale", Dtype::BF16, &[3, 1][..], "expected scales of a weight (2, 64)"),
        ("weight_zero_point", Dtype::I8, &[3], "`weight_zero_point` of I8"),
        ("weight_zero_point", Dtype::I32, &[2, 1], "`weight_zero_point` of I8"),
    ] {
        assert_fault(layer.read_with(&part(name, dtype, shape)), expected);
    }
    Ok(())
}

/// Whole numbers that are the same in each run (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 as usize % limit
    }

    /// Returns a tensor of another dtype, shape or content.
    fn changed(&mut self, part: &Part) -> Part {
        const DTYPES: [Dtype; 8] =
            [Dtype::I32, Dtype::I64, Dtype::I8, Dtype::U8, Dtype::F16, Dtype::F32, Dtype::F8_E4M3, Dtype::F8_E8M0];
        let mut shape = part.shape.clone();
        let mut dtype = part.dtype;
        match self.below(3) {
            0 => dtype = DTYPES[self.below(DTYPES.len())],
            1 => shape = (0..self.below(4)).map(|_| [0, 1, 2, 3, 8, 64][self.below(6)]).collect(),
            _ => {}
        }
        let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let bytes = (0..len).map(|_| self.below(256) as u8 & [0, 1, 255][self.below(3)]).collect();
        Part { name: part.name, dtype, shape, bytes }
    }
}

#[test]
fn random_tensors_of_packed_layers_are_read_or_errors() {
    let gemv = Layer {
        config: r#"{"quantization_config": {"quant_method": "awq", "version": "gemv", "group_size": 32}}"#,
        parts: vec![
            part("qweight", Dtype::I32, &[2, 8]),
            part("qzeros", Dtype::I32, &[2, 1]),
            part("scales", Dtype::F16, &[2, 8]),
        ],
        metadata: None,
    };
    let layers = [
        gptq(r#"{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}"#),
        gptq(r#"{"quantization_config": {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}}"#),
        awq(r#"{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}"#),
        gemv,
        words(FOUR_BITS),
    ];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let [mut read, mut refused] = [0, 0];
    for layer in &layers {
        for _ in 0..60 {
            let mut parts = layer.parts.clone();
            let index = random.below(parts.len());
            parts[index] = random.changed(&parts[index]);
            match layer.read(&parts) {
                Ok(()) => read += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(read > 20 && refused > 100, "{read} were read, {refused} refused");
}
