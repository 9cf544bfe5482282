//! `serve_requests`: each request has the tokens that `causal_lm` generates for it alone.

use std::path::Path;

use rayon::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Run, run, spelled};
use crate::process::{Checkpoint, command};

/// A request of token ids.
#[derive(Clone)]
struct Request {
    ids: Vec<u32>,
    max_tokens: usize,
    arrival: f64,
}

/// Requests of which some begin alike, with up to `most` positions.
fn requests(count: usize, most: usize) -> Vec<Request> {
    let mut requests = Vec::new();
    for n in 0..count {
        let max_tokens = 2 + (n * 5) % (most / 3);
        let len = (3 + n * 11) % (most - max_tokens) + 1;
        let id = |i: usize| if i < 20 { 1 + (i * i) % 35 } else { 1 + (i * 3 + n * 5) % 35 };
        requests.push(Request { ids: (0..len).map(|i| id(i) as u32).collect(), max_tokens, arrival: (n / 3) as f64 });
    }
    requests
}

fn write(requests: &[Request], folder: &Path) -> String {
    let mut lines = String::new();
    for request in requests {
        let Request { ids, max_tokens, arrival } = request;
        lines += &json!({"ids": ids, "max_tokens": max_tokens, "arrival": arrival}).to_string();
        lines.push('\n');
    }
    let file = folder.join("requests.jsonl");
    std::fs::write(&file, lines).expect("requests are written");
    file.to_str().expect("UTF-8").to_string()
}

/// The result of a run.
struct Answers {
    /// The tokens of each request, in the order of the file.
    tokens: Vec<Vec<u32>>,
    table: String,
}

/// Serves requests, all of which have to succeed.
fn serve(model: &Checkpoint, requests: &[Request], options: &[&str]) -> Answers {
    let folder: TempDir = tempfile::tempdir().expect("a folder");
    let mut serving = command("serve_requests");
    serving.arg("--model").arg(&model.path).args(["--requests", &write(requests, folder.path()), "--step-time", "1"]);
    serving.args(options);
    let Run { code, stdout, stderr } = run(serving);
    assert_eq!(code, Some(0), "{model}: {stdout}{stderr}");
    let mut lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    lines.sort_by_key(|line| line["id"].as_str().and_then(|id| id.parse::<usize>().ok()));
    assert_eq!(lines.len(), requests.len(), "{model}");
    let ids = |line: &Value| serde_json::from_value(line["ids"].clone()).expect("ids");
    Answers { tokens: lines.iter().map(ids).collect(), table: stderr }
}

/// Returns the tokens of `causal_lm` for one request.
fn alone(model: &Checkpoint, request: &Request, options: &[&str]) -> Vec<u32> {
    let max_tokens = request.max_tokens.to_string();
    let args = ["--ids", &spelled(&request.ids), "--max-tokens", &max_tokens];
    let printed = model.printed(&[&args, options].concat());
    printed.trim().split(',').map(|id| id.parse().expect("an id")).collect()
}

/// Returns the number at the beginning of a line of the table.
fn number(table: &str, name: &str) -> usize {
    let line = table.lines().find_map(|line| line.strip_prefix(name)).expect(name);
    line.trim().split([' ', ',']).next().and_then(|word| word.parse().ok()).expect(name)
}

/// Returns the number of tokens of prompts that were shared.
fn shared(table: &str) -> usize {
    let (_, after) = table.split_once(" tokens, ").expect("the line of prompts");
    after.split(' ').next().and_then(|word| word.parse().ok()).expect("a number")
}

#[test]
fn served_requests_have_the_tokens_of_causal_lm_alone_with_and_without_preemptions() {
    let requests = requests(8, 90);
    let model = Checkpoint::of("causal_lm", "llama");
    let expected: Vec<_> = requests.par_iter().map(|request| alone(&model, request, &[])).collect();
    for (options, is_preempted) in [
        (&["--pages", "100"][..], false),
        (&["--pages", "7", "--token-budget", "24", "--chunk", "10"], true),
        (&["--pages", "6", "--token-budget", "200", "--batch", "3"], true),
        (&["--pages", "2", "--page-size", "48", "--token-budget", "1"], false),
    ] {
        let Answers { tokens, table } = serve(&model, &requests, options);
        assert_eq!(tokens, expected, "{options:?}");
        assert_eq!(number(&table, "preemptions") > 0, is_preempted, "{options:?}: {table}");
        assert_eq!(number(&table, "requests"), requests.len());
        assert_eq!(number(&table, "prompts"), requests.iter().map(|request| request.ids.len()).sum::<usize>());
        assert_eq!(number(&table, "generated"), expected.iter().map(Vec::len).sum::<usize>());
    }
    let q8 = ["--kv-cache", "q8"];
    let in_q8: Vec<_> = requests[..3].iter().map(|request| alone(&model, request, &q8)).collect();
    let options = [&q8[..], &["--token-budget", "24"]].concat();
    assert_eq!(serve(&model, &requests[..3], &options).tokens, in_q8);
}

/// Models with latent attention, with linear attention, with windows and with indexers are among them.
#[test]
fn models_of_causal_lm_serve_requests_with_the_tokens_of_each_alone_or_are_refused() {
    let all = requests(3, 24);
    let models = Checkpoint::all("causal_lm");
    models.par_iter().for_each(|model| {
        let name = model.path.file_name().and_then(|name| name.to_str()).expect("a name");
        let mut requests = all.clone();
        if name == "phi3_scaled" {
            // The rotary frequencies change after 16 positions.
            requests.retain(|request| request.ids.len() + request.max_tokens <= 16);
        }
        if name == "deepseek_v4" {
            let folder = tempfile::tempdir().expect("a folder");
            let mut serving = command("serve_requests");
            serving.arg("--model").arg(&model.path).args(["--requests", &write(&requests, folder.path())]);
            let Run { code, stderr, .. } = run(serving);
            assert_eq!(code, Some(1), "{model}: {stderr}");
            let reason = "error: [pages] layer 0 of the model attends to compressed keys, which have no pages";
            assert!(stderr.starts_with(reason), "{model}: {stderr}");
            return;
        }
        let Answers { tokens, .. } = serve(model, &requests, &["--pages", "3", "--token-budget", "9"]);
        let expected: Vec<_> = requests.iter().map(|request| alone(model, request, &[])).collect();
        assert_eq!(tokens, expected, "{model}");
    });
}

#[test]
fn served_requests_with_states_share_prefixes_and_have_the_tokens_of_causal_lm_alone() {
    let requests = requests(8, 90);
    let model = Checkpoint::of("causal_lm", "qwen3_next");
    let expected: Vec<_> = requests.par_iter().map(|request| alone(&model, request, &[])).collect();
    for options in [
        &["--pages", "100", "--chunk", "16"][..],
        &["--pages", "7", "--token-budget", "24", "--chunk", "16", "--states", "48"],
        &["--pages", "6", "--batch", "3", "--chunk", "16", "--states", "6"],
    ] {
        let Answers { tokens, table } = serve(&model, &requests, options);
        assert_eq!(tokens, expected, "{options:?}");
        assert!(shared(&table) > 0, "{options:?}: {table}");
    }
}

/// The title of a rectangle in a page: a text, and a period in seconds.
#[derive(Debug, PartialEq)]
struct Title {
    about: String,
    from: f64,
    to: f64,
}

fn titles(page: &str) -> Vec<Title> {
    let mut found = Vec::new();
    for title in page.split("<title>").skip(2) {
        let title = title.split("</title>").next().expect("an end");
        let Some((about, period)) = title.rsplit_once(", ") else { continue };
        let seconds: Vec<f64> = period.split(' ').filter_map(|word| word.parse().ok()).collect();
        found.push(Title { about: about.to_string(), from: seconds[0], to: seconds[1] });
    }
    found
}

#[test]
fn page_of_served_requests_shows_each_page_with_its_requests() {
    let folder = tempfile::tempdir().expect("a folder");
    let requests = folder.path().join("requests.jsonl");
    let ids = |own: u32| (0..20u32).map(|i| if i < 16 { i + 1 } else { own }).collect::<Vec<_>>();
    let mut lines = String::new();
    for (id, own) in [("<one>", 5), ("two & three", 6), ("four", 7)] {
        lines += &format!("{}\n", json!({"id": id, "ids": ids(own), "max_tokens": 30}));
    }
    std::fs::write(&requests, lines).expect("requests are written");
    let page = folder.path().join("new/pool.html");
    let mut serving = command("serve_requests");
    serving.arg("--model").arg(&Checkpoint::of("causal_lm", "llama").path).arg("--requests").arg(&requests);
    serving.args(["--step-time", "1", "--pages", "6", "--page"]).arg(&page);
    let Run { code, stderr, .. } = run(serving);
    assert_eq!(code, Some(0), "{stderr}");
    let html = std::fs::read_to_string(page).expect("the page is written");
    let pages: Vec<_> = titles(&html).into_iter().filter(|title| title.about.starts_with("page ")).collect();

    // The first request computes its prompt alone, and then all share their first page.
    assert!(pages.contains(&Title { about: "page 0: &lt;one&gt;".into(), from: 0.0, to: 1.0 }), "{pages:?}");
    assert!(pages.iter().any(|title| title.about == "page 0: &lt;one&gt;, two &amp; three, four"), "{pages:?}");
    let mut most = 0;
    let mut step = 0.5;
    while step < 100.0 {
        let now: Vec<_> = pages.iter().filter(|title| (title.from..title.to).contains(&step)).collect();
        let mut distinct: Vec<_> = now.iter().map(|title| title.about.split(':').next()).collect();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), now.len(), "a page has two uses at {step}: {now:?}");
        most = most.max(now.len());
        step += 1.0;
    }
    assert_eq!(most, number(&stderr.replace("at most ", ""), "pages"));
    assert_eq!(html.matches("class=\"preempted\"").count(), number(&stderr, "preemptions"));
    assert!(number(&stderr, "preemptions") > 0 && html.contains(" returns its pages at "));
    assert!(!html.contains("<one>"));
}
