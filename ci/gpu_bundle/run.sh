#!/usr/bin/env bash
# Checks candle-attention on this machine's GPU, and times it in turn with PyTorch on the same card.
#
# usage: bash run.sh            checks (two minutes with 16 cores), then times (at most 120 s)
#        bash run.sh check|times
#        bash run.sh sanitize   the checks under compute-sanitizer, which takes long
#
# PYTHON names the Python with PyTorch, python3 by default. It ends with exit code 1 if a number is wrong, and with 2 if
# there is no GPU.
set -uo pipefail
cd "$(dirname "$0")"
what=${1:-all}
case $what in all | check | times | sanitize) ;; *) echo "run.sh: expected check, times or sanitize, found $what" >&2; exit 2 ;; esac
python=${PYTHON:-python3}

# CUDA's libraries, from PyTorch's wheels and from an installed toolkit.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') || exit 2
for folder in "$packages"/nvidia/cu13/lib "$packages"/nvidia/*/lib /usr/local/cuda/lib64 /usr/local/nvidia/lib64; do
    [ ! -d "$folder" ] || LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH-}

for program in device_check device_times; do
    [ -x $program ] || { gunzip <$program.gz >$program.new && chmod +x $program.new && mv $program.new $program; } || exit 2
done
echo "candle-attention $(cat commit.txt)"
missing=$(ldd ./device_check | awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
case " $missing" in
*" libcuda.so.1 "*) echo "skipped: there is no NVIDIA driver (libcuda.so.1), so nothing was checked or timed"; exit 2 ;;
esac
if [ -n "$missing" ]; then
    echo "skipped: CUDA's libraries are missing: ${missing% }. PyTorch's wheels for CUDA 13 bring them; LD_LIBRARY_PATH names others"
    exit 2
fi
if ! devices=$(nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv,noheader 2>&1); then
    echo "skipped: there is no NVIDIA GPU: ${devices%%$'\n'*}"
    exit 2
fi
echo "${devices%%$'\n'*} (name, compute capability, driver, memory)"

status=0
if [ "$what" = all ] || [ "$what" = check ]; then
    echo "== numbers, compared with f64 on the CPU and with PyTorch's stored outputs"
    "$python" in_parallel.py ./device_check --device cuda --widths 64,128 --models models --explain || status=1
fi
if [ "$what" = all ] || [ "$what" = times ]; then
    echo "== times, in turn with PyTorch"
    "$python" beside_pytorch.py ./device_times --seconds 120 || status=1
fi
if [ "$what" = sanitize ]; then
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    if [ ! -x "$sanitizer" ]; then
        echo "skipped: there is no compute-sanitizer, which comes with CUDA's toolkit"
        exit "$status"
    fi
    for tool in memcheck racecheck synccheck initcheck; do
        echo "== compute-sanitizer: $tool"
        "$sanitizer" --tool "$tool" --error-exitcode 1 ./device_check --device cuda --short --models models || status=1
    done
fi
exit "$status"
