//! The numbers that the tutorials print, to their four digits.

use crate::common::{Golden, models, read_json, values};

/// Checks that the golden numbers round to the printed digits wherever the tutorial's arithmetic was right.
#[test]
fn printed_numbers_of_tutorials_are_reproduced() {
    let list: serde_json::Value = read_json(models().join("printed_numbers.json"));
    let mut compared = 0;
    for entry in list.as_array().expect("a list") {
        let [folder, case, tensor] = ["folder", "case", "tensor"].map(|key| entry[key].as_str().expect("a name"));
        let computed = values(Golden::open(folder).get(case, tensor));
        let numbers = entry["values"].as_array().expect("values");
        let flags = entry["digits_equal"].as_array().expect("flags");
        assert_eq!(computed.len(), numbers.len(), "{}", entry["what"]);
        for ((ours, printed), equal) in computed.iter().zip(numbers).zip(flags) {
            let printed = printed.as_f64().expect("a number");
            // The place of the last printed digit: four decimals, or five significant digits of a small number.
            let place = if printed != 0.0 && printed.abs() < 1e-3 { printed.abs() * 1e-4 } else { 1e-4 };
            let matches = (ours - printed).abs() <= 0.5 * place * (1.0 + 1e-3) + 1e-7;
            if equal.as_bool().expect("a flag") {
                assert!(matches, "{}: {ours} does not round to {printed}", entry["what"]);
                compared += 1;
            }
        }
    }
    assert!(compared > 150, "only {compared} printed numbers were compared");
}
