"""Names and layouts of the text model of Gemma 4, alone and inside the vision-language model."""

from __future__ import annotations

from ed_models.weights.rules import STANDARD, Rule, ignore, renamed, split, transpose

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
    # Published checkpoints contain unused tensors of layers that reuse keys and values.
    *(ignore(f"{{path}}.self_attn.{name}.weight") for name in ("k_proj", "v_proj", "k_norm")),
)
