//! Every system of `models/`, every case, against PyTorch's numbers.

#[path = "../common/mod.rs"]
mod common;
mod layers;
mod pieces;
mod printed;

/// f32 against the same module in f64.
const TOLERANCE: f64 = 2e-6;

#[test]
fn every_folder_of_models_has_a_test() {
    let (layers, pieces) = (layers::tested(), pieces::TESTED);
    for entry in std::fs::read_dir(common::models()).expect("models/ is there") {
        let entry = entry.expect("models/ can be listed");
        let name = entry.file_name().into_string().expect("folders have plain names");
        // What the example of that name trained has no numbers of PyTorch; the tests of the examples run it.
        if entry.path().join("config.json").is_file() && name != "induction_heads" {
            assert!(layers.contains(&name) || pieces.contains(&name.as_str()), "no test reads models/{name}");
        }
    }
}
