//! The modules of a checkpoint in their order, as `modules.json` lists them; a router is replaced by the modules of one
//! of its routes.

use std::path::{Path, PathBuf};

use candle_core::{Context, Result, bail};
use serde_json::Value;

use super::fields::Fields;
use super::prompts::PROMPTS;
use super::transformer::SETTINGS;
use crate::common::{EXAMPLE, ModelArgs, read_json};
use crate::texts::TOKENIZER;

pub const MODULES: &str = "modules.json";
const ROUTER: &str = "router_config.json";

/// A module: a kind, which is the last name in the path of a Python class, and the folder of its files.
#[derive(Debug, Clone)]
pub struct Module {
    pub kind: String,
    /// The folder below that of the checkpoint; empty for the same folder.
    pub path: PathBuf,
}

impl Module {
    /// Makes a module from its class in Python.
    fn new(class: &str, path: PathBuf) -> Self {
        Self { kind: class.rsplit('.').next().unwrap_or_default().to_string(), path }
    }

    /// Returns whether the module has modules for each of several routes.
    fn is_router(&self) -> bool {
        matches!(self.kind.as_str(), "Router" | "Asym")
    }

    /// Returns the path of a file of the module, below the folder of the checkpoint.
    pub fn file(&self, name: &str) -> String {
        self.path.join(name).display().to_string()
    }
}

/// Reads the list in `modules.json`, with routers as they are; `None` without that file.
fn listed(folder: &Path) -> Result<Option<Vec<Module>>> {
    let path = folder.join(MODULES);
    if !path.is_file() {
        return Ok(None);
    }
    let json = read_json(&path)?;
    let Some(list) = json.as_array() else { bail!("[{EXAMPLE}] {MODULES} is {json}, expected a list of modules") };
    let mut modules = Vec::new();
    for entry in list {
        let fields = Fields::of(MODULES, entry.clone())?;
        fields.only(&["idx", "name", "path", "type", "kwargs"])?;
        // The names of options of a call that the module has a use for; the task is the only one here.
        if let Some(other) = fields.get("kwargs").as_array().into_iter().flatten().find(|name| *name != "task") {
            bail!("[{EXAMPLE}] {MODULES} has kwargs with {other}, expected only \"task\"")
        }
        let class =
            fields.text("type")?.with_context(|| format!("[{EXAMPLE}] {MODULES} has {entry} without a type"))?;
        modules.push(Module::new(class, inside(fields.text("path")?.unwrap_or_default())?));
    }
    Ok(Some(modules))
}

/// Reads the modules of a checkpoint; `None` without `modules.json`. `task` chooses the route of a router.
pub fn read(folder: &Path, task: Option<&str>) -> Result<Option<Vec<Module>>> {
    let Some(modules) = listed(folder)? else { return Ok(None) };
    let mut routed = Vec::new();
    for module in modules {
        if module.is_router() {
            routed.extend(route(folder, &module, task)?);
        } else {
            routed.push(module);
        }
    }
    Ok(Some(routed))
}

/// Returns the folder of a checkpoint, after the files of all modules and `others` are fetched if it is on the hub.
pub fn fetch(model: &ModelArgs, task: Option<&str>, others: &[&str]) -> Result<PathBuf> {
    let files = [&[MODULES, PROMPTS, TOKENIZER], &SETTINGS[..], others].concat();
    let folder = model.folder(&files)?;
    if model.model_id.is_some() {
        // The file of a router names the folders of its modules.
        for _ in 0..2 {
            let more = files_of_modules(&folder, task)?;
            model.folder(&more.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
    }
    Ok(folder)
}

/// Returns the files of all modules, below the folder of the checkpoint: those that are known before they are fetched.
fn files_of_modules(folder: &Path, task: Option<&str>) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for module in listed(folder)?.unwrap_or_default() {
        let is_there = folder.join(module.file(ROUTER)).is_file();
        if is_there {
            all.extend(route(folder, &module, task)?);
        }
        all.push(module);
    }
    let names = [ROUTER, "config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", TOKENIZER];
    let names = [&names[..], &SETTINGS].concat();
    let own = all.iter().filter(|module| !module.path.as_os_str().is_empty());
    Ok(own.flat_map(|module| names.iter().map(|name| module.file(name))).collect())
}

/// Returns whether the modules have a router.
pub fn has_router(folder: &Path) -> Result<bool> {
    Ok(listed(folder)?.unwrap_or_default().iter().any(Module::is_router))
}

/// Returns the modules of the route that sentence-transformers chooses for texts with this task.
fn route(folder: &Path, router: &Module, task: Option<&str>) -> Result<Vec<Module>> {
    let file = [ROUTER, "config.json"].map(|name| router.file(name));
    let [own, older] = &file;
    let name = if folder.join(own).is_file() { own } else { older };
    let fields = Fields::of(name, read_json(&folder.join(name))?)?;
    fields.only(&["types", "structure", "parameters"])?;
    let structure = Fields::of(name, fields.get("structure").clone())?;
    let parameters = Fields::of(name, fields.get("parameters").clone())?;
    parameters.only(&["default_route", "allow_empty_key", "route_mappings"])?;
    let routes = fields.get("structure").as_object().into_iter().flatten().map(|(route, _)| route.clone());
    let routes: Vec<String> = routes.collect();

    let chosen = match (mapped(&parameters, task)?, task) {
        (Some(route), _) => route,
        (None, Some(task)) if structure.has(task) => task.to_string(),
        (None, _) if structure.has("text") => "text".to_string(),
        (None, Some(task)) => {
            bail!("[{EXAMPLE}] {name} has no route for the task {task:?}, expected one of {}", routes.join(", "))
        }
        (None, None) => match parameters.text("default_route")? {
            Some(route) => route.to_string(),
            None => bail!("[{EXAMPLE}] {name} has no default route, expected --task, one of {}", routes.join(", ")),
        },
    };
    let Some(ids) = structure.get(&chosen).as_array() else {
        bail!("[{EXAMPLE}] {name} has no route {chosen:?}, expected one of {}", routes.join(", "))
    };
    let mut modules = Vec::new();
    for id in ids {
        let id = id.as_str().with_context(|| format!("[{EXAMPLE}] {name} has a module {id}, expected a name"))?;
        let class = fields.get("types")[id].as_str();
        let class = class.with_context(|| format!("[{EXAMPLE}] {name} has no type of the module {id:?}"))?;
        modules.push(Module::new(class, router.path.join(inside(id)?)));
    }
    Ok(modules)
}

/// Returns the route of the mapping for texts with this task. Keys are pairs of a task and a modality, as Python writes
/// them, where `None` is any; the most exact comes first.
fn mapped(parameters: &Fields, task: Option<&str>) -> Result<Option<String>> {
    let mapping = match parameters.get("route_mappings") {
        Value::Null => return Ok(None),
        mapping => Fields::of(parameters.file(), mapping.clone())?,
    };
    let task = task.map_or("None".to_string(), |task| format!("'{task}'"));
    for key in [format!("({task}, 'text')"), format!("({task}, None)"), "(None, 'text')".into(), "(None, None)".into()]
    {
        if let Some(route) = mapping.text(&key)? {
            return Ok(Some(route.to_string()));
        }
    }
    Ok(None)
}

/// Returns a folder below that of the checkpoint.
///
/// # Errors
/// If the path leads out of it.
fn inside(path: &str) -> Result<PathBuf> {
    let relative = PathBuf::from(path);
    if relative.components().any(|part| !matches!(part, std::path::Component::Normal(_) | std::path::Component::CurDir))
    {
        bail!("[{EXAMPLE}] the folder {path:?} of a module is not below that of the checkpoint")
    }
    Ok(relative)
}
