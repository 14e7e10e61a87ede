#!/usr/bin/env bash
# Set up the environment once, then run a command in it, on a laptop as on a worker of a TPU pod.
#
#   ./run.sh                       prepare the sample data and train configs/tiny.toml
#   ./run.sh --depth 2             the same with a model of 2 layers (depth.py)
#   ./run.sh --train.steps 20      the same with flags for main.py
#   ./run.sh COMMAND [ARGUMENT..]  run a command: python main.py ..., pytest, ruff, ...
#   ./run.sh --help                print this
#
# Commands run in the folder of this file, also if a symbolic link starts it.
#
# The environment is .venv beside this file. uv installs the versions in locks/ and checks their
# hashes: the packages of a run, jax's plugin for this machine (NVIDIA GPU, TPU or neither), and for
# pytest, ruff, shellcheck and the scripts in tests/ their packages. Without uv on the PATH, python3
# creates .venv and pip installs uv there. A changed lock updates .venv; an interrupted set-up
# starts over, and .venv in a folder that was moved is created anew. To install more packages:
# ./run.sh uv pip install PACKAGE
#
# Works on Linux and on macOS, with its bash 3.2 and its tools.
#
# To train, validate or generate on several hosts, start the same command on each of them.
# runtime/distributed.py finds the other processes in a Slurm step (srun ./run.sh python main.py
# ..), on a TPU VM, and by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which
# launcher.sh sets.
#
# Environment variables, with the value that this script sets if there is none:
#   PYTHON                     the Python for .venv, 3.11 to 3.14
#   PYTHONPATH, PYTHONHOME, PYTHONPLATLIBDIR, PYTHONSAFEPATH, PIP_USER, PIP_TARGET, ...
#                              without effect: they would mix other packages into .venv, hide the
#                              files of this folder, or install elsewhere
#   JAX_COMPILATION_CACHE_DIR  cache of compiled programs; a folder in .cache/jax for each CPU
#                              model, since a program for another CPU ends with an illegal
#                              instruction
#   XLA_FLAGS                  without an accelerator: 8 simulated devices, long timeouts for
#                              devices that share a core, and collectives in one order. Your flags
#                              take precedence
#   PJRT_NPROC                 without an accelerator: threads in which devices can wait; 32
#   JAX_PLATFORMS              without an accelerator: cpu, so that libtpu does not look for a TPU
#   GLIBC_TUNABLES             without an accelerator: keep freed memory, in large pages. Otherwise
#                              each step requests its memory from the kernel page by page
#   UV_COMPILE_BYTECODE        with PYTHONDONTWRITEBYTECODE: 1, so that packages are compiled when they
#                              are installed, and not at each start
#   XLA_PYTHON_CLIENT_MEM_FRACTION
#                              with a GPU: the share of its memory that jax uses; 0.92, since jax's
#                              default of 0.75 leaves a quarter unused
#
# Exit code: that of the command; 2 if the environment cannot be set up.

set -euo pipefail
unset CDPATH
file=${BASH_SOURCE[0]}
while [[ -L $file ]]; do # a link is relative to its own folder
  cd -P "$(dirname "$file")"
  file=$(readlink "$(basename "$file")")
done
cd -P "$(dirname "$file")"
root=$PWD

# The last two flags prevent deadlocks. XLA for CPUs starts a collective as soon as the loop before it
# has started, unless it needs a result of the loop. If the loop has collectives too, devices can wait
# for each other in different ones: in 5 of 8 starts of a mixture of experts on (2, 2, 2), and in every
# start of a Muon run with one microbatch. The first keeps the scheduler from moving collectives beside
# loops, and the second keeps loops of one iteration, whose contents would otherwise lie beside the
# loops in them. Steps are not slower.
cpu_flags=(
  --xla_force_host_platform_device_count=8
  --xla_cpu_collective_call_warn_stuck_timeout_seconds=600
  --xla_cpu_collective_call_terminate_timeout_seconds=3600
  --xla_cpu_collective_timeout_seconds=3600
  --xla_cpu_enable_concurrency_optimized_scheduler=false
  --xla_disable_hlo_passes=simplify-while-loops
)

log() {
  echo "run.sh: $*" >&2
}

fail() {
  log "$@"
  exit 2
}

# Prints the extra of jax for this machine: cpu, tpu, cuda12 (needs NVIDIA driver 525) or cuda13
# (580).
machine() {
  local driver
  if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null); then
    driver=${driver%%.*}
    if [[ ! $driver =~ ^[0-9]+$ ]] || ((driver < 525)); then
      log "using the CPU: the NVIDIA driver (${driver:-unknown}) is older than 525, which jax needs"
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

# A TPU is /dev/accel0 and up, or on newer hosts a Google device (0x1ae0) under vfio.
has_tpu() {
  compgen -G '/dev/accel[0-9]*' >/dev/null && return
  compgen -G '/dev/vfio/[0-9]*' >/dev/null || return
  grep -qsx 0x1ae0 /sys/bus/pci/devices/*/vendor
}

# Prints the locks that a command needs: needed_locks EXTRA COMMAND [ARGUMENT..]
needed_locks() {
  local names=cpu
  [[ $1 == cpu ]] || names+=" $1"
  case "${2:-} ${3:-} ${4:-}" in
    "pytest "* | "ruff "* | "codespell "* | "shellcheck "* | "python tests/"*) names+=" dev" ;;
    "python -m pytest" | "python -m ruff") names+=" dev" ;;
  esac
  echo "$names"
}

# Tests if the folder was moved since .venv was created: its programs name the old place. A link to
# another folder's .venv is left to that folder.
moved() {
  [[ ! -L .venv && -e .venv/.folder && $(<.venv/.folder) != "$root" ]]
}

# Tests if .venv has the packages of the locks $1. An installed lock has a copy in .venv/.locks.
is_ready() {
  local lock
  [[ -x .venv/bin/python ]] && ! moved || return
  for lock in $1; do
    cmp -s "locks/$lock.txt" ".venv/.locks/$lock.txt" || return
  done
}

set_up() ( # a subshell, which releases the file lock when it ends
  local lock started=$SECONDS
  if command -v flock >/dev/null; then # hosts and shells that share the folder take turns
    exec 9>.venv-lock
    flock 9
    ! is_ready "$1" || exit 0
  else
    log "flock is not installed. Start nothing else in this folder until .venv is set up."
  fi
  mkdir -p .cache
  log "setting up .venv with the locks $1; the log is .cache/install.log"
  : >.cache/install.log
  if [[ -e .venv-unfinished || ! -x .venv/bin/python ]] || moved; then
    touch .venv-unfinished
    logged create
    [[ -L .venv ]] || echo "$root" >.venv/.folder
  fi
  touch .venv-unfinished
  rm -rf .venv/.locks # until all packages are installed
  logged install "$1"
  mkdir .venv/.locks
  for lock in $1; do
    cp "locks/$lock.txt" .venv/.locks
  done
  rm .venv-unfinished
  log "set up in $((SECONDS - started)) s"
)

logged() {
  "$@" </dev/null >>.cache/install.log 2>&1 && return
  tail -n 5 .cache/install.log >&2
  fail "could not set up .venv. Fix this error and start again. Log: .cache/install.log"
}

create() {
  if command -v uv >/dev/null; then
    uv venv --clear --python "${PYTHON:->=3.11,<3.15}" .venv
    return
  fi
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
    echo "$python is not Python 3.11 to 3.14. Set PYTHON, as in PYTHON=python3.12 ./run.sh"
    return 1
  fi
  if ! "$python" -m venv --clear .venv; then
    echo "$python -m venv failed. Install uv, or the system package python3-venv."
    return 1
  fi
}

# Installs the locks $1. With --no-build a package without a wheel is an error, and no package runs
# its own build code.
install() {
  local lock uv=uv files=()
  if ! command -v uv >/dev/null; then
    uv=.venv/bin/uv
    .venv/bin/python -m pip --version || .venv/bin/python -m ensurepip # if uv created .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
      --only-binary :all: -r locks/uv.txt || return
  fi
  for lock in $1; do
    files+=(-r "locks/$lock.txt")
  done
  "$uv" pip install --quiet --python .venv/bin/python --require-hashes --no-build "${files[@]}"
}

# Adds the flags to XLA_FLAGS that it does not set, and the other variables for CPUs.
set_cpu_flags() {
  local flag
  for flag in "${cpu_flags[@]}"; do
    [[ " ${XLA_FLAGS:-}" == *" ${flag%%=*}="* ]] || XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }$flag"
  done
  export XLA_FLAGS
  # A device can wait in several collectives at once, each in a thread of one pool. The pool has one
  # thread per device by default; when all threads wait, the program hangs.
  local cores
  cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
  export PJRT_NPROC=${PJRT_NPROC:-$((cores > 32 ? cores : 32))}
  export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
  # A step of configs/reference.toml on one device: 700 page faults instead of 194,000, and 1.45 s
  # instead of 1.90 s.
  local kept=$((1 << 37)) # bytes, more than any machine here has
  local tunables=glibc.malloc.hugetlb=1
  tunables+=:glibc.malloc.mmap_threshold=$kept:glibc.malloc.trim_threshold=$kept
  export GLIBC_TUNABLES=${GLIBC_TUNABLES-$tunables}
}

# Prints a name for the CPU model and its instruction set, for which XLA compiles.
cpu_kind() {
  if [[ -e /proc/cpuinfo ]]; then
    grep -m 3 -E '^(model name|flags|Features)' /proc/cpuinfo
  else # macOS
    uname -m
    sysctl -n machdep.cpu.brand_string 2>/dev/null
  fi | cksum | tr ' ' -
}

# Tests if the command connects to other processes. Such a command touches UP_FILE itself, after its
# pre-flight checks.
connects() {
  [[ ${1:-} == python && " main.py validate.py generate.py tests/stand_in.py " == *" ${2:-} "* ]]
}

main() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' run.sh
    return
  fi
  local extra locks
  # If Python may not write the bytecode of packages, as in many container images, each start would
  # compile them again, in 6 s. So uv does it.
  if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then
    export UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE:-1}
  fi
  if [[ -n ${PYTHONPATH:-} ]]; then
    log "PYTHONPATH is not used: its packages would replace those of .venv"
  fi
  unset PYTHONPATH PYTHONHOME PYTHONPLATLIBDIR PYTHONSAFEPATH
  unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_DRY_RUN PIP_CONSTRAINT PIP_REQUIREMENT
  export PYTHONUTF8=1 # files are UTF-8, also where the locale has another charset
  export PIP_USER=0 # also over user = true in pip.conf
  extra=$(machine)
  locks=$(needed_locks "$extra" "$@")
  is_ready "$locks" || set_up "$locks"
  if [[ $extra == cpu || ${JAX_PLATFORMS:-} == cpu ]]; then
    set_cpu_flags
  elif [[ $extra == cuda* ]]; then
    export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
  fi
  export VIRTUAL_ENV=$root/.venv PATH=$root/.venv/bin:$PATH
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$root/.cache/jax/$(cpu_kind)}
  # Programs that compile faster are not cached.
  : "${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:=0.5}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS
  if [[ $# == 0 || $1 == --* ]]; then
    case " $* " in
      *" --depth"*) set -- python main.py "$@" ;;
      *) set -- python main.py --config configs/tiny.toml "$@" ;;
    esac
  fi
  case "$*" in
    *--data.* | *--run.init_from*) ;;
    "python main.py --config configs/tiny.toml"* | "python main.py --depth"*)
      if [[ ! -e data/sample/train/index.json || ! -e data/sample/val/index.json ]]; then
        python data/prepare.py --source python-stdlib --tokenizer sample --out data/sample
      fi
      ;;
  esac
  [[ -z ${UP_FILE:-} ]] || connects "$@" || touch "$UP_FILE" # worker.sh waits for it
  exec "$@"
}

# A closed descriptor would become that of the next file that is opened, and C++ writes to 2.
[[ -e /dev/fd/1 ]] || exec 1>/dev/null
[[ -e /dev/fd/2 ]] || exec 2>/dev/null
main "$@"
