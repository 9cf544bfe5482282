# Source this file to build, link and run the feature `cuda` without CUDA and without a GPU: every device is absent. It
# writes an nvcc that compiles nothing, and one library in which every function of the driver and of the kernels fails.
# CUDA's crates build on Linux only.
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
cudarc=$(sources cudarc) kernels=$(sources candle-kernels)

# This nvcc writes an empty file for each object, library or PTX file.
cat >"$toolkit/bin/nvcc.new" <<'NVCC'
#!/usr/bin/env bash
case $1 in
--version) echo "Cuda compilation tools, release 13.0, V13.0.0" && exit ;;
--list-gpu-code) echo sm_80 && exit ;;
esac
folder=.
while [ $# -gt 0 ]; do
    case $1 in
    -o) output=$2 && shift ;;
    --output-directory) folder=$2 && shift ;;
    --lib) archive=yes ;;
    *.cu) source=$1 ;;
    esac
    shift
done
if [ -n "${archive-}" ]; then rm -f "$output" && exec ar rc "$output"; fi
: >"${output:-$folder/$(basename "$source" .cu).ptx}"
NVCC
chmod +x "$toolkit/bin/nvcc.new"
# A newer nvcc would cause everything to be built again.
cmp -s "$toolkit/bin/nvcc.new" "$toolkit/bin/nvcc" || mv "$toolkit/bin/nvcc.new" "$toolkit/bin/nvcc"

# Every function that the bindings declare, returning CUDA_ERROR_STUB_LIBRARY.
{
    sed -nE 's/.*pub unsafe fn ([A-Za-z0-9_]+).*/\1/p' "$cudarc"/src/{driver,runtime,nvrtc,cublas,cublaslt,curand}/sys/mod.rs
    sed -nE 's/.*pub(\(crate\))? fn ([A-Za-z0-9_]+).*/\2/p' "$kernels"/src/ffi.rs
} | grep -vE '^(culib|is_culib_present)$' | sort -u | sed 's/.*/int &(void) { return 34; }/' >"$toolkit/lib/all.c"
cc -w -shared -fPIC -fno-builtin -o "$toolkit/lib/liball.so" "$toolkit/lib/all.c"
for name in cuda cudart nvrtc cublas cublasLt curand; do ln -sf liball.so "$toolkit/lib/lib$name.so"; done

export NVCC=$toolkit/bin/nvcc CUDA_HOME=$toolkit
export CUDARC_CUDA_VERSION=13000 CUDA_COMPUTE_CAP=80
export LD_LIBRARY_PATH=$toolkit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
