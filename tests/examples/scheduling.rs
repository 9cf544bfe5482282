//! The scheduler of `serve_requests`: each request has the tokens that it has alone.

use std::collections::{BTreeMap, BTreeSet};

use candle_attention::PageTable;
use candle_core::{Result, bail};

use crate::common::error_text;
use crate::hash_model::{BEGINNING, PAGE, Server, VOCAB, alone, alone_in_window, hash_after};
use crate::scheduler::{BegunRequest, Limits, Request, Scheduler, StepReport};

/// Adds 24 requests, of which some begin alike, while others are served, and runs all of them. Returns the reports.
fn serve_requests_that_arrive(server: &mut Server) -> Result<Vec<StepReport>> {
    let mut expected = BTreeMap::new();
    let mut reports = Vec::new();
    for n in 0..24u32 {
        let len = 1 + (n as usize * 17) % 60;
        let max_tokens = 1 + (n as usize * 11) % 35;
        let ids = prompt(n % 3, 40, n, len);
        let end_tokens = if n % 4 == 0 { vec![3, 8] } else { Vec::new() };
        let request = Request { prompt: ids.clone(), max_tokens, end_tokens: end_tokens.clone() };
        let tokens = alone_in_window(&ids, max_tokens, &end_tokens, server.pool.window);
        expected.insert(server.scheduler.add(request)?, tokens);
        for _ in 0..n % 3 {
            reports.push(server.step()?);
        }
    }
    reports.extend(server.run()?);
    assert_eq!(server.generated, expected, "{:?}", server.limits);
    Ok(reports)
}

fn shared_tokens(reports: &[StepReport]) -> usize {
    reports.iter().flat_map(|report| &report.begun).map(|begun| begun.shared).sum()
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
        let reports = serve_requests_that_arrive(&mut Server::new(pages, tokens, chunk, requests)?)?;
        assert_eq!(preemptions(&reports) > 0, pages < 64 && requests > 1, "{pages} pages");
        assert!(shared_tokens(&reports) > 0, "{pages} pages");
    }
    Ok(())
}

#[test]
fn requests_with_states_have_the_tokens_that_they_have_alone_and_share_prefixes_with_states() -> Result<()> {
    for (pages, states, tokens, chunk, requests) in
        [(64, 40, 40, 16, 8), (12, 16, 40, 16, 8), (7, 18, 9, 5, 20), (64, 40, 100, 32, 8), (6, 40, 1, 1, 1)]
    {
        let table = PageTable::new(pages, PAGE)?.with_states(states)?;
        let mut server = Server::of_table(table, Limits { tokens, chunk, requests })?;
        let reports = serve_requests_that_arrive(&mut server)?;
        assert!(shared_tokens(&reports) > 0, "{pages} pages, chunks of {chunk}");
        assert_eq!(server.scheduler.table().free_states(), states);
    }
    let limits = Limits { tokens: 8, chunk: 4, requests: 3 };
    let error = error_text(Scheduler::new(PageTable::new(4, PAGE)?.with_states(5)?, limits));
    assert_eq!(error, "[scheduler] the table has 5 states, expected two for each of 3 requests at least");
    Ok(())
}

#[test]
fn chunks_of_prompts_end_with_pages_in_a_table_with_states() -> Result<()> {
    let table = PageTable::new(64, PAGE)?.with_states(8)?;
    let mut server = Server::of_table(table, Limits { tokens: 40, chunk: 40, requests: 4 })?;
    server.add(prompt(0, 100, 1, 100), 1)?;
    let lens: Vec<_> = server.run()?.iter().map(|report| report.tokens).collect();
    assert_eq!(lens, [32, 32, 36]);
    // The states after 32 and 64 tokens are found.
    server.add(prompt(0, 80, 2, 90), 1)?;
    assert_eq!(server.step()?.begun[0].shared, 64);
    Ok(())
}

#[test]
fn requests_in_windows_return_pages_and_have_the_tokens_that_they_have_alone() -> Result<()> {
    for (pages, tokens, chunk, requests, window) in
        [(64, 40, 16, 8, 20), (6, 40, 16, 8, 20), (4, 9, 5, 20, 7), (3, 1, 1, 1, 16), (64, 40, 16, 8, 1)]
    {
        let mut server = Server::new(pages, tokens, chunk, requests)?.with_window(window)?;
        serve_requests_that_arrive(&mut server)?;
    }
    // A request of 13 pages in a table of 4.
    let mut server = Server::new(4, 16, 16, 2)?.with_window(20)?;
    let id = server.add(prompt(0, 0, 1, 100), 100)?;
    let reports = server.run()?;
    assert_eq!(server.generated[&id], alone_in_window(&prompt(0, 0, 1, 100), 100, &[], 20));
    assert!(reports.iter().all(|report| report.used_pages <= 4));
    // Again, beginning with what is still found.
    let again = server.add(prompt(0, 0, 1, 100), 100)?;
    server.run()?;
    assert_eq!(server.generated[&again], server.generated[&id]);
    assert_eq!(
        error_text(Server::new(4, 16, 16, 2)?.with_window(0).map(|_| ())),
        "[scheduler] the window is 0, expected at least 1"
    );
    let mut narrow = Server::new(3, 16, 16, 2)?.with_window(20)?;
    let expected = "[scheduler] a prompt of 100 tokens and 100 more need 4 pages, expected at most the table's 3";
    assert_eq!(error_text(narrow.add(prompt(0, 0, 1, 100), 100)), expected);
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

/// Serves 32 prompts of 50 to 500 tokens, whose first 200 are equal, with 64 tokens each. Tokens at one position after
/// equal beginnings are one distinct position.
#[test]
fn used_pages_have_at_most_a_tenth_more_positions_than_the_distinct_ones() -> Result<()> {
    let mut server = Server::new(2048, 512, 256, 64)?;
    let mut prompts = BTreeMap::new();
    for n in 0..32 {
        let prompt = prompt(0, 200, n, 50 + (n as usize * 2897) % 451);
        prompts.insert(server.add(prompt.clone(), 64)?, prompt);
    }
    let mut most_used = 0;
    let mut distinct_then = 0;
    while !server.scheduler.is_idle() {
        let report = server.step()?;
        let generates = |id| server.generated.contains_key(&id);
        if report.used_pages <= most_used || !report.pages.iter().all(|of_request| generates(of_request.request)) {
            continue;
        }
        let mut distinct = BTreeSet::new();
        for of_request in &report.pages {
            let (prompt, generated) = (&prompts[&of_request.request], &server.generated[&of_request.request]);
            let mut hash = BEGINNING;
            // The last token is not stored.
            for (position, &token) in prompt.iter().chain(&generated[..generated.len() - 1]).enumerate() {
                hash = hash_after(hash, &[token]);
                distinct.insert((position, hash));
            }
        }
        most_used = report.used_pages;
        distinct_then = distinct.len();
    }
    let share = (most_used * PAGE) as f64 / distinct_then as f64;
    assert!(distinct_then > 4000 && share <= 1.1, "{most_used} pages for {distinct_then} positions: {share:.3}");
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
