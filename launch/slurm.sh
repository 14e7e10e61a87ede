#!/usr/bin/env bash
# Run a command as a Slurm job with one process per node, and requeue the job when a restart can
# help. Submit it in the folder of the tree, which all nodes share:
#
#   sbatch launch/slurm.sh python main.py --config configs/moe_1b.toml
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh python main.py ..
#   ./launch/slurm.sh --help              print this
#
# Give partition, account, time and GPUs to sbatch; its options override the #SBATCH lines below.
# slurm-JOB.log has the output of all processes, with the number of the process on each line.
#
#   scancel --batch --signal=TERM JOB   stop: all processes save and end, without a time limit
#   scancel --signal=TERM JOB           the same, then requeue
#   scancel JOB                         stop; a save that takes longer than KillWait is lost
#
# Before the time limit Slurm sends SIGTERM to the processes, as in the second line. After the exit
# codes 75 143 134 137 139 (see docs/usage.md) the job is requeued and resumes from its newest
# checkpoint.
#
# Environment variable:
#   AGAIN   how many times the job may be requeued; default 20
#
# Exit code: the highest exit code of all processes; 2 on bad input.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Without B: the processes receive the signal and this script does not. srun kills them when it
# receives a signal itself.
#SBATCH --signal=TERM@300

set -euo pipefail
stopped="" again=${AGAIN:-20}

log() {
  echo "slurm.sh: $*" >&2
}

fail() {
  log "$@"
  exit 2
}

# Slurm refuses this while it cancels the job; then it has already signalled the processes.
stop() {
  stopped=1
  scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

run() {
  local child
  # srun does not inherit --cpus-per-task from the job.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  # If one process fails, the others have time to log what they lost.
  srun --kill-on-bad-exit=0 --label ./run.sh "$@" &
  child=$!
  {
    wait "$child" || true # a signal interrupts it
    while kill -0 "$child"; do sleep 0.2; done
    wait "$child"
  } 2>/dev/null
}

requeue() {
  local times=${SLURM_RESTART_COUNT:-0}
  ((times < again)) || {
    log "ended with $1, not requeued: AGAIN=$again allows no further requeue"
    return
  }
  log "ended with $1, requeued ($((times + 1)) of $again)"
  scontrol requeue "$SLURM_JOB_ID"
}

main() {
  local code=143
  case ${1:-} in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && return ;;
    "") fail "no command. Give one, as in sbatch launch/slurm.sh python main.py." ;;
    -*) fail "unknown option $1. See ./launch/slurm.sh --help, and sbatch --help for a job." ;;
  esac
  [[ ${SLURM_JOB_ID:-} ]] || fail "this is not a Slurm job. Use sbatch launch/slurm.sh $*"
  [[ -x run.sh ]] || fail "$PWD has no run.sh. Give sbatch --chdir with the folder of the tree."
  [[ $again =~ ^[0-9]+$ ]] || fail "AGAIN=$again is not a number."
  # The name under which the job holds the lock of its run; a requeued job keeps it.
  export RUN_OWNER=${RUN_OWNER:-${SLURM_CLUSTER_NAME:-slurm}:$SLURM_JOB_ID}
  trap stop TERM
  ./run.sh true # sets up .venv once, before all processes need it
  [[ $stopped ]] || {
    code=0
    run "$@" || code=$?
  }
  [[ $stopped || " 75 143 134 137 139 " != *" $code "* ]] || requeue "$code"
  return "$code"
}

main "$@"
