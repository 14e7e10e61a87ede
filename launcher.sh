#!/usr/bin/env bash
# Start a command on many hosts at once, headless, as the processes of one job; look at it; end it.
#
#   ./launcher.sh --hosts hosts.txt -- python main.py --config configs/moe_1b.toml
#   ./launcher.sh --tpu NAME --zone us-central2-b -- python main.py --config configs/moe_1b.toml
#   ./launcher.sh VERB [OPTION..] [-- COMMAND [ARGUMENT..]]
#
# Verbs:
#   start          send the tree, run ./run.sh COMMAND on each host, wait until all are up (default)
#   status         of each host: state, step, loss, age of its log, and the last line of that
#   logs [HOST]    the last lines of all hosts or one, which -f follows
#   stop           SIGTERM to the run; wait until it has saved and ended
#   restart        stop, and start the same again, or another COMMAND
#   setup          prepare each host with setup_tpu.sh, which ends with a test of all together
#
# Hosts:
#   --hosts FILE         [user@]host[:port] in each line, and comments after #
#   --tpu NAME --zone Z  the workers of a TPU or of a queued resource, by gcloud; --project P
#   in a Slurm job       those of SLURM_JOB_NODELIST
#
# Options:
#   --name NAME     of the launch, and of its tmux session on each host; train
#   --folder DIR    where the tree lies on the hosts, from the home folder on; named as here
#   --commit C      send this commit; if not given HEAD, and all changes have to be committed
#   --env FILE      lines VARIABLE=VALUE for the run, as a wandb key; kept on the hosts with mode 600
#   --keep-alive N  start again, at most N times within --window SECONDS (3600), a run that ended
#                   by preemption or a fault that this can help; after --pause SECONDS (10), doubled
#                   each time. Each host does that itself, in tmux: it needs no connection to here
#   --coordinator H, --port N   host and port of process 0; the first host, 8476
#   --wait SECONDS  that a stop may take; 600
#   --dry-run       print the commands for the hosts, and run none
#
# The hosts have to be known to ssh, with a key that asks for no password. Files on them which are
# not the tree's, as runs/ and data/, stay. Started from bash 5 or newer.
#
# Exit code: 0; 1 if any host failed, each of which is named with its log; 2 on bad input.

set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

given+=([commit]="" [env]="" [keep-alive]=0 [window]=3600 [pause]=10 [coordinator]="" [wait]=600)
switches+=([follow]="")

worker() { # VERB NUMBER [WORD..]
  in_tree "$2" ./worker.sh "$1" "${given[name]}" "${@:2}"
}

give_up() {
  name_failed
  say "$@"
  exit 1
}

# --- start ----------------------------------------------------------------------------------------

start() {
  ((${#command[@]})) || fail "what is to be run? Give it after --, as in -- python main.py"
  check_secrets
  choose_commit
  must_not_run
  send
  each prepare || give_up "nothing was started"
  launch
}

check_secrets() {
  local file=${given[env]}
  [[ $file ]] || return 0
  [[ -f $file && -r $file ]] || fail "--env $file cannot be read"
  ! grep -qvE '^([A-Za-z_][A-Za-z0-9_]*=.*|#.*|)$' "$file" ||
    fail "--env $file: a line is VARIABLE=VALUE, as WANDB_API_KEY=..., and one is not"
}

choose_commit() {
  if [[ -z ${given[commit]} && $(git -C "$root" status --porcelain -uno) ]]; then
    fail "files differ from the last commit, and a commit is sent: commit them, or give" \
      "--commit HEAD to send it without them"
  fi
  commit=$(git -C "$root" rev-parse --verify --quiet "${given[commit]:-HEAD}^{commit}") ||
    fail "--commit ${given[commit]} is none of this repository"
}

must_not_run() {
  local number running=""
  each is_free && return
  for number in "${failed[@]}"; do
    [[ $(<"$scratch/$number.out") == running ]] || give_up "nothing was started"
    running+=" ${hosts[$number]}"
  done
  fail "${given[name]} is already running on$running: ./launcher.sh status shows it," \
    "./launcher.sh stop ends it, and another --name and --port start one beside it"
}

is_free() {
  on "$1" "if tmux has-session -t =${given[name]} 2>/dev/null; then echo running; exit 1; fi"
}

send() {
  git -C "$root" pack-objects --revs --stdout -q <<<"$commit" >"$scratch/pack"
  each send_to || give_up "the tree could not be sent"
}

send_to() {
  local fed="git pack-objects --revs --stdout <<<$commit"
  on "$1" "$(declare -f receive); receive $(quoted "${given[folder]}" "$commit")" <"$scratch/pack"
}

# Runs on a host: brings the folder $1 to commit $2, whose objects come on stdin. Files that git does
# not know stay; what somebody changed there in files of the tree is not overwritten.
receive() {
  mkdir -p "$1" && cd "$1" || return
  [ -e .git ] || git init -q . || return
  exec 9>.git-lock && flock 9 # hosts may share the folder
  [ "$(git rev-parse -q --verify HEAD)" != "$2" ] || return 0
  git index-pack --stdin >/dev/null && git checkout -q --detach "$2"
}

prepare() {
  in_tree "$1" ./run.sh true
}

launch() {
  local first=()
  at_failure=stop_the_others
  if each launch_on; then
    [[ ${switches[dry-run]} ]] ||
      say "${#hosts[@]} hosts are up. With the same hosts: ./launcher.sh status, logs -f, stop"
    return
  fi
  ((${#first[@]} == 0)) || failed=("${first[@]}")
  give_up "the others were stopped"
}

launch_on() {
  local variables fed=${given[env]:+cat $(quoted "${given[env]}")}
  mapfile -t variables < <(place "$1")
  variables+=("AGAIN=${given[keep-alive]}" "WINDOW=${given[window]}" "PAUSE=${given[pause]}")
  worker start "$1" "${variables[@]}" -- "${command[@]}" <"${given[env]:-/dev/null}"
}

# When a host failed to start: they would wait for it.
stop_the_others() {
  local number
  first=("${failed[@]}")
  for number in "${!hosts[@]}"; do
    worker stop "$number" 60 >/dev/null 2>&1 </dev/null &
  done
}

# --- later ----------------------------------------------------------------------------------------

status() {
  local number state step loss age free lost line
  each worker status || true
  [[ -z ${switches[dry-run]} ]] || return 0
  row host state step loss age "last line"
  for number in "${!hosts[@]}"; do
    IFS=$'\t' read -r state step loss age free lost line <"$scratch/$number.out" ||
      state="no answer" step=- loss=- age=- free="" lost=- line=$(tail -n 1 "$scratch/$number.err")
    row "${hosts[$number]}" "$state" "$step" "$loss" "$age" "$line"
    judge "$number" "$state" "$free" "$lost"
  done
  tell_troubles
}

row() { # HOST STATE STEP LOSS AGE LINE
  printf '%-18s %-18s %-10s %-8s %5s  %s\n' "$@" | sed 's/ *$//'
}

# Adds to `troubles` what is wrong with host number $1, which is in state $2 with $3 MB of free disk,
# and has lost the processes $4.
judge() {
  local why="" number here="$script: ${hosts[$1]}"
  case $2 in
    up* | starting | *again* | "ended with 0" | "ended with 143" | "ended with 130") ;;
    "no answer") why="it is not reached, or has no ${given[folder]}" ;;
    "never started" | gone) why="the host or its tmux was started anew, or this is another's name" ;;
    "ended with 1") why="a bug" ;;
    "ended with 2") why="something has to be fixed first" ;;
    "ended with 75") why="something outside failed, and starting again can help" ;;
    "ended with 132") why="a program was compiled for another CPU: remove .cache/jax there" ;;
    "ended with 134") why="another process was lost, or it crashed, and starting again can help" ;;
    "ended with 137") why="it was killed, or out of memory, and starting again can help" ;;
    *) why="not by itself" ;;
  esac
  [[ -z $why ]] ||
    troubles+=("$here: $2: $why. Its log: ${given[folder]}/.launch/${given[name]}/$1/log")
  for number in $(tr ',' ' ' <<<"${4/-/}"); do
    troubles+=("$here: it lost process $number, on ${hosts[$number]:-a host that is not listed}")
  done
  if [[ $3 ]] && (($3 < 100)); then
    troubles+=("$here: its disk is full: $3 MB are free in ${given[folder]}")
  fi
}

tell_troubles() {
  ((${#troubles[@]})) || return 0
  printf '%s\n' "${troubles[@]}" >&2
  return 1
}

logs() {
  local number asked=() options=(-n 20)
  [[ -z ${switches[follow]} ]] || options+=(-F)
  for number in "${!hosts[@]}"; do
    [[ ${1:-} && ${hosts[$number]} != "$1" && ${addresses[$number]} != "$1" ]] || asked+=("$number")
  done
  ((${#asked[@]})) || fail "no host is named $1: there are ${hosts[*]}"
  set -m
  for number in "${asked[@]}"; do
    worker log "$number" "${options[@]}" </dev/null 2>&1 | sed -u "s/^/${addresses[$number]}: /" &
  done
  wait
}

stop() {
  local number state
  each stop_on || true
  [[ -z ${switches[dry-run]} ]] || return 0
  for number in "${!hosts[@]}"; do
    state=$(<"$scratch/$number.out")
    [[ $state != "never started" ]] || state="ended with 0"
    row "${hosts[$number]}" "${state:=$(tail -n 1 "$scratch/$number.err")}"
    judge "$number" "$state" "" ""
  done
  tell_troubles
}

stop_on() {
  worker stop "$1" "${given[wait]}"
}

restart() {
  local code=0
  stop || code=$?
  ((code == 0)) || say "it is started again all the same"
  if ((${#command[@]})); then
    start
  else
    each worker start || give_up "the others go on: ./launcher.sh stop ends them"
    [[ ${switches[dry-run]} ]] || say "${#hosts[@]} hosts are up"
  fi
}

setup() {
  choose_commit
  each install_packages || give_up "not all were set up"
  send
  each set_up || give_up "not all were set up"
  cat "$scratch/0.out"
}

install_packages() {
  local fed="cat setup_tpu.sh"
  on "$1" "bash -s -- --packages" <"$root/setup_tpu.sh"
}

set_up() {
  local variables
  mapfile -t variables < <(place "$1")
  in_tree "$1" env "${variables[@]}" ./setup_tpu.sh
}

# --------------------------------------------------------------------------------------------------

commit="" troubles=()
parse "$@"
verb=${words[0]:-start}
case $verb in
  start | status | stop | restart | setup) ((${#words[@]} < 2)) || fail "$verb takes no ${words[1]}" ;;
  logs) ((${#words[@]} < 3)) || fail "logs takes one host" ;;
  *) fail "there is no verb $verb: ./launcher.sh --help lists them" ;;
esac
for option in keep-alive window pause wait port; do
  [[ ${given[$option]} =~ ^[0-9]+$ ]] || fail "--$option ${given[$option]} is not a number"
done
find_hosts
"$verb" "${words[@]:1}"
