#!/usr/bin/env bash
# recipes/one_gpu.sh for eight GPUs, all of which main.py uses: 20 layers on 8.2 billion tokens.
#
#   recipes/eight_gpus.sh [FLAG OF main.py..]

export NAME=${NAME:-gpus} DEPTH=${DEPTH:-20} TUNE_LR=${TUNE_LR:-7e-5} NEEDED_GB=${NEEDED_GB:-100}
exec "$(dirname "${BASH_SOURCE[0]}")/one_gpu.sh" "$@"
