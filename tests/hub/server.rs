//! A hub on this machine, as small as hf-hub's downloads allow: one model, a thread, no keep-alive.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::child::Child;

/// The commit that all branches of the model are at.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What the hub does when it is asked for a file that it has.
#[derive(Clone, Copy, PartialEq)]
pub enum Mood {
    /// It gives it.
    Open,
    /// It answers with this status and `X-Error-Code`, whatever it is asked.
    Refuses(u16, &'static str),
    /// It takes the connection and says nothing.
    Silent,
    /// It promises the file, sends half, and says nothing more.
    Stalls,
    /// It promises the file and sends the page of an error.
    ErrorPage,
}

/// A running server; it ends when dropped.
pub struct Server {
    pub endpoint: String,
    /// Where its callers have their cache.
    pub home: TempDir,
    requests: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Hub {
    endpoint: String,
    model: String,
    files: BTreeMap<String, Vec<u8>>,
    mood: Mood,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// Serves `files` as `model`, at the revisions `main`, `refs/pr/1` and [`COMMIT`]. A model `old/name` has been
    /// renamed to `org/name`.
    pub fn start(model: &str, files: &[(&str, &[u8])], mood: Mood) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let endpoint = format!("http://{}", listener.local_addr()?);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let hub = Hub {
            endpoint: endpoint.clone(),
            model: model.to_string(),
            files: files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect(),
            mood,
            stop: stop.clone(),
        };
        let log = requests.clone();
        let thread = std::thread::spawn(move || {
            // A test that hangs ends with its server, at the latest.
            let end = Instant::now() + Duration::from_secs(120);
            while !hub.stop.load(Ordering::Relaxed) && Instant::now() < end {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let (hub, log) = (hub.clone(), log.clone());
                        std::thread::spawn(move || hub.answer(stream, &log));
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Ok(Self { endpoint, home: TempDir::new()?, requests, stop, thread: Some(thread) })
    }

    /// What a process gets that fetches this model from here, with more in its environment.
    pub fn fetch(&self, model: &str, environment: &[(&str, &str)]) -> Result<Vec<String>, String> {
        Child::new(self.home.path(), model).at(&self.endpoint).with(environment).fetch()
    }

    /// The requests since the last call, as `METHOD path`, with ` token` for those that carry the token of the tests.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Hub {
    fn answer(&self, stream: TcpStream, log: &Mutex<Vec<String>>) {
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut lines = BufReader::new(&stream).lines();
        let Some(Ok(request)) = lines.next() else {
            return;
        };
        let headers: Vec<String> =
            lines.map_while(Result::ok).take_while(|line| !line.is_empty()).map(|line| line.to_lowercase()).collect();
        let mut words = request.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let token = headers.iter().any(|line| line == "authorization: bearer hf_test");
        log.lock().unwrap().push(format!("{method} {path}{}", if token { " token" } else { "" }));
        // The other side may be gone, which is none of the server's business.
        let _ = self.reply(&stream, method, path, &headers);
    }

    fn reply(&self, mut stream: &TcpStream, method: &str, path: &str, headers: &[String]) -> std::io::Result<()> {
        let mut head = |status: &str, rest: &str, length: usize| {
            write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{rest}\r\n")
        };
        match self.mood {
            Mood::Silent => return self.wait(),
            Mood::Refuses(status, code) => {
                return head(&format!("{status} No"), &format!("X-Error-Code: {code}\r\n"), 0);
            }
            Mood::Open | Mood::Stalls | Mood::ErrorPage => {}
        }
        if path == format!("/api/models/{}", self.model) {
            head("200 OK", "", 2)?;
            return stream.write_all(b"{}");
        }
        if let Some(rest) = path.strip_prefix("/old/") {
            return head("307 Temporary Redirect", &format!("Location: /org/{rest}\r\n"), 0);
        }
        if let Some(bytes) = path.strip_prefix("/store/").and_then(|file| self.files.get(file)) {
            head("200 OK", "", bytes.len())?;
            return stream.write_all(bytes);
        }
        let file = ["main", "refs%2Fpr%2F1", COMMIT]
            .iter()
            .find_map(|revision| path.strip_prefix(&format!("/{}/resolve/{revision}/", self.model)));
        let Some(file) = file else {
            return head("404 Not Found", "", 0);
        };
        let commit = format!("X-Repo-Commit: {COMMIT}\r\n");
        let Some(bytes) = self.files.get(file) else {
            return head("404 Not Found", &format!("{commit}X-Error-Code: EntryNotFound\r\n"), 0);
        };
        let etag = format!("\"etag-of-{file}\"");
        let rest = format!("{commit}ETag: {etag}\r\n");
        if headers.contains(&format!("if-none-match: {etag}")) {
            return head("304 Not Modified", &rest, 0);
        }
        if file.ends_with(".safetensors") {
            // Large files are elsewhere: the hub says how large, and where.
            let (size, endpoint) = (bytes.len(), &self.endpoint);
            let linked = format!("X-Linked-Size: {size}\r\nX-Linked-ETag: {etag}\r\n");
            return head("302 Found", &format!("{commit}{linked}Location: {endpoint}/store/{file}\r\n"), 0);
        }
        match (method, self.mood) {
            ("HEAD", _) => head("200 OK", &rest, bytes.len()),
            (_, Mood::ErrorPage) => {
                let page = b"<html>this link has expired</html>";
                head("403 Forbidden", "", page.len())?;
                stream.write_all(page)
            }
            (_, Mood::Stalls) => {
                head("200 OK", &rest, bytes.len())?;
                stream.write_all(&bytes[..bytes.len() / 2])?;
                self.wait()
            }
            _ => {
                head("200 OK", &rest, bytes.len())?;
                stream.write_all(bytes)
            }
        }
    }

    fn wait(&self) -> std::io::Result<()> {
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}
