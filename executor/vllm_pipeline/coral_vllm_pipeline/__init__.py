"""vLLM pipelines over unequal nodes.

Stages may have different tensor parallel sizes, and several nodes: a request is computed by one
node of every stage, the same ones from its first token to its last. vLLM's scheduler, models and
runners are used as they are; this package brings an executor (executor.py), workers (worker.py),
the pools of KV blocks of every node (pools.py) and what carries hidden states (wire.py).
"""


class PipelineError(Exception):
    """A pipeline that can't be run here, or whose node is lost."""
