//! Checkpoints from the hub: from a cache that the tests lay out, and from a server on this machine. Each file of
//! `texts/` has lines that are done in turn, with what came of them; `UPDATE_EXPECT=1 cargo test --features hub --test
//! hub` writes what comes of them now.
//!
//! ```text
//! id | revision | file "NAME"    a model is asked for by such a name
//! cache {"FILE": "TEXT", ..}     offline, with a cache of these files
//! hub {"FILE": "TEXT", ..}       there is a server of these files, and no cache; a number is that of bytes
//! is "MOOD"                      of the server from now on
//! [VARIABLE=VALUE ..] MODEL      the files of a fetch or its error, and the requests that it made
//! ```

#![cfg(feature = "hub")]

#[path = "../common/mod.rs"]
mod common;

mod child;
mod server;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_attention::hub::HubModel;
use candle_core::Result;
use child::{COMMIT, outcome};
use common::{listed, recorded};
use server::{Files, Server};
use tempfile::TempDir;

#[test]
fn hub_sessions_match_reviewed_texts() {
    let mut texts = listed(recorded("hub/texts"));
    // Where a container lacks the package `ca-certificates`.
    texts.retain(|text| cfg!(target_os = "linux") || !text.ends_with("no_certificates.txt"));
    std::thread::scope(|scope| {
        for path in texts {
            scope.spawn(move || {
                let mut session = Session::default();
                let script = fs::read_to_string(&path).expect("a text");
                let lines = script.lines().filter(|line| !line.starts_with("    "));
                let answers = lines.map(|line| {
                    let answer = session.answer(line);
                    format!("{line}\n{}", answer.lines().map(|row| format!("    {row}\n")).collect::<String>())
                });
                let found: String = answers.collect();
                expect_test::expect_file![path].assert_eq(&found);
            });
        }
    });
}

#[test]
fn hub_model_hides_secrets_in_debug_output() -> Result<()> {
    let model = HubModel::new("org/name@v1")?.with_token("hf_secret").with_endpoint("http://user:secret@hub");
    assert!(!format!("{model:?}").contains("secret"), "{model:?}");
    assert_eq!(model.to_string(), "org/name@v1");
    Ok(())
}

/// A server, and the cache of those who ask it.
#[derive(Default)]
struct Session(Option<(Arc<Server>, TempDir)>);

impl Session {
    fn answer(&mut self, line: &str) -> String {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let name = || serde_json::from_str::<String>(rest).expect(line);
        match word {
            "id" => outcome(HubModel::new(&name())),
            "revision" => {
                let found = outcome(HubModel::new("org/name").and_then(|model| model.with_revision(&name())));
                assert_eq!(found, outcome(HubModel::new(&format!("org/name@{}", name()))));
                found
            }
            "file" => outcome(HubModel::new("org/name").and_then(|model| model.with_file(&name()))),
            "cache" => offline(&server::files(rest)),
            "hub" => {
                self.0 = Some((Server::start(server::files(rest)), TempDir::new().expect("a folder")));
                String::new()
            }
            "is" => {
                let (server, _) = self.0.as_ref().expect("a hub");
                server.set(serde_json::from_str(rest).expect(line));
                String::new()
            }
            _ => self.ask(line),
        }
    }

    fn ask(&self, line: &str) -> String {
        let (server, home) = self.0.as_ref().expect("a hub");
        let host = &server.endpoint["http://".len()..];
        let line = line.replace("@HUB", &format!("@{host}")).replace("COMMIT", COMMIT);
        let (environment, model) = line.rsplit_once(' ').unwrap_or(("", &line));
        let given = environment.split_whitespace().map(|pair| pair.split_once('=').expect("NAME=VALUE"));
        let variables: Vec<_> = [("HF_ENDPOINT", server.endpoint.as_str())].into_iter().chain(given).collect();
        let start = Instant::now();
        let found = child::fetch(home.path(), model, &variables);
        assert!(start.elapsed() < Duration::from_secs(20), "{line}: {:?}", start.elapsed());
        assert!(!found.contains("secret"), "{found}");
        let id = model.split('@').next().expect("an id");
        let snapshot = home.path().join(format!("hub/models--{}/snapshots/{COMMIT}", id.replace('/', "--")));
        for name in found.split(", ").filter(|_| !found.starts_with("[hub]")) {
            assert_eq!(Some(&fs::read(snapshot.join(name)).expect(name)[..]), server.file(name), "{name}");
        }
        let text = [vec![found], server.requests()].concat().join("\n").replace(host, "HUB");
        text.replace(&home.path().display().to_string(), "HOME").replace(COMMIT, "COMMIT")
    }
}

/// Returns the results of several ways to ask, each if it differs from the previous one. `attn_norm` is not below
/// `attn`, nor `layers.01` below `layers.0`.
fn offline(files: &Files) -> String {
    let cache = TempDir::new().expect("a folder");
    let write = |path: &Path, bytes: &[u8]| {
        let path = cache.path().join("models--org--name").join(path);
        fs::create_dir_all(path.parent().expect("a folder")).and_then(|()| fs::write(path, bytes)).expect("a file");
    };
    write("refs/main".as_ref(), COMMIT.as_bytes());
    files.iter().for_each(|(name, bytes)| write(&Path::new("snapshots").join(COMMIT).join(name), bytes));
    let model = || Ok(HubModel::new("org/name")?.with_cache_dir(cache.path()).offline());
    let several = ["1_Pooling/config.json", "absent.json", "modules.json"];
    let mut found = vec![
        outcome(model()),
        outcome(model().and_then(|model| model.with_revision(COMMIT))),
        outcome(model().and_then(|model| several.into_iter().try_fold(model, HubModel::with_file))),
    ];
    let parts = ["a", "layers.0.attn", "layers.0.attn.q.weight", "layers.01", "layers.7"];
    found.extend(parts.map(|prefix| outcome(model().map(|model| model.with_tensors(prefix)))));
    found.dedup();
    found.join("\n").replace(&cache.path().display().to_string(), "CACHE")
}
