# shellcheck shell=bash
# Code that launcher.sh and debug_tpu.sh share: options, the list of hosts, and commands on hosts.
#
# A script sets `path` to its own file and sources this one. It adds its own options to `options`
# and `flags`, then calls `parse "$@"` and `find_hosts`. After that:
#   on NUMBER TEXT             runs a bash command on one host
#   in_tree NUMBER COMMAND..   runs a command in the folder of the tree
#   each FUNCTION              calls FUNCTION NUMBER for all hosts at once

((BASH_VERSINFO[0] >= 5)) || {
  echo "bash $BASH_VERSION is too old. Use bash 5 or newer." >&2
  exit 2
}

script=$(basename "${path:?}")
root=$(dirname "$path")
declare -A options=([hosts]="" [tpu]="" [zone]="" [project]="" [folder]="" [name]=train [port]=8476)
declare -A flags=([dry-run]="")
words=()     # arguments that belong to no option
command=()   # the arguments after --
hosts=()     # user@host:port from a hosts file; the address of each worker of a TPU
addresses=() # the address at which other hosts reach each host
location=()  # the options of gcloud that name the zone and the project
failed=()    # the numbers of the hosts on which the last `each` failed
scratch=$(mktemp -d)
marker="$script: output follows" # separates a command's output from that of the login shell

# ssh detects a lost connection within 15 s. Keys and names come from ~/.ssh/config.
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10
  -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o LogLevel=ERROR)

clean_up() {
  local code=$? job
  for job in $(jobs -p); do
    kill -- "-$job" 2>/dev/null || true
  done
  rm -rf "$scratch"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

log() {
  echo "$script: $*" >&2
}

fail() {
  log "$@"
  exit 2
}

# --- the command line -----------------------------------------------------------------------------

parse() {
  local option
  while (($#)); do
    option=${1#--}
    case $1 in
      --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "$path" && exit ;;
      --)
        command=("${@:2}")
        ((${#command[@]})) || fail "no command after --. Give one, as in -- python main.py."
        break
        ;;
      -f) flags[follow]=1 ;;
      --*)
        if [[ -v flags[$option] ]]; then
          flags[$option]=1
        elif [[ ! -v options[$option] ]]; then
          fail "unknown option $1. See ./$script --help."
        elif (($# == 1)) || [[ -z $2 ]]; then
          fail "$1 needs a value. See ./$script --help."
        else
          options[$option]=$2
          shift
        fi
        ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  [[ ${options[name]} =~ ^[A-Za-z0-9_-]+$ ]] ||
    fail "--name ${options[name]} is no name for a tmux session. Use letters, digits, - and _ only."
}

# --- the hosts ------------------------------------------------------------------------------------

find_hosts() {
  if [[ ${options[hosts]} ]]; then
    read_hosts "${options[hosts]}"
  elif [[ ${options[tpu]} ]]; then
    find_workers "${options[tpu]}"
  elif [[ ${SLURM_JOB_NODELIST:-} ]]; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#hosts[@]})) || fail "scontrol lists no hosts for SLURM_JOB_NODELIST $SLURM_JOB_NODELIST."
    addresses=("${hosts[@]}")
    : "${options[folder]:=$root}" # the nodes usually share a file system
  else
    fail "no hosts. Use --hosts FILE, or --tpu NAME --zone ZONE, or run this in a Slurm job."
  fi
  : "${options[folder]:=$(basename "$root")}"
}

read_hosts() {
  local line address count=0
  [[ -f $1 && -r $1 ]] || fail "cannot read --hosts $1. Give a file with one host per line."
  while IFS= read -r line || [[ $line ]]; do
    count=$((count + 1))
    read -r line <<<"${line%%#*}" # trims the spaces
    [[ $line ]] || continue
    [[ $line =~ ^([A-Za-z0-9._-]+@)?([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?$ ]] ||
      fail "$1, line $count: $line is not [user@]host[:port], as in root@10.0.0.2:22."
    address=${BASH_REMATCH[2]}
    [[ " ${addresses[*]} " != *" $address "* ]] || fail "$1, line $count: $address is listed twice."
    hosts+=("$line")
    addresses+=("$address")
  done <"$1"
  ((${#hosts[@]})) || fail "--hosts $1 lists no host. Write one per line, as in root@10.0.0.2."
}

# Finds the workers of the TPU $1, or of the TPU of the queued resource $1.
find_workers() {
  local found
  [[ ${options[zone]} ]] || fail "--tpu $1 needs a zone, as in --zone us-central2-b."
  location=("--zone=${options[zone]}" ${options[project]:+"--project=${options[project]}"})
  command -v gcloud >/dev/null ||
    fail "gcloud is not installed. See https://cloud.google.com/sdk/docs/install."
  [[ $(gcloud auth list --filter=status:ACTIVE "--format=value(account)" 2>/dev/null) ]] ||
    fail "gcloud is not logged in. Run gcloud auth login."
  if ! found=$(workers "$1" 2>"$scratch/error"); then
    found=$(describe queued-resources "$1" "value(state.state,tpu.nodeSpec[].nodeId)" \
      2>/dev/null) || fail "no TPU and no queued resource $1 in ${options[zone]}:" \
      "$(tail -n 1 "$scratch/error")"
    [[ $found == ACTIVE* ]] || fail "the queued resource $1 is ${found%%[[:space:]]*}." \
      "Start this again when it is ACTIVE."
    options[tpu]=${found##*[[:space:]]}
    [[ ${options[tpu]} != *";"* ]] || fail "the queued resource $1 has several TPUs" \
      "(${options[tpu]}), and a run uses one. Give that one as --tpu."
    found=$(workers "${options[tpu]}") || fail "gcloud cannot describe the TPU ${options[tpu]}."
  fi
  IFS=";" read -ra hosts <<<"$found"
  ((${#hosts[@]})) || fail "the TPU ${options[tpu]} has no workers yet. Start this again later."
  addresses=("${hosts[@]}")
}

workers() {
  describe tpu-vm "$1" "value(networkEndpoints[].ipAddress)"
}

describe() {
  gcloud compute tpus "$1" describe "$2" "${location[@]}" "--format=$3"
}

# --- commands on hosts ----------------------------------------------------------------------------

# Sets `remote` to the local command that runs the bash command $2 on host number $1. $3 is -t for a
# terminal. The login shell of the host parses the command line and may be fish or tcsh, so base64
# encodes the command.
set_remote() {
  local line=$2
  [[ ${flags[dry-run]} ]] ||
    line="bash -c 'eval \"\$(base64 -d <<<$(base64 <<<"$2" | tr -d '\n'))\"'"
  if [[ ${options[tpu]} ]]; then
    remote=(gcloud compute tpus tpu-vm ssh "${options[tpu]}" "${location[@]}" --quiet
      "--worker=$1" ${3:+"--ssh-flag=$3"} "--command=$line")
  else
    remote=(ssh "${ssh_options[@]}" ${3:+"$3"} "ssh://${hosts[$1]}" "$line")
  fi
}

# Prints words quoted for bash.
quoted() {
  local word text=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]] || word=${word@Q}
    text+=" $word"
  done
  echo "${text# }"
}

# Runs the bash command $2 on host number $1 with this stdin. A dry run prints the command instead;
# `input` is the command that it shows for stdin.
on() {
  if [[ ${flags[dry-run]} ]]; then
    set_remote "$1" "$2"
    echo "${input:+$input | }$(quoted "${remote[@]}")"
  else
    set_remote "$1" "printf '\n%s\n' '$marker'"$'\n'"$2"
    "${remote[@]}" | after_marker
  fi
}

# Prints what follows the marker on stdin. The start-up files of the login shell, such as .bashrc,
# print what comes before it.
after_marker() {
  local line=""
  while [[ $line != "$marker" ]]; do
    IFS= read -r line || return 0
  done
  cat
}

in_tree() { # NUMBER COMMAND..
  on "$1" "cd $(quoted "${options[folder]}") && exec $(quoted "${@:2}")"
}

# Prints the variables that describe the job to process number $1.
job_variables() {
  echo "JAX_COORDINATOR_ADDRESS=${options[coordinator]:-${addresses[0]}}:${options[port]}"
  echo "JAX_NUM_PROCESSES=${#hosts[@]}"
  echo "JAX_PROCESS_ID=$1"
  echo "RUN_OWNER=$(owner)"
}

# Prints the name under which the job holds the lock of its run. It stays the same when the same
# user starts the job again, from the same machine, under the same name and on the same hosts.
owner() {
  local target=${addresses[0]}
  if [[ ${options[tpu]} ]]; then
    target=${options[tpu]}
  elif [[ -z ${options[hosts]} ]]; then
    target=slurm-${SLURM_JOB_ID:-}
  fi
  echo "${RUN_OWNER:-$(id -un)@$(uname -n):${options[name]}:$target}"
}

# Calls "$@" NUMBER for all hosts at once. The outputs are in $scratch/NUMBER.out and .err. When the
# first host fails while others still run, this calls `on_failure` if it is set.
each() {
  local number running=("${!hosts[@]}") rest
  failed=()
  rm -f "$scratch"/*.code
  set -m # a process group for each, which clean_up ends
  for number in "${running[@]}"; do
    {
      code=0
      "$@" "$number" >"$scratch/$number.out" 2>"$scratch/$number.err" || code=$?
      echo "$code" >"$scratch/new.$number" && mv "$scratch/new.$number" "$scratch/$number.code"
    } </dev/null &
  done
  set +m
  while ((${#running[@]})); do
    rest=()
    for number in "${running[@]}"; do
      if [[ ! -e $scratch/$number.code ]]; then
        rest+=("$number")
      elif [[ $(<"$scratch/$number.code") != 0 ]]; then
        failed+=("$number")
      fi
    done
    running=("${rest[@]}")
    if ((${#failed[@]} && ${#running[@]})) && [[ ${on_failure:-} ]]; then
      "$on_failure"
      on_failure=""
    fi
    sleep 0.1
  done
  wait
  mapfile -t failed < <(((${#failed[@]} == 0)) || printf '%s\n' "${failed[@]}" | sort -n)
  [[ -z ${flags[dry-run]} ]] || cat "$scratch"/*.out
  ((!${#failed[@]}))
}

# Logs the hosts that failed, each with its last lines on stderr.
log_failed() {
  local number text
  for number in "${failed[@]}"; do
    text=$(grep -v '^$' "$scratch/$number.err" | tail -n 6 || true)
    log "${hosts[$number]} failed: ${text:-it printed nothing}$(hint "$text")"
  done
}

# Prints the fix for frequent errors of ssh.
hint() {
  case $1 in
    *"Host key verification failed"*)
      echo
      echo "If you expect a new host key: ssh-keygen -R HOST, then ssh HOST once by hand."
      ;;
    *"Permission denied"*) echo " (set the key for this host in ~/.ssh/config)" ;;
    *"command not found"*) echo " (./launcher.sh setup installs it)" ;;
    *"Could not resolve"*) echo " (check the name)" ;;
  esac
}
