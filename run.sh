#!/usr/bin/env bash
# Set up the environment once, then run a command in it: the same on a laptop and on a pod worker.
#
#   ./run.sh                       prepare the sample data and train configs/tiny.toml
#   ./run.sh --train.steps 20      the same with flags for main.py
#   ./run.sh COMMAND [ARGUMENT..]  run a command: python main.py ..., pytest, ruff, ...
#   ./run.sh --help                print this
#
# Commands run in the folder of this file.
#
# The environment is .venv beside this file, made by uv where it is installed and by python3
# otherwise, with the jax for this machine: NVIDIA GPU, TPU or CPU. It is brought up to date when
# requirements.txt changes, and made anew if setting it up was interrupted.
#
# Training, validation and generation run on several hosts at once: start the same command on each.
# multihost.py finds the others in a Slurm step (srun ./run.sh python main.py ..), on a TPU VM, and
# with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which launcher.sh sets.
#
# Read from the environment, and given a value here if they have none:
#   PYTHON                     the Python to make .venv from, 3.11 or newer
#   JAX_COMPILATION_CACHE_DIR  where compiled programs are kept; a folder of .cache/jax for each kind
#                              of CPU, on others of which they would end with an illegal instruction
#   XLA_FLAGS                  on a machine with only CPUs: 8 simulated devices, patience with devices
#                              that share a core, and collectives in one order; each flag only where
#                              it is not given
#   PJRT_NPROC                 there also: threads that devices may wait in for each other; 32
#   JAX_PLATFORMS              there also: cpu, or an installed libtpu looks for a TPU
#   GLIBC_TUNABLES             there also: freed memory is kept, in large pages; or each step asks
#                              the kernel for all that it needs, page by page
#   XLA_PYTHON_CLIENT_MEM_FRACTION
#                              with a GPU: the share of its memory that jax takes; 0.92, for jax's
#                              own 0.75 leaves a quarter unused
#
# Exit code: that of the command; 2 if the environment cannot be set up.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD

# The last: by its own scheduler XLA starts collectives that do not depend on each other beside loops
# with others in them, in an order that can differ between devices, which then wait for each other
# for ever: 5 of 8 starts of a mixture of experts on (2, 2, 2). Steps take as long without.
cpu_flags=(
  --xla_force_host_platform_device_count=8
  --xla_cpu_collective_call_warn_stuck_timeout_seconds=600
  --xla_cpu_collective_call_terminate_timeout_seconds=3600
  --xla_cpu_collective_timeout_seconds=3600
  --xla_cpu_enable_concurrency_optimized_scheduler=false
)

say() {
  echo "run.sh: $*" >&2
}

fail() {
  say "$@"
  exit 2
}

# Prints cpu, tpu, cuda12 or cuda13: the extra of jax, whose CUDA 13 needs driver 580, and whose
# CUDA 12 needs 525.
machine() {
  local driver
  if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null); then
    driver=${driver%%.*}
    if [[ ! $driver =~ ^[0-9]+$ ]] || ((driver < 525)); then
      say "the NVIDIA driver (${driver:-unknown}) is older than 525, which jax needs: using the CPU"
      echo cpu
    elif ((driver < 580)); then
      echo cuda12
    else
      echo cuda13
    fi
  elif has_tpu; then
    echo tpu
  else
    echo cpu
  fi
}

# A TPU is /dev/accel0 and on, or on newer hosts a device of Google's (0x1ae0) that vfio holds.
has_tpu() {
  compgen -G '/dev/accel[0-9]*' >/dev/null && return
  compgen -G '/dev/vfio/[0-9]*' >/dev/null || return
  grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor
}

# What .venv must hold: kept in it as .ready once it does.
wanted() {
  echo "jax[$1]"
  cat requirements.txt
}

is_ready() {
  [[ -x .venv/bin/python && "$(cat .venv/.ready 2>/dev/null)" == "$(wanted "$1")" ]]
}

set_up() ( # in a process of its own, with which the lock ends
  extra=$1 started=$SECONDS
  if command -v flock >/dev/null; then # one at a time, where two hosts or shells share a folder
    exec 9>.venv-lock
    flock 9
    is_ready "$extra" && exit
  fi
  mkdir -p .cache
  say "setting up .venv with jax[$extra], once: some minutes (details in .cache/install.log)"
  if [[ -e .venv-unfinished || ! -x .venv/bin/python ]]; then
    touch .venv-unfinished
    logged create
  fi
  touch .venv-unfinished
  logged install "$extra"
  wanted "$extra" >.venv/.ready
  rm .venv-unfinished
  say "set up in $((SECONDS - started)) s"
)

logged() {
  "$@" </dev/null >.cache/install.log 2>&1 && return
  tail -n 5 .cache/install.log >&2
  fail "could not $1 .venv (all of it: .cache/install.log). Mend that and run this again."
}

create() {
  if command -v uv >/dev/null; then
    uv venv --clear --python "${PYTHON:->=3.11}" .venv
    return
  fi
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$python is not Python 3.11 or newer: name one that is, as in PYTHON=python3.12 ./run.sh"
    return 1
  fi
  if ! "$python" -m venv --clear .venv; then
    echo "$python -m venv failed: install uv, or the package python3-venv of this system"
    return 1
  fi
}

install() {
  local packages=(-r requirements.txt)
  local installer=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
  [[ $1 == cpu ]] || packages+=("jax[$1]")
  if command -v uv >/dev/null; then
    installer=(uv pip install --quiet --python .venv/bin/python)
  fi
  "${installer[@]}" "${packages[@]}"
}

# Adds each flag to XLA_FLAGS whose name is not in it.
set_cpu_flags() {
  local flag
  for flag in "${cpu_flags[@]}"; do
    [[ " ${XLA_FLAGS:-}" == *" ${flag%%=*}="* ]] || XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }$flag"
  done
  export XLA_FLAGS
  # A device can wait in several collectives at once, each in a thread of one pool. By default the
  # pool has as many threads as devices; when all of them wait, the program hangs.
  local cores
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
  export PJRT_NPROC=${PJRT_NPROC:-$((cores > 32 ? cores : 32))}
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  # A step of configs/reference.toml on one device: 700 page faults for 194,000, 1.45 s for 1.90.
  local kept=$((1 << 37)) # bytes, more than there are
  local tunables=glibc.malloc.hugetlb=1
  tunables+=:glibc.malloc.mmap_threshold=$kept:glibc.malloc.trim_threshold=$kept
  export GLIBC_TUNABLES=${GLIBC_TUNABLES-$tunables}
}

# A name for what programs are compiled for: the model of the CPU and its instructions.
cpu_kind() {
  grep -m 3 -E '^(model name|flags|Features)' /proc/cpuinfo 2>/dev/null | cksum | tr ' ' -
}

# Whether the command connects to the processes of its job. It touches UP_FILE itself, once the
# pre-flight checks have passed.
connects() {
  [[ ${1:-} == python && " main.py validate.py generate.py tests/stand_in.py " == *" ${2:-} "* ]]
}

main() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' run.sh
    return
  fi
  local extra
  extra=$(machine)
  is_ready "$extra" || set_up "$extra"
  if [[ $extra == cpu || ${JAX_PLATFORMS:-} == cpu ]]; then
    set_cpu_flags
  elif [[ $extra == cuda* ]]; then
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
  fi
  export VIRTUAL_ENV=$root/.venv PATH=$root/.venv/bin:$PATH
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$root/.cache/jax/$(cpu_kind)}
  # A program that compiles faster than this is not worth a file.
  : "${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:=0.5}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS
  if [[ $# == 0 || $1 == --* ]]; then
    if [[ ! -e data/sample/train/index.json || ! -e data/sample/val/index.json ]]; then
      python data/prepare.py --source python-stdlib --tokenizer sample --out data/sample
    fi
    set -- python main.py --config configs/tiny.toml "$@"
  fi
  [[ -z ${UP_FILE:-} ]] || connects "$@" || touch "$UP_FILE" # worker.sh waits for it
  exec "$@"
}

main "$@"
