#!/usr/bin/env bash
# recipes/laptop.sh for a TPU pod (docs/hosts.md), with tokens, runs and checkpoints in a bucket.
#
#   TPU=pod ZONE=us-central2-b BUCKET=gs://BUCKET recipes/tpu_pod.sh [FLAG OF main.py..]
#
# Start it where gcloud has a login, after `./launcher.sh --tpu pod --zone us-central2-b setup`. Data
# are prepared here. Training and validation run on all hosts, and restart there after a preemption.

if [[ -z ${TPU:-} || -z ${ZONE:-} || ${BUCKET:-} != gs://* ]]; then
  echo "error: set TPU, ZONE and BUCKET, as TPU=pod ZONE=us-central2-b BUCKET=gs://my-bucket." >&2
  exit 2
fi
NAME=${NAME:-pod} DEPTH=${DEPTH:-20} TUNE_LR=${TUNE_LR:-7e-5} NEEDED_GB=${NEEDED_GB:-20}
TEXT=${TEXT:-hf:HuggingFaceFW/fineweb-edu}
CHAT=${CHAT:-hf:HuggingFaceTB/smoltalk} CHAT_NAME=${CHAT_NAME:-all}
MAX_TOKENS=${MAX_TOKENS:-$((1100000 * DEPTH ** 3))} # of depth.py, and 5 % for validation
TOKENIZER=${TOKENIZER:-gpt2} # a name: the hosts have no folder of this machine
DATA=${DATA:-$BUCKET/data/$NAME} RUNS=${RUNS:-$BUCKET/runs}
launch=(./launcher.sh --tpu "$TPU" --zone "$ZONE" --name "$NAME")

wait_for_hosts() { # until no host runs a command, or one has failed
  while lines=$("${launch[@]}" status) && grep -qv -e '^host ' -e ' ended with ' <<<"$lines"; do
    sleep "${POLL_S:-30}"
  done
}

on_devices() {
  wait_for_hosts # of an earlier start of this recipe
  "${launch[@]}" --keep-alive 5 -- python "$@"
  wait_for_hosts
  "${launch[@]}" status
  if [[ $lines == *" ended with "[1-9]* ]]; then
    exit 1
  fi
}

# shellcheck source=recipes/laptop.sh
source "$(dirname "${BASH_SOURCE[0]}")/laptop.sh"
