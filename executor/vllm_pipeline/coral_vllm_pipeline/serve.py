"""vLLM's server over a pipeline.

    python -m coral_vllm_pipeline.serve LAYOUT MODEL [options of vllm serve]

The head answers requests and schedules; it holds no layers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from . import PipelineError
from .layout import place_layout
from .version import answer_for_vllm


def engine_options(stages: int) -> dict[str, Any]:
    """What makes an engine a pipeline's."""
    from .executor import PipelineExecutor
    from .scheduler import PipelineScheduler

    return {
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": 1,
        "distributed_executor_backend": PipelineExecutor,
        "scheduler_cls": PipelineScheduler,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": True,  # one kind of KV, so that nodes count alike
    }


def main() -> None:
    """The server."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        layout = place_layout(sys.argv[1])
        answer_for_vllm()
    except PipelineError as error:
        sys.exit(str(error))
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm serve")
    subparsers = parser.add_subparsers()
    command = ServeSubcommand()
    command.subparser_init(subparsers)
    options = parser.parse_args(["serve", *sys.argv[2:]])
    for name, value in engine_options(len(layout.stages)).items():
        setattr(options, name, value)
    command.validate(options)
    command.cmd(options)


if __name__ == "__main__":
    main()
