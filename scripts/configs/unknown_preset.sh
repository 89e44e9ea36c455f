# Sourced at the end of a file of presets. `$(source FILE && PRESET)` with an unknown preset then prints words that make
# the launch script fail; without this it would print nothing, and the script would start with its defaults.
# shellcheck shell=bash

presets_file=${BASH_SOURCE[1]}

# bash calls this function for an unknown command.
command_not_found_handle() {
  if ((BASH_SUBSHELL == 0)); then # the file was sourced in an interactive shell
    echo "bash: $1: command not found" >&2
    return 127
  fi
  echo --unknown-preset "$1" "$presets_file"
  sed -nE 's/^([a-z][a-z0-9_-]*)\(\).*/\1/p' "$presets_file"
}
