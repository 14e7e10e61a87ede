#!/usr/bin/env bash
# Prepare this host, a TPU VM or any Linux with a GPU or CPUs alone: system packages, the environment,
# and a test that sums over all devices. Safe to run again.
#
#   ./setup_tpu.sh                  all of it, on this host
#   ./setup_tpu.sh --packages       the system packages alone
#   ./launcher.sh setup --hosts hosts.txt   on all hosts at once, whose devices are summed together
#   ./setup_tpu.sh --help           print this
#
# It knows no credentials, and says at its end what to log in to.
#
# Exit code: 0; 2 if something is missing that it cannot install.

set -euo pipefail

programs=(git tmux curl flock) # each of the package of its name, flock of util-linux

fail() {
  echo "setup_tpu.sh: $*" >&2
  exit 2
}

# Prints the packages of Debian and Ubuntu that this host is without.
missing_packages() {
  local program
  for program in "${programs[@]}"; do
    command -v "$program" >/dev/null || echo "${program/flock/util-linux}"
  done
  if ! command -v uv >/dev/null && ! python3 -c "import ensurepip, venv" 2>/dev/null; then
    echo python3-venv
  fi
}

install_packages() {
  local missing root=()
  mapfile -t missing < <(missing_packages)
  ((${#missing[@]})) || return 0
  command -v apt-get >/dev/null || fail "install these by this system's own means: ${missing[*]}"
  if ((EUID)); then
    root=(sudo -n)
    sudo -n true 2>/dev/null || fail "needs root once: sudo apt-get install ${missing[*]}"
  fi
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${root[@]}" apt-get update -qq >/dev/null || true # what is known already may do
  "${root[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null ||
    fail "apt-get did not install ${missing[*]}"
}

self_test() {
  ./run.sh python - <<'PYTHON'
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multihost

multihost.start()
devices = np.array(jax.devices())
along = NamedSharding(Mesh(devices, "all"), PartitionSpec("all"))
ones = jax.make_array_from_callback(devices.shape, along, lambda index: np.ones(devices.size)[index])
total = int(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(along.mesh, PartitionSpec()))(ones))
kinds = sorted({device.device_kind for device in devices})
print(f"jax {jax.__version__} sees {devices.size} devices ({', '.join(kinds)}) of "
      f"{jax.process_count()} processes, {jax.local_device_count()} of them here; "
      f"a one from each adds up to {total}")
assert total == devices.size
PYTHON
}

case ${1:-} in
  --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  --packages) install_packages && exit ;;
  "") ;;
  *) fail "there is no option $1: ./setup_tpu.sh --help lists them" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")"
install_packages
./run.sh true
self_test
cat <<'TEXT'
ready. What a run may need beside this, and you log in to yourself:
  gs:// buckets    gcloud auth application-default login, or the service account of a TPU VM
  wandb            a file with WANDB_API_KEY=..., given to launcher.sh by --env
TEXT
