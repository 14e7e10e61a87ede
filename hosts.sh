# shellcheck shell=bash
# What the scripts with hosts share: their options, the hosts, and a command on each of them.
#
# A script adds its own options to `given` and `switches`, and calls `parse "$@"` and `find_hosts`.
# Then `on NUMBER TEXT` runs a shell command on one host, `in_tree NUMBER COMMAND..` a command in the
# folder of the tree, and `each FUNCTION` calls FUNCTION NUMBER for all hosts at once.

((BASH_VERSINFO[0] >= 5)) || {
  echo "this needs bash 5 or newer, and is run by $BASH_VERSION" >&2
  exit 2
}

script=$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
declare -A given=([hosts]="" [tpu]="" [zone]="" [project]="" [folder]="" [name]=train [port]=8476)
declare -A switches=([dry-run]="")
words=()     # of the command line, that belong to no option
command=()   # what follows --
hosts=()     # as they are named: of a hosts file user@host:port, of a TPU the worker's address
addresses=() # by which hosts find each other
where=()     # of a TPU, the options that name its zone and project
failed=()    # the numbers of the hosts on which the last `each` failed
scratch=$(mktemp -d)

# A cut connection shows itself within 15 s. All else, as keys and names, is of ~/.ssh/config.
ssh_options=(-o BatchMode=yes -o ConnectTimeout=10
  -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o LogLevel=ERROR)

leave() {
  local code=$? job
  for job in $(jobs -p); do
    kill -- "-$job" 2>/dev/null || true
  done
  rm -rf "$scratch"
  exit "$code"
}
trap leave EXIT
trap 'exit 130' INT TERM

say() {
  echo "$script: $*" >&2
}

fail() {
  say "$@"
  exit 2
}

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$root/$script"
}

# --- the command line -----------------------------------------------------------------------------

parse() {
  local option
  while (($#)); do
    option=${1#--}
    case $1 in
      --help | -h) usage && exit ;;
      --)
        command=("${@:2}")
        ((${#command[@]})) || fail "what is to be run follows --, as in -- python main.py"
        break
        ;;
      -f) switches[follow]=1 ;;
      --*)
        if [[ -v switches[$option] ]]; then
          switches[$option]=1
        elif [[ ! -v given[$option] ]]; then
          fail "there is no option $1: ./$script --help lists them"
        elif (($# == 1)) || [[ -z $2 ]]; then
          fail "$1 needs a value: see ./$script --help"
        else
          given[$option]=$2
          shift
        fi
        ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  [[ ${given[name]} =~ ^[A-Za-z0-9_-]+$ ]] ||
    fail "--name ${given[name]}: tmux takes letters, digits, - and _ only, as --name train"
}

# --- the hosts ------------------------------------------------------------------------------------

find_hosts() {
  if [[ ${given[hosts]} ]]; then
    read_hosts "${given[hosts]}"
  elif [[ ${given[tpu]} ]]; then
    find_workers "${given[tpu]}"
  elif [[ ${SLURM_JOB_NODELIST:-} ]]; then
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#hosts[@]})) || fail "scontrol names no hosts for SLURM_JOB_NODELIST $SLURM_JOB_NODELIST"
    addresses=("${hosts[@]}")
    : "${given[folder]:=$root}" # of one file system, as a rule
  else
    fail "on which hosts? Give --hosts FILE, or --tpu NAME --zone ZONE, or be in a Slurm job"
  fi
  : "${given[folder]:=$(basename "$root")}"
}

read_hosts() {
  local line address count=0
  [[ -f $1 && -r $1 ]] || fail "--hosts $1 cannot be read: give a file with a host in each line"
  while IFS= read -r line || [[ $line ]]; do
    count=$((count + 1))
    read -r line <<<"${line%%#*}" # without the space around it
    [[ $line ]] || continue
    [[ $line =~ ^([A-Za-z0-9._-]+@)?([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:[0-9]+)?$ ]] ||
      fail "$1, line $count: $line is not [user@]host[:port], as root@10.0.0.2:22"
    address=${BASH_REMATCH[2]}
    [[ " ${addresses[*]} " != *" $address "* ]] || fail "$1, line $count: $address is there twice"
    hosts+=("$line")
    addresses+=("$address")
  done <"$1"
  ((${#hosts[@]})) || fail "--hosts $1 names no host: give one in each line, as root@10.0.0.2"
}

# The workers of a TPU, or of the one that a queued resource became.
find_workers() {
  local found
  [[ ${given[zone]} ]] || fail "--tpu $1 needs its zone, as --zone us-central2-b"
  where=("--zone=${given[zone]}" ${given[project]:+"--project=${given[project]}"})
  command -v gcloud >/dev/null ||
    fail "--tpu needs gcloud, which is not installed: see https://cloud.google.com/sdk/docs/install"
  [[ $(gcloud auth list --filter=status:ACTIVE "--format=value(account)" 2>/dev/null) ]] ||
    fail "gcloud is not logged in: gcloud auth login"
  if ! found=$(workers "$1" 2>"$scratch/why"); then
    found=$(described queued-resources "$1" "value(state.state,tpu.nodeSpec[].nodeId)" \
      2>/dev/null) || fail "no TPU and no queued resource $1 in ${given[zone]}:" \
      "$(tail -n 1 "$scratch/why")"
    [[ $found == ACTIVE* ]] || fail "the queued resource $1 is ${found%%[[:space:]]*}, not ACTIVE:" \
      "start this again when it is"
    given[tpu]=${found##*[[:space:]]}
    [[ ${given[tpu]} != *";"* ]] || fail "the queued resource $1 has several TPUs" \
      "(${given[tpu]}), and a run takes one: give it as --tpu"
    found=$(workers "${given[tpu]}") || fail "gcloud does not describe the TPU ${given[tpu]}"
  fi
  IFS=";" read -ra hosts <<<"$found"
  ((${#hosts[@]})) || fail "the TPU ${given[tpu]} has no workers yet: start this again when it has"
  addresses=("${hosts[@]}")
}

workers() {
  described tpu-vm "$1" "value(networkEndpoints[].ipAddress)"
}

described() {
  gcloud compute tpus "$1" describe "$2" "${where[@]}" "--format=$3"
}

# --- commands on hosts ----------------------------------------------------------------------------

# Sets `reach` to what runs the shell command $2 on host number $1; $3 is -t for a terminal.
reach() {
  if [[ ${given[tpu]} ]]; then
    reach=(gcloud compute tpus tpu-vm ssh "${given[tpu]}" "${where[@]}" --quiet
      "--worker=$1" ${3:+"--ssh-flag=$3"} "--command=$2")
  else
    reach=(ssh "${ssh_options[@]}" ${3:+"$3"} "ssh://${hosts[$1]}" "$2")
  fi
}

# Words as bash reads them back.
quoted() {
  local word text=""
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:,=@%+-]+$ ]] || word=${word@Q}
    text+=" $word"
  done
  echo "${text# }"
}

# Runs a shell command on host number $1, with this standard input, which comes from `fed`.
on() {
  reach "$1" "$2"
  if [[ ${switches[dry-run]} ]]; then
    echo "${fed:+$fed | }$(quoted "${reach[@]}")"
  else
    "${reach[@]}"
  fi
}

# Runs a command there in the folder of the tree.
in_tree() {
  on "$1" "cd $(quoted "${given[folder]}") && exec $(quoted "${@:2}")"
}

# The variables that tell process number $1 its place.
place() {
  echo "JAX_COORDINATOR_ADDRESS=${given[coordinator]:-${addresses[0]}}:${given[port]}"
  echo "JAX_NUM_PROCESSES=${#hosts[@]}"
  echo "JAX_PROCESS_ID=$1"
}

# Calls "$@" NUMBER for all hosts at once. What each says is in $scratch/NUMBER.out and .err; where
# the first fails while others are not done, `at_failure` is called, if there is one.
each() {
  local number left=("${!hosts[@]}") still
  failed=()
  rm -f "$scratch"/*.code
  set -m # each in a process group of its own, which ends with this script
  for number in "${left[@]}"; do
    {
      code=0
      "$@" "$number" >"$scratch/$number.out" 2>"$scratch/$number.err" || code=$?
      echo "$code" >"$scratch/new.$number" && mv "$scratch/new.$number" "$scratch/$number.code"
    } </dev/null &
  done
  set +m
  while ((${#left[@]})); do
    still=()
    for number in "${left[@]}"; do
      if [[ ! -e $scratch/$number.code ]]; then
        still+=("$number")
      elif [[ $(<"$scratch/$number.code") != 0 ]]; then
        failed+=("$number")
      fi
    done
    left=("${still[@]}")
    if ((${#failed[@]} && ${#left[@]})) && [[ ${at_failure:-} ]]; then
      "$at_failure"
      at_failure=""
    fi
    sleep 0.1
  done
  wait
  mapfile -t failed < <(((${#failed[@]} == 0)) || printf '%s\n' "${failed[@]}" | sort -n)
  [[ -z ${switches[dry-run]} ]] || cat "$scratch"/*.out
  ((!${#failed[@]}))
}

# Names the hosts that failed, each with the last that it said.
name_failed() {
  local number text
  for number in "${failed[@]}"; do
    text=$(grep -v '^$' "$scratch/$number.err" | tail -n 6 || true)
    say "${hosts[$number]} failed: ${text:-it said nothing}$(mend "$text")"
  done
}

# What helps against what ssh says most often.
mend() {
  case $1 in
    *"Host key verification failed"*)
      echo
      echo "If you know why its key is another or new: ssh-keygen -R HOST, then ssh HOST once by hand."
      ;;
    *"Permission denied"*) echo " (which key it takes is said in ~/.ssh/config)" ;;
    *"command not found"*) echo " (./launcher.sh setup installs it)" ;;
    *"Could not resolve"*) echo " (is the name right?)" ;;
  esac
}
