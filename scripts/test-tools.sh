#!/bin/sh
# Brings what the tests of the chain reader stand on: anvil, a local EVM chain, and the compiled contracts.
# Installs into .tools/ (git-ignored) with npm, and does nothing that is done already.
#
#   eval "$(scripts/test-tools.sh)"     sets RECONCILED_TEST_ANVIL and RECONCILED_TEST_CONTRACTS
set -eu

ANVIL_VERSION=1.7.1
SOLC_VERSION=0.8.30

root=$(cd "$(dirname "$0")/.." && pwd)
tools="$root/.tools"
contracts="$tools/contracts"
mkdir -p "$tools"

# --ignore-scripts: the packages carry their binaries; nothing of theirs need run to install them.
stamp="$tools/installed-$ANVIL_VERSION-$SOLC_VERSION"
if [ ! -e "$stamp" ]; then
    command -v npm >/dev/null || { echo "test-tools: npm is needed (Node.js 18 or newer)" >&2; exit 2; }
    npm install --prefix "$tools" --no-audit --no-fund --no-save --ignore-scripts --loglevel=error \
        "@foundry-rs/anvil@$ANVIL_VERSION" "solc@$SOLC_VERSION" >&2
    touch "$stamp"
fi

anvil=
for candidate in "$tools"/node_modules/@foundry-rs/anvil-*/bin/anvil; do
    if [ -x "$candidate" ]; then anvil=$candidate; fi
done
[ -n "$anvil" ] || { echo "test-tools: no anvil binary for this platform in $tools" >&2; exit 2; }

# Compiled again when a source changed.
sources=$(cat "$root"/tests/contracts/*.sol "$root"/tests/contracts/compile.js | cksum | tr ' ' -)
if [ ! -e "$contracts/compiled-$sources-$SOLC_VERSION" ]; then
    rm -rf "$contracts"
    node "$root/tests/contracts/compile.js" "$tools/node_modules/solc" "$contracts" >&2
    touch "$contracts/compiled-$sources-$SOLC_VERSION"
fi

# Quoted for eval.
quote() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }
echo "export RECONCILED_TEST_ANVIL=$(quote "$anvil")"
echo "export RECONCILED_TEST_CONTRACTS=$(quote "$contracts")"
