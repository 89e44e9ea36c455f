#!/usr/bin/env bash
# usage: bash data/create_datasets_from_start.sh [DATASET] [PATH ...] [OPTION ...]
# Runs data/prepare.py all, with the data set wiki_only if none is given: downloads, formats, shards, makes HDF5 shards.
# --help shows the data sets and options. If interrupted, rerun it to resume.
#
# Environment: BERT_PREP_WORKING_DIR, the output folder unless --output-dir is given [data/ of the checkout];
#   PYTHON, the interpreter [python3]
set -euo pipefail

case ${1:-} in '' | -*) set -- wiki_only "$@" ;; esac
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/prepare.py" all "$@"
