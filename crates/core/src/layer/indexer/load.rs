//! Loading of an indexer of latent attention, of any kind.

use std::sync::Arc;

use candle_core::Result;

use super::deepseek::DeepSeekIndexer;
use super::pooled::PooledIndexer;
use super::{IndexerConfig, IndexerShape, KeyIndexer};
use candle_attention_modules::base::ParameterReader;

/// Reads the parameters of an indexer.
pub(in crate::layer) fn load_indexer(
    config: IndexerConfig,
    shape: IndexerShape,
    source: &ParameterReader,
) -> Result<Arc<dyn KeyIndexer>> {
    Ok(match config.pool {
        Some(pool) => Arc::new(PooledIndexer::load(config, pool, shape, source)?),
        None => Arc::new(DeepSeekIndexer::load(config, shape, source)?),
    })
}
