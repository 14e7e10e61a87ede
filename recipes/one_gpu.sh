#!/usr/bin/env bash
# recipes/laptop.sh, which has all steps and variables, for one GPU and data of the hub.
#
#   recipes/one_gpu.sh [FLAG OF main.py..]
#   TEXT=~/notes CHAT=chat.jsonl DEPTH=8 recipes/one_gpu.sh

export NAME=${NAME:-gpu} DEPTH=${DEPTH:-12} VOCAB=${VOCAB:-32768} NEEDED_GB=${NEEDED_GB:-30}
export STEPS=${STEPS-} # those of depth.py
export TEXT=${TEXT:-hf:HuggingFaceFW/fineweb-edu} TUNE_LR=${TUNE_LR:-1e-4}
export CHAT=${CHAT:-hf:HuggingFaceTB/smol-smoltalk}
export MAX_TOKENS=${MAX_TOKENS:-$((1100000 * DEPTH ** 3))} # of depth.py, and 5 % for validation
exec "$(dirname "${BASH_SOURCE[0]}")/laptop.sh" "$@"
