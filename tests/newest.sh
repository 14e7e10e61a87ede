#!/usr/bin/env bash
# Run the tests with the newest jax, even if requirements.txt does not allow it yet, and with the
# newest other packages that requirements.txt and requirements-dev.txt allow. Ignores locks/.
#
#   tests/newest.sh                    the tests that run by default
#   tests/newest.sh tests/test_hlo.py  the same with arguments for pytest
#   tests/newest.sh --help             print this
#
# The environment is .cache/newest, separate from that of run.sh, since jax 0.11 needs Python 3.12.
# The uv of run.sh creates it, and each start updates it.
#
# Environment variable:
#   PYTHON  the Python for it, 3.12 or newer; default: the first of python3.14 to python3.12 and
#           python3 on the PATH that is new enough, then the newest of pyenv and of uv
#
# Exit code: that of pytest; 2 if the environment cannot be set up.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=.cache/newest

fail() {
  echo "tests/newest.sh: $*" >&2
  exit 2
}

is_new() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

# Prints the Python to use.
find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    is_new "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.12 or newer. Set another, as in" \
      "PYTHON=python3.13 tests/newest.sh"
    echo "$PYTHON"
    return
  fi
  local installed python
  installed=$(compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.*/bin/python3" | sort -rV) || true
  installed+=" $(compgen -G "$HOME/.local/share/uv/python/*/bin/python3" | sort -rV)" || true
  for python in python3.14 python3.13 python3.12 python3 $installed; do
    if is_new "$python"; then
      echo "$python"
      return
    fi
  done
  fail "no Python 3.12 or newer was found, which the newest jax needs. Install one, as in" \
    "'uv python install 3.13', or set PYTHON, as in PYTHON=/opt/bin/python3.13 tests/newest.sh"
}

set_up() {
  ./run.sh uv venv --quiet --allow-existing --python "$1" "$environment" &&
    ./run.sh uv pip install --quiet --upgrade --python "$environment/bin/python" \
      -r <(sed 's/^jax[<>=].*/jax/' requirements.txt) -r requirements-dev.txt
}

versions() {
  "$environment/bin/python" - <<'END'
import platform
from importlib.metadata import version

names = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pytest"
print(f"Python {platform.python_version()},", ", ".join(f"{n} {version(n)}" for n in names))
END
}

main() {
  if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' tests/newest.sh
    return
  fi
  local python
  python=$(find_python)
  set_up "$python" || fail "could not set up $environment with $python. Fix this and start again."
  versions
  exec "$environment/bin/python" -m pytest "$@"
}

main "$@"
