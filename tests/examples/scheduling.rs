//! The scheduler of `serve_requests` with a model that is a plain loop: the next token is a hash of all tokens of a
//! sequence, which are read from its pages. So each request has the tokens that it has alone only if every page has the
//! right contents.

use std::collections::{BTreeMap, BTreeSet};

use candle_attention::PageTable;
use candle_core::{Result, bail};

use crate::common::error_text;
use crate::scheduler::{BegunRequest, Limits, Request, RequestId, Scheduler, StepInput, StepReport};

const PAGE: usize = 16;
const VOCAB: u32 = 50;

/// Returns the token after these.
fn next_token(tokens: &[u32]) -> u32 {
    let mut hash = 7u32;
    for &token in tokens {
        hash = (hash ^ token).wrapping_mul(0x9e37_79b1).rotate_left(5);
    }
    hash % VOCAB
}

/// Returns the tokens that a request generates alone.
fn alone(prompt: &[u32], max_tokens: usize, end_tokens: &[u32]) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..max_tokens {
        let next = next_token(&tokens);
        tokens.push(next);
        if end_tokens.contains(&next) {
            break;
        }
    }
    tokens[prompt.len()..].to_vec()
}

/// The token in each row of a pool.
struct Pool(Vec<Option<u32>>);

impl Pool {
    /// Stores the tokens of a step, and returns the next token after each of its rows.
    fn run(&mut self, input: &StepInput) -> Vec<u32> {
        for copy in input.tokens.copies() {
            let from = copy.from as usize * PAGE;
            self.0.copy_within(from..from + PAGE, copy.to as usize * PAGE);
        }
        for (row, &id) in input.tokens.rows().into_iter().zip(input.ids) {
            self.0[row as usize] = Some(id);
        }
        let mut next = Vec::new();
        let sequences = input.tokens.sequences();
        for s in 0..sequences.len() {
            if !input.rows.contains(&(sequences.queries(s).end as u32 - 1)) {
                continue;
            }
            let row = |position: usize| sequences.pages(s)[position / PAGE] as usize * PAGE + position % PAGE;
            let tokens: Vec<u32> = sequences.keys(s).map(|at| self.0[row(at)].expect("it was stored")).collect();
            next.push(next_token(&tokens));
        }
        next
    }
}

/// A scheduler over a pool, with the tokens that were generated.
struct Server {
    scheduler: Scheduler,
    pool: Pool,
    limits: Limits,
    generated: BTreeMap<RequestId, Vec<u32>>,
    ended: Vec<RequestId>,
}

impl Server {
    fn new(pages: usize, tokens: usize, chunk: usize, requests: usize) -> Result<Self> {
        let limits = Limits { tokens, chunk, requests };
        let scheduler = Scheduler::new(PageTable::new(pages, PAGE)?, limits)?.with_page_lists();
        let pool = Pool(vec![None; pages * PAGE]);
        Ok(Self { scheduler, pool, limits, generated: BTreeMap::new(), ended: Vec::new() })
    }

    fn add(&mut self, prompt: Vec<u32>, max_tokens: usize) -> Result<RequestId> {
        self.scheduler.add(Request { prompt, max_tokens, end_tokens: Vec::new() })
    }

    /// Runs a step, and checks its limits.
    fn step(&mut self) -> Result<StepReport> {
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
    fn run(&mut self) -> Result<Vec<StepReport>> {
        let mut reports = Vec::new();
        while !self.scheduler.is_idle() {
            reports.push(self.step()?);
            assert!(reports.len() < 10_000, "the requests do not end");
        }
        assert_eq!((self.scheduler.table().num_sequences(), self.scheduler.table().used_pages()), (0, 0));
        Ok(reports)
    }
}

fn preemptions(reports: &[StepReport]) -> usize {
    reports.iter().map(|report| report.preempted.len()).sum()
}

/// Returns a prompt of `len` tokens that begins like others of the same `kind`.
fn prompt(kind: u32, common: usize, own: u32, len: usize) -> Vec<u32> {
    (0..len).map(|i| (if i < common { kind * 7 + i as u32 } else { own * 13 + i as u32 }) % VOCAB).collect()
}

#[test]
fn requests_in_pools_of_all_sizes_have_the_tokens_that_they_have_alone() -> Result<()> {
    for (pages, tokens, chunk, requests) in
        [(64, 40, 16, 8), (12, 40, 16, 8), (7, 9, 5, 20), (6, 3, 64, 2), (6, 1, 1, 1)]
    {
        let mut server = Server::new(pages, tokens, chunk, requests)?;
        let mut expected = BTreeMap::new();
        let mut reports = Vec::new();
        for n in 0..24u32 {
            let len = 1 + (n as usize * 17) % 60;
            let max_tokens = 1 + (n as usize * 11) % 35;
            let ids = prompt(n % 3, 40, n, len);
            let end_tokens = if n % 4 == 0 { vec![3, 8] } else { Vec::new() };
            let request = Request { prompt: ids.clone(), max_tokens, end_tokens: end_tokens.clone() };
            expected.insert(server.scheduler.add(request)?, alone(&ids, max_tokens, &end_tokens));
            // Requests arrive while others are served.
            for _ in 0..n % 3 {
                reports.push(server.step()?);
            }
        }
        reports.extend(server.run()?);
        assert_eq!(server.generated, expected, "{pages} pages, {tokens} tokens in chunks of {chunk}");
        assert_eq!(preemptions(&reports) > 0, pages < 64 && requests > 1, "{pages} pages");
        let shared: usize = reports.iter().flat_map(|report| &report.begun).map(|begun| begun.shared).sum();
        assert!(shared > 0, "{pages} pages");
    }
    Ok(())
}

#[test]
fn prompts_take_chunks_of_the_budget_that_generating_requests_leave() -> Result<()> {
    let mut server = Server::new(64, 20, 12, 8)?;
    let short = server.add(prompt(0, 0, 1, 5), 10)?;
    assert_eq!(server.step()?.tokens, 5);
    let long = server.add(prompt(0, 0, 2, 100), 1)?;
    let second = server.add(prompt(0, 0, 3, 30), 1)?;
    // A token of the first request, 12 of the oldest prompt, and 7 of the next one.
    let report = server.step()?;
    assert_eq!(report.tokens, 20);
    assert_eq!(report.generated.iter().map(|generated| generated.request).collect::<Vec<_>>(), [short]);
    let order: Vec<_> = report.begun.iter().map(|begun| begun.request).collect();
    assert_eq!(order, [long, second]);
    server.run()?;
    // The second prompt ends first, since the long prompt takes at most a chunk of each budget.
    assert_eq!(server.ended, [second, short, long]);
    Ok(())
}

#[test]
fn generating_requests_get_a_token_in_every_step_beside_long_prompts() -> Result<()> {
    let mut server = Server::new(64, 8, 8, 8)?;
    let first = server.add(prompt(0, 0, 1, 3), 40)?;
    server.step()?;
    for own in 2..6 {
        server.add(prompt(0, 0, own, 90), 5)?;
    }
    for _ in 0..39 {
        let report = server.step()?;
        assert!(report.generated.iter().any(|generated| generated.request == first), "{report:?}");
    }
    assert!(server.ended.contains(&first));
    Ok(())
}

#[test]
fn preemption_takes_the_latest_request_and_computes_it_again() -> Result<()> {
    // Three requests of up to 4 pages each in 6 pages.
    let mut server = Server::new(6, 64, 64, 8)?;
    let prompts = [1, 2, 3].map(|own| prompt(0, 0, own, 20));
    let ids: Vec<_> = prompts.iter().map(|ids| server.add(ids.clone(), 40)).collect::<Result<_>>()?;
    let reports = server.run()?;
    let preempted: Vec<_> = reports.iter().flat_map(|report| report.preempted.clone()).collect();
    assert_eq!(preempted[..2], [ids[2], ids[1]], "{preempted:?}");
    assert!(!preempted.contains(&ids[0]));
    assert_eq!(server.ended, ids);
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(server.generated[id], alone(prompt, 40, &[]));
    }
    // A request that begins again has its generated tokens too.
    let again = reports.iter().flat_map(|report| &report.begun).filter(|begun| begun.request == ids[2]).nth(1);
    assert!(again.is_some_and(|begun| begun.shared + begun.computed > 20), "{again:?}");
    Ok(())
}

#[test]
fn oldest_request_is_never_preempted_while_others_keep_arriving() -> Result<()> {
    let mut server = Server::new(8, 16, 16, 8)?;
    let mut order = vec![server.add(prompt(0, 0, 0, 30), 60)?];
    let mut preempted = 0;
    for n in 0..200 {
        if n % 5 == 0 {
            order.push(server.add(prompt(0, 0, n + 1, 10 + n as usize % 40), 1 + n as usize % 9)?);
        }
        let report = server.step()?;
        preempted += report.preempted.len();
        let unfinished = order.iter().find(|id| !server.ended.contains(id));
        assert!(unfinished.is_none_or(|oldest| !report.preempted.contains(oldest)));
    }
    assert!(preempted > 0 && server.ended.contains(&order[0]));
    server.run()?;
    server.ended.sort();
    assert_eq!(server.ended, order);
    Ok(())
}

#[test]
fn prompts_with_one_beginning_are_computed_once() -> Result<()> {
    let mut server = Server::new(64, 256, 64, 8)?;
    let prompts: Vec<_> = (0..4).map(|own| prompt(1, 40, own, 50)).collect();
    let ids: Vec<_> = prompts.iter().map(|ids| server.add(ids.clone(), 3)).collect::<Result<_>>()?;
    let first = server.step()?;
    assert_eq!(first.begun, [BegunRequest { request: ids[0], shared: 0, computed: 50 }]);
    let second = server.step()?;
    let begun = ids[1..].iter().map(|&request| BegunRequest { request, shared: 32, computed: 18 });
    assert_eq!(second.begun, begun.collect::<Vec<_>>());
    // A page that four requests share is the page of each.
    assert!(second.pages.iter().all(|of_request| of_request.pages[..2] == first.pages[0].pages[..2]));
    server.run()?;
    for (id, prompt) in ids.iter().zip(&prompts) {
        assert_eq!(server.generated[id], alone(prompt, 3, &[]));
    }
    Ok(())
}

#[test]
fn impossible_requests_and_limits_are_errors_that_change_nothing() -> Result<()> {
    let mut server = Server::new(4, 16, 16, 8)?;
    let too_long = "[scheduler] a prompt of 60 tokens and 6 more need 5 pages, expected at most the table's 4";
    assert_eq!(error_text(server.add(vec![1; 60], 6)), too_long);
    let empty = "[scheduler] the prompt has 0 tokens, and 6 are to be generated, expected at least one each";
    assert_eq!(error_text(server.add(Vec::new(), 6)), empty);
    assert!(error_text(server.add(vec![1], 0)).contains("and 0 are to be generated"));
    assert!(server.scheduler.is_idle() && server.step()? == StepReport::default());
    // The last token is not stored, so this one just fits.
    let id = server.add(vec![1; 60], 5)?;
    server.run()?;
    assert_eq!(server.generated[&id], alone(&[1; 60], 5, &[]));

    let limits = Limits { tokens: 0, chunk: 1, requests: 1 };
    let without_budget = Scheduler::new(PageTable::new(4, PAGE)?, limits);
    assert_eq!(error_text(without_budget), "[scheduler] the limit of tokens is 0, expected at least 1");
    let mut used = PageTable::new(4, PAGE)?;
    used.add();
    let with_used_table = Scheduler::new(used, Limits { tokens: 1, ..limits });
    assert_eq!(error_text(with_used_table), "[scheduler] the table has 1 sequences, expected none");
    Ok(())
}

#[test]
fn step_whose_model_fails_is_computed_again() -> Result<()> {
    let mut server = Server::new(8, 16, 16, 8)?;
    let id = server.add(prompt(0, 0, 1, 20), 6)?;
    for n in 0..4 {
        let failed = server.scheduler.step(|_| bail!("no memory in step {n}"));
        assert_eq!(error_text(failed), format!("no memory in step {n}"));
        let wrong = server.scheduler.step(|_| Ok(vec![1, 2, 3]));
        assert!(error_text(wrong).starts_with("[scheduler] the model returned 3 tokens, expected "));
        server.step()?;
    }
    server.run()?;
    assert_eq!(server.generated[&id], alone(&prompt(0, 0, 1, 20), 6, &[]));
    Ok(())
}
