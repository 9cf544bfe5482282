# Source this file to build, link and run the feature `cuda` without CUDA and without a GPU: every device is absent. It
# writes an nvcc that compiles nothing, and libraries in which every function fails. CUDA's crates build on Linux only.
toolkit=$PWD/target/stand-in-cuda
mkdir -p "$toolkit"/{bin,include,lib}
ln -sfn lib "$toolkit/lib64"

# Prints the folder of a dependency's sources.
sources() {
    local manifest
    manifest=$(grep -o "\"manifest_path\":\"[^\"]*/$1-[0-9][^\"/]*/Cargo.toml\"" <<<"$metadata" | cut -d'"' -f4 | head -n 1)
    [ -n "$manifest" ] || { echo "Cargo.lock has no $1" >&2; exit 1; }
    dirname "$manifest"
}
metadata=$(cargo metadata --format-version 1 --locked --features cuda)
cudarc=$(sources cudarc)

# This nvcc writes an empty file for each object and PTX file, and a library whose functions end the program. If
# REAL_NVCC names another nvcc, that one makes the PTX files: they are all that a program without mixtures of experts
# needs.
cat >"$toolkit/bin/nvcc.new" <<'NVCC'
#!/usr/bin/env bash
case $1 in
--version) echo "Cuda compilation tools, release 13.0, V13.0.0" && exit ;;
--list-gpu-code) echo sm_80 && exit ;;
esac
arguments=("$@")
folder=.
while [ $# -gt 0 ]; do
    case $1 in
    -o) output=$2 && shift ;;
    --output-directory) folder=$2 && shift ;;
    --lib) archive=yes ;;
    --ptx) ptx=yes ;;
    *.cu) source=$1 ;;
    esac
    shift
done
if [ -n "${archive-}" ]; then
    sed -nE 's/.*pub(\(crate\))? fn ([A-Za-z0-9_]+).*/void \2(void) { __builtin_trap(); }/p' "$CARGO_MANIFEST_DIR/src/ffi.rs" |
        sort -u | cc -w -x c -fPIC -c -o "$output.o" - && rm -f "$output" && exec ar rc "$output" "$output.o"
fi
if [ -n "${ptx-}" ] && [ -n "${REAL_NVCC-}" ]; then exec "$REAL_NVCC" "${arguments[@]}"; fi
: >"${output:-$folder/$(basename "$source" .cu).ptx}"
NVCC
chmod +x "$toolkit/bin/nvcc.new"
# A newer nvcc would cause everything to be built again.
cmp -s "$toolkit/bin/nvcc.new" "$toolkit/bin/nvcc" || mv "$toolkit/bin/nvcc.new" "$toolkit/bin/nvcc"

# Makes a library of every function that bindings declare, returning CUDA_ERROR_STUB_LIBRARY: its name for the linker,
# its file's name on a machine with CUDA, and the module of the bindings.
library() {
    sed -nE 's/.*pub unsafe fn ([A-Za-z0-9_]+).*/\1/p' "$cudarc/src/$3/sys/mod.rs" | grep -vE '^(culib|is_culib_present)$' |
        sort -u | sed 's/.*/int &(void) { return 34; }/' |
        cc -w -x c -shared -fPIC -fno-builtin -Wl,-soname,"$2" -o "$toolkit/lib/$2" -
    ln -sf "$2" "$toolkit/lib/lib$1.so"
}
library cuda libcuda.so.1 driver
library cudart libcudart.so.13 runtime
library nvrtc libnvrtc.so.13 nvrtc
library cublas libcublas.so.13 cublas
library cublasLt libcublasLt.so.13 cublaslt
library curand libcurand.so.10 curand

export NVCC=$toolkit/bin/nvcc CUDA_HOME=$toolkit
export CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=80
export LD_LIBRARY_PATH=$toolkit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
