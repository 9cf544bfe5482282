//! The example `image_embedding`, run as a user would, against transformers' numbers: `models/`, by `make.py`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../examples/image_embedding/model.rs"]
#[allow(dead_code, reason = "the program's part")]
mod model;
#[path = "../examples/process.rs"]
mod process;
#[path = "../../examples/image_embedding/resample.rs"]
#[allow(dead_code, reason = "the program's part")]
mod resample;

use std::fs::{self, File};
use std::io::{BufReader, BufWriter};
use std::path::Path;

use candle_attention::untrained;
use candle_core::{Device, IndexOp, Result, Tensor};
use common::{assert_close, relative_error, variables};
use model::Encoder;
use process::{Checkpoint, Run, Tensors};
use serde_json::json;

const MODELS: [&str; 3] = ["vit", "dinov2", "clip"];
const PICTURE: &str = "tests/image_embedding/picture.png";

fn checkpoint(model: &str) -> Checkpoint {
    Checkpoint::of("image_embedding", model)
}

fn golden(model: &str) -> Tensors {
    checkpoint(model).tensors("golden.safetensors")
}

fn run(model: &str, args: &[&str]) -> Run {
    checkpoint(model).run(&[&[PICTURE], args].concat())
}

/// What a run with these arguments writes.
#[track_caller]
fn tensors(model: &str, picture: &str, args: &[&str]) -> Tensors {
    checkpoint(model).written("--out", &[&[picture], args].concat())
}

/// Size, crop, colours, positions between those of the training, and every layer's attention.
#[test]
fn embeddings_and_attention_are_those_of_transformers() {
    for model in MODELS {
        let expected = golden(model);
        for layer in ["1", "2"] {
            let got = tensors(model, PICTURE, &["--layer", layer]);
            assert!(relative_error(&got["embedding"], &expected["embedding"]) < 1e-5, "{model}");
            let attention = &expected[&format!("attention.{}", layer.parse::<usize>().expect("a number") - 1)];
            assert_close(&got["attention"], attention, 1e-5, &format!("{model}, layer {layer}"));
        }
    }
}

#[test]
fn half_precision_runs_and_comes_close() {
    for model in MODELS {
        let got = tensors(model, PICTURE, &["--dtype", "bf16"]);
        let error = relative_error(&got["embedding"], &golden(model)["embedding"]);
        assert!(error > 1e-6 && error < 0.1, "{model}: {error:e}");
    }
}

#[test]
fn a_run_says_what_it_did() {
    let weights = &golden("dinov2")["attention.1"];
    let of = |weights: Tensor| weights.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).expect("numbers");
    let line = |weights: Vec<f32>| {
        let most = (0..12).max_by(|&a, &b| weights[a].total_cmp(&weights[b])).expect("patches");
        let [sum, largest] = [weights.iter().sum::<f32>(), weights[most]].map(|part| format!("{:.1} %", part * 100.0));
        format!("{sum} to patches,\n           most to row {}, column {} ({largest})\n", most / 4 + 1, most % 4 + 1)
    };
    let mean = line(of(weights.mean(0).expect("heads")));
    let run_of_all = run("dinov2", &[]);
    let head = "model      dinov2, 2 layers of width 32\n\
                picture    52 x 40, seen as 32 x 24 in 4 x 3 patches\n\
                embedding  (32,) of length ";
    assert!(run_of_all.stdout.starts_with(head), "{}", run_of_all.stdout);
    let attention = format!("attention  of the class token in layer 2, the mean of 4 heads: {mean}");
    assert!(run_of_all.stdout.ends_with(&attention), "{}, expected {attention}", run_of_all.stdout);
    let third = run("dinov2", &["--head", "3"]).stdout;
    let expected = format!("in layer 2, head 3 of 4: {}", line(of(weights.i(2).expect("a head"))));
    assert!(third.ends_with(&expected), "{third}, expected {expected}");
}

/// Rows of pixels in three colours, and how many stand in a row.
fn read_png(path: &Path) -> (Vec<u8>, usize) {
    let decoder = png::Decoder::new(BufReader::new(File::open(path).expect("the file")));
    let mut reader = decoder.read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size().expect("a small picture")];
    let info = reader.next_frame(&mut pixels).expect("pixels");
    assert_eq!(info.color_type, png::ColorType::Rgb);
    (pixels, info.width as usize)
}

fn write_png(path: &Path, kind: png::ColorType, width: u32, pixels: &[u8]) {
    let height = (pixels.len() / kind.samples()) as u32 / width;
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path).expect("a file")), width, height);
    encoder.set_color(kind);
    encoder.write_header().and_then(|mut writer| writer.write_image_data(pixels)).expect("a PNG");
}

/// Where the class token looks, the picture is lightest.
#[test]
fn attention_is_drawn_over_the_picture_that_the_model_sees() {
    for model in MODELS {
        let out = tempfile::tempdir().expect("a folder");
        let file = out.path().join("attention.png");
        let run = run(model, &["--attention", file.to_str().expect("UTF-8"), "--head", "2"]);
        run.succeeded();
        let golden = golden(model);
        let (_, height, width) = golden["pixels"].dims3().expect("a picture");
        let (pixels, columns) = read_png(&file);
        assert_eq!((pixels.len(), columns), (3 * height * width, width), "{model}");
        let weights: Vec<Vec<f32>> = golden["attention.1"].i(1).and_then(|head| head.to_vec2()).expect("a head");
        // The light of each patch's middle.
        let light = |row: usize, column: usize| -> u32 {
            let at = |y: usize, x: usize| 3 * ((8 * row + y) * width + 8 * column + x);
            [(3, 3), (3, 4), (4, 3), (4, 4)]
                .iter()
                .flat_map(|&(y, x)| &pixels[at(y, x)..][..3])
                .map(|&x| u32::from(x))
                .sum()
        };
        let patches = || (0..height / 8).flat_map(|row| (0..width / 8).map(move |column| (row, column)));
        let weight = |&(row, column): &(usize, usize)| weights[row][column];
        let most = patches().max_by(|a, b| weight(a).total_cmp(&weight(b))).expect("patches");
        let least = patches().min_by(|a, b| weight(a).total_cmp(&weight(b))).expect("patches");
        assert!(light(most.0, most.1) > light(least.0, least.1) + 500, "{model}: {most:?} {least:?}");
    }
}

#[test]
fn grey_pictures_and_those_with_transparency_are_read() {
    let out = tempfile::tempdir().expect("a folder");
    let grey: Vec<u8> = (0..30 * 26).map(|i| (i * 37 % 251) as u8).collect();
    let spread = |channels: usize| {
        grey.iter()
            .flat_map(|&x| {
                let mut pixel = vec![x; channels];
                if channels.is_multiple_of(2) {
                    pixel[channels - 1] = x / 2;
                }
                pixel
            })
            .collect::<Vec<_>>()
    };
    let kinds = [png::ColorType::Rgb, png::ColorType::Grayscale, png::ColorType::GrayscaleAlpha, png::ColorType::Rgba];
    let vectors = kinds.map(|kind| {
        let path = out.path().join(format!("{kind:?}.png"));
        write_png(&path, kind, 30, &spread(kind.samples()));
        tensors("vit", path.to_str().expect("UTF-8"), &[]).remove("embedding").expect("a vector")
    });
    for vector in &vectors[1..] {
        assert_close(vector, &vectors[0], 0.0, "the same colours");
    }
}

#[test]
fn what_cannot_be_done_is_one_line() {
    for (picture, args, message) in [
        (PICTURE, &["--layer", "3"][..], "[image_embedding] there is no layer 3, expected 1 to 2"),
        (PICTURE, &["--head", "0"], "[image_embedding] there is no head 0, expected 1 to 4"),
        ("Cargo.toml", &[], "[image_embedding] Cargo.toml: "),
        ("nowhere.png", &[], "[image_embedding] nowhere.png: "),
    ] {
        let run = checkpoint("vit").run(&[&[picture], args].concat());
        // What is wrong with a file is said by another crate.
        assert_eq!(if message.ends_with(": ") { &run.error()[..message.len()] } else { run.error() }, message);
    }
    let activation = "[encoder] the activation \"tanhshrink\" is not one of Candle's";
    let model_type = "[encoder] model_type is \"llama\", expected one of clip, clip_vision_model, dinov2, vit";
    let crop = "[image_embedding] a picture of 24 x 24 is smaller than its middle of 32 x 32";
    let longest = "[image_embedding] size is {\"longest_edge\":9}, expected height and width";
    for (fields, message) in [
        (json!({"model_type": "llama"}), model_type),
        (json!({"hidden_act": "tanhshrink"}), activation),
        (json!({"size": {"height": 40, "width": 24}}), "[encoder] the picture has 5 x 3 patches, expected 3 x 3"),
        (json!({"size": {"height": 30, "width": 24}}), "[encoder] a picture of 30 x 24 has no whole patches of 8 x 8"),
        (json!({"size": {"longest_edge": 9}}), longest),
        (json!({"resample": 0}), "[image_embedding] resample is 0, expected 2 (bilinear) or 3 (bicubic)"),
        (json!({"image_std": [1]}), "[image_embedding] image_std is [1], expected three numbers"),
        (json!({"do_center_crop": true, "crop_size": 32}), crop),
    ] {
        let copy = checkpoint("vit").copied();
        // The fields of the model's config are none of the preprocessor's.
        for file in ["config.json", "preprocessor_config.json"] {
            let fields = fields.as_object().expect("fields").clone();
            copy.edit(file, |json| json.as_object_mut().expect("an object").extend(fields));
        }
        assert_eq!(copy.run(&[PICTURE]).error(), message);
    }
    let bare = checkpoint("vit").copied();
    fs::remove_file(bare.file("preprocessor_config.json")).expect("the file");
    assert!(bare.run(&[PICTURE]).error().contains("cannot read"));
}

#[test]
fn a_loss_over_embeddings_reaches_every_variable() -> Result<()> {
    for (model, side) in MODELS.into_iter().zip([24, 40, 24]) {
        let checkpoint = checkpoint(model);
        let (vars, vb) = variables(&checkpoint.file("model.safetensors"))?;
        let encoder = Encoder::load(&checkpoint.json("config.json"), vb, |_, _| {})?;
        let pixels = Tensor::randn(0f32, 1., (3, side, side), &Device::Cpu)?;
        let embedding = encoder.forward(&pixels, 0)?.embedding;
        let mut missing = untrained(&embedding.sqr()?.sum_all()?.backward()?, &vars);
        // What is for other tasks.
        missing.retain(|name| !["pooler", "mask_token", "text", "logit_scale"].iter().any(|part| name.contains(part)));
        assert_eq!(missing, [""; 0], "{model}");
    }
    Ok(())
}
