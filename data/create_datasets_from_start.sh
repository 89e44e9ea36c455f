#!/usr/bin/env bash
# Downloads, formats, shards and turns a data set into HDF5 shards, with the defaults of data/prepare.py; run again after
# any stop, it goes on.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash data/create_datasets_from_start.sh [DATASET] [PATH ...] [OPTION ...]

DATASET
  wiki_only      English Wikipedia (--language for another one)             [default]
  wiki_books     Wikipedia and books: --books FOLDER, or --books FILE with an address on each line
  books          books in .txt under PATH, or from the addresses in --books FILE
  squad          SQuAD v1.1 and v2.0
  corpus PATH    any .txt, .txt.gz, .jsonl, .jsonl.gz, .parquet files, or folders of them

Any OPTION of `python3 data/prepare.py all --help` may follow, --dry-run and --output-dir among them.
PYTHON names the interpreter (python3).
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
  wiki_only | wiki_books | books | squad | corpus) ;;
  *)
    printf "error: there is no data set '%s': choose wiki_only, wiki_books, books, squad or corpus (see --help)\n" \
      "$dataset" >&2
    exit 2
    ;;
esac
exec "${PYTHON:-python3}" "$(dirname -- "${BASH_SOURCE[0]}")/prepare.py" all "$dataset" "$@"
