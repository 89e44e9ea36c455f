# Sourced at the end of a file of presets. `$(source FILE && PRESET)` with an unknown preset then prints --error and a
# message instead of arguments, and the script or program that gets them fails with that message. Without this it would
# get no arguments, and start with its defaults.
# shellcheck shell=bash

presets_file=${BASH_SOURCE[1]}

# bash calls this function for an unknown command.
command_not_found_handle() {
  local presets in_bfloat16=${1%_fp16}_amp
  if ((BASH_SUBSHELL == 0)); then # the file was sourced in an interactive shell
    echo "bash: $1: command not found" >&2
    return 127
  fi
  presets=$(sed -nE 's/^([a-z][a-z0-9_-]*)\(\).*/\1/p' "$presets_file" | paste -sd ' ')
  if [[ " $presets " == *" $in_bfloat16 "* ]]; then
    echo --error "there is no preset '$1': use $in_bfloat16, which computes in bfloat16 (in float16: its words with" \
      "fp16 instead of amp)"
  else
    echo --error "there is no preset '$1' in $presets_file: choose one of $presets"
  fi
}
