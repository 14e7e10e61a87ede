#!/usr/bin/env bash
# Train a small model on text, tune it on conversations, and export it: every step of a chat model.
#
#   recipes/laptop.sh [FLAG OF main.py..]             e.g. --train.steps 100
#   TEXT=~/notes CHAT=chat.jsonl recipes/laptop.sh    with your own data
#   recipes/laptop.sh --help                          print this
#
# After a stop, start it again: each step skips what is done, and training resumes. Flags are those
# of pretraining and tuning. These variables change the recipe, here with their values for a laptop:
#
NAME=${NAME:-laptop}             # of data/NAME, runs/NAME, runs/NAME-chat and exported/NAME
TEXT=${TEXT:-python-stdlib}      # a source of data/prepare.py: a folder, a file, hf:..., gs://...
CHAT=${CHAT:-}                   # conversations (docs/data.md); empty: about Python's library
CHAT_NAME=${CHAT_NAME:-}         # their configuration, if they are a data set of the hub
TOKENIZER=${TOKENIZER:-}         # a name of tiktoken's or a folder; empty: train one on the text
VOCAB=${VOCAB:-4096}             # ids of the tokenizer that is trained
MAX_TOKENS=${MAX_TOKENS:-0}      # of the text; 0: all
DEPTH=${DEPTH:-2}                # layers, from which other settings follow (depth.py)
TUNE_LR=${TUNE_LR:-6e-4}         # peak learning rate of tuning: a tenth of AdamW's in depth.py
DATA=${DATA:-data/$NAME}         # a folder, or one of a bucket
RUNS=${RUNS:-runs}               # the same
NEEDED_GB=${NEEDED_GB:-1}        # free disk space

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --help ]]; then
  sed -n '2,/^$/{s/^# \{0,1\}//;p;}' recipes/laptop.sh
  exit
fi
free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
if ((free_kb < NEEDED_GB * 1000000)); then
  echo "error: $PWD has $((free_kb / 1000000)) GB free, and this needs $NEEDED_GB. Free some." >&2
  exit 2
fi
# Runs a command on all devices. recipes/tpu_pod.sh has its own.
if ! declare -F on_devices >/dev/null; then
  on_devices() { ./run.sh python "$@"; }
fi

echo "== 1. a tokenizer, and the text as tokens"
template=plain
if [[ -z $TOKENIZER ]]; then
  TOKENIZER=data/$NAME/tokenizer template=tokenizer
  [[ -e $TOKENIZER ]] || ./run.sh python data/train_tokenizer.py --source "$TEXT" \
    --vocab-size "$VOCAB" --out "$TOKENIZER"
fi
./run.sh python data/prepare.py --source "$TEXT" --tokenizer "$TOKENIZER" \
  --max-tokens "$MAX_TOKENS" --out "$DATA/text"

echo "== 2. pretraining"
on_devices main.py --depth "$DEPTH" --data.train "$DATA/text/train" --data.val "$DATA/text/val" \
  --run.dir "$RUNS" --run.name "$NAME" "$@"

echo "== 3. conversations as tokens"
prepare_chat() {
  ./run.sh python data/prepare.py --source "$@" --chat --chat-template "$template" \
    --tokenizer "$TOKENIZER" --out "$DATA/chat"
}
if [[ -z $CHAT ]]; then
  written=data/$NAME/conversations
  [[ -e $written/heldout.jsonl ]] || ./run.sh python recipes/conversations.py --out "$written"
  prepare_chat "$written/train.jsonl" --val-share 0
  prepare_chat "$written/heldout.jsonl" --val-share 1
else
  prepare_chat "$CHAT" --hf-name "$CHAT_NAME" --skip-bad # the last one counts what it leaves out
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

echo "== done. Talk to the model:"
echo "./run.sh python generate.py --run $RUNS/$NAME-chat --chat"
