"""`ling3 quantize`: writes a checkpoint in 8 or 4 bits."""

import dataclasses
import sys
from typing import Literal

from ling3.cli.options import Command, Common, WholeNumber


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantize(Command):
    """Write a checkpoint with its matrices in 8 or 4 bits, in a published layout, tensor by tensor.

    ling3 quantize nano --to int4 --out nano-int4
    """

    common: Common
    to: Literal["int4", "int8", "fp8", "mxfp4"]
    """int4 and int8: compressed-tensors' pack-quantized; fp8: E4M3 with a scale for each 128 x 128 block; mxfp4: E2M1
    with an exponent for each 32 consecutive numbers of a row."""
    out: str
    """The directory for the new checkpoint; without --overwrite it must be empty or not exist."""
    overwrite: bool = False
    """Replace the checkpoint in the directory; files that are not part of it stay."""
    group: WholeNumber = None
    """With int4 and int8: consecutive numbers of a row that share a scale, 32, 64 or 128; by default 32."""
    keep: str = "lm_head"
    """Modules that stay as they are: comma-separated parts of their names, or patterns (re:...)."""
    mtp: bool = False
    """Keep the multi-token-prediction layers, and quantize them too."""


def run(command: Quantize) -> None:
    """Quantizes the checkpoint and writes the new one."""
    from ling3.checkpoint.quantizing import quantize

    keep = [name for name in command.keep.split(",") if name]
    revision = command.common.revision
    options = {"group": command.group, "keep": keep, "revision": revision, "overwrite": command.overwrite}
    quantize(command.model, command.out, command.to, mtp=command.mtp, **options)
    print(f"{command.out}: {command.model} in {command.to}", file=sys.stderr)
