//! GGUF files that llama.cpp's converter wrote for tiny models, compared with the attention of transformers.
//! `make_gguf.py` makes the files, after llama.cpp's logits for each were equal to transformers' logits.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use candle_attention::{AttentionInput, Backend, DeltaInput, gguf, hf};
use candle_core::quantized::gguf_file::Content;
use candle_core::{Result, Tensor};

use crate::common::{assert_near, listed, recorded};
use crate::{DEVICE, TOLERANCE};

/// A GGUF file, and the inputs and outputs of its layers in transformers.
struct Recorded {
    name: String,
    reader: File,
    content: Content,
    golden: HashMap<String, Tensor>,
}

impl Recorded {
    fn open(path: &Path) -> Result<Self> {
        let mut reader = File::open(path)?;
        Ok(Self {
            name: path.file_stem().expect("a name").to_string_lossy().into_owned(),
            content: gguf::read(&mut reader)?,
            reader,
            golden: candle_core::safetensors::load(path.with_extension("safetensors"), &DEVICE)?,
        })
    }

    /// Returns the layers with attention of a kind: "" for all but the layers of a decoder with an encoder.
    fn layers(&self, kind: &str) -> Vec<usize> {
        let number = |name: &String| name.strip_prefix(&format!("{kind}layer"))?.strip_suffix(".in")?.parse().ok();
        let mut layers: Vec<usize> = self.golden.keys().filter_map(number).collect();
        layers.sort_unstable();
        layers
    }

    /// Calls a layer of any kind of attention.
    fn forward(&mut self, kind: &str, layer: usize, backend: Backend) -> Result<Tensor> {
        let xs = &self.golden[&format!("{kind}layer{layer}.in")];
        let input = AttentionInput::new(xs).with_backend(backend);
        let content = &self.content;
        let reader = &mut self.reader;
        match kind {
            "decoder." => return gguf::load_decoder_attention(content, reader, layer, &DEVICE)?.forward_with(input),
            "cross." => {
                let memory = &self.golden[&format!("{kind}layer{layer}.memory")];
                let attention = gguf::load_cross_attention(content, reader, layer, &DEVICE)?;
                return attention.forward_with(input.with_key_value(memory, memory));
            }
            _ => {}
        }
        if gguf::is_linear_attention(content, layer)? {
            let net = gguf::load_linear_attention(content, reader, layer, &DEVICE)?;
            return net.forward_with(DeltaInput::new(xs).with_backend(backend));
        }
        if gguf::latent_attention_config(content).is_ok() {
            return gguf::load_latent_attention(content, reader, layer, &DEVICE)?.forward_with(input);
        }
        self.forward_softmax(layer, backend)
    }

    /// Calls a layer. A layer that reads the keys of an earlier layer gets them as a memory.
    fn forward_softmax(&mut self, layer: usize, backend: Backend) -> Result<Tensor> {
        let xs = self.golden[&format!("layer{layer}.in")].clone();
        let attention = gguf::load_attention(&self.content, &mut self.reader, layer, &DEVICE)?;
        let input = AttentionInput::new(&xs).with_backend(backend);
        let Some(earlier) = hf::kv_shared_layer(&gguf::hf_config(&self.content)?, layer)? else {
            return attention.forward_with(input);
        };
        let earlier_xs = &self.golden[&format!("layer{earlier}.in")];
        let source = gguf::load_attention(&self.content, &mut self.reader, earlier, &DEVICE)?;
        let memory = source.project_memory(earlier_xs, earlier_xs)?;
        attention.forward_with(input.with_memory(&memory))
    }
}

/// Lists the files.
pub fn files() -> Vec<std::path::PathBuf> {
    let mut files = listed(recorded("hf/gguf_models"));
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files
}

/// Lists the architectures of the files, in alphabetical order.
pub fn architectures() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for path in files() {
        let file = Recorded::open(&path)?;
        names.push(file.content.metadata["general.architecture"].to_string()?.clone());
    }
    names.sort();
    names.dedup();
    Ok(names)
}

#[test]
fn gguf_files_of_llama_cpp_match_transformers() -> Result<()> {
    let mut problems = Vec::new();
    for path in files() {
        let mut file = Recorded::open(&path)?;
        assert!(!file.layers("").is_empty(), "{}: no layer was recorded", file.name);
        for kind in ["", "decoder.", "cross."] {
            for layer in file.layers(kind) {
                for backend in [Backend::Auto, Backend::Reference] {
                    let what = format!("{}, {kind}layer {layer}, {backend:?}", file.name);
                    match file.forward(kind, layer, backend) {
                        Ok(ys) => assert_near(&ys, &file.golden[&format!("{kind}layer{layer}.out")], TOLERANCE, &what),
                        Err(error) => problems.push(format!("{what}: {error}")),
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}
