#!/usr/bin/env bash
# Run a command as a job of Slurm, one process on each node, and put the job back into the queue when
# starting again can help. It is given to sbatch, in the folder of the tree, which the nodes share:
#
#   sbatch slurm.sh python main.py --config configs/moe_1b.toml
#   sbatch --nodes 4 --gpus-per-node 8 --time 12:00:00 slurm.sh python main.py ..
#   ./slurm.sh --help              print this
#
# Partition, account, time and GPUs are the cluster's, and given to sbatch; options given to it come
# before the #SBATCH lines below. What all processes say is in slurm-JOB.log, in each line the number
# of the process.
#
#   scancel --batch --signal=TERM JOB   stop: all save, and end, however long that takes
#   scancel --signal=TERM JOB           the same, and back into the queue
#   scancel JOB                         stop; what is not saved within the cluster's KillWait is lost
#
# Before the time limit Slurm sends SIGTERM to the processes, as in the second line. The job goes back
# into the queue with the exit codes 75 143 134 137 139 (see README), and from there on with its newest
# checkpoint. Read from the environment:
#   AGAIN   how many times it may go back; 20
#
# Exit code: that of the command, the highest of all processes; 2 on bad input.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# To the processes, and not with B: to this script alone: srun kills them when it is itself told to end.
#SBATCH --signal=TERM@300

set -euo pipefail
stopped="" again=${AGAIN:-20}

say() {
  echo "slurm.sh: $*" >&2
}

fail() {
  say "$@"
  exit 2
}

# Where the job is being cancelled, Slurm has already signalled the processes, and refuses this.
stop() {
  stopped=1
  scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

run() {
  local child
  # srun does not take this from the job by itself.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
  # A process that fails leaves the others the time to report what they lost.
  srun --kill-on-bad-exit=0 --label ./run.sh "$@" &
  child=$!
  {
    wait "$child" || true # which a signal interrupts
    while kill -0 "$child"; do sleep 0.2; done
    wait "$child"
  } 2>/dev/null
}

go_back() {
  local times=${SLURM_RESTART_COUNT:-0}
  ((times < again)) || {
    say "ended with $1, and does not go back into the queue: it did so $times times (AGAIN)"
    return
  }
  say "ended with $1, and goes back into the queue ($((times + 1)) of $again)"
  scontrol requeue "$SLURM_JOB_ID"
}

main() {
  local code=143
  case ${1:-} in
    --help | -h) sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && return ;;
    "") fail "what is to be run? As in sbatch slurm.sh python main.py" ;;
    -*) fail "there is no option $1: ./slurm.sh --help, and sbatch --help for those of the job" ;;
  esac
  [[ ${SLURM_JOB_ID:-} ]] || fail "this is no job of Slurm: sbatch slurm.sh $*"
  [[ -x run.sh ]] || fail "$PWD has no run.sh: give --chdir with the folder of the tree to sbatch"
  [[ $again =~ ^[0-9]+$ ]] || fail "AGAIN=$again is not a number"
  trap stop TERM
  ./run.sh true # sets up .venv once, before all processes look for it
  [[ $stopped ]] || {
    code=0
    run "$@" || code=$?
  }
  [[ $stopped || " 75 143 134 137 139 " != *" $code "* ]] || go_back "$code"
  return "$code"
}

main "$@"
