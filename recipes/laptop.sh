#!/usr/bin/env bash
# From text to a model that chats: pretrain a small model, tune it on conversations, export it.
#
#   recipes/laptop.sh [FLAG OF main.py..]             e.g. --train.steps 100
#   TEXT=~/notes CHAT=chat.jsonl recipes/laptop.sh    with your own data
#
# After a stop start it again: each step skips what is done, or resumes. Variables:
NAME=${NAME:-laptop}          # of data/NAME, runs/NAME, runs/NAME-chat and exported/NAME
TEXT=${TEXT:-python-stdlib}   # a source of data/prepare.py: a folder, a file, hf:.., gs://..
CHAT=${CHAT:-}                # conversations (docs/data.md); empty: about Python's library
TOKENIZER=${TOKENIZER:-}      # a name of tiktoken's, or a folder; empty: train one on the text
VOCAB=${VOCAB:-4096}          # ids of that one
MAX_TOKENS=${MAX_TOKENS:-0}   # of the text; 0: all
DEPTH=${DEPTH:-2}             # layers, from which other settings follow
STEPS=${STEPS-500}            # of pretraining; empty: as many as depth.py gives, 1,000 here
TUNE_LR=${TUNE_LR:-6e-4}      # of tuning: a tenth of AdamW's rate in depth.py
DATA=${DATA:-data/$NAME} RUNS=${RUNS:-runs} # folders, also of a bucket
NEEDED_GB=${NEEDED_GB:-1}     # free disk space

set -euo pipefail
[[ ${1:-} == --help ]] && exec sed -n '2,/^$/{s/^# \{0,1\}//;p;}' "$0"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1000000) }')
if ((free_gb < NEEDED_GB)); then
  echo "error: $PWD has $free_gb GB free, and needs $NEEDED_GB. Free some, or set NEEDED_GB." >&2
  exit 2
fi
declare -F on_devices >/dev/null || on_devices() { ./run.sh python "$@"; }

echo "== 1. a tokenizer, and the text as tokens"
template=plain
if [[ -z $TOKENIZER ]]; then
  TOKENIZER=data/$NAME/tokenizer template=tokenizer
  [[ -e $TOKENIZER/tokenizer.json ]] || ./run.sh python data/train_tokenizer.py \
    --source "$TEXT" --vocab-size "$VOCAB" --out "$TOKENIZER"
fi
prepare() { ./run.sh python data/prepare.py --tokenizer "$TOKENIZER" --source "$@"; }
prepare "$TEXT" --max-tokens "$MAX_TOKENS" --out "$DATA/text"

echo "== 2. pretraining"
on_devices main.py --depth "$DEPTH" ${STEPS:+--train.steps "$STEPS"} \
  --data.train "$DATA/text/train" --data.val "$DATA/text/val" \
  --run.dir "$RUNS" --run.name "$NAME" "$@"

echo "== 3. conversations as tokens"
as_chat=(--chat --chat-template "$template" --out "$DATA/chat")
if [[ -z $CHAT ]]; then
  rows=data/$NAME/conversations
  [[ -e $rows/heldout.jsonl ]] || ./run.sh python recipes/conversations.py "$rows"
  prepare "$rows/train.jsonl" --val-share 0 "${as_chat[@]}"
  prepare "$rows/heldout.jsonl" --val-share 1 "${as_chat[@]}"
else # it counts what --skip-bad leaves out
  prepare "$CHAT" --skip-bad "${as_chat[@]}"
fi

echo "== 4. tuning, on answers alone"
on_devices main.py --config configs/tune.toml --depth "$DEPTH" --optimizer.lr "$TUNE_LR" \
  --run.init_from "$RUNS/$NAME" --data.train "$DATA/chat/train" --data.val "$DATA/chat/val" \
  --sample.prompts --run.dir "$RUNS" --run.name "$NAME-chat" "$@"

echo "== 5. validation on conversations that were held out, and export"
on_devices validate.py --run "$RUNS/$NAME-chat"
if [[ ! -e exported/$NAME/config.json ]]; then # which is written last
  rm -rf "exported/$NAME"
  ./run.sh python convert.py export --run "$RUNS/$NAME-chat" --out "exported/$NAME" --remote_code
fi
printf '%s\n' "== done. Talk to it:" "./run.sh python generate.py --run $RUNS/$NAME-chat --chat"
