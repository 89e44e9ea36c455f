# What run_pretraining.sh and run_squad.sh share: the table of positional arguments, the checks, and the launch on
# CPU, on one GPU, on many and on many nodes. Sourced by them.
# shellcheck shell=bash

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# ---- positional arguments ---------------------------------------------------------------------------------------
# Each script declares ARGUMENTS, one row an argument: `name | default | kind | help`. A kind is count (1, 2, ...),
# whole (0, 1, ...), integer, number, fraction (0 to 1), text, or the allowed words with commas between them. The
# default `required` means what it says.

# Cuts a row into the variables name, default, kind and help.
read_row() {
  IFS='|' read -r name default kind help <<<"$1"
  read -r name <<<"$name"
  read -r default <<<"$default"
  read -r kind <<<"$kind"
  read -r help <<<"$help"
}

print_arguments() {
  local row name default kind help
  local -i position=0
  for row in "${ARGUMENTS[@]}"; do
    read_row "$row"
    position+=1
    printf '  %2d %-36s %s [%s]\n' "$position" "$name" "$help" "$default"
  done
}

# Sets one global variable an argument, named as in the table; a missing or empty argument takes its default.
parse_arguments() {
  local row name default kind help value
  local -i position=0
  if [[ ${1:-} == --unknown-preset ]]; then # what the files in configs/ answer to a name that they do not know
    fail "there is no preset '$2' in $3: choose one of ${*:4}"
  fi
  for row in "${ARGUMENTS[@]}"; do
    read_row "$row"
    position+=1
    value=${!position:-$default}
    case $value in
      required) fail "argument $position ($name) is missing: $help (see --help)" ;;
      --*) fail "argument $position ($name) is '$value', but arguments go by position here (see --help)" ;;
    esac
    is_a "$kind" "$value" || fail "argument $position ($name) is '$value', not $(in_words "$kind") (see --help)"
    declare -g "$name=$value"
  done
  (($# <= position)) || fail "$# arguments given, and only $position are known (see --help)"
}

is_a() { # kind value
  case $1 in
    count) [[ $2 =~ ^[1-9][0-9]*$ ]] ;;
    whole) [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] ;;
    integer) [[ $2 =~ ^(0|-?[1-9][0-9]*)$ ]] ;;
    number) [[ $2 =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] ;;
    fraction) [[ $2 =~ ^(0?\.[0-9]+|0|1(\.0*)?|[0-9.]+[eE]-[0-9]+)$ ]] ;;
    text) true ;;
    *) [[ ,$1, == *,"$2",* ]] ;;
  esac
}

in_words() { # kind
  case $1 in
    count) echo 'a whole number from 1 up' ;;
    whole) echo 'a whole number from 0 up' ;;
    integer) echo 'a whole number' ;;
    number) echo 'a number from 0 up' ;;
    fraction) echo 'a number from 0 to 1' ;;
    *) echo "one of ${1//,/, }" ;;
  esac
}

# ---- checks -----------------------------------------------------------------------------------------------------

require_folder() { # argument path
  [[ -d $2 ]] || fail "$1: the folder $2 does not exist: check the path, or see the README on making it"
}

require_file() { # argument path
  [[ -f $2 ]] || fail "$1: the file $2 does not exist: check the path"
}

require_gpus() { # how_many
  local found
  (($1 > 0)) || return 0
  found=$(python3 -c 'import torch; print(torch.cuda.device_count())') ||
    fail 'python3 cannot import torch: see above'
  (($1 <= found)) || fail "num_gpus is $1, and this machine has $found: ask for at most that, or for 0 to use the CPU"
}

# ---- launch -----------------------------------------------------------------------------------------------------

precision_flags() { # amp|fp32|tf32
  case $1 in
    amp) echo --amp --amp-dtype bfloat16 ;;
    fp32) ;;
    tf32) echo --tf32 ;;
  esac
}

# How many nodes there are, which one this is, and where the first one listens: from NNODES, NODE_RANK, MASTER_ADDR
# and MASTER_PORT, or from Slurm where srun starts the script once a node. (A batch script outside srun has
# SLURM_NNODES too, but runs on the first node alone; hence SLURM_STEP_NUM_NODES.)
find_nodes() {
  nodes=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
  node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
  master_addr=${MASTER_ADDR:-}
  is_a count "$nodes" || fail "NNODES is '$nodes', not $(in_words count)"
  is_a whole "$node_rank" || fail "NODE_RANK is '$node_rank', not $(in_words whole)"
  ((node_rank < nodes)) || fail "NODE_RANK is $node_rank of $nodes nodes: they count from 0"
  ((nodes > 1)) || return 0
  if [[ -z $master_addr && -n ${SLURM_STEP_NODELIST:-} ]]; then
    master_addr=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
  fi
  [[ -n $master_addr ]] || fail "NNODES is $nodes, and MASTER_ADDR is not set: give the first node's address"
}

# launch PROCESSES PROGRAM ARGUMENT...: runs the program, under torchrun where there are several processes, and waits.
# SIGTERM and SIGINT are passed on as SIGTERM, at which the program saves a checkpoint and ends; the script then ends
# with 128 + the signal's number. A second signal ends everything at once. The variable log_file, if not empty, names
# a file that gets a copy of the output.
launch() {
  local -a command=(python3)
  local code=0
  # shellcheck source=cpu_settings.sh
  source "$(dirname "${BASH_SOURCE[0]}")/cpu_settings.sh"
  with_torchrun=false
  received=''
  if (($1 * nodes > 1)); then
    # torchrun itself has to sleep through the signal: it would kill its workers 30 s later, whatever they are
    # writing.
    with_torchrun=true
    command+=(-m torch.distributed.run --nproc_per_node "$1" --signals_to_handle SIGHUP)
    if ((nodes > 1)); then
      command+=(--nnodes "$nodes" --node_rank "$node_rank")
      command+=(--master_addr "$master_addr" --master_port "${MASTER_PORT:-29500}")
    else
      command+=(--standalone)
    fi
  fi
  trap 'pass_on 15' TERM
  trap 'pass_on 2' INT
  (
    if $with_torchrun; then trap '' TERM INT; fi
    if [[ -n $log_file ]]; then exec > >(trap '' TERM INT && exec tee -a "$log_file") 2>&1; fi
    exec "${command[@]}" "${@:2}"
  ) &
  child=$!
  wait "$child" || code=$?
  while [[ -n $received ]] && kill -0 "$child" 2>/dev/null; do # the signal ended the wait, not the child
    wait "$child" || code=$?
  done
  trap - TERM INT
  if [[ -n $received ]]; then exit $((128 + received)); fi
  if ((code != 0)); then exit "$code"; fi
}

pass_on() { # signal_number
  local -a targets=("$child")
  if $with_torchrun; then
    read -r -a targets < <(cat "/proc/$child"/task/*/children 2>/dev/null | tr '\n' ' ') || true
  fi
  if [[ -z $received ]]; then
    received=$1
    echo 'stopping after this step, with a checkpoint; a second signal stops at once' >&2
    kill -TERM "${targets[@]}" 2>/dev/null || true
  else
    kill -KILL "${targets[@]}" "$child" 2>/dev/null || true
  fi
}
