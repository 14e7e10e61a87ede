#!/usr/bin/env bash
# Run one command on many hosts in a tmux window with a pane per host; typed keys go to all panes. A
# second window monitors the accelerators of each host.
#
#   ./debug_tpu.sh --hosts hosts.txt -- ./run.sh python main.py --config configs/tiny.toml
#   ./debug_tpu.sh --tpu NAME --zone us-central2-b     a shell on each host
#
# The tree must be on the hosts: ./launcher.sh start or setup sends it. The command runs in its
# folder with the variables of its process, and a shell remains when it ends.
#
# Options:
#   --hosts, --tpu, --zone, --project, --folder, --port, --coordinator   as in launcher.sh
#   --name NAME   name of the local tmux session; default debug
#   --detach      do not attach to the session
#   --dry-run     print the commands for the hosts and run none
#
# Keys: Ctrl-b n next window, Ctrl-b z zoom a pane in or out, Ctrl-b d detach, Ctrl-b & close the
# window.
#
# Exit code: 0; 2 on bad input.

set -euo pipefail
path=$(readlink -f "${BASH_SOURCE[0]}")
# shellcheck source=launch/hosts.sh
source "${path%/*}/launch/hosts.sh"

options+=([coordinator]="" [name]=debug)
flags+=([detach]="")

# Prints the command of the pane of host number $1, which runs $2 in the tree and leaves a shell.
pane() {
  local variables folder
  folder=$(quoted "${options[folder]}")
  mapfile -t variables < <(job_variables "$1")
  set_remote "$1" "cd $folder && export $(quoted "${variables[@]}") && { $2; exec bash; }" -t
  quoted "${remote[@]}"
}

# Opens the window $1 with a pane for each host, in which $2 runs.
window() {
  local number
  for number in "${!hosts[@]}"; do
    if [[ ${flags[dry-run]} ]]; then
      pane "$number" "$2"
    elif ((number == 0)); then
      open_window "$1" "$(pane 0 "$2")"
    else
      tmux split-window -d -t "=$session:$1" "$(pane "$number" "$2")"
      tmux select-layout -t "=$session:$1" tiled >/dev/null # makes space for the next pane
    fi
  done
}

# A new session is large enough for all panes; attaching resizes it to the terminal.
open_window() {
  if tmux has-session -t "=$session" 2>/dev/null; then
    tmux new-window -d -t "=$session:" -n "$1" "$2"
  else
    tmux new-session -d -s "$session" -x 400 -y $((20 + 5 * ${#hosts[@]})) -n "$1" "$2"
  fi
  tmux set-option -w -t "=$session:$1" remain-on-exit on
}

parse "$@"
((${#words[@]} == 0)) || fail "unexpected argument ${words[0]}. Give the command after --."
find_hosts
session=${options[name]}
if [[ -z ${flags[dry-run]} ]] && tmux has-session -t "=$session" 2>/dev/null; then
  fail "the tmux session $session exists already. Attach with tmux attach -t $session, or end it" \
    "with tmux kill-session -t $session."
fi
text=":"
((${#command[@]} == 0)) || text=$(quoted "${command[@]}")
monitor="if command -v tpu-info >/dev/null; then watch -n 2 tpu-info
elif command -v nvidia-smi >/dev/null; then watch -n 2 nvidia-smi
else top; fi"
window command "$text"
window monitor "$monitor"
[[ -z ${flags[dry-run]} ]] || exit 0
tmux set-option -w -t "=$session:command" synchronize-panes on
if [[ ${flags[detach]} || ! -t 0 ]]; then
  log "attach with tmux attach -t $session"
else
  exec tmux attach -t "=$session"
fi
