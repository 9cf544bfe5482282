//! One thing wrong at a time: the tensors of a call that fits, each of another shape or dtype in turn, and the tensors
//! of a checkpoint, each missing or of another shape.

use std::collections::BTreeMap;

use candle_nn::VarMap;

use crate::*;

/// A tensor of a call: its name, its dtype, and its dimensions as letters or numbers with spaces between.
pub type Fitting<'a> = (&'a str, DType, &'a str);

/// The sizes of letters, as in `B 2 T 3`.
fn sizes(text: &str) -> BTreeMap<&str, usize> {
    let words: Vec<_> = text.split(' ').collect();
    words.chunks(2).map(|pair| (pair[0], pair[1].parse().expect("a size"))).collect()
}

fn shape(dims: &str, sizes: &BTreeMap<&str, usize>) -> Vec<usize> {
    let size = |dim: &str| sizes.get(dim).copied().unwrap_or_else(|| dim.parse().expect("a letter or a size"));
    dims.split_whitespace().map(size).collect()
}

/// Other shapes: none, without the first dimension, with one more, and with each dimension empty or larger by one.
fn other_shapes(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut others = vec![vec![], shape.get(1..).unwrap_or_default().to_vec(), [&[1], shape].concat()];
    for at in 0..shape.len() {
        for size in [0, shape[at] + 1] {
            let mut other = shape.to_vec();
            other[at] = size;
            others.push(other);
        }
    }
    others.dedup();
    others.retain(|other| other != shape);
    others
}

/// What is said where one tensor has another shape or dtype, or one size is another for all tensors that have it.
pub fn tensors<T>(of_letters: &str, fitting: &[Fitting], call: impl Fn(&[Tensor]) -> Result<T>) -> Vec<Case> {
    let fitting_sizes = sizes(of_letters);
    let make = |sizes: &BTreeMap<&str, usize>| -> Vec<Tensor> {
        fitting.iter().map(|(_, dtype, dims)| of(*dtype, shape(dims, sizes))).collect()
    };
    let whole = make(&fitting_sizes);
    call(&whole).expect("the call fits");
    let mut cases = Vec::new();
    for (at, (name, dtype, _)) in fitting.iter().enumerate() {
        let mut with = |what: String, tensor: Tensor| {
            let mut tensors = whole.clone();
            tensors[at] = tensor;
            cases.push(outcome(format!("{name} {what}"), || call(&tensors).map(drop)));
        };
        for shape in other_shapes(whole[at].dims()) {
            with(format!("{shape:?}"), of(*dtype, Shape::from(shape)));
        }
        for other in [DType::F16, DType::F64, DType::I64].into_iter().filter(|other| other != dtype) {
            with(format!("in {other:?}"), of(other, whole[at].shape().clone()));
        }
    }
    for (letter, size) in &fitting_sizes {
        let shared = fitting.iter().filter(|(_, _, dims)| dims.split(' ').any(|dim| dim == *letter)).count() > 1;
        for other in [0, size + 1].into_iter().filter(|_| shared) {
            let tensors = make(&fitting_sizes.clone().into_iter().chain([(*letter, other)]).collect());
            cases.push(outcome(format!("{letter} {other}"), || call(&tensors).map(drop)));
        }
    }
    cases
}

/// A checkpoint: the shapes of tensors by name.
pub type Shapes = BTreeMap<String, Vec<usize>>;

pub fn shapes(tensors: &[(&str, &[usize])]) -> Shapes {
    tensors.iter().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect()
}

pub fn shapes_of<'a>(tensors: impl IntoIterator<Item = &'a (String, Tensor)>) -> Shapes {
    tensors.into_iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect()
}

/// Those of the variables that a layer makes.
pub fn shapes_of_variables<T>(load: impl FnOnce(VarBuilder) -> Result<T>) -> Result<Shapes> {
    let variables = VarMap::new();
    load(VarBuilder::from_varmap(&variables, DType::F32, &CPU))?;
    let variables = variables.data().lock().expect("one thread");
    Ok(variables.iter().map(|(name, var)| (name.clone(), var.dims().to_vec())).collect())
}

/// A builder that has tensors of zeros of these shapes.
pub fn builder(shapes: &Shapes) -> VarBuilder<'static> {
    let tensors = shapes.iter().map(|(name, shape)| (name.clone(), of(DType::F32, shape.as_slice()))).collect();
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// What is said of a checkpoint in which one tensor is missing, or has another shape.
pub fn weights<T>(fitting: &Shapes, load: impl Fn(&Shapes) -> Result<T>) -> Vec<Case> {
    load(fitting).expect("the checkpoint fits");
    let mut cases = Vec::new();
    for (name, shape) in fitting {
        let mut others = fitting.clone();
        others.remove(name);
        cases.push(outcome(format!("no {name}"), || load(&others).map(drop)));
        let larger = shape.iter().map(|size| size + 1).collect();
        let transposed = shape.iter().rev().copied().collect();
        let rows = shape[..shape.len().saturating_sub(1)].to_vec();
        let mut shapes = vec![larger, transposed, rows, vec![]];
        shapes.dedup();
        for other in shapes {
            if other != *shape {
                others.insert(name.clone(), other.clone());
                cases.push(outcome(format!("{name} {other:?}"), || load(&others).map(drop)));
            }
        }
    }
    cases
}

/// What is said of a checkpoint with one tensor more.
pub fn surplus<T>(fitting: &Shapes, more: &Shapes, load: impl Fn(&Shapes) -> Result<T>) -> Vec<Case> {
    let surplus = more.iter().filter(|(name, _)| !fitting.contains_key(*name));
    let with = |(name, shape): (&String, &Vec<usize>)| {
        let mut all = fitting.clone();
        all.insert(name.clone(), shape.clone());
        outcome(format!("{name} too"), || load(&all).map(drop))
    };
    surplus.map(with).collect()
}
