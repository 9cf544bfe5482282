//! A hub on this machine, as small as hf-hub's downloads allow: one model, a thread, no keep-alive.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::child::COMMIT;

/// By their names.
pub type Files = BTreeMap<String, Vec<u8>>;

/// Reads files from a JSON object of texts, and of numbers of bytes.
pub fn files(json: &str) -> Files {
    let of = |value: Value| match value {
        Value::String(text) => text.into_bytes(),
        count => vec![7; count.as_u64().expect("a number") as usize],
    };
    let files: BTreeMap<_, _> = serde_json::from_str(json).expect(json);
    files.into_iter().map(|(name, value)| (name, of(value))).collect()
}

/// The reaction of the hub to a request for a file that it has.
#[derive(Clone, Deserialize)]
pub enum Mood {
    /// It sends the file.
    Open,
    /// It answers every request with this status and `X-Error-Code`.
    Refuses(u16, String),
    /// It takes the connection and says nothing.
    Silent,
    /// It promises the file, sends half, and says nothing more.
    Stalls,
    /// It promises the file and sends the page of an error.
    ErrorPage,
    /// Nobody listens any more.
    Gone,
}

/// A server of `files` as the model `org/name`, at the revisions `main`, `refs/pr/1` and [`COMMIT`]. A model `old/name`
/// has been renamed to `org/name`.
pub struct Server {
    pub endpoint: String,
    files: Files,
    mood: Mutex<Mood>,
    /// As `METHOD path`, with ` token` for those that carry the token of the tests.
    requests: Mutex<Vec<String>>,
    stopped: AtomicBool,
}

impl Server {
    pub fn start(files: Files) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        let server = Arc::new(Self {
            endpoint: format!("http://{}", listener.local_addr().expect("an address")),
            mood: Mutex::new(Mood::Open),
            files,
            requests: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        let own = server.clone();
        std::thread::spawn(move || {
            // A test that hangs ends with its server, at the latest.
            let end = Instant::now() + Duration::from_secs(120);
            while !own.stopped.load(Ordering::Relaxed) && Instant::now() < end {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let own = own.clone();
                        std::thread::spawn(move || own.answer(&stream));
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        server
    }

    pub fn set(&self, mood: Mood) {
        let gone = matches!(mood, Mood::Gone);
        *self.mood.lock().expect("a mood") = mood;
        self.stopped.store(gone, Ordering::Relaxed);
        while gone && TcpStream::connect(&self.endpoint["http://".len()..]).is_ok() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Returns the requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.requests.lock().expect("requests"))
    }

    pub fn file(&self, file: &str) -> Option<&[u8]> {
        self.files.get(file).map(|bytes| &bytes[..])
    }

    /// Answers a request. A closed connection is not an error of the server.
    fn answer(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let lines = BufReader::new(stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
        let lines: Vec<_> = lines.collect();
        let Some([method, path]) =
            lines.first().and_then(|line| line.split(' ').collect::<Vec<_>>().first_chunk::<2>().copied())
        else {
            return Ok(());
        };
        let token = if lines.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer hf_test")) {
            " token"
        } else {
            ""
        };
        self.requests.lock().expect("requests").push(format!("{method} {path}{token}"));

        let mood = self.mood.lock().expect("a mood").clone();
        let (status, headers, body) = match &mood {
            Mood::Silent => return self.wait(),
            Mood::Refuses(status, code) => (format!("{status} No"), format!("X-Error-Code: {code}\r\n"), &b""[..]),
            Mood::ErrorPage if method == "GET" => {
                ("403 Forbidden".into(), String::new(), &b"<html>this link has expired</html>"[..])
            }
            _ => self.reply(path, &lines),
        };
        let length = body.len();
        write!(stream, "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n")?;
        match (method, mood) {
            ("HEAD", _) => Ok(()),
            (_, Mood::Stalls) => stream.write_all(&body[..length / 2]).and_then(|()| self.wait()),
            _ => stream.write_all(body),
        }
    }

    /// Returns status, headers and body of an answer.
    fn reply(&self, path: &str, asked: &[String]) -> (String, String, &[u8]) {
        let none = &b""[..];
        if let Some(rest) = path.strip_prefix("/old/") {
            return ("307 Temporary Redirect".into(), format!("Location: /org/{rest}\r\n"), none);
        }
        // A model may have no organisation.
        let path = path.replacen("/org/name", "/name", 1);
        if let Some(bytes) = path.strip_prefix("/store/").and_then(|file| self.file(file)) {
            return ("200 OK".into(), String::new(), bytes);
        }
        let revisions = ["main", "refs%2Fpr%2F1", COMMIT];
        let file = revisions.iter().find_map(|revision| path.strip_prefix(&format!("/name/resolve/{revision}/")));
        let Some(file) = file else {
            let status = if path == "/api/models/name" { "200 OK" } else { "404 Not Found" };
            return (status.into(), String::new(), if path == "/api/models/name" { b"{}" } else { none });
        };
        let commit = format!("X-Repo-Commit: {COMMIT}\r\n");
        let Some(bytes) = self.file(file) else {
            return ("404 Not Found".into(), format!("{commit}X-Error-Code: EntryNotFound\r\n"), none);
        };
        let etag = format!("\"etag-of-{file}\"");
        let headers = format!("{commit}ETag: {etag}\r\n");
        if asked.iter().any(|line| line.eq_ignore_ascii_case(&format!("if-none-match: {etag}"))) {
            return ("304 Not Modified".into(), headers, none);
        }
        if file.ends_with(".safetensors") {
            // Large files are elsewhere: the hub says how large, and where.
            let size = bytes.len();
            let endpoint = &self.endpoint;
            let linked = format!("X-Linked-Size: {size}\r\nX-Linked-ETag: {etag}\r\n");
            return ("302 Found".into(), format!("{commit}{linked}Location: {endpoint}/store/{file}\r\n"), none);
        }
        ("200 OK".into(), headers, bytes)
    }

    fn wait(&self) -> std::io::Result<()> {
        while !self.stopped.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}
