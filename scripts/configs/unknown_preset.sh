# Sourced at the end of a file of presets, so that `$(source FILE && PRESET)` with a preset that is not there answers
# with words that stop the script it is meant for. An empty answer would have it start with its defaults.
# shellcheck shell=bash

presets_file=${BASH_SOURCE[1]}

# bash calls this where it finds no command of that name.
command_not_found_handle() {
  if ((BASH_SUBSHELL == 0)); then # somebody sourced the file in a shell of their own
    echo "bash: $1: command not found" >&2
    return 127
  fi
  echo --unknown-preset "$1" "$presets_file"
  sed -nE 's/^([a-z][a-z0-9_-]*)\(\).*/\1/p' "$presets_file"
}
