#!/usr/bin/env bash
# Brings what the tests stand on, runs them, and stops it again.
#
#     ./test.sh                  everything
#     ./test.sh test ARGS…       only `cargo test ARGS…`
#     ./test.sh prepare          writes .sqlx anew
#     ./test.sh check-sqlx       whether .sqlx is what `prepare` would write
#     ./test.sh run COMMAND…     any command, with the servers running
#
# Whatever is random goes by one seed, the same every time, so that a failure is about the change at hand.
# RECONCILED_TEST_SEED=N plays another.
set -euo pipefail
cd "$(dirname "$0")"

export RECONCILED_TEST_SEED=${RECONCILED_TEST_SEED:-4240147534}
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$RECONCILED_TEST_SEED}

work=$(mktemp -d)
postgres_bin=
cleanup() {
    postgres_stop
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# ---- PostgreSQL: a private cluster on a free loopback port

# Where initdb and pg_ctl are: on the path, or in Debian's versioned folders, the newest first.
postgres_find() {
    local dir
    for dir in $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -rV); do
        [ -x "$dir/initdb" ] && postgres_bin=$dir && return
    done
    dir=$(command -v initdb) && postgres_bin=$(dirname "$(realpath "$dir")")
}

# initdb and pg_ctl refuse to run as root.
as_postgres() {
    if [ "$(id -u)" = 0 ]; then
        runuser -u postgres -- "$@"
    else
        "$@"
    fi
}

# A loopback port that nobody listens on, below those the kernel gives to outgoing connections.
free_port() {
    local port
    while port=$((RANDOM % 12000 + 20000)); do
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || break
    done
    echo "$port"
}

postgres_start() {
    if ! postgres_find; then
        if [ "$(id -u)" != 0 ]; then
            echo "test.sh: PostgreSQL is not installed (initdb was not found)" >&2
            exit 2
        fi
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >/dev/null
        postgres_find
    fi
    local dir=$work/postgres port attempt
    mkdir "$dir"
    if [ "$(id -u)" = 0 ]; then
        chmod 711 "$work"
        chown postgres "$dir"
    fi
    as_postgres "$postgres_bin/initdb" -D "$dir/data" -U postgres -A trust -E UTF8 --no-sync >/dev/null
    # Somebody may take the port between the question and the start: then ask again.
    for attempt in 1 2 3; do
        port=$(free_port)
        if as_postgres "$postgres_bin/pg_ctl" -D "$dir/data" -l "$dir/log" -w -s -o "-p $port \
            -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=200 \
            -c fsync=off -c synchronous_commit=off -c full_page_writes=off" start; then
            export RECONCILED_TEST_POSTGRES=postgres://postgres@127.0.0.1:$port/postgres
            return
        fi
        echo "test.sh: PostgreSQL did not start on port $port (attempt $attempt)" >&2
    done
    cat "$dir/log" >&2
    exit 1
}

postgres_stop() {
    if [ -f "$work/postgres/data/postmaster.pid" ]; then
        as_postgres "$postgres_bin/pg_ctl" -D "$work/postgres/data" -m immediate -s stop || true
    fi
}

# ---- anvil and the compiled contracts

chain_tools() {
    local exports
    exports=$(scripts/test-tools.sh)
    eval "$exports"
}

# ---- What is run

# The committed descriptions of the checked queries are those of the migrations as they are.
check_sqlx() {
    scripts/sqlx-prepare.sh "$work/sqlx"
    if ! diff -r .sqlx "$work/sqlx" >&2; then
        echo "test.sh: .sqlx is out of date; run ./test.sh prepare and commit it" >&2
        return 1
    fi
}

step() {
    printf '\n== %s\n' "$*"
    "$@"
}

main() {
    echo "RECONCILED_TEST_SEED=$RECONCILED_TEST_SEED" >&2
    local mode=${1:-all}
    [ $# -gt 0 ] && shift
    case $mode in
    all)
        chain_tools
        postgres_start
        step check_sqlx
        step cargo clippy --all-targets -- -D warnings
        step cargo test
        step cargo run --quiet -- drill --store sqlite
        step cargo run --quiet -- drill --store postgres --postgres "$RECONCILED_TEST_POSTGRES"
        ;;
    test)
        chain_tools
        postgres_start
        cargo test "$@"
        ;;
    prepare)
        postgres_start
        scripts/sqlx-prepare.sh
        ;;
    check-sqlx)
        postgres_start
        check_sqlx
        ;;
    run)
        chain_tools
        postgres_start
        "$@"
        ;;
    *)
        echo "usage: ./test.sh [all | test ARGS… | prepare | check-sqlx | run COMMAND…]" >&2
        exit 2
        ;;
    esac
}
main "$@"
