//! Numbers of transformers' models and gradients of PyTorch, which `make.py` writes.

use std::collections::HashMap;

use super::case::Call;
use crate::*;

const BACKENDS: [Backend; 2] = [Backend::Reference, Backend::Auto];

struct Numbers(HashMap<String, Tensor>);

impl Numbers {
    fn open() -> Result<Self> {
        Ok(Self(recorded_tensors("attention/delta/numbers.safetensors")?))
    }

    /// Returns a tensor with the dimensions in the order of the function, (B, H, T, ..).
    fn get(&self, name: &str) -> Result<Tensor> {
        let tensor = &self.0[name];
        let is_state = ["state", "last", "last.to", "state.gradient"].iter().any(|state| name.ends_with(state));
        if is_state { Ok(tensor.clone()) } else { tensor.transpose(1, 2) }
    }

    fn call(&self, case: &str, input: impl Fn(&str, Tensor) -> Result<Tensor>) -> Result<Call> {
        let get = |name| input(name, self.get(&format!("{case}.{name}"))?);
        let decay = Some(get("decay")?);
        let beta = Some(get("beta")?);
        let state = Some(get("state")?);
        let [q, k, v] = [get("q")?, get("k")?, get("v")?];
        Ok(Call { q, k, v, decay, beta, state, sequences: None, scale: None, qk_norm: None })
    }
}

#[test]
fn gated_delta_rule_matches_transformers() -> Result<()> {
    let numbers = Numbers::open()?;
    for (model, function) in ["qwen3_next", "kimi_linear"].into_iter().flat_map(|m| [(m, "chunk"), (m, "recurrent")]) {
        for (norm, qk_norm) in [("", None), ("_norm", Some(1e-6))] {
            let case = format!("{model}.{function}{norm}");
            let call = numbers.call(model, |_, tensor| Ok(tensor))?;
            for backend in BACKENDS {
                let options = DeltaOptions::default().with_backend(backend);
                let (y, state) = Call { qk_norm, ..call.clone() }.run(&options)?;
                assert_close(&y, &numbers.get(&format!("{case}.y"))?, 2e-6, &case);
                assert_close(&state, &numbers.get(&format!("{case}.last"))?, 2e-6, &case);
            }
        }
    }
    Ok(())
}

#[test]
fn gated_delta_rule_gradients_match_pytorch() -> Result<()> {
    let numbers = Numbers::open()?;
    for case in ["groups_of_values", "groups_of_queries", "channels"] {
        for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
            let get = |name: &str| numbers.get(&format!("{case}.{name}"))?.to_dtype(dtype);
            for backend in BACKENDS {
                let vars = std::cell::RefCell::new(Vec::new());
                let call = numbers.call(case, |name, tensor| {
                    let var = Var::from_tensor(&tensor.to_dtype(dtype)?)?;
                    vars.borrow_mut().push((name.to_string(), var.clone()));
                    Ok(var.into_inner())
                })?;
                let (y, last) = call.run(&DeltaOptions::default().with_backend(backend))?;
                let loss = ((&y * get("y.to")?)?.sum_all()? + (&last * get("last.to")?)?.sum_all()?)?;
                let gradients = loss.backward()?;
                assert_close(&y, &get("y")?, tolerance, case);
                assert_close(&last, &get("last")?, tolerance, case);
                for (name, var) in vars.into_inner() {
                    let gradient = gradients.get(&var).expect("it has a gradient");
                    assert_close(gradient, &get(&format!("{name}.gradient"))?, tolerance, &format!("{case}: {name}"));
                }
            }
        }
    }
    Ok(())
}
