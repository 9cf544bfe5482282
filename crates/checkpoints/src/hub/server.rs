//! The server of a model, with hf-hub's client.

use std::path::Path;
use std::time::Duration;

use candle_core::Result;
use hf_hub::{HFClient, HFClientSync, HFError, HFRepositorySync, RepoTypeModel, split_id};

use super::HubModel;
use super::settings::HubSettings;
use super::text::{message, with_root};

/// The number of retries after a failure that may be temporary (no connection, 429, 5xx), with at most 0.4 + 0.8 + 1.6
/// s between them: without a network the error comes within seconds, and a busy hub has time to recover.
const RETRIES: usize = 3;
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// The model on a server.
pub(super) struct Hub {
    pub(super) repo: HFRepositorySync<RepoTypeModel>,
    pub(super) endpoint: String,
}

impl Hub {
    /// Creates hf-hub's client for the model's server.
    pub(super) fn open(model: &HubModel, settings: &HubSettings, cache_dir: &Path) -> Result<Self> {
        let failed = |what: &str| message(&format!("{model}: {what}"));
        let setup = |e: HFError| match e {
            HFError::Url(e) => failed(&format!("the endpoint is no URL ({e}); correct HF_ENDPOINT")),
            e => failed(&format!("hf-hub could not be set up: {}", with_root(&e))),
        };
        let server = settings.endpoint.as_deref().unwrap_or("https://huggingface.co");
        let mut builder = HFClient::builder()
            .retry_max_attempts(RETRIES)
            .retry_base_delay(RETRY_DELAY)
            .cache_dir(cache_dir)
            .endpoint(server);
        if let Some(token) = &settings.token {
            builder = builder.token(token);
        }
        let client = builder.build().map_err(setup)?;
        let endpoint = client.endpoint().to_string();
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(failed("the endpoint begins with neither https:// nor http://; correct HF_ENDPOINT"));
        }
        let (owner, name) = split_id(&model.id);
        let repo = HFClientSync::from_inner(client).map_err(setup)?.model(owner, name);
        Ok(Self { repo, endpoint })
    }
}
