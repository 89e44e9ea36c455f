# Shared by the launch scripts, which source it: positional arguments, checks, precision, models, and the launch on one
# or more nodes.
# shellcheck shell=bash

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# A path that begins with a dash gets ./ before it: commands would take it for a flag, and `find` for an expression, as it
# would `(` and `!`.
as_path() { # path
  case $1 in [-\(\)!,]*) printf './%s\n' "$1" ;; *) printf '%s\n' "$1" ;; esac
}

for name in BERT_PREP_WORKING_DIR RESULTS_DIR VOCAB_FILE EVAL_DIR_PHASE1 EVAL_DIR_PHASE2 TASK_FILE; do
  [[ ${!name:-} != -* ]] || printf -v "$name" %s "$(as_path "${!name}")"
done

# Prints a line. Standard output may be closed or full: the run goes on.
say() {
  (trap '' PIPE && echo "$*") 2>/dev/null || true
}

# ---- positional arguments ---------------------------------------------------------------------------------------
# Each script declares ARGUMENTS, one row per argument: `name | default | kind | help`. The default `required` means
# that there is none. A kind is one of those in `describe_kind`, or the allowed words with commas between them.

# Splits a row into the variables name, default, kind and help.
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

# Sets one global variable per argument, named as in the table. A missing or empty argument, or None, takes its default,
# and its name is added to `omitted`.
parse_arguments() {
  local row name default kind help value
  local -i position=0
  omitted=' '
  [[ ${1:-} != --error ]] || fail "${*:2}" # of configs/unknown_preset.sh
  if (($# > ${#ARGUMENTS[@]})); then
    fail "$# arguments given, but this script takes at most ${#ARGUMENTS[@]}: ${TOO_MANY_ARGUMENTS_HINT:-see --help}"
  fi
  for row in "${ARGUMENTS[@]}"; do
    read_row "$row"
    position+=1
    value=${!position:-None}
    [[ $value != None ]] || { value=$default && omitted+="$name "; }
    case $kind:$value in
      *:required) fail "argument $position ($name) is missing: $help (see --help)" ;;
      text:-* | *:-[!0-9]*)
        fail "argument $position ($name) is '$value', but arguments are positional: see --help; a path that begins with" \
          "a dash is ./$value"
        ;;
    esac
    is_valid "$kind" "$value" || fail "argument $position ($name) is '$value': expected $(describe_kind "$kind")"
    declare -g "$name=$value"
  done
}

# Ends a script whose arguments have the order of another recipe: the error is the command to type here.
fail_with_command() { # why argument...
  local why=$1
  shift
  local -a words=("$@")
  while ((${#words[@]})) && [[ -z ${words[-1]} ]]; do unset 'words[-1]'; done
  fail "$why. Here this is: bash $0$(printf ' %q' "${words[@]}")"
}

# The file here for one of the configs of NVIDIA's PyTorch recipe, as bert_configs/large.json.
config_here() { # path
  case $1 in
    *large.json) echo bert_configs/bert-large-uncased.json ;;
    *base.json) echo bert_configs/bert-base-uncased.json ;;
    *) as_path "$1" ;;
  esac
}

# The path, if it exists and is no folder of LDDL's Parquet shards, which are not read here.
existing() { # path
  [[ ! -e $1 || -n $(find "$(as_path "$1")" -maxdepth 1 -name '*.parquet*' -print -quit) ]] || as_path "$1"
}

is_valid() { # kind value
  case $1 in
    positive_int) [[ $2 =~ ^[1-9][0-9]*$ ]] ;;
    non_negative_int) [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] ;;
    gpus) [[ $2 =~ ^(all|0|[1-9][0-9]*)$ ]] ;;
    int) [[ $2 =~ ^(0|-?[1-9][0-9]*)$ ]] ;;
    non_negative_float) [[ $2 =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] ;;
    fraction) [[ $2 =~ ^(0?\.[0-9]+|0|1(\.0*)?|[0-9.]+[eE]-[0-9]+)$ ]] ;;
    file_name) [[ $2 =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$ ]] ;;
    text) true ;;
    *) [[ $2 != *,* && ,$1, == *,"$2",* ]] ;; # one of the words, not several
  esac
}

print_launch_variables() { # of the environment, at the end of a help
  cat <<'HELP'
  DOCTOR                1: examine the run with doctor.py instead of starting it [unset]
  NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
                        several nodes, with the script started once on each; Slurm's srun sets them itself
  NNODES=MIN:MAX, RDZV_ENDPOINT
                        nodes that come and go, see docs/multi_node.md; the global batch is that of MAX nodes
HELP
}

describe_kind() { # kind
  case $1 in
    positive_int) echo 'a whole number, at least 1' ;;
    non_negative_int) echo 'a whole number, at least 0' ;;
    gpus) echo 'a whole number, at least 0, or all' ;;
    int) echo 'a whole number' ;;
    non_negative_float) echo 'a number, at least 0' ;;
    fraction) echo 'a number from 0 to 1' ;;
    file_name) echo 'a plain name of letters, digits, ".", "_" and "-", without a folder' ;;
    *) echo "one of ${1//,/, }" ;;
  esac
}

# Sets extra_words to the words of EXTRA_ARGS. Quotes group words as in a shell; nothing is expanded or executed.
# shellcheck disable=SC2034 # for the scripts
read_extra_args() { # [name_of_the_variable]
  local name=${1:-EXTRA_ARGS}
  xargs -r printf '%s' <<<"${!name:-}" >/dev/null 2>&1 ||
    fail "$name is '${!name:-}', with a quote that is not closed: close it"
  mapfile -d '' -t extra_words < <(xargs -r printf '%s\0' <<<"${!name:-}")
}

# Whether EXTRA_ARGS has a word, such as one that asks for an estimate of the memory instead of a run.
has_word() { # pattern
  local word
  for word in "${extra_words[@]}"; do
    # shellcheck disable=SC2053 # a pattern
    if [[ $word == $1 ]]; then return; fi
  done
  return 1
}

# ---- checks -----------------------------------------------------------------------------------------------------

require_folder() { # argument path [how_to_make_it]
  [[ ! -f $2 ]] || fail "$1: $2 is a file, not a folder (convert_checkpoint.py makes folders of other projects' checkpoints)"
  [[ -d $2 ]] || fail "$1: the folder $2 does not exist: check the path${3:+, or $3}"
}

require_file() { # argument path
  [[ -f $2 ]] || fail "$1: the file $2 does not exist: check the path"
}

# python3 with this checkout's modules before those of PYTHONPATH, and none of the folder where the script is started.
checkout_python() { # argument...
  local root
  root=$(dirname "${BASH_SOURCE[0]}")/..
  PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} python3 -P "$@"
}

ask_torch() { # statements
  # A Ctrl-C, or the end of this script, ends Python without a traceback.
  checkout_python -c "from signal import SIG_DFL, SIGINT, SIGPIPE, signal
signal(SIGINT, SIG_DFL), signal(SIGPIPE, SIG_DFL)
import torch
$1" ||
    fail 'python3 cannot import torch: run bash scripts/setup_environment.sh'
}

count_gpus() {
  ask_torch 'print(torch.cuda.device_count())'
}

# 16 bits where they are faster on this machine's CPU.
cpu_precision() {
  ask_torch 'from bert_recipe.optimization.precision import has_bfloat16
print("amp" if has_bfloat16(torch.device("cpu")) else "fp32")'
}

# find_gpus NAME DEFAULT [MOST]: checks the argument NAME, a number of GPUs, and sets `processes` of this node. `all`, the
# default, becomes the GPUs of this machine, at most MOST, or 0, its CPU. The global batch is then that of DEFAULT processes
# a node, `batch_processes`. On a CPU an omitted precision becomes one that suits it.
# shellcheck disable=SC2034
find_gpus() {
  local -n number=$1
  local asked=$number here where
  if [[ $asked == 0 ]]; then
    here=0
  else
    here=$(count_gpus)
  fi
  [[ $asked != all ]] || number=$((here < ${3:-here} ? here : ${3:-here}))
  ((number <= here)) || fail "$1 is $number, but this machine has $here: give at most that; 0 runs on the CPU"
  processes=$((number > 0 ? number : 1))
  batch_processes=$processes
  ((number > 0)) || [[ ${omitted:-} != *' precision '* ]] || precision=$(cpu_precision)
  [[ $asked == all ]] || return 0
  batch_processes=$2
  where='the CPU, as this machine has no GPU'
  ((number == 0)) || where="$number of the $here GPUs of this machine"
  (($2 == 1)) || where+=", with the global batch of $2 GPUs"
  say "$1 was not given: $where; precision ${precision:-fp32}"
}

# Sets batch_flags, which divide an update over the processes. The batch is fixed where their number may be another.
set_batch_flags() { # batch_size accumulation_steps
  batch_flags=(--gradient-merge-steps "$2")
  if [[ -n $min_nodes ]] || ((batch_processes != processes)); then
    batch_flags=(--global-batch-size $(($1 * $2 * batch_processes * nodes)))
  fi
}

# ---- data, precision and models ---------------------------------------------------------------------------------

# shellcheck disable=SC2034 # for the scripts
results_dir=${RESULTS_DIR:-results}
data_dir=${BERT_PREP_WORKING_DIR:-$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)/data}

# The folder of HDF5 shards of one sequence length: that of data/prepare.py, or else that of NVIDIA's bertPrep.py.
find_shards() { # sequence_length predictions [folder_of_the_data]
  local folder=${3:-$data_dir}
  local ours=$folder/hdf5/seq_$1_pred_$2/training
  local nvidia=$folder/hdf5_lower_case_1_seq_len_$1_max_pred_$2_masked_lm_prob_0.15_random_seed_12345_dupe_factor_5
  if [[ ! -d $ours && -d $nvidia/wikicorpus_en ]]; then
    echo "$nvidia/wikicorpus_en"
  else
    echo "$ours"
  fi
}

# shellcheck disable=SC2034 # for the scripts
PRECISIONS=amp,fp16,bf16,fp32,tf32

# The flags of a precision, one per line.
precision_flags() { # precision initial_loss_scale
  case $1 in
    amp) printf '%s\n' --amp ;;
    bf16) printf '%s\n' --amp --amp-dtype bfloat16 ;;
    fp16) printf '%s\n' --amp --amp-dtype float16 --use-dynamic-loss-scaling "--scale-loss=$2" ;;
    tf32) printf '%s\n' --tf32 ;;
  esac
}

# The model's name, as the programs make it: that of its folder for results.
model_name() { # --config-file FILE or --init-checkpoint FOLDER
  python3 -P "$(dirname "${BASH_SOURCE[0]}")/model_name.py" "$@"
}

# ---- phases of pre-training -------------------------------------------------------------------------------------

EARLY_STOPPING='--early[-_]stopping*' # in EXTRA_ARGS

newest_step() { # folder_of_steps [2, to look in the folders of its seeds, too]
  [[ ! -d $1 ]] || find "$1" -maxdepth "${2:-1}" -regex '.*/[0-9]+' -printf '%f\n' | sort -n | tail -n 1
}

is_exhausted() { # checkpoint: whether early stopping has ended its run
  checkout_python -c '
import sys
from pathlib import Path
from bert_recipe.checkpoint.folder import PROGRESS_SUFFIX
from bert_recipe.checkpoint.progress import read_progress
for path in Path(sys.argv[1]).glob("*" + PROGRESS_SUFFIX):
    sys.exit(not read_progress(path.parent, path.name.removesuffix(PROGRESS_SUFFIX)).is_finished)
sys.exit(1)
' "$1"
}

# needs_phase1 ARGUMENT STEPS: whether phase 1 is to be run before phase 2. If phase 2 has checkpoints, it goes on from
# these: phase 1 may be gone, and more of its updates would be lost.
# shellcheck disable=SC2154
needs_phase1() {
  local newest phases=$RESULTS_DIR/$BERT_MODEL
  ! has_word "$EARLY_STOPPING" ||
    fail 'EXTRA_ARGS: --early-stopping may end phase 1 before its last update, from which phase 2 starts: leave it out, or' \
      'train each phase by itself (PHASE=1 and PHASE=2 of run_pretraining.sh)'
  [[ $enable_benchmark == false && $only_estimates == false && -z ${DOCTOR:-} ]] || return 0
  [[ -n $(newest_step "$phases/phase2" 2) ]] || return 0
  newest=$(newest_step "$phases/phase1" 2)
  if [[ -z $newest ]]; then
    say "phase1 has no checkpoints, and phase2 has: going on with phase2"
    return 1
  fi
  if (($2 < newest)) && [[ -d $phases/phase1/$2 ]]; then # phase 1 was made longer by itself
    say "phase1 has gone on to step $newest, and phase2 has begun: going on with phase2 from step $2 of phase1"
    return 1
  fi
  (($2 <= newest)) ||
    fail "$1 is $2, but phase 2 has begun from step $newest of phase 1: give $newest to go on with phase 2, or set" \
      "RESULTS_DIR to another folder, or move $phases/phase2 away to begin phase 2 again"
}

# run_phase PHASE MAX_STEPS BATCH_SIZE ACCUMULATION_STEPS FLAG...: trains one phase to its last step, or to $part_end if
# that is set, or exits. The script sets the variables that are read here.
# shellcheck disable=SC2154
run_phase() {
  local phase=$1 max_steps=$2 newest folder
  local steps_folder=$RESULTS_DIR/$BERT_MODEL/$phase
  local global_batch_size=$(($3 * $4 * batch_processes * nodes))
  local -a batch_flags
  set_batch_flags "$3" "$4"
  log_file=''
  if [[ $create_logfile == true && -z ${DOCTOR:-} ]]; then
    mkdir -p "$RESULTS_DIR"
    # The name is that of NVIDIA's recipe, so that log parsers find it. Each further node has a file of its own.
    log_file=$RESULTS_DIR/$job_name.paddle_bert_pretraining_${phase}_${precision}_gbs$global_batch_size
    log_file+=.$(date +%y%m%d%H%M%S)$( ((node_rank == 0)) || echo ".node$node_rank").log
    say "log file: $log_file"
  fi
  [[ -z ${DOCTOR:-} ]] || say "$phase:"
  launch "$processes" "$code_dir/run_pretraining.py" "--$phase" --max-steps "$max_steps" \
    --batch-size "$3" "${batch_flags[@]}" "${@:5}" \
    --from-checkpoint "$steps_folder" --last-step-of-checkpoint auto \
    --report-file "$RESULTS_DIR/dllogger_p${phase#phase}.json" --log-file "${log_file:-None}" "${shared_flags[@]}"
  [[ $enable_benchmark == false && $only_estimates == false && -z ${DOCTOR:-} ]] || return 0
  for folder in "$steps_folder"/seed-* "$steps_folder"; do # with --num-seeds, each seed has a folder
    [[ -d $folder && ! -d $folder/${part_end:-$max_steps} ]] || continue
    [[ $folder != "$steps_folder" || -z $(compgen -G "$steps_folder/seed-*") ]] || continue
    newest=$(newest_step "$folder")
    ! has_word "$EARLY_STOPPING" || ! is_exhausted "$folder/$newest" || continue
    say "$phase stopped at step ${newest:-0} of $max_steps: rerun the same command to resume"
    exit
  done
}

# phase_of_bert_large PHASE SEQUENCE_LENGTH PREDICTIONS ACCUMULATION_STEPS FLAG...: one phase on NUM_GPUS GPUs, by default
# those of this machine with the global batch of eight, for run_pretraining_p1.sh and run_pretraining_p2.sh.
phase_of_bert_large() {
  local results=${RESULTS_DIR:-results} num_gpus=${NUM_GPUS:-all} precision=amp
  local -a precision_words
  omitted=' precision '
  is_valid gpus "$num_gpus" || fail "NUM_GPUS is '$num_gpus': expected $(describe_kind gpus)"
  # shellcheck source=setup_environment.sh
  source scripts/setup_environment.sh use
  nodes=1 min_nodes='' node_rank=0 log_file=''
  find_gpus num_gpus 8
  (($4 * batch_processes % processes == 0)) ||
    fail "the $processes GPUs do not divide the $(($4 * batch_processes)) micro-batches of an update: give NUM_GPUS"
  mapfile -t precision_words < <(precision_flags "$precision" 1)
  launch "$processes" run_pretraining.py \
    --device "$( ((num_gpus > 0)) && echo cuda || echo cpu)" \
    "--phase$1" \
    --input-dir "$(find_shards "$2" "$3" "${BERT_PREP_WORKING_DIR:-data}")" \
    --max-seq-length "$2" \
    --max-predictions-per-seq "$3" \
    --output-dir "$results" \
    --bert-model bert-large-uncased \
    --vocab-file vocab/bert-large-uncased-vocab.txt \
    --optimizer Lamb \
    "${precision_words[@]}" \
    --gradient-merge-steps $(($4 * batch_processes / processes)) \
    --seed 12439 \
    --num-steps-per-checkpoint 200 \
    --log-freq 1 \
    --report-file "$results/dllogger_p$1.json" \
    --from-checkpoint "$results/bert-large-uncased/phase$1" \
    --last-step-of-checkpoint auto \
    "${@:5}"
}

# ---- launch -----------------------------------------------------------------------------------------------------

# Sets nodes, node_rank and master_addr: from NNODES, NODE_RANK and MASTER_ADDR, or from Slurm where srun starts the
# script once per node. (A batch script outside srun has SLURM_NNODES too, but runs on the first node only; therefore
# SLURM_STEP_NUM_NODES.) With NNODES=MIN:MAX, nodes that come and go, min_nodes is MIN, otherwise empty, and nodes is MAX,
# the number that the global batch is for.
find_nodes() {
  min_nodes=''
  nodes=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
  node_rank=${NODE_RANK:-${SLURM_NODEID:-0}}
  master_addr=${MASTER_ADDR:-}
  if [[ $nodes == *:* ]]; then
    min_nodes=${nodes%%:*} nodes=${nodes#*:}
    { is_valid positive_int "$min_nodes" && is_valid positive_int "$nodes" && ((min_nodes <= nodes)); } ||
      fail "NNODES is '$NNODES': expected a whole number, or the least and the greatest one, as 1:4"
    [[ ${RDZV_ENDPOINT:-} =~ ^[^:]+:[0-9]+$ ]] ||
      fail "NNODES is $NNODES and RDZV_ENDPOINT '${RDZV_ENDPOINT:-}': give HOST:PORT of the store (docs/multi_node.md)"
  fi
  is_valid positive_int "$nodes" || fail "NNODES is '$nodes': expected $(describe_kind positive_int)"
  is_valid non_negative_int "$node_rank" || fail "NODE_RANK is '$node_rank': expected $(describe_kind non_negative_int)"
  ((node_rank < nodes)) || fail "NODE_RANK is $node_rank with $nodes nodes: ranks are 0 to $((nodes - 1))"
  [[ -z $min_nodes ]] || return 0
  [[ -z ${RDZV_ENDPOINT:-} ]] || fail "RDZV_ENDPOINT is set, but NNODES is $nodes: give a range, as 1:4"
  ((nodes > 1)) || return 0
  if [[ -z $master_addr && -n ${SLURM_STEP_NODELIST:-} ]]; then
    read -r master_addr < <(scontrol show hostnames "$SLURM_STEP_NODELIST") || true
  fi
  [[ -n $master_addr ]] || fail "NNODES is $nodes, but MASTER_ADDR is not set: give the address of the first node"
}

# report_at_exit FOLDER: when this script ends, however it does, writes the page FOLDER/report.html of the logs in FOLDER,
# if there are any, and prints where it is, or in one line why there is none. The exit code stays the same.
report_at_exit() {
  report_folder=$1
  if ((node_rank == 0)) && [[ -z ${DOCTOR:-} ]]; then trap write_report EXIT; fi
}

write_report() {
  local message
  [[ -n $(find "$report_folder" -name 'dllogger_*.json' -size +0 -print -quit 2>/dev/null) ]] || return 0
  if message=$(python3 "$(dirname "${BASH_SOURCE[0]}")/../report.py" "$report_folder" \
    --output "$report_folder/report.html" 2>&1); then
    say "$message"
  else
    say "no report page: ${message#error: }"
  fi
}

# set_elastic_flags COMMAND...: sets elastic_flags, those of torchrun for nodes that come and go, and the environment for
# them. Nodes with the same command meet, whatever the name of their log file is.
set_elastic_flags() {
  local id settings=(
    is_host=false            # the store is a process of its own, which outlives all nodes
    read_timeout=10          # seconds to wait for the store
    join_timeout=600         # for min_nodes
    last_call_timeout=5      # and then for more
    keep_alive_interval=2    # a node that is silent three times is lost
    keep_alive_max_attempt=3
  )
  id=$(printf '%s\n' "$@" | grep -vxF -- "$log_file" | cksum)
  elastic_flags=(
    --nnodes "$min_nodes:$nodes" --max_restarts 100 --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT"
    --rdzv_id "${id/ /-}" --rdzv_conf "$(IFS=, && echo "${settings[*]}")"
  )
  # Otherwise a node that was the first one goes on to use its own store.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  # A network file system keeps the locks of a dead node for a while.
  export LOCK_SECONDS=${LOCK_SECONDS:-180}
}

# launch PROCESSES PROGRAM ARGUMENT...: runs the program and waits for it, under torchrun where there are several
# processes. SIGTERM, SIGUSR1, SIGHUP and SIGINT are passed on as SIGTERM, on which the program saves a checkpoint and
# ends; the script then exits with 128 + the signal's number. A second SIGINT kills the program. Other repeated signals
# change nothing, because batch systems send them more than once. If the variable log_file is not empty, the output is
# also appended to that file. With DOCTOR=1, doctor.py examines the run instead; if anything is wrong, the script goes on
# with the next phase, and exits with 2 at the end.
launch() {
  local -a command=(python3)
  local code=0
  is_valid positive_int "$1" || fail "the number of processes is '$1': expected $(describe_kind positive_int)"
  # shellcheck source=cpu_settings.sh
  source "$(dirname "${BASH_SOURCE[0]}")/cpu_settings.sh"
  if [[ -n ${DOCTOR:-} ]]; then
    python3 "$(dirname "${BASH_SOURCE[0]}")/../doctor.py" "${2##*/}" --processes $(($1 * nodes)) "${@:3}" || code=$?
    ((code == 0 || code == 2)) || exit "$code"
    ((code == 0)) || trap 'exit 2' EXIT
    return 0
  fi
  with_torchrun=false
  received=''
  child=''
  if (($1 * nodes > 1)) || [[ -n $min_nodes ]]; then
    with_torchrun=true
    command+=("$(dirname "${BASH_SOURCE[0]}")/torchrun.py" --nproc_per_node "$1")
    if [[ -n $min_nodes ]]; then
      set_elastic_flags "${@:2}"
      command+=("${elastic_flags[@]}")
    elif ((nodes > 1)); then
      command+=(--nnodes "$nodes" --node_rank "$node_rank")
      command+=(--master_addr "$master_addr" --master_port "${MASTER_PORT:-29500}")
    elif [[ -n ${MASTER_PORT:-} ]]; then
      command+=(--master_addr localhost --master_port "$MASTER_PORT")
    else
      command+=(--standalone)
    fi
  fi
  if [[ -n $log_file && ! -s $log_file ]]; then # --log-file appends to logs only, which it knows by their first line
    printf 'DLL %(%F %T)T - PARAMETER launch : %s\n' -1 "${2##*/}" 2>/dev/null >"$log_file" || true
  fi
  trap 'forward_signal 15' TERM
  trap 'forward_signal 10' USR1
  trap 'forward_signal 1' HUP
  trap 'forward_signal 2' INT
  (
    trap '' USR1
    if [[ -n $log_file ]]; then
      exec > >(trap '' TERM INT PIPE && exec tee --output-error=warn -a "$log_file" 2>/dev/null) 2>&1
    fi
    exec "${command[@]}" "${@:2}"
  ) &
  child=$!
  [[ -z $received ]] || kill_quietly "$child" # the signal came before it could be passed on
  wait "$child" || code=$?
  while [[ -n $received ]] && kill -0 "$child" 2>/dev/null; do # the signal ended the wait, not the child
    wait "$child" || code=$?
  done
  trap - TERM USR1 HUP INT
  if [[ -n $received ]]; then exit $((128 + received)); fi
  # 141: the program's work is complete, and not all of its output could be printed.
  if ((code != 0 && code != 141)); then exit "$code"; fi
}

kill_quietly() { # pid...: bash would print the whole command of a killed child in a later `wait`
  {
    kill -KILL "$@" || true
    wait "$child" || true
  } 2>/dev/null
}

forward_signal() { # signal_number
  if [[ -z $received ]]; then
    received=$1
    kill -TERM "$child" 2>/dev/null || true
    if ! $with_torchrun; then # which says itself what is stopped
      echo 'stopping after this step, with a checkpoint; a second Ctrl-C stops at once, without one' >&2 || true
    fi
  elif (($1 == 2)) && $with_torchrun; then
    kill -INT "$child" 2>/dev/null || true
  elif (($1 == 2)); then
    kill_quietly "$child"
  fi
}

[[ -z ${DOCTOR:-} || $DOCTOR == 1 ]] || fail "DOCTOR is '$DOCTOR': set it to 1 to examine a run without starting it, or unset it"
