//! For tests on the emulator: with `source` and a folder, writes the source of the kernels. With `options`, prints all
//! macros of the program of each line of standard input, such as `-DHEAD_DIM=64 -DHAS_SOFTCAP=1`.

use std::io;
use std::path::Path;

use candle_attention_metal::{options_of_program, write_source};

fn main() -> io::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["source", folder] => write_source(Path::new(folder)),
        ["options"] => {
            for line in io::stdin().lines() {
                println!("{}", options_of_program(&line?).map_err(io::Error::other)?.join(" "));
            }
            Ok(())
        }
        other => Err(io::Error::other(format!("expected `options`, or `source` and a folder, found {other:?}"))),
    }
}
