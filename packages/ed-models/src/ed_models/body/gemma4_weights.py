"""Names and layouts of the text model of Gemma 4, alone and inside the vision-language model."""

from __future__ import annotations

from ed_models.weights.rules import STANDARD, Rule, carry, renamed, split, transpose

#: Parts whose tensors published checkpoints contain for layers that reuse keys and values.
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")
#: Rules of the language model.
GEMMA4_TEXT = renamed(
    {"scale_of": "scale"},
    Rule("{path}.router.kernel", "{path}.router.proj.weight", transpose),
    Rule(
        ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
        "{path}.experts.gate_up_proj",
        split(-2),
    ),
    Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", transpose),
    *STANDARD,
    *(carry(f"{{path}}.self_attn.{name}.weight") for name in UNUSED),
)
