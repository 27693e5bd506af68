//! I1: nothing that can sign is linked into the daemon.

use std::process::Command;

/// Crates that hold keys or sign. Test code signs; the daemon must not.
const SIGNERS: [&str; 6] =
    ["alloy-signer", "k256", "secp256k1", "ecdsa", "ethers-signers", "coins-bip32"];

#[test]
fn no_crate_that_signs_is_linked() {
    let tree = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none"])
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).expect("cargo prints UTF-8");
    let names: Vec<&str> = tree.lines().filter_map(|line| line.split_whitespace().next()).collect();
    // The listing is what it should be.
    assert!(names.contains(&"reconciled") && names.contains(&"alloy-primitives"), "{tree}");
    let signers: Vec<&str> = names
        .into_iter()
        .filter(|name| SIGNERS.iter().any(|signer| name.starts_with(signer)))
        .collect();
    assert_eq!(signers, [""; 0]);
}
