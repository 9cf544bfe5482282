//! Attention weights under the names that other libraries give them: which names, packings and orders there are, and
//! how the projections of a layer are read from them and written to them.

mod detect;
mod layout;
mod load;
mod tensors;

pub use detect::{detect_with, infer_config, query_weights};
pub use layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
pub use tensors::projection_shapes;

pub(crate) use load::{load_projections, state_dict};
