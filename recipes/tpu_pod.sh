#!/usr/bin/env bash
# recipes/eight_gpus.sh for a TPU pod that is set up (docs/hosts.md), with tokens and runs in a bucket.
#
#   TPU=pod ZONE=us-central2-b BUCKET=gs://BUCKET recipes/tpu_pod.sh [FLAG OF main.py..]
#
# Start it where gcloud has a login. This machine prepares the data; all hosts train and validate.

if [[ -z ${TPU:-} || -z ${ZONE:-} || ${BUCKET:-} != gs://* ]]; then
  echo "error: set TPU, ZONE and BUCKET, as TPU=pod ZONE=us-central2-b BUCKET=gs://my-bucket." >&2
  exit 2
fi
export NAME=${NAME:-pod} RUNS=${RUNS:-$BUCKET/runs}
export DATA=${DATA:-$BUCKET/data/$NAME}
export TOKENIZER=${TOKENIZER:-gpt2} # a name, as the hosts have no folder of this machine

wait_for_hosts() { # until no host runs a command, or one has failed
  while lines=$("${launch[@]}" status) && grep -qv -e '^host ' -e ' ended with ' <<<"$lines"; do
    sleep "${POLL_S:-30}"
  done
}

on_devices() { # after the command of an earlier start of this recipe, if it still runs
  local launch=(./launcher.sh --tpu "$TPU" --zone "$ZONE" --name "$NAME") lines
  wait_for_hosts
  "${launch[@]}" --keep-alive 5 -- python "$@"
  wait_for_hosts
  "${launch[@]}" status && [[ $lines != *" ended with "[1-9]* ]]
}
export -f wait_for_hosts on_devices
exec "$(dirname "${BASH_SOURCE[0]}")/eight_gpus.sh" "$@"
