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
    // What the example of that name trained has no numbers of PyTorch; the tests of the examples run it.
    for name in common::systems().into_iter().filter(|name| name != "induction_heads") {
        let has_layout = common::Golden::open_config(&name)["layout"].is_string();
        assert!(has_layout || pieces::TESTED.contains(&name.as_str()), "no test reads models/{name}");
    }
}
