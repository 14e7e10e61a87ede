#!/usr/bin/env bash
# recipes/laptop.sh for a GPU: 12 layers on 1.8 billion tokens of web text, tuned on conversations.
#
#   recipes/one_gpu.sh [FLAG OF main.py..]
#   TEXT=~/notes CHAT=chat.jsonl DEPTH=8 recipes/one_gpu.sh
#
# recipes/laptop.sh has the steps and all variables. Data are downloaded from the hub.

export NAME=${NAME:-gpu} DEPTH=${DEPTH:-12} VOCAB=${VOCAB:-32768}
export TEXT=${TEXT:-hf:HuggingFaceFW/fineweb-edu}
export CHAT=${CHAT:-hf:HuggingFaceTB/smoltalk} CHAT_NAME=${CHAT_NAME:-all}
export MAX_TOKENS=${MAX_TOKENS:-$((1100000 * DEPTH ** 3))} # of depth.py, and 5 % for validation
export TUNE_LR=${TUNE_LR:-1e-4} NEEDED_GB=${NEEDED_GB:-30}
exec "$(dirname "${BASH_SOURCE[0]}")/laptop.sh" "$@"
