#!/usr/bin/env bash
# Start, keep alive, inspect and stop one process of a job on this host, in tmux. launcher.sh calls
# this over ssh; it also works by hand.
#
#   ./launch/worker.sh start NAME NUMBER [VARIABLE=VALUE..] -- COMMAND [ARGUMENT..] <FILE
#       start ./run.sh COMMAND and wait until its process is up. FILE has secrets as VARIABLE=VALUE;
#       only this user can read them here
#   ./launch/worker.sh start NAME NUMBER
#       start the same command again
#   ./launch/worker.sh status NAME NUMBER
#       print state, step, loss, seconds since the log grew, free MB, numbers of the processes that
#       JAX lost, and the last line
#   ./launch/worker.sh stop NAME NUMBER [SECONDS]
#       send SIGTERM and wait for the save and the end, at most SECONDS; default 600
#   ./launch/worker.sh log NAME NUMBER [OPTION OF TAIL..]
#   ./launch/worker.sh --help
#
# .launch/NAME/NUMBER holds command, variables, secrets, log, state, pid and up. The tmux session
# NAME runs `./launch/worker.sh run NAME NUMBER`, so the process does not depend on a connection.
#
# This script reads these variables:
#   AGAIN      how often to restart the process within a WINDOW, if its exit code shows that a
#              restart can help (75 143 134 137 139, see docs/usage.md); default 0
#   WINDOW     in seconds; default 3600
#   PAUSE      seconds before a restart, doubled with each restart in a window; default 10
#   RUN_OWNER  the name under which the job holds the lock of its run (runtime/writer_lock.py);
#              default USER@HOST:NAME, which is the same for each start
#
# Exit code: 0; 1 if the process ended before it was up, or not in time; 2 on bad input.

set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
verb=${1:-} name=${2:-} number=${3:-} state=.launch/${2:-}/${3:-}
longest_pause=300

fail() {
  echo "worker.sh: $*" >&2
  exit 2
}

is_running() {
  tmux has-session -t "=$name" 2>/dev/null
}

# Overwrites the file in place, within one block, which works on a full disk too.
set_state() {
  printf '%-79s\n' "$*" 1<>"$state/state"
}

get_state() {
  local text
  read -r text 2>/dev/null <"$state/state" && echo "$text"
}

start() {
  is_running && fail "$name is already running on this host. Inspect it with status, or use stop."
  mkdir -p "$state"
  if (($#)); then
    write_command "$@"
  elif [[ ! -e $state/command ]]; then
    fail "no earlier command in $PWD/$state. Give one after --, as in -- python main.py."
  fi
  rm -f "$state"/{up,stop,late,pid}
  [[ ! -e $state/log ]] || mv "$state/log" "$state/log.before"
  set_state "starting"
  new_session
  while [[ ! -e $state/up ]]; do
    if ! is_running; then
      [[ $(get_state) != "ended with 0" ]] || break # a short command
      tail -n 12 "$state/log" >&2
      echo "it $(get_state) before it was up. Log: $PWD/$state/log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

# A tmux server that exits after its last session can end a new session too.
new_session() {
  local tries=3
  until tmux new-session -d -s "$name" "./launch/worker.sh run $name $number"; do
    ((--tries)) || exit 1
    sleep 0.5
  done
}

# Writes the variables and the command in the arguments, and the secrets on stdin.
write_command() {
  : >"$state/variables"
  while (($#)) && [[ $1 != -- ]]; do
    echo "$1" >>"$state/variables"
    shift
  done
  [[ ${1:-} == -- && $# -gt 1 ]] || fail "no command. Give one after --, as in -- python main.py."
  shift
  printf '%q ' "$@" >"$state/command"
  rm -f "$state/secrets"
  (umask 077 && cat >"$state/secrets")
}

# --- in tmux --------------------------------------------------------------------------------------

run() {
  local line words starts=() code child
  exec >>"$state/log" 2>&1
  while IFS= read -r line; do
    export "${line?}"
  done < <(grep -hE '^[A-Za-z_][A-Za-z0-9_]*=' "$state/variables" "$state/secrets")
  export RUN_OWNER=${RUN_OWNER:-$(id -un)@$(uname -n):$name}
  eval "words=($(<"$state/command"))" # quoted by printf %q
  tail -n +1 -F "$state/log" --pid=$$ >/dev/tty 2>/dev/null & # for a person who attaches
  trap 'touch "$state/stop"; signal_process' TERM HUP
  while true; do
    rm -f "$state/up"
    set_state "starting"
    set -m # a process group of its own, so that a signal reaches all of it
    UP_FILE=$state/up ./run.sh "${words[@]}" </dev/null &
    child=$!
    set +m
    echo "$child" >"$state/pid"
    [[ ! -e $state/stop ]] || signal_process # the stop came before there was a process
    {
      wait "$child" || true # a signal interrupts it
      while kill -0 "$child"; do sleep 0.2; done
      code=0
      wait "$child" || code=$?
    } 2>/dev/null
    set_state "ended with $code"
    rm -f "$state"/{up,pid}
    log "process $number ended with $code"
    wait_for_restart "$code" || break
  done
}

# On a full disk the line is lost.
log() {
  echo "worker.sh: $(date -u +%FT%TZ) $*" || true
}

# Returns 0 after the pause, or 1 if the process must not restart after exit code $1.
wait_for_restart() {
  local allowed=${AGAIN:-0} window=${WINDOW:-3600} pause=${PAUSE:-10} start recent=()
  [[ " 75 143 134 137 139 " == *" $1 "* && $allowed != 0 ]] || return
  for start in "${starts[@]}"; do
    ((start + window <= SECONDS)) || recent+=("$start")
  done
  starts=("${recent[@]}")
  if ((${#starts[@]} >= allowed)); then
    log "no further restart: there were $allowed in $window s"
    return 1
  fi
  pause=$((pause << ${#starts[@]}))
  ((pause <= longest_pause)) || pause=$longest_pause
  starts+=("$SECONDS")
  set_state "ended with $1, restart in $pause s (${#starts[@]} of $allowed)"
  pause=$((SECONDS + pause))
  until [[ -e $state/stop ]]; do
    ((SECONDS < pause)) || return 0
    sleep 0.5
  done
  set_state "ended with $1"
  return 1
}

# --- status ---------------------------------------------------------------------------------------

status() {
  local line step="" loss="" lost="" text
  if ! text=$(get_state); then
    text="never started"
  elif ! is_running; then
    [[ $text == ended* ]] || text="gone" # the host rebooted, or somebody ended tmux
  elif [[ -e $state/up ]]; then
    text="up $(age "$state/up") s"
  fi
  line=$(tail -n 1000 "$state/log" 2>/dev/null | grep -aoE 'step [0-9]+/[0-9]+  loss [^ ]+' |
    tail -n 1) || true
  [[ -z $line ]] || read -r _ step _ loss <<<"$line"
  [[ $text != ended* ]] || lost=$(lost_processes)
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$text" "${step:--}" "${loss:--}" "$(age "$state/log")" \
    "$(df -Pm . | awk 'NR == 2 {print $4}')" "${lost:--}" \
    "$(tail -n 20 "$state/log" 2>/dev/null | grep -avE '^[[:space:]]*$|^worker.sh: .* ended with' |
      tail -n 1 | tr '\t' ' ')"
}

# Prints the numbers of the processes that JAX's coordination service lost in the last start. The
# service runs in process 0, so a process that cannot reach it has lost process 0.
lost_processes() {
  tail -n 1000 "$state/log" | awk '
    /^worker.sh: .* ended with/ { if (ended) split("", lost); ended = 1 }
    /^worker.sh: / { listed = 0; next }
    ended { split("", lost); ended = 0 } # a line of the next start
    /stopped sending heartbeats/ { listed = 1; next }
    listed && /^[0-9, ]+$/ {
      split($0, numbers, /[, ]+/)
      for (i in numbers) lost[numbers[i]]
      next
    }
    { listed = 0 }
    /Failed to send RPC to coordination service|CoordinationService\/Heartbeat/ { lost[0] }
    END { for (number in lost) if (number != "") print number }
  ' | sort -nu | paste -sd ,
}

# Prints the seconds since the file $1 changed.
age() {
  local changed
  changed=$(stat -c %Y "$1" 2>/dev/null) || { echo - && return; }
  echo $(($(date +%s) - changed))
}

# --- stop -----------------------------------------------------------------------------------------

# Sends signal $1, or TERM, to the process. KILL, and a process that is not up, take the whole
# group.
signal_process() {
  local pid signal=${1:-TERM}
  pid=$(cat "$state/pid" 2>/dev/null) || return 0
  [[ -e $state/up && $signal == TERM ]] || pid=-$pid
  kill "-$signal" -- "$pid" 2>/dev/null || true
}

stop() {
  local deadline=$((SECONDS + ${1:-600}))
  if is_running; then
    touch "$state/stop"
    if [[ -e $state/late ]]; then signal_process KILL; else signal_process; fi
    while is_running; do
      ((SECONDS < deadline)) || {
        touch "$state/late"
        echo "it has not ended yet; a second stop kills it" >&2
        exit 1
      }
      sleep 0.2
    done
  fi
  get_state || echo "never started"
}

case $verb in
  --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' launch/worker.sh ;;
  start | run | status | stop | log)
    [[ $name =~ ^[A-Za-z0-9_-]+$ && $number =~ ^[0-9]+$ ]] ||
      fail "$verb needs NAME and NUMBER. See ./launch/worker.sh --help."
    shift 3
    [[ $verb != log ]] || exec tail "$@" "$state/log"
    "$verb" "$@"
    ;;
  *) fail "unknown verb ${verb:-(none)}. See ./launch/worker.sh --help." ;;
esac
