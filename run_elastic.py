#!/usr/bin/env python3
"""Elastic launcher: runs a launch script on a changing set of nodes (docs/multi_node.md).

dask scheduler                                             # on a permanent host
python3 run_elastic.py node --scheduler tls://HOST:8786    # on each node
python3 run_elastic.py --scheduler tls://HOST:8786 --min-nodes 1 --max-nodes 4 -- bash scripts/run_pretraining.sh
"""

import argparse
import asyncio
import os
import re
import sys

from elastic.membership import ElasticConfig
from utils.command_line import ArgumentParser, bounded_float, non_negative_float, positive_int
from utils.errors import UserError, run_main

NODE = "run_elastic.py node --scheduler tls://HOST:8786"
DRIVER = "run_elastic.py --scheduler tls://HOST:8786 --min-nodes N --max-nodes N -- COMMAND"


def scheduler_address(text: str) -> str:
    match = re.fullmatch(r"(?:(tls|tcp)://)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", text)
    if not match or int(match[3]) > 65535:
        raise argparse.ArgumentTypeError(f"expected tls://HOST:PORT, not {text[:60]!a}")
    return f"{match[1] or 'tls'}://{match[2]}:{match[3]}"


def make_parser(is_node: bool) -> ArgumentParser:
    parser = ArgumentParser(usage=f"python3 {NODE if is_node else DRIVER}", description=__doc__.splitlines()[0])
    add, lease = parser.add_argument, bounded_float(5, 3600)
    add("--scheduler", type=scheduler_address, required=True, help="Dask's scheduler; without TLS: tcp://HOST:8786")
    if is_node:
        add("--address", help="where all others reach this node; by default its address towards the scheduler")
        return parser
    add("--min-nodes", type=positive_int, required=True, help="minimum number of nodes that train")
    add("--max-nodes", type=positive_int, required=True, help="maximum number; it fixes the global batch")
    add("--lease-seconds", type=lease, default=10.0, help="a node kills its processes if out of reach for this long")
    add("--settle-seconds", type=non_negative_float, default=5.0, help="time to wait for more nodes before a start")
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    place = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:place], argv[place + 1 :]
    if any(re.match(r"(--)?coordinator\b", word) for word in words):
        raise UserError(f"Dask's scheduler replaces the coordinator: use `dask scheduler`, `{NODE}` and `{DRIVER}`")
    if words[:1] == ["guard"]:  # a node starts it
        from elastic.guard import run_guarded

        return run_guarded(command, float(words[1]))
    is_node = words[:1] == ["node"]
    args = make_parser(is_node).parse_args(words[is_node:])
    if is_node and command:
        raise UserError(f"a node takes no command: give it to {DRIVER}")
    if is_node and "MAX_NODES" in os.environ:
        raise UserError("MAX_NODES is set, but --max-nodes of the driver decides: unset it")
    if not is_node and not command:
        raise UserError("there is no command: give it after --, such as -- bash scripts/run_pretraining.sh")
    if not is_node and args.min_nodes > args.max_nodes:
        raise UserError(f"--min-nodes {args.min_nodes} is above --max-nodes {args.max_nodes}: lower it")
    try:
        from elastic.connection import read_security
        from elastic.driver import Driver
        from elastic.node import Node
    except ModuleNotFoundError as error:
        raise UserError(f"elastic runs need Dask, and {error.name} is missing: pip install distributed") from error
    security = read_security(args.scheduler)
    if is_node:
        return asyncio.run(Node(args.scheduler, security, args.address).run())
    config = ElasticConfig(args.min_nodes, args.max_nodes, args.lease_seconds, args.settle_seconds)
    return asyncio.run(Driver(args.scheduler, security, config, command).run())


if __name__ == "__main__":
    run_main(main)
