//! Checkpoints from the hub: from a cache that the tests lay out, and from a server on this machine.

#![cfg(feature = "hub")]

mod child;
mod server;

use std::error::Error;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use candle_attention::hub::{HubFiles, HubModel};
use child::{Child, assert_fails, found, names};
use server::{COMMIT, Mood, Server};
use tempfile::TempDir;

type TestResult = Result<(), Box<dyn Error>>;

const INDEX: &str = r#"{"metadata": {"total_size": 3}, "weight_map": {
    "layers.0.attn.q.weight": "model-00002-of-00003.safetensors",
    "layers.0.attn.k.weight": "model-00001-of-00003.safetensors",
    "layers.0.attn_norm.weight": "model-00003-of-00003.safetensors",
    "layers.01.attn.q.weight": "model-00003-of-00003.safetensors"}}"#;

/// Lays `files` out in a cache as the model `org/name`, whose branch `main` is at [`COMMIT`].
fn cache_with(files: &[(&str, &str)]) -> Result<TempDir, Box<dyn Error>> {
    let cache = TempDir::new()?;
    let folder = cache.path().join("models--org--name");
    fs::create_dir_all(folder.join("refs"))?;
    fs::write(folder.join("refs/main"), COMMIT)?;
    for (name, text) in files {
        let path = folder.join("snapshots").join(COMMIT).join(name);
        fs::create_dir_all(path.parent().ok_or("no parent")?)?;
        fs::write(path, text)?;
    }
    Ok(cache)
}

fn offline(cache: &TempDir) -> candle_core::Result<HubModel> {
    Ok(HubModel::new("org/name")?.with_cache_dir(cache.path()).offline())
}

fn weights(result: candle_core::Result<HubFiles>) -> Result<Vec<String>, String> {
    result.map(|found| names(&found.weights)).map_err(|e| e.to_string())
}

#[test]
fn malformed_ids_and_revisions_are_refused() {
    let long = "n".repeat(97);
    for (id, fault) in [
        ("", "is empty"),
        ("@main", "is empty"),
        ("a b", "has ' '"),
        ("org/name\n", "has '\\n'"),
        ("org/na:me", "has ':'"),
        ("org\\name", "has '\\\\'"),
        ("../x", "begins or ends with"),
        ("org/..", "begins or ends with"),
        ("org/na..me", "has `..`"),
        ("org/na--me", "has `--`"),
        ("-org/name", "begins or ends with"),
        ("/name", "nothing on one side"),
        ("org/", "nothing on one side"),
        ("a/b/c", "has 2 slashes"),
        ("https://huggingface.co/org/name", "has 4 slashes"),
        ("org/name.git", "ends with `.git`"),
        (long.as_str(), "has 97 characters"),
    ] {
        let result = weights(HubModel::new(id).and_then(|model| model.fetch()));
        assert_fails(result, &["the model id", fault, "expected `name` or `organisation/name`"]);
    }
    for (revision, fault) in [
        ("", "is empty"),
        ("..", "has `..`"),
        ("a/../../b", "has `..`"),
        ("/etc", "is empty or begins with `.`"),
        ("a//b", "is empty or begins with `.`"),
        (".hidden", "is empty or begins with `.`"),
        ("two words", "has ' '"),
        ("a\\b", "has '\\\\'"),
    ] {
        let at = HubModel::new(&format!("org/name@{revision}"));
        let with = HubModel::new("org/name").and_then(|model| model.with_revision(revision));
        for result in [at, with] {
            let result = weights(result.and_then(|model| model.fetch()));
            assert_fails(result, &["the revision", fault, "a branch, a tag or a commit"]);
        }
    }
}

#[test]
fn the_token_does_not_show() -> TestResult {
    let model = HubModel::new("org/name@v1")?.with_token("hf_secret");
    assert!(!format!("{model:?}").contains("hf_secret"));
    assert_eq!(model.to_string(), "org/name@v1");
    Ok(())
}

#[test]
fn the_cache_is_enough_by_branch_and_by_commit() -> TestResult {
    let cache = cache_with(&[("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", "w")])?;
    let folder = cache.path().join("models--org--name/snapshots").join(COMMIT);
    for model in [offline(&cache)?, offline(&cache)?.with_revision(COMMIT)?] {
        let found = model.fetch()?;
        assert_eq!(found.commit, COMMIT);
        assert_eq!(found.config, folder.join("config.json"));
        assert_eq!(found.tokenizer, Some(folder.join("tokenizer.json")));
        assert_eq!(found.weights, [folder.join("model.safetensors")]);
    }
    Ok(())
}

#[test]
fn further_files_are_found_beside_the_config() -> TestResult {
    let pooling = "1_Pooling/config.json";
    let cache =
        cache_with(&[("config.json", "{}"), ("model.safetensors", "w"), ("modules.json", "[]"), (pooling, "{}")])?;
    let found = offline(&cache)?.with_file(pooling)?.with_file("absent.json")?.with_file("modules.json")?.fetch()?;
    assert_eq!(found.files, [pooling, "modules.json"].map(|file| found.config.with_file_name(file)));
    for (path, fault) in [
        ("", "has a part between slashes that is empty"),
        ("/etc/passwd", "has a part between slashes that is empty"),
        ("a/../../b.json", "`..`"),
        ("./config.json", "`.`"),
        ("C:config.json", "has ':'"),
        ("a\\b.json", "has '\\\\'"),
    ] {
        let result = weights(HubModel::new("org/name")?.with_file(path).and_then(|model| model.fetch()));
        assert_fails(result, &[&format!("the file {path:?}"), fault, "expected a path within the model"]);
    }
    Ok(())
}

#[test]
fn safetensors_come_before_pickles_and_a_tokenizer_may_be_missing() -> TestResult {
    let both = cache_with(&[("config.json", "{}"), ("model.safetensors", "w"), ("pytorch_model.bin", "w")])?;
    let found = offline(&both)?.fetch()?;
    assert_eq!(found.tokenizer, None);
    assert_eq!(names(&found.weights), ["model.safetensors"]);

    let pickle = cache_with(&[("config.json", "{}"), ("pytorch_model.bin", "w")])?;
    assert_eq!(weights(offline(&pickle)?.fetch())?, ["pytorch_model.bin"]);
    Ok(())
}

#[test]
fn offline_a_missing_file_is_named_with_its_model_revision_and_cache() -> TestResult {
    let empty = TempDir::new()?;
    let folder = empty.path().join("models--org--name").display().to_string();
    let asked = offline(&empty)?.with_revision("v1")?;
    let parts = ["config.json of org/name@v1", "not in the cache", &folder, "offline mode was asked for"];
    assert_fails(weights(asked.fetch()), &parts);

    let bare = cache_with(&[("config.json", "{}")])?;
    let every_name =
        "model.safetensors, model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json of";
    assert_fails(weights(offline(&bare)?.fetch()), &[every_name]);

    let index = ("model.safetensors.index.json", INDEX);
    let holed = cache_with(&[("config.json", "{}"), index, ("model-00001-of-00003.safetensors", "w")])?;
    let result = weights(offline(&holed)?.fetch());
    assert_fails(result, &["model-00002-of-00003.safetensors of org/name@main: not in the cache"]);
    Ok(())
}

#[test]
fn the_shards_are_those_of_the_index_in_order() -> TestResult {
    let cache = cache_with(&[
        ("config.json", "{}"),
        ("model.safetensors.index.json", INDEX),
        ("model-00001-of-00003.safetensors", "1"),
        ("model-00002-of-00003.safetensors", "2"),
        ("model-00003-of-00003.safetensors", "3"),
        ("model-00004-of-00003.safetensors", "not in the index"),
    ])?;
    let shard = |i: usize| format!("model-{i:05}-of-00003.safetensors");
    let all = weights(offline(&cache)?.fetch())?;
    assert_eq!(all, [shard(1), shard(2), shard(3)]);
    let of = |prefix: &str| Ok::<_, candle_core::Error>(weights(offline(&cache)?.with_tensors(prefix).fetch()));
    // Neither `attn_norm` is below `attn`, nor `layers.01` below `layers.0`: both are in shard 3.
    assert_eq!(of("layers.0.attn")??, [shard(1), shard(2)]);
    assert_eq!(of("layers.0.attn.q.weight")??, [shard(2)]);
    assert_eq!(of("layers.01")??, [shard(3)]);
    let parts = ["has 4 tensors, none of which is \"layers.7\"", "the first is \"layers.0.attn.k.weight\""];
    assert_fails(of("layers.7")?, &parts);
    Ok(())
}

#[test]
fn an_index_that_points_outside_of_its_folder_is_refused() -> TestResult {
    for evil in ["../evil.safetensors", "/evil.safetensors", "a/../../evil.safetensors", "..\\\\evil.safetensors"] {
        let index = format!(r#"{{"weight_map": {{"a": "model-1.safetensors", "b": "{evil}"}}}}"#);
        let cache = cache_with(&[
            ("config.json", "{}"),
            ("model.safetensors.index.json", &index),
            ("model-1.safetensors", "w"),
            ("../evil.safetensors", "w"),
        ])?;
        let parts = ["model.safetensors.index.json of org/name@main: names the shard", "evil", "\", which "];
        assert_fails(weights(offline(&cache)?.fetch()), &parts);
        // Also where the shard wanted is another one.
        assert_fails(weights(offline(&cache)?.with_tensors("a").fetch()), &parts);
    }
    for (index, fault) in [("[]", "not an index"), (r#"{"weight_map": {}}"#, "names no tensors")] {
        let cache = cache_with(&[("config.json", "{}"), ("model.safetensors.index.json", index)])?;
        assert_fails(weights(offline(&cache)?.fetch()), &[fault]);
    }
    Ok(())
}

const FILES: [(&str, &[u8]); 3] =
    [("config.json", br#"{"hidden_size": 8}"#), ("tokenizer.json", b"{}"), ("model.safetensors", &[7; 100_000])];

#[test]
fn a_model_is_downloaded_once_and_then_found_offline() -> TestResult {
    let server = Server::start("org/name", &FILES, Mood::Open)?;
    let fetch = |environment: &[_]| server.fetch("org/name", environment);

    let first = fetch(&[("HF_TOKEN", "hf_test")])?;
    let folder = server.home.path().join("hub/models--org--name/snapshots").join(COMMIT);
    for (path, (name, bytes)) in first.iter().zip(FILES) {
        assert_eq!(Path::new(path), folder.join(name));
        assert_eq!(fs::read(path)?, bytes);
    }
    assert_eq!(first.len(), FILES.len());
    let asked = [("main", "config.json"), (COMMIT, "tokenizer.json"), (COMMIT, "model.safetensors")];
    let line = |(revision, file)| {
        let path = format!("/org/name/resolve/{revision}/{file} token");
        [format!("HEAD {path}"), format!("GET {path}")]
    };
    let mut requests = asked.map(line).concat();
    requests.push("GET /store/model.safetensors token".to_string());
    assert_eq!(server.requests(), requests);

    assert_eq!(fetch(&[])?, first);
    assert_eq!(server.requests(), ["HEAD /org/name/resolve/main/config.json"]);

    for (variable, value) in [("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "yes"), ("TRANSFORMERS_OFFLINE", "1")] {
        assert_eq!(fetch(&[(variable, value)])?, first);
    }
    let elsewhere = server.home.path().join("elsewhere");
    let cache = elsewhere.display().to_string();
    let lost = fetch(&[("HF_HUB_OFFLINE", "True"), ("HF_HUB_CACHE", &cache)]);
    assert_fails(lost, &["config.json of org/name@main", &cache, "HF_HUB_OFFLINE is set"]);
    assert_eq!(server.requests(), [""; 0]);
    Ok(())
}

#[test]
fn a_model_that_was_renamed_is_found() -> TestResult {
    let server = Server::start("org/name", &FILES, Mood::Open)?;
    assert_eq!(found(server.fetch("old/name", &[]))?, FILES.map(|(name, _)| name));
    Ok(())
}

#[test]
fn a_file_known_to_be_absent_is_not_asked_for_again() -> TestResult {
    let files = [("config.json", &b"{}"[..]), ("pytorch_model.bin", b"w")];
    let server = Server::start("name", &files, Mood::Open)?;
    let fetch = || found(server.fetch("name@refs/pr/1", &[]));
    assert_eq!(fetch()?, ["config.json", "pytorch_model.bin"]);
    assert_eq!(server.requests().len(), 7);
    assert_eq!(fetch()?, ["config.json", "pytorch_model.bin"]);
    assert_eq!(server.requests(), ["HEAD /name/resolve/refs%2Fpr%2F1/config.json"]);
    Ok(())
}

#[test]
fn a_further_file_is_downloaded_once_and_its_absence_remembered() -> TestResult {
    let pooling = "1_Pooling/config.json";
    let files = [("config.json", &b"{}"[..]), (pooling, b"{\"a\": 1}"), ("model.safetensors", b"w")];
    let server = Server::start("org/name", &files, Mood::Open)?;
    let fetch = || server.fetch("org/name", &[("HUB_TEST_FILES", "modules.json,1_Pooling/config.json")]);
    let paths = fetch()?;
    let folder = server.home.path().join("hub/models--org--name/snapshots").join(COMMIT);
    assert_eq!(Path::new(&paths[1]), folder.join(pooling));
    assert_eq!(fs::read(&paths[1])?, b"{\"a\": 1}");
    assert_eq!(found(Ok(paths.clone()))?, ["config.json", "config.json", "model.safetensors"]);
    server.requests();
    assert_eq!(fetch()?, paths);
    assert_eq!(server.requests(), ["HEAD /org/name/resolve/main/config.json"]);
    Ok(())
}

#[test]
fn only_the_shards_of_the_tensors_wanted_are_downloaded() -> TestResult {
    let files = [
        ("config.json", &b"{}"[..]),
        ("model.safetensors.index.json", INDEX.as_bytes()),
        ("model-00001-of-00003.safetensors", b"1"),
        ("model-00002-of-00003.safetensors", b"2"),
        ("model-00003-of-00003.safetensors", b"3"),
    ];
    let server = Server::start("org/name", &files, Mood::Open)?;
    let found = found(server.fetch("org/name", &[("HUB_TEST_TENSORS", "layers.01")]))?;
    assert_eq!(found, ["config.json", "model-00003-of-00003.safetensors"]);
    assert!(!server.requests().iter().any(|line| line.contains("00001") || line.contains("00002")));
    Ok(())
}

#[test]
fn what_the_hub_does_not_have_is_told_apart() -> TestResult {
    let server = Server::start("org/name", &[("README.md", b"")], Mood::Open)?;
    let ask = |model| server.fetch(model, &[]);
    assert_fails(ask("org/name"), &["config.json of org/name@main: not found", "has no such file at main"]);
    assert_fails(ask("org/name@v9"), &["config.json of org/name@v9: not found", "has no revision v9"]);
    assert_fails(ask("org/nome"), &["config.json of org/nome@main: not found", "has no model org/nome"]);

    let bare = Server::start("org/name", &[("config.json", b"{}")], Mood::Open)?;
    let result = bare.fetch("org/name", &[]);
    assert_fails(result, &["model.safetensors, model.safetensors.index.json", "has no such file at main"]);
    Ok(())
}

#[test]
fn a_gated_or_private_model_says_what_is_needed() -> TestResult {
    let terms = ["accept its terms at http://", "/org/name, then set HF_TOKEN"];
    for (mood, parts) in [
        (Mood::Refuses(403, "GatedRepo"), ["gated (403)", terms[0], terms[1]]),
        (Mood::Refuses(401, "GatedRepo"), ["gated (401)", terms[0], terms[1]]),
        (Mood::Refuses(401, "RepoNotFound"), ["answered 401", "no such model, or it is private", "set HF_TOKEN"]),
        (Mood::Refuses(403, "Other"), ["answered 403 (Other)", "HF_TOKEN is missing or may not", "token that may"]),
        (Mood::Refuses(429, ""), ["too many requests", "try again later", "HF_TOKEN"]),
        (Mood::Refuses(502, ""), ["answered 502", "Bad Gateway", "try again later"]),
    ] {
        let server = Server::start("org/name", &FILES, mood)?;
        assert_fails(server.fetch("org/name", &[]), &[&parts[..], &["config.json of org/name@main"]].concat());
    }
    Ok(())
}

/// A home whose cache has the model, and an endpoint where nobody listens any more.
fn cut_off() -> Result<(TempDir, String), Box<dyn Error>> {
    let server = Server::start("org/name", &FILES, Mood::Open)?;
    let home = TempDir::new()?;
    Child::new(home.path(), "org/name").at(&server.endpoint).fetch()?;
    Ok((home, server.endpoint.clone()))
}

#[test]
fn without_a_network_the_cache_is_used_and_a_miss_fails_soon() -> TestResult {
    let (home, endpoint) = cut_off()?;
    let start = Instant::now();
    let names = ["config.json", "tokenizer.json", "model.safetensors"];
    let cached = Child::new(home.path(), "org/name").at(&endpoint);
    assert_eq!(found(cached.fetch())?, names);
    let result = Child::new(home.path(), "org/other").at(&endpoint).fetch();
    assert_fails(result, &["config.json of org/other@main: no connection to http://127", "check the network"]);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    Ok(())
}

#[test]
fn a_silent_hub_is_not_waited_for() -> TestResult {
    let (home, _) = cut_off()?;
    let server = Server::start("org/name", &FILES, Mood::Silent)?;
    let ask = |model| {
        let child = Child::new(home.path(), model).at(&server.endpoint);
        child.with(&[("HF_HUB_ETAG_TIMEOUT", "1")]).fetch()
    };
    assert_eq!(found(ask("org/name"))?.len(), FILES.len());
    assert_fails(ask("org/other"), &["config.json of org/other@main: no answer from http://127", "in 1s"]);
    Ok(())
}

#[test]
fn a_download_that_stands_still_is_given_up() -> TestResult {
    let server = Server::start("org/name", &FILES, Mood::Stalls)?;
    let result = server.fetch("org/name", &[("HF_HUB_DOWNLOAD_TIMEOUT", "2")]);
    assert_fails(result, &["config.json of org/name@main", "stood still for 2s after 9 bytes"]);
    Ok(())
}

#[test]
fn the_page_of_an_error_does_not_stay_in_the_cache() -> TestResult {
    let server = Server::start("org/name", &FILES, Mood::ErrorPage)?;
    let parts = ["config.json of org/name@main", "announced 18 bytes and sent 34", "not kept"];
    assert_fails(server.fetch("org/name", &[]), &parts);
    let offline = server.fetch("org/name", &[("HF_HUB_OFFLINE", "1")]);
    assert_fails(offline, &["config.json of org/name@main: not in the cache"]);

    let healed = Server::start("org/name", &FILES, Mood::Open)?;
    let again = Child::new(server.home.path(), "org/name").at(&healed.endpoint);
    let paths = again.fetch()?;
    assert_eq!(fs::read(&paths[0])?, FILES[0].1);
    Ok(())
}

/// As in a container without the package `ca-certificates`, where no HTTP client can be set up.
#[cfg(target_os = "linux")]
#[test]
fn offline_needs_no_certificates() -> TestResult {
    let (home, endpoint) = cut_off()?;
    let child = || {
        let child = Child::new(home.path(), "org/name").at(&endpoint);
        child.with(&[("SSL_CERT_FILE", "/dev/null"), ("SSL_CERT_DIR", "/nowhere")])
    };
    assert_fails(child().fetch(), &["org/name@main", "CA certificates"]);
    assert_eq!(found(child().with(&[("HF_HUB_OFFLINE", "1")]).fetch())?.len(), FILES.len());
    Ok(())
}

#[test]
fn an_endpoint_that_is_no_url_is_named() -> TestResult {
    let home = TempDir::new()?;
    for endpoint in ["", "huggingface.co", "localhost:8080", "ftp://hub", "user:secret@hub", "ftp://user:secret@hub"] {
        let result = Child::new(home.path(), "org/name").at(endpoint).fetch();
        assert!(!result.as_ref().unwrap_err().contains("secret"), "{result:?}");
        assert_fails(result, &["HF_ENDPOINT"]);
    }
    Ok(())
}

#[test]
fn credentials_of_the_endpoint_are_not_printed() -> TestResult {
    let (home, endpoint) = cut_off()?;
    let with_credentials = |endpoint: &str| endpoint.replace("http://", "http://user:secret@");
    let model = HubModel::new("org/name")?.with_endpoint(&with_credentials(&endpoint));
    assert!(!format!("{model:?}").contains("secret"), "{model:?}");
    let server = Server::start("org/name", &[("README.md", b"")], Mood::Open)?;
    let gated = Server::start("org/name", &FILES, Mood::Refuses(403, "GatedRepo"))?;
    for (endpoint, part) in [
        (&endpoint, "no connection to http://127"),
        (&server.endpoint, "not found: http://127"),
        (&gated.endpoint, "accept its terms at http://127"),
    ] {
        let result = Child::new(home.path(), "org/other").at(&with_credentials(endpoint)).fetch();
        assert!(!result.as_ref().unwrap_err().contains("secret"), "{result:?}");
        assert_fails(result, &[part]);
    }
    Ok(())
}
