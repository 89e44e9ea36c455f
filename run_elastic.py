#!/usr/bin/env python3
"""Elastic launcher: runs a launch script on a changing set of nodes (docs/multi_node.md).

  dask scheduler                                             # on a permanent host
  python3 run_elastic.py node --scheduler tls://HOST:8786    # on each node
  python3 run_elastic.py --scheduler tls://HOST:8786 --min-nodes 1 --max-nodes 4 \\
      -- bash scripts/run_pretraining.sh
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which python3 -P leaves out

import argparse
import asyncio
import logging

from utils.command_line import (
    ArgumentParser,
    Arguments,
    bounded_float,
    non_negative_float,
    positive_int,
)
from utils.errors import run_main


def scheduler_address(text: str) -> str:
    """`text` with its protocol, TLS by default."""
    _, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise argparse.ArgumentTypeError(
            f"expected HOST:PORT with a port from 1 to 65535, not {text}"
        )
    return text if "://" in text else f"tls://{text}"


def parse_arguments(argv: list[str]) -> tuple[Arguments, list[str] | None]:
    """The flags, and the command that the driver runs on all nodes; None for a node."""
    place = argv.index("--") if "--" in argv else len(argv)
    words, command = argv[:place], argv[place + 1 :]
    is_node = words[:1] == ["node"]
    usage = (__doc__ or "").partition("\n\n")[2].rstrip()
    parser = ArgumentParser(
        usage=f"\n{usage}" if usage else None,
        description=(__doc__ or " ").splitlines()[0],
    )
    parser.add_argument(
        "--scheduler",
        type=scheduler_address,
        required=True,
        help="Dask's scheduler; without TLS: tcp://HOST:8786",
    )
    if is_node:
        parser.add_argument(
            "--address",
            help="where all others reach this node; by default its address towards the scheduler",
        )
        args = parser.parse_args(words[1:])
    else:
        add_driver_flags(parser)
        args = parser.parse_args(words)
    if is_node == bool(command):
        parser.error(
            "give the driver, and no node, a command after --, such as -- bash "
            "scripts/run_pretraining.sh"
        )
    if not is_node and args.min_nodes > args.max_nodes:
        parser.error(
            f"--min-nodes {args.min_nodes} is above --max-nodes {args.max_nodes}: lower it"
        )
    return args, None if is_node else command


def add_driver_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--min-nodes",
        type=positive_int,
        required=True,
        help="minimum number of nodes that train",
    )
    parser.add_argument(
        "--max-nodes",
        type=positive_int,
        required=True,
        help="maximum number; it fixes the global batch",
    )
    parser.add_argument(
        "--lease-seconds",
        type=bounded_float(5, 3600),
        default=10.0,
        help="a node out of reach kills its processes after this time",
    )
    parser.add_argument(
        "--settle-seconds",
        type=non_negative_float,
        default=5.0,
        help="time to wait for more nodes before a start",
    )


def main(argv: list[str] | None = None) -> int | None:
    args, command = parse_arguments(sys.argv[1:] if argv is None else argv)
    # Here, so that --help and errors of the command line do not wait for Dask.
    from elastic.sessions import Driver, NodeAgent

    logging.basicConfig(
        level="INFO", stream=sys.stdout, format="[%(asctime)s] elastic: %(message)s", datefmt="%X"
    )
    if command is None:
        return asyncio.run(NodeAgent().run(args.scheduler, args.address))
    limits = (args.min_nodes, args.max_nodes, args.lease_seconds, args.settle_seconds)
    return asyncio.run(Driver(args.scheduler, command, *limits).run())


if __name__ == "__main__":
    run_main(main)
