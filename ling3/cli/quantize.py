"""`ling3 quantize`: a checkpoint in 8 or 4 bits."""

import dataclasses
import sys
from typing import Literal

from ling3.cli.options import Command, Common, WholeNumber

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize(Command):
    """Write a checkpoint with its matrices in 8 or 4 bits, in a published layout, one tensor after the other.

    ling3 quantize nano --to int4 --out nano-int4
    """

    common: Common
    to: Literal["int4", "int8", "fp8", "mxfp4"]
    """int4 and int8: compressed-tensors' pack-quantized; fp8: E4M3 with a scale for each 128 x 128 block; mxfp4: E2M1
    with an exponent for 32 neighbours in a row."""
    out: str
    """The directory for the new checkpoint; it must be empty, or not there, without --overwrite."""
    overwrite: bool = False
    """Replace the checkpoint that is in the directory; files that are none of its own stay."""
    group: WholeNumber = None
    """Of int4 and int8: neighbours in a row that share a scale, 32 or 128; 32 without it."""
    keep: str = "lm_head"
    """Modules that stay as they are, by parts of their names or patterns (re:...), with commas between them."""


def run(command: Quantize) -> None:
    """Quantizes the checkpoint and writes the new one."""
    from ling3.checkpoint.quantizing import quantize

    keep = [name for name in command.keep.split(",") if name]
    revision = command.common.revision
    options = {"group": command.group, "keep": keep, "revision": revision, "overwrite": command.overwrite}
    quantize(command.model, command.out, command.to, **options)
    print(f"{command.out}: {command.model} in {command.to}", file=sys.stderr)
