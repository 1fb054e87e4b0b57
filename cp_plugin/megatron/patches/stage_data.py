"""Data of packed documents on every pipeline stage.

Each stage needs the bounds of the documents, which its batch has. Unless for ``--sft``, Megatron's own scripts build
datasets for the first and the last stage only; a stage in between fails: ``'NoneType' object is not an iterator``.
"""

from __future__ import annotations

from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.patches.run import Run
from cp_plugin.megatron.rules.model import packed_by


def _needed(run: Run) -> bool:
    packed = run.args is not None and packed_by(run.args) and run.args.pipeline_model_parallel_size > 1
    return bool(packed) and (run.settings.active or cpu.active())


@wraps(
    "megatron.core.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
    "data of packed documents on every pipeline stage",
    "is_built_on_rank",
    called_by="the training script, which says on which ranks to build",
    otherwise="pipeline stages between the first and the last would have no data",
    when=_needed,
)
def replace_init(call: Call) -> None:
    """Replacement for ``BlendedMegatronDatasetBuilder.__init__``: build on the first tensor-parallel rank."""
    from megatron.core import parallel_state

    call.original(is_built_on_rank=lambda: parallel_state.get_tensor_model_parallel_rank() == 0)
