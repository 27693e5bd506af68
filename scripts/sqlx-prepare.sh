#!/usr/bin/env bash
# Writes the descriptions of every checked query into a folder (default: .sqlx), as the database at
# RECONCILED_TEST_POSTGRES describes them. Run it after a change to a query or a migration:
#
#     ./test.sh prepare
set -euo pipefail
cd "$(dirname "$0")/.."
: "${RECONCILED_TEST_POSTGRES:?is not set; run ./test.sh prepare}"

out=$(realpath -m "${1:-.sqlx}")
fresh=$(mktemp -d)
name="reconciled_prepare_$$"
server=${RECONCILED_TEST_POSTGRES%/*}
trap 'rm -rf "$fresh"; psql -q "$RECONCILED_TEST_POSTGRES" -c "DROP DATABASE IF EXISTS $name WITH (FORCE)"' EXIT

psql -q "$RECONCILED_TEST_POSTGRES" -c "CREATE DATABASE $name"
for migration in migrations/postgres/*.sql; do
    psql -q -v ON_ERROR_STOP=1 --single-transaction "$server/$name" -f "$migration"
done
# The macros describe only what is compiled anew; afterwards the file is as old as before, so that
# nothing else is.
touch -r src/lib.rs "$fresh/age"
touch src/lib.rs
SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$fresh DATABASE_URL="$server/$name" cargo check --quiet --lib
touch -r "$fresh/age" src/lib.rs
rm -rf "$out"
mkdir -p "$out"
cp "$fresh"/query-*.json "$out"/
