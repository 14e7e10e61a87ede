#!/usr/bin/env bash
# Prepare this host, a TPU VM or any Linux with GPUs or CPUs: install system packages and the
# environment, then test a sum over all devices. It can run again at any time.
#
#   ./setup_tpu.sh                  prepare this host
#   ./setup_tpu.sh --packages       install the system packages only
#   ./launcher.sh setup --hosts hosts.txt   prepare many hosts, and sum over the devices of all
#   ./setup_tpu.sh --help           print this
#
# It handles no credentials; its last lines list where to log in.
#
# Exit code: 0; 2 if something is missing that it cannot install.

set -euo pipefail

programs=(git tmux curl flock) # each in the package of its name, flock in util-linux

fail() {
  echo "setup_tpu.sh: $*" >&2
  exit 2
}

# Prints the Debian and Ubuntu packages that are missing on this host.
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
  command -v apt-get >/dev/null || fail "no apt-get. Install these packages: ${missing[*]}"
  if ((EUID)); then
    root=(sudo -n)
    sudo -n true 2>/dev/null || fail "packages are missing. Run sudo apt-get install ${missing[*]}"
  fi
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  "${root[@]}" apt-get update -qq >/dev/null || true # an older package list may be enough
  "${root[@]}" apt-get install -y -qq "${missing[@]}" >/dev/null ||
    fail "apt-get could not install ${missing[*]}."
}

self_test() {
  ./run.sh python - <<'PYTHON'
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime import distributed

distributed.start()
devices = np.array(jax.devices())
mesh = Mesh(devices, "all")
sharded = NamedSharding(mesh, PartitionSpec("all"))
ones = jax.make_array_from_callback(devices.shape, sharded, lambda i: np.ones(devices.size)[i])
total = int(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(ones))
kinds = sorted({device.device_kind for device in devices})
print(f"jax {jax.__version__} sees {devices.size} devices ({', '.join(kinds)}) of "
      f"{jax.process_count()} processes, {jax.local_device_count()} of them here; "
      f"a sum of ones over all devices is {total}")
assert total == devices.size
PYTHON
}

case ${1:-} in
  --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
  --packages) install_packages && exit ;;
  "") ;;
  *) fail "unknown option $1. See ./setup_tpu.sh --help." ;;
esac
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
install_packages
./run.sh true
self_test
cat <<'TEXT'
ready. A run may also need credentials for:
  gs:// buckets    gcloud auth application-default login, or the service account of a TPU VM
  wandb            a file with WANDB_API_KEY=..., passed to launcher.sh with --env
TEXT
