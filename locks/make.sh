#!/usr/bin/env bash
# Resolve requirements.txt and requirements-dev.txt into the lock files that run.sh installs.
#
#   locks/make.sh             keep each pinned version that still satisfies the requirements
#   locks/make.sh --upgrade   pin the newest versions that satisfy them
#   locks/make.sh --help      print this
#
# Needs uv: ./run.sh locks/make.sh has it on the PATH. Run the tests with the new versions, then
# commit the requirements together with the locks.
#
#   cpu.txt      every package of a run, on any machine
#   tpu.txt, cuda12.txt, cuda13.txt
#                what jax needs for these accelerators in addition
#   dev.txt      what the tests and linters need in addition
#   uv.txt       uv, for machines without it
#
# A lock is valid for Linux and macOS and for all Pythons that run.sh accepts. It pins each package
# by version and by the SHA-256 digests of its archives. jax and its plugins have an older version
# for Python 3.11 than for later ones; the other packages have the same.
#
# Exit code: 0; 2 on bad input; that of uv if it finds no solution.

set -euo pipefail
cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Prefer one version of a package for all Pythons, so that tests on one Python cover the others too.
# The exception is jax, whose newest versions Python 3.11 cannot use. Every package needs a wheel,
# since run.sh builds nothing.
options=(--quiet --universal --python-version 3.11 --fork-strategy fewest --only-binary :all:
  --generate-hashes --no-annotate --no-emit-index-url --custom-compile-command locks/make.sh)

# Writes the lock $1 from the requirements in the other arguments and on stdin.
lock() {
  local name=$1
  shift
  uv pip compile "${options[@]}" --output-file "locks/$name.txt" "$@" >/dev/null
}

# Writes a lock with the versions of cpu.txt and without the packages in cpu.txt.
lock_addition() {
  local package omitted=()
  while read -r package; do
    omitted+=(--no-emit-package "$package")
  done < <(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' locks/cpu.txt)
  lock "$@" --constraints locks/cpu.txt "${omitted[@]}"
}

case ${1:-} in
  --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' locks/make.sh && exit ;;
  --upgrade) options+=(--upgrade) ;;
  "") ;;
  *) echo "locks/make.sh: unknown option $1. See locks/make.sh --help." >&2 && exit 2 ;;
esac
if ! command -v uv >/dev/null; then
  echo "locks/make.sh: uv is not on the PATH. Use ./run.sh locks/make.sh." >&2
  exit 2
fi
lock cpu requirements.txt - <<<'jax>=0.11; python_version >= "3.12"'
for extra in tpu cuda12 cuda13; do
  lock_addition "$extra" - <<<"jax[$extra]"
done
lock_addition dev requirements-dev.txt
lock uv - <<<"uv"
