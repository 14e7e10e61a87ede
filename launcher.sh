#!/usr/bin/env bash
# Start one command on many hosts as the processes of one job; inspect, stop and restart that job.
#
#   ./launcher.sh --hosts hosts.txt -- python main.py --config configs/moe_1b.toml
#   ./launcher.sh --tpu NAME --zone us-central2-b -- python main.py --config configs/moe_1b.toml
#   ./launcher.sh VERB [OPTION..] [-- COMMAND [ARGUMENT..]]
#
# Verbs:
#   start          send the tree, run ./run.sh COMMAND on each host, wait until all are up (default)
#   status         print state, step, loss, age of the log and its last line for each host
#   logs [HOST]    print the last lines of all logs or of one; -f follows them
#   stop           send SIGTERM to the run and wait until it has saved and ended
#   restart        stop, then start the same command again, or another COMMAND
#   setup          prepare each host with setup_tpu.sh, which ends with a test of all hosts together
#
# Hosts:
#   --hosts FILE         one [user@]host[:port] per line, with comments after #
#   --tpu NAME --zone Z  the workers of a TPU or of a queued resource, found by gcloud; --project P
#   in a Slurm job       the hosts in SLURM_JOB_NODELIST
#
# Options:
#   --name NAME     name of the launch and of its tmux session on each host; default train
#   --folder DIR    folder of the tree on the hosts, relative to the home folder; default: its name
#                   here
#   --commit C      commit to send; default HEAD, if no file has uncommitted changes
#   --env FILE      lines VARIABLE=VALUE for the run, such as a wandb key; the hosts keep them with
#                   mode 600. "quotes", 'quotes', export and # comments work as in bash. Nothing is
#                   expanded: $ stays $, and a backslash escapes in double quotes only
#   --keep-alive N  restart a run at most N times within --window SECONDS (3600) after a preemption
#                   or a fault that a restart can fix. The first pause is --pause SECONDS (10); each
#                   next pause is twice as long. Each host restarts in tmux, without a connection to
#                   here
#   --coordinator H, --port N   host and port of process 0; default: the first host, 8476
#   --wait SECONDS  time limit of a stop; default 600
#   --dry-run       print the commands for the hosts and run none
#
# ssh must know the hosts and log in with a key that needs no password. Login shells may be bash,
# fish or tcsh. Files on the hosts that are not part of the tree, such as runs/ and data/, stay.
# Needs bash 5 or newer here.
#
# RUN_OWNER in the environment or in the --env file names the job in the lock of its run
# (runtime/writer_lock.py). The default is USER@MACHINE:NAME:HOST, with this machine and the first
# host, the name of the TPU or the number of the Slurm job. It stays the same when the job restarts.
#
# Exit code: 0; 1 if a host failed, with the name and the log of each; 2 on bad input.

set -euo pipefail
path=$(readlink -f "${BASH_SOURCE[0]}")
# shellcheck source=launch/hosts.sh
source "${path%/*}/launch/hosts.sh"

options+=([commit]="" [env]="" [keep-alive]=0 [window]=3600 [pause]=10 [coordinator]="" [wait]=600)
flags+=([follow]="")

worker() { # VERB NUMBER [WORD..]
  in_tree "$2" ./launch/worker.sh "$1" "${options[name]}" "${@:2}"
}

# Logs the hosts that failed and the message, and exits with 1.
exit_failed() {
  log_failed
  log "$@"
  exit 1
}

# --- start ----------------------------------------------------------------------------------------

start() {
  ((${#command[@]})) || fail "no command. Give one after --, as in -- python main.py."
  read_variables
  choose_commit
  require_free_name
  send
  each prepare || exit_failed "no process was started"
  launch
}

# Writes the lines of the --env file to $scratch/variables in the form that worker.sh reads:
# VARIABLE=VALUE without quotes. Messages do not show values, which may be secret.
read_variables() {
  local file=${options[env]} line value count=0 place
  # [[:space:]] includes the CR of CRLF line ends.
  local space='[[:space:]]*' comment='[[:space:]]*(#.*)?$'
  local double='^"(([^"\\]|\\.)*)"'$comment single="^'([^']*)'"$comment
  : >"$scratch/variables"
  [[ $file ]] || return 0
  [[ -f $file && -r $file ]] || fail "cannot read --env $file."
  while IFS= read -r line || [[ $line ]]; do
    count=$((count + 1))
    place="--env $file, line $count"
    ((count > 1)) || line=${line#$'\xef\xbb\xbf'} # the byte order mark of some editors
    [[ ! $line =~ ^$comment ]] || continue
    [[ $line =~ ^${space}(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=${space}(.*)$ ]] ||
      fail "$place is not VARIABLE=VALUE, as in WANDB_API_KEY=..."
    line=${BASH_REMATCH[2]} value=${BASH_REMATCH[3]}
    if [[ $value =~ $double ]]; then
      value=$(printf '%s\n' "${BASH_REMATCH[1]}" | sed 's/\\\([\\"$`]\)/\1/g')
    elif [[ $value =~ $single ]]; then
      value=${BASH_REMATCH[1]}
    elif [[ $value == [\"\']* ]]; then
      fail "$place: the value does not end with its quote. Use VARIABLE=\"VALUE\" in one line."
    else
      [[ $value != "#"* ]] || value=""
      value=${value%%[[:space:]]#*}
      value=${value%"${value##*[![:space:]]}"}
    fi
    printf '%s=%s\n' "$line" "$value" >>"$scratch/variables"
  done <"$file"
}

choose_commit() {
  if [[ -z ${options[commit]} && $(git -C "$root" status --porcelain -uno) ]]; then
    fail "files have uncommitted changes, and only a commit is sent. Commit them, or use" \
      "--commit HEAD to send it without them."
  fi
  commit=$(git -C "$root" rev-parse --verify --quiet "${options[commit]:-HEAD}^{commit}") ||
    fail "--commit ${options[commit]} is not a commit of this repository."
}

require_free_name() {
  local number busy=""
  each is_free && return
  for number in "${failed[@]}"; do
    [[ $(<"$scratch/$number.out") == running ]] || exit_failed "no process was started"
    busy+=" ${hosts[$number]}"
  done
  fail "${options[name]} is already running on$busy. ./launcher.sh status shows it," \
    "./launcher.sh stop ends it, and another --name and --port start a second job."
}

is_free() {
  on "$1" "if tmux has-session -t =${options[name]} 2>/dev/null; then echo running; exit 1; fi"
}

send() {
  git -C "$root" pack-objects --revs --stdout -q <<<"$commit" >"$scratch/pack"
  each send_to || exit_failed "the tree could not be sent"
}

send_to() {
  local input="git pack-objects --revs --stdout <<<$commit"
  on "$1" "$(declare -f receive); receive $(quoted "${options[folder]}" "$commit")" <"$scratch/pack"
}

# Runs on a host: checks out commit $2 in the folder $1; stdin has its objects. git keeps files that
# are not in the tree, and refuses to overwrite files of the tree that were changed on the host.
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
  on_failure=stop_all
  if each launch_on; then
    [[ ${flags[dry-run]} ]] ||
      log "${#hosts[@]} hosts are up. With the same hosts: ./launcher.sh status, logs -f, stop"
    return
  fi
  ((${#first[@]} == 0)) || failed=("${first[@]}")
  exit_failed "the other hosts were stopped"
}

launch_on() {
  local variables input=${options[env]:+cat $(quoted "${options[env]}")}
  mapfile -t variables < <(job_variables "$1")
  variables+=("AGAIN=${options[keep-alive]}" "WINDOW=${options[window]}" "PAUSE=${options[pause]}")
  worker start "$1" "${variables[@]}" -- "${command[@]}" <"$scratch/variables"
}

# Runs when a host has failed to start, since the others would wait for it.
stop_all() {
  local number
  first=("${failed[@]}")
  for number in "${!hosts[@]}"; do
    worker stop "$number" 60 >/dev/null 2>&1 </dev/null &
  done
}

# --- a running job --------------------------------------------------------------------------------

status() {
  local number state step loss age free lost line
  each worker status || true
  [[ -z ${flags[dry-run]} ]] || return 0
  row host state step loss age "last line"
  for number in "${!hosts[@]}"; do
    IFS=$'\t' read -r state step loss age free lost line <"$scratch/$number.out" ||
      state="no answer" step=- loss=- age=- free="" lost=- line=$(tail -n 1 "$scratch/$number.err")
    row "${hosts[$number]}" "$state" "$step" "$loss" "$age" "$line"
    add_problems "$number" "$state" "$free" "$lost"
  done
  report_problems
}

row() { # HOST STATE STEP LOSS AGE LINE
  printf '%-18s %-18s %-10s %-8s %5s  %s\n' "$@" | sed 's/ *$//'
}

# Adds to `problems` what is wrong with host number $1, given its state $2, its free disk space $3
# in MB, and the numbers $4 of the processes that it lost.
add_problems() {
  local why="" number here="$script: ${hosts[$1]}"
  case $2 in
    up* | starting | *restart* | "ended with 0" | "ended with 143" | "ended with 130") ;;
    "no answer") why="ssh does not reach it, or it has no ${options[folder]}" ;;
    "never started" | gone) why="the host or its tmux was restarted, or --name is wrong" ;;
    "ended with 1") why="a bug" ;;
    "ended with 2") why="the configuration or the host needs a fix first" ;;
    "ended with 75") why="an external fault; a restart can help" ;;
    "ended with 132") why="a program was compiled for another CPU; remove .cache/jax there" ;;
    "ended with 134") why="another process was lost, or it crashed; a restart can help" ;;
    "ended with 137") why="it was killed, or out of memory; a restart can help" ;;
    *) why="an unexpected exit code" ;;
  esac
  [[ -z $why ]] ||
    problems+=("$here: $2: $why. Log: ${options[folder]}/.launch/${options[name]}/$1/log")
  for number in $(tr ',' ' ' <<<"${4/-/}"); do
    problems+=("$here: it lost process $number, on ${hosts[$number]:-a host that is not listed}")
  done
  if [[ $3 ]] && (($3 < 100)); then
    problems+=("$here: its disk is full: $3 MB are free in ${options[folder]}")
  fi
}

report_problems() {
  ((${#problems[@]})) || return 0
  printf '%s\n' "${problems[@]}" >&2
  return 1
}

logs() {
  local number host=${1:-} chosen=() tail_options=(-n 20)
  [[ -z ${flags[follow]} ]] || tail_options+=(-F)
  for number in "${!hosts[@]}"; do
    case $host in
      "" | "${hosts[$number]}" | "${addresses[$number]}") chosen+=("$number") ;;
    esac
  done
  ((${#chosen[@]})) || fail "no host $host. The hosts are ${hosts[*]}."
  set -m
  for number in "${chosen[@]}"; do
    worker log "$number" "${tail_options[@]}" </dev/null 2>&1 |
      sed -u "s/^/${addresses[$number]}: /" &
  done
  wait
}

stop() {
  local number state
  each stop_on || true
  [[ -z ${flags[dry-run]} ]] || return 0
  for number in "${!hosts[@]}"; do
    state=$(<"$scratch/$number.out")
    [[ $state != "never started" ]] || state="ended with 0"
    row "${hosts[$number]}" "${state:=$(tail -n 1 "$scratch/$number.err")}"
    add_problems "$number" "$state" "" ""
  done
  report_problems
}

stop_on() {
  worker stop "$1" "${options[wait]}"
}

restart() {
  stop || log "restarting despite these problems"
  if ((${#command[@]})); then
    start
  else
    each worker start || exit_failed "the other hosts still run; ./launcher.sh stop ends them"
    [[ ${flags[dry-run]} ]] || log "${#hosts[@]} hosts are up"
  fi
}

setup() {
  choose_commit
  each install_packages || exit_failed "the setup is not complete"
  send
  each set_up || exit_failed "the setup is not complete"
  cat "$scratch/0.out"
}

install_packages() {
  local input="cat setup_tpu.sh"
  on "$1" "bash -s -- --packages" <"$root/setup_tpu.sh"
}

set_up() {
  local variables
  mapfile -t variables < <(job_variables "$1")
  in_tree "$1" env "${variables[@]}" ./setup_tpu.sh
}

# --------------------------------------------------------------------------------------------------

commit="" problems=()
parse "$@"
verb=${words[0]:-start}
case $verb in
  start | status | stop | restart | setup)
    ((${#words[@]} < 2)) || fail "unexpected argument ${words[1]} after $verb."
    ;;
  logs) ((${#words[@]} < 3)) || fail "logs takes one host." ;;
  *) fail "unknown verb $verb. See ./launcher.sh --help." ;;
esac
for option in keep-alive window pause wait port; do
  [[ ${options[$option]} =~ ^[0-9]+$ ]] || fail "--$option ${options[$option]} is not a number."
done
find_hosts
"$verb" "${words[@]:1}"
