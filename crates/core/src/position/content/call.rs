//! Checks of a call, and parameters, for the terms of all kinds of relative positions by content.

use candle_core::{Result, Tensor, bail};

use super::super::{CallContext, KeyValueHeads};
use candle_attention_modules::base::{ParameterList, accumulation_dtype};

/// Returns the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of a call's own tokens.
///
/// # Errors
/// For a call that attends to other keys, or that has positions or an attention function: relative positions by content
/// are between the tokens of one call.
pub(super) fn projected_keys<'k>(
    kv: Option<&'k mut KeyValueHeads>,
    call: &CallContext,
) -> Result<&'k mut KeyValueHeads> {
    if let Some(kv) = kv
        && call.unsupported_by_content.is_none()
    {
        return Ok(kv);
    }
    bail!(
        "[multi_head_attention] {} were given, but relative positions by content are between the tokens of a call",
        call.unsupported_by_content.unwrap_or("keys of others")
    )
}

/// The rows and columns of an image or of a window of one, whose tokens are listed row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Image {
    pub rows: usize,
    pub columns: usize,
}

impl Image {
    /// Checks that queries (B, H, T, D) are the tokens of the image; `what` it is, a grid or a window, is for the
    /// error.
    pub fn check(self, what: &str, queries: &Tensor) -> Result<()> {
        let t = queries.dim(2)?;
        let Self { rows, columns } = self;
        if t != rows * columns {
            bail!("[multi_head_attention] queries have {t} tokens, expected the {rows} × {columns} of the {what}")
        }
        Ok(())
    }
}

/// Returns a parameter in the dtype in which scores are computed.
pub(super) fn wide(parameters: &ParameterList, name: &str) -> Result<Tensor> {
    let tensor = parameters.expect(name)?;
    tensor.to_dtype(accumulation_dtype(tensor.dtype()))
}
