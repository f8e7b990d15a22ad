"""The process of one stage of a campaign: its arguments are the stage, the settings as JSON, and a request
(``torch_mlc/runtime/stages``)."""

from __future__ import annotations

import importlib
import json
import sys

import torch

from torch_mlc.dynamo_backend.doctor.on_gpu import gpu_is_well
from torch_mlc.runtime.stages.child import serve

from .plan import Settings


def main(stage: str, settings: str, request: str) -> None:
    """Run the checks of a request."""
    given = Settings(**json.loads(settings))
    module = importlib.import_module(f"{__package__}.stages.{stage}")
    if not given.gpu:
        torch.set_num_threads(min(2, torch.get_num_threads()))
    serve(request, lambda name: module.check(given, name), gpu_is_well if given.gpu else lambda: True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
