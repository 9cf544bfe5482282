//! Continuous batching over a [`PageTable`]: which requests bring which tokens to a step. It knows no model, so a
//! server can copy this file.
//!
//! Requests are served in the order in which they were added. A step has a budget of tokens:
//!
//! 1. Every request that generates brings one token.
//! 2. Prompts bring chunks with what is left of the budget, the oldest prompt first.
//! 3. Waiting requests begin in their order, if the pages for all of their tokens are free. A request whose prompt
//!    begins like one that is being computed waits until the common pages are stored, and shares them.
//!
//! A model with recurrent layers has a table with states, two for each request at least. A chunk of a prompt then ends
//! with a page where it can, since a prompt that begins alike shares the state that is stored there. In a model whose
//! layers all have windows ([`Scheduler::with_window`]), requests return the pages that no token attends to any more.
//!
//! If too few pages are free for a step, the latest request returns its pages and waits again. Its tokens are kept,
//! and computed again later, except for the pages that are still found then. The oldest request is never preempted, so
//! every request ends.

use std::collections::VecDeque;

use candle_attention::{PageTable, PagedTokens, SequenceId, SharedPrefix};
use candle_core::{Result, bail};

const OP: &str = "scheduler";

/// The limits of a step.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The most tokens of a step, its budget.
    pub tokens: usize,
    /// The most tokens of one prompt in a step.
    pub chunk: usize,
    /// The most requests that have pages at a time. There are never more than `tokens` ([`Limits::running`]), so that
    /// each of them can bring a token to every step.
    pub requests: usize,
}

impl Limits {
    /// Returns the most requests that have pages at a time.
    pub fn running(&self) -> usize {
        self.requests.min(self.tokens)
    }
}

/// A prompt to continue.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// Tokens after which the request ends.
    pub end_tokens: Vec<u32>,
}

/// The number of requests that were added before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub usize);

/// The input of a model in a step.
#[derive(Debug)]
pub struct StepInput<'a> {
    /// The packed token ids (total,) of the step's sequences.
    pub ids: &'a [u32],
    /// The positions and the pages of the tokens, for `AttentionInput::with_pages`.
    pub tokens: &'a PagedTokens,
    /// The rows of the tokens after which a next token is needed. The others are within prompts.
    pub rows: &'a [u32],
}

/// The events of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepReport {
    /// The number of tokens that went through the model.
    pub tokens: usize,
    /// The requests that got pages before the step, again after a preemption.
    pub begun: Vec<BegunRequest>,
    /// The requests that returned their pages before the step, the latest request first.
    pub preempted: Vec<RequestId>,
    /// The generated tokens, one of each request at most.
    pub generated: Vec<GeneratedToken>,
    /// The number of pages that all requests had in the step, each counted once.
    pub used_pages: usize,
    /// The pages of each request in the step, of those that have ended too; empty without
    /// [`with_page_lists`](Scheduler::with_page_lists).
    pub pages: Vec<RequestPages>,
}

/// A request that begins, or that begins again after a preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BegunRequest {
    pub request: RequestId,
    /// The number of its tokens that were stored already.
    pub shared: usize,
    /// The number of its tokens that have to be computed.
    pub computed: usize,
}

/// A generated token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeneratedToken {
    pub request: RequestId,
    pub token: u32,
    /// Whether the request has ended.
    pub is_last: bool,
}

/// The pages of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestPages {
    pub request: RequestId,
    pub pages: Vec<u32>,
}

/// A request with its tokens so far.
#[derive(Debug)]
struct Progress {
    id: RequestId,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    /// The number of tokens at which the request ends.
    most: usize,
    end_tokens: Vec<u32>,
}

/// A request that has pages.
#[derive(Debug)]
struct Running {
    progress: Progress,
    sequence: SequenceId,
    /// The number of its tokens whose keys and values are stored.
    stored: usize,
}

impl Running {
    /// Returns the number of tokens whose keys and values are not stored, which is 1 while the request generates.
    fn missing(&self) -> usize {
        self.progress.tokens.len() - self.stored
    }
}

/// The requests of a model, and the table of their pages. The [module](self) describes the order of service.
#[derive(Debug)]
pub struct Scheduler {
    table: PageTable,
    limits: Limits,
    /// Requests that have pages, in their order. All of them are older than those that wait.
    running: Vec<Running>,
    /// Requests without pages, in their order.
    waiting: VecDeque<Progress>,
    added: usize,
    /// The longest window of the layers, if all of them have one.
    window: Option<usize>,
    /// Whether reports list the pages of each request.
    lists_pages: bool,
}

impl Scheduler {
    /// Returns a scheduler without requests. The pools of a model have to be made for the table.
    ///
    /// # Errors
    /// For a limit of 0, for a table that has sequences, and for one with fewer than two states for each request.
    pub fn new(table: PageTable, limits: Limits) -> Result<Self> {
        for (name, limit) in [("tokens", limits.tokens), ("chunk", limits.chunk), ("requests", limits.requests)] {
            if limit == 0 {
                bail!("[{OP}] the limit of {name} is 0, expected at least 1")
            }
        }
        if table.num_sequences() > 0 {
            bail!("[{OP}] the table has {} sequences, expected none", table.num_sequences())
        }
        let requests = limits.running();
        if table.states() > 0 && table.states() / 2 < requests {
            bail!(
                "[{OP}] the table has {} states, expected two for each of {requests} requests at least",
                table.states()
            )
        }
        let (running, waiting) = (Vec::new(), VecDeque::new());
        Ok(Self { table, limits, running, waiting, added: 0, window: None, lists_pages: false })
    }

    /// Sets the longest window of the model's layers, all of which have one: the number of keys that a token attends
    /// to. Requests then return the pages before the window of their next token.
    ///
    /// # Errors
    /// For a window of 0.
    pub fn with_window(self, window: usize) -> Result<Self> {
        if window == 0 {
            bail!("[{OP}] the window is 0, expected at least 1")
        }
        Ok(Self { window: Some(window), ..self })
    }

    /// Lists the pages of each request in the report of every step.
    pub fn with_page_lists(self) -> Self {
        Self { lists_pages: true, ..self }
    }

    /// Adds a request behind all others.
    ///
    /// # Errors
    /// For a request without tokens, and for one that would not fit in the pages if it were alone. Nothing is added
    /// then.
    pub fn add(&mut self, request: Request) -> Result<RequestId> {
        let Request { prompt, max_tokens, end_tokens } = request;
        if prompt.is_empty() || max_tokens == 0 {
            bail!(
                "[{OP}] the prompt has {} tokens, and {max_tokens} are to be generated, expected at least one each",
                prompt.len()
            )
        }
        let most = prompt.len().saturating_add(max_tokens);
        let pages = self.most_pages(most - 1); // the last token is not stored
        if pages > self.table.pages() {
            bail!(
                "[{OP}] a prompt of {} tokens and {max_tokens} more need {pages} pages, expected at most the table's {}",
                prompt.len(),
                self.table.pages()
            )
        }
        let id = RequestId(self.added);
        self.added += 1;
        self.waiting.push_back(Progress { id, tokens: prompt, most, end_tokens });
        Ok(id)
    }

    /// Returns the most pages that a request of this number of stored tokens has at a time.
    fn most_pages(&self, tokens: usize) -> usize {
        let page_size = self.table.page_size();
        let all = tokens.div_ceil(page_size);
        match self.window {
            // The window before a chunk, the chunk, and a page of which both have a part.
            Some(window) => all.min(window.saturating_add(self.limits.chunk).div_ceil(page_size) + 1),
            None => all,
        }
    }

    /// Returns the number of free pages that a sequence needs for more tokens, in one step after the other.
    fn pages_to_keep_free(&self, sequence: SequenceId, tokens: usize) -> Result<usize> {
        let needed = self.table.pages_needed(sequence, tokens)?;
        let own = self.table.pages_of(sequence)?.len();
        Ok(needed.min(self.most_pages(usize::MAX).saturating_sub(own)))
    }

    /// Returns the table of pages.
    pub fn table(&self) -> &PageTable {
        &self.table
    }

    /// Returns whether all requests have ended.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Chooses the tokens of a step, and runs the model on them by `run`, which returns the next token after each of
    /// the step's rows. Without requests, it returns an empty report.
    ///
    /// # Errors
    /// As `run`. No tokens are stored or generated then, and a later call computes them again.
    pub fn step(&mut self, run: impl FnOnce(&StepInput) -> Result<Vec<u32>>) -> Result<StepReport> {
        let mut report = StepReport::default();
        let mut counts = self.share_budget();
        self.preempt_until_pages_suffice(&mut counts, &mut report)?;
        self.begin_waiting(&mut counts, &mut report)?;

        let mut entries = Vec::new();
        let mut ids = Vec::new();
        let mut rows = Vec::new();
        for (request, &count) in self.running.iter().zip(&counts) {
            if count == 0 {
                continue;
            }
            entries.push(request.sequence.tokens(count));
            ids.extend(&request.progress.tokens[request.stored..request.stored + count]);
            if count == request.missing() {
                rows.push(ids.len() as u32 - 1);
            }
        }
        if entries.is_empty() {
            return Ok(report);
        }
        report.tokens = ids.len();
        let step = self.table.step(&entries)?;
        let next = run(&StepInput { ids: &ids, tokens: &step, rows: &rows })?;
        if next.len() != rows.len() {
            bail!("[{OP}] the model returned {} tokens, expected {}, one for each of the rows", next.len(), rows.len())
        }
        step.commit();
        self.advance(&counts, &next, &mut report)?;
        Ok(report)
    }

    /// Returns the number of tokens that each running request brings to a step by the budget alone.
    fn share_budget(&self) -> Vec<usize> {
        let generating = self.running.iter().filter(|request| request.missing() == 1).count();
        let mut budget = self.limits.tokens - generating;
        let mut counts = Vec::with_capacity(self.running.len());
        for request in &self.running {
            if request.missing() == 1 {
                counts.push(1);
                continue;
            }
            let count = self.chunk_of_prompt(request.stored, request.missing(), budget);
            budget -= count;
            counts.push(count);
        }
        counts
    }

    /// Returns the number of tokens that a prompt brings to a step, of `missing` ones after the stored ones.
    fn chunk_of_prompt(&self, stored: usize, missing: usize, budget: usize) -> usize {
        let most = missing.min(self.limits.chunk).min(budget);
        let end = stored + most;
        let last_page = end - end % self.table.page_size();
        if self.table.states() > 0 && most < missing && last_page > stored { last_page - stored } else { most }
    }

    /// Takes the pages of the latest requests until the others have pages for their tokens. A chunk of a prompt gets
    /// shorter first.
    fn preempt_until_pages_suffice(&mut self, counts: &mut Vec<usize>, report: &mut StepReport) -> Result<()> {
        let page_size = self.table.page_size();
        let mut promised = 0;
        let mut n = 0;
        while n < self.running.len() {
            let Running { sequence, stored, .. } = self.running[n];
            // Sequences share whole pages alone, so a last page that is not full belongs to one sequence.
            let room = stored.next_multiple_of(page_size) - stored;
            let fitting = counts[n].min(room + (self.table.free_pages() - promised) * page_size);
            if fitting == 0 && counts[n] > 0 {
                report.preempted.extend(self.preempt_latest()?);
                counts.truncate(self.running.len());
                continue;
            }
            counts[n] = fitting;
            promised += self.table.pages_needed(sequence, fitting)?;
            n += 1;
        }
        Ok(())
    }

    /// Frees the pages of the latest request, which waits again before all others that wait.
    fn preempt_latest(&mut self) -> Result<Option<RequestId>> {
        let Some(Running { progress, sequence, .. }) = self.running.pop() else { return Ok(None) };
        self.table.free(sequence)?;
        let id = progress.id;
        self.waiting.push_front(progress);
        Ok(Some(id))
    }

    /// Begins waiting requests while the budget and the pages suffice.
    fn begin_waiting(&mut self, counts: &mut Vec<usize>, report: &mut StepReport) -> Result<()> {
        let mut budget = self.limits.tokens - counts.iter().sum::<usize>();
        let mut promised = 0;
        for request in &self.running {
            promised += self.pages_to_keep_free(request.sequence, request.missing())?;
        }
        while budget > 0 && self.running.len() < self.limits.running() {
            let Some(next) = self.waiting.front() else { break };
            let SharedPrefix { sequence, tokens: shared } = self.table.add_with_prefix(&next.tokens);
            if let Some(window) = self.window {
                self.table.release_before(sequence, (shared + 1).saturating_sub(window))?;
            }
            let computed = next.tokens.len() - shared;
            // With the first token to generate, for which the request would be preempted otherwise.
            let positions = (next.tokens.len() + 1).min(next.most - 1);
            let needed = self.pages_to_keep_free(sequence, positions - shared)?;
            let is_free = promised + needed <= self.table.free_pages();
            if !is_free || self.is_prefix_being_computed(&next.tokens, shared) {
                self.table.free(sequence)?;
                break;
            }
            let Some(progress) = self.waiting.pop_front() else { break };
            let count = self.chunk_of_prompt(shared, computed, budget);
            budget -= count;
            promised += needed;
            counts.push(count);
            report.begun.push(BegunRequest { request: progress.id, shared, computed });
            self.running.push(Running { progress, sequence, stored: shared });
        }
        Ok(())
    }

    /// Returns whether a running prompt begins with more whole pages of `tokens` than the `shared` ones, and has not
    /// stored them yet.
    fn is_prefix_being_computed(&self, tokens: &[u32], shared: usize) -> bool {
        let page_size = self.table.page_size();
        for request in self.running.iter().filter(|request| request.missing() > 1) {
            // The last token is computed by every request, for the logits after it.
            let own = &tokens[..tokens.len() - 1];
            let common = own.iter().zip(&request.progress.tokens).take_while(|(one, other)| one == other).count();
            let in_pages = common - common % page_size;
            if in_pages > shared && in_pages > request.stored {
                return true;
            }
        }
        false
    }

    /// Notes the tokens that a step stored and generated, and removes the requests that have ended.
    fn advance(&mut self, counts: &[usize], next: &[u32], report: &mut StepReport) -> Result<()> {
        let page_size = self.table.page_size();
        report.used_pages = self.table.used_pages();
        let mut next = next.iter();
        let mut ended = Vec::new();
        for (n, (request, &count)) in self.running.iter_mut().zip(counts).enumerate() {
            if self.lists_pages {
                let pages = self.table.pages_of(request.sequence)?.to_vec();
                report.pages.push(RequestPages { request: request.progress.id, pages });
            }
            if count == 0 {
                continue;
            }
            let whole_pages = request.stored / page_size;
            request.stored += count;
            if request.stored / page_size > whole_pages {
                self.table.share_prefix(request.sequence, &request.progress.tokens[..request.stored])?;
            }
            if let Some(window) = self.window {
                self.table.release_before(request.sequence, (request.stored + 1).saturating_sub(window))?;
            }
            if request.missing() > 0 {
                continue;
            }
            let Some(&token) = next.next() else { continue };
            let progress = &mut request.progress;
            progress.tokens.push(token);
            let is_last = progress.tokens.len() == progress.most || progress.end_tokens.contains(&token);
            report.generated.push(GeneratedToken { request: progress.id, token, is_last });
            if is_last {
                ended.push(n);
            }
        }
        for n in ended.into_iter().rev() {
            let sequence = self.running.remove(n).sequence;
            self.table.free(sequence)?;
        }
        Ok(())
    }
}
