"""The families of models: what their layers have, and the names of that in their files.

A family is a module that says what is different from Llama: in a config.json of the hub, and in the metadata of a GGUF
file. Both lead to a `ModelConfig`, and so to the same passes.
"""

from __future__ import annotations

from outrider.engine.checkpoints.families import gemma, granite, llama, mixtures, olmo, phi, qwen_hybrids, smollm3
from outrider.engine.checkpoints.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *gemma.FAMILIES,
    granite.FAMILY,
    *mixtures.FAMILIES,
    *olmo.FAMILIES,
    phi.FAMILY,
    *qwen_hybrids.FAMILIES,
    smollm3.FAMILY,
)
BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
