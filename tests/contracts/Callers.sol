// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.24;

/// The part of Multicall3's canonical interface that is used here.
contract Multicall3 {
    struct Call3 {
        address target;
        bool allowFailure;
        bytes callData;
    }

    struct Result {
        bool success;
        bytes returnData;
    }

    function aggregate3(Call3[] calldata calls) external payable returns (Result[] memory returnData) {
        returnData = new Result[](calls.length);
        for (uint256 i = 0; i < calls.length; i++) {
            (bool success, bytes memory data) = calls[i].target.call(calls[i].callData);
            require(success || calls[i].allowFailure, "Multicall3: call failed");
            returnData[i] = Result(success, data);
        }
    }

    function getBlockNumber() external view returns (uint256 blockNumber) {
        blockNumber = block.number;
    }

    function getCurrentBlockTimestamp() external view returns (uint256 timestamp) {
        timestamp = block.timestamp;
    }

    function getChainId() external view returns (uint256 chainid) {
        chainid = block.chainid;
    }
}

/// Sends several calls in one transaction, and puts a forged log between them: the right events, from a
/// contract that is not the token.
contract Batcher {
    event Transfer(address indexed from, address indexed to, uint256 value);
    event AuthorizationUsed(address indexed authorizer, bytes32 indexed nonce);

    function batch(address target, bytes[] calldata calls) external {
        for (uint256 i = 0; i < calls.length; i++) {
            (bool success,) = target.call(calls[i]);
            require(success, "Batcher: call failed");
        }
    }

    function forge(address authorizer, bytes32 nonce, address to, uint256 value) external {
        emit AuthorizationUsed(authorizer, nonce);
        emit Transfer(authorizer, to, value);
    }

    /// Makes a call that nobody finds in the calldata: every byte of it is inverted there.
    function obscured(address target, bytes calldata inverted) external {
        bytes memory call = inverted;
        for (uint256 i = 0; i < call.length; i++) {
            call[i] = ~call[i];
        }
        (bool success,) = target.call(call);
        require(success, "Batcher: call failed");
    }
}
