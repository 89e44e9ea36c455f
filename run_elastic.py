#!/usr/bin/env python3
"""Runs a launch script on nodes that come and go (docs/elastic.md).

    python3 run_elastic.py coordinator --min-nodes 1 --max-nodes 4             # on a host that stays
    python3 run_elastic.py node --coordinator HOST:29400 -- bash scripts/run_pretraining.sh ...   # on each node

It needs Python, and no packages.
"""

import re
import sys

from elastic.agent import Agent
from elastic.coordinator import Coordinator, open_server
from elastic.membership import ElasticConfig
from utils.command_line import ArgumentParser, Arguments, bounded_float, bounded_int, non_negative_float, positive_int
from utils.errors import run_main

PORT = 29400


def parse_arguments(argv: list[str]) -> tuple[Arguments, list[str]]:
    """The arguments, and the command after `--`."""
    words, command = argv, []
    if "--" in argv:
        place = argv.index("--")
        words, command = argv[:place], argv[place + 1 :]
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    roles = parser.add_subparsers(dest="role", required=True, metavar="coordinator|node")
    coordinator = roles.add_parser("coordinator", help="decides which nodes train together")
    coordinator.add_argument("--min-nodes", type=positive_int, required=True, help="minimum number of nodes that train")
    coordinator.add_argument(
        "--max-nodes",
        type=positive_int,
        required=True,
        help="maximum number of nodes that train; it fixes the global batch",
    )
    coordinator.add_argument("--host", default="0.0.0.0", help="address to listen on")  # noqa: S104
    coordinator.add_argument("--port", type=bounded_int(1, 65535), default=PORT, help="port to listen on")
    coordinator.add_argument(
        "--lease-seconds",
        type=bounded_float(5, 3600),
        default=ElasticConfig.lease_seconds,
        help="a node that cannot be reached for this long kills its processes, and the others go on",
    )
    coordinator.add_argument(
        "--settle-seconds",
        type=non_negative_float,
        default=ElasticConfig.settle_seconds,
        help="time to wait for more than --min-nodes before a start; nodes that come later wait four times as long",
    )
    node = roles.add_parser(
        "node",
        usage="%(prog)s --coordinator HOST:PORT -- COMMAND [ARGUMENT ...]",
        help="runs the command when the coordinator says so",
    )
    node.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="where the coordinator listens")
    node.add_argument(
        "--address", help="where the other nodes reach this one; by default its address towards the coordinator"
    )
    args = parser.parse_args(words)
    if args.role == "coordinator":
        if command:
            coordinator.error("the coordinator runs no command: leave out what is after --")
        if args.min_nodes > args.max_nodes:
            coordinator.error(f"--min-nodes {args.min_nodes} is above --max-nodes {args.max_nodes}: lower it")
    else:
        if not command:
            node.error("there is no command: give it after --, such as -- bash scripts/run_pretraining.sh")
        if not re.fullmatch(r"[^:]+:[0-9]{1,5}", args.coordinator):
            node.error(f"--coordinator is {args.coordinator!r}: expected HOST:PORT")
    return args, command


def main(argv: list[str] | None = None) -> int:
    args, command = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.role == "node":
        host, _, port = args.coordinator.rpartition(":")
        return Agent((host, int(port)), command, args.address).run()
    config = ElasticConfig(args.min_nodes, args.max_nodes, args.lease_seconds, args.settle_seconds)
    with open_server(args.host, args.port) as server:
        return Coordinator(server, config).serve()


if __name__ == "__main__":
    run_main(main)
