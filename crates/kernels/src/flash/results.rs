//! The results of a forward pass, and their memory.

use super::memory::unwritten;
use super::options::SoftmaxStats;
use super::statistics::output::{Statistics, StatisticsOutput};
use crate::cpu::{SharedPtr, Unwritten};
use crate::error::Error;
use crate::number::Number;
use candle_attention_call::{AttentionDims, RequestedResults};

/// The results of a forward pass.
#[derive(Debug, Clone, Default)]
pub struct AttentionResults<E> {
    /// The attention output: B·H·T_q·D_v elements in the order that the call names, in large pages if they are many.
    pub output: Vec<E>,
    /// The log-sum-exp of each query's scores, (B, H, T_q).
    pub log_sum_exp: Option<Vec<f32>>,
    /// The softmax statistics that [`attend_backward`](super::attend_backward) reads, (B, H, T_q).
    pub softmax_stats: Option<Vec<SoftmaxStats>>,
    /// Statistics of the weights.
    pub statistics: Option<Statistics>,
}

/// The memory for the requested results of a call.
pub(super) struct ResultMemory<E> {
    output: Unwritten<E>,
    log_sum_exp: Option<Unwritten<f32>>,
    softmax_stats: Option<Unwritten<SoftmaxStats>>,
    statistics: Option<Statistics>,
}

/// Pointers to the results of a call.
pub(super) struct ResultPointers<'a, E> {
    /// B·H·T_q rows of D_v elements.
    pub output: SharedPtr<E>,
    /// (B, H, T_q).
    pub log_sum_exp: Option<SharedPtr<f32>>,
    /// (B, H, T_q).
    pub softmax_stats: Option<SharedPtr<SoftmaxStats>>,
    pub statistics: Option<StatisticsOutput<'a>>,
}

impl<E: Number> ResultMemory<E> {
    /// Allocates memory for the requested results of a checked call.
    pub fn new(dims: &AttentionDims, wanted: RequestedResults) -> Result<Self, Error> {
        let &AttentionDims { b, h, t_q, d_v, .. } = dims;
        let RequestedResults { weights, log_sum_exp, softmax_stats, statistics } = wanted;
        if weights {
            return Err(Error::Shape("expected a call for results without the weights, which are never stored".into()));
        }
        let queries = [b, h, t_q];
        Ok(Self {
            statistics: match statistics {
                Some(requested) => Some(Statistics::zeros(dims, requested)?),
                None => None,
            },
            output: unwritten("an attention output", &[b, h, t_q, d_v])?,
            log_sum_exp: match log_sum_exp {
                true => Some(unwritten("a log-sum-exp", &queries)?),
                false => None,
            },
            softmax_stats: match softmax_stats {
                true => Some(unwritten("softmax statistics", &queries)?),
                false => None,
            },
        })
    }

    /// Returns pointers to the results.
    pub fn pointers<'a>(&mut self, wanted: RequestedResults<'a>) -> ResultPointers<'a, E> {
        let Self { output, log_sum_exp, softmax_stats, statistics } = self;
        ResultPointers {
            output: SharedPtr(output.as_mut_ptr()),
            log_sum_exp: log_sum_exp.as_mut().map(|numbers| SharedPtr(numbers.as_mut_ptr())),
            softmax_stats: softmax_stats.as_mut().map(|stats| SharedPtr(stats.as_mut_ptr())),
            statistics: match (statistics, wanted.statistics) {
                (Some(statistics), Some(requested)) => Some(StatisticsOutput::new(statistics, requested)),
                _ => None,
            },
        }
    }

    /// Returns the results.
    ///
    /// # Safety
    /// Every element was written.
    pub unsafe fn into_results(self) -> AttentionResults<E> {
        let Self { output, log_sum_exp, softmax_stats, statistics } = self;
        // SAFETY: as this method's contract.
        unsafe {
            AttentionResults {
                output: output.into_vec(),
                log_sum_exp: log_sum_exp.map(|numbers| numbers.into_vec()),
                softmax_stats: softmax_stats.map(|stats| stats.into_vec()),
                statistics,
            }
        }
    }
}
