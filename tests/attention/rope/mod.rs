//! Rotary positions against transformers' numbers, and in the layer. `make.py` writes the numbers.

mod axes;
mod layer;
mod numbers;
mod tables;
