//! How GPTQ, AWQ and auto-round pack codes into words, by the config.

use candle_core::{Result, bail};
use serde_json::Value;

use super::settings::Settings;

/// A way of packing the codes of `qweight` and `qzeros`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// GPTQ, codes one after the other along the inputs.
    Gptq {
        /// Whether zeros are stored less one.
        zeros_less_one: bool,
        /// Whether codes of 3 bits are in planes.
        planes: bool,
    },
    /// AWQ, codes along the outputs.
    AwqGemm,
    /// AWQ, codes along the inputs of each output.
    AwqGemv,
    /// AWQ, codes of 4 outputs in turn.
    AwqGemvFast,
}

/// Returns the way of packing that a config names; `None` if it names another method.
pub(super) fn packing(settings: &Settings) -> Result<Option<Packing>> {
    let object = settings.object();
    let text = |key: &str| object[key].as_str().map(str::to_lowercase);
    let first = |keys: &[&str]| keys.iter().find_map(|key| text(key));
    let method = text("quant_method");
    match method.as_deref() {
        Some("gptq") => of_gptq(first(&["checkpoint_format", "format"]).as_deref()).map(Some),
        Some("awq") => of_awq(object, first(&["version", "format", "checkpoint_format"]).as_deref()).map(Some),
        Some("auto-round" | "auto_round" | "intel/auto-round") => {
            let format = first(&["packing_format", "backend"]).unwrap_or_else(|| "auto_round:auto_gptq".to_string());
            Ok(Some(if format.contains("awq") {
                Packing::AwqGemm
            } else {
                let zeros_less_one = format.contains("gptq") && !format.contains("gptqmodel");
                Packing::Gptq { zeros_less_one, planes: false }
            }))
        }
        _ => Ok(None),
    }
}

fn of_gptq(format: Option<&str>) -> Result<Packing> {
    let planes = format == Some("gptq_p");
    match format {
        None | Some("gptq") => Ok(Packing::Gptq { zeros_less_one: true, planes }),
        Some("gptq_v2" | "gptq_p") => Ok(Packing::Gptq { zeros_less_one: false, planes }),
        Some(other) => {
            bail!("the config says `checkpoint_format` {other:?} of GPTQ, expected \"gptq\", \"gptq_v2\" or \"gptq_p\"")
        }
    }
}

fn of_awq(object: &Value, format: Option<&str>) -> Result<Packing> {
    if object["backend"] == "llm-awq" {
        bail!("the config says `backend` \"llm-awq\" of AWQ, expected layers that AutoAWQ wrote")
    }
    match format {
        None | Some("gemm" | "exllama") => Ok(Packing::AwqGemm),
        Some("gemv") => Ok(Packing::AwqGemv),
        Some("gemv_fast") => Ok(Packing::AwqGemvFast),
        Some(other) => {
            bail!("the config says `version` {other:?} of AWQ, expected \"gemm\", \"gemv\" or \"gemv_fast\"")
        }
    }
}
