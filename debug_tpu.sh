#!/usr/bin/env bash
# One tmux window with a pane for each host, in which a command runs on all of them at once and all
# keys go to all; a second window with a monitor of each host's accelerators.
#
#   ./debug_tpu.sh --hosts hosts.txt -- ./run.sh python main.py --config configs/tiny.toml
#   ./debug_tpu.sh --tpu NAME --zone us-central2-b     a shell on each
#
# The tree has to be on the hosts, as ./launcher.sh start or setup sends it. The command runs in its
# folder, with the variables that tell each process its place, and a shell is left when it ends.
#
# Options:
#   --hosts, --tpu, --zone, --project, --folder, --port, --coordinator   as of launcher.sh
#   --name NAME   of the tmux session here; debug
#   --detach      do not enter the session
#   --dry-run     print the commands for the hosts, and run none
#
# Keys: Ctrl-b n the other window, Ctrl-b z one pane alone and back, Ctrl-b d leave, Ctrl-b & end the
# window. Exit code: 0; 2 on bad input.

set -euo pipefail
# shellcheck source=hosts.sh
source "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

given+=([coordinator]="" [name]=debug)
switches+=([detach]="")

# A shell command that runs $2 in the folder, with the place of process number $1, and leaves a shell.
on_host() {
  local variables
  mapfile -t variables < <(place "$1")
  echo "cd $(quoted "${given[folder]}") && export $(quoted "${variables[@]}") && { $2; exec bash; }"
}

# Prints what tmux runs in the pane of host number $1.
pane() {
  reach "$1" "$(on_host "$1" "$2")" -t
  quoted "${reach[@]}"
}

# A window named $1 with a pane for each host, in which $2 runs.
window() {
  local number
  for number in "${!hosts[@]}"; do
    if [[ ${switches[dry-run]} ]]; then
      pane "$number" "$2"
    elif ((number == 0)); then
      open_window "$1" "$(pane 0 "$2")"
    else
      tmux split-window -d -t "=$session:$1" "$(pane "$number" "$2")"
      tmux select-layout -t "=$session:$1" tiled >/dev/null # room for the next
    fi
  done
}

# Large enough for any number of panes, until somebody looks at it.
open_window() {
  if tmux has-session -t "=$session" 2>/dev/null; then
    tmux new-window -d -t "=$session:" -n "$1" "$2"
  else
    tmux new-session -d -s "$session" -x 400 -y $((20 + 5 * ${#hosts[@]})) -n "$1" "$2"
  fi
  tmux set-option -w -t "=$session:$1" remain-on-exit on
}

parse "$@"
((${#words[@]} == 0)) || fail "what is to be run follows --, and ${words[0]} does not"
find_hosts
session=${given[name]}
if [[ -z ${switches[dry-run]} ]] && tmux has-session -t "=$session" 2>/dev/null; then
  fail "there is a tmux session $session: tmux attach -t $session enters it, and tmux kill-session" \
    "-t $session ends it"
fi
text=":"
((${#command[@]} == 0)) || text=$(quoted "${command[@]}")
monitor="if command -v tpu-info >/dev/null; then watch -n 2 tpu-info
elif command -v nvidia-smi >/dev/null; then watch -n 2 nvidia-smi
else top; fi"
window command "$text"
window monitor "$monitor"
[[ -z ${switches[dry-run]} ]] || exit 0
tmux set-option -w -t "=$session:command" synchronize-panes on
if [[ ${switches[detach]} || ! -t 0 ]]; then
  say "tmux attach -t $session enters it"
else
  exec tmux attach -t "=$session"
fi
