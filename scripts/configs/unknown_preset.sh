# Sourced at the end of a file of presets. `$(source FILE && PRESET)` with an unknown preset then prints --error and a
# message instead of arguments, and the script or program that gets them fails with that message. Without this it would
# get no arguments, and start with its defaults.
# shellcheck shell=bash

presets_file=${BASH_SOURCE[1]}

# bash calls this function for an unknown command.
command_not_found_handle() {
  local presets name=$1 task=
  if [[ $presets_file == *glue_config.sh && $name == *_*gpu_* ]]; then # NVIDIA's mrpc_dgxa100-80g_8gpu_fp16
    case $name in mrpc_* | sst-2_*) task=${name%%_*} name=${name#*_} ;; esac
  fi
  local in_bfloat16=${name%_fp16}_amp
  if ((BASH_SUBSHELL == 0)); then # the file was sourced in an interactive shell
    echo "bash: $1: command not found" >&2
    return 127
  fi
  presets=$(sed -nE 's/^([a-z][a-z0-9_-]*)\(\).*/\1/p' "$presets_file" | paste -sd ' ')
  if [[ " $presets " == *" $in_bfloat16 "* ]]; then
    echo --error "there is no preset '$1': use $in_bfloat16${task:+ $task}, which computes in bfloat16 (in float16: its words with" \
      "fp16 instead of amp)"
  elif [[ " $presets " == *" $name "* ]]; then
    echo --error "there is no preset '$1': use $name $task"
  else
    echo --error "there is no preset '$1' in $presets_file: choose one of $presets"
  fi
}
