//! The scheme of a layer in the config of compressed-tensors.

use candle_core::{Result, bail};
use regex_lite::Regex;
use serde_json::Value;

/// How the weight of a layer is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scheme {
    /// The number of bits of a code.
    pub bits: usize,
    /// The number of inputs of a group, if the config has it.
    pub group: Option<usize>,
    /// The outputs and inputs of a block, if the config has them.
    pub block: Option<[usize; 2]>,
}

/// Returns the scheme of a module: of the group whose targets have its name; else of one with a pattern of its name;
/// else of one with its class. A model with one scheme needs no targets, whose names may begin otherwise than in
/// the file.
pub(super) fn scheme(config: &Value, module: &str) -> Result<Scheme> {
    let Some(groups) = config["config_groups"].as_object() else {
        bail!("expected `config_groups` in the config of compressed-tensors")
    };
    let of_weights: Vec<_> = groups.values().filter(|group| group["weights"].is_object()).collect();
    let schemes: Vec<_> = of_weights.iter().map(|group| Scheme::of(&group["weights"])).collect();
    if let [first, rest @ ..] = schemes.as_slice()
        && rest.iter().all(|next| next == first)
    {
        return Ok(*first);
    }
    let mut found: Option<(Match, Scheme)> = None;
    for (group, scheme) in of_weights.iter().zip(&schemes) {
        for target in group["targets"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let Some(how) = matches(module, target)? else { continue };
            if found.is_none_or(|(best, _)| how > best) {
                found = Some((how, *scheme));
            }
        }
    }
    match found {
        Some((_, scheme)) => Ok(scheme),
        None => bail!(
            "expected the module {module:?} among the targets of one of the {} `config_groups`, found it in none",
            groups.len()
        ),
    }
}

/// How a target describes a module, the weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    Class,
    Pattern,
    Name,
}

/// Returns how a target describes a module; `None` if it does not. A pattern begins with `re:` and matches from the
/// start of the name on.
fn matches(module: &str, target: &str) -> Result<Option<Match>> {
    if let Some(pattern) = target.strip_prefix("re:") {
        let Ok(regex) = Regex::new(&format!("^(?:{pattern})")) else {
            bail!("expected a regular expression in `targets`, found {pattern:?}")
        };
        return Ok(regex.is_match(module).then_some(Match::Pattern));
    }
    if target == module {
        return Ok(Some(Match::Name));
    }
    let class = if module.ends_with("embed_tokens") { "Embedding" } else { "Linear" };
    Ok((target == class).then_some(Match::Class))
}

impl Scheme {
    fn of(weights: &Value) -> Self {
        let number = |value: &Value| value.as_u64().map(|number| number as usize).filter(|number| *number > 0);
        let block = &weights["block_structure"];
        // Old configs have a text, as "128x128".
        let from_text = || {
            let (rows, columns) = block.as_str()?.split_once('x')?;
            Some([rows.parse().ok()?, columns.parse().ok()?])
        };
        let from_list = || Some([number(&block[0])?, number(&block[1])?]);
        Self {
            bits: number(&weights["num_bits"]).unwrap_or(8),
            group: number(&weights["group_size"]),
            block: from_list().or_else(from_text).filter(|sizes: &[usize; 2]| !sizes.contains(&0)),
        }
    }
}

/// Checks that a config describes weights that are read: no sparse ones, and no transforms of activations.
pub(super) fn check(config: &Value) -> Result<()> {
    let format = config["format"].as_str().unwrap_or_default();
    if ["marlin-24", "sparse-bitmask", "sparse-24-bitmask"].contains(&format) {
        bail!("the config says `format` {format:?}, expected weights that are not sparse")
    }
    match config["sparsity_config"]["format"].as_str() {
        None | Some("dense") => {}
        Some(sparse) => bail!("the config says `sparsity_config` {sparse:?}, expected weights that are not sparse"),
    }
    for transform in config["transform_config"]["config_groups"].as_object().into_iter().flat_map(|own| own.values()) {
        for applied in transform["apply"].as_array().into_iter().flatten() {
            let location = applied["location"].as_str().unwrap_or_default();
            if !["weight_input", "weight_output"].contains(&location) {
                bail!("the config says `transform_config` with the location {location:?}, expected weights alone")
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemes_are_chosen_by_name_then_by_pattern_then_by_class() -> Result<()> {
        let config = json!({"config_groups": {
            "a": {"targets": ["Linear"], "weights": {"num_bits": 8}},
            "b": {"targets": ["re:.*v_proj"], "weights": {"num_bits": 4, "group_size": 32}},
            "c": {"targets": ["model.v_proj"], "weights": {"num_bits": 3, "block_structure": "128x64"}},
            "d": {"targets": ["re:.*q_proj"], "input_activations": {"num_bits": 2}, "weights": null},
        }});
        let bits = |module| scheme(&config, module).map(|own| own.bits);
        assert_eq!([bits("model.q_proj")?, bits("layers.v_proj")?, bits("model.v_proj")?], [8, 4, 3]);
        assert_eq!(scheme(&config, "model.v_proj")?.block, Some([128, 64]));
        assert!(scheme(&config, "model.embed_tokens").is_err());
        let one = json!({"config_groups": {"a": {"targets": ["other"], "weights": {"num_bits": 8}}}});
        assert_eq!(scheme(&one, "model.q_proj")?.bits, 8);
        Ok(())
    }

    #[test]
    fn sparse_weights_and_transforms_of_activations_are_refused_by_name() {
        let text = |config: Value| check(&config).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text(json!({"format": "marlin-24"})).contains("marlin-24"));
        assert!(text(json!({"sparsity_config": {"format": "sparse-24-bitmask"}})).contains("sparse-24-bitmask"));
        let rotated =
            |location| json!({"transform_config": {"config_groups": {"R": {"apply": [{"location": location}]}}}});
        assert!(text(rotated("input")).contains("transform_config"));
        assert_eq!(text(rotated("weight_input")), "");
        assert_eq!(text(json!({"sparsity_config": {"format": "dense"}})), "");
    }
}
