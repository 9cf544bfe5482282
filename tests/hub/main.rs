//! Checkpoints from the hub: from a cache that the tests lay out, and from a server on this machine. The files of
//! `texts/` have what comes of each call; `UPDATE_EXPECT=1 cargo test --features hub --test hub` writes them.

#![cfg(feature = "hub")]

mod child;
mod server;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_attention::hub::HubModel;
use candle_core::Result;
use child::{COMMIT, outcome};
use server::{Mood, Server};
use tempfile::TempDir;

fn assert_reviewed(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hub/texts").join(file).with_extension("txt");
    expect_test::expect_file![path].assert_eq(text);
}

#[test]
fn malformed_names_are_refused() {
    let ids = [
        "",
        "@main",
        "a b",
        "org/name\n",
        "org/na:me",
        "org\\name",
        "../x",
        "org/..",
        "org/na..me",
        "org/na--me",
        "-org/name",
        "/name",
        "org/",
        "a/b/c",
        "https://huggingface.co/org/name",
        "org/name.git",
        &"n".repeat(97),
    ];
    let mut text: String = ids.iter().map(|id| outcome(HubModel::new(id)) + "\n").collect();
    for revision in ["", "..", "a/../../b", "/etc", "a//b", ".hidden", "two words", "a\\b"] {
        let error = outcome(HubModel::new(&format!("org/name@{revision}")));
        assert_eq!(error, outcome(HubModel::new("org/name").and_then(|model| model.with_revision(revision))));
        text += &(error + "\n");
    }
    for path in ["", "/etc/passwd", "a/../../b.json", "./config.json", "C:config.json", "a\\b.json"] {
        text += &(outcome(HubModel::new("org/name").and_then(|model| model.with_file(path))) + "\n");
    }
    assert_reviewed("names", &text);
}

#[test]
fn secrets_do_not_show() -> Result<()> {
    let model = HubModel::new("org/name@v1")?.with_token("hf_secret").with_endpoint("http://user:secret@hub");
    assert!(!format!("{model:?}").contains("secret"), "{model:?}");
    assert_eq!(model.to_string(), "org/name@v1");
    Ok(())
}

const INDEX: &str = r#"{"metadata": {"total_size": 3}, "weight_map": {
    "layers.0.attn.q.weight": "model-00002-of-00003.safetensors",
    "layers.0.attn.k.weight": "model-00001-of-00003.safetensors",
    "layers.0.attn_norm.weight": "model-00003-of-00003.safetensors",
    "layers.01.attn.q.weight": "model-00003-of-00003.safetensors"}}"#;
const CONFIG: (&str, &str) = ("config.json", "{}");
const SHARDS: [(&str, &str); 6] = [
    CONFIG,
    ("model.safetensors.index.json", INDEX),
    ("model-00001-of-00003.safetensors", "1"),
    ("model-00002-of-00003.safetensors", "2"),
    ("model-00003-of-00003.safetensors", "3"),
    ("model-00004-of-00003.safetensors", "not in the index"),
];

/// Neither is `attn_norm` below `attn`, nor `layers.01` below `layers.0`: both are in shard 3.
#[test]
fn offline_the_cache_is_looked_through() {
    let weights = ("model.safetensors", "w");
    let index = |shard: &str| format!(r#"{{"weight_map": {{"a": "model-1.safetensors", "b": "{shard}"}}}}"#);
    let evil =
        ["../evil.safetensors", "/evil.safetensors", "a/../../evil.safetensors", "..\\\\evil.safetensors"].map(index);
    let evil = evil.iter().map(|index| {
        vec![
            CONFIG,
            ("model.safetensors.index.json", index),
            ("model-1.safetensors", "w"),
            ("../evil.safetensors", "w"),
        ]
    });
    let no_index = |index| vec![CONFIG, ("model.safetensors.index.json", index)];
    let mut layouts = vec![
        vec![CONFIG, ("tokenizer.json", "{}"), weights],
        vec![CONFIG, weights, ("modules.json", "[]"), ("1_Pooling/config.json", "{}")],
        vec![CONFIG, weights, ("pytorch_model.bin", "w")],
        vec![CONFIG, ("pytorch_model.bin", "w")],
        vec![],
        vec![CONFIG],
        SHARDS[..3].to_vec(),
        SHARDS.to_vec(),
        no_index("[]"),
        no_index(r#"{"weight_map": {}}"#),
    ];
    layouts.extend(evil);
    let mut text = String::new();
    for layout in &layouts {
        let cache = TempDir::new().expect("a folder");
        let folder = cache.path().join("models--org--name");
        for (name, bytes) in layout
            .iter()
            .map(|(name, bytes)| (format!("snapshots/{COMMIT}/{name}"), *bytes))
            .chain([("refs/main".into(), COMMIT)])
        {
            fs::create_dir_all(folder.join(&name).parent().expect("a folder")).expect("a folder");
            fs::write(folder.join(name), bytes).expect("a file");
        }
        let names: Vec<_> = layout.iter().map(|(name, _)| *name).collect();
        text += &format!("a cache with {}\n", names.join(", "));
        let model = || Ok(HubModel::new("org/name")?.with_cache_dir(cache.path()).offline());
        let of = |prefix: &str| outcome(model().map(|model| model.with_tensors(prefix)));
        let mut found = vec![outcome(model()), outcome(model().and_then(|model| model.with_revision(COMMIT)))];
        let files = ["1_Pooling/config.json", "absent.json", "modules.json"];
        found.push(outcome(model().and_then(|model| files.into_iter().try_fold(model, HubModel::with_file))));
        found.extend(["a", "layers.0.attn", "layers.0.attn.q.weight", "layers.01", "layers.7"].map(of));
        found.dedup();
        text.extend(
            found.iter().map(|found| format!("    {found}\n").replace(&cache.path().display().to_string(), "CACHE")),
        );
    }
    assert_reviewed("offline", &text);
}

const FILES: [(&str, &[u8]); 3] =
    [("config.json", br#"{"hidden_size": 8}"#), ("tokenizer.json", b"{}"), ("model.safetensors", &[7; 100_000])];

/// Calls to a server with one cache, and what came of them: the answer, and the requests.
struct Calls {
    server: Arc<Server>,
    home: TempDir,
    text: String,
}

impl Calls {
    fn to(files: &[(&'static str, &'static [u8])]) -> Self {
        Self { server: Server::start(files), home: TempDir::new().expect("a folder"), text: String::new() }
    }

    fn ask(&mut self, model: &str, environment: &[(&str, &str)]) {
        let endpoint = [("HF_ENDPOINT", self.server.endpoint.as_str())];
        let found = child::fetch(self.home.path(), model, &[&endpoint, environment].concat());
        assert!(!found.contains("secret"), "{found}");
        let said: String = environment.iter().map(|(name, value)| format!("{name}={value} ")).collect();
        let mut text = format!("{said}{model}\n    {found}\n");
        text.extend(self.server.requests().iter().map(|request| format!("    {request}\n")));
        let text = text.replace(&self.server.endpoint["http://".len()..], "HUB");
        self.text += &text.replace(&self.home.path().display().to_string(), "HOME").replace(COMMIT, "COMMIT");
    }

    fn now(&mut self, mood: Mood) {
        *self.server.mood.lock().expect("a mood") = mood;
        self.text += &format!("the hub is {mood:?}\n");
    }
}

/// Once downloaded it is found offline; absent files are not asked for again; a model may have been renamed.
#[test]
fn what_the_hub_has_is_downloaded_once() {
    let mut calls = Calls::to(&FILES);
    calls.ask("org/name", &[("HF_TOKEN", "hf_test")]);
    for (name, bytes) in FILES {
        let folder = calls.home.path().join("hub/models--org--name/snapshots").join(COMMIT);
        assert_eq!(fs::read(folder.join(name)).expect("the file"), bytes);
    }
    calls.ask("org/name", &[]);
    calls.ask("org/name", &[("HF_HUB_OFFLINE", "1")]);
    calls.ask("org/name", &[("HF_HUB_OFFLINE", "yes")]);
    calls.ask("org/name", &[("TRANSFORMERS_OFFLINE", "1")]);
    calls.ask("org/name", &[("HF_HUB_OFFLINE", "True"), ("HF_HUB_CACHE", "/nowhere")]);
    calls.ask("old/name", &[]);
    assert_reviewed("downloads", &calls.text);

    let mut calls = Calls::to(&[("config.json", b"{}"), ("pytorch_model.bin", b"w"), ("a/config.json", b"{\"a\": 1}")]);
    let files = [("HUB_TEST_FILES", "a/config.json,absent.json")];
    calls.ask("name@refs/pr/1", &files);
    calls.ask("name@refs/pr/1", &files);
    calls.ask(&format!("name@{COMMIT}"), &files);
    assert_reviewed("more_files", &calls.text);

    let mut calls = Calls::to(&SHARDS.map(|(name, text)| (name, text.as_bytes())));
    calls.ask("org/name", &[("HUB_TEST_TENSORS", "layers.01")]);
    assert_reviewed("shards", &calls.text);
}

#[test]
fn what_the_hub_does_not_have_or_give_is_told_apart() {
    let mut calls = Calls::to(&[("README.md", b"")]);
    ["org/name", "org/name@v9", "org/nome"].iter().for_each(|model| calls.ask(model, &[]));
    let mut bare = Calls::to(&[("config.json", b"{}")]);
    bare.ask("org/name", &[]);
    let mut full = Calls::to(&FILES);
    for (status, code) in
        [(403, "GatedRepo"), (401, "GatedRepo"), (401, "RepoNotFound"), (403, "Other"), (429, ""), (502, "")]
    {
        full.now(Mood::Refuses(status, code));
        full.ask("org/name", &[]);
    }
    // The page of an error does not stay in the cache.
    full.now(Mood::ErrorPage);
    full.ask("org/name", &[]);
    full.ask("org/name", &[("HF_HUB_OFFLINE", "1")]);
    full.now(Mood::Open);
    full.ask("org/name", &[]);
    assert_reviewed("refusals", &[calls.text, bare.text, full.text].concat());
}

/// Where there is no network, or no answer, the cache is used, and a miss fails soon. Offline needs no certificates,
/// which a container without the package `ca-certificates` lacks.
#[test]
fn without_an_answer_the_cache_is_used() {
    let mut calls = Calls::to(&FILES);
    calls.now(Mood::Stalls);
    calls.ask("org/name", &[("HF_HUB_DOWNLOAD_TIMEOUT", "2")]);
    calls.now(Mood::Open);
    calls.ask("org/name", &[]);
    calls.now(Mood::Silent);
    calls.ask("org/name", &[("HF_HUB_ETAG_TIMEOUT", "1")]);
    calls.ask("org/other", &[("HF_HUB_ETAG_TIMEOUT", "1")]);
    calls.server.stop();
    let start = Instant::now();
    calls.ask("org/name", &[]);
    calls.ask("org/other", &[]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    if cfg!(target_os = "linux") {
        let bare = [("SSL_CERT_FILE", "/dev/null"), ("SSL_CERT_DIR", "/nowhere")];
        calls.ask("org/name", &bare);
        calls.ask("org/name", &[&bare[..], &[("HF_HUB_OFFLINE", "1")]].concat());
    }
    assert_reviewed("no_answer", &calls.text);
}

#[test]
fn an_endpoint_that_is_no_url_is_named_and_credentials_are_not_printed() {
    let mut calls = Calls::to(&FILES);
    for endpoint in ["", "huggingface.co", "localhost:8080", "ftp://hub", "user:secret@hub", "ftp://user:secret@hub"] {
        calls.ask("org/name", &[("HF_ENDPOINT", endpoint)]);
    }
    let endpoint = calls.server.endpoint.replace("http://", "http://user:secret@");
    calls.ask("org/other", &[("HF_ENDPOINT", &endpoint)]);
    calls.now(Mood::Refuses(403, "GatedRepo"));
    calls.ask("org/name", &[("HF_ENDPOINT", &endpoint)]);
    calls.server.stop();
    calls.ask("org/name", &[("HF_ENDPOINT", &endpoint)]);
    assert_reviewed("endpoints", &calls.text);
}
