//! Engines of Python: another process, which computes on command.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{load, peak};

/// The process, which ends when its input is closed.
pub struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    folder: TempDir,
}

impl Peer {
    /// Starts a script below `benches`, whose first line has the versions of its libraries.
    ///
    /// # Errors
    /// If there is no such Python, or it lacks what the script needs.
    pub fn start(python: &str, script: &str) -> Result<Self> {
        let mut child = Command::new(python)
            .args([&format!("{}/benches/{script}", env!("CARGO_MANIFEST_DIR")), &peak::threads().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| Error::msg(format!("{python}: {error}")))?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{python} has no pipes")
        };
        load::count_process(child.id());
        let (requests, answers) = (Some(requests), BufReader::new(answers));
        let mut peer = Self { child, requests, answers, folder: TempDir::new()? };
        match peer.answer()? {
            version if version.is_empty() => bail!("{python} has not what {script} needs"),
            versions => eprintln!("{versions}"),
        }
        Ok(peer)
    }

    /// Computes a cell once, and returns results of these shapes.
    ///
    /// # Errors
    /// With the engine's message if it cannot.
    pub fn prepare(
        &mut self,
        cell: Value,
        inputs: &[(&str, Tensor)],
        others: &[(&str, Tensor)],
        results: &[&[usize]],
    ) -> Result<Vec<Tensor>> {
        for (name, tensor) in inputs.iter().chain(others) {
            let numbers: Vec<f32> = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            fs::write(self.folder.path().join(format!("{name}.f32")), bytes)?;
            fs::write(self.folder.path().join(format!("{name}.json")), json!(tensor.dims()).to_string())?;
        }
        let names: Vec<&str> = inputs.iter().map(|(name, _)| *name).collect();
        let request = json!({ "folder": self.folder.path(), "cell": cell, "inputs": names });
        self.ask(&request.to_string())?;
        let results = results.iter().enumerate();
        results.map(|(n, dims)| read(&self.folder.path().join(format!("result{n}.f32")), dims)).collect()
    }

    /// Computes the cell of the latest [`prepare`](Self::prepare) once more.
    pub fn run(&mut self) -> Result<()> {
        self.ask("run")
    }

    fn ask(&mut self, request: &str) -> Result<()> {
        let Some(requests) = &mut self.requests else { bail!("the process has ended") };
        writeln!(requests, "{request}")?;
        match self.answer()?.as_str() {
            "done" => Ok(()),
            "" => bail!("the process has ended"),
            problem => bail!("{problem}"),
        }
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim().to_string())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.child.wait();
    }
}

fn read(path: &Path, dims: &[usize]) -> Result<Tensor> {
    let bytes = fs::read(path)?;
    let numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    Tensor::from_vec(numbers, dims, &Device::Cpu)
}
