#!/usr/bin/env bash
# Creates what Dask needs for mutual TLS, in a folder that only its owner can read:
#
#   bash scripts/create_certificates.sh FOLDER
#   export DASK_CONFIG=FOLDER    # on all hosts of the cluster; they share the folder or have copies of it
#
# Whoever has the key can run programs on the cluster; all others are refused.
set -euo pipefail
# shellcheck source=scripts/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

(($# == 1)) && [[ $1 != -* ]] || fail 'expected one argument: the folder to create, ./-NAME if it begins with a dash'
[[ ! -e $1 ]] || fail "$1 exists: choose another folder, or remove it"
[[ $1 != *\'* ]] || fail "$1 has a quote: choose another folder"
umask 077
mkdir -p "$1"
folder=$(realpath "$1")
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 3650 -subj /CN=dask \
  -keyout "$folder/key.pem" -out "$folder/certificate.pem" 2>/dev/null || fail 'openssl req failed: is OpenSSL 3 installed?'
pair="{cert: '$folder/certificate.pem', key: '$folder/key.pem'}"
cat >"$folder/distributed.yaml" <<END
distributed:
  comm:
    require-encryption: true
    tls: {ca-file: '$folder/certificate.pem', client: $pair, scheduler: $pair, worker: $pair}
END
echo "export DASK_CONFIG='$folder'"
