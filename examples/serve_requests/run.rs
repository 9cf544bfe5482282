//! From the command line to the table.

use std::collections::BTreeMap;
use std::process::ExitCode;

use candle_attention::PageTable;
use candle_attention::text::SimpleTokenizer;
use candle_core::{Error, Result};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::args::Args;
use crate::clock::Clock;
use crate::common::{bar, make_folders, one_line, print, with_bar};
use crate::engine::Engine;
use crate::files::{Files, continuation};
use crate::model::CausalLm;
use crate::picture::{Picture, PictureRequest};
use crate::report::{PoolSize, Served, Totals, table};
use crate::requests::{self, FileRequest, Prompt};
use crate::scheduler::{Request, RequestId, Scheduler, StepReport};
use crate::timeline::Period;

/// Runs the command line. The exit code is 1 if a request failed.
pub fn run(args: &Args) -> Result<ExitCode> {
    make_folders(&[args.model.page.as_ref()])?;
    let requests = requests::read(&args.requests)?;
    let mut page_table = PageTable::new(args.pages.get(), args.page_size.get())?;
    let device = args.model.device.open(0)?;
    let files = Files::open(args, &device)?;
    let is_text = |request: &FileRequest| matches!(request.prompt, Prompt::Text(_));
    let tokenizer = if requests.iter().any(is_text) { Some(files.tokenizer()?) } else { None };
    let json = files.config()?;
    let weights = files.weights(args, &device, None)?;
    let model = with_bar("loading", "blocks", |loaded| CausalLm::load(&json, weights, loaded))?;
    if model.has_states() {
        page_table = page_table.with_states(args.states())?;
    }
    let engine = Engine::new(&model, &page_table, args.kv_cache.as_deref())?;
    let mut scheduler = Scheduler::new(page_table, args.limits())?;
    if let Some(window) = model.window() {
        scheduler = scheduler.with_window(window)?;
    }
    if args.model.page.is_some() {
        scheduler = scheduler.with_page_lists();
    }

    let mut server = Server {
        engine,
        scheduler,
        clock: Clock::start(args.step_time),
        end_tokens: files.end_tokens(&json)?,
        tokenizer,
        active: BTreeMap::new(),
        served: Vec::new(),
        failed: 0,
        totals: Totals::default(),
        picture: args.model.page.as_ref().map(|_| Picture::default()),
        bar: bar("serving", requests.len(), "requests"),
    };
    server.serve(&requests)?;
    server.bar.finish_and_clear();
    let pages = server.scheduler.table();
    let pool = PoolSize { pages: pages.pages(), page_size: pages.page_size(), memory: server.engine.memory() };
    let text = table(&server.served, server.failed, &server.totals, &pool, server.clock.now());
    eprint!("{text}");
    if let (Some(path), Some(picture)) = (&args.model.page, &server.picture) {
        picture.write(path, pool.pages, &text)?;
    }
    Ok(if server.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A request that has arrived and has not ended.
struct Active<'r> {
    request: &'r FileRequest,
    ids: Vec<u32>,
    /// The number of the prompt's tokens that were shared when it began first.
    shared: Option<usize>,
    first_token: Option<f64>,
    generated: Vec<u32>,
}

/// The printed line of a request that was served. Times are seconds after its arrival.
#[derive(Serialize)]
struct ServedLine<'a> {
    id: &'a str,
    prompt_tokens: usize,
    shared_tokens: usize,
    to_first_token: f64,
    latency: f64,
    ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
}

/// The printed line of a request that is impossible.
#[derive(Serialize)]
struct FailedLine<'a> {
    id: &'a str,
    error: String,
}

/// A model that serves requests.
struct Server<'m, 'r> {
    engine: Engine<'m>,
    scheduler: Scheduler,
    clock: Clock,
    end_tokens: Vec<u32>,
    tokenizer: Option<SimpleTokenizer>,
    active: BTreeMap<RequestId, Active<'r>>,
    served: Vec<Served>,
    failed: usize,
    totals: Totals,
    /// The picture of --page.
    picture: Option<Picture>,
    bar: ProgressBar,
}

impl<'r> Server<'_, 'r> {
    /// Serves requests, which are in the order of their arrival, until all have ended.
    fn serve(&mut self, requests: &'r [FileRequest]) -> Result<()> {
        let mut arriving = requests.iter().peekable();
        loop {
            while let Some(request) = arriving.next_if(|request| request.arrival <= self.clock.now()) {
                if let Err(error) = self.add(request) {
                    self.failed += 1;
                    self.say(&FailedLine { id: &request.name, error: one_line(&error) })?;
                }
            }
            if self.scheduler.is_idle() {
                let Some(next) = arriving.peek() else { return Ok(()) };
                self.clock.wait_until(next.arrival);
                continue;
            }
            let from = self.clock.now();
            let engine = &self.engine;
            let step = self.scheduler.step(|input| engine.next_tokens(input))?;
            self.clock.end_step();
            let period = Period { from, to: self.clock.now() };
            if let Some(picture) = &mut self.picture {
                picture.timeline.add(&step, period);
            }
            self.note(&step, period.to)?;
        }
    }

    /// Adds a request that has arrived.
    fn add(&mut self, request: &'r FileRequest) -> Result<()> {
        let ids = request.ids(self.tokenizer.as_ref())?;
        let max_tokens = request.max_tokens;
        self.engine.check(&ids, max_tokens)?;
        let end_tokens = self.end_tokens.clone();
        let id = self.scheduler.add(Request { prompt: ids.clone(), max_tokens, end_tokens })?;
        let active = Active { request, ids, shared: None, first_token: None, generated: Vec::new() };
        self.active.insert(id, active);
        if let Some(picture) = &mut self.picture {
            let FileRequest { name, arrival, .. } = request;
            picture.requests.push(PictureRequest { name: name.clone(), arrival: *arrival, end: *arrival });
        }
        Ok(())
    }

    /// Notes the events of a step that ends now, and prints the requests that have ended.
    fn note(&mut self, step: &StepReport, now: f64) -> Result<()> {
        self.totals.add(step);
        for begun in &step.begun {
            if let Some(active) = self.active.get_mut(&begun.request) {
                active.shared.get_or_insert(begun.shared);
            }
        }
        for generated in &step.generated {
            let Some(active) = self.active.get_mut(&generated.request) else { continue };
            active.first_token.get_or_insert(now);
            active.generated.push(generated.token);
            if generated.is_last
                && let Some(ended) = self.active.remove(&generated.request)
            {
                if let Some(picture) = &mut self.picture {
                    picture.requests[generated.request.0].end = now;
                }
                self.end(ended, now)?;
            }
        }
        Ok(())
    }

    /// Prints the result of a request that ends now.
    fn end(&mut self, ended: Active, now: f64) -> Result<()> {
        let Active { request, ids, shared, first_token, generated } = ended;
        let served = Served {
            arrival: request.arrival,
            first_token: first_token.unwrap_or(now),
            end: now,
            prompt_tokens: ids.len(),
            shared_tokens: shared.unwrap_or(0),
            generated,
        };
        let text = match (&request.prompt, &self.tokenizer) {
            (Prompt::Text(_), Some(tokenizer)) => Some(continuation(tokenizer, &ids, &served.generated)?),
            _ => None,
        };
        let microseconds = |seconds: f64| (seconds * 1e6).round() / 1e6;
        self.say(&ServedLine {
            id: &request.name,
            prompt_tokens: served.prompt_tokens,
            shared_tokens: served.shared_tokens,
            to_first_token: microseconds(served.to_first_token()),
            latency: microseconds(served.latency()),
            ids: &served.generated,
            text,
        })?;
        self.served.push(served);
        Ok(())
    }

    /// Prints the line of a request that has ended or failed.
    fn say(&self, line: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(line).map_err(Error::wrap)?;
        self.bar.inc(1);
        self.bar.suspend(|| print(&format!("{text}\n")))
    }
}
