// Compiles the contracts of this folder: node compile.js SOLC_FOLDER OUT_FOLDER
// Writes one JSON file per contract: {"bytecode": "0x…", "deployedBytecode": "0x…"}.
const fs = require("fs");
const path = require("path");

const [solcFolder, outFolder] = process.argv.slice(2);
if (!solcFolder || !outFolder) {
  console.error("usage: node compile.js SOLC_FOLDER OUT_FOLDER");
  process.exit(2);
}
const solc = require(path.resolve(solcFolder));

const sources = {};
for (const file of fs.readdirSync(__dirname).filter((name) => name.endsWith(".sol"))) {
  sources[file] = { content: fs.readFileSync(path.join(__dirname, file), "utf8") };
}
const input = {
  language: "Solidity",
  sources,
  settings: {
    evmVersion: "paris",
    optimizer: { enabled: true, runs: 200 },
    viaIR: true, // the nine arguments of EIP-3009 do not fit the old code generator's stack
    outputSelection: { "*": { "*": ["evm.bytecode.object", "evm.deployedBytecode.object"] } },
  },
};
const output = JSON.parse(solc.compile(JSON.stringify(input)));
const errors = (output.errors || []).filter((error) => error.severity === "error");
if (errors.length > 0) {
  for (const error of errors) console.error(error.formattedMessage);
  process.exit(1);
}
fs.mkdirSync(outFolder, { recursive: true });
for (const contracts of Object.values(output.contracts)) {
  for (const [name, contract] of Object.entries(contracts)) {
    const { bytecode, deployedBytecode } = contract.evm;
    const text = JSON.stringify({
      bytecode: "0x" + bytecode.object,
      deployedBytecode: "0x" + deployedBytecode.object,
    });
    fs.writeFileSync(path.join(outFolder, name + ".json"), text);
  }
}
