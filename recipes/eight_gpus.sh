#!/usr/bin/env bash
# recipes/one_gpu.sh for a machine with eight GPUs. main.py uses all of them.

export NAME=${NAME:-gpus} DEPTH=${DEPTH:-20} NEEDED_GB=${NEEDED_GB:-100} TUNE_LR=${TUNE_LR:-7e-5}
exec "$(dirname "${BASH_SOURCE[0]}")/one_gpu.sh" "$@"
