#!/usr/bin/env bash
# One process of a launch on its host: started in tmux, kept alive, asked how it is, stopped.
# launcher.sh calls this over ssh, and a person may too.
#
#   ./worker.sh start NAME NUMBER [VARIABLE=VALUE..] -- COMMAND [ARGUMENT..] <FILE
#                                  start ./run.sh COMMAND; wait until its process is up. FILE has
#                                  secrets as VARIABLE=VALUE, which only this user can read here
#   ./worker.sh start NAME NUMBER  the same again, with what was given before
#   ./worker.sh status NAME NUMBER state, step, loss, seconds since the log grew, free MB, numbers of
#                                  the processes that JAX lost, last line
#   ./worker.sh stop NAME NUMBER [SECONDS]   SIGTERM; wait for the save and the end, at most so long
#   ./worker.sh log NAME NUMBER [OPTION OF TAIL..]
#   ./worker.sh --help             print this
#
# All of it lies in .launch/NAME/NUMBER: command, variables, secrets, log, state, pid, up. The tmux
# session NAME runs `./worker.sh run NAME NUMBER`, and so does not end with a connection.
#
# Of the variables these are read here:
#   AGAIN   how many times to start it again within a WINDOW, when its exit code says that this can
#           help (75 143 134 137 139, see README); 0
#   WINDOW  in seconds; 3600
#   PAUSE   seconds before it is started again, doubled each time in a window; 10
#
# Exit code: 0; 1 if the process ended before it was up, or not in time; 2 on bad input.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
verb=${1:-} name=${2:-} number=${3:-} state=.launch/${2:-}/${3:-}
longest_pause=300

fail() {
  echo "worker.sh: $*" >&2
  exit 2
}

is_running() {
  tmux has-session -t "=$name" 2>/dev/null
}

# In place, in one block: a full disk takes this too.
note() {
  printf '%-79s\n' "$*" 1<>"$state/state"
}

noted() {
  local text
  read -r text 2>/dev/null <"$state/state" && echo "$text"
}

start() {
  local text
  is_running && fail "$name is already running on this host: look with status, or end it with stop"
  mkdir -p "$state"
  if (($#)); then
    keep "$@"
  elif [[ ! -e $state/command ]]; then
    fail "there is nothing to start again: $PWD/$state has no command"
  fi
  rm -f "$state"/{up,stop,late,pid}
  [[ ! -e $state/log ]] || mv "$state/log" "$state/log.before"
  note "starting"
  new_session
  while [[ ! -e $state/up ]]; do
    if ! is_running; then
      [[ $(noted) != "ended with 0" ]] || break # it was short
      tail -n 12 "$state/log" >&2
      echo "it $(noted), before it was up; log: $PWD/$state/log" >&2
      exit 1
    fi
    sleep 0.2
  done
}

# A tmux whose last session has just ended may take this one along.
new_session() {
  local tries=3
  until tmux new-session -d -s "$name" "./worker.sh run $name $number"; do
    ((--tries)) || exit 1
    sleep 0.5
  done
}

# Variables and command as given, secrets from stdin.
keep() {
  : >"$state/variables"
  while (($#)) && [[ $1 != -- ]]; do
    echo "$1" >>"$state/variables"
    shift
  done
  [[ ${1:-} == -- && $# -gt 1 ]] || fail "a command is missing: -- python main.py, as an example"
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
  eval "words=($(<"$state/command"))" # words that printf %q wrote
  tail -n +1 -F "$state/log" --pid=$$ >/dev/tty 2>/dev/null & # for who looks into the session
  trap 'touch "$state/stop"; ask' TERM HUP
  while true; do
    rm -f "$state/up"
    note "starting"
    set -m # in a process group of its own, so that all of it can be ended
    UP_FILE=$state/up ./run.sh "${words[@]}" </dev/null &
    child=$!
    set +m
    echo "$child" >"$state/pid"
    [[ ! -e $state/stop ]] || ask # it came before there was anybody to ask
    {
      wait "$child" || true # which a signal interrupts
      while kill -0 "$child"; do sleep 0.2; done
      code=0
      wait "$child" || code=$?
    } 2>/dev/null
    note "ended with $code"
    rm -f "$state"/{up,pid}
    log "process $number ended with $code"
    again "$code" || break
  done
}

# A full disk loses it.
log() {
  echo "worker.sh: $(date -u +%FT%TZ) $*" || true
}

# Waits and returns 0 if it is to be started again.
again() {
  local allowed=${AGAIN:-0} window=${WINDOW:-3600} pause=${PAUSE:-10} begun kept=()
  [[ " 75 143 134 137 139 " == *" $1 "* && $allowed != 0 ]] || return
  for begun in "${starts[@]}"; do
    ((begun + window <= SECONDS)) || kept+=("$begun")
  done
  starts=("${kept[@]}")
  if ((${#starts[@]} >= allowed)); then
    log "it is not started again: that was done $allowed times in $window s"
    return 1
  fi
  pause=$((pause << ${#starts[@]}))
  ((pause <= longest_pause)) || pause=$longest_pause
  starts+=("$SECONDS")
  note "ended with $1, again in $pause s (${#starts[@]} of $allowed)"
  pause=$((SECONDS + pause))
  until [[ -e $state/stop ]]; do
    ((SECONDS < pause)) || return 0
    sleep 0.5
  done
  note "ended with $1"
  return 1
}

# --- how it is ------------------------------------------------------------------------------------

status() {
  local now line step="" loss="" lost="" text
  if ! text=$(noted); then
    text="never started"
  elif ! is_running; then
    [[ $text == ended* ]] || text="gone" # the host was started anew, or tmux was killed
  elif [[ -e $state/up ]]; then
    now=$(date +%s)
    text="up $((now - $(stat -c %Y "$state/up"))) s"
  fi
  line=$(tail -n 1000 "$state/log" 2>/dev/null | grep -aoE 'step [0-9]+/[0-9]+  loss [^ ]+' | tail -n 1) || true
  [[ -z $line ]] || read -r _ step _ loss <<<"$line"
  [[ $text != ended* ]] || lost=$(lost)
  printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$text" "${step:--}" "${loss:--}" "$(age)" \
    "$(df -Pm . | awk 'NR == 2 {print $4}')" "${lost:--}" \
    "$(tail -n 20 "$state/log" 2>/dev/null | grep -avE '^[[:space:]]*$|^worker.sh: .* ended with' |
      tail -n 1 | tr '\t' ' ')"
}

# Prints the numbers of the processes that JAX's coordination service lost in the last of all starts.
# The service runs in process 0, so a process that no longer reaches it has lost that one.
lost() {
  tail -n 1000 "$state/log" | awk '
    /^worker.sh: .* ended with/ { if (ended) split("", lost); ended = 1 }
    /^worker.sh: / { listed = 0; next }
    ended { split("", lost); ended = 0 } # what follows is of another start
    /stopped sending heartbeats/ { listed = 1; next }
    listed && /^[0-9, ]+$/ { split($0, numbers, /[, ]+/); for (i in numbers) lost[numbers[i]]; next }
    { listed = 0 }
    /Failed to send RPC to coordination service|CoordinationService\/Heartbeat/ { lost[0] }
    END { for (number in lost) if (number != "") print number }
  ' | sort -nu | paste -sd ,
}

age() {
  local changed
  changed=$(stat -c %Y "$state/log" 2>/dev/null) || { echo - && return; }
  echo $(($(date +%s) - changed))
}

# --- its end --------------------------------------------------------------------------------------

# Sends signal $1, or TERM, to the process; KILL, and what is not up yet, with all that it started.
ask() {
  local pid signal=${1:-TERM}
  pid=$(cat "$state/pid" 2>/dev/null) || return 0
  [[ -e $state/up && $signal == TERM ]] || pid=-$pid
  kill "-$signal" -- "$pid" 2>/dev/null || true
}

stop() {
  local until=$((SECONDS + ${1:-600}))
  if is_running; then
    touch "$state/stop"
    if [[ -e $state/late ]]; then ask KILL; else ask; fi
    while is_running; do
      ((SECONDS < until)) || {
        touch "$state/late"
        echo "it has not ended; a second stop ends it at once" >&2
        exit 1
      }
      sleep 0.2
    done
  fi
  noted || echo "never started"
}

case $verb in
  --help | -h)
    sed -n '2,/^$/s/^# \{0,1\}//p' worker.sh
    ;;
  start | run | status | stop | log)
    [[ $name =~ ^[A-Za-z0-9_-]+$ && $number =~ ^[0-9]+$ ]] || fail "$verb needs NAME and NUMBER: see --help"
    shift 3
    [[ $verb != log ]] || exec tail "$@" "$state/log"
    "$verb" "$@"
    ;;
  *) fail "there is no verb ${verb:-at all}: ./worker.sh --help lists them" ;;
esac
