//! A model that is a plain loop, behind the scheduler of `serve_requests`: the next token is a hash of all tokens of a
//! sequence, or of a window, which are read from its pages. A recurrent layer has the hash of all tokens as its state.
//! So each request has the tokens that it has alone only if every page and every state has the right contents.

use std::collections::{BTreeMap, BTreeSet};

use candle_attention::PageTable;
use candle_core::Result;

use crate::scheduler::{Limits, Request, RequestId, Scheduler, StepInput, StepReport};

pub const PAGE: usize = 16;
pub const VOCAB: u32 = 50;

/// The hash of no tokens.
pub const BEGINNING: u32 = 7;

/// Returns the hash of tokens after others that have the hash `before`.
pub fn hash_after(before: u32, tokens: &[u32]) -> u32 {
    tokens.iter().fold(before, |hash, token| (hash ^ token).wrapping_mul(0x9e37_79b1).rotate_left(5))
}

/// Returns the token after these.
pub fn next_token(tokens: &[u32]) -> u32 {
    hash_after(BEGINNING, tokens) % VOCAB
}

/// Returns the tokens that a request generates alone.
pub fn alone(prompt: &[u32], max_tokens: usize, end_tokens: &[u32]) -> Vec<u32> {
    alone_in_window(prompt, max_tokens, end_tokens, usize::MAX)
}

/// Returns the tokens that a request generates alone, if a token follows from the tokens of a window.
pub fn alone_in_window(prompt: &[u32], max_tokens: usize, end_tokens: &[u32], window: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        let next = next_token(&tokens[tokens.len().saturating_sub(window)..]);
        tokens.push(next);
        if end_tokens.contains(&next) {
            break;
        }
    }
    tokens[prompt.len()..].to_vec()
}

/// The memory of the model.
pub struct Pool {
    /// The token in each row.
    pub rows: Vec<Option<u32>>,
    /// The hash in each state.
    pub states: Vec<Option<u32>>,
    /// The number of tokens that a next token follows from.
    pub window: usize,
}

impl Pool {
    /// Stores the tokens of a step, and returns the next token after each of its rows.
    pub fn run(&mut self, input: &StepInput) -> Vec<u32> {
        for copy in input.tokens.copies() {
            let from = copy.from as usize * PAGE;
            self.rows.copy_within(from..from + PAGE, copy.to as usize * PAGE);
        }
        for (row, &id) in input.tokens.rows().into_iter().zip(input.ids) {
            self.rows[row as usize] = Some(id);
        }
        let mut next = Vec::new();
        let sequences = input.tokens.sequences();
        for (s, own) in input.tokens.states().iter().enumerate() {
            let before = own.before.map_or(BEGINNING, |state| self.states[state as usize].expect("it was stored"));
            for after in &own.after {
                let ids = &input.ids[sequences.queries(s)][..after.tokens];
                self.states[after.state as usize] = Some(hash_after(before, ids));
            }
        }
        for s in 0..sequences.len() {
            if !input.rows.contains(&(sequences.queries(s).end as u32 - 1)) {
                continue;
            }
            let row = |position: usize| sequences.pages(s)[position / PAGE] as usize * PAGE + position % PAGE;
            let keys = sequences.keys(s);
            let in_window = keys.start.max(keys.end.saturating_sub(self.window))..keys.end;
            assert!(in_window.start == 0 || in_window.len() == self.window);
            let tokens: Vec<u32> = in_window.map(|at| self.rows[row(at)].expect("it was stored")).collect();
            let token = next_token(&tokens);
            if let Some(present) = input.tokens.states().get(s).and_then(|own| own.after.last()) {
                assert_eq!(self.states[present.state as usize].map(|hash| hash % VOCAB), Some(token));
            }
            next.push(token);
        }
        next
    }
}

/// A scheduler over a pool, with the tokens that were generated.
pub struct Server {
    pub scheduler: Scheduler,
    pub pool: Pool,
    pub limits: Limits,
    pub generated: BTreeMap<RequestId, Vec<u32>>,
    pub ended: Vec<RequestId>,
}

impl Server {
    pub fn new(pages: usize, tokens: usize, chunk: usize, requests: usize) -> Result<Self> {
        Self::of_table(PageTable::new(pages, PAGE)?, Limits { tokens, chunk, requests })
    }

    pub fn of_table(table: PageTable, limits: Limits) -> Result<Self> {
        let rows = vec![None; table.pages() * PAGE];
        let pool = Pool { rows, states: vec![None; table.states()], window: usize::MAX };
        let scheduler = Scheduler::new(table, limits)?.with_page_lists();
        Ok(Self { scheduler, pool, limits, generated: BTreeMap::new(), ended: Vec::new() })
    }

    pub fn with_window(mut self, window: usize) -> Result<Self> {
        self.pool.window = window;
        Ok(Self { scheduler: self.scheduler.with_window(window)?, ..self })
    }

    pub fn add(&mut self, prompt: Vec<u32>, max_tokens: usize) -> Result<RequestId> {
        self.scheduler.add(Request { prompt, max_tokens, end_tokens: Vec::new() })
    }

    /// Runs a step, and checks its limits.
    pub fn step(&mut self) -> Result<StepReport> {
        let Self { scheduler, pool, limits, .. } = self;
        let report = scheduler.step(|input| {
            assert!(input.ids.len() <= limits.tokens, "{} tokens", input.ids.len());
            let sequences = input.tokens.sequences();
            assert!(sequences.len() <= limits.requests.min(limits.tokens));
            assert!((0..sequences.len()).all(|s| (1..=limits.chunk).contains(&sequences.queries(s).len())));
            Ok(pool.run(input))
        })?;
        let pages: BTreeSet<u32> = report.pages.iter().flat_map(|of_request| of_request.pages.clone()).collect();
        assert_eq!(report.used_pages, pages.len());
        for generated in &report.generated {
            self.generated.entry(generated.request).or_default().push(generated.token);
            if generated.is_last {
                self.ended.push(generated.request);
            }
        }
        Ok(report)
    }

    /// Runs steps until no request is left.
    pub fn run(&mut self) -> Result<Vec<StepReport>> {
        let mut reports = Vec::new();
        while !self.scheduler.is_idle() {
            reports.push(self.step()?);
            assert!(reports.len() < 10_000, "the requests do not end");
        }
        assert_eq!((self.scheduler.table().num_sequences(), self.scheduler.table().used_pages()), (0, 0));
        Ok(reports)
    }
}
