// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.24;

interface IERC20 {
    function transferFrom(address from, address to, uint256 value) external returns (bool);
}

struct TokenPermissions {
    address token;
    uint256 amount;
}

struct PermitTransferFrom {
    TokenPermissions permitted;
    uint256 nonce;
    uint256 deadline;
}

/// What Permit2 does with signatures and unordered nonces, as far as a payment and its observer can tell:
/// one bit per nonce and owner, whatever the token; an inclusive deadline; no event about a use.
contract Permit2 {
    mapping(address => mapping(uint256 => uint256)) public nonceBitmap;

    event UnorderedNonceInvalidation(address indexed owner, uint256 word, uint256 mask);

    bytes32 private constant DOMAIN_TYPEHASH =
        keccak256("EIP712Domain(string name,uint256 chainId,address verifyingContract)");
    bytes32 private constant PERMISSIONS_TYPEHASH = keccak256("TokenPermissions(address token,uint256 amount)");
    string private constant PERMIT_TYPE =
        "PermitWitnessTransferFrom(TokenPermissions permitted,address spender,uint256 nonce,uint256 deadline,";

    function permitWitnessTransferFrom(
        PermitTransferFrom calldata permit,
        address to,
        uint256 amount,
        address owner,
        bytes32 witness,
        string calldata witnessType,
        bytes calldata signature
    ) external {
        require(block.timestamp <= permit.deadline, "permit is expired");
        require(amount <= permit.permitted.amount, "more than permitted");
        uint256 bit = 1 << (permit.nonce & 0xff);
        uint256 word = nonceBitmap[owner][permit.nonce >> 8];
        require(word & bit == 0, "nonce is used");
        nonceBitmap[owner][permit.nonce >> 8] = word | bit;
        bytes32 permitHash = keccak256(
            abi.encode(
                keccak256(abi.encodePacked(PERMIT_TYPE, witnessType)),
                keccak256(abi.encode(PERMISSIONS_TYPEHASH, permit.permitted.token, permit.permitted.amount)),
                msg.sender,
                permit.nonce,
                permit.deadline,
                witness
            )
        );
        require(recover(permitHash, signature) == owner, "signed by somebody else");
        IERC20(permit.permitted.token).transferFrom(owner, to, amount);
    }

    function invalidateUnorderedNonces(uint256 wordPos, uint256 mask) external {
        nonceBitmap[msg.sender][wordPos] |= mask;
        emit UnorderedNonceInvalidation(msg.sender, wordPos, mask);
    }

    function recover(bytes32 structHash, bytes calldata signature) private view returns (address) {
        require(signature.length == 65, "invalid signature length");
        bytes32 domain = keccak256(abi.encode(DOMAIN_TYPEHASH, keccak256("Permit2"), block.chainid, address(this)));
        bytes32 digest = keccak256(abi.encodePacked("\x19\x01", domain, structHash));
        bytes32 r = bytes32(signature[:32]);
        bytes32 s = bytes32(signature[32:64]);
        return ecrecover(digest, uint8(signature[64]), r, s);
    }
}

/// What both proxies of x402 have in common.
abstract contract X402Proxy {
    Permit2 internal constant PERMIT2 = Permit2(0x000000000022D473030F116dDEE9F6B43aC78BA3);

    struct EIP2612Permit {
        uint256 value;
        uint256 deadline;
        bytes32 r;
        bytes32 s;
        uint8 v;
    }

    event Settled();
    event SettledWithPermit();

    function pay(
        PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        address to,
        uint256 validAfter,
        bytes32 witness,
        string memory witnessType,
        bytes calldata signature
    ) internal {
        require(amount > 0, "nothing to settle");
        require(block.timestamp >= validAfter, "too early");
        PERMIT2.permitWitnessTransferFrom(permit, to, amount, owner, witness, witnessType, signature);
    }
}

contract ExactProxy is X402Proxy {
    string private constant TYPE =
        "Witness witness)TokenPermissions(address token,uint256 amount)Witness(address to,uint256 validAfter)";
    bytes32 private constant TYPEHASH = keccak256("Witness(address to,uint256 validAfter)");

    struct Witness {
        address to;
        uint256 validAfter;
    }

    function settle(
        PermitTransferFrom calldata permit,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        run(permit, owner, witness, signature);
        emit Settled();
    }

    /// The EIP-2612 permit is not needed here: the token lets Permit2 take what was signed for.
    function settleWithPermit(
        EIP2612Permit calldata,
        PermitTransferFrom calldata permit,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        run(permit, owner, witness, signature);
        emit SettledWithPermit();
    }

    function run(
        PermitTransferFrom calldata permit,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) private {
        bytes32 hash = keccak256(abi.encode(TYPEHASH, witness.to, witness.validAfter));
        pay(permit, permit.permitted.amount, owner, witness.to, witness.validAfter, hash, TYPE, signature);
    }
}

contract UptoProxy is X402Proxy {
    string private constant TYPE =
        "Witness witness)TokenPermissions(address token,uint256 amount)Witness(address to,address facilitator,uint256 validAfter)";
    bytes32 private constant TYPEHASH = keccak256("Witness(address to,address facilitator,uint256 validAfter)");

    struct Witness {
        address to;
        address facilitator;
        uint256 validAfter;
    }

    function settle(
        PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        run(permit, amount, owner, witness, signature);
        emit Settled();
    }

    function settleWithPermit(
        EIP2612Permit calldata,
        PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) external {
        run(permit, amount, owner, witness, signature);
        emit SettledWithPermit();
    }

    function run(
        PermitTransferFrom calldata permit,
        uint256 amount,
        address owner,
        Witness calldata witness,
        bytes calldata signature
    ) private {
        require(msg.sender == witness.facilitator, "another facilitator");
        bytes32 hash = keccak256(abi.encode(TYPEHASH, witness.to, witness.facilitator, witness.validAfter));
        pay(permit, amount, owner, witness.to, witness.validAfter, hash, TYPE, signature);
    }
}
