"""Rank and world size of this process, from the environment variables of launchers such as
torchrun.
"""

import os
from dataclasses import dataclass

from bert_recipe.utils.errors import UserError


@dataclass
class RankEnvironment:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def read_environment() -> RankEnvironment:
    """Parses RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises UserError for a missing or
    impossible value.
    """
    world_size = _environment_int("WORLD_SIZE", 1, 1)
    if world_size == 1:
        return RankEnvironment()
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE is {world_size} and {', '.join(missing)} is not set: start the run with "
            "torchrun"
        )
    _environment_int("MASTER_PORT", 0, 0, 65535)
    # The names of torchrun and of DeepSpeed.
    local_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
    local_world_size = _environment_int(local_name, world_size, 1, world_size)
    return RankEnvironment(
        _environment_int("RANK", 0, 0, world_size - 1),
        world_size,
        _environment_int("LOCAL_RANK", 0, 0, local_world_size - 1),
        local_world_size,
    )


def _environment_int(name: str, default: int, minimum: int, maximum: int = 2**31) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and minimum <= int(text) <= maximum):
        raise UserError(
            f"{name} is {text!r}, not a number from {minimum} to {maximum}: start the run with "
            "torchrun"
        )
    return int(text)
