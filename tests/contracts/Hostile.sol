// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.24;

/// A contract at a token's address that is no token: it says about every authorization what it was told to
/// say, and emits the logs it is told to emit.
contract Puppet {
    struct Log {
        bytes32[] topics;
        bytes data;
    }

    enum Answer {
        Bytes,
        Revert,
        BurnAllGas,
        TrueInOddBlocks,
        TrueInOddMinutes,
        Zeros
    }

    Answer private _how;
    bytes private _what;

    /// From now on every other call is answered like this.
    function say(Answer how, bytes calldata what) external {
        _how = how;
        _what = what;
    }

    function log(Log[] calldata logs) external {
        for (uint256 i = 0; i < logs.length; i++) {
            bytes32[] calldata topics = logs[i].topics;
            bytes memory data = logs[i].data;
            bytes32[4] memory t;
            for (uint256 j = 0; j < topics.length; j++) t[j] = topics[j];
            uint256 count = topics.length;
            assembly {
                let from := add(data, 32)
                let size := mload(data)
                switch count
                case 0 { log0(from, size) }
                case 1 { log1(from, size, mload(t)) }
                case 2 { log2(from, size, mload(t), mload(add(t, 32))) }
                case 3 { log3(from, size, mload(t), mload(add(t, 32)), mload(add(t, 64))) }
                default { log4(from, size, mload(t), mload(add(t, 32)), mload(add(t, 64)), mload(add(t, 96))) }
            }
        }
    }

    /// Its code is gone after the transaction that created it, and only then (EIP-6780).
    function destroy() external {
        selfdestruct(payable(msg.sender));
    }

    fallback(bytes calldata) external returns (bytes memory) {
        if (_how == Answer.Revert) {
            bytes memory what = _what;
            assembly {
                revert(add(what, 32), mload(what))
            }
        }
        if (_how == Answer.BurnAllGas) while (true) {}
        if (_how == Answer.TrueInOddBlocks) return abi.encode(block.number % 2 == 1);
        if (_how == Answer.TrueInOddMinutes) return abi.encode((block.timestamp / 60) % 2 == 1);
        if (_how == Answer.Zeros) return new bytes(abi.decode(_what, (uint256)));
        return _what;
    }
}

/// A payer that is a contract, and signs everything: it makes several calls in one transaction.
contract Wallet {
    struct Step {
        address target;
        bytes data;
    }

    function act(Step[] calldata steps) external {
        for (uint256 i = 0; i < steps.length; i++) {
            (bool success,) = steps[i].target.call(steps[i].data);
            require(success, "Wallet: call failed");
        }
    }

    /// A puppet that lives for one transaction, and emits these logs in it.
    function briefly(Puppet.Log[] calldata logs) external {
        Puppet puppet = new Puppet();
        puppet.log(logs);
        puppet.destroy();
    }

    function isValidSignature(bytes32, bytes calldata) external pure returns (bytes4) {
        return 0x1626ba7e;
    }
}
