#!/usr/bin/env bash
# Downloads a data set, formats and shards it, and makes HDF5 shards, with the defaults of data/prepare.py. If interrupted,
# rerun it to resume.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash data/create_datasets_from_start.sh [DATASET] [PATH ...] [OPTION ...]

DATASET
  wiki_only      English Wikipedia (--language for another one) and SQuAD   [default]
  wiki_books     Wikipedia, SQuAD, and books: --books FOLDER, or --books FILE with one address per line
  books          books in .txt under PATH, or from the addresses in --books FILE
  squad          SQuAD v1.1 and v2.0
  glue           the tasks of GLUE and SuperGLUE: all, or --tasks TASK ...
  corpus PATH    any .txt, .jsonl, .csv, .parquet files, also compressed; folders of them; addresses

Any OPTION of `python3 data/prepare.py all --help` may follow, --dry-run and --output-dir among them.

Environment:
  BERT_PREP_WORKING_DIR   output folder, unless --output-dir is given [data/ of the checkout]
  PYTHON                  interpreter [python3]
HELP
}

dataset=wiki_only
case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
  '' | --*) ;;
  *)
    dataset=$1
    shift
    ;;
esac
case $dataset in
  wiki_only | wiki_books | books | squad | glue | corpus) ;;
  *)
    printf "error: there is no data set '%s': choose wiki_only, wiki_books, books, squad, glue or corpus (see --help)\n" \
      "$dataset" >&2
    exit 2
    ;;
esac
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/prepare.py" all "$dataset" "$@"
